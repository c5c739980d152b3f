"""Matrices that rows of activations are multiplied with, in any number format.

A plain array is a matrix, and what training has. Decoding may hold matrices as something else that
multiplies like one, a `specjax.interfaces.Weight`: `RunConfig.products` names the class, and `pack`
makes its objects of the arrays whose `Param` rows say that they are matrices. Models multiply by
the functions here and never ask what a matrix is.

    products   decoding multiplies by
    xla        arrays, in XLA
    panels     `specjax.weights.panels`
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig
from specjax.interfaces import Device, Param, Params, Weight
from specjax.kernels import dispatch
from specjax.kernels.backend import Unsuited
from specjax.registry import FORMATS, check_setting

Matrix = Array | Weight

PLAIN, AUTO = "xla", "auto"
ASKED = (AUTO, *FORMATS.names)

log = logging.getLogger(__name__)


def check_products(name: str) -> str:
    """Checks that a name is one of `ASKED` or a path `module:attribute`; imports nothing.

    Raises:
      ValueError: it is neither.
    """
    return check_setting("products", name, ASKED)


def is_array(matrix: Any) -> bool:
    """Whether a matrix is an array, or the shape of one, rather than a `Weight`."""
    return isinstance(matrix, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


# --- products -------------------------------------------------------------------------------------


def dot(x: Float[Array, "... I"], matrix: Matrix, dtype: Any = None) -> Float[Array, "... O"]:
    """`x @ matrix`; an array is cast to the dtype of `x` first.

    Args:
      dtype: of the result, and of the sums in it; None: that of `x`.
    """
    if not is_array(matrix):
        return matrix.dot(x).astype(x.dtype if dtype is None else dtype)
    matrix = matrix.astype(x.dtype)
    if dtype is None:
        return _dot(x, matrix)
    return jnp.matmul(x, matrix, preferred_element_type=dtype)


@jax.custom_vjp
def _dot(x: Float[Array, "... I"], matrix: Float[Array, "I O"]) -> Float[Array, "... O"]:
    """`x @ matrix`, with a backward pass whose products are plain matrix products on CPU.

    There XLA contracts the two leading axes of the matrix's gradient in a slow loop; flattening
    them first makes a training step of a small model about 1.6 times faster. Elsewhere they stay
    apart: where both are split over devices, an axis made of the two would have to be gathered.
    """
    return x @ matrix


def _dot_bwd(residuals, d_out):
    x, matrix = residuals

    def flat(x, d_out):
        flat_out = d_out.reshape(-1, d_out.shape[-1])
        return (flat_out @ matrix.T).reshape(x.shape), x.reshape(-1, x.shape[-1]).T @ flat_out

    def apart(x, d_out):
        return d_out @ matrix.T, jnp.einsum("...i,...o->io", x, d_out)

    return jax.lax.platform_dependent(x, d_out, cpu=flat, default=apart)


_dot.defvjp(lambda x, matrix: (x @ matrix, (x, matrix)), _dot_bwd)


def rows(matrix: Matrix, ids: Int[Array, "..."]) -> Float[Array, "... O"]:
    """Rows of a matrix: embeddings. Ids must be in range."""
    return jnp.take(matrix, ids, axis=0) if is_array(matrix) else matrix.rows(ids)


def experts(
    x: Float[Array, "B T I"], stack: Matrix, ids: Int[Array, "B T E"]
) -> Float[Array, "B T E O"]:
    """Multiplies each row by the matrices that it chooses of a stack [N I O].

    Where each of the E has a row of its own, as what comes out here has, these are rows of their
    own: x [B T*E I] and ids [B T*E 1].

    Every row is multiplied with every matrix, and what it does not choose is dropped: N / E times
    the arithmetic that is needed, but each product is that of `dot`, whose bits do not depend on
    what other rows choose. A `Weight` may have an `experts` of its own.

    Args:
      ids: from 0 to N - 1; elsewhere the result is 0.
    """
    if hasattr(stack, "experts"):
        return stack.experts(x, ids).astype(x.dtype)
    count, *_, width = stack.shape

    def one(found, step):
        number, matrix = step
        return jnp.where((ids == number)[..., None], dot(x, matrix)[..., None, :], found), None

    start = jnp.zeros((*ids.shape, width), x.dtype)
    return jax.lax.scan(one, start, (jnp.arange(count), stack))[0]


def transposed(matrix: Matrix) -> Matrix:
    """The matrix [O I]: a language-model head that is the embedding."""
    return matrix.T if is_array(matrix) else Transposed(matrix)


def unpack(matrix: Matrix) -> Float[Array, "I O"]:
    """The matrix as an array."""
    return matrix if is_array(matrix) else matrix.unpack()


def join(matrices: Sequence[Matrix]) -> Matrix:
    """Joins matrices of equally many rows side by side, of any formats."""
    if all(is_array(matrix) for matrix in matrices):
        return jnp.concatenate(list(matrices), axis=-1)
    return Joined(tuple(matrices))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed:
    """A `Weight` [I O] as the matrix [O I]."""

    of: Any

    @property
    def shape(self) -> tuple[int, ...]:
        *stack, rows, columns = self.of.shape
        return *stack, columns, rows

    def unpack(self) -> Float[Array, "*N O I"]:
        return self.of.unpack().swapaxes(-2, -1)

    def dot(self, x: Float[Array, "... O"]) -> Float[Array, "... I"]:
        return self.of.dot_t(x)

    def dot_t(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        return self.of.dot(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Joined:
    """Matrices of several formats side by side."""

    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.parts[0].shape[:-1], sum(part.shape[-1] for part in self.parts)

    def unpack(self) -> Float[Array, "*N I O"]:
        return jnp.concatenate([unpack(part) for part in self.parts], axis=-1)

    def dot(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        return jnp.concatenate([dot(x, part) for part in self.parts], axis=-1)

    def dot_t(self, x: Float[Array, "... O"]) -> Float[Array, "... I"]:
        ends = np.cumsum([part.shape[-1] for part in self.parts])[:-1]
        pieces = jnp.split(x, ends, axis=-1)
        return sum(dot(p, transposed(m)) for p, m in zip(pieces, self.parts, strict=True))

    def rows(self, ids: Int[Array, "..."]) -> Float[Array, "... O"]:
        return jnp.concatenate([rows(part, ids) for part in self.parts], axis=-1)


# --- formats --------------------------------------------------------------------------------------


class Plain:
    """Plain arrays, as a format; there is no `Weight` of it."""

    exact: ClassVar[bool] = True
    line: ClassVar[str] = "XLA's"

    @classmethod
    def refuses(cls, device: Device, cfg: ModelConfig) -> str | None:
        return None

    @classmethod
    def pack(cls, array: Float[Array, "I O"], table: bool) -> None:
        return None


def settle(
    cfg: ModelConfig,
    mesh: jax.sharding.Mesh | None,
    asked: str = AUTO,
    whose: str = "products",
) -> ModelConfig:
    """The config with the format that decoding will multiply by; logs a line that says which.

    Args:
      mesh: whose devices decide; None: the default device.
      asked: `auto`, the first exact format of the table that can be had; a name; or a user's own
        `module:attribute`.
      whose: begins the line.

    Raises:
      ValueError: the format that is asked for is not known, or cannot be had.
    """
    device = dispatch.device_of(mesh)
    if check_products(asked) != AUTO:
        reason = FORMATS.find(asked).refuses(device, cfg)
        if reason is not None:
            raise ValueError(
                f"products {asked!r} cannot be had: {reason}. Take 'xla', or 'auto', which takes "
                "panels where it can"
            )
        if asked != PLAIN:
            log.info("%s: %s", whose, FORMATS.find(asked).line)
        return cfg.running(products=asked)
    for name in FORMATS.names:
        kind = FORMATS.named(name)
        if name == PLAIN or not kind.exact:
            continue
        reason = kind.refuses(device, cfg)
        if reason is None:
            log.info("%s: %s", whose, kind.line)
            return cfg.running(products=name)
        level = logging.INFO if isinstance(reason, Unsuited) else logging.WARNING
        log.log(level, "%s: XLA's, which take longer for a few rows on CPU: %s", whose, reason)
    return cfg.running(products=PLAIN)


def pack(params: Params, of: Mapping[Any, Any], cfg: ModelConfig) -> Params:
    """Parameters with their matrices in the format of a settled config.

    Matrices that the format leaves alone, and those that are in some format already, stay.

    Args:
      of: the `Param` row of each array, in the same nested dicts; of arrays that are stacked, the
        row of one of them.
    """
    kind = FORMATS.find(cfg.run.products)

    def one(array: Any, row: Param) -> Any:
        if not ((row.matrix or row.table) and is_array(array)):
            return array
        packing = lambda a: kind.pack(a, row.table)  # noqa: E731
        for _ in range(array.ndim - 2):  # of layers that are stacked, and of experts
            packing = jax.vmap(packing)
        packed = packing(array)
        return array if packed is None else packed

    def walk(node: Any, rows: Any) -> Any:
        if isinstance(node, Mapping):
            return {key: walk(value, rows[key]) for key, value in node.items()}
        return one(node, rows)

    return walk(params, of)


def cast(params: Params, dtype: str) -> Params:
    """Parameters with their arrays in a dtype; what is in a format of its own stays."""

    def one(leaf: Any) -> Any:
        return leaf.astype(jnp.dtype(dtype)) if is_array(leaf) else leaf

    return jax.tree.map(one, params, is_leaf=lambda leaf: hasattr(leaf, "dot_t"))
