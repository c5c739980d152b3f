"""Online training of the draft head: a program of its own, fed with detached states.

The policy update hands out the states of the tokens it was trained on; the head learns from them
and from the rollout's tokens. Only the head's parameters are differentiated: embedding, final norm
and language-model head enter as constants, and the gradient of the policy is zero by construction.

Which head that is, the draft source says: `needs.taps` are the states that it learns from, and
`unroll` is its forward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from specjax.config import ModelConfig, SpecConfig
from specjax.engine.sources import source_of
from specjax.interfaces import Draft
from specjax.models.layers import rms_norm
from specjax.models.rows import merge_axes, param_axes
from specjax.models.transformer import Params, Taps, embed_tokens, lm_logits
from specjax.parallel import sharding
from specjax.parallel.context import Context
from specjax.schema import option
from train.draft_loss import DRAFT_LOSSES, draft_step_loss, draft_target_logits, draft_targets
from train.optim import OptimConfig
from train.policy import abstract_opt_state, init_opt_state, settled

MODES = ("auto", "none", "frozen", "online")
FIELDS = ("tokens", "positions", "segment_ids", "loss_mask")  # of a micro-batch, that it needs


@dataclass
class SpotConfig:
    """Training of the head while replicas have nothing to do, see `train.spot`."""

    enabled: bool = option(
        False,
        "the head learns one step later, from a replay buffer, so that replicas which have nothing "
        "left to do can train it while the others finish (needs rollout.replicas > 1)",
    )
    gaps: bool = option(
        True, "false: the same updates, all after the rollout (one replica will do); to compare"
    )
    updates: int = option(
        0,
        "of the head per step, over all steps in the buffer, the latest first; 0: draft.epochs "
        "passes over the step before",
    )
    buffer_tokens: int | None = option(
        None,
        "positions of packed rows kept with the policy's states, padding included; null: 65536, or "
        "what draft.max_microbatches micro-batches (0: one) have if that is more",
    )

    def __post_init__(self):
        if self.updates < 0:
            raise ValueError(f"draft.spot.updates: expected at least 0, got {self.updates}")

    def settle(self, needed: int) -> None:
        """Fills in `buffer_tokens` where it is null; `needed`: what it holds at least."""
        if self.buffer_tokens is None:
            self.buffer_tokens = max(65536, needed)


@dataclass
class DraftConfig:
    """How the draft head is trained beside the policy."""

    mode: str = option(
        "auto",
        "none: no speculation; frozen: what drafts stays as it is; online: the head is trained; "
        "auto: online where a head drafts, else frozen",
        choices=MODES,
    )
    loss: str = option(
        "ce",
        "ce: against the tokens; soft_ce: against the policy's distribution",
        choices=tuple(DRAFT_LOSSES),
    )
    unroll_steps: int = option(1, "recursive steps trained per token")
    step_decay: float = option(
        1.0, "weight of each further recursive step relative to the last", least=0
    )
    mtp_loss_scaling_factor: float = option(
        1.0,
        "factor on the head's updates, as if on draft.optim.lr (on the loss alone, clip and Adam "
        "would take it away again); 0: the head is not trained",
        least=0,
    )
    epochs: int = option(1, "passes over the step's micro-batches")
    max_microbatches: int = option(0, "micro-batches of each step used at most; 0 is all", least=0)
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(lr=1e-3),
        metadata={"doc": "the head's own optimizer", "choices": None},
    )
    spot: SpotConfig = option(SpotConfig, "training in the gaps of rollouts on several replicas")

    def __post_init__(self):
        if self.unroll_steps < 1 or self.epochs < 1:
            raise ValueError(
                "expected draft.unroll_steps and draft.epochs >= 1, got "
                f"{self.unroll_steps} and {self.epochs}"
            )
        if self.mode == "online" and not self.moves:
            raise ValueError(
                "draft.mode=online trains the draft head, and draft.mtp_loss_scaling_factor=0 "
                "makes each of its updates 0; raise the factor, or leave out draft.mode: the head "
                "then stays as it is"
            )

    @property
    def moves(self) -> bool:
        """Whether training would change the head."""
        return self.mtp_loss_scaling_factor > 0

    def about_mode(self) -> str:
        """The mode as it would be typed, once it is known, with what decided it."""
        why = "" if self.moves else ", for draft.mtp_loss_scaling_factor=0 makes every update 0"
        return f"draft.mode={self.mode}{why}"

    def optimizer(self) -> optax.GradientTransformation:
        """The head's own, every update scaled by `mtp_loss_scaling_factor`.

        Where policy and head share an optimizer, as in Megatron, a factor on the head's loss says
        how much of an update is the head's. Here the head has an optimizer of its own: its clip and
        its moments would divide the factor out, so it multiplies what comes out of them.
        """
        rate = self.mtp_loss_scaling_factor * self.optim.lr
        return dataclasses.replace(self.optim, lr=rate).build()


def frozen_policy_parts(params: Params) -> Params:
    """What the head reads of the policy: embedding, final norm, language-model head."""
    return {name: params[name] for name in ("embed", "norm", "lm_head") if name in params}


def head_of(cfg: ModelConfig) -> Draft:
    """The model's own head as a source."""
    return source_of(cfg, SpecConfig(source="head"))


