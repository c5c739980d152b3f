"""The versions of what is installed, for records of runs and measurements."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python (as `python`) and of packages; those that are not there are left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
