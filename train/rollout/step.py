"""The rollout of one step: it adds samples to an engine until its groups are certain.

The rule of `train.rollout.groups` says which groups these are. The number of slots, the order of
samples and speculation decide only the duration of a step.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from specjax.engine.engine import Engine
from specjax.engine.request import Job, SampleOutput, Totals, require_valid
from specjax.engine.sequence import Finished
from specjax.engine.sequence import Sample as Added
from specjax.parallel import distributed
from train.rollout.draws import Draws
from train.rollout.groups import Group, Response, Rule, Selection, select
from train.rollout.rewards import GroupRewards
from train.rollout.turns import Turns, before_of

# A step that keeps replacing groups warns each time it has started this many batches of groups.
WARN_EVERY = 10

log = logging.getLogger(__name__)


class StepRollout:
    """Runs the groups of one step through the engine.

    Args:
      engine: engine without samples.
      rule: rule that selects groups.
      partial: whether incomplete groups will be carried to the next step.
      draws: draws further groups, and makes jobs of them.
      rewards: scores them.
      turns: plays the turns of samples; None: they have one.

    Attributes:
      groups: the candidates in order, and groups beyond them that were started.
      totals: rounds of all samples, and seconds; the caller sets `tokens`.
    """

    def __init__(
        self,
        engine: Engine,
        rule: Rule,
        partial: bool,
        draws: Draws,
        rewards: GroupRewards,
        turns: Turns | None = None,
    ):
        self.engine, self.rule, self.partial = engine, rule, partial
        self._draws, self._rewards, self._turns = draws, rewards, turns
        self._jobs: list[list[Job]] = []  # of each group
        # Samples whose environment is asked, as (group, place), by the answer.
        self._asked: dict[Future, tuple[int, int]] = {}
        self._unscored: list[Group] = []  # complete groups whose rewards are not known yet
        self.groups: list[Group] = []
        self._running: list[dict[Added, Response]] = []  # running samples of each group
        self._group_of: dict[Added, int] = {}
        self.totals = Totals(engine.runner.steps)

    def run(self, carried: Iterable[Group]) -> Selection:
        """Runs until the selection is final and carried samples have reached the step's budget.

        Args:
          carried: groups to continue, see `begin_step`.

        Raises:
          ValueError: a job does not fit the engine.
          RuntimeError: the engine's weights changed.
        """
        start = time.perf_counter()
        try:
            for group in carried:
                self._start(group)
            while not (selection := self._select()).final or self._must_go_on(selection):
                for event in self.engine.step() if self.engine.has_work else ():
                    self._finish(event)
                self._take_answers()
                self._take_rewards()
            self._stop(range(len(self.groups)))
            while self.engine.has_work:
                self.engine.step()
        except BaseException:
            self.engine.clear()  # an interrupted step leaves nothing behind
            raise
        self.totals.seconds = time.perf_counter() - start
        return selection

    def _select(self) -> Selection:
        """Starts the groups that the selection needs, and stops samples beyond its budget."""
        selection = self._selection()
        while len(self.groups) < selection.candidates:
            if self.groups and len(self.groups) % (WARN_EVERY * self.rule.in_flight) == 0:
                if distributed.is_first():
                    log.warning("%s", long_step_warning(self.rule, self.groups))
            self._start(self._draws.draw())
        if selection.budget is not None:
            self._trim(selection.budget)
        return self._selection()

    def _selection(self) -> Selection:
        return select(self.rule, [group.status for group in self.groups])

    def _start(self, group: Group) -> None:
        """Adds the samples of a group to the engine."""
        index = len(self.groups)
        self.groups.append(group)
        self._running.append({})
        self._jobs.append(self._draws.jobs(index, group))
        self._rewards.add(index, group)
        if group.is_complete:  # carried complete, because others were selected before it
            self._complete(group)
            return
        for place, response in enumerate(group.responses):
            if response.finish_reason is not None:
                continue
            if response.turns and response.turns[-1][1] == len(response.token_ids):
                if not self._turns.observe(response, self._jobs[index][place]):
                    self._turns.end(response, "length")
                    continue
            self._add(index, place)
        if group.is_complete:
            self._complete(group)

    def _add(self, index: int, place: int) -> None:
        """Adds a sample to the engine, to begin or to go on."""
        response = self.groups[index].responses[place]
        sequence = self.engine.add(self._jobs[index][place], before_of(response))
        self._running[index][sequence], self._group_of[sequence] = response, index

    def _finish(self, event: Finished) -> None:
        """Records a sample that has ended, and scores its group when it is complete."""
        index = self._group_of.pop(event.sequence)
        group = self.groups[index]
        require_valid(
            [event.sample], lambda _: f"the rollout of problem {group.position} in the data"
        )
        response = self._running[index].pop(event.sequence)
        place = next(i for i, other in enumerate(group.responses) if other is response)
        self._record(response, event.sample, finished=self._turns is None)
        if self._turns is not None:
            future = self._turns.ask(group, place, event.sample.finish_reason)
            self._asked[future] = index, place
        elif event.verdict is not None:
            response.reward, response.failed, response.parts = event.verdict
        else:
            self._rewards.begin(group, place)
        if group.is_complete:
            self._complete(group)

    def _take_answers(self) -> None:
        """Takes the answers of environments; waits for one if no sample runs."""
        if self._asked and not self.engine.has_work:
            concurrent.futures.wait(self._asked, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in [future for future in self._asked if future.done()]:
            index, place = self._asked.pop(future)
            [answer] = future.result()
            if self._turns.take(self.groups[index], place, answer, self._jobs[index][place]):
                self._add(index, place)
            elif self.groups[index].is_complete:
                self._complete(self.groups[index])

    def _complete(self, group: Group) -> None:
        """Takes the rewards of a complete group, or notes that they are not known yet."""
        if self._turns is not None:
            self._turns.read(group)
            group.rewards = [response.reward for response in group.responses]
        else:
            group.rewards = self._rewards.rewards(group)
        if group.rewards is None:
            self._unscored.append(group)

    def _take_rewards(self) -> None:
        """Takes the rewards that have become known; waits for one if no sample runs."""
        waiting, self._unscored = self._unscored, []
        for group in waiting:
            self._complete(group)
        if self._unscored and not self.engine.has_work:
            self._rewards.wait(self._unscored)

    def _record(self, response: Response, sample: SampleOutput, finished: bool) -> None:
        """Copies an engine's output to the response."""
        versions = {version for _, version in sample.weight_versions}
        if versions - {self.engine.version}:
            raise RuntimeError(
                f"expected all tokens of a step from version {self.engine.version} of the weights, "
                f"got some of {sorted(versions)}; set_params() belongs between steps"
            )
        response.update(sample, finished)
        self.totals.count_rounds(sample.stats)
        self.totals.longest = max(self.totals.longest, response.num_new)

    def _trim(self, budget: int) -> None:
        """Stops samples that have as many tokens as the budget, which can only fall."""
        for index, running in enumerate(self._running):
            long_enough = []
            for sequence, response in running.items():
                new = max(0, len(sequence.tokens) - response.num_carried)
                response.emitted = max(response.emitted, new)
                if new >= budget:
                    long_enough.append(sequence)
            if not self.partial and self.groups[index].status.at_least > budget:
                self._stop([index])
            for sequence in long_enough:
                self._abort(index, sequence)
        for future, (index, place) in list(self._asked.items()):
            if self.groups[index].responses[place].num_new > budget:
                self._give_up(future)

    def _must_go_on(self, selection: Selection) -> bool:
        """Stops groups outside of a final selection, and returns whether others run."""
        first = selection.candidates if self.partial else 0
        self._stop(range(first, len(self.groups)))
        return any(self._running[:first]) or bool(self._asked)

    def _stop(self, indices: Iterable[int]) -> None:
        """Stops all samples of groups."""
        for index in indices:
            for sequence in list(self._running[index]):
                self._abort(index, sequence)
            for future, (group, _) in list(self._asked.items()):
                if group == index:
                    self._give_up(future)

    def _give_up(self, future: Future) -> None:
        """Leaves a sample where it stands, whatever its environment will answer."""
        index, place = self._asked.pop(future)
        self.groups[index].responses[place].ending = None

    def _abort(self, index: int, sequence: Added) -> None:
        response = self._running[index].pop(sequence, None)
        sample = response and self.engine.abort(sequence)
        if sample is not None:
            del self._group_of[sequence]
            self._record(response, sample, finished=False)


def long_step_warning(rule: Rule, groups: Sequence[Group]) -> str:
    """Writes the warning that a step keeps replacing groups, with its rewards so far."""
    complete = [group for group in groups if group.rewards is not None]
    alike = Counter(group.rewards[0] for group in complete if not group.status.informative)
    values = ", ".join(f"{reward:g} in {count}" for reward, count in alike.most_common(3))
    limit = "algo.max_num_gen_batches=0 sets no limit"
    if rule.max_candidates is not None:
        limit = f"algo.max_num_gen_batches={rule.batches} allows {rule.max_candidates} groups"
    return (
        f"step {groups[-1].step} has started {len(groups)} groups, of which {len(complete)} are "
        f"complete, and is not full: {len(complete) - alike.total()} have differing rewards, of "
        f"rollout.prompts={rule.prompts} that it needs; in {alike.total()} all rewards are equal "
        f"({values or 'none'}) and give no gradient. It goes on, and {limit}. Is the task "
        "too hard or too easy for the policy, or does the reward not see the difference?"
    )
