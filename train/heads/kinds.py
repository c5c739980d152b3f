"""The kinds of heads that `train.draft` makes: how each begins, goes on, and is written.

`cfg` are the settings of that program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.draft_files import save_draft_files
from specjax.checkpoint.weights import head_shapes_of, kind_of
from specjax.command_line import ConfigError
from specjax.config import ModelConfig, SpecConfig
from specjax.drafts.eagle3 import Eagle3Source
from specjax.drafts.mtp import MTPSource, new_head
from specjax.engine.sources import load_head, source_of, trains
from specjax.hub import ModelNotFoundError, find_model
from specjax.interfaces import Draft
from specjax.models.transformer import Params
from specjax.registry import DRAFTS


def head_to_go_on_with(cfg: Any, target: ModelConfig) -> tuple[Draft, Params] | None:
    """Loads the head at `init`, with weights in float32.

    It is called before anything is computed: the policy's samples may take hours.

    Args:
      cfg: settings of the run.
      target: config of the policy.

    Returns:
      the head; None: the run begins with a new one, which this policy can have.

    Raises:
      ConfigError: there is no head at `init`, it is of another kind, or this policy can have none
        of the kind.
      CheckpointError: the head at `init` is damaged, or is of another policy.
    """
    target = target.running(param_dtype="float32")
    with _explained(cfg):
        if cfg.init is None:
            source = source_of(target, SpecConfig(draft="random", draft_kind=cfg.kind))
            head_shapes_of(source)
            return None
        try:
            path = find_model(cfg.init)
        except ModelNotFoundError as error:
            raise ConfigError(
                f"init: expected the directory or Hugging Face id of a head, got {cfg.init!r}: "
                f"{error}"
            ) from error
        _require_kind(cfg, kind_of(path, target))
        return load_head(str(path), target)[1]


def start_head(
    cfg: Any, target: ModelConfig, policy: Params, ids: np.ndarray | None
) -> tuple[Draft, Params]:
    """Makes a new head, with weights in float32.

    Args:
      cfg: settings of the run.
      target: config of the policy.
      policy: parameters of the policy.
      ids: [C] tokens that the head drafts from, ascending; None: the whole vocabulary.

    Raises:
      ConfigError: this policy can have no head of the kind.
    """
    target = target.running(param_dtype="float32")
    with _explained(cfg):
        if cfg.kind == "eagle3":
            source, head = Eagle3Source.new(target, ids, policy, cfg.seed)
        else:
            source = MTPSource(target.replace(mtp_num_layers=1))
            head = new_head(source.cfg, policy, cfg.seed)
    # Some arrays may be the policy's own; updates give the memory of the head's away.
    return source, jax.tree.map(jnp.copy, head)


@contextlib.contextmanager
def _explained(cfg: Any) -> Iterator[None]:
    """Raises errors about the head as the user's."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"kind={cfg.kind}: {error}") from error


def _require_kind(cfg: Any, kind: type[Draft]) -> None:
    """Refuses files at `init` that are not those of a head of the run's kind.

    Raises:
      ConfigError: they are of another kind; the message says what to set if it can be trained.
    """
    if kind is DRAFTS.named(cfg.kind):
        return
    name = next((name for name in DRAFTS.names if DRAFTS.named(name) is kind), kind.__name__)
    remedy = f"set kind={name}, or name another head"
    if not trains(kind):
        remedy = "train.draft trains no such head: name another, or leave out init for a new one"
    raise ConfigError(f"init={cfg.init} is a head of kind={name}, and kind is {cfg.kind}; {remedy}")


def export_head(cfg: Any, source: Draft, head: Params, path: Path) -> Path:
    """Writes the head to files that `LLM` and other engines load; returns their directory."""
    if cfg.kind == "eagle3":
        save_draft_files(path, source, head, cfg.export_dtype)
    else:
        hf.save_head(path / hf.HEAD_FILE, source.cfg, head, cfg.export_dtype)
    return path
