"""The sentences of the page, opened from a file and given states of a server."""

import pytest
from browser import Page

from serve.dashboard import document


@pytest.fixture(scope="module")
def page(driver, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(document(needs_key=False)[0], encoding="utf-8")
    page = Page(driver, path.as_uri())
    page.says("#verdict", "went away")
    return page


def gains(ratio, **changes):
    """As the server tells them: 4_1_5 costs 2.5 plain rounds."""
    found = {"size": 8, "age": 0.2, "ratios": {"4_1_5": ratio, "off": 1.0},
             "costs": {"4_1_5": 2.5, "off": 1.0}, "slack": {"4_1_5": 0.01, "off": 0.0},
             "chunks": {"4_1_5": 41, "off": 1}, "plain_age": 12.3}  # fmt: skip
    return {"gains": found | changes}


PLAINLY = {"ticks": [{"by": {"off": 9}, "rounds": 9, "drafting": 0, "drafting_tokens": 0}]}
SENTENCES = {
    "the controller measured it": (
        gains(1.4), "good", "Speculation helps: 1.40x as fast at size 8",
        "takes 2.50x as long as a plain one and brings 3.50 tokens per sample in place of 1. So it "
        "is 3.50 / 2.50 = 1.40x as fast as plain decoding, at the batch size that runs now, 8.",
    ),
    "at another size than what runs now": (
        gains(1.4, size=16, age=3.2), "good", "Speculation helped: 1.40x as fast at size 16, 3 s",
        "at batch size 16, as of 3 s ago. At size 8, which runs now, it has not been measured",
    ),
    "plain decoding may have become cheaper": (
        gains(1.4, slack={"4_1_5": 0.3}),
        "good", "Speculation seems to help: about 1.40x", "1.40x as fast",
    ),
    "it is slower": (
        gains(0.8), "bad", "does not help: 0.80x", "0.80x as fast as plain decoding",
    ),
    "not measured": (
        {}, "unknown", "not known yet", "such a round brought 3.00 tokens per sample",
    ),
    "the controller decodes plainly": (
        {**PLAINLY, **gains(0.9)},
        "unknown", "Nothing is drafted", "(4_1_5) would be 0.90x as fast at size 8",
    ),
    "all opted out": (
        {**PLAINLY, "replicas": [{"bucket": 8, "lanes": [[0, 1, 0, 0, 5, 60, False]]}]},
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
    lanes = [[slot, slot, 0, 0, 5, 60, True] for slot in range(7)]
    state = {
        "state": "ok", "running": 7, "replicas": [{"bucket": 8, "lanes": lanes}], "gains": None,
        "compared": [], "ticks": [tick], "totals": {"by": tick["by"]},
        "about": {"strategies": strategies, "controller": "goodput"}, **changes,
    }  # fmt: skip
    for one in state["ticks"]:
        one |= {"tokens": 30, "seconds": 0.25, "running": 7, "waiting": 0}
    said = page.do("return inWords(arguments[0])", state)
    assert said[0] == verdict and headline in said[1] and words in said[2], said
    if verdict == "good":
        assert "drafts 4 tokens per round, 4 deep, 1 branch (4_1_5)" in said[2]
        assert "10% of the rounds were plain, as the chart shows" in said[2]
        assert "41 chunks of rounds at size " in said[3] and "1 plain one (12 s ago)" in said[3]
    if "seems" in headline:
        assert "it is at least 0.98x" in said[3]


def test_depths_and_the_chart_say_what_they_count(page: Page):
    """The page is told of two strategies of different depths, and of a server that ran late."""
    seen = page.do("""
        const tick = {seconds: 0.25, tokens: 0, waiting: 0, pages: 0, rounds: 0, by: {}, bucket: 0,
                      running: 0};
        const busy = {...tick, rounds: 4, by: {off: 1, "2_1_3": 3}, bucket: 8, running: 6};
        const told = {
            running: 6, ticks: [...Array(100).fill(tick), ...Array(30).fill(busy)],
            depths: {all: [], recent: [[10, 9], [10, 7], [8, 4]]},
            about: {slots: [8], strategies: {off: {steps: 0, drafted: 0},
                    "2_1_3": {steps: 2, drafted: 2}, "3_1_4": {steps: 3, drafted: 3}}},
        };
        drawDepths(told);
        drawStrategies(told);
        const colour = (node, name) => getComputedStyle(node)[name];
        const area = document.querySelector('#batch path[data-strategy="2_1_3"]');
        const key = [...document.querySelectorAll("#strategies span")].find(
            (entry) => entry.innerText.includes("2_1_3")).querySelector("i");
        return {
            note: $("depths-note").innerText,
            titles: [...document.querySelectorAll("#depths li")].map((row) => row.title),
            begin: $("chart-begin").innerText, box: $("batch").getAttribute("viewBox"),
            axis: [...$("batch-axis").children].map((mark) => mark.innerText),
            line: document.querySelector("#batch .line").getAttribute("d"),
            colours: [colour(area, "fill"), colour(key, "backgroundColor")],
            opacity: colour(area, "opacity"), legend: $("strategies").innerText,
        }""")
    assert "How often all drafts up to this depth were accepted" in seen["note"]
    assert "Some drafted less deep" in seen["note"]
    assert seen["titles"][2].startswith("Of 10 rounds that drafted, 8 did so at least 3 deep")
    assert seen["begin"] == "8 s ago" and seen["box"] == "0 0 32 100", "idle time before is cut"
    assert seen["axis"] == ["8", "4", "0"]
    assert seen["line"].endswith(" 25.0H32"), "it ends at 6 of 8"
    assert seen["colours"][0] == seen["colours"][1] and seen["opacity"] == "1"
    assert "2 deep, 1 branch (2_1_3) 75%" in seen["legend"]
    assert "plain (off) 25%" in seen["legend"] and "of the last 8 s" in seen["legend"]
