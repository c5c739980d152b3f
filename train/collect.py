"""The rule of `train.groups` at work: keeps an engine busy until the choice of a step is certain.

`Collection` is one step; `Rollouts` has what outlives it: the place in the data, and the groups
that are carried. Whatever the engine does in between (how many slots it has, which samples it
starts first, how it speculates) decides how long that takes, and never what comes out.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from specjax.command_line import ConfigError
from specjax.config import SamplingParams
from specjax.engine.engine import Engine
from specjax.engine.request import (
    Finished,
    Job,
    SampleOutput,
    Totals,
    make_jobs,
    require_valid,
    special_name,
)
from specjax.engine.sequence import Progress
from specjax.engine.stops import StopStrings
from specjax.parallel import distributed
from train.groups import (
    Choice,
    Group,
    Response,
    Rule,
    Settled,
    decide,
    reopen,
    settle,
    token_versions,
)
from train.inputs import Prompts
from train.objectives.shared import zero_variance_groups
from train.packing import PackedBatch, Sample, pack
from train.schema import RLConfig
from train.scoring import Score, Scorer, about_zero, unwinnable
from train.tasks.layout import Problem


@dataclasses.dataclass
class Rollout:
    """P groups of G scored samples.

    Attributes:
      problems: [P]. prompts: their token ids. groups: [P][G]. rewards: [P G].
      old: [P][G], the trainer's log-probabilities of a sample's first tokens, which earlier steps
        sampled, each under the weights of its step.
      loss_masks: [P][G], of each token of a sample whether the policy sampled it (1) or not (0),
        see `train.groups.Response`; None, of one sample or of all: it sampled every one.
    """

    problems: list[Problem]
    prompts: list[list[int]]
    groups: list[list[SampleOutput]]
    rewards: np.ndarray
    old: list[list[list[float]]] | None = None
    loss_masks: list[list[list[int] | None]] | None = None

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Rollout:
        """Of groups that are complete; there versions are steps."""
        return cls(
            [group.problem for group in groups],
            [group.prompt for group in groups],
            [[r.output() for r in group.responses] for group in groups],
            np.array([group.rewards for group in groups]),
            [[r.old for r in group.responses] for group in groups],
            [[r.loss_mask for r in group.responses] for group in groups],
        )

    def select(self, keep: Sequence[int]) -> Rollout:
        """The groups with these indices."""
        return Rollout(
            [self.problems[i] for i in keep],
            [self.prompts[i] for i in keep],
            [self.groups[i] for i in keep],
            self.rewards[list(keep)],
            None if self.old is None else [self.old[i] for i in keep],
            None if self.loss_masks is None else [self.loss_masks[i] for i in keep],
        )


def group_seed(run_seed: int, step: int, place: int) -> int:
    """A 64-bit seed for one group: by its place in the order of draws, for a small data set may
    hand out one problem twice in a step, and the two groups must not share their noise."""
    text = f"{run_seed}:{step}:{place}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def group_params(cfg: RLConfig, step: int, place: int) -> SamplingParams:
    """How the samples of one group are drawn."""
    processed = cfg.algo.logprobs == "processed"
    return cfg.rollout.sampling_params(group_seed(cfg.seed, step, place), cfg.rollout.n, processed)


def behaviour_logprobs(sample: SampleOutput) -> list[float]:
    """The engine's log-probabilities of a sample's tokens, of the kind that `algo.logprobs` says:
    whoever trains with processed ones asks the engine for them, and nobody else does."""
    processed = sample.transformed_logprobs
    return sample.logprobs if processed is None else processed


class ResponseText:
    """The text of a response, which rewards see: without special tokens, and cut where one of the
    rollout's stop strings ends it.

    Its tokens alone decide it, wherever and in how many pieces they were sampled.
    """

    def __init__(self, tokenizer, params: SamplingParams):
        self._tokenizer, self._params = tokenizer, params
        self._name = functools.cache(functools.partial(special_name, tokenizer))

    def __call__(self, tokens: Sequence[int]) -> str:
        params, cut = self._params, None
        if params.stop:
            include = params.include_stop_str_in_output
            cut = StopStrings(
                params.stop, self._decode, include, params.min_tokens, self._name
            ).feed(tokens)
        return self._decode(tokens) if cut is None else cut.text

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def evaluate(
    engine: Engine,
    prompts: Prompts,
    heldout: Sequence[Problem],
    eos_ids: Sequence[int],
    scorer: Scorer,
    cfg: RLConfig,
) -> dict[str, float]:
    """Scores a policy, which the engine has, on the first `eval.problems` held-out problems.

    One response to each is sampled as the rollout samples (temperature, filters, penalties, bias,
    stops), with seeds that are the same every time. Problems whose prompts are dropped for their
    length are left out.
    """
    problems = [heldout[i] for i in range(min(cfg.eval.problems, len(heldout)))]
    looked_at = [(problem, *prompts.look(problem)) for problem in problems]
    fitting = [(problem, ids) for problem, ids, _ in looked_at if ids is not None]
    jobs = []
    for problem, ids in fitting:
        params = cfg.rollout.sampling_params(cfg.eval.seed + problem.index)
        jobs += make_jobs(ids, params, eos_ids, prompts.tokenizer, request=len(jobs))
    samples, totals = engine.generate(jobs)
    require_valid(samples, lambda index: f"prompt {index}")
    text = ResponseText(prompts.tokenizer, cfg.rollout.sampling_params())
    scores = [
        scorer(text(sample.token_ids), problem)
        for (problem, _), sample in zip(fitting, samples, strict=True)
    ]
    return {
        "eval/reward": float(np.mean([score.value for score in scores])),
        "eval/problems": float(len(fitting)),
        "eval/prompts_overlong": float(sum(why is not None for _, _, why in looked_at)),
        "eval/reward_failed": float(sum(score.failed for score in scores)),
        "eval/response_length_mean": totals.tokens / max(len(fitting), 1),
        "time/eval": totals.seconds,
    }


def to_samples(
    rollout: Rollout, advantages: Float[np.ndarray, "P G"], step: int | None = None
) -> list[Sample]:
    """Training samples in (prompt, sample) order.

    Args:
      advantages: of each, see `specjax.interfaces.Objective`.
      step: that trains on them; versions older than that are stale. None: nothing is.

    Raises:
      ValueError: advantages of another shape than the rewards.
    """
    if np.shape(advantages) != rollout.rewards.shape:
        raise ValueError(
            "algo.objective: expected advantages of the shape of the rewards, "
            f"{rollout.rewards.shape}, got {np.shape(advantages)}"
        )
    per_group = rollout.rewards.shape[1]
    samples = []
    for p, group in enumerate(rollout.groups):
        for g, sample in enumerate(group):
            old, staleness = None, None
            if step is not None and rollout.old is not None:
                staleness = token_staleness(sample, step)
                old = np.zeros(len(sample.token_ids), np.float32)
                old[: len(rollout.old[p][g])] = rollout.old[p][g]
            samples.append(
                Sample(
                    sample_id=p * per_group + g,
                    prompt_ids=rollout.prompts[p],
                    response_ids=sample.token_ids,
                    behaviour_logprobs=behaviour_logprobs(sample),
                    old_logprobs=old,
                    staleness=staleness,
                    loss_mask=None if rollout.loss_masks is None else rollout.loss_masks[p][g],
                    advantage=float(advantages[p, g]),
                    records=sample.records,
                )
            )
    return samples


def token_staleness(sample: SampleOutput, step: int) -> np.ndarray:
    """[tokens]: how many versions of the weights lie between sampling and `step`'s update."""
    return step - token_versions(sample.weight_versions, len(sample.token_ids))