def inner_taps(source: Draft) -> Taps:
    """The states that the policy's forward must hand out for a source, see `PolicyTrainer`.

    Those before the final norm always come, and those after it are made of them here, with the norm
    beside which the head will draft.
    """
    return tuple(tap for tap in source.needs.taps if tap not in ("pre_norm", "post_norm"))


def _tapped(source: Draft, states: Array, normed: Array) -> Float[Array, "R S N"]:
    """`needs.taps` side by side, from what the policy's forward handed out.

    Raises:
      ValueError: the states are not those that `inner_taps` asks for.
    """
    inner, width = inner_taps(source), normed.shape[-1]
    if states.shape[-1] != width * (1 + len(inner)):
        raise ValueError(
            f"{type(source).__name__} is trained on the states before the final norm and taps "
            f"{list(inner)}, {width * (1 + len(inner))} numbers a row; got {states.shape[-1]}; "
            "make the PolicyTrainer with taps=inner_taps(source)"
        )
    before, *behind = jnp.split(states, 1 + len(inner), axis=-1)
    named = {"pre_norm": before, "post_norm": normed, **dict(zip(inner, behind, strict=True))}
    taps = [named[tap] for tap in source.needs.taps]
    return jnp.concatenate([before[..., :0], *taps], axis=-1)


def head_loss(
    cfg: ModelConfig,
    draft: DraftConfig,
    temperature: float,
    head_params: Params,
    policy: Params,
    batch: Mapping[str, Array],
    states: Float[Array, "R S N"],
    context: Context | None = None,
    source: Draft | None = None,
) -> tuple[Array, dict[str, Array]]:
    """Mean loss of the head over one packed micro-batch, averaged over its recursive steps.

    Args:
      policy: see `frozen_policy_parts`. states: the policy's, before the final norm, and behind
        them those of `inner_taps`. Neither carries a gradient, whatever the caller differentiates.
      context: how rows are split over devices; batch and states are in its order.
      source: whose loss it is; None: the model's own head.

    Returns:
      (loss, sums): per step `mtp_loss_sum`, `mtp_top1`, `mtp_overlap` and `mtp_tokens`, each [K].
    """
    policy, states = jax.lax.stop_gradient((policy, states))
    source = source or head_of(cfg)
    tokens, segments = batch["tokens"], batch["segment_ids"]
    normed = rms_norm(states[..., : cfg.hidden_size], policy["norm"], cfg.rms_norm_eps)
    weight = policy["embed"].T if cfg.tie_embeddings else policy["lm_head"]
    hidden = _tapped(source, states, normed)
    targets = [
        draft_targets(tokens, batch["loss_mask"], segments, k, context)
        for k in range(draft.unroll_steps)
    ]
    embedded = [embed_tokens(policy["embed"], t.inputs, cfg) for t in targets]
    outputs = source.unroll(head_params, hidden, embedded, batch["positions"], segments, context)
    policy_logits = lm_logits(normed, weight)
    total, weights, sums = 0.0, 0.0, []
    for k, (out, target) in enumerate(zip(outputs, targets, strict=True)):
        loss_sum, count, aux = draft_step_loss(
            draft.loss,
            lm_logits(out, weight),
            target.labels,
            target.mask,
            draft_target_logits(policy_logits, segments, k, context),
            temperature,
        )
        step_weight = draft.step_decay**k
        total += step_weight * loss_sum / jnp.maximum(count, 1.0)
        weights += step_weight
        sums.append((loss_sum, aux["top1_matches"], aux["overlap"], count))
    names = ("mtp_loss_sum", "mtp_top1", "mtp_overlap", "mtp_tokens")
    stacked = {n: jnp.stack(v) for n, v in zip(names, zip(*sums, strict=True), strict=True)}
    return total / weights, jax.lax.stop_gradient(stacked)


