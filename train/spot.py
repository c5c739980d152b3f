"""Spot training: the draft head is trained on replicas that are idle while others still roll out.

A rollout ends with its longest sample, and by then most replicas have been idle for a while. They
cannot train on this rollout, which has no rewards yet and no policy update that returned states, so
the head is trained one step later: a step's micro-batches go to a replay buffer with their states,
and the next step trains on them.

    step t    rollout under policy t ........................ | rest   | policy update | sync
    replica 0 ########################################        |        |               |
    replica 1 ################## [update][update]             |[update]|               |
                                 on data of step t - 1         what found no gap

What is learned does not depend on the gaps. A step has a fixed list of updates, each on one
micro-batch, made one after the other (`ReplayBuffer.plan`); the gaps only decide *when*: an update
that found none is made after the rollout, before the policy changes. So a run that is resumed, or
has another number of replicas, ends with the same head.

The next update starts only when the last one is done and some replica is still idle, so samples
that come to the replica meanwhile wait for one update at most. The loop that feeds the engines
never
waits: it starts updates, and asks whether they are done. One replica trains at a time, for each
update begins where the last ended.

An update runs on the devices of one replica and in the replica's layout, wherever `mesh` has the
policy's training: the same program, and so the same bits, on each replica, in a gap or after the
rollout. Where a replica has no devices of its own, or lies over several processes, there are no
gaps, and updates run on the training mesh.

In a job of several processes a gap is known to one of them alone, and no collective may wait for
it. So before the rollout all of them fetch what the step's updates read. During the rollout each
process
makes the updates in its own gaps, on its own, and no process waits for another: equal programs and
inputs give equal bits. After the rollout the process that has made the most updates makes the rest,
and sends the head to the others.
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
from train.draft import FIELDS, DraftConfig, DraftTrainer, add_sums, frozen_policy_parts
from train.log import Trace
from train.packing import empty_batch
from train.schema import RLConfig


class Entry(NamedTuple):
    """One micro-batch [R S] with the policy's states [R S D], and the step that sampled it."""

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
        """Stores what the policy update of a step returned."""
        for batch, here in zip(batches, states, strict=True):
            self.entries.append(Entry(step, {name: batch[name] for name in FIELDS}, here))
        while self.size > self.tokens:
            self.entries.popleft()

    def plan(self, step: int, updates: int, epochs: int) -> list[Entry]:
        """The updates of a step, in order; none of them is on data of the step itself.

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
    def abstract(
        state: Mapping[str, Any], mesh: jax.sharding.Mesh | None = None
    ) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """The structure of `tree`, from `state`.

        Args:
          mesh: that the policy is trained on.
        """
        where = None if mesh is None else sharding.rows_sharding(mesh)
        arrays = {
            name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=where)
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


def about_spot(cfg: RLConfig, in_replicas: bool) -> str:
    """The line for the user that says where and when the head is trained.

    Args:
      in_replicas: see `train.programs.trains_in_replicas`.
    """
    spot, tp = cfg.draft.spot, cfg.rollout.tp
    if not in_replicas:
        why = "rollouts have no devices of their own"
        if cfg.rollout.own_devices:
            why = f"a replica of rollout.tp={tp} devices lies over several processes"
        return (
            f"draft.spot: the head is trained after each rollout, on the training mesh, for {why}"
        )
    devices = "one device" if tp == 1 else f"the {tp} devices"
    when = "in gaps of rollouts and after them" if spot.gaps else "after each rollout"
    return f"draft.spot: the head is trained {when}, on {devices} of a replica"


class HeadDevices:
    """Devices that updates of the head run on: those of a replica, or of the training mesh.

    Args:
      draft: the program for them. device: where `draft` has no mesh.
      trains: whether they are the mesh on which the policy is trained, of any number of processes.
    """

    def __init__(self, draft: DraftTrainer, device: jax.Device | None = None, trains: bool = False):
        self.draft, self._device, self.trains = draft, device, trains
        if trains and draft.context is not None:
            where = sharding.rows_sharding(draft.mesh)
            self._ordered = jax.jit(_taken, out_shardings=where)

    def weights(self, tree: Params, overwritten: bool = True) -> Params:
        """Moves weights, or an optimizer's state, there.

        Args:
          overwritten: whether an update will overwrite them. Then they are copied, for an engine
          may
            draft with the arrays of the trainer.
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
        """Moves packed rows [R S ..] there, in the order of the devices."""
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

    Between `begin` and `finish` call `look` as often as possible.

    Args:
      places: one for each replica of this process, with equal programs; or the training mesh alone.
      trace: records every update.
      apart: each process of the job makes the updates on its own, see above.
      context: how the batches and states that `keep` is given are split.

    Attributes:
      buffer: what the head learns from; tokens are in the order of the rows.
      in_gaps, after: how many updates this step made in gaps, and after its rollout.
      seconds: duration of the last update; 0: not known yet.
    """

    def __init__(
        self,
        places: Sequence[HeadDevices],
        cfg: DraftConfig,
        trace: Trace,
        apart: bool = False,
        context: Context | None = None,
    ):
        self.places, self._cfg, self._trace = list(places), cfg, trace
        self._apart, self._context = apart, context
        self.gaps = cfg.spot.gaps and not any(place.trains for place in places)
        self.buffer = ReplayBuffer(cfg.spot.buffer_tokens)
        if context is not None:
            where = sharding.rows_sharding(context.mesh)
            self._ordered = jax.jit(_taken, out_shardings=where)
        self._left: deque[Entry] = deque()
        self._running: _Running | None = None
        self.in_gaps = self.after = 0
        self.seconds = 0.0

    def warm_up(self, head: Params, opt_state, policy: Params, shape: jax.ShapeDtypeStruct) -> None:
        """Compiles the update for every replica, on padding, of which nothing is learned.

        Args:
          shape: of a micro-batch's states, see `PolicyTrainer.states_shape`.
        """
        batch, states = empty_batch(*shape.shape[:2]), np.zeros(shape.shape, shape.dtype)
        entry = Entry(0, {name: batch[name] for name in FIELDS}, states)
        self._begin([entry], head, opt_state, policy)
        replicas = [*range(len(self.places) if self.gaps else 1)] if self.places else []
        for replica in [*replicas, *replicas[-1:]]:  # the last run measures its duration
            self._left = deque([entry])
            self._start(replica, in_gap=False)
            self._wait()
        self.finish()

    def begin(self, step: int, head: Params, opt_state, policy: Params) -> None:
        """Lists the updates of a step; in a job of several processes all call it together.

        Args:
          head, opt_state: to start from; they stay valid. policy: of the rollout; it must stay
          valid
            until `finish`.
        """
        plan = self.buffer.plan(step, self._cfg.spot.updates, self._cfg.epochs)
        self._begin(plan, head, opt_state, policy)

    def _begin(self, plan: Sequence[Entry], head: Params, opt_state, policy: Params) -> None:
        self._given = self._trees = head, opt_state
        self._policy = frozen_policy_parts(policy)
        if self._apart and plan:
            fetched = {id(entry): entry for entry in plan}
            fetched = {key: Entry(*sharding.fetch(tuple(e))) for key, e in fetched.items()}
            plan = [fetched[id(entry)] for entry in plan]
            self._trees, self._policy = sharding.fetch((self._trees, self._policy))
        self._left, self._planned = deque(plan), len(plan)
        self._here: Params | None = None  # parts of the policy, on the devices of `_place`
        self._place: int | None = None
        self._running, self._sums = None, None
        self.in_gaps = self.after = 0

    def keep(self, step: int, batches: Sequence[Mapping], states: Sequence[Array]) -> None:
        """Stores what the policy update of a step returned, for later steps."""
        limit = self._cfg.max_microbatches or len(states)
        batches, states = batches[:limit], states[:limit]
        if self._context is not None and states:
            order = np.argsort(self._context.places(states[0].shape[1]))
            batches = [{n: self._ordered(batch[n], order) for n in FIELDS} for batch in batches]
            states = [self._ordered(here, order) for here in states]
        self.buffer.add(step, batches, states)

    @property
    def wanted(self) -> float:
        """Seconds that an update needs; 0: none is left, or none runs in gaps."""
        return self.seconds if self.gaps and self._left else 0.0

    def look(self, gaps: Sequence[int], seconds: float = math.inf) -> bool:
        """Takes the results of an update that is done, and starts the next one; never waits.

        Args:
          gaps: indices of replicas that are idle while others run.
          seconds: until the replicas are needed for something else; an update that would not be
            done by then is not started.

        Returns:
          whether an update is running.
        """
        if self._running is not None:
            if not all(a.is_ready() for a in jax.tree.leaves(self._running.sums)):
                return True
            self._take()
        if self._left and gaps and self.gaps and self.seconds <= seconds:
            # On the replica that has the head, if possible: moving it takes time.
            self._start(self._place if self._place in gaps else gaps[0], in_gap=True)
        return self._running is not None

    def rest(self) -> None:
        """Waits for the running update."""
        if self._running is not None:
            self._wait()

    def finish(self) -> tuple[Params, Any, dict | None]:
        """Makes the updates that are left, and waits for them; in a job of several processes all
        call it together.

        Returns:
          head, opt_state, metric sums of the step (None: it had no update).
        """
        self.rest()
        if self._apart and self._planned:
            trees = self._furthest()
        else:
            self._finish_here()
            trees = self._trees
            if self._place is not None and not self.places[self._place].trains:
                trees = jax.device_put(trees, self._shardings)
        self._given = self._trees = self._here = self._policy = None
        return *trees, self._sums

    @property
    def _shardings(self):
        return jax.tree.map(lambda a: a.sharding, self._given)

    def _finish_here(self) -> None:
        while self._left:
            self._start(self._place or 0, in_gap=False)
            self._wait()

    def _furthest(self) -> tuple[Params, Any]:
        """Finishes the updates in the process that has made the most, and shares the result."""
        done = gather(self.in_gaps if self.places else -1, "head")
        source = done.index(max(done))
        is_source = source == jax.process_index()
        if is_source:
            self._finish_here()
        gathered = gather((self._sums, self.in_gaps, self.after), "head's updates")
        self._sums, self.in_gaps, self.after = gathered[source]
        trees = sharding.spread(self._trees, source)
        return sharding.put(trees, self._shardings)

    def metrics(self) -> dict[str, float]:
        """Of the step that was finished."""
        return {
            "draft/updates": float(self.in_gaps + self.after),
            "draft/updates_in_gaps": float(self.in_gaps),
            "draft/buffer_tokens": float(self.buffer.size),
        }

    def _start(self, replica: int, in_gap: bool) -> None:
        started, place, moves = time.perf_counter(), self.places[replica], self._place != replica
        if moves:
            self._trees = tuple(place.weights(tree) for tree in self._trees)
            self._here = place.weights(self._policy, overwritten=False)
            self._place = replica
        entry = self._left.popleft()
        batch, states = place.rows((entry.batch, entry.states))
        head, opt_state, sums = place.draft.start_update(*self._trees, self._here, batch, states)
        self._trees = head, opt_state
        self._running = _Running(sums, started, in_gap, moves)

    def _wait(self) -> None:
        jax.block_until_ready(self._running.sums)
        self._take()

    def _take(self) -> None:
        update, self._running = self._running, None
        fetch = sharding.fetch if self.places[self._place].trains else jax.device_get
        self._sums = add_sums(self._sums, fetch(update.sums))
        self.in_gaps += update.in_gap
        self.after += not update.in_gap
        if not update.moved:
            self.seconds = time.perf_counter() - update.started
        self._trace.draft(self._place, update.started, update.in_gap)


class _Running(NamedTuple):
    """A running update: its metric sums, when it was started, whether in a gap, and whether the
    head was moved to another replica for it."""

    sums: dict
    started: float
    in_gap: bool
    moved: bool
