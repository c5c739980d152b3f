"""The section `algo` of `train.rl`: an objective with its options, and the common settings."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from specjax.interfaces import Objective
from specjax.schema import at_least, attribute_docs, option
from train.logprobs import LOGPROBS
from train.registry import OBJECTIVES

T = TypeVar("T")

DEFAULT = "grpo"
METHODS = ("advantages", "per_token", "weights")  # of `Objective`
KL_TYPES = ("k1", "k2", "k3")  # of `train.loss.KL`


@dataclass
class AlgoSection:
    """The settings that all objectives share; `algo_section` adds those of one objective.

    Attributes:
      kl_loss_coef: weight of an estimate of KL(policy || reference) in the loss; 0 needs no
        reference.
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
    dynamic_sampling: bool = True
    max_num_gen_batches: int = 10

    def __post_init__(self) -> None:
        if self.made_of is not algo_section(self.objective).made_of:
            raise ValueError(
                f"algo.objective={self.objective} has other options than this section; make it by "
                f"train.algo.algo({self.objective!r}, ...)"
            )
        self.build()
        if self.kl_loss_coef < 0 or self.tis_cap <= 0:
            raise ValueError(
                "expected kl_loss_coef >= 0 and tis_cap > 0, "
                f"got {self.kl_loss_coef} and {self.tis_cap}"
            )
        if self.entropy_coeff < 0:
            raise ValueError(f"expected entropy_coeff >= 0, got {self.entropy_coeff}")
        at_least("algo", self, updates_per_rollout=1)

    def settle(self, max_tokens: int) -> None:
        """Fills in `loss_scale_factor` if it is null and the objective divides by it.

        Args:
          max_tokens: largest number of tokens of a response.
        """
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


def algo(objective: str = DEFAULT, **settings: Any) -> AlgoSection:
    """Makes the section with an objective and settings, its own and the common ones."""
    return algo_section(objective)(**settings)


@functools.cache
def algo_section(objective: str) -> type[AlgoSection]:
    """The section's schema with the options of an objective.

    Raises:
      ValueError: there is no such objective, or it is no `specjax.interfaces.Objective`.
    """
    found = OBJECTIVES.find(objective)
    _check(objective, found)
    hints, docs = typing.get_type_hints(found), attribute_docs(found)
    own = [field for field in dataclasses.fields(found) if field.init]
    named = dataclasses.field(
        default=objective, metadata=AlgoSection.__dataclass_fields__["objective"].metadata
    )
    made = dataclasses.make_dataclass(
        AlgoSection.__name__,
        [
            ("objective", str, named),
            *((field.name, hints[field.name], _like(field, docs)) for field in own),
        ],
        bases=(AlgoSection,),
        namespace={
            "__doc__": AlgoSection.__doc__,
            "made_of": found,
            "rules": getattr(found, "rules", ()),
        },
    )
    made.__module__ = AlgoSection.__module__
    return made


def with_objective(schema: type[T], objective: str) -> type[T]:
    """A configuration's schema with the options of an objective in its section `algo`.

    Args:
      schema: `RLConfig`, or a class that is derived from it.
      objective: name of the objective.

    Raises:
      ValueError: see `algo_section`.
    """
    return _with_section(schema, algo_section(objective))


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


def _like(field: dataclasses.Field, docs: Mapping[str, str]) -> Any:
    """A field with the same default and documentation."""
    metadata = {"doc": docs.get(field.name, ""), **field.metadata}
    return dataclasses.field(
        default=field.default, default_factory=field.default_factory, metadata=metadata
    )
