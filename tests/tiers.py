"""Which cases of a test run always, and which only where there is time."""

import pytest


def slow_but(cases, *fast):
    """Parameters of a test: `fast` always, and all other `cases` marked slow."""
    return [pytest.param(case, marks=() if case in fast else pytest.mark.slow) for case in cases]
