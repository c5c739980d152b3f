"""Which groups a step learns from: a rule about tokens, in which no clock and no speed enters.

A group is one problem with its G samples. Its *budget* in a step is the number of tokens that its
longest sample needs in this step; what a carried sample brought along does not count. The
candidates are the groups carried from the step before, then the next problems in order. With a
budget T the step

    places(T)   looks at the first `in_air` candidates, and at one more for each group that it looks
                at with a budget of T or less that teaches nothing, for these are replaced, and so
                are their replacements (only with dynamic sampling, and up to `most` in all)
    fit(T)      finds among these the groups with a budget of T or less that teach something
                (without dynamic sampling: all of them do)

and the budget of the step is the smallest T that fits `prompts` groups. These groups, the first
`prompts` by budget and then by place, are *selected*. If no T fits so many, for `most` candidates
were looked at, all of these run to their end, and those that teach something are selected: the step
is short of groups, and says so. The other candidates

    with a budget of T or less    were complete: they are dropped if they teach nothing, else they
                                  wait for the next step, or are dropped without `partial`
    with a larger budget          are carried to the next step or, without `partial`, dropped; every
                                  sample is cut to T tokens of this step, however far it got

and what was started beyond places(T) counts as never drawn: the next step draws it again. Problems
that are dropped come again with the next pass over the data, not before.

All this depends on lengths and rewards alone, and both grow with T one way: more groups fit, and
more are replaced. So a choice can be made while samples run, and can only sink: the groups that are
known to fit give an upper bound of T (`Choice.budget`), beyond which nobody has to run. The choice
is certain when no group within places(T) is left that could still have a budget of T or less. How
fast samples run, in which order, and in how many slots decides when that is, and nothing else.

Cutting is what makes a carried sample's tokens independent of the clock: in the next step it goes
on under other weights, so where it stood must not depend on how fast it was.

The step prefers what is short, as all early stopping does; `train.collect` reports by how much.
And it can be over in no time: `prompts` groups that were carried and are nearly or wholly complete
fill a step that samples next to nothing and learns from stale tokens. With fewer than 2 * `prompts`
groups in the air fewer than `prompts` are carried, and every step has some of its own.
"""

from __future__ import annotations

import base64
import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.engine.request import SampleOutput, SpecStats
from train.tasks.layout import Problem

# --- the rule --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rule:
    """How many groups a step wants.

    Attributes:
      prompts: groups to select. in_air: groups to start with, at least `prompts`.
      dynamic: only groups whose rewards differ count, and the others are replaced.
      batches: candidates that are looked at at most, in units of `in_air`; 0: there is no limit.
    """

    prompts: int
    in_air: int
    dynamic: bool = False
    batches: int = 1

    @property
    def most(self) -> int | None:
        """Candidates that a step looks at at most; None: as many as it takes."""
        if not self.dynamic:
            return self.in_air
        return self.in_air * self.batches if self.batches > 0 else None


class Seen(NamedTuple):
    """What is known of a group while it runs.

    Attributes:
      least: tokens that it needs in this step at least. budget: what it needs, once it is complete.
      informative: its rewards differ; once it is complete.
    """

    least: int
    budget: int | None = None
    informative: bool = True


class Choice(NamedTuple):
    """What is known of a step while it runs.

    Attributes:
      budget: of the step, or an upper bound of it; None: everything runs to its end, so far.
      places: candidates that count, of which some may have to be drawn yet.
      selected: of these, by index. certain: nothing of this will change.
    """

    budget: int | None
    places: int
    selected: list[int]
    certain: bool


def decide(rule: Rule, seen: Sequence[Seen]) -> Choice:
    """Applies the rule to what is known of the candidates, in order."""
    budgets = sorted({s.budget for s in seen if s.budget is not None})
    fits = bisect.bisect_left(budgets, rule.prompts, key=lambda b: len(_fit(rule, seen, b)))
    budget = budgets[fits] if fits < len(budgets) else None
    places = _places(rule, seen, budget)
    certain = places <= len(seen) and not any(_may_fit(s, budget) for s in seen[:places])
    return Choice(budget, places, _fit(rule, seen, budget)[: rule.prompts], certain)


def _within(seen: Seen, budget: int | None) -> bool:
    return seen.budget is not None and (budget is None or seen.budget <= budget)


def _may_fit(seen: Seen, budget: int | None) -> bool:
    """Not complete, and perhaps within the budget."""
    return seen.budget is None and (budget is None or seen.least <= budget)


def _places(rule: Rule, seen: Sequence[Seen], budget: int | None) -> int:
    places, most = rule.in_air, rule.most
    for index, group in enumerate(seen):
        if index >= places or places == most:
            break
        places += rule.dynamic and _within(group, budget) and not group.informative
    return places


