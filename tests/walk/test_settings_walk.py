"""Every setting of every program changes something, at the cheapest level at which it acts.

The settings come from the schemas themselves, so that a new one fails here until it has a row.
"""

import pytest
from library_rows import LIBRARY
from rows import check, leaves

TABLES = {**LIBRARY}


def settings():
    for program, table in TABLES.items():
        for name in sorted({*leaves(program), *table}):
            yield pytest.param(program, name, id=f"{program.__name__}-{name}")


@pytest.mark.parametrize(("program", "name"), settings())
def test_a_setting_changes_something(program, name):
    __tracebackhide__ = True
    assert name in leaves(program), f"{program.__name__} has no setting {name}; remove its row"
    row = TABLES[program].get(name)
    assert row is not None, f"{program.__name__}.{name} has no row in tests/walk"
    check(program, name, row, LIBRARY)
