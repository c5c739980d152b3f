"""Weight matrices in any number format, and the functions that models multiply by them with.

In training a matrix is a plain array. In decoding it may be a `specjax.interfaces.Weight`:
`RunConfig.products` names the class, and `pack` converts the arrays whose `Param` rows mark them as
matrices or tables. Models call the functions here for every format.

    products                              format of matrices in decoding
    xla                                   arrays, multiplied in XLA
    panels                                `specjax.weights.panels`
    int8, fp8, fp8_block, mxfp4, int4     `specjax.weights.packed`

A map gives matrices different formats: of the patterns (`fnmatch`) that match a matrix's path, such
as `layers.3.down`, `layers.3.experts_gate`, `embed` or `lm_head`, the first decides, and without
one it stays an array. Patterns that begin with `draft.` are for the matrices of the draft.

Programs of models are traced inside `precision_of`, so that products of float32 are exact.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig
from specjax.interfaces import Device, Param, Params, Weight
from specjax.kernels import dispatch
from specjax.kernels.backend import Unsuited
from specjax.kernels.experts import by_blocks
from specjax.parallel import sharding
from specjax.registry import FORMATS, check_setting

Matrix = Array | Weight

PLAIN, AUTO = "xla", "auto"
ASKED = (AUTO, *FORMATS.names)
DRAFT = "draft."  # begins patterns for the draft
SUBLANES = 8  # rows of a TPU's vector register

Products = str | tuple[tuple[str, str], ...]  # a format, or pairs of a pattern and a format

log = logging.getLogger(__name__)


def check_products(asked: str | Mapping[str, str] | Products) -> Products:
    """Checks that formats are among `ASKED` or paths `module:attribute`; imports nothing.

    Args:
      asked: a format, or a map from patterns to formats, see the module text.

    Returns:
      the format, or the pairs of the map.

    Raises:
      ValueError: a name is neither.
    """
    if isinstance(asked, str):
        return check_setting("products", asked, ASKED)
    pairs = tuple(asked.items() if isinstance(asked, Mapping) else asked)
    return tuple((pattern, check_setting("products", name, ASKED[1:])) for pattern, name in pairs)


def format_of(products: Products, path: str) -> str:
    """Returns the name of the format of the matrix at a path, see the module text."""
    pairs = (("*", products),) if isinstance(products, str) else products
    return next((name for pattern, name in pairs if fnmatch.fnmatchcase(path, pattern)), PLAIN)


def kinds_of(products: Products) -> list[Any]:
    """Returns the classes of the formats that products name; `auto` names none."""
    names = [products] if isinstance(products, str) else [name for _, name in products]
    return [FORMATS.find(name) for name in names if name != AUTO]


def is_exact(products: Products) -> bool:
    """Returns whether no format of the products rounds a number."""
    return all(kind.exact for kind in kinds_of(products))


def of_draft(products: Products) -> Products:
    """Returns the products of the draft's matrices.

    A format that is named for the policy may refuse the draft, whose layers and dtype can differ,
    so without patterns of its own the draft's is chosen automatically.
    """
    if isinstance(products, str):
        return PLAIN if products == PLAIN else AUTO
    pairs = [(pattern, name) for pattern, name in products if pattern.startswith(DRAFT)]
    return tuple((pattern.removeprefix(DRAFT), name) for pattern, name in pairs) or AUTO


def require_matches(products: Products, rows: Mapping[Any, Any]) -> None:
    """Checks that each pattern matches a matrix; those of the draft are checked where it is packed.

    Args:
      rows: the `Param` rows, in nested dicts.

    Raises:
      ValueError: a pattern matches none.
    """

    def paths_of(rows: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
        for name, row in rows.items():
            if isinstance(row, Mapping):
                yield from paths_of(row, f"{prefix}{name}.")
            elif row.matrix or row.table:
                yield f"{prefix}{name}"

    paths = [*paths_of(rows)]
    for pattern, _ in () if isinstance(products, str) else products:
        if not pattern.startswith(DRAFT) and not fnmatch.filter(paths, pattern):
            raise ValueError(
                f"products: expected patterns that match paths of matrices, such as {paths[0]} or "
                f"{paths[-1]}, got {pattern!r}, which matches none"
            )


def is_array(matrix: Any) -> bool:
    """Returns whether a matrix is an array or the shape of one, rather than a `Weight`."""
    return isinstance(matrix, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


# --- products -------------------------------------------------------------------------------------


@contextlib.contextmanager
def precision_of(cfg: ModelConfig) -> Iterator[None]:
    """A context in which a program of a model is traced; also a decorator of the program.

    A model of float32 multiplies in float32. By default XLA rounds the factors on TPUs to bfloat16
    and on GPUs to TF32, which moves logits by a hundredth, so that tokens would depend on the
    number of rows. In other dtypes, and where jax's own setting `jax_default_matmul_precision`
    asks for a precision, nothing changes. The context also holds for what is differentiated in it.
    """
    wanted = "highest" if cfg.run.compute_dtype == "float32" else None
    if wanted is None or jax.config.jax_default_matmul_precision is not None:
        yield
    else:
        with jax.default_matmul_precision(wanted):
            yield


def dot(x: Float[Array, "... I"], matrix: Matrix, dtype: Any = None) -> Float[Array, "... O"]:
    """Computes `x @ matrix`; an array is cast to the dtype of `x` first.

    Args:
      dtype: dtype of the sums and of the result; None: that of `x`.
    """
    if not is_array(matrix):
        return matrix.dot(x).astype(x.dtype if dtype is None else dtype)
    matrix = matrix.astype(x.dtype)
    if _rows_of_a_device(x) == 1:
        one_row = functools.partial(_padded, dtype=dtype)
        plain = functools.partial(_product, dtype=dtype)
        return jax.lax.platform_dependent(x, matrix, tpu=one_row, default=plain)
    return _product(x, matrix, dtype)


def _product(x, matrix, dtype):
    if dtype is None:
        return _dot(x, matrix)
    return jnp.matmul(x, matrix, preferred_element_type=dtype)


def _rows_of_a_device(x: Float[Array, "... I"]) -> int:
    """Returns the number of rows on a device, if the first axis is the batch."""
    mesh, rows = jax.sharding.get_abstract_mesh(), math.prod(x.shape[:-1])
    ways = sharding.split_over(mesh, "batch", x.shape[0]) if x.ndim > 1 else ()
    return rows // math.prod(mesh.shape[axis] for axis in ways)


def _padded(x: Float[Array, "... I"], matrix: Float[Array, "I O"], dtype: Any):
    """Computes the product of one row a device as that of `SUBLANES` rows, the others being zero.

    The TPU compiler makes a sum of a product of one row: it does not use the matrix unit, takes
    about twice as long, and rounds every summand to the dtype of the result.
    """
    several = jnp.pad(x.reshape(-1, 1, x.shape[-1]), [(0, 0), (0, SUBLANES - 1), (0, 0)])
    if len(several) == 1:  # with an axis of one the compiler chooses slower windows
        several = several[0]
    return _product(several, matrix, dtype)[..., 0, :].reshape(*x.shape[:-1], -1)


@jax.custom_vjp
def _dot(x: Float[Array, "... I"], matrix: Float[Array, "I O"]) -> Float[Array, "... O"]:
    """Computes `x @ matrix`, with a backward pass of plain matrix products on CPU.

    On CPU, XLA contracts the two leading axes of the matrix's gradient in a slow loop; flattening
    them first makes a training step of a small model about 1.6 times faster. On other devices they
    are not flattened: if both are split over devices, the joined axis would have to be gathered.
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
    """Looks up rows of a matrix, for embeddings. Ids must be in range."""
    return jnp.take(matrix, ids, axis=0) if is_array(matrix) else matrix.rows(ids)


