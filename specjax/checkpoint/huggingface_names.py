"""The mapping between parameters and Hugging Face tensors.

A `Leaf` is one array of the parameter tree and the tensors that fill it: one per layer if the array
is stacked, or several, or parts of them. The model family names them. Projections are `[out, in]`
on disk and `[in, out]` here.

An MTP head has two naming styles, and the style determines the order of its concatenated input:
MiMo's `model.mtp_layers.i.*` is hidden first, the `model.layers.L+i.{enorm,hnorm,eh_proj}` of
DeepSeek-V3 and GLM is embedding first. To change the order, the two halves of the projection are
swapped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.checked_json import CheckpointError, UnsupportedModelError
from specjax.config import ModelConfig
from specjax.config.stacks import stacks
from specjax.drafts.mtp import head_layer, module_rows
from specjax.interfaces import Family, Param, Place, Stored
from specjax.models.families import family_of
from specjax.models.rows import layer_rows, top_rows

_MOST_PROBLEMS = 100


class CheckpointWeightError(CheckpointError):
    """Weights are missing, unexpected or wrongly shaped; the message names them."""


def raise_problems(source: object, problems: list[str]) -> None:
    """Raises `CheckpointWeightError` with one line per problem, if there are any.

    Of many problems, such as with a wrong number of layers, only the first are listed.
    """
    if len(problems) == 1:
        raise CheckpointWeightError(f"{source} does not fit the model config: {problems[0]}")
    if problems:
        shown = problems[:_MOST_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        raise CheckpointWeightError(
            f"{source} does not fit the model config; wrong weights: {len(problems)}\n  "
            + "\n  ".join(shown)
        )


def shape_problems(
    wanted: Mapping[str, Sequence[int]], found: Mapping[str, Any], extra: Iterable[str]
) -> list[str]:
    """Returns a line for each array that is missing, unexpected, or has another shape.

    Args:
      wanted: shapes by name.
      found: the arrays, or their descriptions, by name.
      extra: names in `found` that are refused unless they are wanted.
    """
    problems = [
        f"missing: {name}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name not in found
    ]
    problems += [
        f"wrong shape: {name}, expected {list(shape)}, got {list(found[name].shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name].shape) != tuple(shape)
    ]
    return problems + [
        f"unexpected: {name}, {list(found[name].shape)}" for name in extra if name not in wanted
    ]


class HeadStyle(NamedTuple):
    """The names of an MTP head's tensors in checkpoints, and the order of its input.

    Attributes:
      concat: order of the input.
      prefix: prefix of a module's tensors, with `{}` for its number; None: modules are numbered as
        further layers of the model.
      names: names of the arrays outside the module's layer; the family names those of the layer.
      layer_prefix: prefix of the layer's tensors; None: that of the module's.
    """

    concat: str
    prefix: str | None
    names: dict[str, Stored]
    layer_prefix: str | None = None


HEAD_STYLES = {
    "mimo": HeadStyle(
        "hidden_first",
        "model.mtp_layers.{}.",
        {
            "embed_norm": Stored("token_layernorm.weight"),
            "hidden_norm": Stored("hidden_layernorm.weight"),
            "proj": Stored("input_proj.weight", transpose=True),
            "norm": Stored("final_layernorm.weight"),
        },
    ),
    "deepseek": HeadStyle(
        "embedding_first",
        None,
        {
            "embed_norm": Stored("enorm.weight"),
            "hidden_norm": Stored("hnorm.weight"),
            "proj": Stored("eh_proj.weight", transpose=True),
            "norm": Stored("shared_head.norm.weight"),
        },
    ),
    "qwen3_next": HeadStyle(
        "embedding_first",
        "mtp.",
        {
            "embed_norm": Stored("pre_fc_norm_embedding.weight"),
            "hidden_norm": Stored("pre_fc_norm_hidden.weight"),
            "proj": Stored("fc.weight", transpose=True),
            "norm": Stored("norm.weight"),
        },
        layer_prefix="mtp.layers.{}.",
    ),
}


def order_of(family: Family) -> str | None:
    """Returns the order of the head's input in the files of a family; None: either."""
    return None if family.head_style is None else HEAD_STYLES[family.head_style].concat


