"""The section `algo` of `train.rl`: an objective with its options, and the common settings."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from specjax.interfaces import Objective
from specjax.schema import at_least, attribute_docs, option, show
from train.loss.logprobs import LOGPROBS
from train.presets import PRESETS, about_objective, preset_of
from train.registry import OBJECTIVES

T = TypeVar("T")

DEFAULT = "grpo"
METHODS = ("advantages", "per_token", "weights")  # of `Objective`
KL_TYPES = ("k1", "k2", "k3")  # of `train.loss.terms.KL`


REWARD = "reward"  # the weighted sum of all rewards, as a metric


@dataclass
class FilterGroups:
    """What dynamic sampling asks of a group beside rewards that differ."""

    metric: str = option(
        REWARD,
        "what is compared: reward, the weighted sum of all rewards; or one of several rewards, by "
        "its name in the metrics reward/NAME, whose values in a group must then differ as well",
    )
    min: float | None = option(
        None, "groups are replaced whose mean of the metric is smaller; null: none"
    )
    max: float | None = option(
        None, "groups are replaced whose mean of the metric is larger; null: none"
    )

    def __post_init__(self) -> None:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(
                "expected algo.filter_groups.min <= algo.filter_groups.max, got "
                f"{self.min:g} and {self.max:g}"
            )

    def check(self, labels: Sequence[str]) -> None:
        """Raises ValueError unless the metric is known.

        Args:
          labels: names of the rewards, as in metrics.
        """
        if self.metric in (REWARD, *labels):
            return
        expected = f"{REWARD}, for reward=auto is one reward"
        if labels:
            expected = (
                f"{REWARD} (the weighted sum) or the name of one of the rewards "
                f"({', '.join(labels)})"
            )
        raise ValueError(
            f"algo.filter_groups.metric: expected {expected}, got {self.metric!r}; verl's acc, "
            f"score, seq_reward and seq_final_reward are {REWARD} here"
        )


@dataclass
class AlgoSection:
    """The settings that all objectives share; `algo_section` adds those of one objective.

    Attributes:
      kl_loss_coef: weight of an estimate of KL(policy || reference) in the loss; 0 has none.
      kl_coef: weight of an estimate of KL(policy || reference) that is subtracted from rewards, in
        sum over the tokens of a response; 0 has none.
      ref_update_steps: number of steps after which the reference becomes the current policy, again
        and again; 0 keeps the policy of the start.
      overlong_buffer_len: number of tokens before rollout.max_tokens over which a penalty of long
        responses rises from 0; below 1 a share of rollout.max_tokens, and 0 is no penalty (DAPO).
      overlong_penalty_factor: penalty of a response of rollout.max_tokens.
      mask_truncated: whether samples that reached rollout.max_tokens are left out of training; they
        still count where the loss is divided by a number of samples (as in TRL).
      use_bias_correction_kl: whether KL in the loss is multiplied by the ratio of the token, which
        has its gradient there (TRL's name, and its default).
      entropy_coeff: weight of the entropy of the policy's distributions, which is subtracted from
        the loss; 0 computes no gradient of it.
      tis: whether the policy term is weighted by pi_old / pi_behaviour (truncated importance
        sampling).
      tis_cap: upper bound of that weight.
      updates_per_rollout: number of policy updates among which a step's samples are divided.
      dynamic_sampling: whether groups with equal rewards are replaced by the next problems, until
        rollout.prompts groups have differing rewards (DAPO, arXiv 2503.14476).
      max_num_gen_batches: largest number of groups that a step starts, in batches of
        rollout.prompts (times over_sample); the first batch counts, and 0 or less is no limit (as
        in verl). A step that reaches the limit is trained on fewer groups, with a warning.
    """

    made_of: ClassVar[type | None] = None  # the objective's class
    made_by: ClassVar[str | None] = None  # the preset whose values are the defaults

    preset: str | None = option(
        None,
        "settings of a paper as defaults of this section (also algo=NAME); keys that are set win, "
        "and a line at start says what it sets",
        choices=(None, *PRESETS),
    )
    objective: str = option(
        DEFAULT,
        f"what the policy is trained on: {', '.join(OBJECTIVES.names)}, or module:attribute, one "
        "of your own (docs/extend.md); decides which further keys this section has (--help with it "
        "lists them)",
    )
    kl_loss_coef: float = 0.0
    kl_loss_type: str = option(
        "k3",
        "estimate of KL in the loss, with d = logprob - ref: k1, d; k2, d^2 / 2 (verl: mse); k3, "
        "exp(-d) + d - 1 (verl: low_var_kl)",
        choices=KL_TYPES,
    )
    kl_coef: float = 0.0
    kl_penalty: str = option("k1", "estimate of KL in rewards, see kl_loss_type", choices=KL_TYPES)
    ref_update_steps: int = 0
    overlong_buffer_len: float = 0.0
    overlong_penalty_factor: float = 1.0
    mask_truncated: bool = False
    use_bias_correction_kl: bool = False
    entropy_coeff: float = 0.0
    tis: bool = False
    tis_level: str = option(
        "token",
        "what has one weight of truncated importance sampling: each token, or a sample as a "
        "sequence, by the product of its tokens' ratios",
        choices=("token", "sequence"),
    )
    tis_cap: float = 2.0
    logprobs: str = option(
        "temperature",
        "log-probabilities that ratio, TIS, KL and entropy are made of: temperature, of the "
        "temperature-scaled logits; processed, after penalties, bias, masks and filters as well, "
        "of the very distribution that was sampled (see docs/rl.md)",
        choices=LOGPROBS,
    )
    updates_per_rollout: int = 1
    dynamic_sampling: bool = False
    max_num_gen_batches: int = 10
    filter_groups: FilterGroups = option(
        FilterGroups, "further conditions of dynamic sampling (verl's filter_groups)"
    )

    def __post_init__(self) -> None:
        if self.made_of is not algo_section(self.objective).made_of:
            raise ValueError(
                f"algo.objective={self.objective} has other options than this section; make it by "
                f"train.loss.algo.algo({self.objective!r}, ...)"
            )
        if self.preset != self.made_by:
            raise ValueError(
                f"algo.preset={self.preset} has other defaults than this section; make it by "
                f"train.loss.algo.algo(preset={self.preset!r}, ...)"
            )
        self.build()
        if self.kl_loss_coef < 0 or self.tis_cap <= 0:
            raise ValueError(
                "expected kl_loss_coef >= 0 and tis_cap > 0, "
                f"got {self.kl_loss_coef} and {self.tis_cap}"
            )
        at_least("algo", self, updates_per_rollout=1)
        at_least(
            "algo", self, entropy_coeff=0, kl_coef=0, ref_update_steps=0, overlong_buffer_len=0,
            overlong_penalty_factor=0,
        )  # fmt: skip

    @property
    def needs_reference(self) -> bool:
        """Whether a copy of the policy is kept, to which the policy stays close."""
        return self.kl_loss_coef > 0 or self.kl_coef > 0

    def overlong_tokens(self, max_tokens: int) -> int:
        """The number of tokens over which the penalty of long responses rises."""
        length = self.overlong_buffer_len
        return math.ceil(length * max_tokens) if length < 1 else round(length)

    def settle(self, max_tokens: int) -> None:
        """Fills in `loss_scale_factor` if it is null and the objective divides by it.

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
            self.loss_scale_factor = max_tokens

    def build(self) -> Objective:
        """The objective with its options.

        Raises:
          ValueError: an option is not valid.
        """
        names = [field.name for field in dataclasses.fields(self.made_of) if field.init]
        return self.made_of(**{name: getattr(self, name) for name in names})


def algo(objective: str | None = None, preset: str | None = None, **settings: Any) -> AlgoSection:
    """Makes the section with an objective and settings, its own and the common ones.

    Args:
      objective: name of the objective; None is the preset's, or the default one.
      preset: name of a preset, whose settings are the defaults of the others.
      settings: values of keys.
    """
    objective = objective or preset_of(preset).get("objective", DEFAULT)
    return algo_section(objective, preset)(**settings)


def preset_line(section: AlgoSection) -> str | None:
    """The line at start about what the preset sets, and what the user sets instead.

    None without a preset.
    """
    if section.preset is None:
        return None
    values = {f"algo.{name}": value for name, value in preset_of(section.preset).items()}
    if section.objective != values["algo.objective"]:
        # The preset's settings of its own objective are not in effect.
        common = AlgoSection.__dataclass_fields__
        values = {name: value for name, value in values.items() if name[5:] in common}
    have = {name: getattr(section, name[5:]) for name in values}
    left = [f"{name}={show(value)}" for name, value in values.items() if have[name] == value]
    other = [
        f"{name}={show(have[name])} for {show(value)}"
        for name, value in values.items()
        if have[name] != value
    ]
    instead = f"; you set {', '.join(other)}" if other else ""
    return f"algo.preset={section.preset} sets {', '.join(left) or 'nothing'}{instead}"


def algo_section(objective: str, preset: str | None = None) -> type[AlgoSection]:
    """The section's schema with the options of an objective, and the defaults of a preset.

    Raises:
      ValueError: there is no such objective or preset, or the objective is no
        `specjax.interfaces.Objective`.
    """
    return _section(objective, preset)


@functools.cache
def _section(objective: str, preset: str | None) -> type[AlgoSection]:
    try:
        found, values = OBJECTIVES.find(objective), dict(preset_of(preset))
    except ValueError as error:
        about = "" if objective in OBJECTIVES else about_objective(objective)
        raise ValueError(f"{error}{about}") from error
    _check(objective, found)
    same = values.pop("objective", objective) == objective
    hints, docs = typing.get_type_hints(found), attribute_docs(found)
    own = [field for field in dataclasses.fields(found) if field.init]
    shared = AlgoSection.__dataclass_fields__
    common = {"preset": preset, "objective": objective}
    common |= {name: value for name, value in values.items() if name in shared}
    shared_hints, shared_docs = typing.get_type_hints(AlgoSection), attribute_docs(AlgoSection)
    own_values = values if same else {}
    made = dataclasses.make_dataclass(
        AlgoSection.__name__,
        [
            *(
                (name, shared_hints[name], _like(shared[name], shared_docs, value))
                for name, value in common.items()
            ),
            *(
                (
                    field.name,
                    hints[field.name],
                    _like(field, docs, own_values.get(field.name, dataclasses.MISSING)),
                )
                for field in own
            ),
        ],
        bases=(AlgoSection,),
        namespace={
            "__doc__": AlgoSection.__doc__,
            "made_of": found,
            "made_by": preset,
            "rules": getattr(found, "rules", ()),
        },
    )
    made.__module__ = AlgoSection.__module__
    return made


def with_preset(schema: type[T], preset: str | None) -> type[T]:
    """A configuration's schema with the defaults of a preset in its section `algo`.

    Args:
      schema: `RLConfig`, or a class that is derived from it.
      preset: name of the preset; None is no preset.

    Raises:
      ValueError: see `algo_section`.
    """
    objective = preset_of(preset).get("objective", DEFAULT)
    return _with_section(schema, algo_section(objective, preset))


def with_objective(schema: type[T], objective: str) -> type[T]:
    """A configuration's schema with the options of an objective in its section `algo`.

    Args:
      schema: `RLConfig`, or a class that is derived from it.
      objective: name of the objective.

    Raises:
      ValueError: see `algo_section`.
    """
    preset = typing.get_type_hints(schema)["algo"].made_by
    return _with_section(schema, algo_section(objective, preset))


@functools.cache
def _with_section(schema: type[T], section: type[AlgoSection]) -> type[T]:
    if typing.get_type_hints(schema)["algo"] is section:
        return schema
    [field] = [field for field in dataclasses.fields(schema) if field.name == "algo"]
    made = dataclasses.make_dataclass(
        schema.__name__,
        [("algo", section, option(section, field.metadata["doc"]))],
        bases=(schema,),
        namespace={"__doc__": schema.__doc__},
    )
    made.__module__ = schema.__module__
    return made


def _check(name: str, found: Any) -> None:
    """Raises ValueError if `found` is no objective, or has an option with a reserved name."""
    missing = [method for method in METHODS if not callable(getattr(found, method, None))]
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)) or missing:
        raise ValueError(
            f"objective {name!r} is {found!r}; expected a frozen dataclass with the methods "
            f"{', '.join(METHODS)}"
        )
    taken = {*dir(AlgoSection), *AlgoSection.__dataclass_fields__}
    for field in dataclasses.fields(found):
        if field.default is field.default_factory:  # both are missing
            raise ValueError(
                f"objective {name!r} has an option {field.name!r} without a default; give it one"
            )
        if field.name in taken:
            raise ValueError(
                f"objective {name!r} has an option {field.name!r}, which the section algo has for "
                "all objectives; give it another name"
            )


def _like(
    field: dataclasses.Field, docs: Mapping[str, str], default: Any = dataclasses.MISSING
) -> Any:
    """A field with the same documentation, and the same default unless another one is given."""
    metadata = {"doc": docs.get(field.name, ""), **field.metadata}
    if default is not dataclasses.MISSING:
        return dataclasses.field(default=default, metadata=metadata)
    return dataclasses.field(
        default=field.default, default_factory=field.default_factory, metadata=metadata
    )
