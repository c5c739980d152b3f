"""The tables of names: what they import, where they are, and that each row leads somewhere."""

import subprocess
import sys

import pytest

import specjax.registry
import train.registry
from specjax.registry import Registry

TABLES = {
    name: table
    for module in (specjax.registry, train.registry)
    for name, table in vars(module).items()
    if isinstance(table, Registry)
}


@pytest.mark.parametrize("table", TABLES)
def test_every_row_leads_somewhere(table):
    for name in TABLES[table].names:
        assert TABLES[table].named(name) is TABLES[table].find(name) is not None


def test_the_tables_import_nothing_that_they_name():
    code = (
        "import sys, specjax.registry, train.registry; "
        "print(*sorted(m for m in sys.modules if m.split('.')[0] in ('specjax', 'train', 'jax')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["specjax", "specjax.registry", "train", "train.registry"]
