"""The gated feed-forward network of Llama and of most models since (GLU, arXiv 2002.05202)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.interfaces import Fused, Param, Params, Stored, Where
from specjax.weights.matrix import dot

# By their names in config.json.
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


@dataclasses.dataclass(frozen=True)
class Dense:
    """`down(act(gate(x)) * up(x))`, a `specjax.interfaces.Mlp`.

    Where decoding fuses projections, gate and up are side by side in `gate_up`.

    Attributes:
      intermediate_size: width F of the hidden layer.
      activation: the function `act`, a name in `ACTIVATIONS`.
    """

    kind: ClassVar[str] = "dense"

    intermediate_size: int
    activation: str = "silu"

    def params(self, width: int) -> dict[str, Param]:
        """Returns the rows of its arrays, in the order of random initialisation."""

        def project(name: str, order: int) -> Param:
            return Param(
                (width, self.intermediate_size), ("embed", "mlp"),
                Stored(f"mlp.{name}_proj.weight", transpose=True),
                matrix=True, fused=Fused("gate_up", order),
            )  # fmt: skip

        return {
            "gate": project("gate", 0),
            "up": project("up", 1),
            "down": Param(
                (self.intermediate_size, width), ("mlp", "embed"),
                Stored("mlp.down_proj.weight", transpose=True), matrix=True, residual=True,
            ),
        }  # fmt: skip

    def weights_of_a_row(self, width: int) -> int:
        """See `Mlp.weights_of_a_row`: all of them."""
        return 3 * width * self.intermediate_size

    def run(
        self, w: Params, x: Float[Array, "B T D"], where: Where | None = None, given: Any = None
    ) -> tuple[Float[Array, "B T D"], None, None]:
        """Runs the network over rows, without the residual; it records nothing."""

        def product(x: Array, name: str) -> Array:
            with jax.named_scope(name):  # by which plans tell products apart
                return dot(x, w[name])

        if "gate_up" in w:
            gate, up = jnp.split(product(x, "gate_up"), 2, axis=-1)
        else:
            gate, up = product(x, "gate"), product(x, "up")
        return product(ACTIVATIONS[self.activation](gate) * up, "down"), None, None