class DraftTrainer:
    """One jitted program: an optimizer step of the head on one micro-batch.

    Args:
      cfg: of the policy. source: what is trained, see `Draft.unroll`; None: the model's own head.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        draft: DraftConfig,
        temperature: float = 1.0,
        mesh: jax.sharding.Mesh | None = None,
        context: Context | None = None,
        attention: str = "auto",
        source: Draft | None = None,
    ):
        source = source or head_of(cfg)
        if source.network is not None:
            whose = "the head's training attention"
            network = settled(source.network, mesh, attention, whose, context)
            source = source.with_network(network)
        self.cfg, self.draft, self.mesh, self.temperature = cfg, draft, mesh, temperature
        self.source, self.context = source, context
        self.axes = merge_axes([param_axes(cfg), source.axes()])
        self.optimizer = draft.optimizer()
        program = sharding.traced_on(mesh, self._update_program)
        self._update = jax.jit(program, donate_argnums=(0, 1), out_shardings=self._shardings())

    @property
    def programs(self) -> dict[str, jax.stages.Wrapped]:
        """The jitted function that `update` calls."""
        return {"update": self._update}

    def _shardings(self):
        """Of the head, its optimizer state, and metric sums."""
        if self.mesh is None:
            return None
        head = jax.eval_shape(functools.partial(self.source.init, 0))
        return (
            sharding.param_shardings(self.mesh, head, self.axes),
            sharding.param_shardings(
                self.mesh, abstract_opt_state(self.optimizer, head), self.axes
            ),
            sharding.replicated(self.mesh),
        )

    def init_opt_state(self, head: Params):
        return init_opt_state(self.optimizer, head, self.mesh, self.axes)

    def update(
        self, head: Params, opt_state, policy: Params, batches: Sequence, states: Sequence[Array]
    ):
        """Trains on micro-batches [R S] with their policy states, see `head_loss`, `epochs` times
        over.

        `head` and `opt_state` are donated.

        Returns:
          head, opt_state, metric sums of all epochs, among them `draft_update_norm`: the summed
          norm of the head's changes, 0 if training changed nothing.
        """
        limit = self.draft.max_microbatches or len(states)
        policy, total = frozen_policy_parts(policy), None
        for _ in range(self.draft.epochs):
            for batch, here in list(zip(batches, states, strict=True))[:limit]:
                head, opt_state, sums = self.piece(head, opt_state, policy, batch, here)
                total = add_sums(total, sharding.fetch(sums))
        return head, opt_state, total

    def piece(self, head: Params, opt_state, policy: Params, batch: Mapping, states: Array):
        """Starts one update, on one micro-batch; does not wait for it.

        `head` and `opt_state` are donated.

        Args:
          policy: see `frozen_policy_parts`.

        Returns:
          head, opt_state, metric sums, all on the device.
        """
        batch = {name: batch[name] for name in FIELDS}
        return self._update(head, opt_state, policy, batch, states)

    def _update_program(self, head, opt_state, policy, batch, states):
        policy = sharding.pin_gathered(self.mesh, policy, self.axes)

        def loss(head):
            head = sharding.pin_gathered(self.mesh, head, self.axes)
            given = head, policy, batch, states, self.context, self.source
            return head_loss(self.cfg, self.draft, self.temperature, *given)

        (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)(head)
        gradients, head32 = jax.tree.map(lambda a: a.astype(jnp.float32), (gradients, head))
        updates, new_opt_state = self.optimizer.update(gradients, opt_state, head32)
        has_tokens = sums["mtp_tokens"][0] > 0  # padding alone must not move the moments
        updates = jax.tree.map(lambda u: jnp.where(has_tokens, u, 0.0), updates)
        opt_state = jax.tree.map(
            lambda new, old: jnp.where(has_tokens, new, old), new_opt_state, opt_state
        )
        head = optax.apply_updates(head, updates)
        return head, opt_state, {**sums, "draft_update_norm": optax.tree.norm(updates)}


def add_sums(total: dict | None, sums: Mapping[str, np.ndarray]) -> dict:
    """The sums of one more update."""
    return dict(sums) if total is None else {key: total[key] + v for key, v in sums.items()}


def draft_metrics(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Metrics under the names that users know, from summed `update` outputs."""
    sums = {key: np.asarray(value, np.float64) for key, value in sums.items()}
    tokens = np.maximum(sums["mtp_tokens"], 1.0)
    metrics = {
        "train/mtp_loss": float(sums["mtp_loss_sum"][0] / tokens[0]),
        "train/mtp_top1": float(sums["mtp_top1"][0] / tokens[0]),
        "train/mtp_tokens": float(sums["mtp_tokens"][0]),
        "train/mtp_update_norm": float(sums["draft_update_norm"]),
    }
    for k, overlap in enumerate(sums["mtp_overlap"] / tokens):
        metrics[f"train/mtp_overlap_depth_{k + 1}"] = float(overlap)
    return metrics
