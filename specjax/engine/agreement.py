"""The hosts of one replica take the same decisions, each for itself.

A program over the devices of several hosts runs once all of them have enqueued it. So every host of
such a replica runs the whole host loop, over the same requests and results, and must enqueue the
same programs in the same order. All that could differ is what a host's own clock says; so no host
decides by that, but by the greatest of what all their clocks say.

What the clocks say travels with what the hosts check anyway: before each program they tell each
other which one it is, by a tiny program of its own. It is heard when the chunk before is taken in,
so a measurement is known one chunk later than on one host; and it says which hosts differ before
anybody waits for what would never end. Where nothing lies between the two chunks it is done by
then, and nobody waits for it. Where prompts are read between them it lies behind these on the
devices: the host learns what the earlier chunk brought no sooner than they have been read.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.parallel import sharding
from specjax.parallel.distributed import DistributedError, is_several

Then = Callable[[float], None]
_FIGURES = 2  # of each host: its clock, and what it measured


class Alone:
    """The host of a replica that has no other.

    Attributes:
      is_first: this host speaks for the replica. is_shared: there are other hosts.
      one_by_one: programs must not be enqueued while others run.
      said: calls of `say` so far.
    """

    is_first, is_shared, one_by_one, said = True, False, False, 0

    @property
    def now(self) -> float:
        """Seconds, the same on all hosts whenever they ask."""
        return time.perf_counter()

    def ask(self, mine: float, then: Then) -> None:
        """`then` is called with the greatest of the hosts' figures; nan if one of them is nan."""
        then(mine)

    def agree(self, mine: float) -> float:
        """The same, at once: waits for all hosts."""
        return mine

    def say(self, program: tuple, inputs: Any) -> None:
        """To be called before each program that is enqueued.

        Args:
          program: names it. inputs: arrays of the host that it runs with.
        """

    def finished(self, outputs: Any) -> None:
        """To be called with what it gives back."""

    def hear(self, until: int | None = None) -> None:
        """Takes in what was said, by the first `until` calls of `say`; None: by all.

        Raises:
          DistributedError: another host runs another program.
        """

    def settle(self) -> None:
        """Answers all that was asked."""

    def clear(self) -> None:
        """Forgets what was asked and said: what ran was given up."""


class _Said(NamedTuple):
    """What all hosts said before a program: on the devices, maybe not there yet."""

    program: tuple
    rows: jax.Array
    then: Then | None


class Agreement(Alone):
    """One of several hosts, see `Alone`.

    Args:
      mesh: the replica's.
      host_of: who a device belongs to. me: this host.
    """

    is_shared = True

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        host_of: Callable[[jax.Device], int] = lambda device: device.process_index,
        me: int | None = None,
    ):
        owners = [host_of(device) for device in mesh.devices.flat]
        self._hosts = sorted(set(owners))
        self._rows = [owners.index(host) for host in self._hosts]
        self._me = jax.process_index() if me is None else me
        self.is_first = self._me == self._hosts[0]
        # XLA's CPU client runs what is ready side by side, and gloo would mix up what two programs
        # send each other; on accelerators programs run in the order in which they were enqueued.
        self.one_by_one = mesh.devices.flat[0].platform == "cpu"
        self._split = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
        self._gather = jax.jit(lambda rows: rows + 0, out_shardings=sharding.replicated(mesh))
        self._count, self._start, self._now = len(owners), time.perf_counter(), 0.0
        self.said, self._heard = 0, 0
        self.clear()

    @property
    def now(self) -> float:
        return self._now

    def clear(self) -> None:
        self._asked: deque[tuple[float, Then]] = deque()
        self._unheard: deque[_Said] = deque()
        self._heard = self.said

    def ask(self, mine: float, then: Then) -> None:
        self._asked.append((mine, then))

    def agree(self, mine: float) -> float:
        answers: list[float] = []
        self.ask(mine, answers.append)
        self.settle()
        return answers[-1]

    def say(self, program: tuple, inputs: Any = ()) -> None:
        mine, then = self._asked.popleft() if self._asked else (math.nan, None)
        figures = np.array([time.perf_counter() - self._start, mine], np.float64)
        row = np.concatenate([_digest(program, inputs), figures.view(np.uint32)])[None]
        rows = jax.make_array_from_callback((self._count, row.shape[1]), self._split, lambda _: row)
        said = _Said(program, self._gather(rows), then)
        said.rows.copy_to_host_async()
        self._unheard.append(said)
        self.said += 1
        if self.one_by_one:  # this host would wait for the program's end before it hears
            self._read(said)

    def finished(self, outputs: Any) -> None:
        if self.one_by_one:
            jax.block_until_ready(outputs)

    def hear(self, until: int | None = None) -> None:
        while self._unheard and (until is None or self._heard < until):
            said = self._unheard.popleft()
            self._heard += 1
            clock, figure = self._read(said)
            self._now = max(self._now, clock)
            if said.then is not None:
                said.then(figure)

    def settle(self) -> None:
        while self._asked:
            self.say(("settle",))
        self.hear()

    def _read(self, said: _Said) -> np.ndarray:
        """The greatest figures that were said; nan where one of them is."""
        rows = np.asarray(said.rows)[self._rows]
        words = rows[:, : -2 * _FIGURES]
        mine = words[self._hosts.index(self._me)]
        others = [h for h, w in zip(self._hosts, words, strict=True) if (w != mine).any()]
        if others:
            raise DistributedError(
                f"processes {self._hosts} share a replica, and process {self._me} runs "
                f"{said.program} where {others} run something else, or the same with other "
                "inputs; expected the same program on each. They must run the same version of "
                "specjax with the same settings and data; if they do, this is a bug: whoever "
                "decides on a replica of several hosts may not ask the clock of one"
            )
        figures = np.ascontiguousarray(rows[:, -2 * _FIGURES :]).view(np.float64)
        return figures.max(0)


def _digest(program: tuple, inputs: Any) -> np.ndarray:
    """[2] words that tell programs apart, and what they run with."""
    digest = hashlib.blake2b(repr(program).encode(), digest_size=8)
    for leaf in jax.tree.leaves(inputs):
        digest.update(np.ascontiguousarray(leaf))
    return np.frombuffer(digest.digest(), np.uint32)


def agreement_of(mesh: jax.sharding.Mesh | None) -> Alone:
    """For the replica on a mesh, whose hosts all call it."""
    if mesh is None or not is_several():
        return Alone()
    several = len({device.process_index for device in mesh.devices.flat}) > 1
    return Agreement(mesh) if several else Alone()
