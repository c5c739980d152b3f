"""Compares a GPU's attention kernel with the reference on the device itself, before it is used.

A kernel that compiles may still be wrong on a device that it was not tried on. So an engine on a
GPU chooses its kernel by `settle` here: it computes a few small calls of the model's own shapes,
and where a result differs, or a call fails, the kernel's `rest` takes its place, with a warning.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config import ModelConfig
from specjax.kernels import dispatch, reference
from specjax.kernels.backend import REFERENCE
from specjax.registry import BACKENDS

log = logging.getLogger(__name__)

PLATFORMS = ("gpu", "cuda", "rocm")  # whose kernels are checked
# Largest difference from the float32 reference by dtype, absolute and relative to the value.
TOLERANCE = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4}
SLOTS, PAGES = 4, 3  # of each call; pages are those of a slot


def settle(
    cfg: ModelConfig,
    mesh: jax.sharding.Mesh | None,
    asked: str = "auto",
    invariant: bool = False,
    whose: str = "attention",
    *,
    rows: int,
    page_size: int,
) -> ModelConfig:
    """Does what `dispatch.settle` does, and checks the kernel if its devices are GPUs of this host.

    Args:
      rows: the most rows of a tree.
      page_size: positions per page, before it is rounded up for the kernel.
    """
    cfg = dispatch.settle(cfg, mesh, asked, invariant, whose)
    device = _present(mesh)
    if device is None or device.platform not in PLATFORMS:
        return cfg
    asked, name = cfg.run.attention, cfg.run.attention
    while name != REFERENCE:
        if not dispatch.has("tree_attention", name):
            name = BACKENDS.find(name).rest
            continue
        reason = _refused(name, mesh, cfg) if name != asked else None
        reason = reason or why_wrong(cfg, name, rows, page_size, device, _ways(mesh))
        if reason is None:
            break
        name, last = BACKENDS.find(name).rest, name
        log.warning(
            "%s: not by %s, but by %s: %s; report this, with the versions of jax and of the driver",
            whose, last, name, reason,
        )  # fmt: skip
    return cfg.running(attention=name)


def _refused(name: str, mesh: jax.sharding.Mesh | None, cfg: ModelConfig) -> str | None:
    return dispatch.refuses("tree_attention", name, dispatch.device_of(mesh), cfg)


def _present(mesh: jax.sharding.Mesh | None) -> jax.Device | None:
    """The first device of a mesh that this process has; None: programs are only compiled for it."""
    wanted, local = dispatch.device_of(mesh), jax.local_devices()
    if mesh is not None:
        local = [a for a in mesh.devices.flat if any(a is b for b in local)]
    same = (d for d in local if (d.platform, d.device_kind) == (wanted.platform, wanted.kind))
    return next(same, None)


def _ways(mesh: jax.sharding.Mesh | None) -> int:
    return 1 if mesh is None else dict(mesh.shape).get("tp", 1)


class _Call(NamedTuple):
    """One call of `tree_attention`.

    Attributes:
      rows: number of rows that attend, the last ones of the tree.
      tree: number of rows of the tree.
      heads, kv_heads, size: numbers of heads on one device, and their size.
      window, soft_cap: as the layer has them.
    """

    rows: int
    tree: int
    heads: int
    kv_heads: int
    size: int
    window: int | None
    soft_cap: float | None

    def __str__(self) -> str:
        parts = [f"{self.rows} of {self.tree} rows", f"{self.heads} heads of {self.size}"]
        parts += [f"window {self.window}"] if self.window is not None else []
        parts += [f"soft-cap {self.soft_cap}"] if self.soft_cap is not None else []
        return ", ".join(parts)


def _calls(cfg: ModelConfig, rows: int, ways: int) -> Iterator[_Call]:
    """Plain decoding, a whole tree, and one row that sees earlier ones, as a draft step has it."""
    for mixer in cfg.mixers("attention"):
        split = ways if mixer.num_kv_heads % ways == 0 else 1  # else each device computes all heads
        sizes = mixer.num_heads // split, mixer.num_kv_heads // split, mixer.head_dim
        for some, tree in sorted({(1, 1), (rows, rows), (1, rows)}):
            yield _Call(some, tree, *sizes, mixer.window, mixer.soft_cap)


def why_wrong(
    cfg: ModelConfig,
    name: str,
    rows: int,
    page_size: int,
    device: jax.Device | None = None,
    ways: int = 1,
) -> str | None:
    """Returns how a kernel's results differ from the reference, or how it fails; None: it is right.

    Once per process, model and kernel; later calls return the same.

    Args:
      name: name of the kernel's backend.
      rows: the most rows of a tree.
      page_size: positions per page, before it is rounded up for the kernel.
      device: device to compute on; None: the default device.
      ways: number of devices that heads are split over.
    """
    multiple = dispatch.page_multiple(name)
    size = -(-page_size // multiple) * multiple
    calls = tuple(dict.fromkeys(_calls(cfg, rows, ways)))
    return _why_wrong(name, calls, size, cfg.run.compute_dtype, device)


@functools.lru_cache(maxsize=64)
def _why_wrong(
    name: str, calls: tuple[_Call, ...], page_size: int, dtype: str, device: jax.Device | None
) -> str | None:
    tolerance = TOLERANCE[dtype]

    def both(arrays):
        """The largest difference of each call, as a share of what is allowed; inf: not finite."""
        worst, precise = [], functools.partial(jax.default_matmul_precision, "highest")
        for call, given in zip(calls, arrays, strict=True):
            sees = {"window": call.window, "soft_cap": call.soft_cap}
            with precise() if dtype == "float32" else contextlib.nullcontext():  # as in programs
                got = dispatch.tree_attention(*given, **sees, kernel=name).astype(jnp.float32)
            exact = [x.astype(jnp.float32) if x.dtype == given[0].dtype else x for x in given]
            with precise():
                want = reference.tree_attention(*exact, **sees)
            share = jnp.abs(got - want) / (tolerance * (1 + jnp.abs(want)))
            worst.append(jnp.where(jnp.isfinite(got), share, jnp.inf).max())
        return jnp.stack(worst)

    try:
        with jax.default_device(device):
            shares = np.asarray(jax.jit(both)([_arrays(c, page_size, dtype) for c in calls]))
    except Exception as error:  # noqa: BLE001 (whatever it is, another kernel can run)
        line = str(error).strip().partition("\n")[0][:200]
        return f"it fails here: {type(error).__name__}: {line}"
    worst = int(shares.argmax())
    if shares[worst] <= 1:
        return None
    if np.isinf(shares[worst]):
        return f"its results are not finite here ({calls[worst]})"
    return (
        f"it is wrong here: it differs from the reference by {shares[worst]:.3g} times what "
        f"{dtype} allows ({calls[worst]})"
    )


def _arrays(call: _Call, page_size: int, dtype: str) -> tuple[np.ndarray, ...]:
    """Random arguments: pages in random order, and values after a prefix as large as before it."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))

    q = normal(SLOTS, call.heads, call.rows, call.size)
    tree = [normal(SLOTS, call.kv_heads, call.tree, call.size) for _ in range(2)]
    pages = [normal(1 + SLOTS * PAGES, call.kv_heads, page_size, call.size) for _ in range(2)]
    most = PAGES * page_size
    # All pages full, none, one page and a bit, nearly two.
    prefix = np.array([most, 0, page_size + 1, 2 * page_size - 1], np.int32)
    table = 1 + rng.permutation(SLOTS * PAGES).reshape(SLOTS, PAGES).astype(np.int32)
    visible = np.stack([_random_tree(rng, call.tree)[-call.rows :] for _ in range(SLOTS)])
    return q, *tree, *pages, prefix, _words(visible), table


def _random_tree(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Which rows each row of a random tree sees, itself included [rows rows]."""
    visible = np.eye(rows, dtype=bool)
    for row in range(1, rows):
        visible[row] |= visible[rng.integers(row)]
    return visible


def _words(visible: np.ndarray) -> np.ndarray:
    """Booleans [.. R] as uint32 words [.. W]: bit j % 32 of word j // 32 is column j."""
    columns = visible.shape[-1]
    room = [(0, 0)] * (visible.ndim - 1) + [(0, -columns % 32)]
    bits = np.pad(visible, room).reshape(*visible.shape[:-1], -1, 32)
    return (bits << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32)
