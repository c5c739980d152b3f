"""The last lines of a test run say what was compiled and how long everything took."""

from pathlib import Path

import jax
import pytest


@pytest.fixture
def conftest(request):
    """The module, as pytest knows it: several folders have one of this name."""
    path = Path(__file__).with_name("conftest.py")
    return request.config.pluginmanager.get_plugin(str(path))


def test_the_report_tells_compiled_programs_from_those_of_the_cache(conftest):
    line = conftest.report_line({"asked": 1500, "cached": 300, "seconds": 90.0}, 480.0)
    assert line.startswith("1,200 programs compiled and 300 read from the cache in 1.5 min")
    assert line.endswith("the suite took 8.0 min")


def test_every_process_adds_to_the_report(conftest, monkeypatch):
    monkeypatch.setattr(conftest, "_totals", {"asked": 1, "cached": 1, "seconds": 0.5})

    class Node:
        workeroutput = {"programs": {"asked": 4, "cached": 2, "seconds": 1.0}}

    conftest.pytest_testnodedown(Node(), None)
    conftest.pytest_testnodedown(object(), None)  # a worker that died has sent nothing
    assert conftest._totals == {"asked": 5, "cached": 3, "seconds": 1.5}


def test_what_jax_says_of_a_program_is_counted(conftest, monkeypatch):
    counts = {"asked": 0, "cached": 0, "seconds": 0.0}
    monkeypatch.setattr(conftest, "_programs", counts)
    jax.jit(lambda x: x * 3 + 1).lower(1.5).compile()
    assert counts["asked"] == 1 and counts["seconds"] > 0 and counts["cached"] in (0, 1)
