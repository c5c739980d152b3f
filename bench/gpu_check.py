"""`make gpu-check`: checks on a machine without a GPU that every program compiles for GPUs.

The compiler comes with jax's CUDA plugin, about 4 GB of libraries for Python 3.12. They are
installed into an environment in the user's cache directory, named by a hash of the requirements, so
that all clones share it. In that environment it runs:

    tests/kernels/test_gpu_compiler.py    what chunks and updates launch, copy and gather
    a test of tests/kernels/test_triton.py    a kernel compiles for GPUs other than Hopper's
    python -m bench.gpu --dry             every program of the queue compiles and fits each card

`make gpu-wheels` (`--wheels`) downloads the packages that a GPU machine without a network lacks
into .wheels/, for Python 3.12 on 64-bit x86 Linux; bench/gpu_machine.sh adds them to the machine's
own, and runs the queue.
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
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS, CONSTRAINTS = ROOT / "bench" / "gpu-constraints.txt", ROOT / "constraints.txt"
PLUGIN = "jax-cuda13-plugin[with-cuda]"
COMPILED = (
    "tests/kernels/test_gpu_compiler.py",
    "tests/kernels/test_triton.py::test_it_compiles_for_gpus_from_ampere_on",
)
IS_312 = "import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))"
UNFINISHED = 75  # exit status if something was not checked (EX_TEMPFAIL), here and of --dry
GRACE = 120.0  # seconds beyond the limit for the program that is being compiled
WHEELS = ROOT / ".wheels"
PACKAGES = (
    "flax", "orbax-checkpoint", "omegaconf", "grain", "array-record", "portpicker", "math-verify",
    "latex2sympy2-extended", "antlr4-python3-runtime",
)  # fmt: skip
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")


class Impossible(Exception):
    """Something that the check needs is not available on this machine."""


def find_python() -> str:
    """Finds a Python 3.12 that can create environments; each candidate is run, because pyenv has
    shims on the PATH for versions that are not active.

    Raises:
      Impossible: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, "python3.12", "python3"]
    candidates += map(str, sorted(pyenv.glob("3.12*/bin/python")))
    for candidate in candidates:
        with contextlib.suppress(OSError):
            if subprocess.run([candidate, "-c", IS_312], capture_output=True).returncode == 0:
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
    wanted = [PLUGIN, *project["dependencies"], "pytest", "hypothesis"]
    return wanted, pins + [line for line in lines_of(CONSTRAINTS) if project_of(line) not in pinned]


def environment(minutes: float) -> Path:
    """Returns the environment's Python; creates the environment unless it is complete: then its
    stamp exists, which is written last.

    Raises:
      Impossible: there is no Python 3.12, or the environment could not be created.
    """
    wanted, constraints = requirements()
    key = hashlib.sha256("\n".join([*sorted(wanted), *sorted(constraints)]).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = cache / "specjax" / "gpu-check" / key.hexdigest()[:12]
    python, stamp = directory / "bin" / "python", directory / ".installed"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{directory}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # one process creates it, and the others wait
        if stamp.exists():
            return python
        base = find_python()
        shutil.rmtree(directory, ignore_errors=True)
        said = f"installing jax's CUDA plugin (about 4 GB) into {directory}, once for all clones"
        print(said, file=sys.stderr, flush=True)
        if run([base, "-m", "venv", str(directory)], 120, {}):
            raise Impossible(f"{base} -m venv {directory} failed; is the disk full?")
        given = directory / "constraints.txt"
        given.write_text("\n".join(constraints) + "\n", encoding="utf-8")
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
        if run([*pip, "-c", str(given), *wanted], 60 * minutes, {}):
            raise Impossible(f"pip could not install jax's CUDA plugin within {minutes:g} minutes")
        stamp.touch()
    return python


def run(command: Sequence[str], seconds: float, environment: dict[str, str]) -> int:
    """Runs a command; returns its status, or `UNFINISHED` after killing it and its children."""
    env = {**os.environ, **environment}
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    try:
        return process.wait(max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        return UNFINISHED
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def check(python: Path, minutes: float, dry: Sequence[str]) -> int:
    """Runs both checks; returns 1 if one failed, `UNFINISHED` without time for all, or 0."""
    end = time.monotonic() + 60 * minutes
    env = {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        "JAX_ENABLE_COMPILATION_CACHE": "0",  # it cannot read programs for other devices
        "PYTHONPATH": str(ROOT),
        "SPECJAX_GPU_PYTHON": str(python),
        "XLA_FLAGS": "",
    }
    tests = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *COMPILED]
    found = [run(tests, end - time.monotonic(), env)]
    left = (end - time.monotonic()) / 60
    command = [str(python), "-m", "bench.gpu", "--dry", "--minutes", f"{left:.2f}", *dry]
    # It ends by itself before the next program, and lists those that it left out.
    found.append(run(command, 60 * left + GRACE, env) if left > 1 else UNFINISHED)
    for status, name in zip(found, (" ".join(COMPILED), "python -m bench.gpu --dry"), strict=True):
        words = {0: "done", UNFINISHED: "NOT DONE, there was no time for all of it"}
        print(f"gpu-check: {name}: {words.get(status, f'failed with exit status {status}')}")
    return 1 if set(found) - {0, UNFINISHED} else max(found)


def download() -> int:
    """Downloads the wheels into an empty directory, so that no older versions remain."""
    pins = {}
    for line in lines_of(CONSTRAINTS):
        pin, _, marker = (part.strip() for part in line.partition(";"))
        if not marker.startswith("python_version <"):
            pins[project_of(pin)] = pin
    shutil.rmtree(WHEELS, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", "3.12", "-d", str(WHEELS)]
    command += [f"--platform={name}_x86_64" for name in PLATFORMS]
    status = subprocess.run([*command, *(pins[name] for name in PACKAGES)], cwd=ROOT).returncode
    size = sum(path.stat().st_size for path in WHEELS.glob("*.whl"))
    print(f"gpu-wheels: {size / 1e6:.1f} MB in {WHEELS.name}/, exit status of pip: {status}")
    return status


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make gpu-check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=20.0, help="for the checks, after the installation")
    add("--install-minutes", type=float, default=15.0, help="for the installation")
    what = "exit with 75 rather than 1 if nothing failed and something was not checked"
    add("--if-possible", action="store_true", help=what)
    add("--python", action="store_true", help="print the environment's Python and check nothing")
    add("--wheels", action="store_true", help="download wheels, and check nothing")
    for name in ("cards", "parts"):
        add(f"--{name}", nargs="+", default=[], help="passed to `python -m bench.gpu --dry`")
    args = parser.parse_args(argv)
    if args.wheels:
        return download()
    try:
        python = environment(args.install_minutes)
    except (Impossible, OSError) as reason:  # no space, or no permission
        print(f"gpu-check: NOT DONE: {reason}")
        return UNFINISHED if args.if_possible else 1
    if args.python:
        print(python)
        return 0
    chosen = {"--cards": args.cards, "--parts": args.parts}
    dry = [word for name, words in chosen.items() if words for word in (name, *words)]
    status = check(python, args.minutes, dry)
    return 1 if status == UNFINISHED and not args.if_possible else status


if __name__ == "__main__":
    sys.exit(main())
