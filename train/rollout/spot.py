"""Spot training: replicas that are idle while others still roll out train the draft head.

A rollout ends with its longest sample, and by then most replicas have been idle for a while; such a
time of a replica is a gap. The head is trained on the step before, whose micro-batches and states
are in a replay buffer: the samples of this step have no rewards and no states yet.

    step t    rollout under policy t ........................ | after  | policy update | sync
    replica 0 ########################################        |        |               |
    replica 1 ################## [update][update]             |[update]|               |
                                 on data of step t - 1

The head does not depend on the gaps. A step has a fixed list of updates, each on one micro-batch,
made one after the other (`ReplayBuffer.plan`). Updates for which there is no gap are made after the
rollout, before the policy changes. So a run that is resumed, or has another number of replicas,
ends with the same head.

An update starts when the last one is done and some replica is idle, so samples that arrive at the
replica wait for one update at most. The loop that feeds the engines never waits. One replica trains
at a time, because each update starts from the result of the last.

An update runs on the devices of one replica and in the replica's layout, not in that of the
training mesh: the same program, and so the same bits, on each replica. Where replicas have no
devices of their own, or are spread over several processes, all updates run on the training mesh
after the rollout.

In a job of several processes only one of them knows about a gap, and no collective may wait for
it. So before the rollout every process fetches the inputs of the step's updates. During the rollout
each process makes the updates in its own gaps, and no process waits for another: equal programs and
inputs give equal bits. After the rollout the process that has made the most updates makes the
remaining ones, and sends the head to the others.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specjax.models.transformer import Params
from specjax.parallel import sharding
from specjax.parallel.context import Context
from specjax.parallel.distributed import gather
from train.heads.training import FIELDS, DraftConfig, DraftTrainer, add_sums, frozen_policy_parts
from train.loss.packing import empty_batch


class Entry(NamedTuple):
    """One micro-batch [R S] with the policy's states [R S D], and the step that sampled it."""

    step: int
    batch: dict[str, Array]
    states: Array


class ReplayBuffer:
    """The micro-batches of the latest steps.

    Args:
      tokens: largest number of positions held, padding included. Beyond it the oldest
        micro-batches are dropped.
    """

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.entries: deque[Entry] = deque()

    @property
    def size(self) -> int:
        """Number of positions held."""
        return sum(entry.batch["tokens"].size for entry in self.entries)

    def add(self, step: int, batches: Sequence[Mapping[str, Array]], states: Sequence[Array]):
        """Stores the micro-batches and states that the policy update of a step returned."""
        for batch, here in zip(batches, states, strict=True):
            self.entries.append(Entry(step, {name: batch[name] for name in FIELDS}, here))
        while self.size > self.tokens:
            self.entries.popleft()

    def plan(self, step: int, updates: int, epochs: int) -> list[Entry]:
        """The micro-batches of a step's updates, in order; none of them is of the step itself.

        Args:
          step: number of the step.
          updates: number of updates, on the steps held, the latest first, and again from the start
            if there are too few; 0 for `epochs` passes over the step before.
          epochs: number of passes if `updates` is 0.
        """
        if not updates:
            return [e for e in self.entries if e.step == step - 1] * epochs
        known = [e for e in self.entries if e.step < step]
        known.sort(key=lambda e: -e.step)
        return list(itertools.islice(itertools.cycle(known), updates))

    # --- checkpoints -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The buffer's steps and shapes, as JSON for a checkpoint's metadata."""
        return {
            "steps": [entry.step for entry in self.entries],
            "rows": [len(entry.states) for entry in self.entries],
            "arrays": {
                name: [list(array.shape), str(array.dtype)]
                for name, array in (_arrays(self.entries[0]) if self.entries else {}).items()
            },
        }

    def tree(self) -> dict[str, dict[str, Array]]:
        """The buffer's arrays, for a checkpoint."""
        return {f"{i:04d}": _arrays(entry) for i, entry in enumerate(self.entries)}

    @staticmethod
    def abstract(
        state: Mapping[str, Any], mesh: jax.sharding.Mesh | None = None
    ) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """The structure of `tree`, from `state`.

        Args:
          state: return value of `state`.
          mesh: mesh on which the policy is trained.
        """
        where = None if mesh is None else sharding.rows_sharding(mesh)
        return {
            f"{i:04d}": {
                name: jax.ShapeDtypeStruct((rows, *shape[1:]), jnp.dtype(dtype), sharding=where)
                for name, (shape, dtype) in state["arrays"].items()
            }
            for i, rows in enumerate(state["rows"])
        }

    def load(self, state: Mapping[str, Any], tree: Mapping[str, Mapping[str, Array]]) -> None:
        """Restores a buffer from the return values of `state` and `tree`."""
        self.entries.clear()
        for i, step in enumerate(state["steps"]):
            arrays = dict(tree[f"{i:04d}"])
            states = arrays.pop("states")
            self.entries.append(Entry(step, arrays, states))


