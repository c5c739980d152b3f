"""Which groups a step takes depends on lengths and rewards, and on no speed, slot or order."""

import dataclasses
import itertools
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.engine.request import SampleOutput, SpecStats
from specjax.engine.sequence import Finished
from specjax.parallel.agreement import SingleHost
from train.data.tasks.layout import Problem
from train.rollout.groups import (
    Group,
    GroupStatus,
    Response,
    Rule,
    begin_step,
    end_step,
    select,
    token_versions,
)
from train.rollout.step import StepRollout

MOST = 12  # tokens of a sample


class FakeSample:
    def __init__(self, job, progress, version):
        self.job, self.version = job, version
        self.tokens = list(progress.token_ids) if progress else []

    def output(self, reason="abort"):
        tokens = list(self.tokens)
        return SampleOutput(
            tokens,
            None,
            [-float(t) for t in tokens],
            reason,
            SpecStats((0, 0, 0)),
            ((0, self.version),) if tokens else (),
            transformed_logprobs=doubled(tokens),
        )


class FakeEngine:
    """Samples of known lengths, at speeds that change from step to step, in any order.

    A token tells which sample, position and step it came from, so that a token of the wrong step
    is seen.
    """

    def __init__(self, speeds: random.Random, slots: int):
        self.runner, self.version = SimpleNamespace(steps=1, agreement=SingleHost()), 0
        self.spec = self.limits = self.telemetry = None
        self.unfinished = self  # has `make`
        self.engines, self.drained = (self,), ()
        self._dice, self._slots, self._samples = speeds, slots, {}

    @property
    def has_work(self) -> bool:
        return bool(self._samples)

    def make(self, job, progress=None) -> FakeSample:
        assert not progress or progress.transformed_logprobs == doubled(progress.token_ids)
        return FakeSample(job, progress, self.version)

    def queue(self, sample) -> FakeSample:
        self._samples[sample] = None
        return sample

    def add(self, job, progress=None) -> FakeSample:
        return self.queue(self.make(job, progress))

    def clear(self):
        self._samples = {}

    def abort(self, sample):
        if sample not in self._samples:  # it has ended, which was not told yet
            return None
        del self._samples[sample]
        return self._output(sample, "abort")

    def _output(self, sample, reason):
        sample.version = self.version
        return sample.output(reason)

    def step(self):
        waiting = list(self._samples)
        self._dice.shuffle(waiting)
        events = []
        for sample in waiting[: self._slots]:
            job, tokens = sample.job, sample.tokens
            sample.version = self.version
            for _ in range(self._dice.randint(0, 4)):
                if len(tokens) < job.length:
                    tokens.append(token(job.place, job.sample, len(tokens), self.version))
            if len(tokens) == job.length:
                del self._samples[sample]
                events.append(Finished(sample, self._output(sample, "stop")))
        return events


def doubled(tokens) -> list[float]:
    """Log-probabilities after all transforms, in this world: twice those of the temperature."""
    return [-2.0 * t for t in tokens]


def token(place: int, sample: int, position: int, version: int) -> int:
    return ((place * 4 + sample) * 64 + position) * 64 + version


@dataclasses.dataclass(frozen=True)
class Data:
    """Lengths [place][sample] under any weights, and whether a group's rewards differ, for ever."""

    lengths: tuple[tuple[int, ...], ...]
    informative: tuple[bool, ...]

    def length(self, place: int, sample: int) -> int:
        return self.lengths[place % len(self.lengths)][sample]

    def rewards(self, place: int) -> list[float]:
        return [1.0, float(not self.informative[place % len(self.informative)])]


def worlds():
    lengths = st.lists(st.tuples(*[st.integers(1, MOST)] * 2), min_size=1, max_size=9)
    return st.builds(
        Data, lengths.map(tuple), st.lists(st.booleans(), min_size=1, max_size=5).map(tuple)
    )


def rules():
    return st.builds(
        lambda prompts, more, dynamic, batches: Rule(prompts, prompts + more, dynamic, batches),
        st.integers(1, 4),
        st.integers(0, 4),
        st.booleans(),
        st.integers(1, 4),
    )


class FakeDraws:
    """Problems in order, from a position on."""

    def __init__(self, world: Data, position: int, step: int):
        self._world, self._positions, self._step = world, itertools.count(position), step

    def draw(self) -> Group:
        place = next(self._positions)
        problem, responses = Problem("", "", place), [Response(), Response()]
        return Group(place, place + 1, self._step, problem, [1], responses)

    def jobs(self, index, group):
        place = {"place": group.position, "prompt_hash": group.position % 12}
        lengths = [self._world.length(group.position, i) for i in range(2)]
        return [SimpleNamespace(**place, sample=i, length=n) for i, n in enumerate(lengths)]


class FakeRewards:
    """Rewards that are known when they were asked for `late` times before."""

    def __init__(self, world: Data, late: int):
        self._world, self._late, self._times = world, late, Counter()

    def rewards(self, group):
        self._times[group.position] += 1
        known = self._times[group.position] > self._late
        return self._world.rewards(group.position) if known else None

    def add(self, *unused):
        pass

    begin = wait = add


