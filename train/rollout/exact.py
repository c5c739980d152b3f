"""Decodes the samples of a step again without speculation, and compares (`rollout.exact_mode`).

This happens after the rollout and before the weights change, with the same seeds. Samples that an
earlier step began are left out, because other weights sampled their first tokens. Differences are
printed and counted; nothing is trained on the second samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from specjax.decode.options import Features
from specjax.engine.base import BaseEngine
from specjax.engine.compare import Difference, first_differences
from specjax.engine.programs import OnProgram
from specjax.engine.request import Job, SampleOutput
from specjax.models.transformer import Params
from specjax.parallel import distributed
from train.rollout.groups import Response


class ExactMode:
    """Compares the rollouts of an engine with plain decoding.

    Args:
      engine: engine that rolls out.
      plain: equal engine without speculation; None if `engine` decodes plainly, too, in
        `invariant` mode.
      load: function that gives the weights of the step to `engine` again.

    Attributes:
      differences: first difference of each sample of the last step that differs; their requests are
        the places of problems in the order of draws.
    """

    def __init__(self, engine: BaseEngine, plain: BaseEngine | None, load: Callable[[], None]):
        self._engine, self._plain, self._load = engine, plain, load
        self.differences: list[Difference] = []

    def warm_up(
        self, params: Params, features: Sequence[Features], on_program: OnProgram | None
    ) -> None:
        """Compiles the programs of plain decoding."""
        if self._plain is not None:
            self._plain.set_params(params)
            self._plain.warm_up(features, on_program)
            self._plain.release()

    def compare(
        self, params: Params, begun: Sequence[tuple[Job, Response]]
    ) -> dict[str, float | str]:
        """Decodes samples plainly, and returns metrics of the differences.

        Afterwards the rollout's engine may have released its weights and caches.

        Args:
          params: parameters of the policy that sampled them.
          begun: samples as (job, response).
        """
        started = time.perf_counter()
        jobs, speculative = [job for job, _ in begun], [response for _, response in begun]
        if self._plain is None:
            samples, _ = self._engine.generate([job.without_speculation() for job in jobs])
        else:
            self._engine.release()  # there may be no room for both
            self._plain.set_params(params)
            samples, _ = self._plain.generate(jobs)
            self._plain.release()
        self.differences, pairs = [], zip(samples, speculative, strict=True)
        if any(plain.token_ids != other.token_ids for plain, other in pairs):
            self.differences = self._explained(jobs, samples, speculative)
        return {
            "rollout/exact_compared": float(len(begun)),
            "rollout/exact_differences": float(len(self.differences)),
            "rollout/exact_unexplained": float(sum(not d.explained for d in self.differences)),
            "time/exact": time.perf_counter() - started,
        }

    def _explained(
        self, jobs: list[Job], plain: list[SampleOutput], speculative: list[Response]
    ) -> list[Difference]:
        """The first difference of each sample that differs; the same list in all processes."""
        if self._plain is not None:
            self._load()
        differences = []
        if self._engine.engines:
            differences = first_differences(self._engine.runner, jobs, plain, speculative)
        return next(filter(None, distributed.gather(differences, "exact mode")))
