"""The rows (`Param`) of a model: one per array, for initialisation, loading, export and sharding.

Mixers and mlps have rows of their own. Families name the tensors in files, see
`specjax.interfaces.Family.stored`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import jax.numpy as jnp

from specjax.config import ModelConfig
from specjax.config.model import Layer
from specjax.interfaces import Axes, Param, Params, Stored


def layer_rows(layer: Layer, width: int) -> dict[str, Param]:
    """Returns the rows of a layer's arrays: those of its norms, its mixer and its mlp."""
    names = {}
    if layer.norms != "after":
        second = "pre_feedforward" if layer.norms == "both" else "post_attention"
        names = {"input_norm": "input", "post_norm": second}
    if layer.norms != "before":
        names |= {"mixed_norm": "post_attention", "mlp_norm": "post_feedforward"}
    init = 0 if layer.norm_offset else None
    norms = {
        name: Param((width,), (None,), Stored(f"{stored}_layernorm.weight"), init=init)
        for name, stored in names.items()
    }
    return norms | layer.mixer.params(width) | layer.mlp.params(width)


def top_rows(cfg: ModelConfig) -> dict[str, Param]:
    """Returns the rows of the arrays outside the layers, and of the head, which may be tied."""
    v, d = cfg.vocab_size, cfg.hidden_size
    return {
        "embed": Param((v, d), ("vocab", "embed"), Stored("model.embed_tokens.weight"), table=True),
        "norm": Param(
            (d,), (None,), Stored("model.norm.weight"), init=0 if cfg.norm_offset else None
        ),
        "lm_head": Param((d, v), ("embed", "vocab"), Stored("lm_head.weight", True), matrix=True),
    }


def merge_axes(tables: Iterable[Axes]) -> dict[str, tuple]:
    """Joins tables of logical axes.

    Raises:
      ValueError: two arrays have the same name and different axes.
    """
    found: dict[str, tuple] = {}
    for name, axes in (item for table in tables for item in table.items()):
        if found.setdefault(name, axes) != axes:
            raise ValueError(
                f"expected one set of axes for all arrays named {name}, got {found[name]} and "
                f"{axes}; rename one of them in `params`"
            )
    return found


def axes_of(rows: Mapping[str, Param]) -> dict[str, tuple]:
    """Returns the logical axes of arrays by their names."""
    return {name: row.axes for name, row in rows.items()}


def param_axes(cfg: ModelConfig) -> dict[str, tuple]:
    """Returns the logical axes of a model's arrays, by name, see `specjax.parallel.sharding`."""
    layers = [layer_rows(layer, cfg.hidden_size) for layer in dict.fromkeys(cfg.layers)]
    return merge_axes(map(axes_of, [top_rows(cfg), *layers]))


def _all_rows(cfg: ModelConfig) -> Iterator[tuple[str, Param]]:
    yield from top_rows(cfg).items()
    for layer in dict.fromkeys(cfg.layers):
        yield from layer_rows(layer, cfg.hidden_size).items()


def matrix_names(cfg: ModelConfig) -> frozenset[str]:
    """Returns the names of matrices that activations are multiplied with, and of tables."""
    return frozenset(name for name, row in _all_rows(cfg) if row.matrix or row.table)


def fixed_dtypes(cfg: ModelConfig) -> dict[str, str]:
    """Returns the names of arrays whose dtype is not the model's, with that dtype."""
    return {name: row.dtype for name, row in _all_rows(cfg) if row.dtype is not None}


def repeated_names(cfg: ModelConfig) -> frozenset[str]:
    """Returns the names of arrays that fusing repeats, and of the arrays that hold the copies."""
    found = set()
    for layer in set(cfg.layers):
        for name, row in layer_rows(layer, cfg.hidden_size).items():
            if row.fused is not None and row.fused.copies is not None:
                found |= {name, row.fused.name}
    return frozenset(found)


# --- fused parameters ----------------------------------------------------------------------


def _groups(rows: Mapping[str, Param]) -> dict[str, list[str]]:
    """Returns the fused arrays, each with the names of its parameters in order."""
    found: dict[str, list[str]] = {}
    for name, row in rows.items():
        if row.fused is not None:
            found.setdefault(row.fused.name, []).append(name)
    return {into: sorted(of, key=lambda name: rows[name].fused.order) for into, of in found.items()}


def fused_rows(rows: Mapping[str, Param]) -> dict[str, Param]:
    """Returns the rows of a layer's arrays as `fuse` leaves them."""
    out = {name: row for name, row in rows.items() if row.fused is None}
    for into, names in _groups(rows).items():
        first, copies = rows[names[0]], [rows[name].fused.copies for name in names]
        if None in copies:
            shape = (*first.shape[:-1], sum(rows[name].shape[-1] for name in names))
        else:
            shape = (*first.shape[:-1], sum(copies), first.shape[-1])
        whole = (None,) * len(shape)
        out[into] = Param(shape, whole, init=first.init, matrix=first.matrix)
    return out


def fuse(params: Params, rows: Mapping[str, Param]) -> Params:
    """Fuses a layer's parameters, or stacked ones, as decoding keeps them.

    Args:
      rows: rows of the layer's arrays, see `layer_rows`.
    """
    out = {name: params[name] for name, row in rows.items() if row.fused is None}
    for into, names in _groups(rows).items():
        parts = {name: params[name] for name in names}
        copies = {name: rows[name].fused.copies for name in names}
        if None in copies.values():
            out[into] = jnp.concatenate(list(parts.values()), axis=-1)
            continue
        repeated = [jnp.repeat(x[..., None, :], copies[n], axis=-2) for n, x in parts.items()]
        out[into] = jnp.concatenate(repeated, axis=-2)
    return out