def run_steps(world: Data, rule: Rule, partial: bool, speeds: int, slots: int, late: int = 0):
    """What every step learned from and carried."""
    engine = FakeEngine(random.Random(speeds), slots)
    position, carried, seen = 0, [], []
    for step in range(1, 5):
        engine.version = step
        carried, stale = begin_step(carried, step, max_staleness=2)
        run = StepRollout(
            engine, rule, partial, FakeDraws(world, position, step), FakeRewards(world, late)
        )
        selection = run.run(carried)
        assert not engine.has_work
        ended = end_step(rule, run.groups, selection, step, partial)
        drawn = run.groups[len(carried) : selection.candidates]
        position = drawn[-1].next_position if drawn else position
        carried = ended.carried
        seen.append(
            (
                selection.budget,
                position,
                [g.position for g in stale],
                [g.position for g in ended.complete],
                [ended.complete[i].position for i in ended.selected],
                [contents(ended.complete[i]) for i in ended.selected],
                [contents(g) for g in ended.carried],
                [g.position for g in ended.unfinished],
            )
        )
        kept = len(ended.selected) + len(ended.carried)
        assert ended.drawn + len(run.groups[: selection.candidates]) - len(drawn) == (
            kept + ended.dropped
        ), "every group is in one place"

    return seen


def contents(group: Group):
    return group.position, [
        (
            list(r.token_ids),
            list(r.logprobs) if (r.transformed_logprobs or []) == doubled(r.token_ids) else None,
            list(r.weight_versions),
            r.finish_reason,
        )
        for r in group.responses
    ]


@given(worlds(), rules(), st.booleans(), st.integers(1, 3), st.integers(1, 9), st.integers(0, 5))
def test_no_speed_order_slot_or_late_reward_changes_what_is_selected_or_carried(
    world, rule, partial, seed, slots, late
):
    expected = run_steps(world, rule, partial, 0, 50)
    assert run_steps(world, rule, partial, seed, slots, late=late) == expected


@given(worlds(), rules(), st.integers(1, 9))
def test_the_choice_is_the_one_of_the_rule_applied_to_everything(world, rule, slots):
    """The rule of the module's docstring, word by word, to groups whose ends are all known."""
    budgets = [max(world.length(p, 0), world.length(p, 1)) for p in range(200)]
    teaches = [not rule.dynamic or len(set(world.rewards(p))) > 1 for p in range(200)]

    def places(budget):
        count, before = rule.in_flight, None
        while count != before:  # until no group is left to be replaced
            before = count
            dull = sum(budgets[p] <= budget and not teaches[p] for p in range(count))
            count = min(rule.in_flight + dull, rule.in_flight * rule.batches)
        return count

    def fit(budget):
        return [p for p in range(places(budget)) if budgets[p] <= budget and teaches[p]]

    least = next((b for b in range(MOST + 1) if len(fit(b)) >= rule.prompts), None)
    wanted = fit(MOST if least is None else least)
    wanted = sorted(wanted, key=lambda p: (budgets[p], p))[: rule.prompts]
    (budget, position, _, _, selected, *_), *_ = run_steps(world, rule, False, 1, slots)
    assert budget == least and sorted(selected) == sorted(wanted)
    assert position == places(MOST if least is None else least)


@given(worlds(), rules(), st.integers(1, 9))
def test_what_is_carried_was_cut_to_the_budget_and_knows_which_step_sampled_it(world, rule, slots):
    for step, (budget, *_, carried, _) in enumerate(
        run_steps(world, rule, True, 2, slots), start=1
    ):
        assert budget is not None or not carried
        for place, responses in carried:
            for sample, (tokens, logprobs, versions, finish) in enumerate(responses):
                length = world.length(place, sample)
                sampled = token_versions(versions, len(tokens)).tolist()
                assert tokens == [token(place, sample, i, v) for i, v in enumerate(sampled)]
                assert logprobs == [-float(t) for t in tokens]
                assert (finish is not None) == (len(tokens) == length)
                assert finish or sampled.count(step) == budget


def scored_group(*rewards) -> Group:
    """A complete group of samples of three tokens."""
    responses = [
        Response([1, 2, 3], emitted=3, finish_reason="stop", reward=reward) for reward in rewards
    ]
    return Group(0, 1, 1, Problem("", "", 0), [1], responses, list(rewards))


@pytest.mark.parametrize(
    ("rewards", "informative"), [((1, 0), True), ((1, 1), False), ((1,), True)]
)
def test_groups_whose_rewards_differ_teach_something(rewards, informative):
    group = scored_group(*rewards)
    assert group.status == (3, 3, informative)
    rule = Rule(1, 1, dynamic=True)
    assert (select(rule, [group.status]).selected == [0]) == informative
    ended = end_step(rule, [group], select(rule, [group.status]), 1, partial=True)
    assert (ended.selected == [0]) == informative and not ended.carried


def test_replacements_are_replaced_up_to_the_limit_which_may_be_none():
    rule = Rule(prompts=2, in_flight=2, dynamic=True, batches=3)
    dull = [GroupStatus(5, 5, informative=False)]
    for number in range(1, 6):
        assert select(rule, [GroupStatus(1), *dull * number]).candidates == min(2 + number, 6)
    short = select(rule, [GroupStatus(4, 4), *dull * 5])
    assert short == (None, 6, [0], True), "the step ends with what there is"
    unlimited = dataclasses.replace(rule, batches=0)
    assert select(unlimited, [GroupStatus(4, 4), *dull * 40]).candidates == 42
    assert select(unlimited, [GroupStatus(4, 4), *dull * 40, GroupStatus(3, 3)]) == (
        5,
        42,
        [41, 0],
        True,
    )


def test_groups_of_which_a_token_is_too_old_are_dropped_whole():
    def group(*versions):
        responses = [Response(token_ids=[1] * 4, weight_versions=[(0, v)]) for v in versions]
        return Group(0, 1, min(versions), Problem("", "", 0), [1], responses)

    groups = [group(3, 5), group(2, 5), Group(0, 1, 1, None, [1], [Response()])]
    kept, stale = begin_step(groups, step=6, max_staleness=3)
    assert kept == [groups[0], groups[2]] and stale == [groups[1]]
    assert all(r.num_carried == len(r.token_ids) for g in kept for r in g.responses)
