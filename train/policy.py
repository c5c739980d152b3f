"""The policy's programs: one update over micro-batches, and scoring.

The update always hands out the policy's states [A R S D] along with the new parameters, whether or
not a draft head is trained on them. So one compiled executable serves every mode, and the policy
cannot depend, not even in its last bit, on how its head is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from specjax import sharding
from specjax.config import ModelConfig
from specjax.models.transformer import Params, Transformer, graphdef
from train.grpo import Denominators, GRPOConfig, grpo_loss, token_logprobs

Batch = Mapping[str, Array]
LossFn = Callable[[Array, Array, Batch, Denominators], tuple[Array, dict]]


def sft_loss(logprobs, entropy, batch: Batch, denominators: Denominators):
    """Cross entropy of the tokens under the loss mask, averaged over tokens."""
    mask = batch["loss_mask"]
    loss = -jnp.sum(logprobs * mask) / denominators.tokens
    sums = {"loss": loss, "tokens": mask.sum(), "entropy": jnp.sum(entropy * mask)}
    return loss, jax.lax.stop_gradient(sums)


def rl_loss(cfg: GRPOConfig) -> LossFn:
    """The GRPO loss; the reference's log-probabilities are used when the batch has them."""

    def loss(logprobs, entropy, batch, denominators):
        return grpo_loss(
            logprobs, batch, cfg, denominators, batch.get("ref_logprobs"), entropy
        )

    return loss


def stack_batches(batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Micro-batches [R S] to one array [A R S] per key."""
    return {key: np.stack([b[key] for b in batches]) for key in batches[0]}


class PolicyTrainer:
    """Holds the jitted programs; parameters and optimizer state are passed in and out.

    Args:
      cfg: model config; training scans over layers whatever `scan_layers` says for decoding.
      loss: see `sft_loss`, `rl_loss`.
      optimizer: from `OptimConfig.build`. mesh: None is one device.
      temperature: at which tokens are scored; the rollout's.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        loss: LossFn,
        optimizer: optax.GradientTransformation,
        mesh: jax.sharding.Mesh | None = None,
        temperature: float = 1.0,
    ):
        self.cfg = cfg.replace(scan_layers=True)
        self.loss, self.optimizer, self.mesh = loss, optimizer, mesh
        self.temperature = temperature
        self._update = jax.jit(self._update_program, donate_argnums=(0, 1))
        self._score = jax.jit(self._score_program)
        self._states = jax.jit(self._states_program)

    def init_opt_state(self, params: Params):
        """Optimizer state, created in the sharding of the parameters it belongs to."""
        if self.mesh is None:
            return jax.jit(self.optimizer.init)(params)
        shardings = sharding.param_shardings(
            self.mesh, jax.eval_shape(self.optimizer.init, params)
        )
        return jax.jit(self.optimizer.init, out_shardings=shardings)(params)

    def place(self, batches: Mapping[str, np.ndarray]) -> dict[str, Array]:
        """Host arrays [A R S] to devices, rows over the data axes."""
        if self.mesh is None:
            return jax.device_put(dict(batches))
        spec = jax.NamedSharding(self.mesh, jax.P(None, ("data", "fsdp")))
        return {key: jax.device_put(value, spec) for key, value in batches.items()}

    def update(self, params: Params, opt_state, batches: Batch, denominators: Denominators):
        """One optimizer step over A micro-batches [A R S].

        Returns:
          params, opt_state, states [A R S D] before the final norm (of the old parameters, no
          gradient), and metric sums with `grad_norm`.
        """
        return self._update(params, opt_state, batches, denominators)

    def logprobs(self, params: Params, batches: Batch) -> Float[Array, "A R S"]:
        """Log-probabilities of all tokens, by the same arithmetic as the update's."""
        return self._score(params, batches)

    def states(self, params: Params, batches: Batch) -> Float[Array, "A R S D"]:
        """The states that `update` hands out, without an update."""
        return self._states(params, batches)

    # --- programs ----------------------------------------------------------------------------

    def _forward(self, params: Params, batch: Batch):
        model: Transformer = nnx.merge(graphdef(self.cfg), params)
        states = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])
        return model, states

    def _token_logprobs(self, params: Params, batch: Batch):
        model, states = self._forward(params, batch)
        logprobs, entropy = token_logprobs(
            model.logits(states), batch["tokens"], batch["segment_ids"], self.temperature
        )
        return logprobs, entropy, states

    def _update_program(self, params, opt_state, batches, denominators):
        def loss(params, batch):
            logprobs, entropy, states = self._token_logprobs(params, batch)
            value, sums = self.loss(logprobs, entropy, batch, denominators)
            return value, (sums, jax.lax.stop_gradient(states))

        def accumulate(gradients, batch):
            new, (sums, states) = jax.grad(loss, has_aux=True)(params, batch)
            return jax.tree.map(jnp.add, gradients, new), (sums, states)

        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), params)
        gradients, (sums, states) = jax.lax.scan(accumulate, zeros, batches)
        updates, opt_state = self.optimizer.update(gradients, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        if self.mesh is not None:  # parameters must come back where they were
            shardings = sharding.param_shardings(self.mesh, new_params)
            new_params = jax.lax.with_sharding_constraint(new_params, shardings)
            opt_shardings = sharding.param_shardings(self.mesh, opt_state)
            opt_state = jax.lax.with_sharding_constraint(opt_state, opt_shardings)
        sums = jax.tree.map(lambda x: x.sum(0), sums)
        sums["grad_norm"] = optax.global_norm(gradients)
        return new_params, opt_state, states, sums

    def _score_program(self, params, batches):
        return jax.lax.map(lambda batch: self._token_logprobs(params, batch)[0], batches)

    def _states_program(self, params, batches):
        return jax.lax.map(lambda batch: self._forward(params, batch)[1], batches)
