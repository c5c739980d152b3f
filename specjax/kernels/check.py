"""Compares a GPU's attention kernel with the reference on the device itself, before it is used.

A kernel that compiles may still be wrong on a device that it was not tried on. So an engine on a
GPU chooses its kernel by `settle` here, and a trainer by `settle_training`: they compute a few
small calls of the model's own shapes, and where a result differs, or a call fails, the kernel's
`rest` takes its place, with a warning. Of training, gradients are compared, too.

That nothing was wrong is kept in the user's cache directory (`Verdict`), so that later starts on
the machine compare nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jaxtyping import Array

from specjax.config import ModelConfig
from specjax.error_text import first_line
from specjax.kernels import dispatch, reference
from specjax.kernels.backend import REFERENCE
from specjax.kernels.names import GPUS
from specjax.kernels.triton_lowering import OutOfMemory, is_out_of_memory
from specjax.parallel import sharding
from specjax.registry import BACKENDS
from specjax.shipped import cache_dir

log = logging.getLogger(__name__)

# Largest difference from the float32 reference by dtype, as a share of a row's size and a value's.
TOLERANCE = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4}
# The reference is computed once: choosing its algorithms by measuring them takes longer.
UNTUNED = {"xla_gpu_autotune_level": 0}
SLOTS, POSITIONS = 4, 8192  # of each call; positions of the longest prefix
PIECE_SLOTS, PIECE_PAGES = 2, 3  # of a piece of a prompt; pages of its longest prefix
SCORE = 12  # of keys that decide; others have scores of about 1
DRIVER = Path("/proc/driver/nvidia/version")


class Verdict:
    """What an earlier check found on this machine: a file that exists where nothing was wrong.

    It lies in the user's cache directory, and its name is a digest of all that decides the result.
    Without a home directory nothing is kept.

    Args:
      device: the device that computes.
      facts: what is computed, besides the versions of jax, of the driver and of XLA's flags.
    """

    def __init__(self, device: jax.Device, *facts: object):
        driver = DRIVER.read_text() if DRIVER.exists() else ""
        versions = jax.__version__, jaxlib.__version__, device.client.platform_version, driver
        flags = os.environ.get("XLA_FLAGS", "")
        digest = hashlib.sha256(repr((device.device_kind, versions, flags, facts)).encode())
        folder = cache_dir()
        self._file = folder and folder / "checks" / digest.hexdigest()

    @property
    def is_right(self) -> bool:
        return self._file is not None and self._file.exists()

    def keep(self) -> None:
        """Keeps that nothing was wrong."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # then the next start checks again
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.touch()


def settle(
    cfg: ModelConfig,
    mesh: jax.sharding.Mesh | None,
    asked: str = "auto",
    invariant: bool = False,
    whose: str = "attention",
    *,
    rows: int,
    page_size: int,
    width: int = 1,
) -> ModelConfig:
    """Does what `dispatch.settle` does, and checks the kernel if its devices are GPUs of this host.

    All processes of the mesh must call it, and get the same kernel.

    Args:
      rows: the most rows of a tree.
      page_size: positions per page, before it is rounded up for the kernel.
      width: the most positions of a piece of a prompt.
    """
    cfg = dispatch.settle(cfg, mesh, asked, invariant, whose)

    def wrong(name: str, device: jax.Device) -> str | None:
        return why_wrong(cfg, name, rows, page_size, device, _ways(mesh), width)

    return _right(cfg, mesh, "tree_attention", wrong, whose)


def settle_training(
    cfg: ModelConfig, mesh: jax.sharding.Mesh | None, asked: str = "auto", whose: str = "attention"
) -> ModelConfig:
    """Does what `dispatch.settle` does for training, and checks the kernel as `settle` does."""
    cfg = dispatch.settle(cfg, mesh, asked, whose=whose, decoding=False)

    def wrong(name: str, device: jax.Device) -> str | None:
        return why_wrong_in_training(cfg, name, device, _ways(mesh))

    return _right(cfg, mesh, "causal_attention", wrong, whose)


