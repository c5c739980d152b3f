"""One server; all its requests run one compiled chunk."""

import os

import browser
import pytest
from serving import BATCH, MAX_LEN, WIDEST, config, served

from serve.settings import load_llm
from specjax import LLM


@pytest.fixture(scope="module")
def server(thin_policy):
    cfg = config(thin_policy)
    llm = load_llm(cfg)
    llm.generate("1+1=", WIDEST)
    with served(cfg, llm) as running:
        yield running


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    lacking = browser.missing()
    if lacking and os.environ.get("SPECJAX_EXPECT_BROWSER") == "1":
        pytest.fail(f"SPECJAX_EXPECT_BROWSER=1, and there is no {lacking}: install it")
    if lacking:
        pytest.skip(f"no {lacking}")
    with browser.browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="session")
def plain(thin_policy):
    """The batch API without speculation, of which every answer is known to be right."""
    llm = LLM(thin_policy, None, max_batch=BATCH, max_len=MAX_LEN, max_stop_tokens=16)
    llm.generate("1+1=", WIDEST)
    return llm


@pytest.fixture(autouse=True)
def _logging(logging_as_it_was):
    """`python -m serve` sets it up."""
