"""What a row of data means: one file per layout, and the table of them.

A file of rows is recognised by the columns of its first row: the first layout in `LAYOUTS` that
knows them reads all of its rows. To add one, write a file with a `Layout` and put it into the
table; users name their own as `module:attribute`.
"""

from __future__ import annotations

from collections.abc import Collection

from train.own import load_own
from train.tasks import gsm8k, math, messages, prompt, verl
from train.tasks.layout import Layout

# In order: the first one that recognises a row's columns reads it.
LAYOUTS: tuple[Layout, ...] = (
    verl.LAYOUT,
    math.LAYOUT,
    gsm8k.LAYOUT,
    prompt.LAYOUT,
    messages.LAYOUT,
)
NAMES = tuple(layout.name for layout in LAYOUTS)


def recognise(columns: Collection[str]) -> Layout | None:
    """The layout of rows with these columns; None: no layout knows them."""
    return next((layout for layout in LAYOUTS if layout.recognises(columns)), None)


def known_layouts() -> str:
    """All layouts with their columns, for messages."""
    return "; ".join(f"{layout.name} ({layout.columns})" for layout in LAYOUTS)


def find_layout(name: str) -> Layout:
    """A layout by its name, or a user's own by dotted path `module:attribute`.

    Raises:
      ValueError: unknown name, or a path that leads to no `Layout`.
    """
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    expected = "a train.tasks.layout.Layout"
    found = load_own("layout", name, NAMES, "package.module:attribute", expected)
    if not isinstance(found, Layout):
        raise ValueError(f"layout {name!r} is a {type(found).__name__}; expected {expected}")
    return found
