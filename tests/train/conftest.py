"""Modules that ask for it run on programs that earlier runs with the same settings compiled."""

import pytest
import tiny_run


@pytest.fixture(scope="module")
def shared_programs():
    with tiny_run.shared_programs():
        yield
