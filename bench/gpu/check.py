"""`make gpu-check`: checks on a machine without a GPU that every program compiles for GPUs.

The compiler comes with jax's CUDA plugin, about 4 GB of libraries for Python 3.12. They are
installed into an environment in the user's cache directory, named by a hash of the requirements, so
that all clones share it. In that environment it runs:

    tests/kernels/test_gpu_compiler.py    what chunks and updates launch, copy and gather
    a test of tests/kernels/test_triton.py    a kernel compiles for GPUs other than Hopper's
    python -m bench.gpu --dry             every program of the queue compiles and fits each card

This file imports only the standard library, because the environment may not exist yet.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINS, CONSTRAINTS = ROOT / "bench" / "gpu-constraints.txt", ROOT / "constraints.txt"
PLUGIN = "jax-cuda13-plugin[with-cuda]"
TESTS = ("pytest", "hypothesis")
COMPILED = (
    "tests/kernels/test_gpu_compiler.py",
    "tests/kernels/test_triton.py::test_it_compiles_for_gpus_from_ampere_on",
)
MINUTES = 20.0  # time limit of the checks
INSTALL_MINUTES = 15.0  # time limit of the installation, which downloads gigabytes
IS_312 = "import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))"


UNFINISHED = 75  # exit status of --dry and this if something was not checked (EX_TEMPFAIL)
GRACE = 120.0  # seconds beyond the limit for the program that is being compiled


class Impossible(Exception):
    """Something that the check needs is not available on this machine."""


# --- the environment -----------------------------------------------------------------------------


def find_python() -> str:
    """Finds a Python 3.12 that can create environments.

    Each candidate is run, because pyenv has shims on the PATH for versions that are not active.

    Raises:
      Impossible: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, "python3.12", "python3"]
    candidates += map(str, sorted(pyenv.glob("3.12*/bin/python")))
    for candidate in candidates:
        with contextlib.suppress(OSError):
            command = [candidate, "-c", IS_312]
            if subprocess.run(command, capture_output=True).returncode == 0:
                return candidate
    raise Impossible(
        f"none of [{' '.join(candidates)}] is a working Python 3.12 with venv, for which jax's "
        "CUDA plugin is built; install one"
    )


def project_of(line: str) -> str:
    """Returns the project that a requirement or constraint names."""
    return re.split(r"[^A-Za-z0-9_.-]", line.strip(), maxsplit=1)[0].lower().replace("_", "-")