class Leaf(NamedTuple):
    """A parameter and the tensors that fill it.

    Attributes:
      path: keys into the parameter tree.
      row: `Param` row of the array, or of one layer of a stacked array.
      pieces: the tensor of each piece, by the piece's indices in the first axes: the layer if
        layers are stacked, then the number of the tensor if a layer has several.
      layers: number of stacked layers; None: not stacked.
      swap: whether the halves of the input axis are in the other order on disk.
    """

    path: tuple
    row: Param
    pieces: Mapping[tuple[int, ...], Stored]
    layers: int | None = None
    swap: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return self.row.shape if self.layers is None else (self.layers, *self.row.shape)

    @property
    def axes(self) -> tuple:
        """The logical axes of the parameter."""
        return self.row.axes if self.layers is None else (None, *self.row.axes)

    @property
    def lead(self) -> int:
        """The number of leading axes that index pieces; the others are within a piece."""
        return len(next(iter(self.pieces)))

    def layer(self, number: int) -> Leaf:
        """Returns the leaf of one layer of a stacked array."""
        inside = np.ndindex(self.row.shape[: self.lead - 1])
        pieces = {rest: self.pieces[number, *rest] for rest in inside}
        return self._replace(pieces=pieces, layers=None)


class Tensor(NamedTuple):
    """A tensor in the files: its shape, and the pieces of parameters that it holds."""

    shape: tuple[int, ...]
    holds: list[tuple[Leaf, tuple[int, ...], Stored]]


def swap_last(index: tuple, stored: Stored) -> tuple:
    """Swaps the last two entries of a shape or an index where the tensor is transposed."""
    return (*index[:-2], index[-1], index[-2]) if stored.transpose else index


def tensors_of(leaves: Iterable[Leaf]) -> dict[str, Tensor]:
    """Returns the tensors that fill some parameters, by their names.

    Raises:
      UnsupportedModelError: `Family.stored` is wrong: parts overlap, or leave a part of the tensor
        out.
    """
    tensors: dict[str, Tensor] = {}
    for leaf in leaves:
        for at, stored in leaf.pieces.items():
            shape = swap_last(leaf.shape[leaf.lead :], stored)
            if (part := stored.part) is not None:
                shape = (*shape[: part.axis], part.size, *shape[part.axis + 1 :])
            tensors.setdefault(stored.name, Tensor(shape, [])).holds.append((leaf, at, stored))
    for name, tensor in tensors.items():
        _check_parts(name, tensor)
    return tensors


def _check_parts(name: str, tensor: Tensor) -> None:
    parts = [stored.part for _, _, stored in tensor.holds]
    if parts == [None]:
        return
    axes = {None if part is None else part.axis for part in parts}
    found = sorted(i for p in parts if p is not None for i in p.indices)
    if None in axes or len(axes) > 1 or found != list(range(tensor.shape[axes.pop()])):
        arrays = ", ".join(f"{label_of(leaf)} {s.part or 'all'}" for leaf, _, s in tensor.holds)
        raise UnsupportedModelError(
            f"tensor {name}: expected one array, or parts along one axis that fill it without "
            f"overlapping, got {arrays}; correct `Family.stored`"
        )


def label_of(leaf: Leaf) -> str:
    """Returns the parameter's path, for messages."""
    return "/".join(map(str, leaf.path))


def _pieces(row: Param, place: Place, prefix: str, label: str) -> dict[tuple[int, ...], Stored]:
    """Returns the pieces of a parameter of one layer or outside the layers, see `Leaf.pieces`."""
    if isinstance(place, Stored):
        return {(): place._replace(name=prefix + place.name)}
    if place is None or len(place) != row.shape[0]:
        raise UnsupportedModelError(
            f"{label} {list(row.shape)}: expected a tensor in files, or one for each along the "
            f"first axis, got {place}; correct `Family.stored`"
        )
    return {(i,): stored._replace(name=prefix + stored.name) for i, stored in enumerate(place)}


def _places(cfg: ModelConfig, layer: Any, rows: Mapping[str, Param]) -> Mapping[str, Place]:
    """Returns the family's tensors for some arrays; it must name each array and no others."""
    places = family_of(cfg.model_type).stored(cfg, layer)
    if rows.keys() != places.keys():
        raise UnsupportedModelError(
            f"model_type {cfg.model_type!r}: expected its family to name the arrays "
            f"{', '.join(rows)}, got {', '.join(places)}; correct `Family.stored`"
        )
    return places


def policy_leaves(cfg: ModelConfig, unrolled: bool = False) -> list[Leaf]:
    """Returns every parameter of `Transformer` in the stacked layout, or layer by layer.

    Raises:
      UnsupportedModelError: the family names no tensor for a parameter.
    """
    rows, prefix = top_rows(cfg), family_of(cfg.model_type).layer_prefix
    places = _places(cfg, None, rows)
    leaves = [
        Leaf((name,), row, _pieces(row, places[name], "", name))
        for name, row in rows.items()
        if name != "lm_head" or not cfg.tie_embeddings
    ]
    for stack in stacks(cfg.layers):
        inside = () if stack.key is None else (stack.key,)
        rows = layer_rows(stack.layer, cfg.hidden_size)
        places = _places(cfg, stack.layer, rows)
        for name, row in rows.items():
            pieces = {
                (at, *rest): stored
                for at, number in enumerate(stack.numbers)
                for rest, stored in _pieces(
                    row, places[name], prefix.format(number), f"layers/{number}/{name}"
                ).items()
            }
            leaf = Leaf(("layers", *inside, name), row, pieces, layers=len(stack.numbers))
            if not unrolled:
                leaves.append(leaf)
                continue
            for at, number in enumerate(stack.numbers):
                leaves.append(leaf.layer(at)._replace(path=("layers", number, name)))
    return leaves


