"""Mixtures of experts: each row goes through a few of many small networks, which a router chooses.

No row is dropped: experts take as many rows as choose them. Under a mesh the experts are divided
over the axes `expert` and `tp`. Devices of `expert`, which hold different rows in training, gather
each other's rows, compute what their own experts add to them, and send the sums back: with up to
`num_experts_per_tok` devices no more bytes than an exchange of rows and their copies would take.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.config.checks import choice
from specjax.interfaces import Fused, Param, Params, Stored, Where
from specjax.models.mlps.dense import ACTIVATIONS, Dense
from specjax.parallel import sharding
from specjax.weights.matrix import Choices, cast, dot, experts

# How a router makes scores of its logits. Experts are chosen by the scores, and weighted by them;
# with `topk_softmax` the weights are a softmax over the logits of the chosen ones.
ROUTERS = {
    "softmax": jax.nn.softmax,
    "topk_softmax": lambda logits: logits,
    "sigmoid": jax.nn.sigmoid,
}
_TINY = 1e-20  # added to the sum of weights, as transformers does


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A router, experts that are `Dense` networks, and perhaps one that all rows take.

    Logits of the router, scores and weights are float32.

    Attributes:
      num_experts: number E of experts.
      num_experts_per_tok: number of experts that a row chooses.
      intermediate_size: width F of the hidden layer of an expert.
      router: how scores are made, a name in `ROUTERS`.
      activation: activation of the experts, a name in `ACTIVATIONS`.
      norm_topk_prob: whether the weights of the chosen experts are divided by their sum.
      scaling: factor of the weights.
      n_group: number of groups of experts. Only experts of the `topk_group` best groups are chosen;
        a group is as good as the sum of its two best scores.
      topk_group: see `n_group`.
      correction: whether a buffer is added to the scores by which experts are chosen, and not to
        those by which they are weighted (DeepSeek-V3). No gradient reaches it.
      shared_size: width of the expert that all rows take; 0: there is none.
      shared_gate: whether that expert is multiplied by the sigmoid of a product of the row.
      biases: whether the logits of the router, and the products of each expert, have biases
        (gpt-oss).
      limit: bound of what goes into the activation of an expert, which is then
        (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up between -`limit`
        and `limit` (gpt-oss); None: no bound, and `activation` says what it is.
      alpha: see `limit`.
    """

    kind: ClassVar[str] = "mixture"

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    router: str = "softmax"
    activation: str = "silu"
    norm_topk_prob: bool = True
    scaling: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    correction: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    biases: bool = False
    limit: float | None = None
    alpha: float = 1.702

    def __post_init__(self):
        choice("router", self.router, ROUTERS)
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok must be from 1 to num_experts, which is {self.num_experts}, "
                f"got {self.num_experts_per_tok}"
            )
        groups, chosen = self.n_group, self.topk_group
        size, rest = divmod(self.num_experts, groups)
        if rest or not 1 <= chosen <= groups or chosen * size < self.num_experts_per_tok:
            raise ValueError(
                f"n_group must divide the {self.num_experts} experts, got {groups}; topk_group be "
                f"at most n_group, of groups with {self.num_experts_per_tok} experts, got {chosen}"
            )

    def params(self, width: int) -> dict[str, Param]:
        """Returns the rows of its arrays, in the order of random initialisation."""
        count, inner = self.num_experts, self.intermediate_size

        def stack(name: str, shape: tuple[int, int], fused: Fused | None = None) -> Param:
            axes = ("expert_embed", None) if fused else (None, "expert_embed")
            stored = tuple(
                Stored(f"mlp.experts.{i}.{name}_proj.weight", transpose=True) for i in range(count)
            )
            return Param(
                (count, *shape), ("expert", *axes), stored,
                residual=fused is None, matrix=True, fused=fused,
            )  # fmt: skip

        rows = {
            "router": Param((width, count), (None, None), Stored("mlp.gate.weight", True)),
            "experts_gate": stack("gate", (width, inner), Fused("experts_gate_up", 0)),
            "experts_up": stack("up", (width, inner), Fused("experts_gate_up", 1)),
            "experts_down": stack("down", (inner, width)),
        }
        if self.biases:
            into = [Fused("experts_gate_up_bias", order) for order in (0, 1)]
            rows |= {
                "logit_bias": Param((count,), (None,), init=0),
                "experts_gate_bias": Param((count, inner), ("expert", None), init=0, fused=into[0]),
                "experts_up_bias": Param((count, inner), ("expert", None), init=0, fused=into[1]),
                "experts_down_bias": Param((count, width), ("expert", None), init=0),
            }
        if self.correction:
            rows["router_bias"] = Param(
                (count,), (None,), Stored("mlp.gate.e_score_correction_bias"), init=0,
                dtype="float32",
            )  # fmt: skip
        if self.shared_size:
            for name, row in self._shared.params(width).items():
                stored = row.stored._replace(name=f"mlp.shared_experts.{name}_proj.weight")
                fused = row.fused and row.fused._replace(name=f"shared_{row.fused.name}")
                rows[f"shared_{name}"] = dataclasses.replace(row, stored=stored, fused=fused)
        if self.shared_gate:
            stored = Stored("mlp.shared_expert_gate.weight", True)
            rows["shared_weight"] = Param((width, 1), (None, None), stored)
        return rows

    @property
    def _shared(self) -> Dense:
        return Dense(self.shared_size, self.activation)

    def weights_of_a_row(self, width: int) -> int:
        """See `Mlp.weights_of_a_row`: of the experts that a row takes, and of the router."""
        inner = self.num_experts_per_tok * self.intermediate_size + self.shared_size
        return width * (3 * inner + self.num_experts)

    @property
    def record_dtype(self) -> np.dtype:
        """The dtype of records: the smallest that numbers experts, and has a value for unknown."""
        alone = self.num_experts_per_tok == 1  # else no row chooses an expert twice
        return np.min_scalar_type(self.num_experts if alone else self.num_experts - 1)

    def run(
        self, w: Params, x: Float[Array, "B T D"], where: Where, given: Array | None = None
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T k"], dict[str, Array] | None]:
        """Runs the mixture over rows, without the residual; records the experts of each row."""
        logits = self._logits(w, x)
        scores = ROUTERS[self.router](logits)
        ids = self.choose(self._corrected(w, scores))
        if given is not None:
            known = (given != jnp.iinfo(given.dtype).max).any(-1, keepdims=True)
            ids = jnp.where(known, given.astype(ids.dtype), ids)
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        if self.router == "topk_softmax":
            weights = jax.nn.softmax(weights)
        elif self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdims=True) + _TINY)
        used = ids
        if where.segments is not None:  # rows of padding go through no expert
            used = jnp.where(where.segments[..., None] > 0, ids, self.num_experts)
        kernel = "reference" if where.form == "by_position" else where.kernel
        out = self._on_devices(w, x, used, weights * self.scaling, kernel)
        if self.shared_size:
            out = out + self._run_shared(w, x, where)
        figures = self._figures(logits, used, where) if where.form == "train" else None
        return out, ids.astype(self.record_dtype), figures

    def _logits(self, w: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        logits = dot(x, w["router"], jnp.float32)
        return logits + w["logit_bias"].astype(jnp.float32) if self.biases else logits

    def _corrected(self, w: Params, scores: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        scores = scores + w["router_bias"] if self.correction else scores
        return jax.lax.stop_gradient(scores)

    def scores(self, w: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """Returns scores by which `choose` chooses the experts of rows; logits where they do."""
        logits = self._logits(w, x)
        by_logits = self.n_group == 1 and not self.correction
        return self._corrected(w, logits if by_logits else ROUTERS[self.router](logits))

    def choose(self, scores: Float[Array, "... E"]) -> Int[Array, "... k"]:
        """Returns the experts of rows by their scores, best first."""
        if self.n_group > 1:
            grouped = scores.reshape(*scores.shape[:-1], self.n_group, -1)
            best = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
            kept = jax.lax.top_k(best, self.topk_group)[1]
            kept = (kept[..., None] == jnp.arange(self.n_group)).any(-2)
            scores = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(scores.shape)
        return jax.lax.top_k(scores, self.num_experts_per_tok)[1]

    def _run_shared(self, w: Params, x: Array, where: Where) -> Array:
        arrays = {name.removeprefix("shared_"): array for name, array in w.items()}
        out, *_ = self._shared.run(arrays, x, where)
        if self.shared_gate:
            out = out * jax.nn.sigmoid(dot(x, w["shared_weight"]))
        return out

    # --- experts ---------------------------------------------------------------------------------

    def _on_devices(self, w: Params, x, ids, weights, kernel: str) -> Float[Array, "B T D"]:
        """Computes the weighted sum of each row's experts, on the ambient mesh if there is one."""
        stacks = {name: a for name, a in w.items() if name.startswith("experts_")}
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return self._mix(stacks, x, ids, weights, kernel)
        axes = {name: row.axes for name, row in self.params(x.shape[-1]).items()}
        rows = sharding.spec_for(mesh, ("batch", "sequence", None), x.shape)

        def split(name: str, size: int) -> tuple[str, ...]:
            axes = sharding.split_over(mesh, name, size)
            return tuple(axis for axis in axes if mesh.shape[axis] > 1)

        ways = split("expert", self.num_experts)
        shared = tuple(axis for axis in ways if axis in (rows[0] or ()))
        rest = tuple(axis for axis in ways if axis not in shared)
        embed = split("expert_embed", x.shape[-1])
        specs = jax.tree.map(lambda s: s.spec, sharding.param_shardings(mesh, stacks, axes))

        def gathered(part: Array, spec: jax.P) -> Array:
            """Joins what devices hold of an array, or of a part of a packed stack."""
            for axis, names in enumerate(spec):
                if set(embed) & {*(names if isinstance(names, tuple) else (names,))}:
                    part = jax.lax.all_gather(part, embed, axis=axis, tiled=True)
            return part

        def local(stacks, x, ids, weights):
            if embed:
                stacks = jax.tree.map(gathered, cast(stacks, x.dtype), specs)
            if shared:
                x, ids, weights = (
                    jax.lax.all_gather(a, shared, tiled=True) for a in (x, ids, weights)
                )
            if ways:
                count = next(iter(stacks.values())).shape[0]
                ids = ids - jax.lax.axis_index(ways) * count
            out = self._mix(stacks, x, ids, weights, kernel)
            if shared:
                out = jax.lax.psum_scatter(out, shared, tiled=True)
            return jax.lax.psum(out, rest) if rest else out

        # Loops over blocks of rows do not declare the axes that they vary over.
        spread = jax.shard_map(
            local, in_specs=(specs, rows, rows, rows), out_specs=rows, check_vma=False
        )
        return spread(stacks, x, ids, weights)

    def _mix(self, stacks: Params, x, ids, weights, kernel: str) -> Float[Array, "B T D"]:
        """Computes the weighted sum over those of each row's experts that the stacks hold."""
        down = stacks["experts_down"]
        chosen = Choices.of(ids.reshape(-1, ids.shape[-1]), down.shape[0])
        rows = chosen.sort(x.reshape(-1, x.shape[-1]))

        def product(rows: Array, name: str) -> Array:
            with jax.named_scope(name):
                out = experts(rows, stacks[name], chosen.sizes, kernel)
            if not self.biases:
                return out
            return out + expert_biases(stacks[f"{name}_bias"].astype(out.dtype))

        def expert_biases(biases: Array) -> Array:
            """Returns the bias of each row's expert.

            It is a product, so that the order in which GPUs add rows does not change the gradient.
            """
            ends, place = jnp.cumsum(chosen.sizes), jnp.arange(len(rows))[:, None]
            holds = (ends - chosen.sizes <= place) & (place < ends)
            return holds.astype(biases.dtype) @ biases

        if "experts_gate_up" in stacks:
            gate, up = jnp.split(product(rows, "experts_gate_up"), 2, axis=-1)
        else:
            gate, up = product(rows, "experts_gate"), product(rows, "experts_up")
        out = chosen.restore(product(self._activated(gate, up), "experts_down"))
        weights = weights.reshape(*out.shape[:-1], 1)
        return (out * weights).sum(1).astype(x.dtype).reshape(x.shape)

    def _activated(self, gate: Array, up: Array) -> Array:
        if self.limit is None:
            return ACTIVATIONS[self.activation](gate) * up
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)

    def _figures(self, logits, ids, where: Where) -> dict[str, Array]:
        """Computes how evenly rows are spread over experts; see `Mlp.run`."""
        real = (where.segments > 0).astype(jnp.float32)
        count = jnp.maximum(real.sum(), 1)
        affinity = jax.nn.sigmoid(logits) if self.router == "sigmoid" else jax.nn.softmax(logits)
        share = affinity / affinity.sum(-1, keepdims=True)
        load = (ids[..., None] == jnp.arange(self.num_experts)).sum((0, 1, 2)) / count
        mean = jnp.einsum("bt,bte->e", real, share) / count
        entropy = -(real * jax.scipy.special.xlogy(share, share).sum(-1)).sum() / count
        per_expert = self.num_experts / self.num_experts_per_tok * load
        return {
            "load_balance": self.num_experts * (load * mean).sum(),
            "router_entropy": entropy,
            "expert_load_max": per_expert.max(),
        }
