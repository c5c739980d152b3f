"""`SamplingParams`: how one request is sampled."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Mapping, Sequence

from specjax.spelling import checks_keywords

MAX_TOP_LOGPROBS = 20
SMALLEST_TEMPERATURE = 1e-6
SEEDS = range(-(1 << 63), 1 << 64)  # what PyTorch takes, and so vLLM and others
SEED_RANGE = f"an integer of 64 bits, {SEEDS[0]} to {SEEDS[-1]}"

_INTEGER, _REAL = (numbers.Integral,), (numbers.Real,)
_TYPES = (
    *((name, _INTEGER, "an integer") for name in ("n", "min_tokens", "top_k")),
    ("seed", (*_INTEGER, type(None)), "an integer, or None to draw one"),
    ("max_tokens", (*_INTEGER, type(None)), "an integer, or None for as many as fit"),
    *(
        (name, (*_INTEGER, type(None)), "an integer, or None for none")
        for name in ("logprobs", "prompt_logprobs")
    ),
    *((name, _REAL, "a number") for name in ("temperature", "top_p", "min_p")),
    *((f"{name}_penalty", _REAL, "a number") for name in ("repetition", "presence", "frequency")),
)


@checks_keywords
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Names and meanings are OpenAI's and vLLM's.

    The order is: penalties, bias and masks, temperature, top-k, top-p, min-p.

    Attributes:
      temperature: divisor of the logits. 0 is greedy decoding, in which top_k, top_p and min_p have
        no effect. A value below 1e-6 counts as 0, for the quotients would overflow float32.
      max_tokens: largest number of tokens to generate; None: as many as fit.
      min_tokens: number of tokens before which stop tokens are masked and stop strings ignored.
      seed: the request's seed, of 64 bits with or without a sign (`SEEDS`). With the prompt's token
        ids and the number of the sample it keys every random number. Equal prompts with equal seeds
        in one call are numbered on: three of them with n=1 give the samples of one with n=3. None
        draws a seed for every call, which `RequestOutput.seed` reports.
      n: number of samples of this prompt, each with its own noise.
      top_k: keep the k most likely tokens (ties with the last one kept); 0 or -1 keeps all.
      top_p: keep the fewest most likely tokens whose mass is at least top_p.
      min_p: keep tokens at least min_p times as likely as the most likely one.
      repetition_penalty: number by which logits of tokens in the prompt or the output are divided
        (positive logits) or multiplied (negative ones) (Keskar et al. 2019).
      presence_penalty: number subtracted from the logit of every token that was generated.
      frequency_penalty: number subtracted from a token's logit for each time it was generated.
      logit_bias: token id -> number added to its logit.
      allowed_token_ids: the only tokens that can be generated; None allows all.
      bad_words: token-id sequences (or strings, with a tokenizer) that are never completed. Where
        bad words or min_tokens would leave no token to generate, they have no effect at that
        position.
      ignore_eos: do not stop at the model's end-of-sequence tokens.
      stop_token_ids: further tokens that end a sample and are kept as its last token.
      stop: strings that end a sample; the text is cut before them. They may be, or hold, the names
        of special tokens, which the text itself leaves out.
      include_stop_str_in_output: leave the stop string in the text.
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
      strategy: name of the strategy for this request, one of those that the engine compiled; None:
        the engine's controller chooses. Samples that ask for different strategies take turns.
    """

    temperature: float = 1.0
    max_tokens: int | None = 256
    seed: int | None = None
    n: int = 1
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    transformed_logprobs: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculative: bool = True
    strategy: str | None = None

    def __post_init__(self):
        for name, kinds, expected in _TYPES:
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ValueError(f"{name} must be {expected}, got {value!r}")
        self._freeze()
        for name, ok, expected in self._requirements():
            if not ok:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")
        if self.temperature < SMALLEST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)

    def _freeze(self) -> None:
        """Makes tuples of lists and mappings; a bare string is one stop string or bad word."""

        def put(name, value):
            object.__setattr__(self, name, value)

        put("stop_token_ids", _token_tuple("stop_token_ids", self.stop_token_ids or ()))
        put("stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        bias = self.logit_bias or ()
        pairs = bias.items() if isinstance(bias, Mapping) else bias
        put("logit_bias", tuple((int(token), float(value)) for token, value in pairs))
        if self.allowed_token_ids is not None:
            allowed = _token_tuple("allowed_token_ids", self.allowed_token_ids)
            put("allowed_token_ids", tuple(dict.fromkeys(allowed)))
        words = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words or ()
        put(
            "bad_words",
            tuple(w if isinstance(w, str) else _token_tuple("bad_words", w) for w in words),
        )

    def _requirements(self):
        number = math.isfinite
        yield "temperature", 0 <= self.temperature < math.inf, "a finite number >= 0 (0 is greedy)"
        most = math.inf if self.max_tokens is None else self.max_tokens
        yield "max_tokens", most >= 1, "at least 1"
        yield "seed", self.seed is None or is_seed(self.seed), SEED_RANGE
        yield "n", self.n >= 1, "at least 1"
        fits = 0 <= self.min_tokens <= most
        yield "min_tokens", fits, f"between 0 and max_tokens = {self.max_tokens}"
        yield "top_k", self.top_k >= -1, "at least 1, or 0 or -1 to keep all tokens"
        yield "top_p", 0 < self.top_p <= 1, "greater than 0 and at most 1"
        yield "min_p", 0 <= self.min_p <= 1, "between 0 and 1"
        positive = self.repetition_penalty > 0 and number(self.repetition_penalty)
        yield "repetition_penalty", positive, "a finite number greater than 0 (1 does nothing)"
        yield "presence_penalty", number(self.presence_penalty), "a finite number (0 does nothing)"
        finite = number(self.frequency_penalty)
        yield "frequency_penalty", finite, "a finite number (0 does nothing)"
        finite = all(number(value) for _, value in self.logit_bias)
        yield "logit_bias", finite, "pairs of a token id and a finite number"
        distinct = len({token for token, _ in self.logit_bias}) == len(self.logit_bias)
        yield "logit_bias", distinct, "pairs with distinct token ids"
        some = self.allowed_token_ids is None or len(self.allowed_token_ids) > 0
        yield "allowed_token_ids", some, "at least one token id (None allows all)"
        yield "bad_words", all(len(w) > 0 for w in self.bad_words), "words that are not empty"
        yield "stop", all(isinstance(s, str) and s for s in self.stop), "strings that are not empty"
        yield "stop", self.detokenize or not self.stop, "none where detokenize is False"
        for name in ("logprobs", "prompt_logprobs"):
            within = 0 <= (getattr(self, name) or 0) <= MAX_TOP_LOGPROBS
            yield name, within, f"between 0 and {MAX_TOP_LOGPROBS}"


def is_seed(value: numbers.Integral) -> bool:
    """Whether a value is a seed, one of `SEEDS`."""
    return int(value) in SEEDS  # a range compares one by one with integers that are not Python's


def _token_tuple(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(token) for token in ids)
    except TypeError:
        raise ValueError(f"{name} must hold token ids, got {ids!r}") from None