def row_leaves(rows: Mapping[Any, Any], inside: tuple = ()) -> list[Leaf]:
    """Returns every parameter of a tree of `Param` whose `stored` has the whole name of a tensor.

    Args:
      rows: the tree.
      inside: keys of the tree that this one is in.

    Raises:
      UnsupportedModelError: a row names no tensor.
    """
    leaves = []
    for name, row in rows.items():
        path = (*inside, name)
        if isinstance(row, Mapping):
            leaves += row_leaves(row, path)
        else:
            label = "/".join(map(str, path))
            leaves.append(Leaf(path, row, _pieces(row, row.stored, "", label)))
    return leaves


def head_leaves(cfg: ModelConfig, style: str) -> list[Leaf]:
    """Returns every parameter of `MTPHead` under the names of `style`, for `cfg.mtp_concat`.

    Raises:
      UnsupportedModelError: the family names no tensor for an array of the head's layer.
    """
    table, leaves = HEAD_STYLES[style], []
    layer = head_layer(cfg)
    rows = layer_rows(layer, cfg.hidden_size)
    places = _places(cfg, layer, rows)
    for index in range(cfg.mtp_num_layers):
        prefix, path = _head_prefix(cfg, style, index), ("blocks", index)
        for name, row in module_rows(cfg).items():
            swap = name == "proj" and table.concat != cfg.mtp_concat
            pieces = _pieces(row, table.names[name], prefix, name)
            leaves.append(Leaf((*path, name), row, pieces, swap=swap))
        prefix = prefix if table.layer_prefix is None else table.layer_prefix.format(index)
        for name, row in rows.items():
            pieces = _pieces(row, places[name], prefix, f"the head's layer/{name}")
            leaves.append(Leaf((*path, "layer", name), row, pieces))
    return leaves


def _head_prefix(cfg: ModelConfig, style: str, index: int) -> str:
    own = HEAD_STYLES[style].prefix
    if own is not None:
        return own.format(index)
    return family_of(cfg.model_type).layer_prefix.format(cfg.num_layers + index)


def style_on_export(cfg: ModelConfig) -> str:
    """Returns the family's own style, or the one with the head's order if the family has none."""
    own = family_of(cfg.model_type).head_style
    return own or next(name for name, s in HEAD_STYLES.items() if s.concat == cfg.mtp_concat)


def style_of(cfg: ModelConfig, names: Iterable[str]) -> str:
    """Returns the style of tensor names; without any head tensor, that of an export of `cfg`."""
    names = tuple(names)
    for style in HEAD_STYLES:
        if any(is_head_name(cfg, style, name) for name in names):
            return style
    return style_on_export(cfg)


def is_head_name(cfg: ModelConfig, style: str, name: str) -> bool:
    """Returns whether a tensor belongs to the head rather than to the policy."""
    own = HEAD_STYLES[style].prefix
    if own is not None:
        return name.startswith(own.partition("{}")[0])
    before, _, after = family_of(cfg.model_type).layer_prefix.partition("{}")
    found = re.match(re.escape(before) + "([0-9]+)" + re.escape(after), name)
    return found is not None and int(found[1]) >= cfg.num_layers


def zero_tensors(cfg: ModelConfig, style: str | None) -> dict[str, tuple[int, ...]]:
    """Returns shapes, by name, of tensors that are written as zeros and must be zero when read.

    Args:
      style: style of the head's names; None: there is no head.
    """
    family = family_of(cfg.model_type)
    layers = {family.layer_prefix.format(i): layer for i, layer in enumerate(cfg.layers)}
    if style is not None:
        for i in range(cfg.mtp_num_layers):
            layers[_head_prefix(cfg, style, i)] = head_layer(cfg)
    return {
        prefix + name: shape
        for prefix, layer in layers.items()
        for name, shape in family.zeros(cfg, layer).items()
    }


def is_redundant(cfg: ModelConfig, name: str) -> bool:
    """Returns whether a tensor is redundant: tied or shared copies, RoPE tables of old files."""
    head = family_of(cfg.model_type).stored(cfg, None)["lm_head"]
    if isinstance(head, Stored) and head.part is None and name == head.name:
        return cfg.tie_embeddings
    shared = name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))
    in_head = any(is_head_name(cfg, style, name) for style in HEAD_STYLES)
    return name.endswith(".rotary_emb.inv_freq") or (in_head and shared)
