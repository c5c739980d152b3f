"""Weights in panels, and their products on CPU: what decoding multiplies there.

A weight `[K, N]` in panels is `[N / 16, K, 16]`; `cpu/product.h` says why, and `bench.cpu` measures
what it brings. A row's bits do not depend on how many rows it is multiplied with. Models ask the
shape of a weight which product it wants, and `RunConfig.products` says whether `to_decode_layout`
makes panels at all:

    name      decoding multiplies by
    xla       XLA
    panels    `dispatch.product`: one CPU device with a C++ compiler, float32, unrolled layers
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.config import ModelConfig
from specjax.config.checks import choice
from specjax.interfaces import Device
from specjax.kernels import dispatch
from specjax.kernels.backend import Unsuited
from specjax.kernels.dispatch import PANEL_WIDTH as WIDTH

ASKED = ("auto", "xla", "panels")

log = logging.getLogger(__name__)


def settle(
    cfg: ModelConfig, mesh: jax.sharding.Mesh | None, asked: str = "auto", whose: str = "products"
) -> ModelConfig:
    """The config with the products that decoding will run; logs a line that says which.

    Args:
      mesh: whose devices decide; None: the default device.
      asked: `auto`, panels wherever they can be had, or a name of the table above.
      whose: begins the line.

    Raises:
      ValueError: panels are asked for and cannot be had.
    """
    choice("products", asked, ASKED)
    if asked == "xla":
        return cfg.running(products="xla")
    reason = _not_for(cfg, dispatch.device_of(mesh))
    if reason is None:
        log.info("%s: panels, by specjax's own kernel", whose)
        return cfg.running(products="panels")
    if asked == "panels":
        raise ValueError(
            f"products 'panels' cannot be had: {reason}. Take 'xla', or 'auto', which takes panels "
            "where it can"
        )
    level = logging.INFO if isinstance(reason, Unsuited) else logging.WARNING
    log.log(level, "%s: XLA's, which take longer for a few rows on CPU: %s", whose, reason)
    return cfg.running(products="xla")


def _not_for(cfg: ModelConfig, device: Device) -> str | None:
    """Why panels are not for this model and these devices, or None."""
    if cfg.run.scan_layers:
        return Unsuited("layers are scanned, and panels are of unrolled ones")
    return dispatch.refuses("product", dispatch.offering("product"), device, cfg)


def pack(params: dict, names: Collection[str], dtype: str = "float32") -> dict:
    """Unrolled parameters of a model, or those of a head, with some of them in panels.

    Weights whose columns do not fill panels stay as they are, and XLA multiplies by them.

    Args:
      names: of the arrays that rows are multiplied with, see `specjax.models.rows.matrix_names`.
      dtype: of all arrays then.
    """

    def one(path, leaf):
        name = getattr(path[-1], "key", None)
        if name not in names or leaf.ndim != 2 or leaf.shape[1] % WIDTH:
            return leaf
        k, n = leaf.shape
        return leaf.reshape(k, n // WIDTH, WIDTH).transpose(1, 0, 2)

    params = jax.tree.map(lambda a: a.astype(jnp.dtype(dtype)), params)
    return jax.tree_util.tree_map_with_path(one, params)


def unpack(panels: Float[Array, "P K W"]) -> Float[Array, "K N"]:
    """The weight that the panels hold."""
    return panels.transpose(1, 0, 2).reshape(panels.shape[1], -1)
