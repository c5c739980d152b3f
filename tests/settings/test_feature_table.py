"""docs/features.md says which program takes which feature, as the programs say it."""

import os
from pathlib import Path

import pytest
from feature_table import NONE, Feature, NoSuchSetting, cell, engine, speculation, table

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "features.md"


def test_the_document_says_what_the_programs_do():
    found = table()
    if os.environ.get("SPECJAX_WRITE_FEATURES") == "1":
        DOCUMENT.write_text(found, encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == found, (
        "run `make features`, and look at what changed"
    )


def raising(error: Exception):
    def entry(feature):
        raise error

    return entry


def test_a_mistake_of_a_row_fails_and_is_no_cell():
    feature = Feature("any", python=None, flags=[], rl=[])
    assert cell(raising(ValueError("it cannot be")), feature) == "it cannot be"
    assert cell(raising(NoSuchSetting()), feature) == NONE
    assert cell(lambda feature: None, feature) == "yes"
    for kind in (TypeError, AttributeError, AssertionError, LookupError, NameError):
        with pytest.raises(kind, match="of the row"):
            cell(raising(kind("of the row")), feature)
    for mistake in (speculation("any", strategies="off"), engine("any", "kernel", "none")):
        with pytest.raises(TypeError, match="has no parameter|unexpected keyword"):
            cell(lambda feature: feature.python(lambda **given: None), mistake)
