"""The policy's jitted programs: an update over micro-batches, and scoring.

The update always returns the policy's states along with the gradients, whether or not a draft head
is trained on them. So one executable serves every mode, and the policy cannot depend, not even in
its last bit, on how its head is trained.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from specjax.command_line import ConfigError
from specjax.config import ModelConfig
from specjax.interfaces import Axes, Denominators
from specjax.kernels import check, dispatch
from specjax.memory import keeps_state
from specjax.models.rows import param_axes
from specjax.models.transformer import Params, Taps, Transformer, graphdef, init_params
from specjax.parallel import sharding
from specjax.parallel.context import Context
from specjax.weights.matrix import precision_of
from train.loss.logits import Head, head_name, settled_chunk
from train.loss.logprobs import Scoring, Transforms, score_states
from train.loss.terms import Batch, LossFn

log = logging.getLogger(__name__)


def init_opt_state(optimizer: optax.GradientTransformation, params: Params, mesh, axes: Axes):
    """Optimizer state in float32, created in the sharding of the parameters it belongs to."""

    if mesh is None:
        return jax.jit(_empty_opt_state, static_argnums=0)(optimizer, params)
    shardings = sharding.param_shardings(mesh, abstract_opt_state(optimizer, params), axes)
    return jax.jit(_empty_opt_state, static_argnums=0, out_shardings=shardings)(optimizer, params)


def _empty_opt_state(optimizer: optax.GradientTransformation, params: Params):
    # Gradients and moments are float32 for parameters of any dtype.
    return optimizer.init(jax.tree.map(lambda a: a.astype(jnp.float32), params))


def abstract_opt_state(optimizer: optax.GradientTransformation, params: Params):
    """Shapes of the optimizer state of `init_opt_state`, from parameters or their shapes."""
    return jax.eval_shape(functools.partial(_empty_opt_state, optimizer), params)


def with_attention(
    cfg: ModelConfig, mesh, attention: str, whose: str, context: Context | None = None
) -> ModelConfig:
    """The config with the attention kernel of training, see `specjax.kernels.check`.

    If rows are split over devices (`context`), it warns where no kernel will run.

    Raises:
      ConfigError: the requested kernel cannot be used, or rows of recurrent layers are split.
    """
    if context is not None and keeps_state(cfg):
        raise ConfigError(
            f"mesh.cp: recurrent layers, as in {cfg.model_type}, need whole rows on a device, got "
            f"mesh.cp={context.ways}; set mesh.cp=1"
        )
    try:
        cfg = check.settle_training(cfg, mesh, attention, whose)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    name = cfg.run.attention
    if context is not None and name != "reference" and not dispatch.has("context_attention", name):
        log.warning(
            "%s: rows are split over %d devices (mesh.cp), which attend in XLA, without %s",
            whose, context.ways, name,
        )  # fmt: skip
    return cfg


class PolicyTrainer:
    """Holds the jitted programs; parameters and optimizer state are passed in and out.

    Args:
      cfg: config of the model; training always scans over layers.
      loss: loss of a micro-batch, `sft_loss` or the result of `rl_loss`.
      optimizer: optimizer from `OptimConfig.build`.
      mesh: mesh to train on; None for one device.
      temperature: temperature at which tokens are scored, the rollout's.
      context: split of rows over devices, if any. Outputs per token are then in its order, as are
        the batches that `place` makes; `fetch` restores the original order.
      attention: name of the kernel, see `specjax.kernels.dispatch.settle`.
      transforms: transforms with which tokens are scored instead of the temperature, see
        `train.loss.logprobs`.
      taps: inner states that a draft is trained on, see `specjax.models.transformer.Taps`; they are
        concatenated to the states before the final norm, in the last axis.
      chunk: tokens whose logits a device holds at once, see `train.loss.logits`.
      entropy_gradient: whether the loss has the gradient of the entropy.
      router_aux_loss_coef: weight of `load_balance` in the loss, see `specjax.interfaces.Mlp.run`.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        loss: LossFn,
        optimizer: optax.GradientTransformation,
        mesh: jax.sharding.Mesh | None = None,
        temperature: float = 1.0,
        context: Context | None = None,
        attention: str = "auto",
        transforms: Transforms | None = None,
        taps: Taps = (),
        chunk: int | None = None,
        entropy_gradient: bool = False,
        router_aux_loss_coef: float = 0.0,
    ):
        self.how = Scoring(temperature, transforms, context, entropy_gradient)
        self.aux = router_aux_loss_coef
        self.taps, self.chunk = taps, settled_chunk(chunk, mesh, cfg.vocab_size)
        cfg = with_attention(cfg, mesh, attention, "training attention", context)
        self.cfg, self.axes = cfg.running(scan_layers=True), param_axes(cfg)
        self.loss, self.optimizer, self.mesh = loss, optimizer, mesh
        self.context = context
        params, opt_state, rows, whole = self._shardings()
        exact = precision_of(cfg)
        self._accumulate = jax.jit(
            exact(self._accumulate_program), donate_argnums=1, out_shardings=(params, rows, whole)
        )
        self._apply = jax.jit(
            self._apply_program, donate_argnums=(0, 1), out_shardings=(params, opt_state, whole)
        )
        self._score = jax.jit(
            exact(lambda params, batch: self._token_logprobs(params, batch)[0]), out_shardings=rows
        )
        self._states = jax.jit(
            exact(lambda params, batch: self._forward(params, batch)[1]), out_shardings=rows
        )
        self._zeros = jax.jit(self._zeros_program, out_shardings=params)

    def _shardings(self) -> tuple:
        """Shardings of parameters and gradients, optimizer state, packed rows and metrics."""
        if self.mesh is None:
            return None, None, None, None
        params = jax.eval_shape(functools.partial(init_params, self.cfg))
        opt_state = abstract_opt_state(self.optimizer, params)
        return (
            sharding.param_shardings(self.mesh, params, self.axes),
            sharding.param_shardings(self.mesh, opt_state, self.axes),
            sharding.rows_sharding(self.mesh),
            sharding.replicated(self.mesh),
        )

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
        return init_opt_state(self.optimizer, params, self.mesh, self.axes)

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, Array]:
        """Moves host arrays [R S] to devices: rows over the data axes, their tokens over `cp`."""
        if self.mesh is None:
            return jax.device_put(dict(batch))
        if self.context is not None:
            batch = {key: self.context.permute(value) for key, value in batch.items()}
        where = dict.fromkeys(batch, sharding.rows_sharding(self.mesh))
        return sharding.put(dict(batch), where)

    def fetch(self, rows: Array) -> np.ndarray:
        """Fetches values per token [R S ..] to the host, in the order of `place`'s input."""
        rows = sharding.fetch(rows)
        return rows if self.context is None else self.context.restore(rows)

    def update(
        self,
        params: Params,
        opt_state,
        batches: Sequence[Batch],
        denominators: Denominators,
        keep: int | None = None,
    ):
        """Makes one optimizer step over any number of micro-batches [R S].

        `params` and `opt_state` are donated.

        Args:
          params: parameters of the policy.
          opt_state: state of the optimizer.
          batches: micro-batches on the devices, see `place`.
          denominators: counts over all micro-batches, see `count_denominators`.
          keep: number of micro-batches, the first ones, whose states are returned; None for all.

        Returns:
          (params, opt_state, states, metric sums with `grad_norm`). states has one array [R S N]
          per kept micro-batch, without gradient: states before the final norm under the old
          parameters, followed by the taps.
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

    def states(self, params: Params, batch: Batch) -> Float[Array, "R S N"]:
        """The states that `update` returns, without an update."""
        return self._states(params, batch)

    def states_shape(self, rows: int, length: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the states of a micro-batch."""
        shape = rows, length, self.cfg.hidden_size * (1 + len(self.taps))
        return jax.ShapeDtypeStruct(shape, np.dtype(self.cfg.run.compute_dtype))

    def head(self, params: Params, batch: Batch) -> Head:
        """The language-model head of a micro-batch: how many logits exist at a time."""
        name, shape = head_name(self.cfg), batch["tokens"].shape
        axes, form = self.axes[name], self.cfg.logits
        return Head.of(self.mesh, axes, params[name], shape, self.chunk, form)

    # --- programs ----------------------------------------------------------------------------

    def _forward(self, params: Params, batch: Batch):
        # Layers are gathered one by one, as they run; embedding and head where they are used.
        norm = sharding.pin_gathered(self.mesh, {"norm": params["norm"]}, self.axes)
        params = {**params, **norm}
        model: Transformer = nnx.merge(graphdef(self.cfg), params)
        with sharding.ambient(self.mesh):
            states = model.hidden(
                batch["tokens"],
                batch["positions"],
                batch["segment_ids"],
                self.context,
                taps=self.taps,
                given=batch.get("records"),
            )
        return model, jnp.concatenate([states.x, *states.taps], axis=-1), states

    def _token_logprobs(self, params: Params, batch: Batch):
        model, with_taps, states = self._forward(params, batch)
        head, matrix = self.head(params, batch), params[head_name(self.cfg)]
        scores = score_states(self.how, head, model.final_norm(states.x), matrix, batch)
        return *scores, with_taps, states.figures

    def _accumulate_program(self, params, gradients, batch, denominators):
        def loss(params):
            logprobs, entropy, states, figures = self._token_logprobs(params, batch)
            value, sums = self.loss(logprobs, entropy, batch, denominators)
            if self.aux:
                share = sums["tokens"] / denominators.tokens
                value += self.aux * share * figures["load_balance"]
            sums |= {n: jax.lax.stop_gradient(x) * sums["tokens"] for n, x in figures.items()}
            return value, (sums, jax.lax.stop_gradient(states))

        new, (sums, states) = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(jnp.add, gradients, new), states, sums

    def _apply_program(self, params, opt_state, gradients):
        params32 = jax.tree.map(lambda a: a.astype(jnp.float32), params)
        updates, opt_state = self.optimizer.update(gradients, opt_state, params32)
        return optax.apply_updates(params, updates), opt_state, optax.tree.norm(gradients)

    def _zeros_program(self, params):
        return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), params)
