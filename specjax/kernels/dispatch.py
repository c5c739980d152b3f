"""Operations that have kernels, each with one signature, and which backend runs them.

Models and the decode loop never name a kernel: `RunConfig.attention` does. `settle` sets it once,
when an engine or a trainer is built and its devices are known. A name is a row of the table
`specjax.registry.BACKENDS`, or a user's own path `module:attribute`; either gives a
`specjax.interfaces.Backend`:

    tree_attention      rows of a tree, or of a piece of a prompt, over a paged prefix
    causal_attention    packed rows, in training; with rows of later steps beside them, too
    context_attention   the same of rows that are split over devices, see `context_parallel`
    commit              new keys and values written to their pages
    product             rows times a weight that is stored in panels
    experts             sorted rows, each times one matrix of a stack
    layers              whole decoder layers, of `Attention` and `Dense` and nothing derived from
                        them, in one call

An operation that a backend does not have is run by the backend that it names as its `rest`, and so
is a call that it declines, or that has an option which is not among those that it `takes`; this is
logged once. The reference has all operations but `layers`, with all options; where `runs_layers` is
False a model runs its layers one by one. Options that a call does not use are not handed on.

Under a mesh (`sharding.ambient`) every device attends to its own heads and rows of the batch.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from specjax.config import ModelConfig
from specjax.interfaces import Backend, Device, Table
from specjax.kernels.backend import Declined, Unsuited, choose
from specjax.kernels.reference import tree_attention_by_position as tree_attention_by_position
from specjax.parallel import sharding
from specjax.parallel.context import Context
from specjax.registry import BACKENDS

log = logging.getLogger(__name__)

PANELS = "cpu"  # the backend that multiplies by weights in panels
# The classes of mixers and mlps that `layers` computes, and no class derived from them: it has the
# same fields, and may compute something else.
_LAYERS = ("specjax.models.mixers.attention:Attention", "specjax.models.mlps.dense:Dense")


# --- the choice of a backend ----------------------------------------------------------------------


def settle(
    cfg: ModelConfig,
    mesh: jax.sharding.Mesh | None,
    asked: str = "auto",
    invariant: bool = False,
    whose: str = "attention",
    decoding: bool = True,
) -> ModelConfig:
    """Returns the config with the name of the kernel that its programs run, and logs it.

    Args:
      mesh: mesh whose devices decide, real or of a topology; None: the default device.
      asked: `auto`, a name, or a path (see `specjax.kernels.backend`).
      invariant: whether rounds attend by position.
      whose: first word of the logged line.
      decoding: True to choose for decoding, False for training.

    Raises:
      ValueError: the kernel that was asked for cannot be used.
    """
    platform, kind, devices = device_of(mesh)
    choice = choose(platform, kind, cfg, asked, invariant, devices, decoding)
    log.log(logging.WARNING if choice.warn else logging.INFO, "%s: %s", whose, choice.line)
    return cfg.running(attention=choice.name)


def device_of(mesh: jax.sharding.Mesh | None) -> Device:
    """Returns the `Device` that a mesh's programs are compiled for; None: the default device."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return Device(device.platform, device.device_kind, 1 if mesh is None else mesh.size)


def refuses(operation: str, name: str, device: Device | None, cfg: ModelConfig) -> str | None:
    """Returns why a backend cannot be used for an operation of a model on a device, or None.

    An `Unsuited` (`specjax.kernels.backend`) is a reason that needs no warning.

    Args:
      operation: name of an operation.
      name: name of the backend, or its path.
      device: device to run on, see `device_of`; None: check the model only.
    """
    backend = BACKENDS.find(name)
    if operation not in backend.operations:
        return f"{name} has no {operation}"
    if operation == "layers":
        kinds = {type(part) for layer in cfg.layers for part in (layer.mixer, layer.mlp)}
        names = {f"{kind.__module__}:{kind.__qualname__}" for kind in kinds}
        if others := sorted(names - {*_LAYERS}):
            return Unsuited(
                f"layers are computed of {' and '.join(_LAYERS)}, got {', '.join(others)}"
            )
        if fields := sorted({*_changed(cfg)} - {*backend.takes.get(operation, ())}):
            return Unsuited(f"layers are computed without {', '.join(fields)}")
    return backend.refuses(operation, device, cfg)


def _changed(cfg: ModelConfig) -> Iterator[str]:
    """Yields the fields of a model of `_LAYERS`, and of its parts, that are not as by default."""
    mixers = [layer.mixer for layer in cfg.layers]
    parts = [*cfg.layers, *mixers, *(mixer.rope for mixer in mixers), *(x.mlp for x in cfg.layers)]
    for part in (cfg, *dict.fromkeys(parts)):
        for field in dataclasses.fields(part):
            if getattr(part, field.name) != field.default:
                yield f"{type(part).__name__}.{field.name}"


