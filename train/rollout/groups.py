"""Decides which groups a step trains on, from numbers of tokens and rewards, never from time.

A group is one problem with its G samples. It is *informative* if the rewards of its samples differ.
Its *budget* in a step is the number of tokens that its longest sample needs in this step; tokens
that a carried sample has from earlier steps do not count.
The candidates are the groups carried from the step before, then the next problems in order. With a
budget T the step

    considers  the first `in_flight` candidates, and one more for each considered group that has a
               budget of T or less and is not informative, which it replaces (only with dynamic
               sampling, and up to `max_candidates` in all)
    accepts    the considered groups with a budget of T or less that are informative
               (without dynamic sampling: all with a budget of T or less)

and the budget of the step is the smallest T that accepts `prompts` groups. These groups, the first
`prompts` by budget and then by position, are *selected*. If no T accepts so many, because
`max_candidates` were considered, all of them run to their end, and the informative ones are
selected: the step is short of groups, and says so. Of the other considered candidates,

    those with a budget of T or less   are complete. With `partial` the informative ones are
                                       carried to the next step; the others are dropped.
    those with a larger budget         are carried to the next step with `partial`, every sample cut
                                       to T tokens of this step, and dropped without.

Groups that were started beyond them count as never drawn: the next step draws them again. Dropped
problems come again in the next pass over the data.

All this depends on lengths and rewards alone, and with a larger T more groups are accepted and more
are replaced. So `select` can be called while samples run, and its budget can only fall: the groups
that are known to be accepted give an upper bound, beyond which no sample has to run. The selection
is final when no considered group could still have a budget of T or less. The speed of samples,
their order and the number of slots decide when that is, and nothing else. Carried samples are cut
for the same reason: they go on under other weights in the next step, so where they stop must not
depend on speed.

A step prefers short groups, as all early stopping does; `rollout/length_bias` says by how much.
If `prompts` groups are carried that are nearly complete, the next step samples few tokens, and
trains on stale ones. With fewer than 2 * `prompts` groups in flight, fewer than `prompts` are
carried, and every step has some of its own.
"""

from __future__ import annotations

import base64
import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.engine.request import UNKNOWN, SampleOutput, SpecStats
from train.data.tasks.layout import Problem

# --- the rule --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rule:
    """How many groups a step needs.

    Attributes:
      prompts: number of groups to select.
      in_flight: number of groups to start with, at least `prompts`.
      dynamic: whether only informative groups count, and the others are replaced.
      batches: largest number of candidates of a step, in units of `in_flight`; 0 for no limit.
    """

    prompts: int
    in_flight: int
    dynamic: bool = False
    batches: int = 1

    @property
    def max_candidates(self) -> int | None:
        """The largest number of candidates that a step considers; None for no limit."""
        if not self.dynamic:
            return self.in_flight
        return self.in_flight * self.batches if self.batches > 0 else None


class GroupStatus(NamedTuple):
    """The facts about a group that are known while it runs.

    Attributes:
      at_least: lower bound of the number of tokens that it needs in this step.
      budget: number of tokens that it needs; None until it is complete.
      informative: whether its rewards differ; True until it is complete.
    """

    at_least: int
    budget: int | None = None
    informative: bool = True


class Selection(NamedTuple):
    """The selection of a step, as far as it is known while the step runs.

    Attributes:
      budget: budget of the step, or an upper bound of it; None while there is no bound.
      candidates: number of candidates that the step considers, some perhaps not drawn yet.
      selected: indices of the groups to train on.
      final: whether nothing of this can change any more.
    """

    budget: int | None
    candidates: int
    selected: list[int]
    final: bool


def select(rule: Rule, groups: Sequence[GroupStatus]) -> Selection:
    """Applies the rule to the candidates, in order, as far as they are known."""
    budgets = sorted({g.budget for g in groups if g.budget is not None})
    enough = bisect.bisect_left(
        budgets, rule.prompts, key=lambda b: len(_accepted(rule, groups, b))
    )
    budget = budgets[enough] if enough < len(budgets) else None
    count = _candidates(rule, groups, budget)
    open_ends = any(
        g.budget is None and (budget is None or g.at_least <= budget) for g in groups[:count]
    )
    final = count <= len(groups) and not open_ends
    return Selection(budget, count, _accepted(rule, groups, budget)[: rule.prompts], final)


def _within(group: GroupStatus, budget: int | None) -> bool:
    """Whether a group is complete within a budget."""
    return group.budget is not None and (budget is None or group.budget <= budget)


