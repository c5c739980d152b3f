"""Matrices in panels of 16 columns, the layout of the C++ kernels for CPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig
from specjax.interfaces import Device
from specjax.kernels import dispatch
from specjax.kernels.backend import Unsuited
from specjax.kernels.reference import PANEL_WIDTH


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Panels:
    """A matrix [K, N] stored as [N / 16, K, 16], a `specjax.interfaces.Weight`.

    `cpu/product.h` says why, and `bench.decode kernels` measures the gain. A row's bits do not
    depend on the number of rows in the product.
    """

    exact: ClassVar[bool] = True
    line: ClassVar[str] = "panels, by specjax's own kernel"

    packed: Float[Array, "P K 16"]

    @classmethod
    def refuses(cls, device: Device, cfg: ModelConfig) -> str | None:
        """Returns why panels cannot be used, or None, see `Weight.refuses`.

        Panels need one CPU, a C++ compiler, float32 and unrolled, fused layers.
        """
        if cfg.run.scan_layers:
            return Unsuited("panels need unrolled layers, and these are scanned")
        if not cfg.run.fused:
            return Unsuited("panels need fused projections, and a mesh splits these one by one")
        return dispatch.refuses("product", dispatch.PANELS, device, cfg)

    @classmethod
    def pack(cls, array: Float[Array, "K N"], table: bool) -> Panels | None:
        """Packs a matrix; None: its columns do not fill panels, or its rows are looked up."""
        k, n = array.shape
        if table or n % PANEL_WIDTH:
            return None
        return cls(array.reshape(k, n // PANEL_WIDTH, PANEL_WIDTH).transpose(1, 0, 2))

    @property
    def shape(self) -> tuple[int, ...]:
        *stack, panels, k, width = self.packed.shape
        return *stack, k, panels * width

    def part_axes(self, axes: tuple[str | None, ...]) -> Panels:
        *stack, k, n = axes
        return Panels((*stack, n, k, None))

    def unpack(self) -> Float[Array, "*E K N"]:
        return self.packed.swapaxes(-3, -2).reshape(self.shape)

    def dot(self, x: Float[Array, "... K"]) -> Float[Array, "... N"]:
        """Computes `x @ matrix` in float32, each sum in the order of K."""
        return dispatch.product(x, self.packed)

    def dot_t(self, x: Float[Array, "... N"]) -> Float[Array, "... K"]:
        return x @ self.unpack().T

    def rows(self, ids: Int[Array, "..."]) -> Float[Array, "... N"]:
        rows = self.packed[:, ids].transpose(*range(1, ids.ndim + 1), 0, -1)
        return rows.reshape(*ids.shape, self.shape[1])


def raw(matrices: Mapping[str, Array | Panels]) -> dict[str, Array]:
    """Returns arrays by name as `dispatch.layers` takes them; for `Panels`, the packed array."""
    return {n: m.packed if isinstance(m, Panels) else m for n, m in matrices.items()}
