"""The policy's programs: one update over micro-batches, and scoring.

The update always hands out the policy's states along with the gradients, whether or not a draft
head is trained on them. So one compiled executable serves every mode, and the policy
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
from specjax.kernels import dispatch
from specjax.models.transformer import Params, Transformer, graphdef
from train.config import ConfigError
from train.grpo import Denominators, GRPOConfig, grpo_loss, token_logprobs

Batch = Mapping[str, Array]
LossFn = Callable[[Array, Array, Batch, Denominators], tuple[Array, dict]]


def sft_loss(logprobs, entropy, batch: Batch, denominators: Denominators):
    """Cross entropy of the tokens under the loss mask, averaged over tokens."""
    mask = batch["loss_mask"]
    loss = -jnp.sum(logprobs * mask) / denominators.tokens
    sums = {"loss": loss, "tokens": mask.sum(), "entropy": jnp.sum(entropy * mask)}
    return loss, jax.lax.stop_gradient(sums)


def rl_loss(cfg: GRPOConfig, on_policy: bool = False, stale: bool = False) -> LossFn:
    """The GRPO loss; the reference's log-probabilities are used when the batch has them.

    Args:
      on_policy: one update per rollout, so the policy that is differentiated is the old one too and
        need not be scored beforehand; the batch's `old_logprobs` are ignored.
      stale: the batch may hold tokens that older weights sampled (`staleness` > 0). Their
        `old_logprobs` are those of these weights, so that the ratio is the one to the policy that
        sampled the token. Of all other tokens they are the batch's `fresh_logprobs` or, on policy,
        the policy's own.
    """

    def loss(logprobs, entropy, batch, denominators):
        if on_policy or stale:
            old = jax.lax.stop_gradient(logprobs) if on_policy else batch["fresh_logprobs"]
            if stale:
                old = jnp.where(batch["staleness"] > 0, batch["old_logprobs"], old)
            batch = {**batch, "old_logprobs": old}
        return grpo_loss(logprobs, batch, cfg, denominators, batch.get("ref_logprobs"), entropy)

    return loss


def init_opt_state(optimizer: optax.GradientTransformation, params: Params, mesh):
    """Optimizer state in float32, created in the sharding of the parameters it belongs to."""

    def init(params):  # gradients are float32 whatever the parameters are, and so are the moments
        return optimizer.init(jax.tree.map(lambda a: a.astype(jnp.float32), params))

    if mesh is None:
        return jax.jit(init)(params)
    shardings = sharding.param_shardings(mesh, jax.eval_shape(init, params))
    return jax.jit(init, out_shardings=shardings)(params)


def settled(cfg: ModelConfig, mesh, attention: str, whose: str) -> ModelConfig:
    """See `specjax.kernels.dispatch.settle`.

    Raises:
      ConfigError: the kernel that is asked for cannot be used.
    """
    try:
        return dispatch.settle(cfg, mesh, attention, whose=whose)
    except ValueError as error:
        raise ConfigError(str(error)) from error


class PolicyTrainer:
    """Holds the jitted programs; parameters and optimizer state are passed in and out.

    Args:
      cfg: model config; training scans over layers whatever `scan_layers` says for decoding.
      loss: see `sft_loss`, `rl_loss`.
      optimizer: from `OptimConfig.build`. mesh: None is one device.
      temperature: at which tokens are scored; the rollout's.
      attention: the kernel, see `specjax.kernels.dispatch.settle`.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        loss: LossFn,
        optimizer: optax.GradientTransformation,
        mesh: jax.sharding.Mesh | None = None,
        temperature: float = 1.0,
        attention: str = "auto",
    ):
        cfg = settled(cfg, mesh, attention, "training attention")
        self.cfg = cfg.replace(scan_layers=True)
        self.loss, self.optimizer, self.mesh = loss, optimizer, mesh
        self.temperature = temperature
        # The states go on to the head's update: rows over the data axes, as in the batch.
        rows = None if mesh is None else (None, sharding.row_sharding(mesh), None)
        self._accumulate = jax.jit(self._accumulate_program, donate_argnums=1, out_shardings=rows)
        self._apply = jax.jit(self._apply_program, donate_argnums=(0, 1))
        self._score = jax.jit(lambda params, batch: self._token_logprobs(params, batch)[0])
        self._states = jax.jit(lambda params, batch: self._forward(params, batch)[1])
        self._zeros = jax.jit(self._zeros_program)

    @property
    def programs(self) -> dict[str, jax.stages.Wrapped]:
        """The jitted functions that `update` and `logprobs` call."""
        return {
            "zeros": self._zeros,
            "accumulate": self._accumulate,
            "apply": self._apply,
            "score": self._score,
        }

    def init_opt_state(self, params: Params):
        """Optimizer state, created in the sharding of the parameters it belongs to."""
        return init_opt_state(self.optimizer, params, self.mesh)

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, Array]:
        """Host arrays [R S] to devices, rows over the data axes."""
        if self.mesh is None:
            return jax.device_put(dict(batch))
        batch = dict(batch)
        where = {key: sharding.batch_sharding(self.mesh, value) for key, value in batch.items()}
        return sharding.put(batch, where)

    def update(
        self,
        params: Params,
        opt_state,
        batches: Sequence[Batch],
        denominators: Denominators,
        keep: int | None = None,
    ):
        """One optimizer step over micro-batches [R S], of which there may be any number.

        `params` and `opt_state` are donated.

        Args:
          keep: micro-batches whose states somebody needs, the first ones; None: all.

        Returns:
          params, opt_state, of `keep` micro-batches the states [R S D] before the final norm (of
          the old parameters, without gradient), and metric sums with `grad_norm`.
        """
        gradients, states, sums = self._zeros(params), [], []
        for batch in batches:
            gradients, here, new = self._accumulate(params, gradients, batch, denominators)
            if keep is None or len(states) < keep:
                states.append(here)
            sums.append(new)
        params, opt_state, norm = self._apply(params, opt_state, gradients)
        sums = sharding.fetch(sums)  # once, when all micro-batches are on their way
        total = {key: sum(s[key] for s in sums) for key in sums[0]}
        return params, opt_state, states, {**total, "grad_norm": sharding.fetch(norm)}

    def logprobs(self, params: Params, batch: Batch) -> Float[Array, "R S"]:
        """Log-probabilities of all tokens, by the same arithmetic as the update's."""
        return self._score(params, batch)

    def states(self, params: Params, batch: Batch) -> Float[Array, "R S D"]:
        """The states that `update` hands out, without an update."""
        return self._states(params, batch)

    # --- programs ----------------------------------------------------------------------------

    def _forward(self, params: Params, batch: Batch):
        model: Transformer = nnx.merge(graphdef(self.cfg), params)
        with sharding.ambient(self.mesh):
            states = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"])
        return model, states

    def _token_logprobs(self, params: Params, batch: Batch):
        model, states = self._forward(params, batch)
        logprobs, entropy = token_logprobs(
            model.logits(states), batch["tokens"], batch["segment_ids"], self.temperature
        )
        return logprobs, entropy, states

    def _accumulate_program(self, params, gradients, batch, denominators):
        def loss(params):
            logprobs, entropy, states = self._token_logprobs(params, batch)
            value, sums = self.loss(logprobs, entropy, batch, denominators)
            return value, (sums, jax.lax.stop_gradient(states))

        new, (sums, states) = jax.grad(loss, has_aux=True)(params)
        return sharding.pin(self.mesh, jax.tree.map(jnp.add, gradients, new)), states, sums

    def _apply_program(self, params, opt_state, gradients):
        params32 = jax.tree.map(lambda a: a.astype(jnp.float32), params)
        updates, opt_state = self.optimizer.update(gradients, opt_state, params32)
        params = sharding.pin(self.mesh, optax.apply_updates(params, updates))
        return params, sharding.pin(self.mesh, opt_state), optax.tree.norm(gradients)

    def _zeros_program(self, params):
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), params)
        return sharding.pin(self.mesh, zeros)
