"""docs/doors.md says which door takes which feature, as the doors themselves say it."""

import os
from pathlib import Path

from doors import table

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "doors.md"


def test_the_matrix_of_features_and_doors_is_what_the_doors_say():
    found = table()
    if os.environ.get("SPECJAX_WRITE_DOORS") == "1":
        DOCUMENT.write_text(found, encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == found, (
        "run `make doors`, and look at what changed"
    )
