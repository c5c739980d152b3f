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
    code        state of the git repository that holds the working directory: root, commit, whether
                tracked files are changed, and the patch of the changes where it is small
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
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import yaml

from specjax.command_line import arguments_of
from specjax.hub import portable
from specjax.parallel import distributed
from specjax.settings import idle, keys_of, leaves, values_of
from specjax.versions import installed
from train.data.tasks.files import find_files, open_file
from train.run.files import CONFIG_FILE, RUN_FILE, read_settings, read_starts, replace

PACKAGES = (
    "specjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers",
    "tokenizers", "pyarrow", "reasoning-gym", "math-verify", "latex2sympy2-extended", "sympy",
)  # fmt: skip
PATCH_BYTES = 200_000  # of a larger patch only the size is written
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
    settings, starts = settings_of(cfg), read_starts(out) if resumed else []
    before = dict(leaves(read_settings(out))) if starts else {}
    now = dict(leaves(settings))
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    code, source = git_state(Path.cwd()), git_state(Path(__file__).parent)
    entry = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "program": program,
        "command": [*arguments_of(cfg)],
        "directory": os.getcwd(),
        "first_step": first_step,
        "changed": {n: [before.get(n), now.get(n)] for n in differing} if starts else {},
        "versions": installed(PACKAGES),
        "machine": machine(),
        "code": code,
        **({} if source.get("root") == code.get("root") else {"source": source}),
        "data": data_files(cfg),
        "model": None if model is None else portable(model),
    }
    replace(out / RUN_FILE, [json.dumps([*starts, entry], indent=1).encode()])
    replace(out / CONFIG_FILE, [yaml.safe_dump(settings, sort_keys=False).encode()])


def settings_of(cfg: Any) -> dict[str, Any]:
    """Returns the settings of a configuration as `--config` takes them, in sections.

    A setting that has its default is written, too, unless other settings leave it without effect:
    a file that sets it would be refused.
    """
    keys = keys_of(cfg)
    unread = {name for name, _ in idle(cfg, [key.name for key in keys])}
    return values_of(cfg, [key for key in keys if key.name not in unread])


def machine() -> dict[str, Any]:
    """Returns host, operating system, and the devices of all processes of the job."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "processes": jax.process_count(),
        "devices": dict(Counter(f"{d.platform}: {d.device_kind}" for d in jax.devices())),
        "environment": {n: os.environ.get(n) for n in ("JAX_PLATFORMS", "XLA_FLAGS")},
    }


def git_state(directory: Path) -> dict[str, Any]:
    """Returns the state of the git repository of a directory, or why it is not known."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=GIT_SECONDS,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        )
        return done.stdout.decode("utf-8", "replace")

    try:
        root = git("rev-parse", "--show-toplevel").strip()
        commit = git("rev-parse", "--verify", "HEAD").strip()
        patch = git("diff", "--no-ext-diff", "--no-color", "HEAD")
    except (OSError, subprocess.SubprocessError) as error:
        text = getattr(error, "stderr", None) or str(error).encode()
        lines = text.decode("utf-8", "replace").strip().splitlines()
        return {"problem": (lines or ["git failed"])[0]}
    size = len(patch.encode())
    return {
        "root": root,
        "commit": commit,
        "dirty": bool(patch),
        "patch_bytes": size,
        "patch": patch if 0 < size <= PATCH_BYTES else None,
    }


def data_files(cfg: Any) -> list[dict[str, Any]]:
    """Returns path, size and SHA-256 of every file of rows; empty where problems are generated.

    Args:
      cfg: configuration with a section `data`, and perhaps sets of evaluation.
    """
    named = {f"data.{n}": getattr(cfg.data, n, None) for n in ("path", "heldout_path", "texts")}
    sets = getattr(getattr(cfg, "eval", None), "sets", {})
    named |= {f"eval.sets.{name}.path": chosen.path for name, chosen in sets.items()}
    entries = []
    for setting, paths in named.items():
        for file in find_files(paths) if paths else []:
            with open_file(file) as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            size = file.stat().st_size
            entries.append({"setting": setting, "file": str(file), "bytes": size, "sha256": digest})
    return entries
