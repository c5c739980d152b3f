"""Makes the hosts of one replica take the same decisions.

A program over the devices of several hosts runs once all of them have enqueued it. So every host of
such a replica runs the whole host loop, over the same requests and results, and must enqueue the
same programs in the same order. Only clocks, and which programs are compiled, could make them
differ, so they decide by the maximum over all clocks and by what all of them have compiled.

Before each program the hosts announce to each other which program it is, and their clocks, by a
small program that gathers this. Its result is read together with that of the chunk before. So a
measurement is known one chunk later than on a single host, and hosts that differ raise an error
before one of them waits for ever. Between two chunks the small program takes no time. Where prompts
are read between them it runs after these, and the host gets the result of the earlier chunk only
when they have been read.
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
# Numbers that each host announces: its clock, what it measured, and minus the number of programs
# that it could run.
_FIGURES = 3


class SingleHost:
    """The only host of a replica: its own figures are the maximum of all hosts'.

    Attributes:
      is_first: whether this host reports for the replica.
      is_shared: whether the replica has other hosts.
      one_by_one: whether a program may be enqueued only when the one before is done.
      announced: number of calls of `announce` so far.
    """

    is_first, is_shared, one_by_one, announced = True, False, False, 0

    @property
    def now(self) -> float:
        """Time in seconds, the same on all hosts at the same step of the host loop."""
        return time.perf_counter()

    def ask(self, mine: float, then: Then) -> None:
        """Has `then` called later with the maximum of `mine` over the hosts; nan if one is nan."""
        then(mine)

    def agree(self, mine: float) -> float:
        """The maximum of `mine` over the hosts; waits for all of them."""
        return mine

    def least_ready(self, mine: int) -> int | None:
        """The fewest programs that a host could run when it announced the last program received.

        None: there is one host.

        Args:
          mine: the number of programs that this host can run now.
        """
        return None

    def announce(self, program: tuple, inputs: Any) -> None:
        """Must be called before each program that is enqueued.

        Args:
          program: key of the program.
          inputs: arrays of the host that the program takes.
        """

    def finished(self, outputs: Any) -> None:
        """Must be called with the outputs of each program that was enqueued."""

    def receive(self, until: int | None = None) -> None:
        """Reads what the hosts announced.

        Args:
          until: number of calls of `announce` to read, counted from the first one; None: all.

        Raises:
          DistributedError: another host runs another program.
        """

    def settle(self) -> None:
        """Waits until every `then` of `ask` has been called."""

    def clear(self) -> None:
        """Forgets all calls of `ask` and `announce`, since the samples were dropped."""


class _Announcement(NamedTuple):
    """What all hosts announced before a program; `rows` is on the devices and may not be ready."""

    program: tuple
    rows: jax.Array
    then: Then | None


class Agreement(SingleHost):
    """One of several hosts of a replica, with the methods of `SingleHost`.

    Args:
      mesh: mesh of the replica.
      host_of: function that returns the index of a device's host.
      me: index of this host; None: that of this process.
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
        self._ready, self._least_ready = 0, 0
        self.announced, self._received = 0, 0
        self.clear()

    @property
    def now(self) -> float:
        return self._now

    def clear(self) -> None:
        self._asked: deque[tuple[float, Then]] = deque()
        self._pending: deque[_Announcement] = deque()
        self._received = self.announced

    def ask(self, mine: float, then: Then) -> None:
        self._asked.append((mine, then))

    def agree(self, mine: float) -> float:
        answers: list[float] = []
        self.ask(mine, answers.append)
        self.settle()
        return float(answers[-1])

    def least_ready(self, mine: int) -> int:
        self._ready = mine
        return self._least_ready

    def announce(self, program: tuple, inputs: Any = ()) -> None:
        mine, then = self._asked.popleft() if self._asked else (math.nan, None)
        clock = time.perf_counter() - self._start
        figures = np.array([clock, mine, -self._ready], np.float64)
        row = np.concatenate([_digest(program, inputs), figures.view(np.uint32)])[None]
        rows = jax.make_array_from_callback((self._count, row.shape[1]), self._split, lambda _: row)
        announced = _Announcement(program, self._gather(rows), then)
        announced.rows.copy_to_host_async()
        self._pending.append(announced)
        self.announced += 1
        if self.one_by_one:  # or the host would wait for the program before it reads the row
            self._read(announced)

    def finished(self, outputs: Any) -> None:
        if self.one_by_one:
            jax.block_until_ready(outputs)

    def receive(self, until: int | None = None) -> None:
        while self._pending and (until is None or self._received < until):
            announced = self._pending.popleft()
            self._received += 1
            clock, figure, ready = self._read(announced)
            self._now, self._least_ready = max(self._now, clock), -int(ready)
            if announced.then is not None:
                announced.then(figure)

    def settle(self) -> None:
        while self._asked:
            self.announce(("settle",))
        self.receive()

    def _read(self, announced: _Announcement) -> np.ndarray:
        """The maximum of each announced figure over the hosts; nan where one of them is."""
        rows = np.asarray(announced.rows)[self._rows]
        words = rows[:, : -2 * _FIGURES]
        mine = words[self._hosts.index(self._me)]
        others = [h for h, w in zip(self._hosts, words, strict=True) if (w != mine).any()]
        if others:
            raise DistributedError(
                f"processes {self._hosts} share a replica, and process {self._me} runs "
                f"{announced.program} where {others} run something else, or with other inputs; "
                "start all with the same version of specjax, settings and data"
            )
        figures = np.ascontiguousarray(rows[:, -2 * _FIGURES :]).view(np.float64)
        return figures.max(0)


def _digest(program: tuple, inputs: Any) -> np.ndarray:
    """Two uint32 words, a hash of the program's key and its inputs."""
    digest = hashlib.blake2b(repr(program).encode(), digest_size=8)
    for leaf in jax.tree.leaves(inputs):
        digest.update(np.ascontiguousarray(leaf))
    return np.frombuffer(digest.digest(), np.uint32)


def agreement_of(mesh: jax.sharding.Mesh | None) -> SingleHost:
    """The agreement of the replica on a mesh; all hosts of the mesh must call it."""
    if mesh is None or not is_several():
        return SingleHost()
    several = len({device.process_index for device in mesh.devices.flat}) > 1
    return Agreement(mesh) if several else SingleHost()