def score_new_tokens(
    groups: Sequence[Group],
    logprobs: Callable[[PackedBatch], np.ndarray],
    row_length: int,
    rows: int,
) -> None:
    """Notes the trainer's log-probabilities of a step's tokens in the groups that are carried.

    It has to be done before the update. The engine's own would do but for their last bits, which
    depend on the program that decoded them, and so on the clock where a controller chooses it; the
    trainer's depend on tokens and weights alone.

    Args:
      logprobs: scores a packed micro-batch [R S] with the weights of the step.
    """
    responses = [r for group in groups for r in group.responses]
    prompts = [group.prompt for group in groups for _ in group.responses]
    samples = [
        Sample(i, prompt, response.tokens, records=response.records)
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        if response.new
    ]
    if not samples:
        return
    for batch in pack(samples, row_length, rows):
        scored, generated = logprobs(batch), batch["loss_mask"] > 0
        for index in np.unique(batch["sample_ids"][generated]).tolist():
            response = responses[index]
            own = scored[generated & (batch["sample_ids"] == index)]
            response.old = response.old[: response.given] + own[response.given :].tolist()


def tokens_digest(rollout: Rollout) -> str:
    """A digest of every sampled token in order: equal digests, equal rollouts."""
    return digest(sample.token_ids for group in rollout.groups for sample in group)


