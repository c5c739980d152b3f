"""Spot training: the draft head learns while some replicas have nothing to do.

A rollout ends with its longest sample, and by then most replicas have been idle for a while. They
cannot learn from this rollout, which has no rewards yet and no policy update to hand out states, so
the head learns one step later: a step's micro-batches go to a replay buffer with their states, and
the next step trains on them.

    step t    rollout under policy t ........................ | rest | policy update | sync
    replica 0 ########################################        |      |               |
    replica 1 ################## [piece][piece][piece]        |      |               |
                                  data of step t - 1           what the gaps had no room for

What is learned does not depend on the gaps. A step has a fixed list of updates, made one after the
other (`ReplayBuffer.plan`); the gaps only decide *when*: an update that found none is made after
the rollout, before the policy moves. So the clock decides nothing, and a run that is resumed, or
has another number of replicas, ends with the same head.

A piece is one update, on one micro-batch. The next one is sent off only when it is done and some
replica is still drained, so samples that come to the replica meanwhile wait for one piece at most.
The loop that feeds the engines is never kept waiting: it sends pieces off, and asks whether they
are done. One replica trains at a time, on one device, for each update begins where the last ended.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specjax.models.transformer import Params
from train.draft import FIELDS, DraftConfig, DraftTrainer, add_sums, frozen_policy_parts
from train.packing import empty_batch
from train.trace import Trace


class Entry(NamedTuple):
    """One micro-batch [R S] with the policy's states [R S D], and the step that it comes from."""

    step: int
    batch: dict[str, Array]
    states: Array


class ReplayBuffer:
    """The micro-batches of the latest steps.

    Args:
      tokens: positions held at most, padding included. When there are more, the oldest micro-batch
        goes first.
    """

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.entries: deque[Entry] = deque()

    @property
    def size(self) -> int:
        """Positions held."""
        return sum(entry.batch["tokens"].size for entry in self.entries)

    def add(self, step: int, batches: Sequence[Mapping[str, Array]], states: Sequence[Array]):
        """Takes in what the policy update of a step handed out."""
        for batch, here in zip(batches, states, strict=True):
            self.entries.append(Entry(step, {name: batch[name] for name in FIELDS}, here))
        while self.size > self.tokens:
            self.entries.popleft()

    def plan(self, step: int, updates: int, epochs: int) -> list[Entry]:
        """What the head trains on in a step, in order: never what this step itself brings.

        Args:
          updates: from all steps held, the latest first, over and over; 0: `epochs` passes over the
            step before.
        """
        if not updates:
            return [e for e in self.entries if e.step == step - 1] * epochs
        known = [e for e in self.entries if e.step < step]
        known.sort(key=lambda e: -e.step)
        return list(itertools.islice(itertools.cycle(known), updates))

    # --- checkpoints -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For a checkpoint's metadata: JSON."""
        return {
            "steps": [entry.step for entry in self.entries],
            "arrays": {
                name: [list(array.shape), str(array.dtype)]
                for name, array in (_arrays(self.entries[0]) if self.entries else {}).items()
            },
        }

    def tree(self) -> dict[str, dict[str, Array]]:
        """The arrays, for a checkpoint."""
        return {f"{i:04d}": _arrays(entry) for i, entry in enumerate(self.entries)}

    @staticmethod
    def abstract(state: Mapping[str, Any]) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """The structure of `tree`, from what `state` returned."""
        arrays = {
            name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
            for name, (shape, dtype) in state["arrays"].items()
        }
        return {f"{i:04d}": dict(arrays) for i in range(len(state["steps"]))}

    def load(self, state: Mapping[str, Any], tree: Mapping[str, Mapping[str, Array]]) -> None:
        """Takes over what `state` and `tree` returned."""
        self.entries.clear()
        for i, step in enumerate(state["steps"]):
            arrays = dict(tree[f"{i:04d}"])
            states = arrays.pop("states")
            self.entries.append(Entry(step, arrays, states))


def _arrays(entry: Entry) -> dict[str, Array]:
    return {**entry.batch, "states": entry.states}


