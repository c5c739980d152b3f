"""A model family of one's own takes its place among those of the process, or is refused."""

import dataclasses

import pytest

from specjax.models.families import add_family, family_of
from specjax.models.families.llama import FAMILY as LLAMA
from specjax.registry import FAMILIES

PEBBLE = dataclasses.replace(LLAMA, model_type="pebble")
PEBBLE_AGAIN = PEBBLE
OTHER_PEBBLE = dataclasses.replace(PEBBLE, layer_prefix="pebbles.{}.")
OWN_LLAMA = dataclasses.replace(LLAMA, layer_prefix="h.{}.")


@pytest.fixture(autouse=True)
def own_table(monkeypatch):
    monkeypatch.setattr(FAMILIES, "rows", dict(FAMILIES.rows))


@pytest.mark.parametrize("name", ["llama", "pebble", "", "pebble:"])
def test_a_name_that_is_no_path_is_refused_for_the_checkpoint_decides(name):
    with pytest.raises(ValueError) as error:
        add_family(name)
    assert f"family: expected a family of your own as 'package.module:attribute', got {name!r}" in (
        str(error.value)
    )
    assert "llama, qwen2" in str(error.value) and "model_type" in str(error.value)


def test_a_family_of_ones_own_may_replace_one_of_the_package():
    add_family(None)
    assert family_of("llama") is LLAMA
    for _ in range(2):
        add_family(f"{__name__}:OWN_LLAMA")
        assert family_of("llama") is OWN_LLAMA


def test_two_different_families_for_one_model_type_are_refused():
    add_family(f"{__name__}:PEBBLE")
    add_family(f"{__name__}:PEBBLE_AGAIN")
    with pytest.raises(ValueError, match="model_type 'pebble' .*:PEBBLE.* another, .*OTHER_PEBBLE"):
        add_family(f"{__name__}:OTHER_PEBBLE")
    assert family_of("pebble") is PEBBLE