def _candidates(rule: Rule, groups: Sequence[GroupStatus], budget: int | None) -> int:
    """The number of candidates that a step with this budget considers."""
    count = rule.in_flight
    for index, group in enumerate(groups):
        if index >= count or count == rule.max_candidates:
            break
        count += rule.dynamic and _within(group, budget) and not group.informative
    return count


def _accepted(rule: Rule, groups: Sequence[GroupStatus], budget: int | None) -> list[int]:
    """Indices of the groups that a step with this budget accepts, the smallest budgets first."""
    accepted = [
        (group.budget, index)
        for index, group in enumerate(groups[: _candidates(rule, groups, budget)])
        if _within(group, budget) and (group.informative or not rule.dynamic)
    ]
    return [index for _, index in sorted(accepted)]


NO_ROUNDS = SpecStats(())

# --- groups ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Response:
    """A sample of a group, ended or not, with the attributes of `SampleOutput`.

    Attributes:
      token_ids: tokens received from the engine so far, in this step and before.
      logprobs: the engine's log-probability of each token, of the temperature-scaled logits.
      num_carried: number of tokens that earlier steps sampled.
      old_logprobs: the trainer's log-probabilities of the carried tokens, each under the weights
        that sampled it.
      weight_versions: runs of tokens that the same weights sampled, as (index of the first, step).
      finish_reason: reason why the sample ended; None while it has not.
      reward: reward of the sample; None until it is known.
      failed: whether a reward returned no number; it then counts as 0.
      parts: value of each reward without its weight, if there are several; None of one that does
        not apply to the row.
      emitted: lower bound of the number of tokens of this step, some perhaps not received yet.
      stats: speculation figures of this step, once the sample ended.
      text: text that the reward sees, once the group is complete.
      transformed_logprobs: the engine's log-probability of each token after all transforms; None
        unless the run is trained with these.
      loss_mask: 1 for each token that the policy sampled, and 0 for tokens that a tool or an
        environment wrote between two turns, which `observe` adds; None if the policy sampled all.
      records: records of the model, see `SampleOutput.records`.
      origins: origin of each token, see `SampleOutput.origins`.
      advantage: mean advantage of its tokens; None until it is trained on.
      turns: of each turn that the environment has answered: index of its first token, index behind
        its last one, reward, and the environment's messages; empty without an environment.
      begun: index of the first token of the present turn.
      ending: reason why its message ended, while the environment's answer is waited for.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    num_carried: int = 0
    old_logprobs: list[float] = dataclasses.field(default_factory=list)
    weight_versions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    reward: float | None = None
    failed: bool = False
    parts: tuple[float | None, ...] = ()
    emitted: int = 0
    stats: SpecStats = NO_ROUNDS
    text: str | None = None
    transformed_logprobs: list[float] | None = None
    loss_mask: list[int] | None = None
    records: np.ndarray | None = None
    origins: str = ""
    advantage: float | None = None
    turns: list[list[Any]] = dataclasses.field(default_factory=list)
    begun: int = 0
    ending: str | None = None

    @property
    def num_new(self) -> int:
        """The number of tokens of this step that were received from the engine."""
        return len(self.token_ids) - self.num_carried

    @property
    def behaviour_logprobs(self) -> list[float]:
        """The engine's log-probabilities of the kind that `algo.logprobs` names.

        Only a run that trains with processed ones asks the engine for them.
        """
        return self.logprobs if self.transformed_logprobs is None else self.transformed_logprobs

    @property
    def mask(self) -> np.ndarray:
        """[tokens]: 1 for each token that the policy sampled, else 0."""
        return np.array(
            [1] * len(self.token_ids) if self.loss_mask is None else self.loss_mask, float
        )

    def staleness(self, step: int) -> np.ndarray:
        """[tokens]: number of weight updates between sampling and `step`'s own update."""
        return step - token_versions(self.weight_versions, len(self.token_ids))

    def update(self, sample: SampleOutput, finished: bool) -> None:
        """Copies the sample's tokens, carried and new ones, from the engine's output."""
        self.token_ids, self.logprobs = list(sample.token_ids), list(sample.logprobs)
        if sample.transformed_logprobs is not None:
            self.transformed_logprobs = list(sample.transformed_logprobs)
        if self.loss_mask is not None:
            more = len(self.token_ids) - len(self.loss_mask)
            self.loss_mask = [*self.loss_mask, *[1] * more][: len(self.token_ids)]
        self.records, self.origins = sample.records, sample.origins
        self.stats, self.emitted = sample.stats, max(self.emitted, self.num_new)
        self.finish_reason = sample.finish_reason if finished else None

    def end_step(self, step: int, budget: int | None) -> int:
        """Cuts the sample to `budget` new tokens, if not None, and records the step as theirs.

        Returns:
          The number of tokens that were cut off.
        """
        over = 0 if budget is None else max(0, self.num_new - budget)
        if over:
            del self.token_ids[-over:], self.logprobs[-over:]
            for more in (self.transformed_logprobs, self.loss_mask):
                if more is not None:
                    del more[-over:]
            if self.records is not None:
                self.records = self.records[:-over]
            self.origins = self.origins[: len(self.token_ids)]
            self.finish_reason = None
            self.forget_reward()
        if self.turns and self.finish_reason is None:
            self._cut_turns()
        if self.num_new:
            self.weight_versions.append((self.num_carried, step))
        return over

    def _cut_turns(self) -> None:
        """Forgets turns whose tokens were cut off, and an observation that nothing follows yet.

        Whether it was appended before the end of the step depends on the clock.
        """
        self.turns = [turn for turn in self.turns if turn[1] <= len(self.token_ids)]
        end = self.turns[-1][1] if self.turns else 0
        following = (self.loss_mask or [])[end:]
        self.ending, self.begun = None, end + (following.index(1) if 1 in following else 0)
        if self.turns and 1 not in following:
            for values in (*self._per_token(), self.old_logprobs):
                del values[end:]
            self.origins, self.num_carried = self.origins[:end], min(self.num_carried, end)
            self.weight_versions = [run for run in self.weight_versions if run[0] < end]

    def _per_token(self) -> list[list]:
        lists = self.token_ids, self.logprobs, self.transformed_logprobs, self.loss_mask
        return [values for values in lists if values is not None]

    def observe(self, ids: Sequence[int]) -> None:
        """Appends tokens that the environment wrote; the next turn begins behind them."""
        if self.loss_mask is None:
            self.loss_mask = [1] * len(self.token_ids)
        for values in self._per_token():
            values += ids if values is self.token_ids else [0] * len(ids)
        self.origins = self.origins.ljust(len(self.token_ids), UNKNOWN)
        self.begun = len(self.token_ids)

    def begin_again(self) -> None:
        """Forgets all tokens and turns."""
        for values in self._per_token():
            values.clear()
        self.turns, self.begun, self.ending, self.num_carried, self.emitted = [], 0, None, 0, 0
        self.origins, self.records, self.old_logprobs, self.weight_versions = "", None, [], []

    def forget_reward(self) -> None:
        """Makes the reward unknown, so that the response is scored when its group is complete."""
        self.reward, self.failed, self.parts = None, False, ()