def digest(samples: Iterable[Sequence[int]]) -> str:
    """Of token ids, and of where one sample ends and the next begins."""
    found = hashlib.blake2b(digest_size=8)
    for ids in samples:
        found.update(np.asarray([len(ids), *ids], "<i4").tobytes())
    return found.hexdigest()


def selection_metrics(
    settled: Settled, stale: Sequence[Group], budget: int | None, step: int
) -> dict[str, float | str]:
    """What became of the groups of a step, and whom its early end preferred.

    Args:
      stale: groups that were dropped before it began. budget: of the step, if it had one.
    """
    selected = [settled.complete[i] for i in settled.selected]
    rest = [g for i, g in enumerate(settled.complete) if i not in settled.selected]
    rest += [*settled.carried, *settled.unfinished, *stale]
    metrics: dict[str, float | str] = {
        "rollout/groups_drawn": float(settled.drawn),
        "rollout/groups_selected": float(len(selected)),
        "rollout/groups_carried": float(len(settled.carried)),
        "rollout/groups_dropped": float(settled.dropped),
        "rollout/groups_dropped_stale": float(len(stale)),
        "rollout/tokens_cut": float(settled.cut),
    }
    if budget is not None:
        metrics["rollout/budget"] = float(budget)
    lengths = [_lengths(selected), _lengths(rest)]
    if len(lengths[1]):
        metrics["rollout/unselected_emitted_mean"] = float(lengths[1].mean())
    if not len(lengths[0]):
        return metrics
    metrics["rollout/selected_length_mean"] = mean = float(lengths[0].mean())
    metrics["rollout/length_bias"] = mean - float(np.concatenate(lengths).mean())
    ages = [token_staleness(r.output(), step) for group in selected for r in group.responses]
    ages = np.concatenate(ages)
    metrics["rollout/stale_token_share"] = float((ages > 0).mean())
    metrics["rollout/staleness_mean"] = float(ages.mean())
    return metrics


def _lengths(groups: Sequence[Group]) -> np.ndarray:
    return np.array([len(r.tokens) for group in groups for r in group.responses])


