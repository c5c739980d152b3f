"""Several independent engines that are fed from one queue.

Rollouts scale out by replicas: each engine has its own devices, weights and caches, and chooses its
own strategies. The noise is keyed so that tokens do not depend on the replica that a sample runs
on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax

from specjax.decode.options import Features
from specjax.engine.base import BaseEngine
from specjax.engine.engine import Engine
from specjax.engine.request import SampleOutput
from specjax.engine.runner import EXTRA_SLOTS
from specjax.engine.sequence import Finished, Sample
from specjax.models.transformer import Params, split_layout
from specjax.parallel.copies import require_same
from specjax.parallel.reshard import Mover
from specjax.parallel.sharding import joined_mesh
from specjax.weights.matrix import is_exact

POLL = 1e-3  # seconds between two polls of replicas that have no new result


class Replicas(BaseEngine):
    """Replicas of an engine behind the interface of one.

    When a slot becomes free, a sample goes to the replica with the most free slots, or to one that
    has read more of its prompt already and almost as many free slots. Samples of one
    prompt, which each replica reads once, go to the same replica: all of them while as many others
    wait as there are slots, and later as many as there are free slots. The queue has the `order` of
    the engines.

    Args:
      engines: the engines, one per group of devices, with equal settings.
    """

    def __init__(self, engines: Sequence[Engine]):
        self.engines = tuple(engines)
        first = self.engines[0]
        self.runner, self.spec, self.limits = first.runner, first.spec, first.limits
        self.telemetry = first.telemetry
        for replica, engine in enumerate(self.engines):
            engine.replica, engine.replicas = replica, len(self.engines)
            engine.telemetry, engine.lengths = first.telemetry, first.lengths
            store, firsts = engine.runner.executables, first.runner.executables
            store.graphs, store.background = firsts.graphs, firsts.background
        self._slots = sum(engine.batch for engine in self.engines)
        # Features of all samples. `invariant` mode chooses the program by them, on all replicas.
        self._seen = Features()
        self._unfed: dict[Sample, None] = {}  # waiting samples, in the order in which they came
        self._by_prompt: dict[int, dict[Sample, None]] = {}  # the same, by prompt
        self._events: list[Finished] = []
        joined = joined_mesh([engine.runner.mesh for engine in self.engines])
        self._spread = None if joined is None else Mover(joined, self.runner.weights.axes)

    @property
    def version(self) -> int:
        return self.engines[0].version

    @property
    def outstanding(self) -> int:
        return len(self._unfed) + sum(engine.outstanding for engine in self.engines)

    @property
    def has_work(self) -> bool:
        return bool(self._unfed or self._events or any(e.has_work for e in self.engines))

    @property
    def drained(self) -> list[int]:
        """The indices of replicas that have nothing to do; none while samples wait."""
        return [] if self._unfed else super().drained

    @property
    def idle_replicas(self) -> list[int]:
        """The indices of replicas that have nothing to do while others run."""
        drained = self.drained
        return drained if len(drained) < len(self.engines) else []

    # --- weights ---------------------------------------------------------------------------------

    def set_params(self, params: Params, head: Params | None = None, running: str = "recompute"):
        """Gives every replica new weights, see `BaseEngine.set_params`.

        Where the replicas together have the devices of training, one program moves the weights.
        """
        if self._spread is not None:
            cfg = self.runner.cfg
            convert = split_layout(cfg, self._spread.target.shape["tp"])
            convert = self.runner.weights.needed(convert, params)
            params = self._spread_out("policy", params, cfg.tie_embeddings, convert)
            if head is not None:
                head = self._spread_out("draft", head)
        for engine in self.engines:
            engine.set_params(params, head, running)

    def set_head(self, head: Params) -> None:
        """Gives every replica a new draft head, see `Engine.set_head`."""
        head = self._spread_out("draft", head)
        for engine in self.engines:
            engine.set_head(head)

    def _spread_out(
        self, name: str, sent: Params, tied: bool = False, convert: Callable | None = None
    ) -> Params:
        """Moves weights to the devices of all replicas.

        They stay where they are unless the replicas together have the devices of training.
        """
        if self._spread is None or not jax.tree.leaves(sent):
            return sent
        arrived, cfg = self._spread(sent, convert), self.runner.cfg
        if convert is None or is_exact(cfg.run.products):
            dtype, repeated = cfg.run.compute_dtype, self.runner.weights.repeated
            require_same(name, sent, arrived, dtype, tied, repeated)
        return arrived

    def release(self, weights: bool = True) -> None:
        self.require_ended()
        for engine in self.engines:
            engine.release(weights)

    # --- samples ---------------------------------------------------------------------------------

    def queue(self, sample: Sample) -> Sample:
        self._seen = self._seen | sample.features if self.outstanding else sample.features
        for engine in self.engines:
            engine.unfinished.seen |= sample.features
        self._unfed[sample] = None
        self._by_prompt.setdefault(sample.job.prompt_hash, {})[sample] = None
        return sample

    def _take(self, sample: Sample) -> None:
        """Removes a sample from the queue."""
        prompt = sample.job.prompt_hash
        del self._unfed[sample], self._by_prompt[prompt][sample]
        if not self._by_prompt[prompt]:
            del self._by_prompt[prompt]

    def abort(self, sample: Sample) -> SampleOutput | None:
        if sample in self._unfed:
            self._take(sample)
            return sample.output("abort")
        return self.engines[sample.replica].abort(sample)

    def suspend(self) -> list[Sample]:
        """Removes and returns all samples that are not finished, see `Engine.suspend`."""
        suspended = [sample for engine in self.engines for sample in engine.suspend()]
        suspended += self._unfed
        self._unfed, self._by_prompt = {}, {}
        return suspended

    def clear(self) -> None:
        self._unfed, self._by_prompt, self._events = {}, {}, []
        for engine in self.engines:
            engine.clear()

    def step(self) -> list[Finished]:
        """Lets every replica enqueue a chunk and read a result; waits until one has a result.

        Returns:
          the samples that ended; none if the result ended no sample.
        """
        while True:
            self._feed()
            has_result = False
            for engine in self.engines:
                if engine.has_work:
                    has_result |= engine.is_ready
                    self._events += engine.step(wait=False)
            if self.on_poll is not None:
                self.on_poll()
            if self._events or has_result or not self.has_work:
                events, self._events = self._events, []
                return events
            if not any(engine.has_work and engine.is_ready for engine in self.engines):
                time.sleep(POLL)

    def _feed(self) -> None:
        """Gives waiting samples to replicas with free slots."""
        while self._unfed:
            # A replica gets some samples that wait for a row, as long as enough others remain in
            # the queue to balance the replicas.
            enough = len(self._unfed) > self._slots + EXTRA_SLOTS * len(self.engines)
            more = EXTRA_SLOTS if enough else 0
            free = [engine.batch + more - engine.outstanding for engine in self.engines]
            if max(free) <= 0:
                break
            together = list(self._by_prompt[self._next_prompt()])
            least = max(1, max(free) - self.runner.batch // 4)
            known = [
                one.scheduler.cached(together[0].known) if count >= least else -1
                for one, count in zip(self.engines, free, strict=True)
            ]
            replica = max(range(len(free)), key=lambda one: (known[one], free[one]))
            # Samples of one prompt go together, so that the prompt is read once.
            others = len(self._unfed) - len(together)
            count = len(together) if others >= self._slots else free[replica]
            engine = self.engines[replica]
            for sample in together[:count]:
                self._take(sample)
                engine.queue(sample)
                engine.unfinished.seen |= self._seen
        for engine in self.engines:
            engine.others_wait = bool(self._unfed)

    def _next_prompt(self) -> int:
        """The prompt whose samples start next: the first one, or that with the longest expected."""
        first = self.engines[0]
        if first.config.order == "fifo":
            return next(iter(self._by_prompt))
        return max(self._by_prompt, key=lambda key: first.lengths.expected(key) or 0.0)
