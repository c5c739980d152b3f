"""Inputs and outputs of the engine: jobs, samples, and sums over samples."""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from specjax.config import SamplingParams
from specjax.decode.noise import request_words
from specjax.tokenizer import decode

NO_LIMIT = (1 << 31) - 1
ERROR = "error"  # finish reason of a sample whose logits were no distribution


@dataclasses.dataclass(frozen=True)
class SpecStats:
    """Speculation figures of one sample.

    Attributes:
      rounds: number of rounds in which the sample ran.
      drafted: number of drafted rows that were verified, rows without a candidate included.
      accepted: number of drafted tokens that were emitted.
      histogram: number of rounds by tokens emitted (index 0..steps+1); its sum is `rounds`.
      depths: number of rounds by the depth of their tree. Depth 0 is a round without drafts: the
        strategy was `off`, or the request opted out of speculation.
    """

    rounds: int
    drafted: int
    accepted: int
    histogram: tuple[int, ...]
    depths: tuple[int, ...] = ()

    @property
    def plain_rounds(self) -> int:
        """Number of rounds that drafted nothing."""
        return self.depths[0] if self.depths else 0

    @property
    def accept_length(self) -> float:
        """Tokens per round, bonus included: 1 + accepted / rounds."""
        return 1.0 + self.accepted / self.rounds if self.rounds else float("nan")


# Where a token came from, in `SampleOutput.origins`.
DRAFT = "d"  # an accepted draft
# The last token of a round that drafted: the target's own, or, where the end of the sample cuts the
# round, the token at which it is cut, which may be a draft. There are as many as there are rounds.
BONUS = "b"
PLAIN = "p"  # the target's own, in a round that drafted nothing
UNKNOWN = "?"  # from an earlier run of the sample that did not record it, or not sampled


@dataclasses.dataclass(frozen=True)
class SampleOutput:
    """One finished sample. All logprobs are the target's, one entry per token.

    Attributes:
      token_ids: the generated tokens.
      text: text of these tokens, cut at a stop string; None without a tokenizer, or where it was
        not asked for.
      logprobs: log-probability of each token in the temperature-scaled distribution.
      finish_reason: `stop` (a stop token or stop string), `length`, `abort`, or `error` (the logits
        of the next token hold NaN or +inf, or are all -inf; see `error`).
      stats: speculation figures.
      weight_versions: runs of tokens that were sampled by the same weights, as (index of the first
        token, version); see `Engine.version`.
      transformed_logprobs: log-probability of each token in the transformed distribution, from
        which it was sampled; None unless asked for.
      top_logprobs: token id -> logprob of the most likely tokens, best first, in the
        temperature-scaled distribution. The generated token is always included, at the end if it is
        none of them. None unless asked for.
      top_transformed_logprobs: the same for the transformed distribution, without tokens that it
        excludes; None unless both are asked for.
      records: [tokens M ..] what the model's layers recorded (chosen experts) in the rows that
        decided the tokens, see `specjax.interfaces.Mlp.run`; None where they record nothing.
      origins: origin of each token, one letter for each: `DRAFT`, `BONUS`, `PLAIN` or `UNKNOWN`.
    """

    token_ids: list[int]
    text: str | None
    logprobs: list[float]
    finish_reason: str
    stats: SpecStats
    weight_versions: tuple[tuple[int, int], ...] = dataclasses.field(default=(), compare=False)
    transformed_logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    top_transformed_logprobs: list[dict[int, float]] | None = None
    records: np.ndarray | None = dataclasses.field(default=None, compare=False)
    origins: str = dataclasses.field(default="", compare=False)

    @property
    def error(self) -> str | None:
        """The error message if the finish reason is `error`; else None."""
        if self.finish_reason != ERROR:
            return None
        count = len(self.token_ids)
        place = f"the token after {count} generated ones" if count else "the first token"
        return why_invalid(place, "there is nothing to sample")


def why_invalid(place: str, so: str) -> str:
    """The error message about logits that are no distribution.

    Args:
      place: description of the token whose logits they are.
      so: consequence, the end of a sentence.
    """
    return (
        f"the model's logits for {place} hold NaN or +inf, or are -inf for every token, so {so}; "
        "the prompt reaches weights that are not finite, or the arithmetic overflows: check the "
        "checkpoint, or use another dtype"
    )


class InvalidLogitsError(RuntimeError):
    """The model's logits were no distribution: samples ended, or a prompt has no scores."""


