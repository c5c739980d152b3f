"""The rewards of a step's groups, which are computed while other samples are generated."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from specjax.config import SamplingParams
from specjax.engine.request import Job, SampleOutput, special_stops
from specjax.engine.text import StopStrings
from specjax.parallel import distributed
from specjax.tokenizer import decode
from train.rewards.scoring import SampleFacts, Score, Scorer, Scoring
from train.rollout.groups import Group


class GroupRewards:
    """Scores the responses of each group of a step.

    Where a job has several processes, a sample is scored in the process that its engine belongs to
    (`judge`), and all go on with equal rewards.

    Args:
      scorer: reward.
      text: decodes a response.
    """

    def __init__(self, scorer: Scorer, text: ResponseText):
        self._scorer, self._text = scorer, text
        self._groups: dict[int, Group] = {}  # by the number of their requests
        self._scoring: dict[int, Scoring] = {}  # by the position of the group
        self._judged: list[Scoring] = []

    def add(self, request: int, group: Group) -> None:
        """Says which group the requests of a number belong to."""
        self._groups[request] = group

    def judge(self, job: Job, sample: SampleOutput) -> Scoring | None:
        """Begins to score a sample in the process that its engine belongs to.

        Returns:
          The score, perhaps not known yet; None if a reward needs all samples of the group.
        """
        if self._scorer.is_batch:
            return None
        facts = SampleFacts(job.sample, sample.token_ids, sample.finish_reason)
        problem, text = self._groups[job.request].problem, self._text(sample.token_ids)
        self._judged.append(self._scorer.begin_one(text, problem, facts))
        return self._judged[-1]

    def begin(self, group: Group, place: int) -> None:
        """Begins to score a response that has ended, while others of its group are sampled."""
        response = group.responses[place]
        response.text = self._text(response.token_ids)
        if not distributed.is_several():
            self._add(group, place)

    def rewards(self, group: Group) -> list[float] | None:
        """Sets text and reward of all responses of a complete group.

        Returns:
          the rewards; None while they are computed in workers.
        """
        self._read(group)
        if not distributed.is_several():
            scores = self._scores(group)
        elif any(response.reward is None for response in group.responses):
            scores = distributed.of_first(lambda: self._scores(group), "rewards")
        else:  # each was scored where it was sampled
            scores = {}
        return None if scores is None else self._set(group, scores)

    def score(self, group: Group) -> list[float]:
        """Sets the rewards of a complete group in this process alone, and waits for them."""
        self._read(group)
        return self._set(group, self._begin_all(group).scores())

    def wait(self, groups: Sequence[Group]) -> None:
        """Waits until a call of a reward for one of these groups has ended."""
        futures = set().union(*(self._scoring_of(group).futures() for group in groups))
        self._scorer.wait_for(futures, first=True)

    def end(self) -> None:
        """Ends a step: gives up calls that no worker has begun."""
        for scoring in (*self._scoring.values(), *self._judged):
            scoring.cancel()
        self._groups, self._scoring, self._judged = {}, {}, []

    def _scores(self, group: Group) -> dict[int, Score] | None:
        scoring = self._begin_all(group)
        return None if scoring.futures() else scoring.scores()

    def _begin_all(self, group: Group) -> Scoring:
        for place in range(len(group.responses)):
            self._add(group, place)
        scoring = self._scoring_of(group)
        scoring.finish()
        return scoring

    def _read(self, group: Group) -> None:
        """Sets the texts of responses that are not being scored."""
        scoring = self._scoring_of(group)
        for place, response in enumerate(group.responses):
            if place not in scoring:
                response.text = self._text(response.token_ids)

    @staticmethod
    def _set(group: Group, scores: Mapping[int, Score]) -> list[float]:
        for place, score in scores.items():
            response = group.responses[place]
            response.reward, response.failed, response.parts = score
        return [response.reward for response in group.responses]

    def _add(self, group: Group, place: int) -> None:
        """Begins to score a response whose reward is not known, once."""
        response, scoring = group.responses[place], self._scoring_of(group)
        if response.reward is None and place not in scoring:
            facts = SampleFacts(place, response.token_ids, response.finish_reason)
            scoring.add(place, response.text, facts)

    def _scoring_of(self, group: Group) -> Scoring:
        if group.position not in self._scoring:
            self._scoring[group.position] = Scoring(self._scorer, group.problem)
        return self._scoring[group.position]


class ResponseText:
    """Decodes a response to the text that rewards see.

    The text has special tokens, such as `<think>` where that is one, but not those that begin or
    end a sample or pad it. It ends at one of the rollout's stop strings, if any. It depends on the
    tokens alone.

    Args:
      tokenizer: tokenizer of the policy.
      params: how responses are sampled.
      eos_ids: end-of-sequence tokens of the policy.
    """

    def __init__(self, tokenizer, params: SamplingParams, eos_ids: Sequence[int] = ()):
        self._tokenizer, self._params = tokenizer, params
        named = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
        special = special_stops(tokenizer, params).values()
        hidden = {*named, *eos_ids, *params.stop_token_ids, *special}
        self._hidden = hidden - set(special if params.include_stop_str_in_output else ())

    def __call__(self, tokens: Sequence[int]) -> str:
        params, rest = self._params, ""
        if params.stop:
            plain = functools.partial(decode, self._tokenizer)
            include = params.include_stop_str_in_output
            cut = StopStrings(params.stop, plain, include, params.min_tokens).feed(tokens)
            if cut is not None:
                tokens = tokens[: cut.tokens]
                rest = plain(tokens)[len(cut.text) :]
        shown = [token for token in tokens if token not in self._hidden]
        return decode(self._tokenizer, shown, skip_special_tokens=False).removesuffix(rest)
