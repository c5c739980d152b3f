"""Cycles of a TPU program by the compiler's own model, and the part of a round they belong to.

XLA's TPU compiler writes an estimate of cycles (`estimated_cycles`) to every fusion and to every
operation that it did not fuse. Pallas kernels, collectives, waits for asynchronous copies, and most
gathers, scatters and sorts have none and count as 0. Hence sums of estimates compare one program
with another, and are no times.
"""

from __future__ import annotations

import re

# Scopes of `specjax.decode`, `specjax.memory` and `specjax.models`; `rest` has none of them.
PARTS = ("layers", "draft", "lm_head", "noise", "sampling", "commit")
REST = "rest"

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NAME = re.compile(r'op_name="([^"]*)"')


def estimated(text: str) -> int:
    """Returns the compiler's estimate of the cycles of an HLO instruction; 0 if it has none."""
    found = _CYCLES.search(text)
    return int(found[1]) if found else 0


def name_of(text: str) -> str:
    """Returns the name that the traced program gave to an HLO instruction; "" if it has none.

    The name of an operation holds its scopes, that of an input the path of the argument.
    """
    found = _NAME.search(text)
    return found[1].replace("\\'", "'") if found else ""


def part_of(text: str) -> str:
    """Returns the part that an HLO instruction belongs to.

    It is the innermost `jax.named_scope` of its name that is one of `PARTS`. Layers of the draft,
    and what it writes, belong to the draft.
    """
    scopes = [scope for scope in re.split(r"[/()]", name_of(text)) if scope in PARTS]
    if not scopes:
        return REST
    return "draft" if scopes[-1] == "layers" and "draft" in scopes else scopes[-1]
