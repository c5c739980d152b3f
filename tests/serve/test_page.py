"""The page at `/`, in a real browser; and what it and the dashboard read."""

import json
import re
import time
import tomllib
from pathlib import Path

import httpx
import pytest
from browser import Page
from serving import ADMIN, BATCH, KEY, Server, config, served

from serve.dashboard import document
from serve.settings import load_llm
from specjax import ControlConfig, SamplingParams
from specjax.control import Static

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROMPT, SEED, TOKENS = "17+25+8=", 16, 60
ASKED = {"prompt": PROMPT, "max-tokens": TOKENS, "seed": SEED}
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def server(thin_policy, thin_model):
    """It can decode plainly, drafts nevertheless, and has compiled every size of the batch.

    The policy drafts for itself: a random head's drafts are hardly ever accepted.
    """
    control = ControlConfig("bandit", ["off", "2_1_3"])
    cfg = config(thin_policy, speculation={"draft": str(thin_model), "control": control})
    llm = load_llm(cfg)
    llm.warm_up((SamplingParams(),))
    llm.engine.controller = Static("2_1_3")
    with served(cfg, llm) as running:
        yield running


@pytest.fixture(scope="module")
def page(server, driver):
    """The page, open and with the key."""
    page = Page(driver, server.url)
    page.enter_key(KEY)
    page.waits("live.state === 'ok'")
    return page


def moved(server, before, name):
    return server.metrics().get(name, 0) - before.get(name, 0)


def test_the_page_loads_without_errors_and_loads_nothing_from_elsewhere(page: Page, server: Server):
    page.says("#words", "No request has come yet")
    asked = {url for url in page.requests() if not url.startswith("chrome")}  # its own first tab
    assert {server.url + "/", server.url + "/live"} <= asked
    assert all(url.startswith((server.url, "data:")) for url in asked), asked
    assert page.errors() == []
    page.do("fetch('http://127.0.0.2:9/').catch(() => { window.refused = true })")
    page.waits("window.refused")
    assert any("Content Security Policy" in error for error in page.errors())
    assert page.do("return sessionStorage.length + 10 * localStorage.length") == 1
    assert page.do("return document.cookie") == ""


def test_a_prompt_is_answered_in_the_colours_of_its_origins(page: Page, server: Server):
    page.ask(**ASKED)
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "seed": SEED, "return_spec_details": True}
    answer = server.post("/v1/completions", key=KEY, json=body).json()
    [choice] = answer["choices"]
    expected = choice["spec_details"]["origins"]
    assert page.origins() == expected and {"draft", "bonus"} == set(expected)
    shown = page.do("""return [...document.querySelectorAll('.token:not(.special, .part)')]
        .map((token) => token.textContent).join('').replaceAll('↵\\n', '\\n')""")
    assert shown.rstrip("\ufffd") == choice["text"].rstrip("\ufffd")
    colours = page.do(
        "return ['draft', 'bonus'].map((name) => "
        "getComputedStyle(document.querySelector(`.token.${name}`)).backgroundColor)"
    )
    assert len(set(colours)) == 2 and "rgba(0, 0, 0, 0)" not in colours
    rounds = choice["spec_details"]["rounds"]
    assert f"{rounds} rounds" in page.text(".answer .note")


def test_a_prompt_can_be_a_message_of_a_chat_model(page: Page, server: Server):
    assert page.do("return document.getElementById('chat-switch').offsetParent !== null")
    page.ask(chat=True, **ASKED)
    shown = page.do("return [...document.querySelectorAll('.token')].map((token) => token.title)")
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "seed": SEED}
    answer = server.post("/v1/chat/completions", key=KEY, json={**body, "return_token_ids": True})
    ids = answer.json()["choices"][0]["token_ids"]
    assert [int(re.search(r"id (\d+)", title)[1]) for title in shown] == ids


def test_times_are_not_compared_where_nothing_was_drafted(page: Page, server: Server):
    controller = server.llm.engine.controller
    server.llm.engine.controller = Static("off")
    try:
        page.ask(compare=True, **ASKED)
        assert "nothing was drafted" in page.text("#ratio")
    finally:
        server.llm.engine.controller = controller


def test_side_by_side_the_tokens_are_the_same_and_times_are_compared(page: Page, server: Server):
    before = server.metrics()
    page.do("live.compared = []; turns = 0")
    page.ask(compare=True, **ASKED)
    count = len(page.origins(0))
    assert page.text("#spread") == "", "of one pair there is none"
    assert f"all {count} are equal" in page.text("#same")
    assert set(page.origins(0)) == {"draft", "bonus"} and page.origins(1) == ["plain"] * count
    ran = moved(server, before, 'rounds_total{bucket="1",strategy="off"}')
    assert ran >= count, "without drafts it runs a program of its own"
    said = page.text("#ratio")
    found = re.search(r"With speculation [\d.]+ s, without [\d.]+ s: ([\d.]+)x as fast", said)
    assert found, said
    [run] = page.do("return live.compared")
    assert float(found[1]) == pytest.approx(run["ratio"], abs=0.06) and run["tokens"] == count
    after = re.search(r"After them: ([\d.]+)x as fast", said)
    assert float(after[1]) == pytest.approx(run["after"], abs=0.06), "without the wait"
    assert "One run each, with speculation first" in said
    waits = page.do(
        "return [...document.querySelectorAll('.answer .track i.wait')]"
        ".map((bar) => parseFloat(bar.style.width))"
    )
    assert all(0 < wait < 100 for wait in waits), "the wait for the first tokens has its own shade"
    assert re.search(r"The first \d+ tokens? after \d+ ms, the other", page.text(".answer .note"))
    page.says("#verdict", f"{found[1]}x as fast, one sample alone", 20)
    assert f"{found[1]}x as fast as plain decoding, for one sample alone" in page.text("#words")
    assert "one side-by-side run" in page.text("#evidence")