def require_valid(
    samples: Iterable[SampleOutput], name: Callable[[int], str] = "sample {}".format
) -> None:
    """Raises InvalidLogitsError if a sample has the finish reason `error`.

    Args:
      name: function that returns the name of the sample with an index, for the message.
    """
    for index, sample in enumerate(samples):
        if sample.error is not None:
            raise InvalidLogitsError(f"{name(index)}: {sample.error}")


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """All samples of one prompt.

    Attributes:
      seed: seed of the samples. `SamplingParams(seed=...)` with this one repeats the call.
      prompt_logprobs: token id -> logprob of the most likely tokens, best first, and of the
        prompt's own token, for each of its tokens but the first, which has None; under the raw
        logits. None unless asked for.
    """

    prompt_token_ids: list[int]
    samples: list[SampleOutput]
    seed: int
    prompt_logprobs: list[dict[int, float] | None] | None = None


@dataclasses.dataclass(frozen=True)
class Job:
    """One sample to generate.

    Attributes:
      prompt: token ids of the prompt.
      limit: the most prompt and generated tokens; NO_LIMIT: as many as fit.
      words: the five uint32 words that key its randomness.
      stop_ids: tokens that end it.
      params: how it is sampled, with a seed.
      bad_words: its bad words as token ids.
      decode: function from token ids to text, to find stop strings; None: there are none.
      name: function that returns the text of a special token, to find it in stop strings.
      request: index of its request in a call, for messages and telemetry.
      sample: index of the sample in its request, likewise.
      where: name of its prompt in messages.
    """

    prompt: Sequence[int]
    limit: int
    words: np.ndarray
    stop_ids: tuple[int, ...]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    name: Callable[[int], str] | None = None
    request: int = 0
    sample: int = 0
    where: str = "the prompt"

    @functools.cached_property
    def prompt_hash(self) -> int:
        """A hash by which samples of the same prompt are grouped."""
        return hash(tuple(self.prompt))

    def without_speculation(self) -> Job:
        """A job for the same sample, decoded plainly."""
        return dataclasses.replace(self, params=dataclasses.replace(self.params, speculative=False))


def draw_seed() -> int:
    """Draws a seed, of as many bits as JSON numbers keep."""
    return secrets.randbits(53)


class CallSeeds:
    """The seeds of the requests of one call, and the numbers of their samples.

    Requests without a seed share one that is drawn. The samples of a prompt that comes again with
    the same seed are numbered after those of the earlier ones.

    Args:
      draw: function that draws the seed.
    """

    def __init__(self, draw: Callable[[], int] = draw_seed):
        self._draw = functools.cache(draw)
        self._samples: Counter[tuple[int, tuple[int, ...]]] = Counter()

    def take(self, prompt: Sequence[int], params: SamplingParams) -> tuple[SamplingParams, int]:
        """Returns the parameters with a seed, and the number of the request's first sample."""
        if params.seed is None:
            params = dataclasses.replace(params, seed=self._draw())
        key = params.seed, tuple(prompt)
        first = self._samples[key]
        self._samples[key] += params.n
        return params, first


def decoder_of(tokenizer, params: SamplingParams) -> Callable[[Sequence[int]], str]:
    """The function from token ids to text that the parameters of a request ask for."""
    return functools.partial(
        decode,
        tokenizer,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )


def make_jobs(
    prompt: Sequence[int],
    params: SamplingParams,
    eos_ids: Sequence[int],
    tokenizer=None,
    request: int = 0,
    where: str | None = None,
    seeds: CallSeeds | None = None,
) -> list[Job]:
    """One job per sample of a request.

    Args:
      prompt: token ids of the prompt.
      params: how its samples are sampled.
      eos_ids: end-of-sequence tokens of the model.
      tokenizer: tokenizer for stop strings, and for bad words that are strings.
      request: index of the request.
      where: name of the prompt in messages; None: `prompt` and the index of the request.
      seeds: seeds of the call; None: the request is a call of its own.

    Raises:
      ValueError: there are strings and no tokenizer.
    """
    where = where or f"prompt {request}"
    stops = tuple(params.stop_token_ids) + (() if params.ignore_eos else tuple(eos_ids))
    most = NO_LIMIT if params.max_tokens is None else len(prompt) + params.max_tokens
    params, first = (seeds or CallSeeds()).take(prompt, params)
    try:
        bad_words = bad_word_ids(params.bad_words, tokenizer)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    decode = name = None
    if params.stop:
        if tokenizer is None:
            raise ValueError(
                f"{where}: stop holds strings, got {params.stop!r}, and there is no "
                "tokenizer to find them with; pass one (LLM(..., tokenizer=...)), or use "
                "stop_token_ids"
            )
        decode = decoder_of(tokenizer, params)
        if params.skip_special_tokens:  # else they are in the text
            name = functools.cache(functools.partial(special_name, tokenizer))
    stop_ids = tuple(dict.fromkeys(stops))
    return [
        Job(
            prompt=prompt,
            limit=most,
            words=request_words(params.seed, prompt, first + sample),
            stop_ids=stop_ids,
            params=params,
            bad_words=bad_words,
            decode=decode,
            name=name,
            request=request,
            sample=sample,
            where=where,
        )
        for sample in range(params.n)
    ]


