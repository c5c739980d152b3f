"""Matrices of 8 and 4 bits a weight, of which decoding reads the packed bytes.

The weights that share a scale are each a packed value times it. Activations are not quantised.

    format      values                      a scale for each                   bits a weight
    int8        -127 .. 127                 output                             8
    fp8         float8_e4m3fn               output                             8
    fp8_block   float8_e4m3fn               128 inputs x 128 outputs           8.25
    mxfp4       float4_e2m1fn               32 inputs of an output             4.25
    int4        -7 .. 7                     32 inputs of an output             4.5

The scale is the largest magnitude over the largest value. In `mxfp4` it is a power of two with the
exponent floor(log2(largest magnitude)) - 2: packing the weights of an MXFP4 file returns the same
weights (OCP Microscaling Formats 1.0, section 6.3). An embedding is packed as the language-model
head that it may be: its inputs are the columns.

XLA writes a matrix to memory in full before it multiplies: on GPUs always, on TPUs where inputs
have several scales. There few rows are multiplied by kernels. Under a mesh only experts have
kernels. A table with several scales in a row is multiplied a part at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig
from specjax.interfaces import Device
from specjax.kernels import experts_gpu, experts_tpu
from specjax.kernels.backend import REFERENCE, Declined
from specjax.kernels.experts import by_blocks
from specjax.kernels.tiles import BYTE_ROWS
from specjax.weights.matrix import dot

GROUP, SQUARE = 32, 128  # inputs of one scale in formats of 4 bits and in `fp8_block`
PART = 2048  # rows of a table that are unpacked at once


def _static() -> Any:
    return dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Packed:
    """A matrix [I O], a `specjax.interfaces.Weight`; each format is a class of its own.

    Attributes:
      values: the packed values [I O]. Two of four bits share a byte [I/2 O]: the low bits are the
        first half of the inputs, and the high bits the second half.
      scales: the scales [G O] of groups of inputs, [2 G/2 O] where bytes are shared.
      group: number of inputs of a group; 0: all.
      table: whether the matrix is a table: its inputs are then the last axis of both arrays.
      of_group, outputs: number of inputs and outputs of one scale (class attributes); 0: all.
      largest: the largest value (a class attribute).
      halves: whether two values share a byte (a class attribute).
    """

    exact: ClassVar[bool] = False
    line: ClassVar[str]
    largest: ClassVar[float]
    of_group: ClassVar[int] = 0
    outputs: ClassVar[int] = 1
    halves: ClassVar[bool] = False

    values: Array
    scales: Array
    group: int = _static()
    table: bool = _static()

    # --- of subclasses ---------------------------------------------------------------------------

    @classmethod
    def scale_of(cls, most: Float[Array, "..."]) -> Array:
        """Returns scales, as they are kept, of weights by their largest magnitude."""
        return _ratio(most, cls.largest)

    @classmethod
    def encoded(cls, x: Float[Array, "..."]) -> Array:
        """Rounds weights that are divided by their scale to values, one in each number."""
        raise NotImplementedError

    @classmethod
    def decoded(cls, values: Array) -> Float[Array, "..."]:
        """Returns values as float32."""
        return values.astype(jnp.float32)

    @classmethod
    def factor(cls, scales: Array) -> Float[Array, "..."]:
        """Returns scales as float32."""
        return scales.astype(jnp.float32)

    # --- as any weight ---------------------------------------------------------------------------

    @classmethod
    def refuses(cls, device: Device, cfg: ModelConfig) -> str | None:
        """Returns None: all devices multiply by packed weights."""

    @classmethod
    def pack(cls, array: Float[Array, "I O"], table: bool) -> Packed:
        """See `Weight.pack`.

        Raises:
          ValueError: the inputs cannot be halved between groups.
        """
        axis = 1 if table else 0
        inputs, group = array.shape[axis], cls.of_group
        if cls.halves and inputs % (2 * group):
            raise ValueError(
                f"{cls.line.split(',')[0]} halves a matrix between groups of {group} inputs, got "
                f"{inputs} inputs of {list(array.shape)}; give this matrix another format, or 'xla'"
            )
        x = array.astype(jnp.float32)
        most = _of_groups(jnp.abs(x), group, axis)
        if cls.outputs > 1:
            squares = _of_groups(most, cls.outputs, 1 - axis)
            most = _spread(squares, cls.outputs, 1 - axis, most.shape[1 - axis])
        scales = cls.scale_of(most)
        values = cls.encoded(x / _spread(cls.factor(scales), group, axis, inputs))
        if cls.halves:
            low, high = jnp.split(values, 2, axis=axis)
            values = low | (high << 4)
            scales = jnp.stack(jnp.split(scales, 2, axis=axis), axis)
        return cls(values, scales, group, table)

    @property
    def shape(self) -> tuple[int, ...]:
        *stack, rows, columns = self.values.shape
        times = 2 if self.halves else 1
        return (*stack, rows, times * columns) if self.table else (*stack, times * rows, columns)

    @property
    def _axis(self) -> int:
        """The axis of inputs."""
        return -1 if self.table else -2

    def part_axes(self, axes: tuple[str | None, ...]) -> Packed:
        *stack, rows, columns = axes
        size = self.shape[self._axis]
        groups = self.scales.shape[self._axis] * self.group * (2 if self.halves else 1)
        has_other_groups = self.group and groups != size  # incomplete, or of `aligned`
        inputs = None if has_other_groups else axes[self._axis]
        groups = (None, inputs) if self.halves else (inputs if self.group else None,)
        values, scales = (inputs, columns), (*groups, columns)
        if self.table:
            values, scales = (rows, inputs), (rows, *groups)
        return dataclasses.replace(self, values=(*stack, *values), scales=(*stack, *scales))

    def _parts(self) -> Iterator[Float[Array, "*E I O"]]:
        """Yields the weights of each half of the inputs, or of all, in float32."""
        if not self.halves:
            yield self._scaled(self.values, self.scales)
            return
        for half in range(2):
            scales = jnp.take(self.scales, half, axis=self._axis - 1)
            yield self._scaled((self.values >> (4 * half)) & 15, scales)

    def _scaled(self, values: Array, scales: Array) -> Float[Array, "*E I O"]:
        axis, factor = self._axis, self.factor(scales)
        return self.decoded(values) * _spread(factor, self.group, axis, values.shape[axis])

    def unpack(self, dtype: Any = jnp.float32) -> Float[Array, "*E I O"]:
        return jnp.concatenate([part.astype(dtype) for part in self._parts()], self._axis)

    def dot(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """Computes `x @ matrix` in sums of float32, which are the result."""
        if self.table:
            return dot(x, self.unpack(x.dtype), jnp.float32)
        if not jax.sharding.get_abstract_mesh().empty:  # XLA can split no kernel
            return self._in_xla(x)

        def in_xla(rows: Array, sizes: Array, stack: Packed) -> Array:
            return self._in_xla(rows)

        rows = x.reshape(-1, x.shape[-1])
        stack = jax.tree.map(lambda part: part[None], self)
        sizes, several = jnp.array([len(rows)]), bool(self.group)
        sums = _by_kernel(rows, sizes, stack, jnp.float32, in_xla, on_tpu=several)
        return sums.reshape(*x.shape[:-1], -1)

    def dot_t(self, x: Float[Array, "... O"]) -> Float[Array, "... I"]:
        """Computes `x @ matrix.T`, likewise."""
        if not self.table:
            return dot(x, self.unpack(x.dtype).T, jnp.float32)
        if not self.group:
            sums = dot(x, self.decoded(self.values).astype(x.dtype).T, jnp.float32)
            return sums * self.factor(self.scales)[..., 0]
        if not jax.sharding.get_abstract_mesh().empty:  # which splits the rows
            return self._by_halves(x)
        count, size = self.shape[0], min(PART, self.shape[0])

        def add_part(number: Array, sums: Array) -> Array:
            first = jnp.minimum(number * size, count - size)
            part = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, size), self)
            return jax.lax.dynamic_update_slice_in_dim(sums, part._by_halves(x), first, -1)

        sums = jnp.zeros((*x.shape[:-1], count), jnp.float32)
        return jax.lax.fori_loop(0, -(-count // size), add_part, sums)

    def experts(
        self, x: Float[Array, "M I"], sizes: Int[Array, " E"], kernel: str
    ) -> Float[Array, "M O"]:
        """See `Weight`; on one of the devices of a mesh if there are several."""

        def blocks(x: Array, sizes: Array, weight: Packed) -> Array:
            return by_blocks(x, weight, sizes, lambda rows, one: one._in_xla(rows).astype(x.dtype))

        if kernel == REFERENCE:
            return blocks(x, sizes, self)
        return _by_kernel(x, sizes, self, x.dtype, blocks)

    def _in_xla(self, x: Array) -> Array:
        if not self.group:
            sums = dot(x, self.decoded(self.values).astype(x.dtype), jnp.float32)
            return sums * self.factor(self.scales)[..., 0, :]
        return self._by_halves(x)

    def _by_halves(self, x: Array) -> Array:
        """Multiplies halves of the inputs, which a mesh splits like their bytes."""
        parts = [part.astype(x.dtype) for part in self._parts()]
        halves = zip(jnp.split(x, len(parts), axis=-1), parts, strict=True)
        return sum([dot(x, part.T if self.table else part, jnp.float32) for x, part in halves])

    def aligned(self) -> Packed:
        """Fills up the scales of a stack to whole tiles of TPUs, unless they grow much.

        TPUs otherwise store another axis than that of groups in tiles, and the kernel, which reads
        one matrix, would get a copy of all scales.
        """
        *rest, groups, _ = self.scales.shape
        more = -groups % (BYTE_ROWS // self.scales.dtype.itemsize) if self.group else 0
        parts = 2 if self.halves else 1
        if 8 * parts * more * self.scales.dtype.itemsize > self.values.shape[-2]:
            return self
        padding = [(0, 0)] * len(rest) + [(0, more), (0, 0)]
        return dataclasses.replace(self, scales=jnp.pad(self.scales, padding))

    # --- in kernels ------------------------------------------------------------------------------

    def unpacked(
        self, codes: Array, factors: Sequence[Array] | None = None
    ) -> list[Float[Array, "R O"]]:
        """Unpacks bytes in a kernel: the weights in float32 of their inputs in each half, or all.

        Args:
          codes: rows of bytes that are in one group.
          factors: float32 scales [1 O] of that group in each half; None: they are left out.
        """
        codes = codes.astype(jnp.int32)
        parts = [*map(self.decoded, (codes & 15, codes >> 4) if self.halves else (codes,))]
        if factors is None:
            return parts
        return [part * scale for part, scale in zip(parts, factors, strict=True)]

    def rows(self, ids: Int[Array, "..."]) -> Float[Array, "... O"]:
        """See `Weight.rows`; only for a matrix that was packed as a table."""
        flat = ids.reshape(-1)
        rows = dataclasses.replace(self, values=self.values[flat], scales=self.scales[flat])
        return rows.unpack().reshape(*ids.shape, -1)


def _by_kernel(
    x: Array,
    sizes: Array,
    stack: Packed,
    dtype: Any,
    in_xla: Callable[..., Array],
    on_tpu: bool = True,
) -> Float[Array, "M O"]:
    """Multiplies rows by a stack with the platform's kernel, if it has one, or by `in_xla`.

    Args:
      dtype: dtype of the result.
      on_tpu: whether the kernel for TPUs is used.
    """

    def by(kernel: Callable[..., Array]) -> Callable[..., Array]:
        def run(x: Array, sizes: Array, stack: Packed) -> Array:
            try:
                return kernel(x, stack, sizes, dtype)
            except Declined:
                return in_xla(x, sizes, stack)

        return run

    kernels = {"cuda": by(experts_gpu.multiply_packed)} | (
        {"tpu": by(experts_tpu.multiply_packed)} if on_tpu else {}
    )
    return jax.lax.platform_dependent(x, sizes, stack, **kernels, default=in_xla)


def _of_groups(x: Float[Array, "A B"], size: int, axis: int) -> Float[Array, "A B"]:
    """Returns the maximum of each group; the last one may be incomplete."""
    size = size or x.shape[axis]
    count = -(-x.shape[axis] // size)
    padding = [(0, 0), (0, 0)]
    padding[axis] = (0, count * size - x.shape[axis])
    shape = list(x.shape)
    shape[axis : axis + 1] = count, size
    groups = jnp.pad(x, padding).reshape(shape)
    # On CPU the maximum passes over NaN.
    return jnp.where(jnp.isnan(groups).any(axis + 1), jnp.nan, groups.max(axis + 1))


def _spread(x: Float[Array, "..."], size: int, axis: int, count: int) -> Float[Array, "..."]:
    """Repeats what groups have for each of `count` members; one that all have is not repeated."""
    if not size:
        return x
    x = jnp.repeat(x, size, axis=axis)
    return x if x.shape[axis] == count else jnp.take(x, jnp.arange(count), axis=axis)


def _float_of(codes: Array, exponent: int, mantissa: int) -> Float[Array, "..."]:
    """Returns the numbers of small floats without infinities, by their bits; kernels take it."""
    codes, bias = codes.astype(jnp.int32), (1 << (exponent - 1)) - 1
    size = codes & ((1 << (exponent + mantissa)) - 1)
    bits = (size << (23 - mantissa)) + ((127 - bias) << 23)
    number = jax.lax.bitcast_convert_type(bits, jnp.float32)
    number = jnp.minimum(number, 2 * number - 2.0 ** (1 - bias))  # the subnormal ones
    return jnp.where(size == codes, number, -number)


def _ratio(most: Float[Array, "..."], largest: float) -> Float[Array, "..."]:
    """Returns scales; 1 where they would be numbers that devices take for zero."""
    scale = most / largest
    return jnp.where(scale < jnp.finfo(scale.dtype).tiny, 1.0, scale)  # a NaN stays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8(Packed):
    """Integers of 8 bits, a scale for each output."""

    line: ClassVar[str] = "int8, a scale per output"
    largest: ClassVar[float] = 127.0

    @classmethod
    def encoded(cls, x: Float[Array, "..."]) -> Array:
        return jnp.round(x).astype(jnp.int8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8(Packed):
    """float8_e4m3fn, a scale for each output."""

    line: ClassVar[str] = "fp8 (e4m3), a scale per output"
    largest: ClassVar[float] = 448.0

    @classmethod
    def encoded(cls, x: Float[Array, "..."]) -> Array:
        return jnp.clip(x, -cls.largest, cls.largest).astype(jnp.float8_e4m3fn)

    @classmethod
    def decoded(cls, values: Array) -> Float[Array, "..."]:
        if values.dtype == jnp.float8_e4m3fn:
            return values.astype(jnp.float32)
        return jnp.where(values & 127 == 127, jnp.nan, _float_of(values, 4, 3))

    def unpacked(
        self, codes: Array, factors: Sequence[Array] | None = None
    ) -> list[Float[Array, "R O"]]:
        # Few TPUs and GPUs convert fp8.
        return super().unpacked(jax.lax.bitcast_convert_type(codes, jnp.uint8), factors)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Block(Fp8):
    """float8_e4m3fn, a scale for each square, as DeepSeek and Qwen publish weights."""

    line: ClassVar[str] = f"fp8_block (e4m3), a scale per {SQUARE} inputs and outputs"
    of_group: ClassVar[int] = SQUARE
    outputs: ClassVar[int] = SQUARE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4(Packed):
    """Integers of 4 bits, a scale of bfloat16 for every 32 inputs."""

    line: ClassVar[str] = f"int4, a scale per {GROUP} inputs"
    largest: ClassVar[float] = 7.0
    of_group: ClassVar[int] = GROUP
    halves: ClassVar[bool] = True

    @classmethod
    def scale_of(cls, most: Float[Array, "..."]) -> Array:
        return super().scale_of(most).astype(jnp.bfloat16)

    @classmethod
    def encoded(cls, x: Float[Array, "..."]) -> Array:
        signed = jnp.clip(jnp.round(x), -cls.largest, cls.largest).astype(jnp.int8)
        return signed.astype(jnp.uint8) & 15

    @classmethod
    def decoded(cls, values: Array) -> Float[Array, "..."]:
        return ((values.astype(jnp.int32) ^ 8) - 8).astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mxfp4(Packed):
    """float4_e2m1fn, a power of two for every 32 inputs (OCP Microscaling Formats 1.0)."""

    line: ClassVar[str] = f"mxfp4, a power of two per {GROUP} inputs"
    largest: ClassVar[float] = 6.0
    of_group: ClassVar[int] = GROUP
    halves: ClassVar[bool] = True

    @classmethod
    def scale_of(cls, most: Float[Array, "..."]) -> Array:
        _, exponent = jnp.frexp(most)  # of a mantissa from 1/2, so one more than floor(log2)
        scales = jnp.where(most == 0, 127, jnp.clip(exponent - 3 + 127, 1, 254))
        return jnp.where(jnp.isfinite(most), scales, 255).astype(jnp.uint8)  # 255 is not finite

    @classmethod
    def factor(cls, scales: Array) -> Float[Array, "..."]:
        return jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)

    @classmethod
    def encoded(cls, x: Float[Array, "..."]) -> Array:
        # Codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; of halves the even code is the nearest.
        size = jnp.fmin(jnp.abs(x), cls.largest)  # of NaN 6, by a scale that is not finite
        coarse = jnp.where(size < 4, jnp.round(size) + 2, jnp.round(size / 2) + 4)
        code = jnp.where(size < 2, jnp.round(2 * size), coarse).astype(jnp.uint8)
        return code | jnp.where(jnp.signbit(x), 8, 0).astype(jnp.uint8)

    @classmethod
    def decoded(cls, values: Array) -> Float[Array, "..."]:
        return _float_of(values, 2, 1)
