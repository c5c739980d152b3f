"""The engine under load: whatever happens to a request, its tokens are those of plain decoding."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from shared import CFG, compilations_of, weights
from tiny import prompts_of

from specjax import LLM, SamplingParams, SpecConfig
from specjax.control import ControlConfig, EmaConfig, make_controller
from specjax.control.base import Controller
from specjax.engine.compare import first_difference
from specjax.engine.engine import Engine
from specjax.engine.request import make_jobs
from specjax.engine.sequence import Progress
from specjax.engine.settings import EngineConfig

VOCAB, MAX_LEN = CFG.vocab_size, 96
ARMS = ("off", "1_1_2", "3_1_4")
ONE = SamplingParams(max_tokens=40, ignore_eos=True)
LONG = SamplingParams(max_tokens=80, ignore_eos=True)


class AtRandom(Controller):
    """Any strategy, every chunk."""

    kind = "random"

    def __init__(self, seed=0):
        super().__init__(ARMS)
        self._random = np.random.default_rng(seed)

    def _choose(self, batch_size):
        return str(self._random.choice(self.arms))

    def _learn(self, seen):
        pass


def engine_of(spec="3_1_4", batch=4, control=None, **config) -> Engine:
    spec = None if spec is None else SpecConfig(spec)
    engine = Engine(CFG, spec, batch, MAX_LEN, config=EngineConfig(**config), control=control)
    engine.set_params(*weights() if spec else weights()[:1])
    return engine


@functools.cache
def plain() -> Engine:
    """One slot: one sample after the other."""
    return engine_of(None, batch=1)


@functools.cache
def restless() -> Engine:
    """Small pages, a pool too small for four long samples, another strategy every chunk."""
    control = ControlConfig(controller="bandit", strategies=ARMS)
    probe = engine_of(batch=4, page_size=16, control=control)
    engine = engine_of(
        batch=4,
        page_size=16,
        chunk_tokens=8,
        prefill_chunk=16,
        cache_bytes=12 * probe.runner.page_bytes,
        control=control,
    )
    engine.warm_up()
    engine.controller = AtRandom()
    return engine


def tokens_of(jobs) -> list[list[int]]:
    samples, _ = plain().generate(jobs)
    return [sample.token_ids for sample in samples]


def random_jobs(rng, count):
    jobs = []
    while len(jobs) < count:
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist()
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            max_tokens=int(rng.integers(1, MAX_LEN - len(prompt) + 1)),
            seed=int(rng.integers(1 << 30)),
            n=int(rng.integers(1, 4)),
            ignore_eos=bool(rng.integers(2)),
        )
        jobs += make_jobs(prompt, params, CFG.eos_token_ids, request=len(jobs))
    return jobs


def chaos(tokens: int, seed=0):
    """Random arrivals, aborts, preemptions and strategies; differences from plain decoding.

    Returns:
      tokens compared, unexplained differences, explained ones.
    """
    engine, rng = restless(), np.random.default_rng(seed)
    compared, explained, unexplained, aborted = 0, [], [], 0
    before = engine.scheduler.preemptions
    while compared < tokens:
        waiting, tickets, samples = random_jobs(rng, 60), {}, []
        while waiting or engine.has_work:
            for _ in range(int(rng.integers(0, 4))):
                if waiting:
                    job = waiting.pop()
                    tickets[engine.add(job)] = job
            if tickets and rng.random() < 0.03:
                ticket = int(rng.choice(list(tickets)))
                cut = engine.abort(ticket)
                if cut is not None:
                    assert cut.finish_reason == "abort"
                    samples.append((tickets[ticket], cut))
                    aborted += 1
            samples += [(event.job, event.sample) for event in engine.step()]
        assert engine.scheduler.pool.used == 0
        expected = tokens_of([job for job, _ in samples])
        for (job, sample), whole in zip(samples, expected, strict=True):
            compared += len(sample.token_ids)
            if sample.finish_reason == "abort":
                whole = whole[: len(sample.token_ids)]
            if sample.token_ids != whole:
                where = engine.runner, job.request, job.sample, job, whole, sample.token_ids
                difference = first_difference(*where)
                (explained if difference.explained else unexplained).append(difference)
    assert aborted and engine.scheduler.preemptions > before
    return compared, unexplained, explained


def test_20_000_tokens_under_chaos_are_those_of_plain_decoding():
    compared, unexplained, _ = chaos(20_000)
    assert compared >= 20_000 and not unexplained, "\n".join(map(str, unexplained))


@pytest.mark.slow
def test_200_000_tokens_under_chaos_are_those_of_plain_decoding():
    compared, unexplained, _ = chaos(200_000, seed=1)
    assert compared >= 200_000 and not unexplained, "\n".join(map(str, unexplained))


def test_chaos_would_notice_a_sequence_that_continues_with_another_ones_pages(monkeypatch):
    """Else the tests above would prove nothing."""
    from specjax.engine import engine as module

    right = module.admission_of

    def wrong(starts, count, runner):
        new = right(starts, count, runner)
        return new._replace(target=new.target * 0)  # the copied page is lost

    monkeypatch.setattr(module, "admission_of", wrong)
    assert chaos(2_000, seed=2)[1]


# --- schedule -> run -> postprocess ---------------------------------------------------------------


@pytest.fixture
def chunks(monkeypatch):
    """What an engine enqueues and reads, in order: (kind, detail)."""

    def watch(engine):
        seen, runner = [], engine.runner
        chunk, prefill, read = runner.chunk, runner.prefill, engine._postprocess

        def enqueue(strategy, features, slots, active, table, rounds, leave_at=0):
            seen.append(("chunk", (strategy, len(slots), int(active.sum()))))
            return chunk(strategy, features, slots, active, table, rounds, leave_at)

        def reads(piece):
            seen.append(("prefill", piece.tokens.shape))
            return prefill(piece)

        def postprocess(done):
            seen.append(("read", done.strategy))
            return read(done)

        monkeypatch.setattr(runner, "chunk", enqueue)
        monkeypatch.setattr(runner, "prefill", reads)
        monkeypatch.setattr(engine, "_postprocess", postprocess)
        return seen

    return watch


@functools.cache
def warm() -> Engine:
    """Everything compiled, batches of up to 8."""
    engine = engine_of(batch=8, page_size=16, prefill_chunk=16)
    engine.warm_up()
    return engine


def jobs_of(prompt, params, request=0):
    return make_jobs(prompt, params, (), request=request)


def test_the_batch_shrinks_with_what_runs_and_slots_are_refilled(chunks):
    engine = warm()
    seen = chunks(engine)
    lengths = [4] * 6 + [40] * 3 + [4] * 6
    jobs = [
        job
        for i, count in enumerate(lengths)
        for job in jobs_of([i + 1, 2], dataclasses.replace(ONE, max_tokens=count), i)
    ]
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)
    batches = [detail[1:] for kind, detail in seen if kind == "chunk"]
    assert batches[0] == (8, 8), "as many as there are slots"
    assert (4, 3) in batches, "a tail of three runs as a batch of four"
    assert all(bucket == 1 << (running - 1).bit_length() for bucket, running in batches)


def test_the_next_chunk_is_enqueued_before_the_last_one_is_read(chunks):
    engine = warm()
    seen = chunks(engine)
    engine.generate(jobs_of([3, 4], ONE))
    kinds = [kind for kind, _ in seen if kind != "prefill"]
    assert kinds[:4] == ["chunk", "chunk", "read", "chunk"]
    in_flight = np.cumsum([1 if kind == "chunk" else -1 for kind in kinds])
    assert in_flight.max() == 2


def test_after_a_chunk_that_ended_early_the_next_one_waits_for_what_it_brought(chunks):
    """It would be enqueued for those that ran before, too few of whom still run, and do nothing."""
    engine = warm()
    seen = chunks(engine)
    lengths = [3, 40, 40, 40, 40, 40, 40, 40, 6]
    jobs = [
        jobs_of([i + 1, 2], dataclasses.replace(ONE, max_tokens=count), i)[0]
        for i, count in enumerate(lengths)
    ]
    engine.generate(jobs)
    kinds = [kind for kind, _ in seen if kind != "prefill"]
    assert kinds[:6] == ["chunk", "chunk", "read", "read", "chunk", "read"]


def test_slots_are_refilled_though_those_that_run_hold_most_pages(chunks):
    """They have them already: what each may still need is little, and nothing past its end."""
    engine = engine_of(None, batch=16, page_size=64)
    seen = chunks(engine)
    jobs = [
        jobs_of([i + 1, 2], dataclasses.replace(ONE, max_tokens=66 + 3 * (i % 8)), i)[0]
        for i in range(48)
    ]
    engine.generate(jobs)
    running = [detail[2] for kind, detail in seen if kind == "chunk"]
    assert min(running[: len(running) // 2]) == 16, running


def test_a_prompt_is_read_once_for_all_its_samples(chunks):
    engine = warm()
    seen = chunks(engine)
    jobs = jobs_of(list(range(20, 60)), dataclasses.replace(ONE, n=7, max_tokens=6))
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)
    pieces = [shape for kind, shape in seen if kind == "prefill"]
    assert [rows for rows, _ in pieces] == [1] * 3, "39 positions in pieces of 16"


def test_a_long_prompt_is_read_in_pieces_between_the_chunks_of_those_that_run(chunks):
    engine = warm()
    engine.add(jobs_of([5, 6], dataclasses.replace(ONE, max_tokens=60))[0])
    engine.step()
    seen = chunks(engine)
    [job] = jobs_of(list(range(1, 61)), dataclasses.replace(ONE, max_tokens=4))
    ticket, found = engine.add(job), {}
    while engine.has_work:
        found |= {event.ticket: event.sample for event in engine.step()}
    kinds = [kind for kind, _ in seen if kind != "read"]
    assert kinds.count("prefill") == 4
    assert "prefill prefill" not in " ".join(kinds), "nobody waits for more than one piece"
    assert found[ticket].token_ids == tokens_of([job])[0]


def test_a_short_sample_ends_before_the_long_one_that_ran_when_it_came():
    """What a chunk in flight emits for others says nothing of who was not in it."""
    engine = warm()
    long = engine.add(jobs_of([5, 6], dataclasses.replace(ONE, max_tokens=90))[0])
    engine.step()
    short = engine.add(jobs_of([7, 8], dataclasses.replace(ONE, max_tokens=2), 1)[0])
    ended = []
    while engine.has_work:
        ended += [event.ticket for event in engine.step()]
    assert ended == [short, long]


@pytest.mark.parametrize(("strategy", "plain"), [("off", 1.0), ("3_1_4", 0.0)])
def test_rounds_that_drafted_nothing_are_counted_apart(strategy, plain):
    """The head is not to blame for rounds in which it was not asked."""
    engine = restless()
    before, engine.controller = engine.controller, make_controller("static", (strategy,))
    _, totals = engine.generate(jobs_of([3, 4], dataclasses.replace(ONE, n=2)))
    engine.controller = before
    assert totals.plain_rounds == plain * totals.rounds
    assert np.isnan(totals.drafted_accept_length) == (strategy == "off")


def test_a_sample_that_has_ended_already_is_refused():
    progress = Progress([1] * 4, [-1.0] * 4, [(0, 1)])
    [job] = jobs_of([5, 6], dataclasses.replace(ONE, max_tokens=4))
    with pytest.raises(ValueError, match="4 tokens already, and there is room for 4"):
        warm().add(job, progress)


def test_what_was_warmed_up_compiles_nothing_whatever_comes():
    engine = warm()
    rng = np.random.default_rng(3)
    built = engine.runner.compilations

    def work():
        for count in (1, 3, 20):
            jobs = [j for j in random_jobs(rng, count) if j.params.temperature > 0]
            engine.generate(jobs)

    assert compilations_of(work) == 0 and engine.runner.compilations == built


def test_memory_and_pages_are_what_they_were_after_many_requests():
    engine = warm()
    rng = np.random.default_rng(4)

    def live():
        return sum(x.nbytes for x in jax.live_arrays())

    def work(count):
        for _ in range(count):
            prompt = rng.integers(0, VOCAB, 5).tolist()
            engine.generate(jobs_of(prompt, dataclasses.replace(ONE, max_tokens=4, n=8)))

    work(2)
    before = live()
    work(10)
    assert live() == before and engine.scheduler.pool.used == 0
    assert not engine._sequences and not engine.asked and not engine._in_flight


# --- preemption, abort, interruption --------------------------------------------------------------


def test_a_pool_too_small_for_all_preempts_the_latest_and_changes_no_token():
    engine = restless()
    before = engine.scheduler.preemptions
    jobs = [j for i in range(4) for j in jobs_of([i + 1], LONG)]
    samples, _ = engine.generate(jobs)
    assert engine.scheduler.preemptions > before
    assert [s.token_ids for s in samples] == tokens_of(jobs)


def test_a_request_that_can_never_fit_is_refused_with_what_to_do():
    probe = engine_of(page_size=16)
    engine = engine_of(page_size=16, cache_bytes=4 * probe.runner.page_bytes)
    with pytest.raises(ValueError, match="may take 7 cache pages.*there are 4; raise cache_bytes"):
        engine.generate(jobs_of([1], dataclasses.replace(ONE, max_tokens=90)))
    with pytest.raises(ValueError, match="less than one page"):
        engine_of(page_size=16, cache_bytes=10)
    assert not engine.has_work


def test_an_aborted_request_leaves_what_it_has_and_frees_its_pages():
    engine = warm()
    first, second = (jobs_of([i, 2], ONE, i)[0] for i in (1, 2))
    tickets = [engine.add(first), engine.add(second)]
    for _ in range(3):
        engine.step()
    used = engine.scheduler.pool.used
    cut = engine.abort(tickets[0])
    assert cut.finish_reason == "abort" and engine.scheduler.pool.used < used
    assert engine.abort(tickets[0]) is None and engine.progress(tickets[0]) is None
    events = []
    while engine.has_work:
        events += engine.step()
    assert [e.ticket for e in events] == tickets[1:]
    whole = tokens_of([first, second])
    assert 0 < len(cut.token_ids) < len(whole[0])
    assert cut.token_ids == whole[0][: len(cut.token_ids)]
    assert events[0].sample.token_ids == whole[1]


def test_an_interrupted_call_leaves_nothing_behind():
    engine = warm()

    def interrupt(finished, totals):
        raise KeyboardInterrupt

    jobs = jobs_of([1, 2, 3], dataclasses.replace(ONE, n=3))
    with pytest.raises(KeyboardInterrupt):
        engine.generate(jobs, interrupt)
    assert not engine.has_work and engine.scheduler.pool.used == 0
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)


def test_an_engine_may_be_told_to_use_fewer_slots_and_then_all_again(chunks):
    engine = warm()
    compiled, seen = engine.runner.compilations, chunks(engine)
    jobs = jobs_of([1, 2, 3], dataclasses.replace(ONE, n=8))
    engine.clear(slots=3)
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)
    assert max(detail[1:] for kind, detail in seen if kind == "chunk") == (4, 3)
    engine.clear()
    engine.generate(jobs)
    assert max(detail[1:] for kind, detail in seen if kind == "chunk") == (8, 8)
    assert engine.runner.compilations == compiled
    for slots in (0, 9):
        with pytest.raises(ValueError, match="between 1 and 8"):
            engine.clear(slots)


def test_generate_is_refused_while_added_samples_run():
    engine = warm()
    engine.add(jobs_of([1], ONE)[0])
    with pytest.raises(RuntimeError, match="samples that were added are not finished"):
        engine.generate(jobs_of([2], ONE))
    assert len(engine.suspend()) == 1 and not engine.has_work


def test_what_is_suspended_continues_with_the_same_tokens_and_logprobs():
    engine = warm()
    jobs = jobs_of([4, 5, 6], dataclasses.replace(ONE, n=3))
    for job in jobs:
        engine.add(job)
    for _ in range(4):
        engine.step()
    suspended = engine.suspend()
    assert all(0 < len(progress.tokens) < 40 for _, _, progress in suspended)
    tickets = [engine.add(job, progress) for _, job, progress in suspended]
    found = {}
    while engine.has_work:
        found |= {event.ticket: event.sample for event in engine.step()}
    whole, _ = plain().generate([job for _, job, _ in suspended])
    for ticket, expected in zip(tickets, whole, strict=True):
        assert found[ticket].token_ids == expected.token_ids
        np.testing.assert_allclose(found[ticket].logprobs, expected.logprobs, atol=1e-4)


# --- weights --------------------------------------------------------------------------------------


def test_new_weights_reach_running_sequences_and_every_token_knows_its_version():
    """The tokens after the swap are those of the new policy after the tokens so far."""
    engine = warm()
    old, new = weights(), weights(seed=5)
    [job] = jobs_of([7, 8, 9], LONG)
    ticket, version = engine.add(job), engine.version
    engine.step()
    built = engine.runner.compilations
    engine.set_params(*new)
    before = engine.progress(ticket)
    samples = []
    while engine.has_work:
        samples += [event.sample for event in engine.step()]
    assert engine.runner.compilations == built
    engine.set_params(*old)
    [sample], count = samples, len(before.tokens)
    assert sample.weight_versions == ((0, version), (count, version + 1)) and 0 < count < 80
    whole = tokens_of([job])[0]
    assert sample.token_ids[:count] == whole[:count] == before.tokens
    fresh = engine_of(None, batch=1)
    fresh.set_params(new[0])
    fresh.add(job, before)
    [event] = [e for _ in range(99) if fresh.has_work for e in fresh.step()]
    assert event.sample.token_ids == sample.token_ids != whole


def test_caches_of_old_weights_may_be_kept_and_are_counted():
    engine = warm()
    old, new = weights(), weights(seed=5)
    job = jobs_of([7, 8, 9], LONG)[0]
    outputs = []
    for running in ("keep", "recompute"):
        engine.set_params(*old)
        ticket = engine.add(job)
        engine.step()
        stale = engine.stale_positions
        engine.set_params(*new, running=running)
        known = 3 + len(engine.progress(ticket).tokens)
        assert engine.stale_positions - stale == (known if running == "keep" else 0)
        outputs += [e.sample.token_ids for _ in range(99) if engine.has_work for e in engine.step()]
    engine.set_params(*old)
    assert outputs[0] != outputs[1], "what the old weights made of the prompt does matter"
    with pytest.raises(ValueError, match="'recompute' or 'keep', got 'drop'"):
        engine.set_params(*new, running="drop")


def test_weights_that_do_not_arrive_as_they_were_sent_stop_everything(monkeypatch, caplog):
    engine = engine_of()
    before = dict(engine.runner.checksums)
    assert set(before) == {"policy", "draft"}
    params, head = weights(seed=5)
    engine.set_params(params, head)
    assert not set(before.items()) & set(engine.runner.checksums.items())
    engine.set_params(*weights())
    assert engine.runner.checksums == before
    layout = engine.runner._layout

    def lossy(params):
        arrived = layout(params)
        return dict(arrived, embed=arrived["embed"].at[3, 3].add(1e-3))

    monkeypatch.setattr(engine.runner, "_layout", lossy)
    with pytest.raises(RuntimeError, match="policy's weights have checksum .* do not trust"):
        engine.set_params(*weights())
    monkeypatch.undo()
    engine.set_params(params, jax.tree.map(lambda x: x * np.nan, head))
    assert "draft's weights are not finite" in caplog.text


# --- controllers ----------------------------------------------------------------------------------


def test_a_controller_chooses_among_compiled_strategies_through_llm():
    control = ControlConfig(controller="goodput", strategies=ARMS)
    llm = LLM((CFG, *weights()), SpecConfig("3_1_4"), max_batch=2, max_len=64, control=control)
    start_up = llm.warm_up()
    assert start_up.calibration_seconds > 0 and f"compiled {start_up.programs} programs" in str(
        start_up
    )
    costs = llm.engine.controller.costs
    assert all(costs.known(arm, batch) for arm in ARMS for batch in (1, 2))
    prompts = prompts_of(5, VOCAB, seed=8)
    assert compilations_of(lambda: llm.generate(prompts, ONE)) == 0
    expected = tokens_of([j for i, p in enumerate(prompts) for j in jobs_of(p, ONE, i)])
    assert [o.samples[0].token_ids for o in llm.generate(prompts, ONE)] == expected
    fields = llm.engine.controller.log_fields()
    assert fields["strategy"] in ARMS and fields["accept_length"] >= 1
    state = llm.engine.controller.state()
    llm.engine.controller.load_state(state)
    assert llm.engine.controller.state() == state


def test_several_strategies_are_compiled_at_the_first_request_if_not_before():
    control = ControlConfig(controller="ema", ema=EmaConfig(candidate_steps=(0, 1)))
    llm = LLM((CFG, *weights()), SpecConfig("1_1_2"), max_batch=1, max_len=32, control=control)
    llm.generate([[1, 2]], SamplingParams(max_tokens=4))
    built = llm.engine.runner.compilations
    assert llm.engine.runner.buckets("off", llm.engine.runner.plan.features) == [1]
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20))
    assert llm.engine.runner.compilations == built


def test_control_without_speculation_and_in_invariant_mode_is_refused():
    control = ControlConfig(strategies=ARMS)
    with pytest.raises(ValueError, match="spec is None; give a SpecConfig"):
        LLM((CFG, *weights()), None, max_len=32, control=control)
    with pytest.raises(ValueError, match="invariant mode runs one program throughout"):
        LLM((CFG, *weights()), SpecConfig("1_1_2", invariant=True), max_len=32, control=control)
    with pytest.raises(ValueError, match="exact for chains only"):
        trees = ControlConfig(strategies=("off", "2x2"))
        LLM((CFG, *weights()), SpecConfig("1_1_2", acceptance="block"), max_len=32, control=trees)


def test_engine_settings_are_checked():
    with pytest.raises(ValueError, match="order must be 'fifo' or 'longest_first', got 'lifo'"):
        EngineConfig(order="lifo")
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1, got 0"):
        EngineConfig(chunk_tokens=0)