def rollout_metrics(rollout: Rollout, totals: Totals, devices: int) -> dict[str, float | str]:
    """What a rollout tells, under the names that users of other systems know."""
    samples = [s for group in rollout.groups for s in group]
    lengths = np.array([len(s.token_ids) for s in samples])
    rate = totals.tokens / max(totals.seconds, 1e-9)
    metrics = {
        "rollout/reward": float(rollout.rewards.mean()),
        "rollout/zero_std": float(zero_variance_groups(rollout.rewards).mean()),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated_ratio": float(np.mean([s.finish_reason == "length" for s in samples])),
        "rollout/tokens": float(totals.tokens),
        "rollout/tokens_sha": tokens_digest(rollout),
        "rollout/tokens_per_sec": rate,
        "rollout/tokens_per_gpu_per_sec": rate / devices,
        "rollout/longest_sample_tokens_per_sec": totals.longest / max(totals.seconds, 1e-9),
        "rollout/logprob_mean": float(
            np.mean(np.concatenate([behaviour_logprobs(s) for s in samples]))
        ),
    }
    if totals.steps and totals.rounds:  # a step may live on what was carried alone
        metrics["rollout/spec_accept_length"] = totals.accept_length
        metrics["rollout/spec_accept_rate"] = totals.accept_rate
        metrics["rollout/drafted_share"] = totals.drafted_rounds / totals.rounds
        if totals.drafted_rounds:
            metrics["rollout/drafted_accept_length"] = totals.drafted_accept_length
        for depth, rate in enumerate(totals.per_depth(), start=1):
            if np.isfinite(rate):  # else no tree of this step was so deep
                metrics[f"rollout/accept_rate_depth_{depth}"] = rate
    return metrics


# Batches of groups that a step looks at before it says that it is not full, and before it says so
# again.
_PATIENCE = 10

log = logging.getLogger(__name__)