def _fit(rule: Rule, seen: Sequence[Seen], budget: int | None) -> list[int]:
    here = seen[: _places(rule, seen, budget)]
    found = [
        (s.budget, index)
        for index, s in enumerate(here)
        if _within(s, budget) and (s.informative or not rule.dynamic)
    ]
    return [index for _, index in sorted(found)]


# --- groups ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Response:
    """A sample, perhaps on its way.

    Attributes:
      tokens: as far as they were taken out of the engine. logprobs: by the engine, of each, of the
        temperature-scaled logits. transformed: likewise after all transforms; None unless the run
        is trained with these.
      loss_mask: of the tokens, 1 where the policy sampled it and 0 where something else wrote it
        (what a tool or an environment said between two turns); None: the policy sampled them all.
        Whoever adds tokens of the second kind to `tokens` sets it, for all tokens so far. No reward
        or task of this package does: it is for rollouts of several turns. What comes from the
        engine afterwards is marked 1 here.
      given: how many of the tokens earlier steps brought.
      old: the trainer's log-probabilities of these, each under the weights that sampled it.
      versions: runs of these that the same weights sampled, as (index of the first, step).
      finish: why it ended; None: it has not. reward: once that is known. failed: the reward gave
        no number, and counts as 0.
      emitted: tokens of this step, at least. stats, text: of this step, once it ended.
      records: see `SampleOutput.records`.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    given: int = 0
    old: list[float] = dataclasses.field(default_factory=list)
    versions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    finish: str | None = None
    reward: float | None = None
    failed: bool = False
    emitted: int = 0
    stats: SpecStats | None = None
    text: str | None = None
    transformed: list[float] | None = None
    loss_mask: list[int] | None = None
    records: np.ndarray | None = None

    @property
    def new(self) -> int:
        """Tokens of this step that were taken out of the engine."""
        return len(self.tokens) - self.given

    def take(self, sample: SampleOutput, finished: bool) -> None:
        """Takes in what the engine has of the sample: the tokens that it was given, and new ones,
        which the policy sampled."""
        self.tokens, self.logprobs = list(sample.token_ids), list(sample.logprobs)
        if sample.transformed_logprobs is not None:
            self.transformed = list(sample.transformed_logprobs)
        if self.loss_mask is not None:
            more = len(self.tokens) - len(self.loss_mask)
            self.loss_mask = [*self.loss_mask, *[1] * more][: len(self.tokens)]
        self.records = sample.records
        self.stats, self.emitted = sample.stats, max(self.emitted, self.new)
        self.finish = sample.finish_reason if finished else None

    def close(self, step: int, budget: int | None) -> int:
        """Ends the step: cut to its budget (None: as it is), its new tokens are the step's.

        Returns:
          how many tokens were cut off.
        """
        over = 0 if budget is None else max(0, self.new - budget)
        if over:
            del self.tokens[-over:], self.logprobs[-over:]
            for more in (self.transformed, self.loss_mask):
                if more is not None:
                    del more[-over:]
            if self.records is not None:
                self.records = self.records[:-over]
            self.finish = self.reward = None
            self.failed = False
        if self.new:
            self.versions.append((self.given, step))
        return over

    def open(self) -> None:
        """Begins another step."""
        self.given, self.emitted, self.stats = len(self.tokens), 0, None

    def output(self) -> SampleOutput:
        """As the engine would have it, but that versions are steps."""
        nothing = SpecStats(rounds=0, drafted=0, accepted=0, histogram=())
        return SampleOutput(
            token_ids=self.tokens,
            text=self.text,
            logprobs=self.logprobs,
            finish_reason=self.finish or "abort",
            stats=self.stats or nothing,
            weight_versions=tuple(self.versions),
            transformed_logprobs=self.transformed,
            records=self.records,
        )


@dataclasses.dataclass
class Group:
    """A problem and its samples.

    Attributes:
      place: in the order of draws. after: the place to go on drawing from.
      step: that drew it; it keys the samples' noise with run seed and place.
      prompt: token ids. rewards: one per response, once all have ended.
    """

    place: int
    after: int
    step: int
    problem: Problem
    prompt: list[int]
    responses: list[Response]
    rewards: list[float] | None = None

    @property
    def is_complete(self) -> bool:
        return all(r.finish is not None for r in self.responses)

    @property
    def oldest(self) -> int | None:
        """The step of its oldest token."""
        return min((r.versions[0][1] for r in self.responses if r.versions), default=None)

    def seen(self) -> Seen:
        # A sample that has not ended has at least one more token to come.
        least = max(r.emitted + (r.finish is None) for r in self.responses)
        if self.rewards is None:
            return Seen(least)
        return Seen(least, least, max(self.rewards) != min(self.rewards))

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps; the problem is found again by its place."""
        return {
            "place": self.place,
            "after": self.after,
            "step": self.step,
            "responses": [
                {
                    "tokens": _encode(r.tokens, "<i4"),
                    "logprobs": _encode(r.logprobs, "<f4"),
                    "transformed": r.transformed and _encode(r.transformed, "<f4"),
                    "records": None
                    if r.records is None
                    else [list(r.records.shape[1:]), _encode(r.records.ravel(), "<i4")],
                    "old": _encode(r.old, "<f4"),
                    "loss_mask": r.loss_mask and _encode(r.loss_mask, "<i4"),
                    "versions": [list(run) for run in r.versions],
                    "finish": r.finish,
                    "reward": r.reward,
                    "failed": r.failed,
                }
                for r in self.responses
            ],
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any], problem: Problem, prompt: list[int]) -> Group:
        responses = [
            Response(
                tokens=_decode(r["tokens"], "<i4"),
                logprobs=_decode(r["logprobs"], "<f4"),
                old=_decode(r["old"], "<f4"),
                versions=[tuple(run) for run in r["versions"]],
                finish=r["finish"],
                reward=r.get("reward"),  # older checkpoints have none: it is computed again
                failed=r.get("failed", False),
                transformed=(t := r.get("transformed")) and _decode(t, "<f4"),
                records=(f := r.get("records"))
                and np.array(_decode(f[1], "<i4"), np.int32).reshape(-1, *f[0]),
                loss_mask=(m := r.get("loss_mask")) and _decode(m, "<i4"),
            )
            for r in saved["responses"]
        ]
        return cls(saved["place"], saved["after"], saved["step"], problem, prompt, responses)


