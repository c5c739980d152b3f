"""What the host does to run a GPU program: CUDA graphs, and what it waits for.

The host launches a compiled program's kernels one by one, or many at once as a CUDA graph, which
XLA calls a command buffer. For a loop or a conditional outside of a command buffer the host waits
for the device, to read whether there is another iteration, or which branch it is.
"""

from __future__ import annotations

import dataclasses
import re

_THUNK = re.compile(r"^(\s*)\d+: (k\w+)")
_DECISIONS = ("kWhile", "kConditional")
_BUFFER = "kCommandBuffer"


@dataclasses.dataclass(frozen=True)
class Thunks:
    """What the host does to run a program.

    Attributes:
      buffers: number of command buffers.
      decisions: number of loops and conditionals whose predicate the host reads.
      outside: number of launches that are in no command buffer, those of loops once.
    """

    buffers: int
    decisions: int
    outside: int


def thunks(text: str) -> Thunks:
    """Reads the sequence of thunks that XLA writes next to a program's text (`xla_dump_to`).

    Raises:
      ValueError: it is no such text.
    """
    buffers = decisions = outside = 0
    above: list[tuple[int, str]] = []  # indentation and kind of the thunks that contain the next
    for line in text.splitlines():
        if not (found := _THUNK.match(line)):
            continue
        depth, kind = len(found[1]), found[2]
        above = [(indent, what) for indent, what in above if indent < depth]
        within = any(what == _BUFFER for _, what in above)
        buffers += kind == _BUFFER
        if not within and kind in _DECISIONS:
            decisions += 1
        elif not within and kind not in (_BUFFER, "kSequential"):
            outside += 1
        above.append((depth, kind))
    if not above:
        raise ValueError("expected the thunk sequence of a program, got a text without thunks")
    return Thunks(buffers, decisions, outside)
