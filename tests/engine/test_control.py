"""Controllers at work in the engine, through `LLM`."""

import dataclasses
import functools
import itertools
import math
import re
import threading
import types

import jax
import numpy as np
import pytest
from engines import ARMS, LONG, ONE, engine_of, jobs_of, tokens_of
from shared import CFG, compilations_of, weights
from tiny import prompts_of

from specjax import LLM, SamplingParams, SpecConfig
from specjax.control import (
    BanditConfig,
    ControlConfig,
    EmaConfig,
    Goodput,
    GoodputConfig,
    Observation,
    make_controller,
    slower_than_plain,
)
from specjax.control.base import Controller
from specjax.control.costs import CostTable
from specjax.decode.options import Features
from specjax.engine import chunks, compiling, start_up
from specjax.engine.chunks import Chunk, InFlight
from specjax.engine.compiling import threads_for
from specjax.engine.engine import Engine
from specjax.engine.request import SpecStats, Totals
from specjax.engine.settings import EngineConfig

VOCAB = CFG.vocab_size
# Each strategy is compiled for all sizes of a batch, and prompts by width: where it does not matter
# there are two strategies, and pieces of one width.
TWO = ("off", "1_1_2")


def test_a_controller_chooses_among_compiled_strategies_through_llm():
    control = ControlConfig(controller="goodput", strategies=TWO)
    how = EngineConfig(prefill_chunk=16, stretch=1)
    llm = LLM((CFG, *weights()), SpecConfig("1_1_2"), 2, 64, control=control, engine=how)
    trained = make_controller(control)
    trained.observe(Observation.of_rounds(1, "1_1_2", [[2]] * 20, 1.0))
    llm.engine.controller.load_state(trained.state())
    told = []
    took = llm.warm_up(on_program=lambda done, total: told.append((done, total)))
    ready = list(dict.fromkeys(told))  # it is called now and then though nothing is new
    assert ready == [(i, took.programs) for i in range(took.programs + 1)]
    learned = llm.engine.controller.acceptance.state()
    assert learned == trained.acceptance.state(), "what was loaded before the first request is kept"
    assert took.calibration_seconds > 0 and took.programs == llm.engine.runner.compilations
    runner = llm.engine.runner
    assert took.cache_bytes == runner.pages * runner.page_bytes > 0
    caches = jax.tree.leaves((runner.state.memory.pages, runner.state.draft.pages))
    assert took.cache_bytes == sum(x.nbytes for x in caches)
    assert took.temporary_bytes == runner.executables.memory()["temporaries"] > 0
    line = str(took)
    assert line.startswith(f"compiled {took.programs} programs in {took.seconds:.1f} s (")
    assert f"caches {took.cache_bytes / 2**20:.1f} MiB), measured them in" in line
    costs = llm.engine.controller.costs
    assert all(costs.known(arm, batch) for arm in TWO for batch in (1, 2))
    prompts = prompts_of(5, VOCAB, seed=8)
    assert compilations_of(lambda: llm.generate(prompts, ONE)) == 0
    expected = tokens_of([j for i, p in enumerate(prompts) for j in jobs_of(p, ONE, i)])
    assert [o.samples[0].token_ids for o in llm.generate(prompts, ONE)] == expected
    fields = llm.engine.controller.log_fields()
    assert fields["strategy"] in TWO and fields["accept_length"] >= 1
    state = llm.engine.controller.state()
    llm.engine.controller.load_state(state)
    assert llm.engine.controller.state() == state
    llm.warm_up()
    assert llm.engine.controller.acceptance.state() == state["acceptance"], "and what was learned"
    assert llm.engine.controller.costs.state() != state["costs"]


@pytest.mark.slow  # as below, by another way in
def test_several_strategies_are_compiled_at_the_first_request_if_not_before():
    control = ControlConfig(controller="ema", ema=EmaConfig(candidate_steps=(0, 1)))
    how = EngineConfig(prefill_chunk=16, stretch=1)
    llm = LLM((CFG, *weights()), SpecConfig("1_1_2"), 1, 32, control=control, engine=how)
    llm.generate([[1, 2]], SamplingParams(max_tokens=4))
    built = llm.engine.runner.compilations
    assert llm.engine.runner.executables.buckets("off", llm.engine.runner.plan.features) == [1]
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20))
    assert llm.engine.runner.compilations == built


