"""How rollouts sample: the keys of `rollout` that `SamplingParams` has, under the same names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from specjax.config import SamplingParams
from specjax.schema import option

# Those that make another distribution of the logits than a temperature does.
FILTERS = ("top_k", "top_p", "min_p")  # these do nothing where the temperature is 0
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
TRANSFORMS = (*FILTERS, *PENALTIES, "logit_bias", "min_tokens")


@dataclass
class SamplingSection:
    """How the samples of a rollout, and those of the evaluation, are drawn."""

    temperature: float = option(1.0, "sampling temperature; 0 is greedy")
    max_tokens: int = option(160, "response tokens at most")
    min_tokens: int = option(
        0, "stop tokens are masked, and stop strings ignored, before so many response tokens"
    )
    top_k: int = option(0, "keep the k most likely tokens; 0 or -1: all")
    top_p: float = option(1.0, "keep the fewest most likely tokens with this share of the mass")
    min_p: float = option(0.0, "keep tokens at least so many times as likely as the likeliest one")
    repetition_penalty: float = option(
        1.0,
        "divides positive logits of tokens seen in prompt or response, multiplies negative ones",
    )
    presence_penalty: float = option(0.0, "subtracted from logits of tokens of the response")
    frequency_penalty: float = option(0.0, "likewise, once per occurrence")
    logit_bias: dict[int, float] = option(
        {}, 'token id -> number added to its logit, such as {5: -100} or {"5": -100}'
    )
    stop: list[str] = option(
        [],
        "strings that end a response; it is trained on with the tokens of the string, and the "
        "reward sees the text before it",
    )
    include_stop_str_in_output: bool = option(False, "the reward sees the stop string, too")

    def sampling_params(
        self, seed: int = 0, n: int = 1, transformed_logprobs: bool = False
    ) -> SamplingParams:
        """How a group of n samples is drawn.

        Args:
          transformed_logprobs: the engine tells how likely tokens were after all transforms, too.

        Raises:
          ValueError: a value is none that there is.
        """
        own = {f.name: getattr(self, f.name) for f in fields(SamplingSection)}
        own |= {"stop": tuple(self.stop), "logit_bias": tuple(self.logit_bias.items())}
        try:
            return SamplingParams(**own, seed=seed, n=n, transformed_logprobs=transformed_logprobs)
        except ValueError as error:
            raise ValueError(f"rollout.{error}") from error


def transforms(values: Mapping[str, Any]) -> list[str]:
    """Which of TRANSFORMS a rollout samples with.

    Args:
      values: of the keys of `rollout`, by their names without it.
    """
    neutral = {f.name: f.default for f in fields(SamplingParams)}
    names = [
        name
        for name in TRANSFORMS
        if (values[name] or None) != (neutral[name] or None)  # {} is () here
        and not (name in FILTERS and values["temperature"] == 0)
    ]
    return [name for name in names if name != "top_k" or values[name] > 0]
