"""CUDA graphs are on where a check finds the results of plain programs, and off elsewhere.

The programs run on CPUs here, whose compiler takes the options and ignores them.
"""

import jax
import pytest
from engines import ONE, engine_of, jobs_of, tokens_of
from shared import compilations_of

from specjax.engine import programs
from specjax.engine.programs import NO_GRAPH, ONE_GRAPH, Graphs
from specjax.interfaces import Device
from specjax.kernels import check

H100 = Device("gpu", "NVIDIA H100 80GB HBM3")


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch):
    monkeypatch.setattr(check, "cache_dir", lambda: None)


@pytest.mark.parametrize(
    ("device", "kernels", "eager", "wanted", "line"),
    [
        (H100, ["gpu", "gpu"], False, True, "CUDA graphs: one for each chunk"),
        (H100, ["gpu"], True, False, "CUDA graphs are off: enforce_eager"),
        (H100, ["gpu", "library:cudnn"], False, False, "with cuDNN's attention"),
        (H100._replace(count=4), ["gpu"], False, False, "4 devices share a chunk"),
        (Device("cpu", "cpu"), ["cpu"], False, False, None),
        (Device("tpu", "TPU v5e"), ["tpu:v5e"], True, False, None),
    ],
)
def test_graphs_are_wanted_on_one_gpu_without_cudnn(device, kernels, eager, wanted, line):
    found = Graphs(device, kernels, eager)
    assert found.wanted == wanted
    assert found.line is None if line is None else line in found.line
    chunk, read = ("chunk", "off", 1, None), ("prefill", (1, 16))
    gpu = device.platform == "gpu"
    assert found.options(chunk) == (ONE_GRAPH if wanted else NO_GRAPH if gpu and eager else {})
    assert found.options(read) == (NO_GRAPH if gpu and eager else {})


def made(wrap=None):
    """An engine that takes its device for a GPU.

    Args:
      wrap: function (key, executable) that replaces programs which are graphs.

    Returns:
      the engine, and the compiler options of each program by key, in order.
    """
    engine = engine_of("2_1_3", 2, page_size=16, prefill_chunk=16)
    executables, seen = engine.runner.executables, {}
    executables.graphs = Graphs(H100, ["gpu"])
    build = executables.build

    def watched(key, lower, donate):
        lowered = lower()

        class Watched:
            as_text = lowered.as_text

            def compile(self, options):
                seen.setdefault(key, []).append(options or {})
                return lowered.compile(options)

        before = len(seen.get(key, []))
        built = build(key, Watched, donate)
        return wrap(key, built) if wrap and seen[key][before] == ONE_GRAPH else built

    executables.build = watched
    return engine, seen


def check_tokens(engine, compiled=None):
    """Checks tokens, and how many programs are compiled for them."""
    jobs, found = [job for i in range(3) for job in jobs_of([i + 1, 2], ONE, i)], []
    wanted = tokens_of(jobs)
    number = compilations_of(lambda: found.extend(engine.generate(jobs)[0]))
    assert [s.token_ids for s in found] == wanted
    assert compiled is None or number == compiled


class Wrong:
    """A program with one wrong bit in what the host reads of the third chunk."""

    def __init__(self, compiled):
        self.compiled, self.calls = compiled, 0

    def __call__(self, *inputs):
        state, result = self.compiled(*inputs)
        self.calls += 1
        if self.calls > 2:
            result = result._replace(tokens=result.tokens.at[0, 0].set(result.tokens[0, 0] ^ 1))
        return state, result


class Faulty(Wrong):
    """A program that takes its inputs and fails."""

    def __call__(self, *inputs):
        self.compiled(*inputs)
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS\nat some place")


def others_are(kind, bucket):
    return lambda key, built: kind(built) if key[0] == "chunk" and key[2] == bucket else built


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bucket", "line"),
    [
        (Wrong, 1, "strategy 2_1_3 for a batch of 1 gives other results than without graphs: '"),
        pytest.param(
            Faulty,
            2,
            "2_1_3 for a batch of 2 fails at the start: JaxRuntimeError: INTERNAL: CUDA_",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_graph_that_is_wrong_or_fails_is_replaced_with_one_line(kind, bucket, line, caplog):
    engine, seen = made(wrap=others_are(kind, bucket))
    told = []
    engine.warm_up(on_program=lambda done, total: told.append((done, total)))
    [record] = [r for r in caplog.records if "CUDA graphs" in r.message]
    assert record.levelname == "WARNING" and line in record.message
    chunks = [options for key, options in seen.items() if key[0] == "chunk"]
    assert all(options[-1] == {} for options in chunks) and chunks[0][0] == ONE_GRAPH
    assert told[-1][0] == told[-1][1] and max(told)[0] == told[-1][1]
    check_tokens(engine, compiled=0)
    assert not any(isinstance(p, Wrong) for p in engine.runner.executables.by_key.values())


@pytest.mark.slow
def test_a_graph_that_does_not_compile_is_replaced(monkeypatch, caplog):
    monkeypatch.setattr(programs, "ONE_GRAPH", {"xla_gpu_no_such_option": 1})
    engine, seen = made()
    engine.warm_up()
    [record] = [r for r in caplog.records if "CUDA graphs" in r.message]
    assert "fails at the start" in record.message
    assert all(options[-1] == {} for options in seen.values())
    check_tokens(engine)
