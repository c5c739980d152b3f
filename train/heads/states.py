"""Hidden states of the policy for `train.draft`: computed for each update, or kept for later ones.

A micro-batch has the same states in every pass, for the policy does not change. What is kept has
the dtype and the bits of what was computed, so a head does not depend on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from specjax.command_line import ConfigError
from specjax.models.transformer import Params

KEY = "key"  # file that says of what run the states are


def weights_digest(params: Params) -> str:
    """A digest of the names, shapes, dtypes and bits of all weights.

    It says whether states on disk are of these weights. Files of weights may be copied or written
    again under their old name, and an update may leave any single array as it was.
    """
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        found.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        found.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
    return found.hexdigest()


class _Kept(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype
    data: np.ndarray | Path


class States:
    """The states of micro-batches by number.

    Args:
      compute: function that computes the states [R S N] of a micro-batch.
      most: bytes that are kept at most; 0 keeps none.
      directory: directory that they are kept in; None: in memory.
      key: text that is the same for the same policy, samples, and arithmetic. States in the
        directory with another key are removed.

    Attributes:
      computed: number of micro-batches whose states were computed.
      bytes: bytes that are kept.

    Raises:
      ConfigError: the directory holds other files.
    """

    def __init__(
        self,
        compute: Callable[[dict[str, Array]], Float[Array, "R S N"]],
        most: int = 0,
        directory: str | Path | None = None,
        key: str = "",
    ):
        self._compute, self._most, self._kept = compute, most, {}
        self._directory = None if directory is None or not most else Path(directory)
        self.computed = self.bytes = 0
        if self._directory is not None:
            self._open(key)

    def _open(self, key: str) -> None:
        folder = self._directory
        folder.mkdir(parents=True, exist_ok=True)
        file, names = folder / KEY, {path.name for path in folder.iterdir()}
        if not file.exists() and names:
            raise ConfigError(
                f"cache_dir={folder}: expected an empty directory, or one with states of an "
                f"earlier run, got one that holds {min(names)}; name another"
            )
        if not file.exists() or file.read_text() != key:
            for name in names:
                (folder / name).unlink()
            file.write_text(key)

    def __call__(self, number: int, batch: dict[str, Array]) -> Float[Array, "R S N"]:
        """Returns the states of micro-batch `number`, which is `batch`."""
        kept = self._kept.get(number) or self._found(number, batch)
        if kept is not None:
            data = kept.data
            if isinstance(data, Path):
                data = np.fromfile(data, np.uint8).view(kept.dtype).reshape(kept.shape)
            return jax.device_put(data)
        self.computed += 1
        states = self._compute(batch)
        if self.bytes + states.nbytes <= self._most:
            self._keep(number, np.asarray(states))
        return states

    def _file(self, number: int) -> Path:
        return self._directory / f"{number:06d}.states"

    def _found(self, number: int, batch: dict[str, Array]) -> _Kept | None:
        """The states in the directory that an earlier start of the run wrote."""
        if self._directory is None or not self._file(number).exists():
            return None
        shape = jax.eval_shape(self._compute, batch)
        size = shape.size * shape.dtype.itemsize
        file = self._file(number)
        if file.stat().st_size != size or self.bytes + size > self._most:
            return None
        self.bytes += size
        self._kept[number] = _Kept(shape.shape, shape.dtype, file)
        return self._kept[number]

    def _keep(self, number: int, states: np.ndarray) -> None:
        data = states
        if self._directory is not None:
            data = self._file(number)
            partial = data.with_suffix(".partial")
            np.ascontiguousarray(states).view(np.uint8).tofile(partial)
            partial.replace(data)
        self.bytes += states.nbytes
        self._kept[number] = _Kept(states.shape, states.dtype, data)
