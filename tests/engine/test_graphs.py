"""CUDA graphs are on where a check finds the results of plain programs, and off elsewhere.

The programs run on CPUs here, whose compiler takes the options and ignores them.
"""

import dataclasses

import jax
import numpy as np
import pytest
from engines import ONE, engine_of, jobs_of, tokens_of
from shared import compilations_of

from specjax.control import ControlConfig
from specjax.decode.options import Features
from specjax.engine import graph_check, graphs
from specjax.engine.graphs import NO_GRAPH, ONE_GRAPH, Graphs
from specjax.engine.options import features_of
from specjax.engine.replicas import Replicas
from specjax.interfaces import Device

H100 = Device("gpu", "NVIDIA H100 80GB HBM3")


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


def made(batch=2, wrap=None, **options):
    """An engine that takes its device for a GPU.

    Args:
      wrap: function (key, executable) that replaces programs which are graphs.

    Returns:
      the engine, and the compiler options of each program by key, in order.
    """
    engine = engine_of("2_1_3", batch, page_size=16, prefill_chunk=16, **options)
    executables, seen = engine.runner.executables, {}
    executables.graphs = Graphs(H100, ["gpu"])
    build = executables.build

    def watched(key, lower, donate):
        lowered = lower()

        class Watched:
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


@pytest.mark.slow
def test_every_chunk_is_a_graph_and_one_of_each_strategy_is_compiled_plainly_as_well(caplog):
    strategies = ControlConfig(controller="bandit", strategies=("off", "2_1_3"))
    engine, seen = made(control=strategies)
    took = engine.warm_up()
    chunks = {key[1:3]: options for key, options in seen.items() if key[0] == "chunk"}
    both, one = [dict(ONE_GRAPH), {}], [dict(ONE_GRAPH)]
    assert chunks == {
        ("off", 1): both, ("2_1_3", 1): both, ("off", 2): one, ("2_1_3", 2): one,
    }  # fmt: skip
    assert all(options == [{}] for key, options in seen.items() if key[0] != "chunk")
    assert took.programs == sum(map(len, seen.values()))
    executables = engine.runner.executables
    assert executables.graphs.wanted and executables.is_checked and not executables.plain_forms
    assert "CUDA graphs" not in caplog.text
    check_tokens(engine, compiled=0)


@pytest.fixture
def compared(monkeypatch):
    """The chunks that the check of an engine compares: of the plain program, and of the graph."""
    engine, _ = made()
    pairs = []
    compare = graph_check._difference
    with monkeypatch.context() as patch:
        patch.setattr(
            graph_check, "_difference", lambda a, b: pairs.append((a, b)) or compare(a, b)
        )
        engine.warm_up()
    [pair] = pairs
    return pair


def test_the_check_runs_all_loops_of_a_chunk(compared):
    """Sequences end in different chunks, others take their rows over, and something is read."""
    plain, graph = compared
    assert len(plain) == len(graph) == graph_check.CHUNKS
    rounds = [int(result.rounds) for result in plain]
    assert all(rounds), "every chunk has rounds"
    ended = [int((result.finish != 0).sum()) for result in plain]
    assert ended[0] < ended[-1], "some sequences end later than others"
    first = plain[0].length[: 1 + graph_check.WAITING]
    assert (first[:2] > 1).all(), "a sequence that waited has taken the row over"


@pytest.mark.parametrize("kind", [pytest.param(None, marks=pytest.mark.slow), "Wrong"])
def test_replicas_check_once_for_all(kind, caplog):
    wrap = kind and others_are(globals()[kind], 1)
    engines, seen = zip(*(made(wrap=wrap) for _ in range(2)), strict=True)
    replicas = Replicas(engines)
    took = replicas.warm_up()
    chunks = [[o for key, o in options.items() if key[0] == "chunk"] for options in seen]
    both, one = [dict(ONE_GRAPH), {}], [dict(ONE_GRAPH)]
    if kind is None:
        assert sorted(map(len, sum(chunks, []))) == [1, 1, 1, 2] and both in sum(chunks, [])
    else:
        assert all(options in (both, one) for options in sum(chunks, []))
        assert len([r for r in caplog.records if "CUDA graphs" in r.message]) == 1
        assert not any(e.runner.executables.has_graphs for e in engines)
    assert took.programs == sum(len(o) for options in seen for o in options.values())
    for engine in engines:
        check_tokens(engine, compiled=0)


class Wrong:
    """A program with one wrong bit in what the host reads of the third chunk."""

    def __init__(self, compiled):
        self.compiled, self.calls = compiled, 0

    def __call__(self, *inputs):
        state, packed = self.compiled(*inputs)
        self.calls += 1
        words = packed.words
        if self.calls > 2:
            words = words.at[0].set(words[0] ^ 1)
        return state, type(packed)(words, packed.layout)

    def memory_analysis(self):
        return None


class Faulty(Wrong):
    """A program that takes its inputs and fails."""

    def __call__(self, *inputs):
        self.compiled(*inputs)
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS\nat some place")


def others_are(kind, bucket):
    return lambda key, built: kind(built) if key[0] == "chunk" and key[2] == bucket else built