class Collection:
    """The groups of one step, on their way through the engine.

    Args:
      engine: nothing waits or runs in it; nor does it afterwards.
      partial: groups that are not complete in the end will be carried.
      carried: groups to go on with, opened (see `reopen`).
      draw: gives the next group. jobs: gives the samples of a group as jobs, in order.
      score: sets `text` of all responses of a complete group, and gives their rewards.

    Attributes:
      groups: the candidates in order, those that may turn out not to count included.
      totals: rounds of all samples; `tokens` and `seconds` are left to the caller and to `run`.
    """

    def __init__(
        self,
        engine: Engine,
        rule: Rule,
        partial: bool,
        carried: Iterable[Group],
        draw: Callable[[], Group],
        jobs: Callable[[int, Group], Sequence[Job]],
        score: Callable[[Group], list[float]],
    ):
        self.engine, self.rule, self.partial = engine, rule, partial
        self._draw, self._jobs, self._score = draw, jobs, score
        self._carried = list(carried)
        self.groups: list[Group] = []
        self._running: list[dict[int, Response]] = []  # by ticket, for each group
        self._group_of: dict[int, int] = {}
        steps = engine.runner.steps
        self.totals = Totals(steps, np.zeros(steps + 2, np.int64))

    def run(self) -> Choice:
        """Runs until the choice is certain and what will be carried is long enough.

        Raises:
          ValueError: a job does not fit the engine. RuntimeError: the engine's weights changed.
        """
        start = time.perf_counter()
        try:
            for group in self._carried:
                self._enter(group)
            while not (choice := self._choose()).certain or self._must_go_on(choice):
                for event in self.engine.step():
                    self._finish(event)
            self._stop(range(len(self.groups)))
            while self.engine.has_work:
                self.engine.step()
        except BaseException:
            self.engine.clear()  # an interrupted step leaves nothing behind
            raise
        self.totals.seconds = time.perf_counter() - start
        return choice

    def _choose(self) -> Choice:
        """What can be said by now; draws the groups that this asks for, stops what is too long."""
        choice = self._decide()
        while len(self.groups) < choice.places:
            if self.groups and len(self.groups) % (_PATIENCE * self.rule.in_air) == 0:
                if distributed.is_first():
                    log.warning("%s", about_long(self.rule, self.groups))
            self._enter(self._draw())
        if choice.budget is not None:
            self._trim(choice.budget)
        return self._decide()

    def _decide(self) -> Choice:
        return decide(self.rule, [group.seen() for group in self.groups])

    def _enter(self, group: Group) -> None:
        index, running = len(self.groups), {}
        self.groups.append(group)
        self._running.append(running)
        if group.is_complete:  # it was carried because others were shorter, or came first
            group.rewards = self._score(group)
            return
        for response, job in zip(group.responses, self._jobs(index, group), strict=True):
            if response.finish is not None:
                continue
            progress = None
            if response.tokens:
                progress = Progress(
                    list(response.tokens),
                    list(response.logprobs),
                    [],
                    response.transformed,
                    response.records,
                )
            ticket = self.engine.add(job, progress)
            running[ticket], self._group_of[ticket] = response, index

    def _finish(self, event: Finished) -> None:
        index = self._group_of[event.ticket]
        place = self.groups[index].place
        require_valid([event.sample], lambda _: f"the rollout of problem {place} in the data")
        response = self._running[index].pop(event.ticket)
        self._take(response, event.sample, finished=True)
        if event.verdict is not None:
            response.reward, response.failed = event.verdict
        group = self.groups[index]
        if group.is_complete:
            group.rewards = self._score(group)

    def _take(self, response: Response, sample: SampleOutput, finished: bool) -> None:
        versions = {version for _, version in sample.weight_versions}
        if versions - {self.engine.version}:
            raise RuntimeError(
                f"expected all tokens of a step from version {self.engine.version} of the weights, "
                f"got some of {sorted(versions)}; set_params() belongs between steps"
            )
        response.take(sample, finished)
        self.totals.count_rounds(sample.stats)
        self.totals.longest = max(self.totals.longest, response.new)

    def _trim(self, budget: int) -> None:
        """Stops what has all the tokens that can be of use: the step's budget will not rise."""
        for index, running in enumerate(self._running):
            long_enough = []
            for ticket, response in running.items():
                new = max(0, self.engine.emitted(ticket) - response.given)
                response.emitted = max(response.emitted, new)
                if new >= budget:
                    long_enough.append(ticket)
            if not self.partial and self.groups[index].seen().least > budget:
                self._stop([index])
            for ticket in long_enough:
                self._abort(index, ticket)

    def _must_go_on(self, choice: Choice) -> bool:
        """Stops what the choice leaves out; is there anything else that runs?"""
        first = choice.places if self.partial else 0
        self._stop(range(first, len(self.groups)))
        return any(self._running[:first])

    def _stop(self, indices: Iterable[int]) -> None:
        for index in indices:
            for ticket in list(self._running[index]):
                self._abort(index, ticket)

    def _abort(self, index: int, ticket: int) -> None:
        response = self._running[index].pop(ticket, None)
        sample = response and self.engine.abort(ticket)
        if sample is not None:
            self._take(response, sample, finished=False)


def about_long(rule: Rule, groups: Sequence[Group]) -> str:
    """What a step that goes on replacing groups has found so far."""
    complete = [group for group in groups if group.rewards is not None]
    alike = Counter(g.rewards[0] for g in complete if not g.seen().informative)
    values = ", ".join(f"{reward:g} in {count}" for reward, count in alike.most_common(3))
    more = ", ..." if len(alike) > 3 else ""
    limit = "algo.max_num_gen_batches=0 sets no limit"
    if rule.most is not None:
        limit = f"algo.max_num_gen_batches={rule.batches} lets it look at {rule.most}"
    return (
        f"step {groups[-1].step} has looked at {len(groups)} groups, of which {len(complete)} are "
        f"complete, and is not full: {len(complete) - alike.total()} have differing rewards, of "
        f"rollout.prompts={rule.prompts} that it wants; in {alike.total()} all rewards are equal "
        f"({values or 'none'}{more}) and teach nothing. It goes on, and {limit}. Is the task too "
        "hard or too easy for the policy, or does the reward not see the difference?"
    )


