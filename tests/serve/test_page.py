"""The page at `/`, in a real browser; and what it and the dashboard read."""

import itertools
import json
import os
import re
import threading
import time
import tomllib
from pathlib import Path

import browser as chromium
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import ADMIN, BATCH, KEY, Server, config, served

from serve.page import document
from serve.settings import load_llm
from specjax import SamplingParams
from specjax.control import make_controller

ROOT = Path(__file__).resolve().parents[2]
PROMPT, SEED, TOKENS = "17+25+8=", 11, 60
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def server(tiny_policy):
    """It can decode plainly, drafts nevertheless, and has compiled every size of the batch.

    The policy drafts for itself: a random head's drafts are hardly ever accepted.
    """
    cfg = config(tiny_policy)
    cfg.speculation.source, cfg.speculation.draft_model = "model", str(tiny_policy)
    cfg.speculation.controller, cfg.speculation.strategies = "bandit", ["off", "2_1_3"]
    llm = load_llm(cfg)
    llm.warm_up((SamplingParams(),))
    llm.engine.controller = make_controller("static", ("2_1_3",))
    with served(cfg, llm) as running:
        yield running


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    lacking = chromium.missing()
    if lacking and os.environ.get("SPECJAX_EXPECT_BROWSER") == "1":
        pytest.fail(f"SPECJAX_EXPECT_BROWSER=1, and there is no {lacking}: install it")
    if lacking:
        pytest.skip(f"no {lacking}")
    with chromium.browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


