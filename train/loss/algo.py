"""The section `algo` of `train.rl`: an objective with its options, and the common settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specjax.settings import option
from train.loss.logprobs import LOGPROBS
from train.presets import PRESETS, preset_of
from train.registry import OBJECTIVES

DEFAULT = "grpo"
METHODS = ("advantages", "per_token", "weights")  # of `Objective`
KL_TYPES = ("k1", "k2", "k3")  # of `train.loss.terms.KL`


@dataclass(frozen=True)
class AlgoSection:
    """The settings that all objectives share; an objective inherits from it and adds its own.

    Attributes:
      preset: settings of a paper as defaults of this section (also algo=NAME); keys that are set
        win, and --print-config shows all.
      objective: what the policy is trained on, or module:attribute, one of your own
        (docs/extend.md); decides which further keys this section has (--help with it lists them).
      kl_loss_coef: weight of an estimate of KL(policy || reference) in the loss; 0 has none.
      kl_loss_type: estimate of KL in the loss, with d = logprob - ref: k1, d; k2, d^2 / 2 (verl:
        mse); k3, exp(-d) + d - 1 (verl: low_var_kl).
      kl_coef: weight of the estimate k1 of KL(policy || reference) that is subtracted from rewards,
        in sum over the tokens of a response; 0 has none.
      overlong_buffer_len: number of tokens before rollout.max_tokens over which a penalty of long
        responses rises from 0; below 1 a share of rollout.max_tokens, and 0 is no penalty (DAPO).
      overlong_penalty_factor: penalty of a response of rollout.max_tokens.
      mask_truncated: whether samples that reached rollout.max_tokens are left out of training; they
        still count where the loss is divided by a number of samples (as in TRL).
      entropy_coeff: weight of the entropy of the policy's distributions, which is subtracted from
        the loss; 0 computes no gradient of it.
      tis: whether the policy term is weighted by pi_old / pi_behaviour (truncated importance
        sampling).
      tis_level: what has one weight of truncated importance sampling: each token, or a sample as a
        sequence, by the product of its tokens' ratios.
      tis_cap: upper bound of that weight.
      logprobs: log-probabilities that ratio, TIS, KL and entropy are made of: temperature, of the
        temperature-scaled logits; processed, after penalties, bias, masks and filters as well, of
        the very distribution that was sampled (see docs/rl.md).
      routing_replay: whether a mixture of experts is trained with the experts that the rollout
        chose for each token; else last bits decide near-ties, and ratios are noise.
      router_aux_loss_coef: weight of the loss that spreads tokens evenly over experts.
      updates_per_rollout: number of policy updates among which a step's samples are divided.
      dynamic_sampling: whether groups with equal rewards are replaced by the next problems, until
        rollout.prompts groups have differing rewards (DAPO, arXiv 2503.14476).
      max_num_gen_batches: largest number of groups that a step starts, in batches of
        rollout.prompts (times over_sample); the first batch counts, and 0 or less is no limit (as
        in verl). A step that reaches the limit is trained on fewer groups, with a warning.
    """

    preset: str | None = option(None, choices=(None, *PRESETS))
    objective: str = option(DEFAULT, choices=OBJECTIVES.names, own_path=True)
    kl_loss_coef: float = option(0.0, least=0)
    kl_loss_type: str = option("k3", choices=KL_TYPES, needs="kl_loss_coef")
    kl_coef: float = option(0.0, least=0)
    overlong_buffer_len: float = option(0.0, least=0)
    overlong_penalty_factor: float = option(1.0, least=0, needs="overlong_buffer_len")
    mask_truncated: bool = False
    entropy_coeff: float = option(0.0, least=0)
    tis: bool = False
    tis_level: str = option("token", choices=("token", "sequence"), needs="tis")
    tis_cap: float = option(2.0, needs="tis")
    logprobs: str = option("temperature", choices=LOGPROBS, needs="rollout.transforms")
    routing_replay: bool = True
    router_aux_loss_coef: float = option(0.0, least=0)
    updates_per_rollout: int = option(1, least=1)
    dynamic_sampling: bool = False
    max_num_gen_batches: int = option(10, needs="dynamic_sampling")

    def __post_init__(self) -> None:
        if self.tis_cap <= 0:
            raise ValueError(f"tis_cap: expected a number above 0, got {self.tis_cap}")

    @property
    def needs_reference(self) -> bool:
        """A reference, to which algo.kl_loss_coef or algo.kl_coef keeps the policy close."""
        return self.kl_loss_coef > 0 or self.kl_coef > 0

    def overlong_tokens(self, max_tokens: int) -> int:
        """The number of tokens over which the penalty of long responses rises."""
        length = self.overlong_buffer_len
        return math.ceil(length * max_tokens) if length < 1 else round(length)

    def settled(self, max_tokens: int) -> AlgoSection:
        """The section with `loss_scale_factor`, if that is null and the objective divides by it.

        Args:
          max_tokens: largest number of tokens of a response.

        Raises:
          ValueError: the buffer of long responses is longer than a response can be.
        """
        if self.overlong_tokens(max_tokens) > max_tokens:
            raise ValueError(
                "algo.overlong_buffer_len: expected at most rollout.max_tokens="
                f"{max_tokens}, or a share below 1, got {self.overlong_buffer_len:g}"
            )
        constant = getattr(self, "loss_aggregation", None) == "constant"
        if constant and getattr(self, "loss_scale_factor", 0) is None:
            return dataclasses.replace(self, loss_scale_factor=max_tokens)
        return self


def choose_algo(section: Mapping[str, Any]) -> tuple[type[AlgoSection], dict[str, Any]]:
    """The class of the section, and what the preset sets in it, by the user's `algo` keys.

    Raises:
      ValueError: there is no such objective or preset, or the objective does not inherit from
        `AlgoSection`, or has no method of `specjax.interfaces.Objective`.
    """
    preset = section.get("preset")
    preset = None if preset in ("", "null") else preset
    values = dict(preset_of(preset))
    objective = section.get("objective") or values.get("objective", DEFAULT)
    try:
        cls = OBJECTIVES.find(objective)
    except ValueError as error:
        about = f". It is a preset: use algo={objective}" if objective in PRESETS else ""
        raise ValueError(f"objective: {error}{about}") from error
    wrong = not (isinstance(cls, type) and issubclass(cls, AlgoSection))
    if wrong or any(not callable(getattr(cls, method, None)) for method in METHODS):
        raise ValueError(
            f"objective: {objective!r} is {cls!r}; expected a frozen dataclass that inherits from "
            f"train.loss.algo.AlgoSection, with the methods {', '.join(METHODS)}"
        )
    if values.get("objective", objective) != objective:
        # The preset's settings of its own objective are not in effect.
        common = AlgoSection.__dataclass_fields__
        values = {name: value for name, value in values.items() if name in common}
    return cls, {**values, "objective": objective, "preset": preset}


def algo(objective: str | None = None, preset: str | None = None, **settings: Any) -> AlgoSection:
    """Makes the section with an objective and settings, its own and the common ones.

    Args:
      objective: name of the objective; None is the preset's, or the default one.
      preset: name of a preset, whose settings are the defaults of the others.
      settings: values of keys.
    """
    cls, defaults = choose_algo({"objective": objective, "preset": preset})
    return cls(**defaults | settings)
