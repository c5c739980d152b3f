"""Headless Chromium, driven by selenium; neither is asked to fetch anything."""

import contextlib
import json
import shutil
import time

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


def missing() -> str | None:
    """What there would have to be for a browser; None: it is all there."""
    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        found["selenium"] = None
    lacking = [name for name, path in found.items() if path is None]
    return ", ".join(lacking) or None


@contextlib.contextmanager
def browser(profile, width=900, height=1200, dark=False):
    """A driver.

    Args:
      profile: a fresh directory. dark: the user prefers dark pages.
    """
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    try:
        yield driver
    finally:
        driver.quit()


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

    def ask(self, compare=False, chat=False, **values):
        """Sends a prompt; waits for the end."""
        self.fill(**values)
        for name, value in {"compare": compare, "chat": chat}.items():
            self.do("document.getElementById(arguments[0]).checked = arguments[1]", name, value)
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
