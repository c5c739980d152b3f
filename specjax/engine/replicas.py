"""Several independent engines that are fed from one queue.

Rollouts scale out by replicas: each engine has its own devices, weights and caches, and chooses its
own strategies. The noise is keyed so that tokens do not depend on the replica that a sample runs
on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Several

import jax

from specjax.decode.options import Features
from specjax.engine.base import BaseEngine, PerEngine
from specjax.engine.checksum import require_same
from specjax.engine.engine import Engine
from specjax.engine.request import SampleOutput
from specjax.engine.runner import EXTRA_SLOTS
from specjax.engine.sequence import Finished, Sequence
from specjax.models.transformer import Params, split_layout
from specjax.parallel.reshard import Mover
from specjax.parallel.sharding import joined_mesh

POLL = 1e-3  # seconds between two polls of replicas that have no new result


class Replicas(BaseEngine):
    """Replicas of an engine behind the interface of one.

    When a slot becomes free, a sample goes to the replica with the most free slots. Samples of one
    prompt, which each replica reads once, go to the same replica: all of them while as many others
    wait as there are slots, and later as many as there are free slots. The queue has the `order` of
    the engines.

    Args:
      engines: the engines, one per group of devices, with equal settings.
    """

    controller, watcher = PerEngine(), PerEngine()

    def __init__(self, engines: Several[Engine]):
        if not engines:
            raise ValueError("expected at least one engine, got none")
        self.engines = tuple(engines)
        first = self.engines[0]
        self.runner, self.spec, self.limits = first.runner, first.spec, first.limits
        self.unfinished, self.telemetry = first.unfinished, first.telemetry
        for replica, engine in enumerate(self.engines):
            engine.replica, engine.replicas = replica, len(self.engines)
            engine.telemetry, engine.lengths = first.telemetry, first.lengths
            engine.counts = first.counts
            engine.runner.executables.graphs = first.runner.executables.graphs
        self._slots = sum(engine.batch for engine in self.engines)
        # Features of all samples. `invariant` mode chooses the program by them, on all replicas.
        self._seen = Features()
        self._unfed: dict[Sequence, None] = {}  # waiting samples, in the order in which they came
        self._by_prompt: dict[int, dict[Sequence, None]] = {}  # the same, by prompt
        self._events: list[Finished] = []
        joined = joined_mesh([engine.runner.mesh for engine in self.engines])
        self._spread = None if joined is None else Mover(joined, self.runner.axes)

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
        received = 0
        if self._spread is not None:
            dtype, tied = self.runner.cfg.run.compute_dtype, self.runner.cfg.tie_embeddings
            convert = split_layout(self.runner.cfg, self._spread.target.shape["tp"])
            sent, params = params, self._spread(params, convert)
            received = self._spread.received
            require_same("policy", sent, params, dtype, tied, self.runner.repeated)
            if head is not None:
                head, more = self._spread_head(head)
                received += more
        for engine in self.engines:
            engine.set_params(params, head, running)
            engine.runner.moved += received

    def set_head(self, head: Params) -> None:
        """Gives every replica a new draft head, see `Engine.set_head`."""
        head, received = self._spread_head(head)
        for engine in self.engines:
            engine.set_head(head)
            engine.runner.moved += received

    def set_draft_ids(self, ids: Several[int] | None = None) -> None:
        self._check_draft_ids(ids)
        if ids is None:
            self.engines[0].set_draft_ids()
            for engine in self.engines[1:]:
                engine.runner.set_ids(engine.counts.ids)
            return
        for engine in self.engines:
            engine.set_draft_ids(ids)

    def _spread_head(self, head: Params) -> tuple[Params, int]:
        """The head on the devices of all replicas, and the bytes that a device received for it.

        The head stays where it is unless the replicas together have the devices of training.
        """
        if self._spread is None or not jax.tree.leaves(head):
            return head, 0
        sent, head = head, self._spread(head)
        dtype = self.runner.cfg.run.compute_dtype
        require_same("draft", sent, head, dtype, False, self.runner.repeated)
        return head, self._spread.received

    def release(self, weights: bool = True) -> None:
        if self.outstanding:
            raise RuntimeError(
                f"{self.outstanding} samples are not finished; step() until they are"
            )
        for engine in self.engines:
            engine.release(weights)

    # --- samples ---------------------------------------------------------------------------------

    def queue(self, sequence: Sequence) -> Sequence:
        features = sequence.features
        self._seen = self._seen | features if self.outstanding else features
        for engine in self.engines:
            engine.unfinished.seen |= features
        self._unfed[sequence] = None
        self._by_prompt.setdefault(sequence.job.prompt_hash, {})[sequence] = None
        return sequence

    def _take(self, sequence: Sequence) -> None:
        """Removes a sample from the queue."""
        prompt = sequence.job.prompt_hash
        del self._unfed[sequence], self._by_prompt[prompt][sequence]
        if not self._by_prompt[prompt]:
            del self._by_prompt[prompt]

    def abort(self, sequence: Sequence) -> SampleOutput | None:
        if sequence in self._unfed:
            self._take(sequence)
            self.engines[0].queue(sequence)
        return self.engines[sequence.replica].abort(sequence)

    def suspend(self) -> list[Sequence]:
        """Removes and returns all samples that are not finished, see `Engine.suspend`."""
        found = [sequence for engine in self.engines for sequence in engine.suspend()]
        found += self._unfed
        self._unfed, self._by_prompt = {}, {}
        return found

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
            replica = max(range(len(free)), key=free.__getitem__)
            if free[replica] <= 0:
                break
            together = list(self._by_prompt[self._next_prompt()])
            # Samples of one prompt go together, so that the prompt is read once.
            others = len(self._unfed) - len(together)
            count = len(together) if others >= self._slots else free[replica]
            engine = self.engines[replica]
            for sequence in together[:count]:
                self._take(sequence)
                engine.queue(sequence)
                engine.unfinished.seen |= self._seen
        for engine in self.engines:
            engine.others_wait = bool(self._unfed)

    def _next_prompt(self) -> int:
        """The prompt whose samples start next: the first one, or that with the longest expected."""
        first = self.engines[0]
        if first.config.order == "fifo":
            return next(iter(self._by_prompt))
        return max(self._by_prompt, key=lambda key: first.lengths.expected(key) or 0.0)
