"""Operations that have kernels, under one signature each, and which backend serves them.

Models and the decode loop never name a kernel: `RunConfig.attention` does. `settle` fills it in
once, where engines and trainers are built and their devices are known. A name is a row of the table
`specjax.registry.BACKENDS`, or a user's own path `module:attribute`; what lies there is a
`specjax.interfaces.Backend`:

    tree_attention      rows of a tree, or of a piece of a prompt, over a paged prefix
    causal_attention    packed rows, in training; with rows of later steps beside them, too
    commit              new keys and values written to their pages
    product             rows times a weight that lies in panels
    layers              whole decoder layers, of `Attention` and `Dense` and nothing derived from
                        them, in one call

An operation that a backend does not have is served by the one that it names as its `rest`, and so
is a call that it declines, which is logged once. The reference serves all but `layers`; where
`runs_layers` is False a model runs its layers one by one.

Under a mesh (`sharding.ambient`) every device attends to its own heads and rows of the batch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from specjax.config import ModelConfig
from specjax.interfaces import Backend, Device, Table
from specjax.kernels import context_parallel
from specjax.kernels.backend import Declined, Unsuited, choose
from specjax.kernels.reference import PANEL_WIDTH, tree_attention_by_position
from specjax.parallel import sharding
from specjax.parallel.context import Context
from specjax.registry import BACKENDS

__all__ = [
    "PANEL_WIDTH",
    "causal_attention",
    "causal_attention_with_own",
    "commit",
    "device_of",
    "environment",
    "layers",
    "offering",
    "page_multiple",
    "product",
    "refuses",
    "runs_layers",
    "settle",
    "tree_attention",
    "tree_attention_by_position",
]

log = logging.getLogger(__name__)

# What `layers` computes, as the classes that define it. A class derived from one of them has its
# fields and perhaps its `kind`, and may compute something else.
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
    """The config with the kernel that its programs will run; logs a line that says which.

    Args:
      mesh: whose devices decide; they need not be there (a topology). None: the default device.
      asked: `auto`, a name, or a path (see `specjax.kernels.backend`).
      invariant: rounds attend by position. whose: begins the line. decoding: and not training.

    Raises:
      ValueError: the kernel that is asked for cannot be used.
    """
    platform, kind, devices = device_of(mesh)
    choice = choose(platform, kind, cfg, asked, invariant, devices, decoding)
    log.log(logging.WARNING if choice.warn else logging.INFO, "%s: %s", whose, choice.line)
    return cfg.running(attention=choice.name)


def device_of(mesh: jax.sharding.Mesh | None) -> Device:
    """The `Device` that the programs of a mesh are compiled for; None: the default device."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return Device(device.platform, device.device_kind, 1 if mesh is None else mesh.size)


def refuses(operation: str, name: str, device: Device | None, cfg: ModelConfig) -> str | None:
    """Why a backend cannot be used for an operation of a model on a device, or None.

    An `Unsuited` (`specjax.kernels.backend`) is a reason that needs no warning.

    Args:
      name: of the backend, or its path.
      device: see `device_of`; None: only the model is in question.
    """
    backend = BACKENDS.find(name)
    if operation not in backend.operations:
        return f"{name} has no {operation}"
    if operation == "layers" and (others := _others_than(_LAYERS, cfg)):
        return Unsuited(f"layers are computed of {' and '.join(_LAYERS)}, got {', '.join(others)}")
    return backend.refuses(operation, device, cfg)


def _others_than(known: Collection[str], cfg: ModelConfig) -> list[str]:
    """The classes of a model's mixers and mlps, as `module:attribute`, that are not among some."""
    kinds = {type(part) for layer in cfg.layers for part in (layer.mixer, layer.mlp)}
    return sorted({f"{kind.__module__}:{kind.__qualname__}" for kind in kinds} - set(known))


def offering(operation: str) -> str:
    """The first name in the table whose backend has an operation of its own, after the reference.

    Raises:
      ValueError: there is none.
    """
    for name in BACKENDS.names[1:]:
        if operation in BACKENDS.find(name).operations:
            return name
    raise ValueError(f"no kernel backend of {', '.join(BACKENDS.names[1:])} has {operation}")


def page_multiple(kernel: str) -> int:
    """The number of positions that a kernel's pages must be a multiple of."""
    return BACKENDS.find(kernel).page_multiple


def environment() -> tuple[str, ...]:
    """Variables of the environment that change what kernels of the table compute."""
    return tuple(
        variable for name in BACKENDS.names for variable in BACKENDS.find(name).environment
    )


def _serve(operation: str, kernel: str, call: Callable[[Backend, Callable], object]):
    """`call(backend, function)` of the first that serves it: `kernel`, its `rest`, and so on."""
    asked = [kernel]
    while True:
        backend = BACKENDS.find(kernel)
        if operation in backend.operations:
            try:
                return call(backend, backend.operations[operation])
            except Declined as reason:
                _log_declined(kernel, operation, str(reason), backend.rest)
        kernel = backend.rest
        if kernel in asked:
            raise ValueError(
                f"no kernel backend serves {operation}: {', '.join(asked)} name each other as "
                "their rest; the last of them must be 'reference'"
            )
        asked.append(kernel)


@functools.cache  # once per process, not once per layer
def _log_declined(kernel: str, operation: str, reason: str, rest: str) -> None:
    log.info("%s by %s, not by %s: %s", operation, rest, kernel, reason)


# --- decoding -------------------------------------------------------------------------------------


