"""The kinds of heads that `train.draft` makes: how each begins, goes on, and is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specjax.checkpoint import huggingface as hf
from specjax.command_line import ConfigError
from specjax.config import ModelConfig
from specjax.drafts.mtp import MTPSource, init_head_params
from specjax.engine.sources import load_head
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
        return _MAKERS[cfg.kind](cfg, target, policy, ids)
    except SettingError as error:
        raise ConfigError(spelled(error, SPELL)) from error
    except ConfigError:
        raise
    except hf.CheckpointError:
        raise
    except ValueError as error:
        raise ConfigError(f"kind={cfg.kind}: {error}") from error


def _mtp(cfg: DraftRunConfig, target: ModelConfig, policy: Params, ids) -> tuple[Draft, Params]:
    if cfg.init is not None:
        model, head = load_head(cfg.init, target)
        return MTPSource(model), head
    model = target.replace(mtp_num_layers=1)
    return MTPSource(model), init_head_params(model, cfg.seed)


def _eagle3(cfg: DraftRunConfig, target: ModelConfig, policy: Params, ids) -> tuple[Draft, Params]:
    raise ConfigError("kind=eagle3 is not there yet; set kind=mtp")


_MAKERS = {"mtp": _mtp, "eagle3": _eagle3}


def export_head(cfg: DraftRunConfig, source: Draft, head: Params, path: Path) -> Path:
    """Writes the head to files that `LLM` and other engines load; returns their directory."""
    hf.save_head(path / hf.HEAD_FILE, source.cfg, head, cfg.export_dtype)
    return path
