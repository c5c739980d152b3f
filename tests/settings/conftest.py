"""The tiny models of the engine's tests serve here, too, and so does the policy of training's."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "engine"))


@pytest.fixture(scope="module", autouse=True)
def settings_policy(thin_policy, tmp_path_factory):
    """Rows are tables of functions, and take the policy from their module's place of it."""
    import rows

    rows.PLACES.policy = thin_policy
    rows.PLACES.scratch = tmp_path_factory.mktemp("settings")
    return thin_policy