def _arrays(entry: Entry) -> dict[str, Array]:
    return {**entry.batch, "states": entry.states}


class HeadDevices:
    """Devices that updates of the head run on: those of a replica, or the training mesh.

    Args:
      draft: trainer of the head that is compiled for these devices.
      device: the device, if `draft` has no mesh.
      trains: whether these devices are the training mesh of all processes.
    """

    def __init__(self, draft: DraftTrainer, device: jax.Device | None = None, trains: bool = False):
        self.draft, self._device, self.trains = draft, device, trains
        if trains and draft.context is not None:
            where = sharding.rows_sharding(draft.mesh)
            self._ordered = jax.jit(_taken, out_shardings=where)

    def weights(self, tree: Params, overwritten: bool = True) -> Params:
        """Moves weights, or an optimizer's state, to these devices.

        Args:
          tree: the arrays.
          overwritten: whether an update will overwrite them; then they are copied, because an
            engine may draft with the trainer's arrays.
        """
        mesh, where = self.draft.mesh, self._device
        if mesh is not None:
            where = sharding.param_shardings(mesh, tree, self.draft.axes)
        if not self.trains:
            tree = jax.device_put(tree, where)  # which leaves shards where they are
        if not overwritten:
            return tree
        return jax.jit(_copied, out_shardings=None if mesh is None else where)(tree)

    def rows(self, tree):
        """Moves packed rows [R S ..] to these devices, in the order of the devices."""
        if self.draft.mesh is None:
            return jax.device_put(tree, self._device)
        where = jax.tree.map(lambda _: sharding.rows_sharding(self.draft.mesh), tree)
        if not self.trains:
            return jax.device_put(tree, where)
        tree = sharding.put(tree, where)
        context = self.draft.context
        if context is None:
            return tree
        return jax.tree.map(lambda a: self._ordered(a, context.places(a.shape[1])), tree)


def _copied(tree):
    return jax.tree.map(jnp.copy, tree)


def _taken(rows: Array, order: Array) -> Array:
    return jnp.take(rows, order, axis=1)