def test_short_work_compiles_what_plain_decoding_does_and_long_work_drafts():
    how = EngineConfig(prefill_chunk=16, stretch=1)
    llm, plain = (LLM((CFG, *weights()), spec, 2, 64, engine=how) for spec in (SpecConfig(), None))
    prompts = prompts_of(5, VOCAB, seed=8)
    expected = [o.samples[0].token_ids for o in plain.generate(prompts, ONE)]
    assert [o.samples[0].token_ids for o in llm.generate(prompts, ONE)] == expected
    assert llm.totals.drafted_rounds == 0
    assert llm.engine.runner.compilations == plain.engine.runner.compilations

    executables = llm.engine.runner.executables
    executables.seconds = dict.fromkeys(executables.seconds, 0.0)  # as if it had taken no time
    streamed = [t for piece in llm.stream(prompts[0], ONE) for t in piece.token_ids]
    assert streamed == expected[0]
    built = llm.engine.runner.compilations
    assert built > plain.engine.runner.compilations, "it became long meanwhile"
    executables.seconds = dict.fromkeys(executables.seconds, 1e6)
    assert [o.samples[0].token_ids for o in llm.generate(prompts, ONE)] == expected
    assert llm.engine.runner.compilations == built, "larger batches are short work again"
    executables.seconds = dict.fromkeys(executables.seconds, 0.0)
    assert [o.samples[0].token_ids for o in llm.generate(prompts, ONE)] == expected
    costs = llm.engine.controller.costs
    assert costs.buckets == (1, 2) and all(costs.known(arm, 2) for arm in ("off", "4_1_5"))


@pytest.mark.parametrize("slower", [False, True])
def test_drafting_that_loses_is_told_by_measured_costs(slower):
    costs = CostTable((1,), {"off": [1.0], "4_1_5": [1.6]})
    seen = Observation.of_rounds(1, "4_1_5", [[0 if slower else 1]] * 20, 32.0)
    controller = make_controller(ControlConfig(strategies=("off", "4_1_5")), costs=costs)
    controller.observe(seen)
    unmeasured = make_controller(ControlConfig(strategies=("off", "4_1_5")))
    unmeasured.observe(seen)
    assert slower_than_plain([unmeasured]) is None
    line = slower_than_plain([controller, controller, unmeasured])  # as of replicas
    assert (line is not None) == slower
    assert not slower or "drafting took 64.0 s" in line and "would have taken 40.0 s" in line


def test_control_without_speculation_and_over_what_has_no_common_program_is_refused():
    control = ControlConfig(strategies=ARMS)
    with pytest.raises(ValueError, match="spec is None; give a SpecConfig"):
        LLM((CFG, *weights()), None, max_len=32, control=control)
    for arms, rows, reason in (
        (("off", "2x2", "3_2_6"), 48, "no tree holds both '3_2_6' .* and '2x2'"),
        (("1x3", "2x2"), 7, "holds those of 1x3, 2x2: it has 8 rows, more than spec_verify_tokens"),
    ):
        in_one = SpecConfig("1_1_2", invariant=True, spec_verify_tokens=rows)
        mixed = ControlConfig(strategies=arms)
        with pytest.raises(ValueError, match=reason):
            LLM((CFG, *weights()), in_one, max_len=32, control=mixed)
    with pytest.raises(ValueError, match="exact for chains only"):
        trees = ControlConfig(strategies=("off", "2x2"))
        LLM((CFG, *weights()), SpecConfig("1_1_2", acceptance="block"), max_len=32, control=trees)


@functools.cache
def adaptive() -> Engine:
    """Every strategy of `ARMS` compiled, for up to two samples."""
    control = ControlConfig(controller="bandit", strategies=ARMS)
    engine = engine_of(batch=2, control=control, prefill_chunk=16)
    engine.warm_up()
    return engine


class Chosen(Controller):
    """A list of strategies, one per chunk, over and over, and rounds of the first; keeps what it is
    told."""

    kind = "chosen"

    def __init__(self, names, hints=()):
        super().__init__(ARMS)
        self._names, self.hints, self.seen = itertools.cycle(names), [*hints], []

    def choose(self, batch_size):
        self.rounds_hint = self.hints.pop(0) if self.hints else None
        return next(self._names)

    def learn(self, seen):
        self.seen.append(seen)


