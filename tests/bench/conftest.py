"""What several benches are tested with."""

import json

import pytest


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A cost table that can be computed with by hand: for 1 or 2 running samples a plain step costs
    1.0 and 1.5, a chain of two drafts 1.4 and 2.4."""
    content = {
        "name": "toy",
        "source": "modelled: by hand",
        "batches": [1, 2],
        "plain": [1.0, 1.5],
        "draft": [0.1, 0.2],
        "verify": {"3": [1.2, 2.0]},
    }
    path = tmp_path_factory.mktemp("costs") / "toy.json"
    path.write_text(json.dumps(content))
    return path
