"""The tables of names: what they import, where they are, and that each row leads somewhere."""

import subprocess
import sys
from pathlib import Path

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


def test_all_tables_are_in_the_two_registries():
    packages = (specjax.registry, train.registry)
    files = [file for module in packages for file in Path(module.__file__).parent.rglob("*.py")]
    held = [
        f"{file.parent.name}/{file.name}" for file in files if "= Registry(" in file.read_text()
    ]
    assert held == ["specjax/registry.py", "train/registry.py"]


def test_the_tables_import_nothing_that_they_name():
    code = (
        "import sys, specjax.registry, train.registry; "
        "print(*sorted(m for m in sys.modules if m.split('.')[0] in ('specjax', 'train', 'jax')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["specjax", "specjax.registry", "train", "train.registry"]
