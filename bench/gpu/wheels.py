"""`make gpu-wheels`: downloads the packages that a GPU machine without a network lacks, as wheels.

Such a machine has Python 3.12, jax with its CUDA plugin, and many of specjax's dependencies, some
in older versions. The missing ones are put into .wheels/, in the versions of constraints.txt, for
64-bit x86 Linux; `bench/gpu/on_machine.sh` adds them to the machine's own packages and runs the
queue.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence

from bench.gpu.check import CONSTRAINTS, ROOT, lines_of, project_of

WHEELS = ROOT / ".wheels"
PACKAGES = (
    "flax",
    "orbax-checkpoint",
    "omegaconf",
    "grain",
    "array-record",
    "portpicker",
    "math-verify",
    "latex2sympy2-extended",
    "antlr4-python3-runtime",
)
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
LIMIT = 64 << 20  # bytes of all files to transfer: tracked files, wheels, compiled programs
KEPT = 20_000_000  # bytes of these for compiled programs, `queue.CACHE_BYTES` for each card


def pins() -> list[str]:
    """Returns `name==version` of each package, for Python 3.12.

    Raises:
      ValueError: constraints.txt has no version of a package.
    """
    found = {}
    for line in lines_of(CONSTRAINTS):
        pin, _, marker = (part.strip() for part in line.partition(";"))
        if not marker.startswith("python_version <"):
            found[project_of(pin)] = pin
    missing = [name for name in PACKAGES if name not in found]
    if missing:
        raise ValueError(f"expected a version of {', '.join(missing)} in {CONSTRAINTS}")
    return [found[name] for name in PACKAGES]


def tracked_bytes() -> int:
    """Returns the bytes of the files that git tracks, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def download() -> int:
    """Downloads the wheels into an empty directory, so that no older versions remain."""
    if WHEELS.exists():
        shutil.rmtree(WHEELS)
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", PYTHON, "-d", str(WHEELS)]
    command += [f"--platform={name}_x86_64" for name in PLATFORMS]
    return subprocess.run([*command, *pins()], cwd=ROOT).returncode


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="make gpu-wheels", description=__doc__).parse_args(argv)
    if status := download():
        print("gpu-wheels: pip could not fetch the wheels", file=sys.stderr)
        return status
    wheels = sum(path.stat().st_size for path in WHEELS.glob("*.whl"))
    tracked = tracked_bytes()
    total = wheels + tracked
    print(
        f"gpu-wheels: {len(PACKAGES)} wheels of {wheels / 1e6:.1f} MB in {WHEELS.name}/, beside "
        f"{tracked / 1e6:.1f} MB of tracked files; {(LIMIT - total) / 1e6:.1f} MB are left"
    )
    if total + KEPT > LIMIT:
        limit = f"{LIMIT / 1e6:.1f} MB, {KEPT / 1e6:.1f} of them for compiled programs"
        print(f"gpu-wheels: that exceeds the limit ({limit})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
