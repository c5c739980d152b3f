"""One row per array of a model: what initialising, loading, exporting, sharding and comparing of
weights read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from specjax.config import ModelConfig
from specjax.config.model import Layer
from specjax.interfaces import Axes, Param


def layer_rows(layer: Layer, width: int) -> dict[str, Param]:
    """The rows of a layer's arrays: of its norms, its mixer and its mlp."""
    norms = {
        "input_norm": Param((width,), (None,), "input_layernorm.weight", init=None),
        "post_norm": Param((width,), (None,), "post_attention_layernorm.weight", init=None),
    }
    mixer, mlp = layer.mixer.params(width), layer.mlp.params(width)
    if twice := norms.keys() & mixer.keys() | (norms.keys() | mixer.keys()) & mlp.keys():
        raise ValueError(
            f"{layer}: expected different names for the arrays of mixer, mlp and norms, got "
            f"{', '.join(sorted(twice))} more than once"
        )
    return norms | mixer | mlp


def top_rows(cfg: ModelConfig) -> dict[str, Param]:
    """The rows of the arrays outside the layers, the language-model head's too where it is tied."""
    v, d = cfg.vocab_size, cfg.hidden_size
    return {
        "embed": Param((v, d), ("vocab", "embed"), "model.embed_tokens.weight"),
        "norm": Param((d,), (None,), "model.norm.weight", init=None),
        "lm_head": Param((d, v), ("embed", "vocab"), "lm_head.weight", transpose=True, matrix=True),
    }


def model_rows(cfg: ModelConfig) -> dict[tuple, Param]:
    """The rows of a model's arrays by their paths, with the tensor names of Llama's files.

    Paths are those of parameters that are not stacked: `("embed",)`, `("layers", 0, "q")`.
    """
    rows: dict[tuple, Param] = {
        (name,): row
        for name, row in top_rows(cfg).items()
        if name != "lm_head" or not cfg.tie_embeddings
    }
    for number, layer in enumerate(cfg.layers):
        prefix = f"model.layers.{number}."
        for name, row in layer_rows(layer, cfg.hidden_size).items():
            rows["layers", number, name] = row.prefixed(prefix)
    return rows


def axes_of(rows: Iterable[Mapping[str, Param]]) -> Axes:
    """The logical axes of arrays by their names, see `specjax.parallel.sharding`.

    Raises:
      ValueError: two arrays have the same name and other axes.
    """
    found: dict[str, tuple] = {}
    for name, row in (item for table in rows for item in table.items()):
        if found.setdefault(name, row.axes) != row.axes:
            raise ValueError(
                f"expected one set of axes for all arrays named {name}, got {found[name]} and "
                f"{row.axes}"
            )
    return found


def param_axes(cfg: ModelConfig) -> Axes:
    """The logical axes of a model's arrays by their names."""
    layers = [layer_rows(layer, cfg.hidden_size) for layer in dict.fromkeys(cfg.layers)]
    return axes_of([top_rows(cfg), *layers])