def special_name(tokenizer, token: int) -> str:
    """The text of a special token, which decoding leaves out; empty for any other token."""
    if decode(tokenizer, [token]):
        return ""
    return decode(tokenizer, [token], skip_special_tokens=False)


def bad_word_ids(words: Sequence[str | tuple[int, ...]], tokenizer) -> tuple[tuple[int, ...], ...]:
    """Bad words as token ids; a string is banned at the start of a text and after a space.

    As in vLLM a string is encoded with and without a space before it. (vLLM keeps the second one
    only where it has as many tokens as the first and begins differently, and so lets through words
    that a space merges into fewer tokens; here both are banned.)

    Raises:
      ValueError: a string and no tokenizer, or a string without tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        if tokenizer is None:
            raise ValueError(
                f"bad_words holds the string {word!r} and there is no tokenizer to encode it; pass "
                "token ids, or LLM(..., tokenizer=...)"
            )
        for prefix in ("", " "):
            ids = tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False))
            if not ids:
                raise ValueError(f"bad_words holds {word!r}, which the tokenizer makes no token of")
            found[ids] = None
    return tuple(found)


@dataclasses.dataclass
class Totals:
    """Sums over samples, so that no metric is a mean of means.

    Attributes:
      steps: the most steps of a strategy.
      histogram: number of rounds by tokens emitted.
      tokens: number of generated tokens.
      longest: number of tokens of the longest sample.
      seconds: duration of the whole run.
      depths: number of rounds by the depth of their tree.
    """

    steps: int
    histogram: np.ndarray
    tokens: int = 0
    longest: int = 0
    seconds: float = 0.0
    depths: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self):
        self.depths = np.zeros(self.steps + 1, np.int64)

    def add(self, sample: SampleOutput) -> None:
        self.count_rounds(sample.stats)
        self.tokens += len(sample.token_ids)
        self.longest = max(self.longest, len(sample.token_ids))

    def count_rounds(self, stats: SpecStats) -> None:
        """Adds the rounds of a sample whose tokens are counted elsewhere."""
        for emitted, rounds in enumerate(stats.histogram):
            self.histogram[emitted] += rounds
        for depth, rounds in enumerate(stats.depths):
            self.depths[depth] += rounds

    def merge(self, other: Totals) -> None:
        """Adds the sums of a later run."""
        self.histogram = self.histogram + other.histogram
        self.tokens += other.tokens
        self.longest = max(self.longest, other.longest)
        self.seconds += other.seconds
        self.depths = self.depths + other.depths

    @property
    def rounds(self) -> int:
        return int(self.histogram.sum())

    @property
    def accepted(self) -> int:
        return int((self.histogram[1:] * np.arange(len(self.histogram) - 1)).sum())

    @property
    def accept_length(self) -> float:
        return 1.0 + self.accepted / self.rounds if self.rounds else float("nan")

    @property
    def drafted_rounds(self) -> int:
        """Number of rounds that drafted something."""
        return int(self.depths[1:].sum())

    @property
    def drafted_accept_length(self) -> float:
        """Accept length of the rounds that drafted something."""
        return 1.0 + self.accepted / self.drafted_rounds if self.drafted_rounds else float("nan")

    @property
    def accept_rate(self) -> float:
        """Accepted draft tokens over the most that could be: the sum of the depths of the trees."""
        offered = int(self.depths @ np.arange(len(self.depths)))
        return self.accepted / offered if offered else 0.0

    def per_depth(self) -> list[float]:
        """The share of rounds that accepted depth 1, 2, .., of those whose tree reaches it."""
        accepted = np.cumsum(self.histogram[::-1])[::-1][2:]
        offered = np.cumsum(self.depths[::-1])[::-1][1:]
        with np.errstate(invalid="ignore"):
            return (accepted / np.where(offered, offered, np.nan)).tolist()
