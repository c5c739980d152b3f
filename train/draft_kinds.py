"""The kinds of heads that `train.draft` makes: how each begins, goes on, and is written."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checked_json import CheckpointError
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.draft_files import save_draft_files
from specjax.command_line import ConfigError
from specjax.config import ModelConfig
from specjax.drafts.eagle3 import Eagle3Source
from specjax.drafts.mtp import MTPSource, new_head
from specjax.engine.sources import load_head
from specjax.hub import ModelNotFoundError, find_model
from specjax.interfaces import Draft
from specjax.models.transformer import Params
from specjax.spelling import SettingError, spelled
from train.draft_schema import SPELL, DraftRunConfig


def start_head(
    cfg: DraftRunConfig, target: ModelConfig, policy: Params, ids: np.ndarray | None
) -> tuple[Draft, Params]:
    """The head that a run starts from, with weights in float32.

    Args:
      cfg: settings of the run.
      target: config of the policy.
      policy: parameters of the policy.
      ids: [C] tokens that a new head drafts from, ascending; None: the whole vocabulary.

    Raises:
      ConfigError: there is no head at `init`, it is of another kind, or this policy can have none
        of the kind.
      CheckpointError: the head at `init` is damaged, or is of another policy.
    """
    target = target.running(param_dtype="float32")
    try:
        if cfg.init is not None:
            return _loaded(cfg, target)
        if cfg.kind == "eagle3":
            source, head = Eagle3Source.new(target, ids, policy, cfg.seed)
        else:
            source = MTPSource(target.replace(mtp_num_layers=1))
            head = new_head(source.cfg, policy, cfg.seed)
    except (CheckpointError, ConfigError):
        raise
    except SettingError as error:
        raise ConfigError(spelled(error, SPELL)) from error
    except ValueError as error:
        raise ConfigError(f"kind={cfg.kind}: {error}") from error
    # Some arrays may be the policy's own; updates give the memory of the head's away.
    return source, jax.tree.map(jnp.copy, head)


def _loaded(cfg: DraftRunConfig, target: ModelConfig) -> tuple[Draft, Params]:
    try:
        path = find_model(cfg.init)
    except ModelNotFoundError as error:
        raise ConfigError(
            f"init: expected the directory or Hugging Face id of a head, got {cfg.init!r}: {error}"
        ) from error
    _, (source, head) = load_head(str(path), target)
    kind = "eagle3" if isinstance(source, Eagle3Source) else "mtp"
    if kind != cfg.kind:
        raise ConfigError(
            f"init={cfg.init} is a head of kind={kind}, and kind is {cfg.kind}; set kind={kind}, "
            "or name another head"
        )
    return source, head


def export_head(cfg: DraftRunConfig, source: Draft, head: Params, path: Path) -> Path:
    """Writes the head to files that `LLM` and other engines load; returns their directory."""
    if cfg.kind == "eagle3":
        save_draft_files(path, source, head, cfg.export, cfg.export_dtype)
    else:
        hf.save_head(path / hf.HEAD_FILE, source.cfg, head, cfg.export_dtype)
    return path
