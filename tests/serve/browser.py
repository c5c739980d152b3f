"""Headless Chromium, driven by selenium; neither is asked to fetch anything."""

import contextlib
import shutil

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
