"""Result files, timing in turns, and ratios with intervals: what all measurements share.

A result file is JSON: `name`, `date` (UTC), `machine`, `versions`, `command`, `settings`, and
`figures`, a map from a figure's name to `value`, `unit` and `interval` ([low, high] or null).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from specjax.versions import installed

T = TypeVar("T")
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = (
    "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy", "transformers",
)  # fmt: skip


def machine() -> dict[str, Any]:
    """Describes the machine that numbers are measured on."""
    devices = jax.devices()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "platform": devices[0].platform,
        "devices": len(devices),
        "device": devices[0].device_kind,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions() -> dict[str, str]:
    """Returns the versions of Python, packages that matter to speed, and this checkout."""
    commit = _commit()
    return installed(PACKAGES) | ({"specjax": commit} if commit else {})


def _commit() -> str | None:
    """Returns the commit's short hash, with `-dirty` if files other than results differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(RESULTS.parent.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", ".", ":!bench/results")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def figure(value: Any, unit: str, interval: Sequence[float] | None = None) -> dict[str, Any]:
    """Makes one entry of a result's `figures`.

    Args:
      interval: [low, high]; None stands for an unknown end.

    Raises:
      ValueError: the interval's ends are in the wrong order.
    """
    if interval is not None and None not in interval and interval[0] > interval[1]:
        raise ValueError(f"expected an interval [low, high], got {list(interval)}")
    return {"value": value, "unit": unit, "interval": interval}


def write_result(
    name: str,
    settings: Mapping[str, Any],
    figures: Mapping[str, Mapping[str, Any]],
    path: str | Path | None = None,
) -> Path:
    """Writes one result file and returns its path.

    Args:
      figures: name -> {"value", "unit", "interval"}; numbers that are not finite become null.
      path: default `bench/results/<name>.json`; in a directory, `<name>.json` there.

    Raises:
      ValueError: a figure has no value, unit or interval.
    """
    path = RESULTS / f"{name}.json" if path is None else Path(path)
    if path.is_dir():
        path = path / f"{name}.json"
    return write_json(result_of(name, settings, figures), path)


def figures_in(path: Path, settings: Mapping[str, Any]) -> dict[str, dict]:
    """Returns the figures that a file has of other programs, measured with the same settings.

    Args:
      path: result file, which need not be there.
      settings: settings that are equal for all figures of the file.

    Raises:
      ValueError: they were measured with other settings or versions.
    """
    if not path.exists():
        return {}
    known = json.loads(path.read_text(encoding="utf-8"))
    before, now = known["settings"] | known["versions"], {**settings, **versions()}
    now.pop("specjax", None)  # each figure has its own
    if other := sorted(key for key in now if before.get(key) != now[key]):
        raise ValueError(
            f"--out: {path} has figures with other {', '.join(other)}; expected the same, so that "
            "figures of more programs can be added. Name another file, or delete it"
        )
    return known["figures"]


def result_of(
    name: str, settings: Mapping[str, Any], figures: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the content of a result file, dated now.

    Raises:
      ValueError: a figure has no value, unit or interval.
    """
    for key, figure in figures.items():
        if set(figure) != {"value", "unit", "interval"}:
            raise ValueError(
                f"figure {key!r} needs value, unit and interval (None if there is none), got "
                f"{sorted(figure)}"
            )
    return {
        "name": name,
        "date": now(),
        "machine": machine(),
        "versions": versions(),
        "command": _command(),
        "settings": settings,
        "figures": figures,
    }


def _command() -> str:
    """The command of this process; paths of files of the repository are relative to its root."""
    root = f"{RESULTS.parent.parent}/"
    return shlex.join(argument.replace(root, "") for argument in ["python", *sys.orig_argv[1:]])


def now() -> str:
    """Returns the date and time in UTC, as result files write it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write_json(content: Mapping[str, Any], path: Path) -> Path:
    """Writes a file beside `path` and renames it, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_plain(content), indent=2, allow_nan=False)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text + "\n", encoding="utf-8")
    return beside.replace(path)


def _plain(value: Any) -> Any:
    """Converts to JSON values; what JSON cannot express becomes null or text."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, (list, tuple, set)):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def report(figures: Mapping[str, Mapping]) -> str:
    """Formats figures, one a line."""
    lines = []
    for name, entry in figures.items():
        value, interval = entry["value"], entry["interval"]
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        if interval is not None:
            shown += " [{}]".format(", ".join("?" if x is None else f"{x:.4g}" for x in interval))
        lines.append(f"{name:44} {shown} {entry['unit']}")
    return "\n".join(lines)


def turns(names: Iterable[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Yields (repeat, name): every name once per repeat, in reversed order every other repeat."""
    forwards = list(names)
    for repeat in range(repeats):
        for name in forwards if repeat % 2 == 0 else reversed(forwards):
            yield repeat, name


def alternate(functions: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Measures the seconds of every call; the functions run in turns, so noise affects all alike.

    There is no warm-up: call functions that compile once before.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _, name in turns(functions, repeats):
        start = time.perf_counter()
        functions[name]()
        seconds[name].append(time.perf_counter() - start)
    return seconds


def alternate_prepared(
    jobs: Mapping[str, tuple[Callable, Callable]], repeats: int
) -> dict[str, list[float]]:
    """Measures the second function of each pair, called after the first, which is not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat, name in turns(jobs, 1 + repeats):
        prepare, run = jobs[name]
        prepare()
        start = time.perf_counter()
        run()
        if repeat:  # the first one compiles
            seconds[name].append(time.perf_counter() - start)
    return seconds


def paired_ratio_interval(
    numerator: Sequence[float], denominator: Sequence[float], level: float = 0.95
) -> tuple[float, float, float]:
    """Returns the median of numerator[i] / denominator[i], with a bootstrap interval over pairs.

    The functions must have been measured in turns (`alternate`): a slowdown of the machine for
    longer than a turn then affects both sides of a pair, and cancels.

    Returns:
      (ratio, low, high); with one pair the interval has no width.

    Raises:
      ValueError: there are no pairs, or the sides have different lengths.
    """
    if not len(numerator) or len(numerator) != len(denominator):
        raise ValueError(
            "pairs need as many measurements of one side as of the other, and at least one; got "
            f"{len(numerator)} and {len(denominator)}"
        )
    return median_interval(np.asarray(numerator, float) / np.asarray(denominator, float), level)


def ratio_figure(numerator: Sequence[float], denominator: Sequence[float], unit: str) -> dict:
    """Returns the figure of `paired_ratio_interval`."""
    value, *ends = paired_ratio_interval(numerator, denominator)
    return figure(value, unit, ends)


def median_figure(values: Sequence[float], unit: str) -> dict:
    """Returns the figure of a median, with its interval by bootstrap."""
    value, *ends = median_interval(values)
    return figure(value, unit, ends)


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Returns (median, low, high) by bootstrap, with a fixed seed."""
    draws = np.random.default_rng(0).choice(np.asarray(values, float), (2000, len(values)))
    tail = (1 - level) / 2
    low, high = np.quantile(np.median(draws, axis=1), [tail, 1 - tail])
    return float(np.median(values)), float(low), float(high)
