"""The samples that were added to an engine and have not ended."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Iterable

from specjax.decode.options import Features
from specjax.engine.options import Limits, check_job, features_of
from specjax.engine.request import Job
from specjax.engine.runner import Runner
from specjax.engine.sequence import Progress, Sequence
from specjax.spelling import SettingError


class Unfinished:
    """Makes sequences of jobs that fit, and holds the features that unfinished samples need.

    Args:
      runner: runner into whose pages a job must fit.
      limits: limits of a single job.

    Attributes:
      asked: number of unfinished samples by the features that they need.
      seen: all features needed since the set of unfinished samples was last empty.
    """

    def __init__(self, runner: Runner, limits: Limits):
        self._runner, self._limits = runner, limits
        self._last_asked: tuple[Job | None, Features] = (None, Features())
        self.clear()

    def clear(self) -> None:
        """Forgets all samples."""
        self._sequences: dict[Sequence, None] = {}
        self.asked: Counter[Features] = Counter()
        self.seen = Features()

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._sequences

    def __iter__(self):
        return iter(list(self._sequences))

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence that was queued."""
        features = sequence.features
        self.seen = self.seen | features if self._sequences else features
        self._sequences[sequence] = None
        self.asked[features] += 1

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended."""
        del self._sequences[sequence]
        self.asked[sequence.features] -= 1
        if not self.asked[sequence.features]:
            del self.asked[sequence.features]

    def make(self, job: Job, progress: Progress | None = None) -> Sequence:
        """Makes a sequence of a job, see `BaseEngine.make`."""
        features = self._features_of(job)
        asked, compiled = job.params.strategy, self._runner.plans
        if asked is not None and asked not in compiled:
            raise ValueError(
                f"{job.where} asks for strategy {asked!r}, and only {', '.join(compiled)} "
                "were compiled; list it among the controller's strategies"
            )
        limit, runner = min(job.limit, self._runner.max_len), self._runner
        wanted, there = runner.pages_of(limit), runner.pages - 1
        if wanted > there:
            raise SettingError(
                lambda spell: (
                    f"{job.where} may take {wanted} cache pages of {runner.page_size} "
                    f"positions, and there are {there}; raise {spell('cache_bytes')} (a page takes "
                    f"{runner.page_bytes} bytes), or lower {spell('max_tokens')}"
                )
            )
        if progress is not None:
            _check_progress(job, progress, limit - len(job.prompt))
        if job.limit > limit:
            job = dataclasses.replace(job, limit=limit)
        return Sequence(job, runner.steps, features, progress)

    def _features_of(self, job: Job) -> Features:
        """The features that a job needs; raises ValueError if the job does not fit.

        The samples of a request need the same features, so the last result is kept for them.
        """
        last, features = self._last_asked
        if last is None or not (
            job.params is last.params
            and job.prompt is last.prompt
            and job.stop_ids == last.stop_ids
            and job.bad_words is last.bad_words
            and job.limit == last.limit
        ):
            check_job(job.where, job, self._limits)
            features = features_of(job, self._runner.cfg.vocab_size)
            self._last_asked = job, features
        return features


def _check_progress(job: Job, progress: Progress, room: int) -> None:
    """Raises ValueError if a sample of at most `room` tokens cannot continue from `progress`."""
    if job.params.logprobs is not None:
        raise ValueError(
            f"{job.where} continues an earlier run and asks for top logprobs, which are not "
            "kept across runs; leave them out"
        )
    if job.params.transformed_logprobs and len(progress.transformed or ()) < len(progress.tokens):
        raise ValueError(
            f"{job.where} continues an earlier run and asks for transformed logprobs, which "
            f"that run was not asked for: expected {len(progress.tokens)} of them, got "
            f"{len(progress.transformed or ())}; leave them out"
        )
    if len(progress.tokens) >= room:
        raise ValueError(
            f"{job.where} continues an earlier run that has {len(progress.tokens)} "
            f"tokens already, and there is room for {room}; it has ended, or raise max_tokens"
        )


def all_of(features: Iterable[Features]) -> Features:
    """The union of features."""
    return functools.reduce(operator.or_, features)