def tree_attention(
    q: Float[Array, "B N T H"],
    k_tree: Float[Array, "B K T2 H"],
    v_tree: Float[Array, "B K T2 H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    prefix_len: Int[Array, " B"],
    visible_bits: UInt32[Array, "*B T W"],
    table: Table = None,
    *,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    with_lse: bool = False,
    kernel: str = "reference",
) -> Float[Array, "B N T H"] | tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """Tree attention as `specjax.kernels.reference.tree_attention` defines it, by a kernel.

    Args:
      kernel: a name of the table, or a path.
    """
    options = {"window": window, "with_lse": with_lse}
    batch, heads = ("batch", "heads", None, None), (None, "heads", None, None)
    bits = jnp.asarray(visible_bits)
    named = {
        "q": (q, batch),
        "k_tree": (k_tree, batch),
        "v_tree": (v_tree, batch),
        # Without a table page b is slot b's.
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

    return _serve("tree_attention", kernel, attend)


def commit(
    arrays: Sequence[Float[Array, "*L P K S H"]],
    rows: Sequence[Float[Array, "*L B K R H"]],
    start: Int[Array, " B"],
    table: Table = None,
    *,
    run: int = 1,
    kernel: str = "reference",
) -> list[Array]:
    """Pages after R consecutive rows of each sequence are written to them.

    Args:
      arrays, rows: of each layer's keys and values, or of all layers' stacked; P, K, S and H are
        the same throughout.
      start: where each sequence's first row goes.
      run: every `run` rows, counted from `start`, are sure to lie in one page.
      kernel: a name of the table, or a path.
    """

    def write(_: Backend, function: Callable):
        return function(arrays, rows, start, table, run=run)

    return _serve("commit", kernel, write)


def product(
    x: Float[Array, "... K"], panels: Float[Array, "P K W"], *, kernel: str | None = None
) -> Float[Array, "... N"]:
    """`x @ weight`, in float32, of a weight [K, N] that lies in panels of W columns each.

    Args:
      panels: `weight.reshape(K, N // W, W).transpose(1, 0, 2)`; W is `PANEL_WIDTH`.
      kernel: None: `offering("product")`.

    Raises:
      ValueError: the shapes do not fit.
    """
    _, k, width = panels.shape
    if x.shape[-1] != k or width != PANEL_WIDTH:
        raise ValueError(
            f"expected x [.. {k}] and panels [P {k} {PANEL_WIDTH}], got {x.shape} and "
            f"{panels.shape}"
        )
    kernel = offering("product") if kernel is None else kernel
    return _serve("product", kernel, lambda _, function: function(x, panels))


def runs_layers(cfg: ModelConfig) -> bool:
    """Whether the kernel of a settled config runs the model's layers by `layers`."""
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
    """Decoder layers over T tree rows, as `Block` has them one by one, where `runs_layers`.

    Args:
      weights: of each layer, by the names of a fused `Block`, its projections in panels.
      cos, sin: see `rope_tables`.
      pages: keys and values of each layer's cache, [P K S H].
      visible_bits: numbers the rows `before` first, then the T rows themselves.
      before: keys and values of earlier tree rows, [B K held H] of each layer.
      table: the pages of each sequence; None: slot b has page b.

    Returns:
      states behind the last layer, and each layer's keys and values of the T rows [B K T H].
    """
    run = BACKENDS.find(cfg.run.attention).operations["layers"]
    return run(cfg, weights, x, cos, sin, pages, prefix_len, visible_bits, before, table)


# --- training -------------------------------------------------------------------------------------


def causal_attention(
    q: Float[Array, "B N S H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    segment_ids: Int[Array, "B S"],
    context: Context | None = None,
    *,
    window: int | None = None,
    kernel: str = "reference",
) -> Float[Array, "B N S H"]:
    """Causal attention as `specjax.kernels.reference.causal_attention` defines it, by a kernel.

    Args:
      context: how rows are split over devices; these attend in XLA, whatever the kernel.
      kernel: a name of the table, or a path.
    """
    if context is not None:
        return context_parallel.causal_attention(q, k, v, segment_ids, context, window=window)
    return _causal(q, k, v, [], segment_ids, window, kernel)


def causal_attention_with_own(
    q: Float[Array, "B N S H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    own: list[tuple[Array, Array]],
    segment_ids: Int[Array, "B S"],
    context: Context | None = None,
    *,
    window: int | None = None,
    kernel: str = "reference",
) -> Float[Array, "B N S H"]:
    """The same beside rows of later steps, see `reference.causal_attention_with_own`."""
    if context is not None:
        return context_parallel.causal_attention_with_own(
            q, k, v, own, segment_ids, context, window=window
        )
    return _causal(q, k, v, own, segment_ids, window, kernel)


def _causal(q, k, v, own, segment_ids, window: int | None, kernel: str):
    batch = ("batch", "heads", None, None)
    named = {name: (x, batch) for name, x in (("q", q), ("k", k), ("v", v))}
    named["own"] = (own, batch)
    named["segment_ids"] = (segment_ids, ("batch", None))

    def attend(backend: Backend, function: Callable):
        function = functools.partial(function, window=window)
        return _on_each_device(backend, function, named, batch, q.shape[0], k.shape[1])

    return _serve("causal_attention", kernel, attend)


def _on_each_device(
    backend: Backend, attend: Callable, named: dict, out, batch: int, kv_heads: int
):
    """Calls `attend` on each device's share; the compiler cannot split a kernel by itself.

    Args:
      named: name -> (array or tree of arrays, its logical axes). out: logical axes of the result.
      batch, kv_heads: where these do not divide by the mesh, every device does the whole.
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
        check_vma=False,  # a kernel's outputs do not say over which axes they vary
    )(arrays)