def _right(
    cfg: ModelConfig,
    mesh: jax.sharding.Mesh | None,
    operation: str,
    wrong: Callable[[str, jax.Device], str | None],
    whose: str,
) -> ModelConfig:
    """Returns the config with the first kernel, from the chosen one on, that is not wrong."""
    device = _present(mesh)
    if device is None or device.platform not in GPUS:
        return cfg

    def offering(name: str) -> str:
        """The first from a backend on, by `rest`, that has the operation."""
        while not dispatch.has(operation, name):
            name = BACKENDS.find(name).rest
        return name

    asked = cfg.run.attention
    name = offering(asked)
    while name != REFERENCE:
        reason = None
        if name != asked:
            reason = dispatch.refuses(operation, name, dispatch.device_of(mesh), cfg)
        reason = reason or wrong(name, device)
        # Processes that share a program must run the same one.
        if not sharding.any_host(mesh, reason is not None):
            break
        reason = reason or "it is wrong on a device of another process"
        name, last = offering(BACKENDS.find(name).rest), name
        log.warning(
            "%s: not by %s, but by %s: %s; report this, with the versions of jax and of the driver",
            whose, last, name, reason,
        )  # fmt: skip
    return cfg.running(attention=name)


def _present(mesh: jax.sharding.Mesh | None) -> jax.Device | None:
    """This process's first device of a mesh's kind, so that replicas check once for all.

    None: the process has no device of the mesh, and programs are only compiled for it.
    """
    wanted, local = dispatch.device_of(mesh), jax.local_devices()
    if mesh is not None and not any(a is b for a in mesh.devices.flat for b in local):
        return None
    same = (d for d in local if (d.platform, d.device_kind) == (wanted.platform, wanted.kind))
    return next(same, None)


def _ways(mesh: jax.sharding.Mesh | None) -> int:
    return 1 if mesh is None else dict(mesh.shape).get("tp", 1)


