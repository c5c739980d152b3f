"""Directories, lists and patterns of files, folders of `datasets.save_to_disk`, columns by name."""

import gzip
import json
import sys
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from specjax.command_line import parse_config
from train.data import rows as data
from train.data.checks import describe_data
from train.rewards.scoring import Scorer
from train.schema import DataConfig, RLConfig, SFTConfig

PROBLEMS = [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(40)]
HELD = {"problem": "Which number is even?", "answer": "2"}


def lines(rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(rows) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def arrow(rows, new=pyarrow.ipc.new_stream) -> bytes:
    """Several record batches, as `datasets` writes them."""
    sink, table = pyarrow.BufferOutputStream(), pyarrow.Table.from_pylist(rows)
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return sink.getvalue().to_pybytes()


def saved_to_disk(folder, rows, shards=2, **state):
    """What `datasets.save_to_disk` writes; `datasets` itself is not needed to read it."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    size = -(-len(rows) // shards)
    for i, name in enumerate(names):
        (folder / name).write_bytes(arrow(rows[i * size : (i + 1) * size]))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": None, **state}))
    return folder


@pytest.fixture
def folder(tmp_path):
    """The problems in four files, among others; their order is that of the names."""
    path = tmp_path / "rows"
    (path / "more").mkdir(parents=True)
    (path / "b.jsonl").write_bytes(lines(PROBLEMS[10:20]))
    (path / "a.parquet").write_bytes(parquet(PROBLEMS[:10]))
    (path / "c.json.gz").write_bytes(gzip.compress(json.dumps(PROBLEMS[20:30]).encode()))
    (path / "d.arrow").write_bytes(arrow(PROBLEMS[30:], pyarrow.ipc.new_file))
    for name in ("README.md", ".hidden.jsonl", "dataset_infos.json", "more/e.jsonl"):
        (path / name).write_text("no rows")
    return path


@pytest.fixture
def held(tmp_path):
    path = tmp_path / "held.jsonl"
    path.write_bytes(lines([HELD]))
    return path


def of_settings(program, *settings):
    return parse_config(program, [f"data.{setting}" for setting in settings])[0].data


def prompts_of(cfg, split="train"):
    return [problem.prompt for problem in data.problems(cfg, split, chat=True)]


EVERY = [row["problem"] for row in PROBLEMS]


def test_a_directory_is_all_of_its_files_in_the_order_of_their_names(folder, held):
    cfg = of_settings(RLConfig, f"path={folder}", f"heldout_path={held}")
    assert prompts_of(cfg) == EVERY and prompts_of(cfg, "heldout") == [HELD["problem"]]


def test_a_pattern_is_its_matches(folder, held):
    cfg = of_settings(RLConfig, f"path={folder / '[bc].json*'}", f"heldout_path={held}")
    assert prompts_of(cfg) == EVERY[10:30]
    with pytest.raises(ValueError, match="no file matches the pattern"):
        data.problems(DataConfig(path=str(folder / "x*")), "train")


def test_a_folder_of_save_to_disk_is_read_without_datasets(tmp_path, held, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it fails
    folder = saved_to_disk(tmp_path / "saved", PROBLEMS, 3)
    (folder / "cache-1234.arrow").write_bytes(arrow([HELD]))  # what `datasets` leaves beside it
    cfg = of_settings(RLConfig, f"path={folder}", f"heldout_path={held}")
    assert prompts_of(cfg) == EVERY


def described(cfg) -> str:
    return describe_data(SimpleNamespace(cfg=cfg, chat=False, date=None), None)


def test_rows_of_several_files_are_duplicates_of_each_other(folder):
    (folder / "z.jsonl").write_bytes(lines(PROBLEMS[:4]))
    kept = DataConfig(path=str(folder))
    said = described(kept)
    assert "44 rows" in said and "4 duplicates kept (data.duplicates)" in said
    dropped = DataConfig(path=str(folder), duplicates="drop")
    assert "40 rows" in described(dropped)


# --- columns by name -----------------------------------------------------------------------------

ROW = {
    "instruction": "How much is 3+4?", "label": {"value": "so\n#### 7", "kind": "int"},
    "answer": "unused", "level": 3,
}  # fmt: skip


def test_prompt_and_answer_are_in_the_columns_that_are_named(tmp_path, held):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines([ROW]))
    held.write_bytes(lines([ROW | {"instruction": "How much is 1+6?"}]))
    files = f"path={path}", f"heldout_path={held}"
    for program in (RLConfig, SFTConfig):
        cfg = of_settings(program, *files, "prompt_key=instruction", "answer_key=label.value")
        (problem,) = data.problems(cfg, "train", chat=True)
        assert (problem.prompt, problem.answer) == (ROW["instruction"], "7")
        assert prompts_of(cfg, "heldout") == ["How much is 1+6?"]
    scorer = Scorer("own:reward", lambda completion, answer, label, level: level + (answer == "7"))
    scorer.check(problem)
    assert scorer("", problem).value == 4, "a reward sees the answer, and the other columns"
    cfg = of_settings(RLConfig, *files, "prompt_key=instruction", "answer_key=label")
    (problem,) = data.problems(cfg, "train", chat=True)
    assert problem.answer == "" and "column 'label': expected an answer" in problem.unread.why
    keeps = Scorer("own:reward", lambda completion, answer: float(answer == ROW["label"]))
    assert keeps("", problem).value == 1, "what is no gold answer is given as it is"
    with pytest.raises(ValueError, match="cannot tell what its rows mean.* data.prompt_key"):
        data.problems(of_settings(RLConfig, *files), "train")


def test_named_columns_can_be_imitated(tmp_path, held):
    path = tmp_path / "rows.jsonl"
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "it is 5"}]
    row = {"instruction": "Say it.", "talk": talk, "out": "So #### 4", "gold": "5"}
    path.write_bytes(lines([row]))
    other = [{**talk[0], "content": "No?"}, talk[1]]
    held.write_bytes(lines([row | {"instruction": "No?", "talk": other}]))
    for keys, prompt, response, gold in (
        (("prompt_key=instruction", "answer_key=out"), "Say it.", "So #### 4", "4"),
        (("prompt_key=talk", "answer_key=gold"), tuple(talk[:1]), "it is 5", "5"),
        (("prompt_key=talk",), tuple(talk[:1]), "it is 5", ""),
    ):
        cfg = of_settings(SFTConfig, f"path={path}", f"heldout_path={held}", *keys)
        (problem,) = data.problems(cfg, "train", chat=True)
        assert (problem.prompt, problem.answer) == (prompt, gold)
        (shown,) = data.demonstrations(cfg, "train", chat=True)
        assert (shown.prompt, shown.response) == (prompt, response)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["prompt_key=nothing"], r"rows.jsonl:1: expected a column 'nothing' \(data.prompt_key\)"),
        (["answer_key=label.no"], r"expected a column 'label.no' \(data.answer_key\)"),
    ],
)
def test_a_row_without_the_named_column_is_named(tmp_path, settings, said):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines([ROW | {"prompt": "How?"}]))
    with pytest.raises(ValueError, match=said):
        data.problems(of_settings(RLConfig, f"path={path}", *settings), "train")
