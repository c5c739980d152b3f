"""Controllers at work in the engine, through `LLM`."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from engines import LONG, ONE, engine_of, jobs_of, tokens_of
from scripted import observed
from shared import CFG, compilations_of, weights
from tiny import prompts_of

from specjax import LLM, SpecConfig
from specjax.control import (
    BanditConfig,
    ControlConfig,
    GoodputConfig,
    make_controller,
    slower_than_plain,
)
from specjax.control.base import Controller
from specjax.control.costs import CostTable
from specjax.engine.chunks import InFlight
from specjax.engine.engine import Engine
from specjax.engine.request import SpecStats, Totals
from specjax.engine.settings import EngineConfig

VOCAB = CFG.vocab_size
# Each strategy is compiled for all sizes of a batch, and prompts by width: there are two strategies
# at a time, and pieces of one width.
ARMS, TWO = ("off", "3_1_4"), ("off", "1_1_2")


@pytest.mark.slow
def test_a_controller_chooses_among_compiled_strategies_through_llm():
    control = ControlConfig(controller="goodput", strategies=TWO)
    how = EngineConfig(prefill_chunk=16, stretch=1)
    llm = LLM((CFG, *weights()), SpecConfig("1_1_2"), 1, 64, control=control, engine=how)
    trained = make_controller(control)
    trained.observe(observed(1, "1_1_2", [[2]] * 20, 1.0))
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
    line = str(took)
    assert line.startswith(f"compiled {took.programs} programs in {took.seconds:.1f} s (caches ")
    assert f"{took.cache_bytes / 2**20:.1f} MiB), measured them in" in line
    costs = llm.engine.controller.costs
    assert all(costs.known(arm, 1) for arm in TWO)
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


@pytest.mark.slow
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
    executables.background.join()
    llm.engine.measure_if_due()
    built = llm.engine.runner.compilations
    assert built > plain.engine.runner.compilations, "it became long meanwhile"
    executables.seconds = dict.fromkeys(executables.seconds, 1e6)
    assert [o.samples[0].token_ids for o in llm.generate(prompts, ONE)] == expected
    assert llm.engine.runner.compilations == built, "larger batches are short work again"
    executables.seconds = dict.fromkeys(executables.seconds, 0.0)
    assert [o.samples[0].token_ids for o in llm.generate(prompts, ONE)] == expected
    executables.background.join()
    llm.engine.measure_if_due()
    costs = llm.engine.controller.costs
    assert costs.buckets == (1, 2) and all(costs.known(arm, 2) for arm in ("off", "4_1_5"))


@pytest.mark.parametrize("slower", [False, True])
def test_drafting_that_loses_is_told_by_measured_costs(slower):
    costs = CostTable((1,), {"off": [1.0], "4_1_5": [1.6]})
    seen = observed(1, "4_1_5", [[0 if slower else 1]] * 20, 32.0)
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
    with pytest.raises(ValueError, match="spec=None says that there is no speculation"):
        LLM((CFG, *weights()), None, max_len=32, control=control)
    for arms, rows, reason in (
        (("off", "2x2", "3_2_6"), 48, "no tree holds both '3_2_6', a dynamic tree, and '2x2'"),
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
    """A list of strategies, one per chunk, over and over; keeps what it is told."""

    kind = "chosen"

    def __init__(self, names):
        super().__init__(ARMS)
        self._names, self.seen = itertools.cycle(names), []

    def choose(self, batch_size):
        return next(self._names)

    def learn(self, seen):
        self.seen.append(seen)


@pytest.mark.slow
@pytest.mark.parametrize("controller", ["goodput", "bandit"])
@pytest.mark.parametrize("best", ["off", "3_1_4"])
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
    costs = CostTable((1, 2), {arm: [0.005] * 2 for arm in ARMS})  # all alike, which is wrong
    control = ControlConfig(controller, ARMS, **wanted)
    engine.controller = make_controller(control, ARMS, costs=costs)
    engine.generate([jobs_of([i, 2], LONG, i)[0] for i in range(32)])
    late = ran[len(ran) // 2 :]
    assert len(late) > 10 and late.count(best) > 0.7 * len(late), ran


@pytest.mark.slow
def test_off_comes_back_to_drafting_without_reading_the_prompt_again(monkeypatch):
    """A chunk of `off` hands out what the draft head needs of its tokens."""
    engine, read = adaptive(), []
    prefill = engine.runner.prefill
    monkeypatch.setattr(
        engine.runner, "prefill", lambda piece: read.append(piece) or prefill(piece)
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


TAIL = [(1, 8), (3, 80)]


def test_controllers_are_told_what_the_draft_had_to_read():
    engine, given = adaptive(), adaptive().controller
    engine.controller = controller = Chosen(["3_1_4", "off", "3_1_4"])
    jobs = jobs_of([3, 4, 5], LONG)
    jobs += jobs_of([4, 4, 5], dataclasses.replace(LONG, speculative=False))
    engine.generate(jobs)
    engine.controller = given
    first, plain, again = controller.seen[:3]
    assert [seen.catch_up for seen in (first, plain, again)] == [0, 0, plain.rounds]
    assert plain.rounds > 8
    assert {seen.batch_size for seen in (first, plain, again)} == {2}
    assert 2 * 3 <= first.context < plain.context < again.context, "tokens of both together"
    assert plain.tokens == 2 * plain.rounds


def test_the_accept_rate_of_a_depth_is_that_of_the_trees_that_reach_it():
    totals = Totals(3)
    # two plain rounds, four with chains of one, four with chains of three
    totals.count_rounds(SpecStats((0, 4, 4, 1, 1), depths=(2, 4, 0, 4), drafted=16))
    assert totals.accepted == 9 and totals.accept_rate == 9 / 16
    assert totals.per_depth() == [6 / 8, 2 / 4, 1 / 4]
    assert totals.drafted_accept_length == 1 + 9 / 8
    totals.merge(totals)
    assert totals.accept_rate == 9 / 16