class Page:
    """What a reader sees and does."""

    def __init__(self, driver, url):
        self.driver = driver
        driver.get(url)

    def do(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def text(self, selector):
        return self.do("return document.querySelector(arguments[0]).innerText", selector)

    def waits(self, script, seconds=60):
        """Until a script returns something true; returns it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := self.do(f"return {script}"):
                return found
            time.sleep(0.05)
        seen = self.text("body")
        raise AssertionError(f"never: {script}; the page says:\n{seen}")

    def says(self, selector, text, seconds=60):
        script = f"document.querySelector({selector!r}).innerText.includes({text!r})"
        return self.waits(script, seconds)

    def fill(self, **values):
        for name, value in values.items():
            self.do("document.getElementById(arguments[0]).value = arguments[1]", name, value)

    def enter_key(self, key):
        self.fill(key=key)
        self.do("document.getElementById('key-form').requestSubmit()")

    def ask(self, compare=False):
        """Sends the prompt; waits for the end."""
        names = {"prompt": PROMPT, "max-tokens": TOKENS, "seed": SEED}
        self.fill(**names)
        self.do("document.getElementById('compare').checked = arguments[0]", compare)
        self.do("document.getElementById('go').click()")
        self.says("#try-status", "Done")

    def origins(self, answer=0):
        """How each token of an answer came, by its colour."""
        script = """return [...document.querySelectorAll('.answer')[arguments[0]]
            .querySelectorAll('.token')].map((token) => token.dataset.origin)"""
        return self.do(script, answer)

    def errors(self):
        return [e["message"] for e in self.driver.get_log("browser") if e["level"] == "SEVERE"]

    def requests(self):
        """Where the page, or the browser for it, has sent requests."""
        log = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        sent = (event for event in log if event["method"] == "Network.requestWillBeSent")
        return {event["params"]["request"]["url"] for event in sent}


@pytest.fixture(scope="module")
def page(server, driver):
    """The page, open and with the key."""
    page = Page(driver, server.url)
    page.enter_key(KEY)
    page.waits("live.state === 'ok'")
    return page


def moved(server, before, name):
    return server.metrics().get(name, 0) - before.get(name, 0)


def test_the_page_loads_without_errors_and_asks_nobody_else(page: Page, server: Server):
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
    page.ask()
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


def test_side_by_side_the_tokens_are_the_same_and_times_are_compared(page: Page, server: Server):
    before = server.metrics()
    page.do("live.compared = []")
    page.ask(compare=True)
    count = len(page.origins(0))
    assert f"all {count} are equal" in page.text("#same")
    assert set(page.origins(0)) == {"draft", "bonus"} and page.origins(1) == ["plain"] * count
    ran = moved(server, before, 'rounds_total{bucket="1",strategy="off"}')
    assert ran >= count, "without drafts it runs a program of its own"
    said = page.text("#ratio")
    found = re.search(r"With speculation [\d.]+ s, without [\d.]+ s: ([\d.]+)x as fast", said)
    assert found, said
    [run] = page.do("return live.compared")
    assert float(found[1]) == pytest.approx(run["ratio"], abs=0.06) and run["tokens"] == count
    page.says("#words", "in the side-by-side run of this page", 20)
    assert f"{found[1]}x as fast as plain decoding" in page.text("#words")


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


def test_lanes_shrink_with_the_batch(page: Page, server: Server):
    page.do("""
        window.seen = [];
        window.timer = setInterval(() => window.seen.push([
            document.querySelectorAll('.lane:not(.idle)').length,
            Number(document.querySelector('.size.now')?.innerText ?? 0),
            document.querySelector('.lane:not(.idle) .track i.draft')?.offsetWidth ?? 0]), 40)""")

    def ask(tokens):
        body = {"prompt": PROMPT, "max_tokens": tokens, "seed": tokens, "ignore_eos": True}
        assert server.post("/v1/completions", key=KEY, json=body).status_code == 200

    threads = [threading.Thread(target=ask, args=(tokens,)) for tokens in (20, 38, 56, 84)]
    with server.slowly(0.25):  # the page is told four times a second
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    page.waits("!document.querySelector('.lane:not(.idle)')")
    seen = page.do("clearInterval(window.timer); return window.seen")
    assert max(lanes for lanes, _, _ in seen) == BATCH
    whole = [size for _, size, _ in seen].index(BATCH)  # before that they were coming in
    lanes, sizes = zip(*[(lanes, size) for lanes, size, _ in seen[whole:] if lanes], strict=True)
    assert list(lanes) == sorted(lanes, reverse=True) and lanes[-1] == 1
    assert list(dict.fromkeys(sizes)) == [4, 2, 1], "compiled sizes, the smaller the fewer run"
    assert max(width for _, _, width in seen) > 3, "they fill as tokens come"
    assert page.do("return document.querySelectorAll('#batch path[data-strategy]').length") >= 1
    assert "2_1_3" in page.text("#strategies")


def test_bars_are_what_the_counters_say(page: Page, server: Server):
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "n": 2}
    server.post("/v1/completions", key=KEY, json=body)
    found = server.metrics()
    page.waits(f"live.totals.tokens === {found['generation_tokens_total']}")
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    hits = [found.get(f'{name}{{position="{i}"}}', 0) for i in (0, 1)]
    drafts = found["spec_decode_num_drafts_total"]
    assert page.do("return live.depths.all") == [[drafts, hits[0]], [drafts, hits[1]]]
    bars = page.do("return [...document.querySelectorAll('#depths li')].map((li) => li.innerText)")
    assert len(bars) == 2 and all(re.search(r"depth \d\s+\d+%", bar) for bar in bars)
    length = page.do("return live.totals.drafting_tokens / live.totals.drafting")
    accepted = found["spec_decode_num_accepted_tokens_total"]
    assert length == pytest.approx(1 + accepted / drafts)


SENTENCES = {
    "the controller measured it": (
        {"gains": {"batch": 8, "ratios": {"4_1_5": 1.4, "off": 1.0}}},
        "good", "Speculation helps: 1.40x", "controller's own measurements",
    ),
    "it is slower": (
        {"gains": {"batch": 1, "ratios": {"4_1_5": 0.8, "off": 1.0}}},
        "bad", "does not help: 0.80x", "0.80x as fast as plain decoding",
    ),
    "nobody measured": ({}, "unknown", "not known yet", "run a prompt side by side"),
    "the controller decodes plainly": (
        {"ticks": [{"by": {"off": 9}, "rounds": 9, "drafting": 0, "drafting_tokens": 0}],
         "gains": {"batch": 8, "ratios": {"4_1_5": 0.9, "off": 1.0}}},
        "unknown", "Nothing is drafted", "4_1_5 would make generation 0.90x as fast with 8 samples",
    ),
    "everybody opted out": (
        {"ticks": [{"by": {"off": 9}, "rounds": 9, "drafting": 0, "drafting_tokens": 0}],
         "replicas": [{"lanes": [[0, 1, 0, 0, 5, 60, False]]}]},
        "unknown", "Nothing is drafted", "ask for plain decoding",
    ),
    "it has died": ({"state": "dead", "error": "no device"}, "bad", "died", "no device"),
    "it was never on": (
        {"about": {"strategies": {"off": {"steps": 0, "drafted": 0}}, "controller": None}},
        "unknown", "Speculation is off", "one token per sample",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SENTENCES)
def test_the_sentence_says_what_was_measured_and_no_more(page: Page, name):
    changes, verdict, headline, words = SENTENCES[name]
    strategies = {"off": {"steps": 0, "drafted": 0}, "4_1_5": {"steps": 4, "drafted": 4}}
    tick = {"by": {"4_1_5": 9, "off": 1}, "rounds": 10, "drafting": 9, "drafting_tokens": 27}
    state = {
        "state": "ok", "running": 8, "replicas": [], "gains": None, "compared": [],
        "about": {"strategies": strategies, "controller": "goodput"}, "ticks": [tick],
        "totals": {"by": tick["by"]}, **changes,
    }  # fmt: skip
    for one in state["ticks"]:
        one |= {"tokens": 30, "seconds": 0.25}
    said = page.do("return inWords(arguments[0])", state)
    assert said[0] == verdict and headline in said[1] and words in said[2], said
    if verdict == "good":
        assert "drafts 4 tokens per round (4_1_5), and each forward pass" in said[2]
        assert "10% of the rounds drafted nothing" in said[2]


def test_it_says_that_the_server_sleeps(page: Page, server: Server):
    server.post("/sleep")
    page.says("#verdict", "The server sleeps")
    assert page.do("return document.getElementById('go').disabled")
    server.post("/wake")
    page.waits("live.state === 'ok'")
    page.ask()
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
    live = server.app.state.live
    before = live.viewers
    with httpx.stream("GET", f"{server.url}/live", headers=HEADERS, timeout=20) as response:
        lines = (line for line in response.iter_lines() if line)
        events = [json.loads(next(lines).removeprefix("data: ")) for _ in range(3)]
        assert live.viewers == before + 1
    first, *others = events
    assert first["about"]["slots"] == [BATCH] and first["about"]["buckets"] == [1, 2, 4]
    assert first["about"]["strategies"]["2_1_3"] == {"steps": 2, "drafted": 2}
    assert first["about"]["strategies"]["off"] == {"steps": 0, "drafted": 0}
    assert all("about" not in event and len(event["ticks"]) <= 2 for event in others)
    numbers = [tick["n"] for event in events for tick in event["ticks"]]
    assert numbers == sorted(set(numbers))
    for _ in range(200):
        if live.viewers == before:
            return
        time.sleep(0.05)
    raise AssertionError("it still believes that somebody watches")


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


def test_the_dashboard_shows_every_metric_and_no_other(server: Server):
    dashboard = json.loads((ROOT / "configs/grafana.json").read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    named = set(re.findall(r"specjax:\w+", " ".join(expressions)))
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    families = list(text_string_to_metric_families(server.get("/metrics").text))
    exported = {f.name: {f.name + end for end in endings[f.type]} for f in families}
    assert named <= set().union(*exported.values()), "panels of what is not exported"
    missing = [name for name, spellings in exported.items() if not named & spellings]
    assert not missing, "exported, and on no panel"
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    assert "configs/*.json" in data["share/specjax/configs"]


@pytest.mark.slow
def test_replicas_have_lanes_of_their_own(tiny_policy):
    cfg = config(tiny_policy)
    cfg.engine.replicas, cfg.engine.max_batch = 2, 2
    llm = load_llm(cfg)
    llm.generate(PROMPT, SamplingParams(max_tokens=2, n=4))  # compiles
    body = {"prompt": PROMPT, "max_tokens": 80, "n": 4, "ignore_eos": True}
    with served(cfg, llm) as server:
        ask = {"key": KEY, "json": body}
        thread = threading.Thread(target=server.post, args=("/v1/completions",), kwargs=ask)
        with httpx.stream("GET", f"{server.url}/live", headers=HEADERS, timeout=60) as live:
            lines = itertools.islice((line for line in live.iter_lines() if line), 400)
            events = (json.loads(line.removeprefix("data: ")) for line in lines)
            assert next(events)["state"] == "ok"
            with server.slowly(0.1):
                thread.start()
                for event in events:
                    assert event["state"] == "ok", event["error"]
                    lanes = [len(replica["lanes"]) for replica in event["replicas"]]
                    if lanes == [2, 2] and event["ticks"][-1]["bucket"] == 4:
                        break
                else:
                    pytest.fail("in a hundred seconds both replicas never ran two samples each")
        thread.join()


def test_it_says_that_the_server_drains_and_has_gone(page: Page, server: Server):
    """The last test: there is no server after it."""
    body = {"prompt": PROMPT, "max_tokens": 84, "ignore_eos": True, "stream": True}
    headers, url = {"Authorization": f"Bearer {ADMIN}"}, f"{server.url}/v1/completions"
    with (
        server.slowly(0.1),
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