def _rounded(page_size: int, kernel: str) -> int:
    """Rounds a page size up to a multiple that a kernel takes."""
    multiple = BACKENDS.find(kernel).page_multiple
    return -(-page_size // multiple) * multiple


class _Call(NamedTuple):
    """One call of `tree_attention` or `causal_attention`.

    Attributes:
      heads, kv_heads, size: numbers of heads on one device, and their size.
      window, soft_cap: as the layer has them.
      rows: number of rows that attend, the last ones of the tree; 0: a packed row of training.
      tree: number of rows of the tree.
      piece: whether it is a piece of a prompt, each of whose rows sees all rows before it.
    """

    heads: int
    kv_heads: int
    size: int
    window: int | None
    soft_cap: float | None
    rows: int = 0
    tree: int = 0
    piece: bool = False

    @property
    def options(self) -> dict[str, float | None]:
        return {"window": self.window, "soft_cap": self.soft_cap}


def _layers(cfg: ModelConfig, ways: int) -> tuple[_Call, ...]:
    """Returns heads and window of each kind of attention layer, on one of `ways` devices."""
    kinds = []
    for mixer in cfg.mixers("attention"):
        split = ways if mixer.num_kv_heads % ways == 0 else 1  # else each device computes all heads
        heads = mixer.num_heads // split, mixer.num_kv_heads // split
        kinds.append(_Call(*heads, mixer.head_dim, mixer.window, mixer.soft_cap))
    return tuple(dict.fromkeys(kinds))


def _calls(cfg: ModelConfig, rows: int, ways: int, width: int) -> Iterator[_Call]:
    """Yields plain decoding, a whole tree, one row that sees earlier ones, a piece of a prompt.

    A draft step has one row that sees earlier ones.
    """
    for layer in _layers(cfg, ways):
        for some, tree in sorted({(1, 1), (rows, rows), (1, rows)}):
            yield layer._replace(rows=some, tree=tree)
        if width > 1:
            yield layer._replace(rows=width, tree=width, piece=True)


def why_wrong(
    cfg: ModelConfig,
    name: str,
    rows: int,
    page_size: int,
    device: jax.Device | None = None,
    ways: int = 1,
    width: int = 1,
) -> str | None:
    """Returns how a kernel's results differ from the reference, or how it fails; None: it is right.

    Args:
      name: name of the kernel's backend.
      rows: the most rows of a tree.
      page_size: positions per page, before it is rounded up for the kernel.
      device: device to compute on; None: the default device.
      ways: number of devices that heads are split over.
      width: the most positions of a piece of a prompt.
    """
    size = _rounded(page_size, name)
    calls = tuple(_calls(cfg, rows, ways, width))
    return _verdict(name, _compare_trees, name, calls, size, cfg.run.compute_dtype, device)


def _verdict(name: str, wrong: Callable[..., str | None], *args) -> str | None:
    """Returns what `wrong(*args)` finds, unless it found nothing at an earlier start.

    Args:
      name: name of the kernel.
      args: hashable arguments, of which the last is the device.
    """
    try:
        return _remembered(name, wrong, *args)
    except OutOfMemory as error:  # it says nothing of the kernel, and the next engine may have more
        log.warning("%s is used, but was not compared with the reference: %s", name, error)
        return None


@functools.lru_cache(maxsize=64)
def _remembered(name: str, wrong: Callable[..., str | None], *args) -> str | None:
    *what, device = args
    device = device or jax.devices()[0]
    verdict = Verdict(device, _sources(), wrong.__name__, what)
    is_ours = name in BACKENDS  # the code of others may change unnoticed
    if is_ours and verdict.is_right:
        return None
    reason = wrong(*what, device)
    if is_ours and reason is None:
        verdict.keep()
    return reason


@functools.cache
def _sources() -> str:
    """Returns a digest of the files of all kernels."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _compare_trees(
    name: str, calls: tuple[_Call, ...], page_size: int, dtype: str, device: jax.Device
) -> str | None:
    tolerance = TOLERANCE[dtype]

    def both(arrays):
        """The largest difference of each call, as a share of what is allowed; inf: not finite."""
        worst, precise = [], functools.partial(jax.default_matmul_precision, "highest")
        for call, given in zip(calls, arrays, strict=True):
            attend = functools.partial(dispatch.tree_attention, **call.options)
            with precise() if dtype == "float32" else contextlib.nullcontext():  # as in programs
                got = attend(*given, kernel=name).astype(jnp.float32)
            exact = [x.astype(jnp.float32) if x.dtype == given[0].dtype else x for x in given]
            with precise():
                want = attend(*exact, kernel=REFERENCE)
            worst.append(_share(got, want, tolerance))
        return jnp.stack(worst)

    return _told(both, [_arrays(c, page_size, dtype) for c in calls], calls, dtype, device)


def _share(got: Array, want: Array, tolerance: float) -> Array:
    """The largest difference as a share of what is allowed; inf: a result is not finite.

    What is allowed follows the size of a row's results, which are small where many keys share the
    weight. Rows that see a marked key are NaN, and must be.
    """
    size = jnp.sqrt((want * want).mean(-1, keepdims=True)) + jnp.abs(want)
    share = jnp.where(jnp.isfinite(got), jnp.abs(got - want) / (tolerance * size), jnp.inf)
    return jnp.where(jnp.isnan(want), jnp.where(jnp.isnan(got), 0, jnp.inf), share).max()


def _told(
    both: Callable, arrays: Sequence, calls: Sequence, dtype: str, device: jax.Device
) -> str | None:
    """Says what is wrong by the shares of `both(arrays)`, one per call; None: nothing."""
    try:
        with jax.default_device(device):
            shares = np.asarray(jax.jit(both, compiler_options=UNTUNED)(arrays))
    except Exception as error:  # noqa: BLE001 (whatever it is, another kernel can run)
        if is_out_of_memory(error):
            raise OutOfMemory(first_line(error)) from error
        return f"it fails here: {first_line(error)}"
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
    """Arguments in which a mistake about one position changes a result.

    All queries point to a direction of their key/value head. So do a few keys, which thus share the
    weight: one of every 64 positions, those at the ends of a prefix, of the window and of a chunk,
    and, to be left out, those behind a prefix and of page 0, which is in the table there. A key
    behind a prefix is marked, and one of the tree that one row sees at most.
    """
    rng, kind = np.random.default_rng(0), jnp.dtype(dtype)
    slots, pages = (PIECE_SLOTS, PIECE_PAGES) if call.piece else (SLOTS, POSITIONS // page_size)
    most = min(max(pages, 1) * page_size, POSITIONS)
    # All pages full, none; and of trees one page and a bit, more than half of them.
    prefix = np.array([most, 0, min(page_size + 1, most // 2), most * 5 // 8 - 1], np.int32)
    prefix = prefix[:slots]
    held = -(-prefix // page_size)
    table = np.zeros((slots, held.max() + 1), np.int32)
    table[np.arange(held.max() + 1) < held[:, None]] = 1 + rng.permutation(held.sum())
    ways = rng.choice(np.float32([-1, 1]), (call.kv_heads, call.size))
    strong = ways * (SCORE / call.size**0.5)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    def tiled(*shape):  # large ones repeat numbers, after an odd number of them
        return np.resize(normal(min(int(np.prod(shape)), 2**20 + 7)).astype(kind), shape)

    q = np.repeat(ways, call.heads // call.kv_heads, 0)[:, None]
    q = (q + 0.5 * normal(slots, call.heads, call.rows, call.size)).astype(kind)
    k_tree, v_tree = (normal(slots, call.kv_heads, call.tree, call.size) for _ in range(2))
    decides = rng.random(call.tree) < 64 / call.tree
    k_tree[:, :, decides] = strong[:, None] + 0.3 * k_tree[:, :, decides]
    k_pages, v_pages = (
        tiled(1 + held.sum(), call.kv_heads, page_size, call.size) for _ in range(2)
    )
    k_pages[0] = strong[:, None]
    for slot, length in enumerate(prefix):
        if not length:
            continue
        at = np.concatenate([_deciding(rng, length, call.window), [length, length + 1]])
        at = at[at < held[slot] * page_size]
        found = strong + 0.3 * normal(len(at), call.kv_heads, call.size)
        k_pages[table[slot, at // page_size], :, at % page_size] = found
        if length + 1 in at:
            page, offset = table[slot, (length + 1) // page_size], (length + 1) % page_size
            k_pages[page, :, offset], v_pages[page, :, offset] = np.nan, 0
    one = np.tri(call.tree, dtype=bool) if call.piece else None
    visible = [one if call.piece else _random_tree(rng, call.tree) for _ in range(slots)]
    visible = np.stack(visible)[:, -call.rows :]
    seen_by = visible[0].sum(0)
    if seen_by.min() < min(call.rows, 2):  # else all rows see all keys
        k_tree[0, :, seen_by.argmin()], v_tree[0, :, seen_by.argmin()] = np.nan, 0
    tree = k_tree.astype(kind), v_tree.astype(kind)
    return q, *tree, k_pages, v_pages, prefix, reference.pack_bits(visible), table


def _deciding(rng: np.random.Generator, length: int, window: int | None) -> np.ndarray:
    """Positions of a prefix whose keys decide, each once."""
    starts = np.arange(0, length, 64)
    at = [
        starts + rng.integers(64, size=len(starts)),
        [0, 1, 255, 256, 257, length - 2, length - 1],
    ]
    if window is not None:
        at.append(length - window + np.arange(-2, 9))  # what rows of the first depths see last
    at = np.unique(np.concatenate(at))
    return at[(at >= 0) & (at < length)]


def _random_tree(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Which rows each row of a random tree sees, itself included [rows rows]."""
    visible = np.eye(rows, dtype=bool)
    for row in range(1, rows):
        visible[row] |= visible[rng.integers(row)]
    return visible


# --- training -------------------------------------------------------------------------------------

LENGTH = 448  # tokens of a packed row: several tiles, and no multiple of one
SEGMENTS = (130, 1, 190, 64)  # lengths of the samples of a row; the rest is padding


def why_wrong_in_training(
    cfg: ModelConfig, name: str, device: jax.Device | None = None, ways: int = 1
) -> str | None:
    """Does what `why_wrong` does, for a packed row and its gradients."""
    dtype = cfg.run.compute_dtype
    return _verdict(name, _compare_packed, name, _layers(cfg, ways), dtype, device)


def _compare_packed(
    name: str, calls: tuple[_Call, ...], dtype: str, device: jax.Device
) -> str | None:
    def differ(got: Array, want: Array) -> Array:
        """Does what `_share` does; gradients of short samples are sums that cancel out."""
        share = jnp.abs(got - want) / (TOLERANCE[dtype] * (1 + jnp.abs(want)))
        return jnp.where(jnp.isfinite(got), share, jnp.inf).max()

    ids = np.repeat(np.arange(1, len(SEGMENTS) + 1), SEGMENTS)
    ids = np.pad(ids, (0, LENGTH - len(ids)))[None].astype(np.int32)

    def both(arrays):
        worst = []
        for call, (given, d_out) in zip(calls, arrays, strict=True):

            def results(q, k, v, kernel, call=call, d_out=d_out):
                attend = functools.partial(dispatch.causal_attention, **call.options)
                out, pull = jax.vjp(lambda *x: attend(*x, ids, kernel=kernel), q, k, v)
                return [x.astype(jnp.float32) for x in (out, *pull(d_out.astype(out.dtype)))]

            precise = functools.partial(jax.default_matmul_precision, "highest")
            with precise() if dtype == "float32" else contextlib.nullcontext():
                got = results(*given, name)
            with precise():
                want = results(*(x.astype(jnp.float32) for x in given), REFERENCE)
            worst.append(jnp.stack([differ(*pair) for pair in zip(got, want, strict=True)]).max())
        return jnp.stack(worst)

    rng = np.random.default_rng(0)

    def normal(heads: int, size: int):
        shape = 1, heads, LENGTH, size
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))

    arrays = []
    for call in calls:
        given = [normal(n, call.size) for n in (call.heads, call.kv_heads, call.kv_heads)]
        arrays.append((given, normal(call.heads, call.size)))
    return _told(both, arrays, calls, dtype, device)
