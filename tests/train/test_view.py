"""The page of a run: what it is told, what it says of damaged files, and what a browser shows."""

import http.client
import json
import re
import threading
from pathlib import Path

import browser
import pytest

from train import view
from train.view import RunView, Server

EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def metrics(step: int, **more) -> str:
    record = {"step": step, "wall_time": 1e9 + step, "rollout/reward": step / 10, **more}
    return json.dumps(record) + "\n"


def sample(step: int, problem: int = 0, name: str = "train", **more) -> str:
    record = {
        "step": step,
        "set": name,
        "problem": problem,
        "row": "",
        "sample": 0,
        "followed": problem == 0,
        "prompt": "<|im_start|>user\nWhat is 1+1?<|im_end|>",
        "completion": f"{EVIL} two",
        "token_ids": [5, 6, 7, 8],
        "tokens": [EVIL, " two", " </script>", "<|im_end|>"],
        "origins": "dbp?",
        "reward": 1.0,
        "rewards": {"exact": 1.0},
        "reward_failed": False,
        "advantage": -0.5,
        "finish_reason": "stop",
        "answer": "2",
        **more,
    }
    return json.dumps(record) + "\n"


@pytest.fixture
def directory(tmp_path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    evals = {"eval/aime/avg@8": 0.25, "eval/aime/problems": 30.0, "eval/aime/truncated": 0.5}
    evals |= {"eval/length_ood/avg@8": 0.5, "eval/length_ood/length": 7.0}
    evals |= {"eval/reward": 0.5, "eval/reward/length": 0.5, "eval/reward/format": 0.5}
    (path / "metrics.jsonl").write_text(
        metrics(0, **evals) + metrics(1) + metrics(2, **evals, nonfinite=["train/loss"])
    )
    (path / "samples.jsonl").write_text(
        sample(0, 4, "aime") + sample(1) + sample(1, 7) + sample(2) + sample(2, 4, "aime")
    )
    start = {"time": "now", "program": "train.rl", "command": [EVIL], "first_step": 1}
    (path / "run.json").write_text(json.dumps([start]))
    (path / "config.yaml").write_text("steps: 5\n")
    return path


def known(updates: dict) -> dict[str, str]:
    """What a page that was told this says that it knows."""
    return {
        "metrics": updates["metrics"]["generation"],
        "records": str(len(updates["metrics"]["items"])),
        "samples": updates["samples"]["generation"],
        "rows": str(len(updates["samples"]["items"])),
    }


def append(path: Path, text: str) -> None:
    with path.open("a") as stream:
        stream.write(text)


# --- what the page is told ------------------------------------------------------------------------


def test_a_page_is_told_what_is_new_and_nothing_twice(directory):
    run = RunView(directory)
    first = run.updates()
    assert [record["step"] for record in first["metrics"]["items"]] == [0, 1, 2]
    assert [row["set"] for row in first["samples"]["items"]].count("aime") == 2
    assert first["samples"]["items"][1]["head"] == "What is 1+1?"
    assert first["about"]["steps"] == 5 and first["notes"] == []
    again = run.updates(known(first))
    assert again["metrics"]["items"] == again["samples"]["items"] == []
    append(directory / "metrics.jsonl", metrics(3))
    append(directory / "samples.jsonl", sample(3, 9))
    more = run.updates(known(first))
    assert [record["step"] for record in more["metrics"]["items"]] == [3]
    assert [row["problem"] for row in more["samples"]["items"]] == [9]


def test_a_resumed_run_is_told_anew(directory):
    run = RunView(directory)
    first = run.updates()
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    # Cut at step 2 and grown beyond its former size before the page looks again.
    changed = metrics(2, extra=1) + metrics(3)
    (directory / "new").write_text("".join(lines[:2]) + changed)
    (directory / "new").replace(directory / "metrics.jsonl")  # as a resumed run does
    updates = run.updates(known(first))
    assert [record["step"] for record in updates["metrics"]["items"]] == [0, 1, 2, 3]
    assert updates["metrics"]["generation"] != first["metrics"]["generation"]
    assert updates["samples"]["items"] == []
    (directory / "metrics.jsonl").unlink()
    assert run.updates(known(updates))["metrics"]["items"] == []


def test_damaged_lines_are_left_out_and_named(directory):
    append(directory / "metrics.jsonl", "not json\n\n[1]\n" + metrics(3))
    append(directory / "samples.jsonl", sample(3, reward=float("nan")))
    (directory / "run.json").write_text("{")
    updates = RunView(directory).updates()
    assert [record["step"] for record in updates["metrics"]["items"]] == [0, 1, 2, 3]
    said = "\n".join(updates["notes"])
    for named in ("metrics.jsonl, line 4: ", "samples.jsonl, line 6: ", "run.json"):
        assert named in said


# --- the server -----------------------------------------------------------------------------------


@pytest.fixture
def server(directory):
    with Server(RunView(directory)) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.05,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def get(server, path, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={"Host": host} if host else {})
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, body


def test_the_server_is_on_this_machine_alone_and_answers_no_other_host(server):
    assert server.server_address[0] == "127.0.0.1"
    status, body = get(server, "/")
    assert status == 200 and "<!doctype html>" in body
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", body), "nothing from elsewhere"
    for evil in (f"evil.example:{server.server_port}", "evil.example", "127.0.0.1.evil.example"):
        assert get(server, "/", evil)[0] == 403
    assert get(server, "/", "127.0.0.1")[0] == get(server, "/", "localhost")[0] == 200
    assert get(server, "/../etc/passwd")[0] == 404
    assert json.loads(get(server, "/updates?metrics=x&records=-1")[1])["about"]["name"] == "run"
    assert len(json.loads(get(server, "/samples?set=train&step=1")[1])["rows"]) == 2
    with pytest.raises(OSError):
        Server(server.run, server.server_port)


# --- the page -------------------------------------------------------------------------------------


def test_a_page_of_one_file_has_everything_and_runs_no_text_of_the_run(directory, tmp_path):
    out = tmp_path / "page.html"
    view.main([str(directory), "--html", str(out)])
    text = out.read_text()
    assert "<script>document.title" not in text and 'onerror="document' not in text
    assert text.count("<script") == text.count("</script>") == 2
    data = re.search(r'<script id="embedded" type="application/json">(.*?)</script>', text, re.S)
    embedded = json.loads(data[1])
    assert [row["completion"] for row in embedded["whole"]] == [f"{EVIL} two"] * 5
    assert len(embedded["updates"]["metrics"]["items"]) == 3
    assert re.search(r"script-src 'sha256-[\w+/=]+'", text)


@pytest.mark.slow
@pytest.mark.skipif(browser.missing() is not None, reason=f"no {browser.missing()}")
def test_a_browser_shows_curves_samples_by_origin_and_a_prompt_over_the_steps(
    server, directory, tmp_path
):
    with browser.browser(tmp_path / "profile") as driver:
        page = browser.Page(driver, server.url)
        page.waits("document.querySelectorAll('#samples .sample').length === 1")
        titles = "[...document.querySelectorAll('#curves h3')].map((node) => node.innerText)"
        assert page.do(f"return {titles}") == [
            "Reward", "Evaluation: aime", "Evaluation: length_ood", "Evaluation",
            "Evaluation: reward", "Evaluation: truncated", "Evaluation: length",
        ]  # fmt: skip
        assert page.text("#state") == "step 2 of 5" and "not finite" in page.text("#notes")
        tokens = """return [...document.querySelectorAll('#samples .token')].map(
            (token) => [token.classList[1], token.innerText])"""
        assert page.do(tokens) == [
            ["draft", EVIL], ["bonus", " two"], ["plain", " </script>"], ["unknown", "<|im_end|>"],
        ]  # fmt: skip
        assert "advantage -0.5" in page.text("#samples .facts")
        assert "2 steps" in page.text("#prompt")
        assert page.do("return document.querySelectorAll('#over details').length") == 2
        # The run goes on while the page is open.
        append(directory / "metrics.jsonl", metrics(3))
        append(directory / "samples.jsonl", sample(3) + sample(3, 9))
        page.says("#state", "step 3 of 5")
        page.waits("document.querySelectorAll('#samples .sample').length === 2")
        page.do("""const select = document.getElementById('prompt');
            select.value = JSON.stringify(['train', 0]);
            select.dispatchEvent(new Event('change'))""")
        page.waits("document.querySelectorAll('#over details').length === 3")
        page.do("document.getElementById('back').click()")
        page.waits("document.querySelectorAll('#samples .sample').length === 1")
        assert driver.title == "run, specjax run" and page.errors() == []
        one = tmp_path / "page.html"
        one.write_text(RunView(directory).html())
        page = browser.Page(driver, one.as_uri())
        page.waits("document.querySelectorAll('#samples .token').length === 8")
        assert driver.title == "run, specjax run" and page.errors() == []
