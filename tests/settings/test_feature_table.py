"""docs/features.md says which program takes which feature, as the programs say it."""

import os
from pathlib import Path

from feature_table import table

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "features.md"


def test_the_document_says_what_the_programs_do():
    found = table()
    if os.environ.get("SPECJAX_WRITE_FEATURES") == "1":
        DOCUMENT.write_text(found, encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == found, (
        "run `make features`, and look at what changed"
    )
