"""Every example of docs/extend.md runs, from outside of the package and by its dotted path.

To add the section of a kind: write `## Kind` into the page, with its files as blocks of Python that
begin with `# name_of_file.py`; take the kind out of `MISSING`; and add a test here whose name
begins with `test_kind_` (in lower case), which names the example by its path `name_of_file:NAME`
where a user would, in a keyword, a flag or a key. The fixture `examples` makes the files
importable, and gives the directory that they are in.
"""

import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Protocol

import pytest

from specjax import interfaces
from train import data, data_report
from train.data_config import DataConfig
from train.scoring import Scorer

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
FILES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.M | re.S))

# Kinds whose section has not been written yet.
MISSING = {"Family", "Mixer", "Mlp", "Draft", "Weight", "Reader", "Backend", "Objective"}


def kinds() -> set[str]:
    """The protocols, and rewards, which are plain functions."""
    found = inspect.getmembers(interfaces, inspect.isclass)
    return {"Reward"} | {name for name, cls in found if Protocol in cls.__bases__}


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """The directory with the page's files, which can be imported."""
    directory = tmp_path_factory.mktemp("outside")
    assert ROOT not in directory.resolve().parents
    for name, text in FILES.items():
        (directory / name).write_text(f"# {name}\n{text}", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        importlib.invalidate_caches()
        yield directory
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_every_protocol_has_a_section_with_a_file_and_a_test():
    assert SECTIONS.keys() | MISSING == kinds() and not SECTIONS.keys() & MISSING
    tests = [name for name in globals() if name.startswith("test_")]
    for kind, text in SECTIONS.items():
        assert re.search(r"^```python\n# \w+\.py\n", text, re.M), f"{kind} has no example"
        assert any(t.startswith(f"test_{kind.lower()}_") for t in tests), f"{kind} has no test"


def test_every_file_of_the_page_is_a_block_of_its_own_and_is_run():
    blocks = re.findall(r"^```python$", PAGE, re.M)
    assert len(blocks) == len(FILES)  # each begins with its name, and no name is there twice
    source = Path(__file__).read_text(encoding="utf-8")
    for name in FILES:
        assert f"{name.removesuffix('.py')}:" in source, f"no test names what is in {name}"


# --- tasks and rewards ----------------------------------------------------------------------------

RIDDLES = [{"riddle": f"{n}, spelt out?", "word": "four", "hint": "even"} for n in range(40)]


def test_task_of_ones_own_reads_the_rows_of_a_file(examples, thin_policy, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in RIDDLES))
    data_report.main([str(path), "--model", str(thin_policy), "task=my_task:TASK"])
    said = capsys.readouterr().out
    assert "40 rows read as riddles (riddle, word)" in said and "reward exact" in said
    assert "gold answer 'four'" in said and "Riddle: 1, spelt out?\nWord:" in said


def test_reward_of_ones_own_sees_the_columns_of_the_row(examples, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in RIDDLES))
    problem = data.problems(DataConfig(path=str(path), task="my_task:TASK"), "train")[0]
    scorer = Scorer("my_reward:reward")
    scorer.check(problem)
    earned = [scorer(text, problem).value for text in (" four ", "an even one", "five")]
    assert earned == [1, 0.5, 0] and scorer.failures == 0