def lines_of(path: Path) -> list[str]:
    """Returns the lines of a requirements file, without comments."""
    text = path.read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def requirements() -> tuple[list[str], list[str]]:
    """Returns the requirements, and the constraints on them and on their dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = lines_of(PINS)
    pinned = {project_of(line) for line in pins}
    wanted = [PLUGIN, *project["dependencies"], *TESTS]
    return wanted, pins + [line for line in lines_of(CONSTRAINTS) if project_of(line) not in pinned]


def key() -> str:
    """Returns the environment's name: a digest of the requirements and their versions."""
    wanted, constraints = requirements()
    named = {project_of(line) for line in wanted} | {project_of(line) for line in lines_of(PINS)}
    lines = sorted(wanted) + sorted(line for line in constraints if project_of(line) in named)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def home() -> Path:
    """Returns the directory of environments."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "specjax" / "gpu-check"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock, so that one process at a time creates an environment and the others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def environment(minutes: float = INSTALL_MINUTES) -> Path:
    """Returns the environment's Python; creates the environment unless it is complete.

    An environment is complete when its stamp exists, which is written last.

    Raises:
      Impossible: there is no Python 3.12, or the environment could not be created.
    """
    try:
        return _environment(minutes)
    except OSError as error:  # no space, or no permission
        raise Impossible(f"the environment could not be created in {home()}: {error}") from error


def _environment(minutes: float) -> Path:
    directory = home() / key()
    python, stamp = directory / "bin" / "python", directory / ".installed"
    with locked(home() / f"{directory.name}.lock"):
        if stamp.exists():
            return python
        base = find_python()
        if directory.exists():
            shutil.rmtree(directory)
        say(f"installing jax's CUDA plugin (about 4 GB) into {directory}, once for all clones")
        wanted, constraints = requirements()
        if status := run([base, "-m", "venv", str(directory)], 120, {}):
            how = status if status == "timed out" else f"exit status {status}"
            raise Impossible(f"{base} -m venv {directory} failed ({how}); is the disk full?")
        given = directory / "constraints.txt"
        given.write_text("\n".join(constraints) + "\n", encoding="utf-8")
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
        if run([*pip, "-c", str(given), *wanted], 60 * minutes, {}):
            raise Impossible(f"pip could not install jax's CUDA plugin within {minutes:g} minutes")
        stamp.touch()
    return python


# --- running ------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(f"gpu-check: {text}", flush=True)


def run(command: Sequence[str], seconds: float, environment: dict[str, str]) -> int | str:
    """Runs a command; returns its status or `timed out`, after killing it and its children."""
    env = {**os.environ, **environment}
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    try:
        return process.wait(max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def settings(python: Path) -> dict[str, str]:
    """Returns the environment variables of the checks, which compile for GPUs on a CPU device."""
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        "JAX_ENABLE_COMPILATION_CACHE": "0",  # it cannot read programs for other devices
        "PYTHONPATH": str(ROOT),
        "SPECJAX_GPU_PYTHON": str(python),
        "SPECJAX_DRY_KNOWN": str(home() / "programs"),
        "XLA_FLAGS": "",
    }


def check(python: Path, minutes: float, dry: Sequence[str]) -> list[str]:
    """Runs both checks; returns failures, and lines `not done: ...` for lack of time."""
    end, env, found = time.monotonic() + 60 * minutes, settings(python), []
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *COMPILED]
    status = run([str(python), *tests], end - time.monotonic(), env)
    if status:
        found.append(_problem(" and ".join(COMPILED), status))
    left = (end - time.monotonic()) / 60
    if left < 1:
        return [*found, "not done: python -m bench.gpu --dry: no time was left"]
    command = [str(python), "-m", "bench.gpu", "--dry", "--minutes", f"{left:.2f}", *dry]
    # It ends by itself before the next program, and lists those that it left out.
    status = run(command, 60 * left + GRACE, env)
    if status == UNFINISHED:
        found.append("not done: python -m bench.gpu --dry: the programs named above")
    elif status:
        found.append(_problem("python -m bench.gpu --dry", status))
    return found


def _problem(name: str, status: int | str) -> str:
    if status == "timed out":
        return f"not done: {name} did not end within the time"
    return f"{name} failed with exit status {status}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make gpu-check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=MINUTES, help="for the checks, after the installation")
    add("--install-minutes", type=float, default=INSTALL_MINUTES, help="for the installation")
    what = "exit with 75 rather than 1 if nothing failed and something was not checked"
    add("--if-possible", action="store_true", help=what)
    add("--python", action="store_true", help="print the environment's Python and check nothing")
    for name in ("cards", "parts"):
        add(f"--{name}", nargs="+", default=[], help="passed to `python -m bench.gpu --dry`")
    args = parser.parse_args(argv)
    try:
        python = environment(args.install_minutes)
    except Impossible as reason:
        say(f"NOT DONE: {reason}")
        return UNFINISHED if args.if_possible else 1
    if args.python:
        print(python)
        return 0
    chosen = {"--cards": args.cards, "--parts": args.parts}
    dry = [word for name, words in chosen.items() if words for word in (name, *words)]
    found = check(python, args.minutes, dry)
    for line in found:
        say(line.replace("not done", "NOT DONE"))
    failed = [line for line in found if not line.startswith("not done")]
    if found and not failed and args.if_possible:
        return UNFINISHED
    if not found:
        say("every program that was asked for compiles for GPUs and fits each card")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