def test_different_tokens_are_shown_and_no_time_is_claimed(page: Page):
    """The page is told what no server of ours answers: two answers that differ."""
    page.do("""
        const views = [column("a"), column("b")], found = {clean: true, ran: [], seconds: 1};
        document.getElementById("answers").replaceChildren(...views.map((view) => view.box));
        for (const view of views) append(view, ["<b>1</b>", "2"], ["draft", "bonus"], [1, 2]);
        const answers = [{...found, ids: [1, 2]}, {...found, ids: [1, 3], seconds: 2}];
        showSame(views, ...answers);
        showRatio(views, ...answers);
    """)
    assert "token 2 differs" in page.text("#same")
    assert page.do("return document.querySelectorAll('.token.differs').length") == 2
    assert page.text(".answer .token") == "<b>1</b>", "what a model says is text"
    assert "says nothing about speculation, for the answers differ" in page.text("#ratio")


def test_it_says_that_the_server_sleeps(page: Page, server: Server):
    server.post("/sleep")
    page.says("#verdict", "The server sleeps")
    assert page.do("return document.getElementById('go').disabled")
    server.post("/wake")
    page.waits("live.state === 'ok'")
    page.ask(**ASKED)
    assert set(page.origins()) == {"draft", "bonus"}


def test_a_wrong_key_is_refused_and_can_be_corrected(page: Page, server: Server):
    page.do("sessionStorage.setItem(KEY, 'wrong')")
    page.driver.refresh()
    page.says("#key-why", "does not know this key")
    assert page.text("#state") == "key wanted"
    assert page.do("return live.about") is None, "nothing is shown without the key"
    page.enter_key(KEY)
    page.waits("live.state === 'ok' && live.about")
    assert page.do("return document.getElementById('key-form').hidden")


@pytest.mark.parametrize("width", [375, 900])
def test_nothing_is_cut_off_on_narrow_screens(page: Page, width):
    size = {"width": width, "height": 1200, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    cut = page.do("return document.documentElement.scrollWidth") > width
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert not cut


def test_the_live_stream_wants_the_key_and_forgets_who_leaves(server: Server):
    assert httpx.get(f"{server.url}/live").status_code == 401
    live = server.app.state.dashboard
    before = live.viewers
    with httpx.stream("GET", f"{server.url}/live", headers=HEADERS, timeout=20) as response:
        lines = (line for line in response.iter_lines() if line)
        events = [json.loads(next(lines).removeprefix("data: ")) for _ in range(3)]
        assert live.viewers == before + 1
    first, *others = events
    assert first["about"]["slots"] == [BATCH] and first["about"]["buckets"] == [1, 2, 4]
    assert first["about"]["strategies"]["2_1_3"] == {"steps": 2, "drafted": 2}
    assert first["about"]["strategies"]["off"] == {"steps": 0, "drafted": 0}
    assert all("about" not in event and 1 <= len(event["ticks"]) <= 2 for event in others)
    numbers = [tick["n"] for event in events for tick in event["ticks"]]
    assert numbers == sorted(set(numbers))
    for _ in range(200):
        if live.viewers == before:
            return
        time.sleep(0.05)
    raise AssertionError("the closed stream still counts as open")


def test_the_document_is_whole_and_is_shipped():
    html, policy = document(needs_key=False)
    assert "data-key=no" in html and "data-key=yes" in document(needs_key=True)[0]
    assert "default-src 'none'" in policy and "unsafe-inline" not in policy
    links = set(re.findall(r"https?://[^\s\"'<>]+", html))
    assert links == {"http://www.w3.org/2000/svg"}, "it works without a network"
    assert "innerHTML" not in html
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    globs = project["package-data"]["serve.page"]
    files = {f for f in (ROOT / "serve/page").iterdir() if f.is_file() and f.suffix != ".py"}
    assert files == {f for glob in globs for f in (ROOT / "serve/page").glob(glob)}


def test_it_says_that_the_server_drains_and_has_gone(page: Page, server: Server):
    """The last test: there is no server after it."""
    body = {"prompt": PROMPT, "max_tokens": 84, "ignore_eos": True, "stream": True}
    headers, url = {"Authorization": f"Bearer {ADMIN}"}, f"{server.url}/v1/completions"
    with (
        server.slowly(),
        httpx.stream("POST", url, json=body, headers=headers, timeout=60) as stream,
    ):
        events = stream.iter_lines()
        next(events)
        server.uvicorn.should_exit = True
        page.says("#verdict", "shutting down")
        page.says("#words", "1 sample to go")
        assert list(events)[-2:] == ["data: [DONE]", ""], "what runs finishes"
    page.says("#verdict", "has shut down")
    assert page.text("#state") == "went away"
