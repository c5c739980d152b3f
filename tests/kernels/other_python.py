"""Programs that need a compiler of another environment say what became of them, as JSON lines."""

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
WANTED = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
}


def programs(python: str | Path, script: str, *arguments: str, **wanted: str) -> dict[str, dict]:
    """What a script beside this one says of each program.

    Args:
      wanted: of the environment, beside `WANTED`.
    """
    run = subprocess.run(
        [python, Path(__file__).with_name(script), *arguments],
        env={**os.environ, **WANTED, **wanted},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = map(json.loads, filter(lambda line: line.startswith("{"), run.stdout.splitlines()))
    return {line["program"]: line for line in lines}
