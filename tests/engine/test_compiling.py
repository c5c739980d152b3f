"""What is said of compiling that takes its time, and that failures leave nothing running."""

import queue
import threading
import time
import types

import jax
import numpy as np
import pytest
from tiny import tiny_config

from specjax.config import SpecConfig, Strategy
from specjax.decode.chunk import Until
from specjax.decode.options import Features
from specjax.decode.state import RowMap
from specjax.decode.tree import common_strategy
from specjax.drafts.mtp import init_head_params
from specjax.engine import compiling
from specjax.engine.compiling import (
    CompilePool,
    CompileProgress,
    announce_if_slow,
    described,
    no_messages,
)
from specjax.engine.runner import Runner
from specjax.models.layers import Block
from specjax.models.transformer import init_params


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(compiling, "SILENT_SECONDS", 5.0)
    monkeypatch.setattr(compiling, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_what_is_quick_is_not_announced_and_what_is_slow_is_now_and_then(clock):
    said = []
    progress = CompileProgress(said.append)
    for clock[0], done in ((0, 0), (1, 1), (2, 2)):
        progress(done, 2)
    assert said == []
    for seconds, done in ((0, 0), (4, 0), (6, 0), (8, 1), (17, 1), (18, 2), (30, 3)):
        clock[0] = 100 + seconds
        progress(done, 3)
    assert said == [
        "compiling: 0 of 3 programs are ready after 6 s",
        "compiling: 1 of 3 programs are ready after 17 s",
        "compiling: 3 of 3 programs are ready after 30 s",
    ]


def test_a_server_always_says_when_it_is_done(clock):
    said = []
    progress = CompileProgress(said.append, silent=0)
    for clock[0], done in ((0, 0), (1, 1), (2, 2)):
        progress(done, 2)
    assert said == ["compiling: 2 of 2 programs are ready after 2 s"]


def test_by_default_it_is_a_warning_which_shows_without_a_log(clock, caplog):
    progress = CompileProgress()
    for clock[0] in (0, 7):
        progress(0, 2)
    with no_messages():
        clock[0] = 60
        progress(1, 2)
    [record] = caplog.records
    assert (record.levelname, record.message) == (
        "WARNING", "compiling: 0 of 2 programs are ready after 7 s",
    )  # fmt: skip


def test_one_program_that_a_request_needs_is_named_while_it_compiles(monkeypatch):
    said = queue.Queue()
    monkeypatch.setattr(compiling, "SILENT_SECONDS", 0.01)
    with announce_if_slow("strategy 4_1_5 for a batch of 8", said.put):
        line = said.get(timeout=60)
    assert line.startswith("compiling strategy 4_1_5 for a batch of 8 takes more than")
    monkeypatch.setattr(compiling, "SILENT_SECONDS", 1.0)
    with announce_if_slow("something quick", said.put):
        pass
    time.sleep(1.2)
    assert said.empty()


def test_who_watches_a_pool_is_called_though_nothing_is_new(monkeypatch):
    monkeypatch.setattr(compiling, "POLL_SECONDS", 0.01)
    calls, kept = [], []

    def on_built(count):
        calls.append(count)
        if calls.count(0) == 3:
            enough.set()

    enough = threading.Event()
    with CompilePool(2, on_built) as pool:
        pool.submit(lambda: enough.wait(60), kept.append)
        pool.finish()
    assert kept == [True] and calls.count(0) >= 3 and calls.count(1) == 1


def test_programs_begin_in_order_and_none_begins_after_a_failure():
    begun, release = [], threading.Event()

    def build(name):
        begun.append(name)
        release.wait(60)
        if name == "b":
            raise RuntimeError("no memory for b")
        return name

    kept = []
    with pytest.raises(RuntimeError, match="no memory for b"):
        with CompilePool(1, lambda count: None) as pool:
            for name in "abc":
                pool.submit(lambda name=name: build(name), kept.append)
            release.set()
            pool.finish()
            pytest.fail("it should have raised")
    assert begun[:2] == ["a", "b"] and kept == ["a"]


def test_programs_have_short_names_in_messages():
    program = common_strategy([Strategy.parse(name) for name in ("3x2x1", "1x1x1x1")]).name
    assert program.startswith("paths:")
    assert described(("chunk", program, 8, None)) == "a static tree of 17 rows for a batch of 8"
    for name in ("off", "3x2x1", "4_1_5"):
        assert described(("chunk", name, 8, None)) == f"strategy {name} for a batch of 8"


def traced_layers(layers: int, monkeypatch) -> int:
    """How often a layer's code runs while a chunk of a model with so many layers is traced."""
    cfg = tiny_config(64)
    cfg = cfg.replace(layers=cfg.layers[:1] * layers)
    runner = Runner(cfg, SpecConfig("2_1_3"), 2, 64, attention="reference", products="xla")
    runner.hold_shapes(
        jax.eval_shape(lambda: init_params(cfg)), jax.eval_shape(lambda: init_head_params(cfg))
    )
    counted, run = [], Block.run

    def build(key, lower, donate):
        with monkeypatch.context() as patch:
            patch.setattr(Block, "run", lambda *given: counted.append(given[0]) or run(*given))
            lower()
        return compiling.NotCompiled(donate)

    runner.executables.build = build
    table = np.zeros((2, runner.table_width), np.int32)
    rows = RowMap(np.arange(2, dtype=np.int32), np.ones(2, bool), table)
    runner.chunk("2_1_3", Features(), runner.alone(rows), Until.of(2))
    return len(counted)


def test_layers_that_are_alike_are_traced_once_however_many_there_are(monkeypatch):
    assert traced_layers(2, monkeypatch) == traced_layers(7, monkeypatch) <= 8