@pytest.mark.parametrize(
    ("kind", "bucket", "line"),
    [
        (Wrong, 1, "strategy 2_1_3 for a batch of 1 gives other results than without graphs: 1 of"),
        pytest.param(
            Faulty,
            1,
            "2_1_3 for a batch of 1 fails at the start: JaxRuntimeError: INTERNAL: CUDA_",
            marks=pytest.mark.slow,
        ),
        (Faulty, 2, "2_1_3 for a batch of 2 fails at the start: JaxRuntimeError: INTERNAL: CUDA_"),
    ],
)
def test_a_graph_that_is_wrong_or_fails_is_replaced_with_one_line(kind, bucket, line, caplog):
    engine, seen = made(wrap=others_are(kind, bucket))
    told = []
    engine.warm_up(on_program=lambda done, total: told.append((done, total)))
    [record] = [r for r in caplog.records if "CUDA graphs" in r.message]
    assert record.levelname == "WARNING" and line in record.message
    chunks = [options for key, options in seen.items() if key[0] == "chunk"]
    assert all(options[0] == ONE_GRAPH and options[-1] == {} for options in chunks)
    assert told[-1][0] == told[-1][1] and max(told)[0] == told[-1][1]
    check_tokens(engine, compiled=0)
    assert not any(isinstance(p, Wrong) for p in engine.runner.executables.by_key.values())


@pytest.mark.slow
def test_a_graph_that_fails_only_in_the_check_is_replaced(caplog):
    class Late(Faulty):
        def __call__(self, *inputs):
            self.calls += 1
            return self.compiled(*inputs) if self.calls < 4 else super().__call__(*inputs)

    engine, _ = made(wrap=others_are(Late, 1))
    engine.warm_up()
    [record] = [r for r in caplog.records if "CUDA graphs" in r.message]
    assert "strategy 2_1_3 for a batch of 1 fails: JaxRuntimeError: INTERNAL" in record.message
    check_tokens(engine, compiled=0)


def test_a_graph_that_does_not_compile_is_replaced(monkeypatch, caplog):
    monkeypatch.setattr(graphs, "ONE_GRAPH", {"xla_gpu_no_such_option": 1})
    engine, seen = made()
    engine.warm_up()
    [record] = [r for r in caplog.records if "CUDA graphs" in r.message]
    assert "for a batch of" in record.message and "does not compile to one" in record.message
    assert all(options[-1] == {} for options in seen.values())
    check_tokens(engine)


def test_an_engine_that_was_not_warmed_up_checks_the_program_that_it_runs(caplog):
    engine, seen = made()
    check_tokens(engine)
    chunks = {key[1:3]: options for key, options in seen.items() if key[0] == "chunk"}
    assert chunks[("2_1_3", 2)] == [dict(ONE_GRAPH), {}]
    assert engine.runner.executables.is_checked
    wrong, _ = made(wrap=others_are(Wrong, 2))
    check_tokens(wrong)
    [record] = [r for r in caplog.records if "CUDA graphs" in r.message]
    assert "strategy 2_1_3 for a batch of 2 gives other results" in record.message


def test_a_difference_is_found_wherever_it_is(compared):
    (plain, _), compare = compared, graph_check._difference
    assert compare(plain, plain) is None
    for name in ("tokens", "length", "finish", "rounds", "report"):
        leaf = jax.tree.leaves(getattr(plain[1], name))[0]
        other = leaf.copy()
        other.reshape(-1).view(np.uint8)[0] ^= 1
        changed = jax.tree.map(lambda x, a=leaf, b=other: b if x is a else x, plain[1])
        found = compare(plain, [plain[0], changed, plain[2]])
        assert f"1 of {leaf.size} values of {name!r} in chunk 2 of 3" in found


@pytest.mark.slow
def test_programs_that_are_compiled_after_the_check_are_no_graphs():
    engine, seen = made()
    engine.warm_up()
    before = set(seen)
    [job] = jobs_of([1, 2], dataclasses.replace(ONE, top_k=3), 0)
    engine.generate([job])
    later = {key: options for key, options in seen.items() if key not in before}
    assert {key[0] for key in later} == {"chunk"} and later
    assert all(options == [{}] for options in later.values())
    assert not any(map(engine.runner.executables.is_graph, later))


def test_a_program_that_is_no_graph_fails_with_its_own_error(caplog):
    """Graphs are not blamed for it, and nothing is compiled again."""
    engine, seen = made()
    build = engine.runner.executables.build

    def failing(key, lower, donate):
        built = build(key, lower, donate)
        return Faulty(built) if key[0] == "prefill" else built

    engine.runner.executables.build = failing
    with pytest.raises(jax.errors.JaxRuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        engine.warm_up()
    assert "CUDA graphs" not in caplog.text
    assert sum(map(len, seen.values())) == len(seen) + 1, "one chunk has a plain form as well"


@pytest.mark.slow
def test_a_plain_program_that_is_not_reproducible_is_named(caplog):
    """Its graph is turned off, too: a comparison with it shows nothing."""
    engine, _ = made()
    build = engine.runner.executables.build

    def restless(key, lower, donate):
        built = build(key, lower, donate)
        plain = engine.runner.executables.plain_forms
        if key in plain:
            plain[key] = Wrong(plain[key])
        return built

    engine.runner.executables.build = restless
    engine.warm_up()
    [record] = [r for r in caplog.records if "CUDA graphs" in r.message]
    assert "two runs without graphs differ as well" in record.message
    assert not engine.runner.executables.has_graphs


@pytest.mark.slow
def test_the_check_asks_for_an_option_of_each_feature():
    engine, _ = made()
    wanted = Features.all()
    [first, *_], _ = graph_check._sequences(engine.runner, "2_1_3", 1, wanted)
    asked = features_of(first.job, engine.runner.cfg.vocab_size)
    outputs = {"transformed_logprobs", "top_logprobs"}  # these have no branches
    assert set(asked.names) == set(wanted.names) - outputs
    [plain, *_], _ = graph_check._sequences(engine.runner, "2_1_3", 1, Features())
    assert features_of(plain.job, engine.runner.cfg.vocab_size) == Features()
    engine.warm_up([wanted])
    assert engine.runner.executables.has_graphs