class Rollouts:
    """The rollouts of a run, step by step.

    Args:
      order: problems in the order of draws. prompts: their token ids.
      eos_ids: tokens that end a response. scorer: the reward.

    Attributes:
      position: the next place to draw from.
      carried: groups that the next step goes on with; checkpoints keep them.
      short: why the last step had fewer groups to learn from than it wants; None: it had enough.
      zero: the text of a response that scored 0, its problem, and whether it was cut off, while
        none has scored anything else; None from then on.
    """

    def __init__(
        self,
        cfg: RLConfig,
        order: Sequence[Problem],
        prompts: Prompts,
        eos_ids: Sequence[int],
        scorer: Scorer,
    ):
        roll, algo = cfg.rollout, cfg.algo
        self.cfg, self._order, self._prompts = cfg, order, prompts
        self._eos_ids, self._scorer = eos_ids, scorer
        self._text = ResponseText(prompts.tokenizer, roll.sampling_params())
        self.rule = Rule(
            roll.prompts, roll.in_air, algo.dynamic_sampling, max(algo.max_num_gen_batches, 0)
        )
        self.position = 0
        self.carried: list[Group] = []
        self.zero: tuple[str, Problem, bool] | None = None
        self._any_reward = False
        self.short: str | None = None
        self._problems: dict[int, Problem] = {}  # of the groups of a step, by index
        self._kept: tuple[Group, ...] = ()  # of the last step: complete, or carried
        self._looked_at: dict[int, str | None] = {}  # by place: why it was passed over, or cut

    def collect(self, engine: Engine, step: int) -> tuple[Rollout, Rollout, dict[str, float | str]]:
        """Runs a step's rollout.

        Returns:
          all groups that are complete and go no further, those of them to be trained on, metrics.
        """
        roll = self.cfg.rollout
        carried, stale = reopen(self.carried, step, roll.max_staleness)
        start = self._at = self.position
        self._looked_at = {}
        run = Collection(
            engine,
            self.rule,
            roll.partial,
            carried,
            lambda: self._draw(step),
            self._jobs,
            self._score,
        )
        choice = run.run()
        settled = settle(self.rule, run.groups, choice, step, roll.partial)
        drawn = run.groups[len(carried) : choice.places]
        self.position = drawn[-1].after if drawn else start
        self.carried = settled.carried
        self.short = self._about_short(len(settled.selected), choice.places)
        done = Rollout.of(settled.complete)
        self._kept = (*settled.complete, *settled.carried)
        run.totals.tokens = sum(r.new for group in self._kept for r in group.responses)
        metrics = rollout_metrics(done, run.totals, self.cfg.rollout_devices)
        metrics |= selection_metrics(settled, stale, choice.budget, step)
        metrics |= self._reward_metrics(settled.complete) | self._prompt_metrics()
        if roll.partial:
            metrics["rollout/carried_sha"] = digest(
                r.tokens for group in settled.carried for r in group.responses
            )
        return done, done.select(settled.selected), metrics

    def begun(self) -> list[tuple[Job, list[int]]]:
        """The samples of complete and carried groups that the last step began: each as a job, whose
        request is the place of its problem, and its tokens. Those that the step cut end there."""
        found = []
        for group in self._kept:
            for response, job in zip(
                group.responses, self._jobs_of(group, group.place), strict=True
            ):
                if response.given == 0 and response.new:
                    if response.finish is None:
                        limit = len(job.prompt) + len(response.tokens)
                        job = dataclasses.replace(job, limit=limit)
                    found.append((job, response.tokens))
        return found

    def state(self) -> dict[str, Any]:
        """For a checkpoint's metadata: JSON."""
        return {
            "position": self.position,
            "carried": [group.to_json() for group in self.carried],
            "any_reward": self._any_reward,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` returned."""
        self.position = state["position"]
        # Where an older version did not write it, nobody knows, and nothing is said of it.
        self._any_reward, self.zero = state.get("any_reward", True), None
        self.carried = []
        for saved in state["carried"]:
            problem = self._order[saved["place"]]
            prompt = self._prompts.ids(problem)
            self.carried.append(Group.from_json(saved, problem, prompt))

    def _draw(self, step: int) -> Group:
        """The next problem in order whose prompt is short enough.

        Raises:
          ConfigError: there seems to be none.
        """
        passed = 100 * self.rule.prompts
        for place in range(self._at, self._at + passed + 1):
            problem = self._order[place]
            ids, why = self._prompts.look(problem)
            self._looked_at[place] = why
            if ids is not None and self._is_winnable(problem):
                self._at = place + 1
                responses = [Response() for _ in range(self.cfg.rollout.n)]
                return Group(place, place + 1, step, problem, ids, responses)
            self._looked_at[place] = why or "unwinnable"
        raise ConfigError(
            f"{passed + 1} rows in a row cannot be used: their prompts are longer than "
            f"rollout.max_prompt_tokens = {self.cfg.rollout.max_prompt_tokens}, or the reward "
            f"{self._scorer.name} cannot be won; raise it, or look at them with `python -m "
            "train.data`"
        )

    def _is_winnable(self, problem: Problem) -> bool:
        """Whether to draw it: data.unwinnable=drop passes over what no answer can win."""
        return self.cfg.data.unwinnable != "drop" or unwinnable(self._scorer, problem) is None

    def _prompt_metrics(self) -> dict[str, float]:
        """Of the problems that this step went past: `overlong` were dropped or cut, `unwinnable`
        dropped."""
        why = [why for place, why in self._looked_at.items() if place < self.position]
        names = {"overlong": "rollout/prompts_overlong", "unwinnable": "rollout/prompts_unwinnable"}
        return {name: float(why.count(key)) for key, name in names.items()}

    def about_zero(self) -> str | None:
        """An example, while every response of the run scored 0; None from then on."""
        return None if self.zero is None else about_zero(self._scorer, *self.zero)

    def _about_short(self, selected: int, places: int) -> str | None:
        if selected >= self.rule.prompts:
            return None
        return (
            f"{selected} groups of {places} have differing rewards, fewer than rollout.prompts="
            f"{self.rule.prompts}, and algo.max_num_gen_batches={self.rule.batches} lets a step "
            "look at no more: the policy learns from these alone. Raise it (0: no limit), or is "
            "the task too hard or too easy for the policy?"
        )

    def _reward_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        responses = [r for group in groups for r in group.responses]
        failed = sum(r.failed for r in responses)
        if any(r.reward for r in responses):
            self._any_reward, self.zero = True, None
        elif not self._any_reward and responses:
            pairs = [(r, group.problem) for group in groups for r in group.responses]
            response, problem = next((p for p in pairs if p[0].finish != "length"), pairs[0])
            self.zero = response.text, problem, response.finish == "length"
        return {
            "reward/failed": float(failed),
            "reward/failed_share": failed / max(len(responses), 1),
        }

    def _jobs(self, index: int, group: Group) -> list[Job]:
        self._problems[index] = group.problem
        return self._jobs_of(group, index)

    def _jobs_of(self, group: Group, request: int) -> list[Job]:
        params = group_params(self.cfg, group.step, group.place)
        return make_jobs(
            group.prompt, params, self._eos_ids, self._prompts.tokenizer, request=request
        )

    def judge(self, job: Job, sample: SampleOutput) -> Score:
        """The reward of a sample of this step, for engines that ask where it ran."""
        return self._scorer(self._text(sample.token_ids), self._problems[job.request])

    def _score(self, group: Group) -> list[float]:
        for response in group.responses:
            response.text = self._text(response.tokens)
            if response.reward is None:
                response.reward, response.failed = self._scorer(response.text, group.problem)
        return [response.reward for response in group.responses]