class SpotTraining:
    """Makes the head's updates of each step.

    Call `use_idle` as often as possible between `begin` and `finish`.

    Args:
      places: devices of each replica of this process, with equal programs; or the training mesh
        alone.
      cfg: settings of the head's training.
      per_process: whether each process of the job makes the updates in its own gaps.
      context: split of the batches and states that are passed to `store`.

    Attributes:
      in_rollouts: whether updates are made in gaps of rollouts.
      buffer: micro-batches that the head is trained on, with tokens in the order of the rows.
      in_gaps: number of updates of this step in gaps of its rollout.
      after: number of updates of this step after its rollout.
      seconds: duration in seconds of the last update, by the rows of its micro-batch.
    """

    def __init__(
        self,
        places: Sequence[HeadDevices],
        cfg: DraftConfig,
        per_process: bool = False,
        context: Context | None = None,
    ):
        self.places, self._cfg = list(places), cfg
        self._per_process, self._context = per_process, context
        self.in_rollouts = cfg.spot.gaps and not any(place.trains for place in places)
        self.buffer = ReplayBuffer(cfg.spot.buffer_tokens)
        if context is not None:
            where = sharding.rows_sharding(context.mesh)
            self._ordered = jax.jit(_taken, out_shardings=where)
        self._remaining: deque[Entry] = deque()
        self._running: _Running | None = None
        self.in_gaps = self.after = 0
        self.seconds: dict[int, float] = {}

    def warm_up(
        self, head: Params, opt_state, policy: Params, shapes: Sequence[jax.ShapeDtypeStruct]
    ) -> None:
        """Compiles the update for every replica, by running it on padding, which has no gradient.

        Args:
          head: weights of the head.
          opt_state: state of the head's optimizer.
          policy: weights of the policy.
          shapes: shapes of micro-batches' states, see `PolicyTrainer.states_shape`.
        """
        replicas = [*range(len(self.places) if self.in_rollouts else 1)] if self.places else []
        entries = []
        for shape in shapes:
            batch, states = empty_batch(*shape.shape[:2]), np.zeros(shape.shape, shape.dtype)
            entries.append(Entry(0, {name: batch[name] for name in FIELDS}, states))
        self._begin(entries, head, opt_state, policy)
        self._remaining.clear()
        for replica in [*replicas, *replicas[-1:]]:  # the last runs measure their durations
            for entry in entries:
                self._remaining.append(entry)
                self._start(replica, in_gap=False)
                self.wait()
        self.finish()

    def begin(self, step: int, head: Params, opt_state, policy: Params) -> None:
        """Plans the updates of a step; in a job of several processes all call it together.

        Args:
          step: number of the step.
          head: weights of the head before the step; they stay valid.
          opt_state: state of the head's optimizer before the step; it stays valid.
          policy: weights of the policy that rolls out; they must stay valid until `finish`.
        """
        plan = self.buffer.plan(step, self._cfg.spot.updates, self._cfg.epochs)
        self._begin(plan, head, opt_state, policy)

    def _begin(self, plan: Sequence[Entry], head: Params, opt_state, policy: Params) -> None:
        self._given = self._trees = head, opt_state
        self._policy = frozen_policy_parts(policy)
        if self._per_process and plan:
            fetched = {id(entry): entry for entry in plan}
            fetched = {key: Entry(*sharding.fetch(tuple(e))) for key, e in fetched.items()}
            plan = [fetched[id(entry)] for entry in plan]
            self._trees, self._policy = sharding.fetch((self._trees, self._policy))
        self._remaining, self._planned = deque(plan), len(plan)
        self._here: Params | None = None  # frozen parts of the policy, on the devices of `_place`
        self._place: int | None = None
        self._running, self._sums = None, None
        self.in_gaps = self.after = 0

    def store(self, step: int, batches: Sequence[Mapping], states: Sequence[Array]) -> None:
        """Stores the micro-batches and states that a policy update returned, for later steps."""
        limit = self._cfg.max_microbatches or len(states)
        batches, states = batches[:limit], states[:limit]
        if self._context is not None and states:
            order = np.argsort(self._context.places(states[0].shape[1]))
            batches = [{n: self._ordered(batch[n], order) for n in FIELDS} for batch in batches]
            states = [self._ordered(here, order) for here in states]
        self.buffer.add(step, batches, states)

    @property
    def seconds_needed(self) -> float:
        """Seconds that the next update takes; 0 if none remains, or none is made in gaps."""
        if not self.in_rollouts or not self._remaining:
            return 0.0
        return self.seconds.get(len(self._remaining[0].states), 0.0)

    def use_idle(self, replicas: Sequence[int], seconds: float = math.inf) -> bool:
        """Ends an update that is done, and starts the next one; never waits.

        Args:
          replicas: indices of replicas that are idle while others run.
          seconds: seconds until the replicas are needed again; an update that takes longer is not
            started.

        Returns:
          whether an update is running.
        """
        if self._running is not None:
            if not all(a.is_ready() for a in jax.tree.leaves(self._running.sums)):
                return True
            self._end_update()
        if self._remaining and replicas and self.in_rollouts and self.seconds_needed <= seconds:
            # On the replica that has the head, if possible: moving it takes time.
            self._start(self._place if self._place in replicas else replicas[0], in_gap=True)
        return self._running is not None

    def wait(self) -> None:
        """Waits for the running update, if any."""
        if self._running is not None:
            jax.block_until_ready(self._running.sums)
            self._end_update()

    def finish(self) -> tuple[Params, Any, dict | None]:
        """Makes the remaining updates; in a job of several processes all call it together.

        Returns:
          (head, opt_state, metric sums of the step, or None if it had no update).
        """
        self.wait()
        shardings = jax.tree.map(lambda a: a.sharding, self._given)
        if self._per_process and self._planned:
            trees = sharding.put(self._finish_in_one_process(), shardings)
        else:
            self._finish_here()
            trees = self._trees
            if self._place is not None and not self.places[self._place].trains:
                trees = jax.device_put(trees, shardings)
        self._given = self._trees = self._here = self._policy = None
        return *trees, self._sums

    def _finish_here(self) -> None:
        """Makes the remaining updates in this process."""
        while self._remaining:
            self._start(self._place or 0, in_gap=False)
            self.wait()

    def _finish_in_one_process(self) -> tuple[Params, Any]:
        """Finishes the updates in the process that has made the most, and sends the result."""
        done = gather(self.in_gaps if self.places else -1, "head")
        source = done.index(max(done))
        is_source = source == jax.process_index()
        if is_source:
            self._finish_here()
        gathered = gather((self._sums, self.in_gaps, self.after), "head's updates")
        self._sums, self.in_gaps, self.after = gathered[source]
        return sharding.spread(self._trees, source)

    def metrics(self) -> dict[str, float]:
        """Metrics of the step that was finished."""
        return {
            "draft/updates": float(self.in_gaps + self.after),
            "draft/updates_in_gaps": float(self.in_gaps),
            "draft/buffer_tokens": float(self.buffer.size),
        }

    def _start(self, replica: int, in_gap: bool) -> None:
        """Starts the next update on a replica."""
        started, place, moves = time.perf_counter(), self.places[replica], self._place != replica
        if moves:
            self._trees = tuple(place.weights(tree) for tree in self._trees)
            self._here = place.weights(self._policy, overwritten=False)
            self._place = replica
        entry = self._remaining.popleft()
        batch, states = place.rows((entry.batch, entry.states))
        head, opt_state, sums = place.draft.start_update(*self._trees, self._here, batch, states)
        self._trees = head, opt_state
        self._running = _Running(sums, started, in_gap, moves, len(entry.states))

    def _end_update(self) -> None:
        """Adds the metrics of the update that is done, and records it."""
        update, self._running = self._running, None
        fetch = sharding.fetch if self.places[self._place].trains else jax.device_get
        self._sums = add_sums(self._sums, fetch(update.sums))
        self.in_gaps += update.in_gap
        self.after += not update.in_gap
        if not update.moved:
            self.seconds[update.rows] = time.perf_counter() - update.started


class _Running(NamedTuple):
    """A running update.

    Attributes:
      sums: metric sums, which are ready when the update is done.
      started: time of `time.perf_counter` at its start.
      in_gap: whether it was started in a gap of the rollout.
      moved: whether the head was moved to another replica for it.
      rows: rows of its micro-batch.
    """

    sums: dict
    started: float
    in_gap: bool
    moved: bool
    rows: int
