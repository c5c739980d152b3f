"""Models of which all or some layers are mixtures of experts, and the others dense."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from specjax.checked_json import CheckpointError, Keys
from specjax.models.families import common
from specjax.models.families.dense import DenseFamily
from specjax.models.mlps.dense import Dense
from specjax.models.mlps.moe import Mixture


@dataclasses.dataclass(frozen=True)
class MixtureFamily(DenseFamily):
    """A family of Llama's structure with experts in its layers.

    Attributes:
      experts_keys: keys of the number of experts; the first is written.
      width_key: key of the width of an expert.
      normed: value of `norm_topk_prob` where a file does not say it; None: there is no such key,
        and weights always have the sum 1.
    """

    mlp_kinds: ClassVar[tuple[type, ...]] = (Dense, Mixture)

    experts_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    width_key: str = "moe_intermediate_size"
    normed: bool | None = None

    def problems(self, keys: Keys) -> list[str]:
        return common.not_dense(keys, self.experts_keys)

    def mlps(self, keys: Keys, layers: int, activation: str) -> Sequence[Any]:
        """Returns the mlp of each layer: a mixture, or a dense one where `sparse` says so."""
        sparse = self.sparse(keys, layers)
        fields = self.fields(keys) if any(sparse) else {}
        counts = {keys.integer(name, None) for name in self.experts_keys} - {None}
        if len(counts) > 1:
            raise keys.error(self.experts_keys[0], f"what {self.experts_keys[1]} says")
        try:
            mixture = any(sparse) and Mixture(
                activation=activation,
                num_experts=counts.pop() if counts else keys.integer(self.experts_keys[0]),
                num_experts_per_tok=keys.integer("num_experts_per_tok"),
                intermediate_size=keys.integer(self.width_key),
                norm_topk_prob=self.normed is None or keys.flag("norm_topk_prob", self.normed),
                **fields,
            )
        except ValueError as error:
            raise CheckpointError(f"{keys.file}: {error}; correct it") from error
        dense = None if all(sparse) else Dense(keys.integer("intermediate_size"), activation)
        return [mixture if one else dense for one in sparse]

    def mlps_json(self, mlps: Sequence[Any]) -> dict[str, Any]:
        mixtures = {mlp for mlp in mlps if isinstance(mlp, Mixture)}
        dense = {mlp for mlp in mlps if isinstance(mlp, Dense)}
        if len(mixtures) > 1 or len(dense) > 1:
            self.refuse("has mixtures of one kind", f"{len(mixtures)} and {len(dense)} dense ones")
        raw = self.sparse_json([isinstance(mlp, Mixture) for mlp in mlps])
        for mlp in dense:
            raw["intermediate_size"] = mlp.intermediate_size
        for mlp in mixtures:
            raw |= {
                self.experts_keys[0]: mlp.num_experts,
                "num_experts_per_tok": mlp.num_experts_per_tok,
                self.width_key: mlp.intermediate_size,
                **self.fields_json(mlp),
            }
            if self.normed is not None:
                raw["norm_topk_prob"] = mlp.norm_topk_prob
        return raw

    def fields(self, keys: Keys) -> dict[str, Any]:
        """Reads further fields of `Mixture`."""
        return {}

    def fields_json(self, mlp: Mixture) -> dict[str, Any]:
        """Returns the keys that `fields` reads."""
        return {}

    def sparse(self, keys: Keys, layers: int) -> list[bool]:
        """Returns for each layer whether it is a mixture."""
        return [True] * layers

    def sparse_json(self, sparse: Sequence[bool]) -> dict[str, Any]:
        """Returns the keys that `sparse` reads."""
        if not all(sparse):
            self.refuse("has experts in every layer", "dense layers")
        return {}
