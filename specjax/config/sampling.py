"""`SamplingParams`: how one request is sampled."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.settings import option, part

MAX_TOP_LOGPROBS = 20
SMALLEST_TEMPERATURE = 1e-6
SEEDS = range(-(1 << 63), 1 << 64)  # what PyTorch takes, and so vLLM and others
SEED_RANGE = f"an integer of 64 bits, {SEEDS[0]} to {SEEDS[-1]}"

_INTEGERS = ("n", "min_tokens", "top_k")
_OPTIONAL_INTEGERS = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NUMBERS = ("temperature", "top_p", "min_p", *_PENALTIES)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Names and meanings are OpenAI's and vLLM's.

    The order is: penalties, bias and masks, temperature, top-k, top-p, min-p.

    Attributes:
      temperature: divisor of the logits. 0 is greedy decoding, in which top_k, top_p and min_p have
        no effect. A value below 1e-6 counts as 0, for the quotients would overflow float32.
      max_tokens: largest number of tokens to generate; None: as many as fit.
      min_tokens: number of tokens before which stop tokens are masked and stop strings ignored.
      top_k: keep the k most likely tokens (ties with the last one kept); 0 or -1 keeps all.
      top_p: keep the fewest most likely tokens whose mass is at least top_p.
      min_p: keep tokens at least min_p times as likely as the most likely one.
      repetition_penalty: number by which logits of tokens in the prompt or the output are divided
        (positive logits) or multiplied (negative ones) (Keskar et al. 2019).
      presence_penalty: number subtracted from the logit of every token that was generated.
      frequency_penalty: number subtracted from a token's logit for each time it was generated.
      logit_bias: token id -> number added to its logit, such as {5: -100}.
      stop: strings that end a sample; the text is cut before them. They may be, or hold, the names
        of special tokens, which the text itself leaves out.
      include_stop_str_in_output: leave the stop string in the text.
    """

    # `draws` and `stops` are properties of sections by which all samples of a program are drawn;
    # the requests of other programs may differ from their settings.
    temperature: float = 1.0
    max_tokens: int | None = 256
    min_tokens: int = 0
    top_k: int = option(0, needs="draws")
    top_p: float = option(1.0, needs="draws")
    min_p: float = option(0.0, needs="draws")
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Any = option(None, kind=dict[int, float])
    stop: Any = option(None, kind=str | list[str], several=True)
    include_stop_str_in_output: bool = option(False, needs="stops")

    def __post_init__(self):
        _put(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        bias = self.logit_bias or ()
        try:
            pairs = bias.items() if isinstance(bias, Mapping) else bias
            bias = tuple((int(token), float(value)) for token, value in pairs)
        except (TypeError, ValueError):
            raise ValueError(f"logit_bias must be numbers by token id, got {bias!r}") from None
        _put(self, "logit_bias", bias)
        for names, kind, expected in (
            (_INTEGERS, numbers.Integral, "an integer"),
            (_OPTIONAL_INTEGERS, numbers.Integral | None, "an integer, or None"),
            (_NUMBERS, numbers.Real, "a number"),
        ):
            for name in names:
                value = getattr(self, name, 1)
                if not isinstance(value, kind) or isinstance(value, bool):
                    raise ValueError(f"{name} must be {expected}, got {value!r}")
        for name, ok, expected in self._requirements():
            if not ok:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")
        if self.temperature < SMALLEST_TEMPERATURE:
            _put(self, "temperature", 0.0)

    def _requirements(self):
        yield "temperature", 0 <= self.temperature < math.inf, "a finite number >= 0 (0 is greedy)"
        most = math.inf if self.max_tokens is None else self.max_tokens
        yield "max_tokens", most >= 1, "at least 1"
        fits = 0 <= self.min_tokens <= most
        yield "min_tokens", fits, f"between 0 and max_tokens = {self.max_tokens}"
        yield "top_k", self.top_k >= -1, "at least 1, or 0 or -1 to keep all tokens"
        yield "top_p", 0 < self.top_p <= 1, "greater than 0 and at most 1"
        yield "min_p", 0 <= self.min_p <= 1, "between 0 and 1"
        for name in _PENALTIES:
            yield name, math.isfinite(getattr(self, name)), "a finite number"
        yield "repetition_penalty", self.repetition_penalty > 0, "greater than 0 (1 does nothing)"
        finite = all(math.isfinite(value) for _, value in self.logit_bias)
        yield "logit_bias", finite, "pairs of a token id and a finite number"
        distinct = len({token for token, _ in self.logit_bias}) == len(self.logit_bias)
        yield "logit_bias", distinct, "pairs with distinct token ids"
        yield "stop", all(isinstance(s, str) and s for s in self.stop), "strings that are not empty"

    def sampling_params(
        self, seed: int | None = 0, n: int = 1, transformed_logprobs: bool = False
    ) -> SamplingParams:
        """The parameters of a request that is sampled like this, see `SamplingParams`."""
        drawn = part(Sampling, self)
        return part(
            SamplingParams, drawn, seed=seed, n=n, transformed_logprobs=transformed_logprobs
        )


@dataclasses.dataclass(frozen=True)
class SamplingParams(Sampling):
    """How one request is sampled.

    Attributes:
      seed: the request's seed, of 64 bits with or without a sign (`SEEDS`). With the prompt's token
        ids and the number of the sample it keys every random number. Equal prompts with equal seeds
        in one call are numbered on: three of them with n=1 give the samples of one with n=3. None
        draws a seed for every call, which `RequestOutput.seed` reports.
      n: number of samples of this prompt, each with its own noise.
      ignore_eos: do not stop at the model's end-of-sequence tokens.
      stop_token_ids: further tokens that end a sample and are kept as its last token.
      allowed_token_ids: the only tokens that can be generated; None allows all.
      bad_words: token-id sequences (or strings, with a tokenizer) that are never completed. Where
        bad words or min_tokens would leave no token to generate, they have no effect at that
        position.
      detokenize: whether samples have a text; without one there are no stop strings.
      skip_special_tokens: whether the text leaves out special tokens.
      spaces_between_special_tokens: whether the text has spaces between special tokens, where the
        tokenizer's own decoder does not decide that (those of the library `tokenizers` do).
      transformed_logprobs: also return each token's log-probability under the distribution that was
        sampled, after all transforms; `SampleOutput.logprobs` is that of the temperature-scaled
        logits.
      logprobs: number of most likely tokens to return per generated token, of the
        temperature-scaled distribution and, with `transformed_logprobs`, of the transformed one;
        None: the generated token's log-probability alone.
      prompt_logprobs: number of most likely tokens to return per token of the prompt, under the raw
        logits; None: nothing of the prompt.
      speculative: whether this request is drafted for; False decodes it plainly.
    """

    seed: int | None = None
    n: int = 1
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: Any = option(None, kind=str | list[str], several=True)
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    transformed_logprobs: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculative: bool = True

    def __post_init__(self):
        _put(self, "stop_token_ids", _token_tuple("stop_token_ids", self.stop_token_ids or ()))
        if self.allowed_token_ids is not None:
            allowed = _token_tuple("allowed_token_ids", self.allowed_token_ids)
            _put(self, "allowed_token_ids", tuple(dict.fromkeys(allowed)))
        words = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words or ()
        words = (w if isinstance(w, str) else _token_tuple("bad_words", w) for w in words)
        _put(self, "bad_words", tuple(words))
        super().__post_init__()

    def _requirements(self):
        yield from super()._requirements()
        yield "seed", self.seed is None or is_seed(self.seed), SEED_RANGE
        yield "n", self.n >= 1, "at least 1"
        some = self.allowed_token_ids is None or len(self.allowed_token_ids) > 0
        yield "allowed_token_ids", some, "at least one token id (None allows all)"
        yield "bad_words", all(len(w) > 0 for w in self.bad_words), "words that are not empty"
        yield "stop", self.detokenize or not self.stop, "none where detokenize is False"
        for name in ("logprobs", "prompt_logprobs"):
            within = 0 <= (getattr(self, name) or 0) <= MAX_TOP_LOGPROBS
            yield name, within, f"between 0 and {MAX_TOP_LOGPROBS}"


def _put(params: Sampling, name: str, value: Any) -> None:
    object.__setattr__(params, name, value)


def is_seed(value: numbers.Integral) -> bool:
    """Whether a value is a seed, one of `SEEDS`."""
    return int(value) in SEEDS  # a range compares one by one with integers that are not Python's


def _token_tuple(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(token) for token in ids)
    except TypeError:
        raise ValueError(f"{name} must hold token ids, got {ids!r}") from None
