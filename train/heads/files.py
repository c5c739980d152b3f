"""Loads the draft head that a run starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from specjax.checkpoint.format import DRAFT_KEY
from specjax.checkpoint.weights import (
    Head,
    head_shapes_of,
    run_as,
    source_in,
)
from specjax.command_line import ConfigError
from specjax.config import ModelConfig, SpecConfig
from specjax.engine import sources
from specjax.interfaces import Draft
from specjax.models.transformer import Params
from specjax.registry import DRAFTS


def starting_head(
    spec: SpecConfig,
    model: ModelConfig,
    head: Head | None,
    mesh: jax.sharding.Mesh | None,
    policy: Params | None = None,
) -> tuple[ModelConfig, Head]:
    """Makes the head that a run starts from, and the model config with an MTP head's switches.

    Args:
      spec: how to speculate: its `draft` names a head.
      model: config of the policy.
      head: head in the policy's checkpoint; None without one.
      mesh: mesh of training; None for one device.
      policy: parameters of the policy, from which a new head starts; None: it is random.

    Raises:
      ValueError: the policy's checkpoint has no head, or the path does not exist.
      CheckpointError: the head at the path is damaged or does not fit the policy.
    """
    # jax takes 32 bits of a seed. Seeds that differ in other bits give the same head, which
    # changes no token.
    spec = dataclasses.replace(spec, head_seed=spec.head_seed % (1 << 32))
    model, source, params = sources.load_source(model, spec, head, None, mesh, policy)
    return model, Head(source, params)


def head_shapes(
    spec: SpecConfig, model: ModelConfig, own: Draft | None
) -> tuple[ModelConfig, Head]:
    """Does what `starting_head` does with shapes instead of arrays, and reads no weights.

    Args:
      spec, model: as in `starting_head`.
      own: what `specjax.checkpoint.weights.read_head` returned of the policy's checkpoint.

    Raises:
      ValueError: as in `starting_head`.
    """
    if spec.draft == "checkpoint":
        if own is None:
            return starting_head(spec, model, None, None)  # raises
        own = run_as(own, model.run)
        return model, Head(own, head_shapes_of(own))
    if spec.draft_path is not None:
        return sources.load_head(spec.draft_path, model, weights=False)
    source = sources.source_of(model, spec)
    if spec.draft == "random":
        model = source.target(model)
    return model, Head(source, head_shapes_of(source))


def require_same_head(
    saved: Mapping[str, Any], current: Mapping[str, Any] | None, model: ModelConfig
) -> None:
    """Refuses to go on with a head whose files say since then that it computes something else.

    Args:
      saved: metadata of the checkpoint that a run is resumed from.
      current: metadata of the head that the run loaded, see `describe_head`; None: it has none.
      model: config of the policy.

    Raises:
      ConfigError: the settings of the two heads differ; the message names one.
    """
    both = [meta.get(DRAFT_KEY) for meta in (saved, current or {})]
    if not all(about is not None and about["kind"] in DRAFTS for about in both):
        return  # an MTP head's settings are in the model's config, and own classes have no files
    was, now = (source_in("checkpoint", {DRAFT_KEY: about}, model) for about in both)
    try:
        sources.require_same_draft(was, now)
    except ValueError as error:
        raise ConfigError(
            f"the draft head in the checkpoint is not the one that its files describe now: {error}"
        ) from error