def has(operation: str, name: str) -> bool:
    """Returns whether a backend of that name or path has an operation of its own."""
    return operation in BACKENDS.find(name).operations


def page_multiple(kernel: str) -> int:
    """Returns the number of positions that a kernel's page size must be a multiple of."""
    return BACKENDS.find(kernel).page_multiple


def _serve(
    operation: str,
    kernel: str,
    call: Callable[[Backend, Callable], object],
    options: Collection[str] = (),
):
    """Runs `call(backend, function)` for `kernel`, or if it declines for its `rest`, and so on.

    Args:
      options: names of the options that the call uses, which the backend must take.
    """
    asked = [kernel]
    while True:
        backend = BACKENDS.find(kernel)
        if operation in backend.operations:
            try:
                if lacks := sorted({*options} - {*backend.takes.get(operation, ())}):
                    raise Declined(f"it has no {' and no '.join(lacks)}")
                return call(backend, backend.operations[operation])
            except Declined as reason:
                _log_declined(kernel, operation, str(reason), backend.rest)
        kernel = backend.rest
        if kernel in asked:
            raise ValueError(
                f"no kernel backend has {operation}: {', '.join(asked)} name each other as "
                "their rest; the last of them must be 'reference'"
            )
        asked.append(kernel)


@functools.cache  # once per process, not once per layer
def _log_declined(kernel: str, operation: str, reason: str, rest: str) -> None:
    log.info("%s by %s, not by %s: %s", operation, rest, kernel, reason)


# --- decoding -------------------------------------------------------------------------------------


def tree_attention(
    q, k_tree, v_tree, k_pages, v_pages, prefix_len, visible_bits, table: Table = None, *,
    window: int | None = None, sinks=None, with_lse: bool = False, soft_cap: float | None = None,
    kernel: str = "reference",
):  # fmt: skip
    """Computes `specjax.kernels.reference.tree_attention`, which has the same arguments.

    Args:
      kernel: a name of the table, or a path.
    """
    options = _used(window=window, with_lse=with_lse or None, soft_cap=soft_cap)
    batch, heads = ("batch", "heads", None, None), (None, "heads", None, None)
    bits = jnp.asarray(visible_bits)
    named = {
        "q": (q, batch),
        "k_tree": (k_tree, batch),
        "v_tree": (v_tree, batch),
        # Without a table, page b belongs to slot b.
        "k_pages": (k_pages, batch if table is None else heads),
        "v_pages": (v_pages, batch if table is None else heads),
        "prefix_len": (jnp.asarray(prefix_len), ("batch",)),
        "visible_bits": (bits, ("batch", None, None) if bits.ndim == 3 else (None, None)),
    }
    if table is not None:
        named["table"] = (table, ("batch", None))
    if sinks is not None:
        named["sinks"] = (sinks, ("heads",))
    out = (batch, batch[:-1]) if with_lse else batch
    sizes = q.shape[0], k_tree.shape[1]

    def attend(backend: Backend, function: Callable):
        function = functools.partial(function, **options)
        return _on_each_device(backend, function, named, out, *sizes)

    used = {*options, *(() if sinks is None else ("sinks",))}
    return _serve("tree_attention", kernel, attend, used)


def commit(
    arrays: Sequence[Float[Array, "*L P K S H"]],
    rows: Sequence[Float[Array, "*L B K R H"]],
    start: Int[Array, " B"],
    table: Table = None,
    *,
    kernel: str = "reference",
) -> list[Array]:
    """Writes R consecutive rows of each sequence to pages, and returns the pages.

    Args:
      arrays: pages of each layer's keys and values, or of all layers' stacked.
      rows: new rows for each of `arrays`; P, K, S and H are the same throughout.
      start: position of each sequence's first row.
      kernel: a name of the table, or a path.
    """
    return _serve("commit", kernel, lambda _, function: function(arrays, rows, start, table))


def product(x: Float[Array, "... K"], panels: Float[Array, "P K W"]) -> Float[Array, "... N"]:
    """Computes `x @ weight` in float32, for a weight [K, N] stored in panels of W columns each.

    Args:
      panels: `weight.reshape(K, N // W, W).transpose(1, 0, 2)`; W is `PANEL_WIDTH`.
    """
    return _serve("product", PANELS, lambda _, function: function(x, panels))


def experts(
    x: Float[Array, "M I"],
    stack: Float[Array, "E I O"],
    sizes: Int[Array, " E"],
    *,
    kernel: str = "reference",
) -> Float[Array, "M O"]:
    """Multiplies rows by one matrix each: the first `sizes[0]` rows by `stack[0]`, and so on.

    Rows behind the last group are zero in the result. See `specjax.kernels.experts`.

    Args:
      kernel: a name of the table, or a path.
    """
    return _serve("experts", kernel, lambda _, function: function(x, stack, sizes))


