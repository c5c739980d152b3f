"""A draft head that lies apart from its policy: where, in which layout, with which switches."""

from __future__ import annotations

from pathlib import Path

import jax

from specjax.checked_json import CheckpointError
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.weights import (
    HEAD_SWITCHES,
    HUGGING_FACE,
    RUN,
    config_in,
    fitted_to,
    layout_of,
    load_weights,
)
from specjax.config import ModelConfig
from specjax.drafts.mtp import init_head_params, weight_axes
from specjax.hub import ModelNotFoundError, find_model
from specjax.models.transformer import Params
from specjax.parallel import sharding
from specjax.spelling import SettingError

Mesh = jax.sharding.Mesh | None


def find_head(name: str) -> Path:
    """The file or directory of a head.

    Args:
      name: a path, or the Hugging Face id of a checkpoint that has one.

    Raises:
      SettingError: there is nothing of that name. CheckpointError: the id cannot be had.
    """
    try:
        return find_model(name)
    except ModelNotFoundError:
        raise SettingError(
            lambda say: f"{say('head')}: expected checkpoint, random or a path, got {name!r}"
        ) from None


def load_head(name: str, model: ModelConfig, mesh: Mesh = None) -> tuple[ModelConfig, Params]:
    """The head of that name, and the config of the policy with the switches of that head.

    Args:
      name: see `find_head`: a file or directory of safetensors, a head that was saved alone
        (`save_draft`), or the directory of a training run, whose newest checkpoint is taken.
      model: the policy, with or without a head of its own.
      mesh: to place it on.

    Returns:
      the config, and the parameters in `model.run.param_dtype`.

    Raises:
      SettingError: there is nothing of that name.
      CheckpointError: it is damaged, holds no head, or does not fit the policy.
    """
    from specjax.checkpoint.store import load_draft  # Orbax takes long to import

    path = find_head(name)
    layout = layout_of(path)
    if layout == HUGGING_FACE:
        model = _with_a_head(model)
        return model, hf.load_head(path, model, mesh)
    if layout == RUN:
        _, head, meta = load_weights(path, head_alone=True)
        model = _with_switches(path, model, meta)
        if head is None:
            raise CheckpointError(f"{path} holds no draft head; expected one")
        wanted = jax.eval_shape(lambda: init_head_params(_with_a_head(model)))
        head = _cast(fitted_to(wanted, head, f"the draft head in {path}"), model)
        if mesh is not None:
            where = sharding.param_shardings(mesh, head, weight_axes(model))
            head = sharding.put(head, where)
        return model, head
    saved, meta = load_draft(path)
    model = _with_switches(path, model, meta)
    stored = str(jax.tree.leaves(saved)[0].dtype)
    del saved
    wanted = jax.eval_shape(lambda: init_head_params(model.running(param_dtype=stored)))
    if mesh is not None:
        wanted = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            wanted,
            sharding.param_shardings(mesh, wanted, weight_axes(model)),
        )
    return model, _cast(load_draft(path, wanted)[0], model)


def head_config(name: str, model: ModelConfig) -> ModelConfig:
    """The config that `load_head` returns; raises what it raises where there is nothing."""
    path = find_head(name)
    layout = layout_of(path)
    if layout == HUGGING_FACE:
        return _with_a_head(model)
    meta = load_weights(path, head_alone=True)[2]
    return _with_switches(path, model, meta)


def _with_a_head(model: ModelConfig) -> ModelConfig:
    return model.replace(mtp_num_layers=max(model.mtp_num_layers, 1))


def _with_switches(path: Path, model: ModelConfig, meta: dict) -> ModelConfig:
    """The policy's config with what the metadata of a head say of it."""
    said = vars(config_in(path, meta)) if "config" in meta else meta
    return model.replace(**{n: said[n] for n in HEAD_SWITCHES if n in said})


def _cast(head: Params, model: ModelConfig) -> Params:
    return jax.tree.map(lambda x: x.astype(model.run.param_dtype), head)
