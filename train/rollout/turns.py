"""Samples of several turns: what an environment answers becomes tokens, and the sample goes on.

The engine's tokens stay as they are: the text that the chat template writes between two messages of
the assistant is encoded alone and appended, with loss mask 0. The engine then continues the sample,
which its prefix cache has read already.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from specjax.config import SamplingParams
from specjax.engine.base import BaseEngine
from specjax.engine.request import Job, SampleOutput, SpecStats, Totals, require_valid
from train.data.prompts import Prompts
from train.environments.calls import Lost, Messages, Request, Turn
from train.environments.pool import Environments, row_of
from train.rewards.calls import Failed
from train.rollout.groups import Group, Response
from train.rollout.rewards import ResponseText

# Stands for a message of the assistant in a rendered conversation; no template contains it.
_MARK = "THEANSWER"

log = logging.getLogger(__name__)


class Turns:
    """Plays the turns of samples.

    Args:
      environments: the environments.
      prompts: encoder of prompts.
      eos_ids: tokens that end a message.
      most: the most turns of a sample.
      name: what tells these samples from others with the same places, such as held-out ones.
    """

    def __init__(
        self,
        environments: Environments,
        prompts: Prompts,
        eos_ids: Sequence[int],
        most: int,
        name: str,
    ):
        self._environments, self._prompts = environments, prompts
        self._most, self._name = most, name
        self._text = ResponseText(prompts.tokenizer, SamplingParams(), eos_ids)
        self._ends = frozenset(eos_ids)
        self._lost = False

    def read(self, group: Group) -> None:
        """Sets the texts of the responses of a group, the environment's part included."""
        for response in group.responses:
            response.text = self._text(response.token_ids)

    def ask(self, group: Group, place: int, reason: str) -> Future:
        """Asks the environment of a response, whose message has ended for a reason."""
        response = group.responses[place]
        response.ending = reason
        prompt = group.problem.columns["prompt_messages"]
        request = Request(row_of(group.problem), prompt, self._spoken(response))
        return self._environments.ask(f"{self._name}:{group.position}:{place}", request)

    def _spoken(self, response: Response) -> Messages:
        """The messages of all turns, that which has ended last included."""
        latest, messages = [response.begun, len(response.token_ids), 0.0, []], []
        for begin, end, _, answers in [*response.turns, latest]:
            text = self._text(response.token_ids[begin:end])
            messages += [{"role": "assistant", "content": text}, *answers]
        return messages

    def take(self, group: Group, place: int, answer: Turn | Lost | Failed, job: Job) -> bool:
        """Takes the answer to a response, the sample of a job.

        Returns:
          whether it goes on; else it has ended, and has its reward.
        """
        response = group.responses[place]
        reason, response.ending = response.ending, None
        if isinstance(answer, Lost):
            if not self._lost:
                log.warning(
                    "environment %r: a sample begins again, since its environment was lost and has "
                    "no method restore(messages); later ones are not told of",
                    self._environments.name,
                )
            self._lost = True
            response.begin_again()
            return True
        if isinstance(answer, Failed):
            self._environments.failed(group.problem, answer)
            response.failed, answer = True, Turn([], 0.0, True)
        response.turns.append(
            [response.begun, len(response.token_ids), answer.reward, answer.messages]
        )
        is_last = answer.done or reason == "length" or len(response.turns) >= self._most
        if not is_last and self.observe(response, job):
            return True
        self.end(response, reason if is_last else "length")
        return False

    @staticmethod
    def end(response: Response, reason: str) -> None:
        """Ends a response, whose reward is the sum over its turns."""
        response.finish_reason = reason
        response.reward = float(sum(turn[2] for turn in response.turns))

    def observe(self, response: Response, job: Job) -> bool:
        """Appends what the environment said in the last turn; returns whether it fits."""
        ids = self._between(response.turns[-1][3])
        last = response.token_ids[-1:]
        if self._prompts.chat and last == ids[:1] and last[0] in self._ends:
            ids = ids[1:]  # the message has its end already
        if len(job.prompt) + len(response.token_ids) + len(ids) >= job.limit:
            return False
        response.observe(ids)
        return True

    def _between(self, messages: Messages) -> list[int]:
        """Token ids of what stands between two messages of the assistant."""
        prompts = self._prompts
        if prompts.chat:
            given = [{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}]
            text = prompts.render([*given, *messages]).partition(_MARK)[2]
        else:
            text = "".join(message["content"] for message in messages)
        return list(prompts.tokenizer.encode(text, add_special_tokens=False))

    def play(
        self,
        engine: BaseEngine,
        jobs: Sequence[Job],
        places: Sequence[tuple[Group, int]],
        on_progress: Callable[[int, Totals], None] | None = None,
    ) -> Totals:
        """Plays samples to their ends, and sets the rewards of their responses.

        Args:
          jobs: the samples.
          places: group and place of each.
          on_progress: see `BaseEngine.generate`.
        """
        started, totals, ended = time.perf_counter(), Totals(engine.runner.steps), 0
        running, asked = {}, {}
        for number, job in enumerate(jobs):
            running[engine.add(job)] = number
        try:
            while running or asked:
                for event in engine.step() if engine.has_work else ():
                    number = running.pop(event.sequence)
                    group, place = places[number]
                    require_valid([event.sample], lambda _, number=number: jobs[number].where)
                    group.responses[place].update(event.sample, finished=False)
                    totals.count_rounds(event.sample.stats)
                    totals.tokens += event.sample.stats.accepted + event.sample.stats.rounds
                    future = self.ask(group, place, event.sample.finish_reason)
                    asked[future] = number
                if asked and not engine.has_work:
                    concurrent.futures.wait(asked, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in [one for one in asked if one.done()]:
                    number = asked.pop(future)
                    (group, place), [answer] = places[number], future.result()
                    if self.take(group, place, answer, jobs[number]):
                        before = before_of(group.responses[place])
                        running[engine.add(jobs[number], before)] = number
                    else:
                        ended += 1
                totals.seconds = time.perf_counter() - started
                if on_progress:
                    on_progress(ended, totals)
        except BaseException:
            engine.clear()
            raise
        return totals


def before_of(response: Response) -> SampleOutput | None:
    """What the engine continues a response from; None: it has no tokens.

    Records are made anew where there are tokens that the engine has not read.
    """
    if not response.token_ids:
        return None
    return SampleOutput(
        token_ids=response.token_ids,
        text=None,
        logprobs=response.logprobs,
        finish_reason="abort",
        stats=SpecStats(()),
        transformed_logprobs=response.transformed_logprobs,
        records=None if response.turns else response.records,
        origins=response.origins,
    )