def _encode(values: Sequence[float], kind: str) -> str:
    """Compact, and exact for what float32 holds."""
    return base64.b64encode(np.asarray(values, kind).tobytes()).decode()


def _decode(text: str, kind: str) -> list:
    return np.frombuffer(base64.b64decode(text), kind).tolist()


def token_versions(runs: Sequence[tuple[int, int]], count: int) -> np.ndarray:
    """[count]: the version of each token, from runs (index of the first, version)."""
    starts = [first for first, _ in runs] + [count]
    return np.repeat(np.array([v for _, v in runs], np.int32), np.diff(starts))


# --- the end of a step -----------------------------------------------------------------------


class Settled(NamedTuple):
    """The groups of a step, each in one place.

    Attributes:
      complete: within the budget of the step, but for those that are carried, in order.
      selected: of these, by index.
      carried: to the next step; those that are complete have teaching to do there.
      unfinished: not complete, and dropped.
      drawn: groups that were drawn in this step and count. cut: tokens that were sampled in vain.
    """

    complete: list[Group]
    selected: list[int]
    carried: list[Group]
    unfinished: list[Group]
    drawn: int
    cut: int

    @property
    def dropped(self) -> int:
        """Groups that nothing is learned from, now or later."""
        return len(self.complete) - len(self.selected) + len(self.unfinished)


def settle(
    rule: Rule, groups: Sequence[Group], choice: Choice, step: int, partial: bool
) -> Settled:
    """Ends a step: applies a choice that is certain, and cuts what is not complete."""
    here, beyond = groups[: choice.places], groups[choice.places :]
    complete, selected, carried, unfinished, cut = [], [], [], [], 0
    for index, group in enumerate(here):
        seen = group.seen()
        within, chosen = _within(seen, choice.budget), index in choice.selected
        wanted = not within or seen.informative or not rule.dynamic
        if chosen:
            selected.append(len(complete))
        if partial and wanted and not chosen:
            carried.append(group)
        else:
            (complete if within else unfinished).append(group)
        cut += sum(r.close(step, None if within else choice.budget) for r in group.responses)
    cut += sum(r.new for group in (*unfinished, *beyond) for r in group.responses)
    drawn = sum(group.step == step for group in here)
    return Settled(complete, selected, carried, unfinished, drawn, cut)


def reopen(
    carried: Iterable[Group], step: int, max_staleness: int
) -> tuple[list[Group], list[Group]]:
    """Begins a step: the groups to go on with, and those that hold a token too old for that."""
    kept, stale = [], []
    for group in carried:
        too_old = group.oldest is not None and step - group.oldest > max_staleness
        (stale if too_old else kept).append(group)
    for group in kept:
        group.rewards = None
        for response in group.responses:
            response.open()
    return kept, stale
