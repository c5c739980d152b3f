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

import jax
import jax.numpy as jnp

from specjax.checked_json import CheckpointError
from specjax.checkpoint.huggingface_config import FAMILIES
from specjax.config import ModelConfig
from specjax.drafts.mtp import init_head_params
from specjax.models.transformer import Params, init_params

BLOCK_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
TOP_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_TRANSPOSED = frozenset(("q", "k", "v", "o", "gate", "up", "down", "proj", "lm_head"))


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


class Slot(NamedTuple):
    """One parameter and its tensors.

    Attributes:
      path: keys into the parameter tree. shape: of the parameter.
      names: tensors, one per layer when `stacked` (axis 0), else one.
      transpose: the tensors are `[out, in]`, the parameter `[in, out]`.
      swap: the halves of the input axis are the other way round on disk.
    """

    path: tuple
    shape: tuple[int, ...]
    names: tuple[str, ...]
    stacked: bool
    transpose: bool
    swap: bool = False

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of each tensor on disk."""
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transpose else shape


def policy_slots(cfg: ModelConfig) -> list[Slot]:
    """Every parameter of `Transformer` in the stacked layout."""
    slots = []
    for path, shape in _shapes(lambda: init_params(cfg)):
        leaf, stacked = path[-1], path[0] == "layers"
        names = (TOP_NAMES.get(leaf),)
        if stacked:
            names = tuple(f"model.layers.{i}.{BLOCK_NAMES[leaf]}" for i in range(cfg.num_layers))
        slots.append(Slot(path, shape, names, stacked, leaf in _TRANSPOSED))
    return slots


def head_slots(cfg: ModelConfig, style: str) -> list[Slot]:
    """Every parameter of `MTPHead` under the names of `style`, in memory as `cfg.mtp_concat`."""
    table, slots = HEAD_STYLES[style], []
    for path, shape in _shapes(lambda: init_head_params(cfg)):
        leaf, prefix = path[-1], _head_prefix(cfg, style, path[1])
        name = prefix + (BLOCK_NAMES[leaf] if path[2] == "layer" else table.names[leaf])
        swap = leaf == "proj" and table.concat != cfg.mtp_concat
        slots.append(Slot(path, shape, (name,), False, leaf in _TRANSPOSED, swap))
    return slots


def _shapes(make) -> list[tuple[tuple, tuple[int, ...]]]:
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(make))
    return [(tuple(p.key for p in path), leaf.shape) for path, leaf in leaves]


def _head_prefix(cfg: ModelConfig, style: str, index: int) -> str:
    return HEAD_STYLES[style].prefix.format(index=index, after_body=cfg.num_layers + index)


def style_on_export(cfg: ModelConfig) -> str:
    """MiMo keeps its names; elsewhere the style whose order is the head's own."""
    if cfg.model_type == "mimo" or cfg.mtp_concat == "hidden_first":
        return "mimo"
    return "deepseek"


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


def zero_biases(cfg: ModelConfig, style: str | None) -> dict[str, tuple[int, ...]]:
    """Biases of the output projection by name, with shapes: written as zeros, read if zero.

    transformers gives Llama and Qwen3 with `attention_bias` a bias there as well; checkpoints that
    were converted from a family without one hold zeros.
    """
    if not cfg.layers[0].mixer.qkv_bias or FAMILIES[cfg.model_type].qkv_bias:
        return {}
    prefixes = [f"model.layers.{i}." for i in range(cfg.num_layers)]
    if style is not None:
        prefixes += [_head_prefix(cfg, style, i) for i in range(cfg.mtp_num_layers)]
    return {f"{prefix}self_attn.o_proj.bias": (cfg.hidden_size,) for prefix in prefixes}


def is_redundant(cfg: ModelConfig, name: str) -> bool:
    """Tensors that say nothing new: tied or shared copies, and RoPE tables of old checkpoints."""
    if name == TOP_NAMES["lm_head"]:
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
