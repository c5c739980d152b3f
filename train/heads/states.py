"""Hidden states of the policy for `train.draft`: computed for each update, or kept for later ones.

A micro-batch has the same states in every pass, for the policy does not change. What is kept has
the dtype and the bits of what was computed, so a head does not depend on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float

from specjax.command_line import ConfigError
from specjax.models.transformer import Params
from train.run.files import replace

KEY = "key"  # file that says which run the states are of


def weights_digest(params: Params) -> str:
    """Digests the names, shapes, dtypes and bits of all weights.

    It says whether states on disk are of these weights. Files of weights may be copied or written
    again under their old name, and an update may leave any single array as it was.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
    return digest.hexdigest()


class States:
    """The states of micro-batches by number.

    Args:
      compute: function that computes the states [R S N] of a micro-batch.
      most: bytes that are kept at most; 0 keeps none.
      directory: directory that they are kept in; None: in memory.
      key: text that is the same for the same policy, samples, and arithmetic. States in the
        directory with another key are removed.

    Attributes:
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
        self._compute, self._most, self.bytes = compute, most, 0
        self._kept: dict[int, np.ndarray | Path] = {}
        self._directory = None if directory is None or not most else Path(directory)
        if self._directory is not None:
            self._open(self._directory, key)

    def _open(self, folder: Path, key: str) -> None:
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
        file = self._directory and self._directory / f"{number:06d}.states"
        if file is not None and (number in self._kept or file.exists()):
            shape = jax.eval_shape(self._compute, batch)
            size = shape.size * shape.dtype.itemsize
            if number in self._kept or self._has_room(size):
                self._kept[number] = file
                return jax.device_put(
                    np.fromfile(file, np.uint8).view(shape.dtype).reshape(shape.shape)
                )
        if number in self._kept:
            return jax.device_put(self._kept[number])
        states = self._compute(batch)
        if self._has_room(states.nbytes):
            self._kept[number] = np.asarray(states)
            if file is not None:
                replace(file, [np.ascontiguousarray(states).view(np.uint8).tobytes()])
                self._kept[number] = file
        return states

    def _has_room(self, size: int) -> bool:
        """Takes the bytes of states that are kept, if there is room for them."""
        fits = self.bytes + size <= self._most
        self.bytes += size * fits
        return fits