def experts(
    x: Float[Array, "M I"], stack: Matrix, sizes: Int[Array, " E"], kernel: str = "reference"
) -> Float[Array, "M O"]:
    """Multiplies rows that are sorted by their matrix of a stack [E I O], see `Choices`.

    Args:
      sizes: number of rows of each matrix; rows behind those are zero in the result.
      kernel: name of the backend, see `specjax.kernels.dispatch`.
    """
    if is_array(stack):
        return dispatch.experts(x, stack.astype(x.dtype), sizes, kernel=kernel)
    if hasattr(stack, "experts"):
        return stack.experts(x, sizes, kernel).astype(x.dtype)
    return by_blocks(x, stack, sizes, dot)


class Choices(NamedTuple):
    """Rows that each choose k of E matrices, sorted by what they choose.

    All is done by gathers, gradients too: sums of scattered rows would depend on the order in which
    a GPU adds them.

    Attributes:
      order: the pairs of a row and its choice, numbered row by row, in the order of the matrices.
      place: the place of each pair in that order.
      sizes: number of pairs of each matrix.
    """

    order: Int[Array, " rows*k"]
    place: Int[Array, "rows k"]
    sizes: Int[Array, " E"]

    @classmethod
    def of(cls, ids: Int[Array, "rows k"], count: int) -> Choices:
        """Sorts choices of `count` matrices; those outside of 0 .. count - 1 come last."""
        ids = jnp.where((ids >= 0) & (ids < count), ids, count)
        order = jnp.argsort(ids.reshape(-1), stable=True)
        sizes = (ids.reshape(-1, 1) == jnp.arange(count)).sum(0, dtype=jnp.int32)
        return cls(order, jnp.argsort(order).reshape(ids.shape), sizes)

    def sort(self, x: Float[Array, "rows D"]) -> Float[Array, "rows*k D"]:
        """Repeats each row for its choices, in the order of the matrices."""
        return _sort(x, self.order, self.place)

    def restore(self, y: Float[Array, "rows*k D"]) -> Float[Array, "rows k D"]:
        """Returns the results of sorted rows, row by row."""
        return _restore(y, self.order, self.place)