class SpotTraining:
    """The head's updates of each step, piece by piece.

    Between `begin` and `finish` call `look` as often as possible.

    Args:
      draft: the program. devices: one of each replica, on which its pieces run.
      trace: is told of every piece.

    Attributes:
      buffer: what the head learns from.
      in_gaps, after: updates that this step made in gaps, and after its rollout.
    """

    def __init__(
        self, draft: DraftTrainer, cfg: DraftConfig, devices: Sequence[jax.Device], trace: Trace
    ):
        self.draft, self._cfg, self._devices, self._trace = draft, cfg, list(devices), trace
        self.buffer = ReplayBuffer(cfg.spot.buffer_tokens)
        self._left: deque[Entry] = deque()
        self._running: tuple[dict, float, bool] | None = None
        self.in_gaps = self.after = 0

    def warm_up(self, head: Params, opt_state, policy: Params, rows: int, length: int) -> None:
        """Compiles an update for every replica, on padding, so that no gap has to."""
        batch = empty_batch(rows, length)
        model = self.draft.cfg
        states = np.zeros((rows, length, model.hidden_size), jnp.dtype(model.compute_dtype))
        entry = Entry(0, {name: batch[name] for name in FIELDS}, states)
        for replica in range(len(self._devices) if self._cfg.spot.gaps else 1):
            self.begin(1, head, opt_state, policy)
            self._left = deque([entry])
            self._send(replica, in_gap=False)
            self.finish()

    def begin(self, step: int, head: Params, opt_state, policy: Params) -> None:
        """Lists the updates of a step.

        Args:
          head, opt_state: to go on from; they stay valid. policy: that the rollout runs under; it
            must stay valid until `finish`.
        """
        self._left = deque(self.buffer.plan(step, self._cfg.spot.updates, self._cfg.epochs))
        self._trees, self._policy = (head, opt_state), frozen_policy_parts(policy)
        self._homes = jax.tree.map(lambda a: a.sharding, self._trees)
        self._here: Params | None = None  # parts of the policy, on the device of `_place`
        self._place: int | None = None
        self._running, self._sums = None, None
        self.in_gaps = self.after = 0

    def keep(self, step: int, batches: Sequence[Mapping], states: Sequence[Array]) -> None:
        """What the policy update of a step handed out, for later steps."""
        limit = self._cfg.max_microbatches or len(states)
        self.buffer.add(step, batches[:limit], states[:limit])

    def look(self, drained: Sequence[int]) -> None:
        """Takes in a piece that is done, and sends off the next one; never waits.

        Args:
          drained: replicas that have nothing to do, by index. If all have, the rollout is over, and
            this is no gap.
        """
        if self._running is not None:
            if not all(a.is_ready() for a in jax.tree.leaves(self._running[0])):
                return
            self._take()
        is_gap = 0 < len(drained) < len(self._devices)
        if self._left and is_gap and self._cfg.spot.gaps:
            # Where the head is already, if possible: moving it takes time.
            self._send(self._place if self._place in drained else drained[0], in_gap=True)

    def finish(self) -> tuple[Params, Any, dict | None]:
        """Makes the updates that are left, and waits for them.

        Returns:
          head, opt_state, metric sums of the step; None if it had no update.
        """
        while self._running is not None or self._left:
            if self._running is not None:
                jax.block_until_ready(self._running[0])
                self._take()
            if self._left:
                self._send(self._place or 0, in_gap=False)
        trees = self._trees
        if self._place is not None:
            trees = jax.device_put(trees, self._homes)
        self._trees = self._here = self._policy = None
        return *trees, self._sums

    def metrics(self) -> dict[str, float]:
        """Of the step that was finished."""
        return {
            "draft/updates": float(self.in_gaps + self.after),
            "draft/updates_in_gaps": float(self.in_gaps),
            "draft/buffer_tokens": float(self.buffer.size),
        }

    def _send(self, replica: int, in_gap: bool) -> None:
        started, device = time.perf_counter(), self._devices[replica]
        if self._place != replica:
            # Copies: what came from the trainer may be what an engine drafts with, and an update
            # overwrites its inputs.
            self._trees = jax.device_put(self._trees, device, may_alias=False)
            self._here = jax.device_put(self._policy, device)
            self._place = replica
        entry = self._left.popleft()
        batch, states = jax.device_put((entry.batch, entry.states), device)
        head, opt_state, sums = self.draft.piece(*self._trees, self._here, batch, states)
        self._trees = head, opt_state
        self._running = sums, started, in_gap

    def _take(self) -> None:
        sums, started, in_gap = self._running
        self._running = None
        self._sums = add_sums(self._sums, jax.device_get(sums))
        self.in_gaps += in_gap
        self.after += not in_gap
        self._trace.draft(self._place, started, in_gap)
