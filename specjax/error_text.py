"""The text of an error in one line of a message."""

from __future__ import annotations

LENGTH = 300  # characters of another program's message that a message of ours repeats


def shortened(text: str, length: int = LENGTH) -> str:
    """Cuts a long text in its middle.

    A path that somebody else chose can take most of a message, and the reason often stands at the
    end, so both ends are kept.
    """
    if len(text) <= length:
        return text
    gap = " [...] "
    kept = length - len(gap)
    return text[: kept - kept // 2] + gap + text[len(text) - kept // 2 :]


def first_line(error: BaseException) -> str:
    """The type and first line of the deepest cause: Orbax wraps an error several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().partition("\n")[0].strip()
    return f"{type(error).__name__}: {shortened(text)}" if text else type(error).__name__
