"""`make gpu-check`: XLA's compiler for GPUs takes every program, on a machine that has no GPU.

The compiler comes with jax's CUDA plugin, about 4 GB of libraries for Python 3.12. They lie in an
environment of their own in the user's cache directory, named by a hash of what is installed, so
that all clones share it. Then run, in that environment:

    tests/kernels/test_gpu_compiler.py    chunks copy no cache, kernels compile within them
    python -m bench.gpu --dry             every program of the queue compiles and fits each card

Only the standard library is imported here: the environment may not be there yet.
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
MINUTES = 20.0  # of the checks
INSTALL_MINUTES = 15.0  # of what goes before them once, and downloads gigabytes
IS_312 = "import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))"


UNFINISHED = 75  # what --dry and this end with where not all of it was done (EX_TEMPFAIL)
GRACE = 120.0  # seconds, for the program that it is at


class Impossible(Exception):
    """Something that the check needs is not to be had here."""


# --- the environment -----------------------------------------------------------------------------


def find_python() -> str:
    """A Python 3.12 that can make environments.

    A name on the PATH proves nothing (pyenv's shims exist for versions that are not active), so
    each candidate is run.

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
    """The project that a requirement or constraint names."""
    return re.split(r"[^A-Za-z0-9_.-]", line.strip(), maxsplit=1)[0].lower().replace("_", "-")


def lines_of(path: Path) -> list[str]:
    """The lines of a file of requirements, without comments."""
    text = path.read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def requirements() -> tuple[list[str], list[str]]:
    """What is installed, and the constraints on it and on what comes with it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = lines_of(PINS)
    pinned = {project_of(line) for line in pins}
    wanted = [PLUGIN, *project["dependencies"], *TESTS]
    return wanted, pins + [line for line in lines_of(CONSTRAINTS) if project_of(line) not in pinned]


def key() -> str:
    """The environment's name: a digest of the packages that are named here."""
    wanted, constraints = requirements()
    named = {project_of(line) for line in wanted} | {project_of(line) for line in lines_of(PINS)}
    lines = sorted(wanted) + sorted(line for line in constraints if project_of(line) in named)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def home() -> Path:
    """Where environments lie."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "specjax" / "gpu-check"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time makes an environment; the others wait, and find it made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def environment(minutes: float = INSTALL_MINUTES) -> Path:
    """The environment's Python, after the environment was made where there was none.

    An environment counts as made when its stamp is there, which is written last.

    Raises:
      Impossible: no Python 3.12, or the environment could not be made.
    """
    try:
        return _environment(minutes)
    except OSError as error:  # no room, or no permission
        raise Impossible(f"the environment could not be made in {home()}: {error}") from error


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
            raise Impossible(f"{base} -m venv {directory} failed ({how}); is there room for it?")
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
    """The exit status, or `timed out`; what outlives the time is killed with all that it began."""
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
    """Variables of the checks: the compiler for GPUs runs in a process whose device is a CPU."""
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        "JAX_ENABLE_COMPILATION_CACHE": "0",  # it cannot read programs for devices elsewhere
        "PYTHONPATH": str(ROOT),
        "SPECJAX_GPU_PYTHON": str(python),
        "SPECJAX_DRY_KNOWN": str(home() / "programs"),
        "XLA_FLAGS": "",
    }


def check(python: Path, minutes: float, dry: Sequence[str]) -> list[str]:
    """Runs both; what failed, and what there was no time for (begins with `not done`)."""
    end, env, found = time.monotonic() + 60 * minutes, settings(python), []
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/test_gpu_compiler.py"]
    status = run([str(python), *tests], end - time.monotonic(), env)
    if status:
        found.append(_problem("tests/kernels/test_gpu_compiler.py", status))
    left = (end - time.monotonic()) / 60
    if left < 1:
        return [*found, "not done: python -m bench.gpu --dry: no time was left"]
    command = [str(python), "-m", "bench.gpu", "--dry", "--minutes", f"{left:.2f}", *dry]
    # It ends by itself, at the next program, and says what it left out.
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
    what = "end with 75, and not with 1, where all that is wrong is that something was not checked"
    add("--if-possible", action="store_true", help=what)
    add("--python", action="store_true", help="print the environment's Python and check nothing")
    for name in ("cards", "parts"):
        add(f"--{name}", nargs="+", default=[], help="of `python -m bench.gpu --dry`; not all")
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