def runs_layers(cfg: ModelConfig) -> bool:
    """Returns whether a settled config's kernel runs all of the model's layers by `layers`."""
    return refuses("layers", cfg.run.attention, None, cfg) is None


def layers(
    cfg: ModelConfig,
    weights: Sequence[Mapping[str, Array]],
    x: Float[Array, "B T D"],
    cos: Float[Array, "B T H"],
    sin: Float[Array, "B T H"],
    pages: Sequence[tuple[Array, Array]],
    prefix_len: Int[Array, " B"],
    visible_bits: UInt32[Array, "*B T W"],
    before: Sequence[tuple[Array, Array]] | None = None,
    table: Table = None,
) -> tuple[Float[Array, "B T D"], list[tuple[Array, Array]]]:
    """Runs all decoder layers over T tree rows in one call; only where `runs_layers`.

    The result is that of running `Block` after `Block`.

    Args:
      weights: weights of each layer, by the names of a fused `Block`, projections in panels.
      cos, sin: tables of `rope_tables`.
      pages: keys and values of each layer's cache, [P K S H].
      visible_bits: ancestor words; bits number the rows `before` first, then the T rows.
      before: keys and values of earlier tree rows, [B K held H] for each layer.
      table: the pages of each sequence; None: slot b has page b.

    Returns:
      hidden states after the last layer, and each layer's keys and values of the T rows [B K T H].
    """
    run = BACKENDS.find(cfg.run.attention).operations["layers"]
    return run(cfg, weights, x, cos, sin, pages, prefix_len, visible_bits, before, table)


# --- training -------------------------------------------------------------------------------------


def causal_attention(q, k, v, segment_ids, context: Context | None = None, **options):
    """Computes `specjax.kernels.reference.causal_attention` by a kernel.

    Args:
      options: keywords of `causal_attention_with_own`.
    """
    return causal_attention_with_own(q, k, v, [], segment_ids, context, **options)


def causal_attention_with_own(
    q, k, v, own, segment_ids, context: Context | None = None, *,
    window: int | None = None, soft_cap: float | None = None, sinks: Array | None = None,
    kernel: str = "reference",
) -> Float[Array, "B N S H"]:  # fmt: skip
    """Computes `specjax.kernels.reference.causal_attention_with_own`.

    Args:
      context: how rows are split over devices.
      kernel: a name of the table, or a path.
    """
    options = _used(window=window, soft_cap=soft_cap)
    with_sinks = _used(sinks=sinks)
    used = {**options, **with_sinks}
    if context is not None:
        given = q, k, v, own, segment_ids, context
        return _serve("context_attention", kernel, lambda _, run: run(*given, **used), used)
    batch = ("batch", "heads", None, None)
    named = {name: (x, batch) for name, x in (("q", q), ("k", k), ("v", v))}
    named["own"] = (own, batch)
    named["segment_ids"] = (segment_ids, ("batch", None))
    named |= {name: (x, ("heads",)) for name, x in with_sinks.items()}

    def attend(backend: Backend, function: Callable):
        function = functools.partial(function, **options)
        return _on_each_device(backend, function, named, batch, q.shape[0], k.shape[1])

    return _serve("causal_attention", kernel, attend, used)


def _used(**options: Any) -> dict[str, Any]:
    """Returns the options that are not None: a backend need not know of the others."""
    return {name: value for name, value in options.items() if value is not None}


def _on_each_device(
    backend: Backend, attend: Callable, named: dict, out, batch: int, kv_heads: int
):
    """Calls `attend` on each device's shard, because the compiler cannot split a kernel.

    Args:
      named: name -> (array or tree of arrays, its logical axes).
      out: logical axes of the result.
      batch, kv_heads: sizes that are split; one that the mesh does not divide is computed whole on
        every device.
    """
    arrays = {name: x for name, (x, _) in named.items()}
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not backend.by_device:
        return attend(**arrays)
    sizes = {"batch": batch, "heads": kv_heads}
    split = {axis: sharding.spec_for(mesh, (axis,), (size,))[0] for axis, size in sizes.items()}

    def spec(axes):
        return jax.P(*(split.get(axis) for axis in axes))

    return jax.shard_map(
        lambda arrays: attend(**arrays),
        in_specs=({name: spec(axes) for name, (_, axes) in named.items()},),
        out_specs=tuple(map(spec, out)) if isinstance(out[0], tuple) else spec(out),
        check_vma=False,  # a kernel's outputs do not declare the axes that they vary over
    )(arrays)
