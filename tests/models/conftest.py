"""Golden checkpoints that a test may spoil."""

import json
import shutil
from pathlib import Path

import pytest

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@pytest.fixture
def folder(tmp_path):
    """A writable copy of a golden checkpoint."""

    def copy(family):
        return Path(shutil.copytree(GOLDEN / family, tmp_path / family))

    return copy


@pytest.fixture
def edit_json():
    """Changes keys of a JSON file; the value `...` removes a key."""

    def edit(file, **changes):
        value = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))

    return edit