@jax.custom_vjp
def _sort(x, order, place):
    return x[order // place.shape[1]]


@jax.custom_vjp
def _restore(y, order, place):
    return y[place]


_sort.defvjp(lambda x, *of: (_sort(x, *of), of), lambda of, d: (d[of[1]].sum(1), None, None))
_restore.defvjp(
    lambda y, *of: (y[of[1]], of), lambda of, d: (d.reshape(-1, d.shape[-1])[of[0]], None, None)
)


def transposed(matrix: Matrix) -> Matrix:
    """Returns the transposed matrix [O I], for a language-model head that is the embedding."""
    return matrix.T if is_array(matrix) else Transposed(matrix)


def unpack(matrix: Matrix) -> Float[Array, "I O"]:
    """Returns the matrix as an array."""
    return matrix if is_array(matrix) else matrix.unpack()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed:
    """The transpose [O I] of a `Weight` [I O]."""

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


# --- formats --------------------------------------------------------------------------------------


class Plain:
    """The format of plain arrays, which has no `Weight`."""

    exact: ClassVar[bool] = True
    line: ClassVar[str] = "XLA's"

    @classmethod
    def refuses(cls, device: Device, cfg: ModelConfig) -> str | None:
        return None

    @classmethod
    def pack(cls, array: Float[Array, "I O"], table: bool) -> None:
        return None


def asked_of(cfg: ModelConfig, asked: Products) -> Products:
    """Returns the formats that are asked for: `auto` keeps those of a packed checkpoint."""
    packed_in_files = asked == AUTO and not isinstance(cfg.run.products, str)
    return cfg.run.products if packed_in_files else check_products(asked)


def settle(
    cfg: ModelConfig,
    mesh: jax.sharding.Mesh | None,
    asked: Products = AUTO,
    whose: str = "products",
) -> ModelConfig:
    """Returns the config with the format of matrices in decoding, and logs it.

    Args:
      mesh: mesh whose devices decide; None: the default device.
      asked: `auto`, for the first exact format of the table that can be used; a name; or a user's
        own `module:attribute`.
      whose: first word of the logged line.

    Raises:
      ValueError: the format that was asked for is unknown, or cannot be used.
    """
    device = dispatch.device_of(mesh)
    if (asked := asked_of(cfg, asked)) != AUTO:
        pairs = (("*", asked),) if isinstance(asked, str) else asked
        for pattern, name in pairs:
            kind = FORMATS.find(name)
            if not kind.exact:  # only whole matrices are packed
                cfg = cfg.running(fused=False)
            reason = kind.refuses(device, cfg)
            if reason is not None:
                raise ValueError(
                    f"products {name!r} cannot be used: {reason}. Choose 'xla', or 'auto', which "
                    "uses panels where possible"
                )
            if name != PLAIN:
                log.info("%s of %s: %s", whose, pattern, kind.line)
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


def pack(
    params: Params, of: Mapping[Any, Any], cfg: ModelConfig, prefixes: Sequence[str] = ("",)
) -> Params:
    """Converts the matrices of parameters to the formats of a settled config.

    Matrices that the format does not convert, and those that are already in a format, stay.

    Args:
      of: the `Param` row of each array, in the same nested dicts; for stacked arrays, the row of
        one of them.
      prefixes: what the path of each array begins with; of stacked arrays, for each layer.

    Raises:
      ValueError: layers that are stacked have different formats.
    """

    def one(array: Any, row: Param, path: str) -> Any:
        if not ((row.matrix or row.table) and is_array(array)):
            return array
        names = {format_of(cfg.run.products, prefix + path) for prefix in prefixes}
        if len(names) > 1:
            raise ValueError(
                f"expected one format for {path} of all layers that are scanned together, got "
                f"{', '.join(sorted(names))}; give them one, or set scan_layers to false"
            )
        return packed(array, *names, row.table, len(row.shape) > 2)

    def walk(node: Any, rows: Any, path: tuple) -> Any:
        if isinstance(node, Mapping):
            return {key: walk(value, rows[key], (*path, key)) for key, value in node.items()}
        return one(node, rows, ".".join(map(str, path)))

    return walk(params, of, ())


def packed(
    array: Float[Array, "*N I O"], name: str, table: bool = False, experts: bool = False
) -> Matrix:
    """Converts a matrix, or a stack of them, to a format; it may stay an array, see `Weight.pack`.

    Args:
      name: name of the format.
      table: see `Weight.pack`.
      experts: whether the last three axes are a stack for `experts`.
    """
    packing = lambda a: FORMATS.find(name).pack(a, table)  # noqa: E731
    if experts:
        packing = jax.vmap(packing)
    for _ in range(array.ndim - 2 - experts):  # of stacked layers, which XLA would hold in full
        packing = functools.partial(jax.lax.map, packing)
    weight = packing(array)
    if experts and hasattr(weight, "aligned"):
        weight = weight.aligned()
    return array if weight is None else weight


def cast(params: Params, dtype: str, fixed: Mapping[str, str] = MappingProxyType({})) -> Params:
    """Casts the arrays of parameters to a dtype; a `Weight` stays as it is.

    Args:
      fixed: dtypes of arrays, by their names, that have another one whatever the model's.
    """

    def one(path: tuple, leaf: Any) -> Any:
        kind = fixed.get(getattr(path[-1], "key", None), dtype)
        return leaf.astype(jnp.dtype(kind)) if is_array(leaf) else leaf

    return jax.tree_util.tree_map_with_path(
        one, params, is_leaf=lambda leaf: hasattr(leaf, "dot_t")
    )
