"""`python -m tests.serve.screenshots`: docs/page*.png, of a server that really runs.

Serves the embedded policy as `make serve` does, with 16 slots, sends it a crowd of sums, and looks
at the page while the crowd thins out; then runs one prompt with and without speculation.
"""

import base64
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from tests.serve.browser import browser, missing

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("port=0", "engine.max_batch=16", "log_file=null")
CROWD, WIDTH, SECONDS = 160, 1180, 900
BEGIN = "= so"  # then the policy works it out, in place of saying the result at once
PROMPT = "17+25+8+61+93+4+55+12" + BEGIN


def main() -> None:
    """Writes docs/page.png and docs/page_compare.png."""
    if lacking := missing():
        sys.exit(f"there is no {lacking}: install it")
    process, url = _serve()
    try:
        with tempfile.TemporaryDirectory() as profile, browser(profile, WIDTH, 1000) as driver:
            driver.get(url)
            _until(driver, "live.state === 'ok'")
            _crowd(driver, url)
            _compare(driver)
    finally:
        process.terminate()
        process.wait(60)


def _serve():
    """(process, url) of a server that listens."""
    command = [sys.executable, "-m", "serve", "--config", "configs/serve.yaml", *SETTINGS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, found[1]
    sys.exit("the server did not start")


def _crowd(driver, url) -> None:
    """Many samples of different lengths; a picture of their tail."""
    draw = random.Random(4)
    terms = [3 + i * 7 % 8 for i in range(CROWD - 6)] + 6 * [14]  # the last ones are a tail
    sums = ["+".join(str(draw.randint(1, 99)) for _ in range(n)) + BEGIN for n in terms]
    bodies = [{"prompt": p, "max_tokens": 180, "seed": i} for i, p in enumerate(sums)]

    def ask(body):
        httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS).raise_for_status()

    threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
        time.sleep(0.01)  # in their order
    _until(driver, "live.running > 12")
    _until(driver, "live.waiting === 0 && live.running <= 7 && live.running > 2")
    _picture(driver, "page.png", "#try-title")
    for thread in threads:
        thread.join()


def _compare(driver) -> None:
    """The same prompt beside itself, three times; a picture of the last."""
    for _ in range(3):
        driver.execute_script(
            "$('prompt').value = arguments[0]; $('seed').value = 7; $('compare').checked = true;"
            "$('try').requestSubmit()", PROMPT,
        )  # fmt: skip
        time.sleep(0.5)
        _until(driver, "$('try-status').innerText.includes('Done')")
    time.sleep(5)  # the sentence above changes now and then
    _picture(driver, "page_compare.png", "footer", begin="#try-title")


def _picture(driver, name: str, end: str, begin: str = "body") -> None:
    """Of the page from one element to another, over its whole width."""
    top, bottom = (
        driver.execute_script(
            "const at = document.querySelector(arguments[0]).closest(arguments[1]);"
            "return at.getBoundingClientRect().top + scrollY", *what)
        for what in ((begin, ".card, body"), (end, ".card, footer"))
    )  # fmt: skip
    top = max(top - 8, 0)
    clip = {"x": 0, "y": top, "width": WIDTH, "height": bottom - top, "scale": 1}
    options = {"clip": clip, "captureBeyondViewport": True}
    data = driver.execute_cdp_cmd("Page.captureScreenshot", options)["data"]
    path = ROOT / "docs" / name
    path.write_bytes(base64.b64decode(data))
    print(f"{path}: {path.stat().st_size >> 10} kB")


def _until(driver, condition: str) -> None:
    end = time.monotonic() + SECONDS
    while not driver.execute_script(f"return {condition}"):
        if time.monotonic() > end:
            sys.exit(f"never: {condition}")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
