"""Weights out of checkpoints of training runs, for those who only decode with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from specjax.checkpoint import Checkpointer, load_draft, read_record
from specjax.checkpoint_format import CheckpointError, nest
from specjax.models.transformer import Params


def load_weights(
    path: str | Path, step: int | None = None
) -> tuple[Params | None, Params | None, dict[str, Any]]:
    """Reads the policy and the draft head of a training run, or the head alone.

    Args:
      path: the directory of a run's checkpoints (`<out>/checkpoints`), or of a head (`save_draft`).
      step: of the run; None is the newest.

    Returns:
      (policy, head, meta), in the dtypes they were saved with; None for what is not there.

    Raises:
      CheckpointError: there is no such checkpoint, it is damaged, or it holds no weights.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory; expected an Orbax checkpoint")
    if not any(child.name.isdigit() for child in path.iterdir()):
        head, meta = load_draft(path)
        return None, head, meta
    with Checkpointer(path) as checkpoints:
        steps = checkpoints.all_steps()
        chosen = steps[-1] if step is None and steps else step
        record, problem = read_record(path / str(chosen))
        if record is None:
            raise CheckpointError(f"checkpoint {path / str(chosen)} cannot be read: {problem}")
        saved = record["trees"]
        wanted = {name: _shapes(saved[name]) for name in ("policy", "draft") if name in saved}
        if not wanted:
            raise CheckpointError(
                f"{path / str(chosen)} holds {sorted(saved)}; expected policy or draft"
            )
        trees, meta = checkpoints.restore(chosen, wanted)
    return trees.get("policy"), trees.get("draft"), meta


def _shapes(entries: Mapping[str, Any]) -> Params:
    return nest(
        {name: jax.ShapeDtypeStruct(tuple(e["shape"]), e["dtype"]) for name, e in entries.items()}
    )
