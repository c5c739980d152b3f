"""Which Hugging Face tensor is which parameter.

A `Slot` is one array of the parameter tree and the tensors that fill it: one per layer when the
array is stacked. Projections are `[out, in]` on disk and `[in, out]` here.

An MTP head has two naming styles, and the style says in which order its input is concatenated:
MiMo's `model.mtp_layers.i.*` is hidden first, the `model.layers.L+i.{enorm,hnorm,eh_proj}` of
DeepSeek-V3 and GLM is embedding first. Going from one order to the other swaps the two halves of
the projection.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp

from specjax.checked_json import CheckpointError
from specjax.config import ModelConfig
from specjax.config.stacks import stacks
from specjax.drafts.mtp import head_layer, module_rows
from specjax.interfaces import Family, Param, Params
from specjax.models.families import family_of
from specjax.models.rows import layer_rows, top_rows

_MOST_PROBLEMS = 100


class CheckpointWeightError(CheckpointError):
    """Weights are missing, unexpected or wrongly shaped; the message names them."""


def raise_problems(source: object, problems: list[str]) -> None:
    """Raises `CheckpointWeightError` with one line per problem, if there are any.

    Of very many, as of a wrong number of layers, the first say what is wrong.
    """
    if len(problems) == 1:
        raise CheckpointWeightError(f"{source} does not fit the model config: {problems[0]}")
    if problems:
        shown = problems[:_MOST_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        raise CheckpointWeightError(
            f"{source} does not fit the model config; weights at fault: {len(problems)}\n  "
            + "\n  ".join(shown)
        )


class HeadStyle(NamedTuple):
    """How one family of checkpoints writes an MTP head."""

    concat: str
    prefix: str
    names: dict[str, str]


HEAD_STYLES = {
    "mimo": HeadStyle(
        "hidden_first",
        "model.mtp_layers.{index}.",
        {
            "embed_norm": "token_layernorm.weight",
            "hidden_norm": "hidden_layernorm.weight",
            "proj": "input_proj.weight",
            "norm": "final_layernorm.weight",
        },
    ),
    "deepseek": HeadStyle(
        "embedding_first",
        "model.layers.{after_body}.",
        {
            "embed_norm": "enorm.weight",
            "hidden_norm": "hnorm.weight",
            "proj": "eh_proj.weight",
            "norm": "shared_head.norm.weight",
        },
    ),
}


def order_of(family: Family) -> str | None:
    """In which order the files of a family have the input of a head; None: in either."""
    return None if family.head_style is None else HEAD_STYLES[family.head_style].concat


class Slot(NamedTuple):
    """One parameter and its tensors.

    Attributes:
      path: keys into the parameter tree. row: of one of its layers, where there are several.
      names: of the tensors, one per layer when `stacked` (axis 0), else one.
      swap: the halves of the input axis are the other way round on disk.
    """

    path: tuple
    row: Param
    names: tuple[str, ...]
    stacked: bool = False
    swap: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        return (len(self.names), *self.row.shape) if self.stacked else self.row.shape

    @property
    def axes(self) -> tuple:
        """The logical axes of the parameter."""
        return (None, *self.row.axes) if self.stacked else self.row.axes

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of each tensor on disk."""
        return self.row.shape[::-1] if self.row.transpose else self.row.shape


def policy_slots(cfg: ModelConfig) -> list[Slot]:
    """Every parameter of `Transformer` in the stacked layout."""
    rows = family_of(cfg.model_type).params(cfg)
    slots = [Slot(path, row, (row.name,)) for path, row in rows.items() if path[0] != "layers"]
    leaves: dict[int, list[str]] = {}
    for path in rows:
        if path[0] == "layers":
            leaves.setdefault(path[1], []).append(path[2])
    for stack in stacks(cfg.layers):
        inside = () if stack.key is None else (stack.key,)
        for leaf in leaves[stack.numbers[0]]:
            each = [rows["layers", number, leaf] for number in stack.numbers]
            names = tuple(row.name for row in each)
            slots.append(Slot(("layers", *inside, leaf), each[0], names, stacked=True))
    return slots


def head_slots(cfg: ModelConfig, style: str) -> list[Slot]:
    """Every parameter of `MTPHead` under the names of `style`, in memory as `cfg.mtp_concat`."""
    table, slots = HEAD_STYLES[style], []
    for index in range(cfg.mtp_num_layers):
        prefix = _head_prefix(cfg, style, index)
        for leaf, row in module_rows(cfg).items():
            swap = leaf == "proj" and table.concat != cfg.mtp_concat
            name = prefix + table.names[leaf]
            slots.append(Slot(("blocks", index, leaf), row, (name,), swap=swap))
        for leaf, row in layer_rows(head_layer(cfg), cfg.hidden_size).items():
            slots.append(Slot(("blocks", index, "layer", leaf), row, (prefix + row.name,)))
    return slots


def _head_prefix(cfg: ModelConfig, style: str, index: int) -> str:
    return HEAD_STYLES[style].prefix.format(index=index, after_body=cfg.num_layers + index)


def style_on_export(cfg: ModelConfig) -> str:
    """The family's own style; without one, that whose order is the head's own."""
    own = family_of(cfg.model_type).head_style
    return own or next(name for name, s in HEAD_STYLES.items() if s.concat == cfg.mtp_concat)


def style_of(cfg: ModelConfig, names: Iterable[str]) -> str:
    """The style that tensor names are in; without any, the one `cfg` would be written in."""
    names = tuple(names)
    for style in HEAD_STYLES:
        if any(is_head_name(cfg, style, name) for name in names):
            return style
    return style_on_export(cfg)


def is_head_name(cfg: ModelConfig, style: str, name: str) -> bool:
    """Whether a tensor belongs to the head rather than to the policy's body."""
    if style == "mimo":
        return name.startswith("model.mtp_layers.")
    parts = name.split(".")
    body = name.startswith("model.layers.") and parts[2].isdigit()
    return body and int(parts[2]) >= cfg.num_layers


def zero_tensors(cfg: ModelConfig, style: str | None) -> dict[str, tuple[int, ...]]:
    """Tensors by name, with shapes, that are written as zeros, and read if zero.

    Args:
      style: of a head's names; None: there is no head.
    """
    family = family_of(cfg.model_type)
    layers = {f"model.layers.{i}.": layer for i, layer in enumerate(cfg.layers)}
    if style is not None:
        for i in range(cfg.mtp_num_layers):
            layers[_head_prefix(cfg, style, i)] = head_layer(cfg)
    return {
        prefix + name: shape
        for prefix, layer in layers.items()
        for name, shape in family.zeros(cfg, layer).items()
    }


def is_redundant(cfg: ModelConfig, name: str) -> bool:
    """Tensors that say nothing new: tied or shared copies, and RoPE tables of old checkpoints."""
    if name == top_rows(cfg)["lm_head"].name:
        return cfg.tie_embeddings
    shared = name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))
    in_head = any(is_head_name(cfg, style, name) for style in HEAD_STYLES)
    return name.endswith(".rotary_emb.inv_freq") or (in_head and shared)


def swap_concat(head: Params) -> Params:
    """A head of the other concatenation order: the halves of every `proj` [2D, D] change places.

    With `cfg.mtp_concat` changed accordingly the head computes the same function.
    """

    def swap(block: Params) -> Params:
        first, second = jnp.split(block["proj"], 2, axis=0)
        return {**block, "proj": jnp.concatenate([second, first], axis=0)}

    return {**head, "blocks": {index: swap(block) for index, block in head["blocks"].items()}}