@pytest.mark.parametrize(
    ("controller", "best"),
    [
        ("goodput", "off"),
        ("bandit", "3_1_4"),
        pytest.param("goodput", "3_1_4", marks=pytest.mark.slow),
        pytest.param("bandit", "off", marks=pytest.mark.slow),
    ],
)
def test_what_gives_most_tokens_per_second_is_chosen(controller, best, monkeypatch):
    """On a clock of our own, on which every strategy but one takes ten times as long."""
    engine, ran = adaptive(), []
    exact = InFlight.wait_for

    def wait_for(self, chunk):
        result, _ = exact(self, chunk)
        ran.append(chunk.strategy)
        return result, (0.001 if chunk.strategy == best else 0.01) * int(result.rounds)

    monkeypatch.setattr(InFlight, "wait_for", wait_for)
    settings = {"bandit": BanditConfig(epsilon=0.1), "goodput": GoodputConfig(probe_fraction=0.03)}
    wanted = {name: value for name, value in settings.items() if name == controller}
    calibrated = itertools.product(ARMS, (1, 2))  # goodput's: all alike, which is wrong
    costs = CostTable.from_samples({key: [0.005] for key in calibrated})
    control = ControlConfig(controller, ARMS, **wanted)
    engine.controller = make_controller(control, ARMS, costs=costs)
    engine.generate([jobs_of([i, 2], LONG, i)[0] for i in range(32)])
    late = ran[len(ran) // 2 :]
    assert len(late) > 10 and late.count(best) > 0.7 * len(late), ran


def test_the_strategy_changes_while_samples_grow(monkeypatch):
    """On a clock of our own, on which rounds of plain decoding take longer the longer samples are,
    and those that draft take the same at all lengths."""
    engine, given, chosen, seen = adaptive(), adaptive().controller, [], []
    flat, steep = [6e-3] * 2, {"off": [6e-3] * 2, "3_1_4": [6e-3] * 2}
    costs = CostTable([1, 2], {"off": [1e-3] * 2, "3_1_4": flat}, None, (8, 80), steep)
    exact = InFlight.wait_for

    def wait_for(self, chunk):
        context = sum(sequence.length for sequence in chunk.sequences)
        result, _ = exact(self, chunk)
        seconds = costs.seconds(chunk.strategy, len(chunk.sequences), context=context)
        return result, int(result.rounds) * seconds

    class Recorded(Goodput):
        def choose(self, batch_size):
            name = super().choose(batch_size)
            if self.rounds_hint is None:  # else it is a probe
                chosen.append((self.context / batch_size, name))
            return name

        def learn(self, one):
            seen.append(one)
            super().learn(one)

    monkeypatch.setattr(InFlight, "wait_for", wait_for)
    engine.controller = Recorded(("off", "3_1_4"), costs, GoodputConfig(probe_fraction=0))
    engine.generate([jobs_of([i, 2], LONG, i)[0] for i in range(8)])
    engine.controller = given
    short = [name for length, name in chosen if length < 10]
    long = [name for length, name in chosen if length > 60]
    assert set(short) == {"off"} and set(long) == {"3_1_4"}, str(chosen)
    assert max(one.context for one in seen) > 120, "of two samples together"
    for one in seen:
        assert 2 <= one.context <= 96 * one.batch_size


def test_those_that_opt_out_run_plain_decoding_where_nobody_else_runs(monkeypatch):
    """Its rounds cost less than those of a tree whose drafts count for nothing."""
    engine, ran = adaptive(), []
    exact = InFlight.wait_for

    def wait_for(self, chunk):
        ran.append((chunk.strategy, len(chunk.sequences)))
        return exact(self, chunk)

    monkeypatch.setattr(InFlight, "wait_for", wait_for)
    engine.controller = Chosen(["3_1_4"])
    plainly = dataclasses.replace(LONG, speculative=False)
    alone, _ = engine.generate(jobs_of([1, 2], plainly))
    assert {strategy for strategy, _ in ran} == {"off"}
    ran.clear()
    short = dataclasses.replace(LONG, max_tokens=3)
    both, _ = engine.generate(jobs_of([1, 2], plainly) + jobs_of([3, 4], short))
    assert ran[0] == ("3_1_4", 2), "they share a batch with those that are drafted for"
    assert ran[-1] == ("off", 1)
    assert both[0].token_ids == alone[0].token_ids


@pytest.mark.slow
def test_no_controller_is_told_the_seconds_of_a_chunk_beside_which_a_program_was_compiled():
    control = ControlConfig("bandit", strategies=TWO)
    engine = engine_of("1_1_2", batch=1, control=control, prefill_chunk=16)
    engine.controller = told = Told(TWO)
    engine.add(jobs_of([1, 2], LONG)[0])
    while engine.has_work:  # what was added is compiled for ahead
        engine.step()
    built, first = engine.runner.compilations, len(told.seconds)
    top_p = dataclasses.replace(LONG, top_p=0.9)
    engine.add(jobs_of([1, 2], top_p)[0])
    while engine.has_work:
        engine.step()
    assert engine.runner.compilations > built
    assert math.isnan(told.seconds[first]) and np.isfinite(told.seconds[first + 2 :]).all()


class Told(Controller):
    """The first strategy, always; keeps the seconds it is told of."""

    kind = "told"

    def __init__(self, arms):
        super().__init__(arms)
        self.seconds = []

    def observe(self, observation):
        self.seconds.append(observation.seconds)

    def choose(self, batch_size):
        return self.arms[0]

    def learn(self, seen):
        pass


@pytest.mark.slow
def test_the_first_requests_decide_what_is_compiled_ahead_for_all_strategies():
    control = ControlConfig("bandit", strategies=TWO)
    engine = engine_of("1_1_2", batch=2, control=control, prefill_chunk=16)
    top_p = dataclasses.replace(ONE, top_p=0.9)
    engine.add(jobs_of([1, 2], top_p)[0])
    engine.step()
    built = engine.runner.compilations
    engine.controller = Chosen(TWO)
    while engine.has_work:
        engine.step()
    assert engine.runner.compilations == built
    compiled, wanted = engine.runner.executables, Features(top_p=True)
    assert all(compiled.buckets(arm, wanted) == [1, 2] for arm in TWO)


def test_off_comes_back_to_drafting_without_reading_the_prompt_again(monkeypatch):
    """A chunk of `off` hands out what the draft head needs of its tokens."""
    engine, read = adaptive(), []
    prefill = engine.runner.prefill
    monkeypatch.setattr(
        engine.runner, "prefill", lambda piece: (read.append(piece), prefill(piece))
    )
    [job] = jobs_of([3, 4, 5], LONG)
    histograms = {}
    for name, arms in {"never off": ["3_1_4"], "in turns": ["off", "3_1_4"]}.items():
        engine.controller = Chosen(arms)
        read.clear()
        [sample], _ = engine.generate([job])
        assert [sample.token_ids] == tokens_of([job]) and len(read) == 1
        histograms[name] = np.array(sample.stats.histogram), sample.stats.plain_rounds
    whole, turns = histograms["never off"][0], histograms["in turns"][0]
    assert histograms["never off"][1] == 0 < histograms["in turns"][1]
    assert turns[2:].sum() > 0.1 * whole[2:].sum() > 0, "drafts are accepted after off, too"


def test_who_takes_a_row_over_within_a_chunk_of_off_is_drafted_for_as_if_it_had_been_alone():
    """The states that the head reads afterwards are those of its own rounds."""
    engine, lengths, histograms = adaptive(), (37, 80), []
    first, job = (
        jobs_of([i, 4, 5], dataclasses.replace(ONE, max_tokens=n), i)[0]
        for i, n in enumerate(lengths, 3)
    )
    together = Chosen(["off", "off", *["3_1_4"] * 99])  # 64 rounds: 37 of the one, 27 of the other
    alone = Chosen(["off", *["3_1_4"] * 99], hints=[27])
    for jobs, engine.controller in (([first, job], together), ([job], alone)):
        engine.clear(1)
        samples, _ = engine.generate(jobs)
        assert [s.token_ids for s in samples] == tokens_of(jobs)
        assert engine.controller.seen[-1].strategy == "3_1_4"
        histograms.append((samples[-1].stats.histogram, samples[-1].stats.plain_rounds))
    engine.clear(2)
    assert histograms[0] == histograms[1] and histograms[0][1] == 27


def test_above_bs_threshold_nothing_is_drafted():
    control = ControlConfig("static", ARMS, initial="3_1_4", bs_threshold=1)
    engine = adaptive()
    engine.controller = make_controller(control, ["3_1_4", "off"])
    jobs = [jobs_of([i], dataclasses.replace(ONE, max_tokens=n), i)[0] for i, n in TAIL]
    samples, _ = engine.generate(jobs)
    shares = [s.stats.plain_rounds / s.stats.rounds for s in samples]
    assert shares[0] == 1.0, "while two run"
    assert 0 < shares[1] < 1, "drafted when one was left"
    assert [s.token_ids for s in samples] == tokens_of(jobs)


def test_what_a_gate_never_lets_through_is_not_compiled_ahead_unless_requests_may_name_it():
    control = ControlConfig("bandit", ARMS, bs_threshold=2)
    chunks = {}
    for named in (False, True):
        engine = engine_of(batch=8, control=control, named_strategies=named)
        programs = engine.programs()
        reached = programs.chunks
        chunks[named] = len(reached)
        assert programs.count([Features()]) == programs.count([]) + len(reached)
        assert {bucket for strategy, bucket in reached if strategy == "off"} == {1, 2, 4, 8}
        drafting = {bucket for strategy, bucket in reached if strategy != "off"}
        assert drafting == ({1, 2, 4, 8} if named else {1, 2})
    assert chunks == {False: 8, True: 12}
    # A batch of three has the program for four, and the gate opens for it.
    engine = engine_of(batch=8, control=dataclasses.replace(control, bs_threshold=3))
    assert engine.controller.may_choose("3_1_4", 3), "the smallest that it runs"
    assert not engine.controller.may_choose("3_1_4", 5)


TAIL = [(1, 8), (3, 80)]


def test_ema_steps_down_where_the_head_is_of_no_use_and_up_where_it_is():
    settings = EmaConfig((1, 3), ema_alpha=0.1, warmup_batches=0, update_interval=1)
    tiers = ControlConfig("ema", ema=settings, initial="3_1_4")
    engine = adaptive()
    params, head = weights()
    [job] = jobs_of([3, 4, 5], LONG)
    useless = jax.tree.map(np.zeros_like, head)
    for given in (useless, head):
        engine.set_params(params, given)
        engine.controller = make_controller(tiers, ["1_1_2", "3_1_4"])
        seen = []
        for _ in range(3):
            engine.add(job)
            while engine.has_work:
                engine.step()
                seen.append(engine.controller.current)
        assert seen[0] == "3_1_4" and (seen[-1] == "1_1_2") == (given is useless), seen


@pytest.mark.slow
def test_programs_are_compiled_side_by_side_or_one_at_a_time():
    names, told, together, number = set(), [], threading.Barrier(2), itertools.count()

    def build(key, lower, donate):
        names.add(threading.current_thread().name.partition("_")[0])
        if next(number) < 2:  # of the first engine's
            together.wait(timeout=60)  # or it is broken: nothing else compiles meanwhile
        return lower().compile()

    def warm(llm, threads=3) -> None:
        executables = llm.engine.runner.executables
        executables.build, executables.threads = build, threads
        took = llm.warm_up(on_program=lambda done, total: told.append((done, total)))
        ready = list(dict.fromkeys(told))  # it is called now and then though nothing is new
        assert ready == [(i, took.programs) for i in range(took.programs + 1)]
        assert took.programs == len(llm.engine.runner.executables.by_key) == 5

    how = EngineConfig(prefill_chunk=16, stretch=1)
    control = ControlConfig(controller="static", strategies=TWO)

    def make() -> LLM:
        return LLM((CFG, *weights()), SpecConfig("1_1_2"), 2, 64, control=control, engine=how)

    prompts = prompts_of(3, VOCAB, seed=8)
    llm = make()
    warm(llm)
    assert names == {"compile"}
    samples = []
    assert compilations_of(lambda: samples.extend(llm.generate(prompts, ONE))) == 0
    expected = tokens_of([j for i, p in enumerate(prompts) for j in jobs_of(p, ONE, i)])
    assert [o.samples[0].token_ids for o in samples] == expected

    def broken(key, lower, donate):
        raise RuntimeError(f"no memory for {key[0]}")

    other = make()
    other.engine.runner.executables.build, other.engine.runner.executables.threads = broken, 3
    with pytest.raises(RuntimeError, match="no memory for"):
        other.warm_up()
    told.clear()
    warm(other)  # nothing is left of what failed
    assert compilations_of(lambda: other.warm_up()) == 0
    names.clear()
    told.clear()
    warm(make(), threads=1)
    assert names == {threading.current_thread().name.partition("_")[0]}


def test_a_call_that_compiles_for_long_says_so_where_nobody_has_set_up_a_log(monkeypatch, caplog):
    """How many of those that are compiled ahead are ready, and the one that a request needs."""
    monkeypatch.setattr(compiling, "SILENT_SECONDS", 0.0)
    adaptive().warm_up()
    assert caplog.records[0].levelname == "WARNING"
    assert re.match(r"compiling: 0 of \d+ programs are ready after 0 s", caplog.messages[0])
    caplog.clear()
    engine = engine_of(None, batch=1, prefill_chunk=16)
    engine.generate(jobs_of([3, 4, 5], dataclasses.replace(ONE, max_tokens=2)))
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    named = {message.partition(" takes ")[0] for message in caplog.messages}
    assert "compiling strategy off for a batch of 1" in named, named
    assert "compiling what reads 16 positions of 1 prompts" in named, named


def test_hosts_that_share_programs_compile_one_at_a_time(monkeypatch):
    def threads(platform, *processes):
        devices = [types.SimpleNamespace(process_index=p, platform=platform) for p in processes]
        return threads_for(types.SimpleNamespace(devices=np.array(devices)))

    cores = threads_for(None)
    assert cores >= 1 and threads("gpu", 0, 0) == cores
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert threads("cpu", 1, 1) == threads("tpu", 1) == cores, "a replica of one of several hosts"
    assert threads("cpu", 0, 1) == threads("tpu", 0, 1) == threads("gpu", 1) == 1


def test_calibration_measures_a_round_and_not_the_first_run_of_its_program(monkeypatch):
    """XLA on CPU builds what it did not need before: the first run of a program is slow."""
    per_round = {"off": 1e-3, "1_1_2": 2e-3, "3_1_4": 4e-3}
    overhead, now, ran = 5e-4, [0.0], set()

    def chunk(runner, strategy, features, bucket, rounds, length):
        rounds = min(rounds, 6)  # as where sequences come to their limit
        first = 20 if (strategy, bucket) not in ran else 1
        if rounds == 0 and (strategy, bucket, "empty") not in ran:
            first = 10  # an overhead that is too large, which would make every round seem cheap
            ran.add((strategy, bucket, "empty"))
        ran.add((strategy, bucket))
        now[0] += first * (overhead + rounds * per_round[strategy])
        return types.SimpleNamespace(open=lambda: types.SimpleNamespace(rounds=rounds))

    engine = adaptive()
    programs = engine.programs()
    start_up.compile_ahead([programs], [Features()])
    monkeypatch.setattr(start_up, "_start_chunk", chunk)
    monkeypatch.setattr(start_up, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    costs, seconds = start_up.calibrate(programs, Features())
    assert 0 < seconds < 1
    for strategy, bucket in itertools.product(ARMS, (1, 2)):
        assert costs.seconds(strategy, bucket) == pytest.approx(per_round[strategy], rel=1e-6)
        assert costs.beside(bucket) == pytest.approx(overhead, rel=1e-6)
    some = dataclasses.replace(programs, strategies={1: ARMS, 2: ("off",)})
    costs, _ = start_up.calibrate(some, Features())
    known = {(s, b) for s, b in itertools.product(ARMS, (1, 2)) if costs.known(s, b)}
    assert known == {("off", 1), ("1_1_2", 1), ("3_1_4", 1), ("off", 2)}


def test_calibration_measures_a_second_context_where_sequences_may_be_long(monkeypatch):
    """By a clock of our own, on which a round takes longer the more tokens all slots have."""
    per_round = {"off": (1e-3, 1e-5), "1_1_2": (2e-3, 2e-5), "3_1_4": (4e-3, 0.0)}
    now, ran = [0.0], []

    def chunk(runner, strategy, features, bucket, rounds, length):
        base, each = per_round[strategy]
        seconds = rounds * (base + each * bucket * length)
        now[0] += seconds
        ran.append((strategy, bucket, length, seconds))
        return types.SimpleNamespace(open=lambda: types.SimpleNamespace(rounds=rounds))

    engine = adaptive()
    programs = engine.programs()
    start_up.compile_ahead([programs], [Features()])
    monkeypatch.setattr(start_up, "_start_chunk", chunk)
    monkeypatch.setattr(start_up, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    costs, _ = start_up.calibrate(programs, Features())
    assert costs.contexts is None and {length for *_, length, _ in ran} == {48}, "96 at most"
    monkeypatch.setattr(start_up, "CONTEXT", 16)
    monkeypatch.setattr(start_up, "LONG_SHARE", 10.0)
    ran.clear()
    costs, _ = start_up.calibrate(programs, Features())
    assert costs.contexts == (16, 72) and {length for *_, length, _ in ran} == {16, 72}
    for strategy, bucket in itertools.product(ARMS, (1, 2)):
        base, each = per_round[strategy]
        for context in (bucket * 16, bucket * 50, bucket * 72):
            found = costs.seconds(strategy, bucket, context=context)
            assert found == pytest.approx(base + each * context, rel=1e-6)
    limit = {}
    for share in (0.0, 0.3):
        monkeypatch.setattr(start_up, "LONG_SHARE", share)
        ran.clear()
        start_up.calibrate(programs, Features())
        before = sum(seconds for *_, length, seconds in ran if length == 16)
        longer = [seconds for *_, length, seconds in ran if length == 72]
        limit[share] = sum(longer) / before
    assert limit[0.0] == 0 < limit[0.3] < 0.6, "it ends with the strategy that passes the limit"


def test_a_second_context_is_measured_by_the_programs_themselves(monkeypatch):
    engine = adaptive()
    monkeypatch.setattr(start_up, "CONTEXT", 16)
    monkeypatch.setattr(start_up, "LONG_SHARE", 100.0)
    built = engine.runner.compilations
    costs, _ = start_up.calibrate(engine.programs(), Features())
    engine.runner.reset()
    assert engine.runner.compilations == built
    assert all(costs.seconds(s, b, context=72 * b) > 0 for s in ARMS for b in (1, 2))


@pytest.mark.slow  # other shapes of what is above
def test_strategies_of_path_tuples_can_be_chosen():
    name = "paths:0,1,0.0"
    control = ControlConfig("static", ("off", name), initial=name)
    llm = LLM((CFG, *weights()), SpecConfig(((0,), (1,), (0, 0))), 1, 64, control=control)
    jobs = jobs_of([3, 4, 5], ONE)
    samples, totals = llm.engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)
    assert totals.drafted_rounds == totals.rounds and samples[0].stats.drafted % 3 == 0


def test_the_spec_s_tree_may_be_cut_and_others_may_not():
    spec = SpecConfig("3_2_5", spec_verify_tokens=4)
    control = ControlConfig("bandit", ("off", "3_2_5", "4_2_6"))
    with pytest.raises(ValueError, match="spec_verify_tokens = 4 cuts it below"):
        Engine(CFG, spec, 1, 64, control=control)
    engine = Engine(CFG, spec, 1, 64, control=ControlConfig("bandit", ("off", "3_2_5")))
    assert engine.controller.arms == ("off", "3_2_5")
    assert engine.runner.plan is engine.runner.plans["3_2_5"]
    assert engine.runner.plan.tree.rows == 4


class Mark:
    """What is on the device until prompts have been read."""

    ready = False

    def is_ready(self):
        return self.ready


class Results:
    """What a chunk tells, once its mark is ready."""

    def __init__(self, mark):
        self.mark = mark

    @property
    def is_ready(self):
        return self.mark.ready

    def open(self):
        return None


def enqueued(result, after, mark=None) -> Chunk:
    nothing = ("off", None, Features(), 1, [], [], None, 1, 1)
    return Chunk(*nothing, result=result, begun_after=after, start_mark=mark)


def test_the_long_context_is_one_for_which_each_row_has_pages_of_its_own():
    def contexts(pages):
        runner = types.SimpleNamespace(
            pages=pages, page_size=128, max_len=2048, most_tokens=lambda rows: 32
        )
        return start_up.calibration_contexts(2048, start_up._room(runner, 8))

    assert contexts(1 + 8 * 16) == (256, 1536), "each has pages for a sequence of full length"
    assert contexts(1 + 8 * 8) == (256, 8 * 128 - 3 * 32)
    assert contexts(1 + 8 * 4) == (256, None), "not twice the short one"


@pytest.mark.parametrize(("seen_at", "seconds"), [(2.0, 10.0), (7.0, math.nan), (None, math.nan)])
def test_the_time_of_a_chunk_after_prompts_is_known_if_its_beginning_was_seen(
    monkeypatch, seen_at, seconds
):
    """Those who only poll (replicas) may have seen that it waited, and soon after that it ran."""
    now, mark = [1.0], Mark()
    monkeypatch.setattr(chunks, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    mine = InFlight(adaptive().runner)
    chunk = enqueued(Results(mark), 0.5, mark)
    mine.add(chunk)
    mine.poll()
    mark.ready = True
    if seen_at is not None:
        now[0] = seen_at
        mine.poll()
    now[0] = 12.0
    assert mine.wait_for(mine.take())[1] == pytest.approx(seconds, nan_ok=True)


@pytest.mark.parametrize(("away", "seconds"), [(0.1, 10.0), (9.0, math.nan)])
def test_time_in_which_nobody_asked_is_no_time_of_a_chunk(monkeypatch, away, seconds):
    """Who drives the engine may do other things for longer than the device runs."""
    now, mark = [11.0 - away], Mark()
    monkeypatch.setattr(chunks, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    mine = InFlight(adaptive().runner)
    mine.pause()
    result = Results(mark)
    chunk = enqueued(result, 1.0)
    mine.add(chunk)
    now[0], mark.ready = 11.0, True
    mine.resume()
    timed = mine.wait_for(mine.take())[1]
    assert timed == pytest.approx(seconds, rel=0.02, nan_ok=True)
    now[0] = 20.0  # nor does anybody know when the one behind it began
    behind = enqueued(result, 1.0)
    expected = math.nan if away > 1 else 9.0
    assert mine.wait_for(behind)[1] == pytest.approx(expected, rel=0.02, nan_ok=True)


def test_controllers_are_told_what_the_draft_had_to_read_and_who_drafted():
    engine, given = adaptive(), adaptive().controller
    engine.controller = controller = Chosen(["3_1_4", "off", "3_1_4"])
    jobs = jobs_of([3, 4, 5], LONG)
    jobs += jobs_of([4, 4, 5], dataclasses.replace(LONG, speculative=False))
    engine.generate(jobs)
    engine.controller = given
    first, plain, again = controller.seen[:3]
    assert [seen.catch_up for seen in (first, plain, again)] == [0, 0, plain.rounds]
    assert plain.rounds > 8
    assert {(seen.batch_size, seen.opted_out) for seen in (first, plain, again)} == {(2, 1)}
    assert plain.tokens == 2 * plain.rounds


def test_what_runs_is_in_the_log_of_an_engine_that_generates(caplog):
    """At the levels of FastRL: strategy and accept length as information, arms' scores to debug."""
    engine, given = adaptive(), adaptive().controller
    control = ControlConfig("bandit", ("off", "3_1_4"))
    engine.controller = make_controller(control)
    with caplog.at_level("DEBUG", logger="specjax"):
        engine.generate(jobs_of([3, 4, 5], LONG))
    engine.controller = given
    said = {(record.levelname, record.message.split(":")[0]) for record in caplog.records}
    assert ("INFO", "Using strategy") in said and ("INFO", "Acceptance length") in said
    assert ("DEBUG", "MAB selected") in said and ("DEBUG", "Using strategy") not in said


def test_the_accept_rate_of_a_depth_is_that_of_the_trees_that_reach_it():
    totals = Totals(3, np.zeros(5, np.int64))
    # two plain rounds, four with chains of one, four with chains of three
    totals.count_rounds(SpecStats(10, 16, 9, (0, 4, 4, 1, 1), depths=(2, 4, 0, 4)))
    assert totals.accepted == 9 and totals.accept_rate == 9 / 16
    assert totals.per_depth() == [6 / 8, 2 / 4, 1 / 4]
    assert totals.drafted_accept_length == 1 + 9 / 8
    totals.merge(totals)
    assert totals.accept_rate == 9 / 16