@dataclasses.dataclass
class Group:
    """A problem and its samples.

    Attributes:
      position: place of the problem in the order of draws.
      next_position: place from which the next problem is drawn.
      step: step that drew it; with run seed and position it keys the samples' noise.
      problem: the problem.
      prompt: token ids of its prompt.
      responses: its samples.
      rewards: reward of each response; None until all have ended.
    """

    position: int
    next_position: int
    step: int
    problem: Problem
    prompt: list[int]
    responses: list[Response]
    rewards: list[float] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all samples have ended."""
        return all(r.finish_reason is not None for r in self.responses)

    @property
    def oldest_step(self) -> int | None:
        """The step that sampled its oldest token; None if it has no token."""
        firsts = (r.weight_versions[0][1] for r in self.responses if r.weight_versions)
        return min(firsts, default=None)

    @property
    def status(self) -> GroupStatus:
        """The numbers by which the rule selects groups."""
        # A sample that has not ended has at least one more token to come.
        # One whose environment is asked may have ended with the tokens that it has.
        at_least = max(
            r.emitted + (r.finish_reason is None and r.ending is None) for r in self.responses
        )
        if self.rewards is None:
            return GroupStatus(at_least)
        # A single sample has nothing to differ from.
        informative = len(self.rewards) == 1 or max(self.rewards) != min(self.rewards)
        return GroupStatus(at_least, at_least, informative)

    def to_json(self) -> dict[str, Any]:
        """Returns the group as a checkpoint stores it; its position leads to the problem again."""
        responses = []
        for response in self.responses:
            saved = {name: getattr(response, name) for name in _PLAIN}
            saved |= {n: _encode(getattr(response, n), kind) for n, kind in _ARRAYS.items()}
            if (records := response.records) is not None:
                kind = records.dtype.str
                saved["records"] = [records.shape[1:], kind, _encode(records.ravel(), kind)]
            responses.append(saved)
        about = {"place": self.position, "after": self.next_position, "step": self.step}
        return {**about, "responses": responses}

    @classmethod
    def from_json(cls, saved: dict[str, Any], problem: Problem, prompt: list[int]) -> Group:
        """Makes the group that `to_json` stored."""
        responses = []
        for values in saved["responses"]:
            response = Response(**{name: values[name] for name in _PLAIN if name in values})
            response.parts = tuple(response.parts)
            response.weight_versions = [tuple(run) for run in response.weight_versions]
            for name, kind in _ARRAYS.items():
                setattr(response, name, _decode(values[name], kind))
            if "records" in values:
                shape, kind, text = values["records"]
                response.records = np.array(_decode(text, kind), kind).reshape(-1, *shape)
            responses.append(response)
        return cls(saved["place"], saved["after"], saved["step"], problem, prompt, responses)


# Of the fields of a response those that JSON takes as they are, and those that are numbers per
# token, with their type.
_PLAIN = "weight_versions finish_reason origins reward failed parts turns begun".split()
_ARRAYS = {
    "token_ids": "<i4",
    "logprobs": "<f4",
    "old_logprobs": "<f4",
    "transformed_logprobs": "<f4",
    "loss_mask": "<i4",
}


def _encode(values: Sequence[float] | None, kind: str) -> str | None:
    """Writes numbers as base64 text; exact for float32."""
    if values is None:
        return None
    return base64.b64encode(np.asarray(values, kind).tobytes()).decode()


def _decode(text: str | None, kind: str) -> list | None:
    return None if text is None else np.frombuffer(base64.b64decode(text), kind).tolist()


def token_versions(runs: Sequence[tuple[int, int]], count: int) -> np.ndarray:
    """[count]: version of each token, from runs (index of the first token, version)."""
    starts = [first for first, _ in runs] + [count]
    return np.repeat(np.array([v for _, v in runs], np.int32), np.diff(starts))


# --- begin and end of a step -----------------------------------------------------


class StepGroups(NamedTuple):
    """The groups of a step that has ended, each in one list.

    Attributes:
      complete: groups that are complete within the step's budget and not carried, in order.
      selected: indices in `complete` of the groups that the step trains on.
      carried: groups that the next step continues, or trains on if they are complete.
      unfinished: groups that are not complete, and are dropped.
      drawn: number of groups that were drawn in this step.
      cut: number of tokens that were sampled and discarded.
    """

    complete: list[Group]
    selected: list[int]
    carried: list[Group]
    unfinished: list[Group]
    drawn: int
    cut: int

    @property
    def dropped(self) -> int:
        """The number of groups that no step trains on."""
        return len(self.complete) - len(self.selected) + len(self.unfinished)


def begin_step(
    carried: Iterable[Group], step: int, max_staleness: int
) -> tuple[list[Group], list[Group]]:
    """Splits carried groups into those to continue, and those with a token that is too old."""
    kept, stale = [], []
    for group in carried:
        oldest = group.oldest_step
        (stale if oldest is not None and step - oldest > max_staleness else kept).append(group)
    for group in kept:
        group.rewards = None
        for response in group.responses:
            response.num_carried = len(response.token_ids)
            response.emitted, response.stats = 0, NO_ROUNDS
    return kept, stale


def end_step(
    rule: Rule,
    groups: Sequence[Group],
    selection: Selection,
    step: int,
    partial: bool,
    together: bool = False,
) -> StepGroups:
    """Sorts the groups of a step by its final selection, and cuts the incomplete ones.

    Args:
      rule: rule that selects groups.
      groups: groups of the step, in order.
      selection: the final selection.
      step: the step.
      partial: whether incomplete groups are carried.
      together: whether a reward depends on all responses of its group; then the responses of a
        group that is carried incomplete have no rewards, for whether they were scored before one
        of them was cut depends on how fast they were sampled.
    """
    here, beyond = groups[: selection.candidates], groups[selection.candidates :]
    complete, selected, carried, unfinished, cut = [], [], [], [], 0
    for index, group in enumerate(here):
        status = group.status
        within = _within(status, selection.budget)
        if index in selection.selected:
            selected.append(len(complete))
            complete.append(group)
        elif partial and (not within or status.informative or not rule.dynamic):
            carried.append(group)
        else:
            (complete if within else unfinished).append(group)
        budget = None if within else selection.budget
        cut += sum(r.end_step(step, budget) for r in group.responses)
        if together and not group.is_complete:
            for response in group.responses:
                response.forget_reward()
    cut += sum(r.num_new for group in (*unfinished, *beyond) for r in group.responses)
    drawn = sum(group.step == step for group in here)
    return StepGroups(complete, selected, carried, unfinished, drawn, cut)
