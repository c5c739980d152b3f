"""A model family of one's own takes its place among those of the process, or is refused."""

import pytest

from specjax.models.families import add_family
from specjax.registry import FAMILIES


@pytest.fixture(autouse=True)
def own_table(monkeypatch):
    monkeypatch.setattr(FAMILIES, "rows", dict(FAMILIES.rows))


@pytest.mark.parametrize("name", ["llama", "pebble", "", "pebble:"])
def test_a_name_that_is_no_path_is_refused_for_the_checkpoint_decides(name):
    with pytest.raises(ValueError) as error:
        add_family(name)
    assert "package.module:attribute" in str(error.value)
