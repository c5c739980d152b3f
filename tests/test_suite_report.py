"""The last lines of a test run say what was compiled, what was left out, and how long it took."""

import types
from pathlib import Path

import jax
import pytest
from with_newest_jax import FILES, files

TESTS = Path(__file__).parent


@pytest.fixture
def conftest(request):
    """The module, as pytest knows it: several folders have one of this name."""
    return request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))


def test_the_report_tells_compiled_programs_from_those_of_the_cache(conftest):
    line = conftest.report_line({"asked": 1500, "cached": 300, "seconds": 90.0}, 480.0)
    assert line.startswith("1,200 programs compiled and 300 read from the cache in 1.5 min")
    assert line.endswith("the suite took 8.0 min")


def test_every_process_adds_to_the_report(conftest, monkeypatch):
    monkeypatch.setattr(conftest, "_totals", {"asked": 1, "cached": 1, "seconds": 0.5})
    monkeypatch.setattr(conftest, "_left_out", {"tests": 0})

    class Node:
        workeroutput = {
            "programs": {"asked": 4, "cached": 2, "seconds": 1.0}, "left_out": {"tests": 9}
        }  # fmt: skip

    conftest.pytest_testnodedown(Node(), None)
    conftest.pytest_testnodedown(object(), None)  # a worker that died has sent nothing
    assert conftest._totals == {"asked": 5, "cached": 3, "seconds": 1.5}
    assert conftest._left_out == {"tests": 9}


def test_what_jax_says_of_a_program_is_counted(conftest, monkeypatch):
    counts = {"asked": 0, "cached": 0, "seconds": 0.0}
    monkeypatch.setattr(conftest, "_programs", counts)
    jax.jit(lambda x: x * 3 + 1).lower(1.5).compile()
    assert counts["asked"] == 1 and counts["seconds"] > 0 and counts["cached"] in (0, 1)


def test_files_that_run_with_the_newest_jax_exist_and_stand_there_once():
    names = [name for names in FILES.values() for name in names.split()]
    assert len(names) == len(set(names)) == len(files()) > 20
    assert [name for name in names if not (TESTS / f"{name}.py").is_file()] == []
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert {
        "decode",
        "drafts",
        "engine",
        "kernels",
        "models",
        "parallel",
        "serve",
        "train",
    } <= folders


def test_other_tests_are_left_out_and_counted(conftest, monkeypatch):
    monkeypatch.setattr(conftest, "_left_out", {"tests": 0})
    gone, stays = [
        types.SimpleNamespace(path=TESTS / name)
        for name in ("train/test_tasks.py", "train/test_rl.py")
    ]
    told = []
    hook = types.SimpleNamespace(pytest_deselected=lambda items: told.extend(items))
    items = [gone, stays]
    conftest.leave_out(types.SimpleNamespace(hook=hook), items)
    assert items == [stays] and told == [gone]
    assert conftest._left_out == {"tests": 1}
