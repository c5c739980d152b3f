"""What a run's directory says of the run itself: `config.yaml` and `run.json`.

`config.yaml` holds every setting as the run uses it, of its latest start; `--config` takes it.
`run.json` is a list with an entry for each start of the run, the first one and those of `--resume`:

    time        start, UTC
    program     `train.rl`
    command     arguments as typed
    directory   working directory
    first_step  step that the start begins with
    changed     settings that differ from the start before, as {key: [before, now]}
    versions    of Python, specjax and the packages that compute, read or make data, or score
    machine     host, operating system, processes of the job, devices
    code        state of the git repository that holds the working directory: root, commit, branch,
                whether tracked files are changed, names of untracked files, and the patch of the
                changes where it is small
    source      the same of the repository that holds specjax itself, if that is another one
    data        SHA-256 and size of every file of rows
    model       checkpoint that training starts from
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import yaml

from specjax.command_line import arguments_of
from specjax.hub import portable
from specjax.parallel import distributed
from specjax.settings import idle, keys_of, values_of
from specjax.versions import installed
from train.run_files import CONFIG_FILE, RUN_FILE, read_config, read_starts
from train.tasks.files import find_files, open_file

PACKAGES = (
    "specjax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "transformers",
    "tokenizers",
    "pyarrow",
    "reasoning-gym",
    "math-verify",
    "latex2sympy2-extended",
    "sympy",
)
PATCH_BYTES = 200_000  # of a larger patch only the size is written
UNTRACKED = 100  # names of untracked files
GIT_SECONDS = 20


def describe_run(
    out: Path, cfg: Any, program: str, model: str | None, first_step: int, resumed: bool
) -> None:
    """Writes `config.yaml`, and adds this start to `run.json`; all processes but the first return.

    A start that does not resume a run replaces what is there.

    Args:
      out: directory of the run, created when absent.
      cfg: configuration of the program, with a section `data`.
      program: name of the program.
      model: checkpoint that training starts from; None if there is none.
      first_step: step that the start begins with.
      resumed: whether the run was started before.
    """
    if not distributed.is_first():
        return
    out.mkdir(parents=True, exist_ok=True)
    settings = settings_of(cfg)
    starts = read_starts(out) if resumed else []
    before = read_config(out) if starts else {}
    entry = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "program": program,
        "command": [*arguments_of(cfg)],
        "directory": os.getcwd(),
        "first_step": first_step,
        "changed": changed(before, settings) if starts else {},
        "versions": versions(),
        "machine": machine(),
        **code(Path.cwd()),
        "data": data_files(cfg),
        "model": None if model is None else portable(model),
    }
    _replace(out / RUN_FILE, json.dumps([*starts, entry], indent=1) + "\n")
    _replace(out / CONFIG_FILE, yaml.safe_dump(settings, sort_keys=False))


def settings_of(cfg: Any) -> dict[str, Any]:
    """The settings of a configuration as `--config` takes them, in sections.

    A setting that has its default is written, too, unless other settings leave it without effect:
    a file that sets it would be refused.
    """
    keys = keys_of(cfg)
    unread = {name for name, _ in idle(cfg, [key.name for key in keys])}
    return values_of(cfg, [key for key in keys if key.name not in unread])


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list]:
    """The settings that differ, as {dotted key: [before, now]}; None where one is not set."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return {name: [old.get(name), new.get(name)] for name in names}


def versions() -> dict[str, str]:
    """Versions of Python and of `PACKAGES`."""
    return installed(PACKAGES)


def machine() -> dict[str, Any]:
    """Host, operating system, and the devices of all processes of the job."""
    devices: dict[str, int] = {}
    for device in jax.devices():
        name = f"{device.platform}: {device.device_kind}"
        devices[name] = devices.get(name, 0) + 1
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "processes": jax.process_count(),
        "devices": devices,
        "environment": {
            n: os.environ[n] for n in ("JAX_PLATFORMS", "XLA_FLAGS") if n in os.environ
        },
    }


def code(directory: Path, package: Path = Path(__file__).parent) -> dict[str, Any]:
    """The keys `code` and, if specjax is in another repository, `source`.

    Args:
      directory: working directory of the run.
      package: directory of specjax's own files.
    """
    found, own = git_state(directory), git_state(package)
    if own.get("root") == found.get("root"):
        return {"code": found}
    return {"code": found, "source": own}


def git_state(directory: Path) -> dict[str, Any]:
    """The state of the git repository of a directory, or why it is not known."""
    try:
        root = _git(directory, "rev-parse", "--show-toplevel").strip()
        commit = _git(directory, "rev-parse", "--verify", "HEAD").strip()
        branch = _git(directory, "rev-parse", "--abbrev-ref", "HEAD").strip()
        status = _git(directory, "status", "--porcelain", "-z", "--untracked-files=normal")
        patch = _git(directory, "diff", "--no-ext-diff", "--no-color", "HEAD")
    except FileNotFoundError:
        return {"problem": "git is not installed"}
    except subprocess.TimeoutExpired:
        return {"problem": f"git did not answer within {GIT_SECONDS} s"}
    except subprocess.CalledProcessError as error:
        return {"problem": (error.stderr.strip().splitlines() or ["git failed"])[0]}
    untracked = [line[3:] for line in status.split("\0") if line.startswith("?? ")]
    size = len(patch.encode())
    return {
        "root": root,
        "commit": commit,
        "branch": branch,
        "dirty": bool(patch),
        "untracked": untracked[:UNTRACKED],
        "patch_bytes": size,
        "patch": patch if 0 < size <= PATCH_BYTES else None,
    }


def data_files(cfg: Any) -> list[dict[str, Any]]:
    """Path, size and SHA-256 of every file of rows; empty where problems are generated.

    Args:
      cfg: configuration with a section `data`, and perhaps sets of evaluation.
    """
    named = {f"data.{n}": getattr(cfg.data, n, None) for n in ("path", "heldout_path", "texts")}
    sets = getattr(getattr(cfg, "eval", None), "sets", {})
    named |= {f"eval.sets.{name}.path": each.path for name, each in sets.items()}
    found = []
    for setting, paths in named.items():
        for file in find_files(paths) if paths else []:
            with open_file(file) as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            size = file.stat().st_size
            found.append({"setting": setting, "file": str(file), "bytes": size, "sha256": digest})
    return found


def _git(directory: Path, *arguments: str) -> str:
    found = subprocess.run(
        ["git", "-C", str(directory), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=GIT_SECONDS,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        encoding="utf-8",
        errors="surrogateescape",
    )
    return found.stdout.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
