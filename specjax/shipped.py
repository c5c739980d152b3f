"""Finds files that specjax ships, and the user's cache with what is made for this processor."""

from __future__ import annotations

import contextlib
import os
import sysconfig
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def find_shipped(name: str | Path) -> Path:
    """The file or directory `name` itself, else the shipped one; `name` unchanged if neither."""
    places = (root / name for root in roots())
    return next((place for place in places if os.path.exists(place)), Path(name))


def roots() -> list[Path]:
    """Directories to search: the working directory, the checkout, the installed package."""
    installed = Path(sysconfig.get_path("data")) / "share" / "specjax"
    return [Path.cwd(), Path(__file__).resolve().parent.parent, installed]


def cache_dir() -> Path | None:
    """Returns specjax's directory in the user's cache, which may not exist; None: no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specjax"
    except RuntimeError:  # no home directory is known
        return None


def is_writable(folder: Path) -> bool:
    """Makes a directory unless it exists; returns whether files can be put into it."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return os.access(folder, os.W_OK)


def processor_features() -> str:
    """Returns the names of the processor's features; empty where the system reports none."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:  # not Linux
        return ""
    of_one = (line for line in lines if line.startswith(("flags", "Features")))
    return next(of_one, "").partition(":")[2]
