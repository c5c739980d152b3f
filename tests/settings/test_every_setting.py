"""Every setting of the library changes something, at the cheapest level at which it acts.

The settings come from the classes themselves, so that a new one fails here until it has a row.
"""

import pytest
from library_rows import LIBRARY
from rows import leaves, make, same


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        pytest.param(cls, name, id=f"{cls.__name__}-{name}")
        for cls, rows in LIBRARY.items()
        for name in sorted({*leaves(cls), *rows})
    ],
)
def test_a_setting_changes_something(cls, name):
    row = LIBRARY[cls][name]
    value = row.value() if callable(row.value) else row.value
    usual, changed = (
        row.effect(make(cls, given)) for given in (row.beside, {**row.beside, name: value})
    )
    assert not same(usual, changed), f"{name}={value!r} changes nothing: {usual!r}"
