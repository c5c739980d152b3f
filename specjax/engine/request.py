"""Inputs and outputs of the engine: jobs and their options, samples, and sums over samples."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from specjax.config import ModelConfig, SamplingParams
from specjax.decode.noise import request_words
from specjax.decode.options import (
    BAD_WORD_LENGTH,
    BAD_WORDS,
    BIAS_WIDTH,
    Features,
    Options,
    neutral,
)
from specjax.tokenizer import check_ids, decode

NO_LIMIT = (1 << 31) - 1
ERROR = "error"  # finish reason of a sample whose logits were no distribution


# --- outputs --------------------------------------------------------------------------------------


class AcceptRates:
    """Figures of the rounds of one sample or of several.

    Attributes:
      histogram: number of rounds by tokens emitted (index 0..steps+1).
      depths: number of rounds by the depth of their tree. Depth 0 is a round without drafts: the
        strategy was `off`, or the request opted out of speculation.
    """

    histogram: Sequence[int]
    depths: Sequence[int]

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return int(sum(self.histogram))

    @property
    def accepted(self) -> int:
        """Number of drafted tokens that were emitted."""
        return int(sum(k * rounds for k, rounds in enumerate(self.histogram[1:])))

    @property
    def accept_length(self) -> float:
        """Tokens per round, bonus included: 1 + accepted / rounds."""
        return 1.0 + self.accepted / self.rounds if self.rounds else float("nan")

    @property
    def drafted_rounds(self) -> int:
        """Number of rounds that drafted something."""
        return int(sum(self.depths[1:]))

    @property
    def plain_rounds(self) -> int:
        """Number of rounds that drafted nothing."""
        return int(sum(self.depths[:1]))

    @property
    def drafted_accept_length(self) -> float:
        """Accept length of the rounds that drafted something."""
        return 1.0 + self.accepted / self.drafted_rounds if self.drafted_rounds else float("nan")

    @property
    def accept_rate(self) -> float:
        """Accepted draft tokens over the most that could be: the sum of the depths of the trees."""
        offered = sum(depth * rounds for depth, rounds in enumerate(self.depths))
        return self.accepted / offered if offered else 0.0

    def per_depth(self) -> list[float]:
        """The share of rounds that accepted depth 1, 2, .., of those whose tree reaches it."""
        accepted = np.cumsum(self.histogram[::-1])[::-1][2:]
        offered = np.cumsum(self.depths[::-1])[::-1][1:]
        with np.errstate(invalid="ignore"):
            return (accepted / np.where(offered, offered, np.nan)).tolist()


@dataclasses.dataclass(frozen=True)
class SpecStats(AcceptRates):
    """Speculation figures of one sample, see `AcceptRates`.

    Attributes:
      drafted: number of drafted rows that were verified, rows without a candidate included.
    """

    histogram: tuple[int, ...]
    depths: tuple[int, ...] = ()
    drafted: int = 0


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
      records: [prompt - 1 + tokens, M ..] what the model's layers recorded (chosen experts) of the
        prompt and of the tokens, but for the last one, which was not read, see
        `specjax.interfaces.Mlp.run`; None where they record nothing.
      origins: origin of each token, one letter for each: `DRAFT`, `BONUS`, `PLAIN` or `UNKNOWN`.
      cached_tokens: number of prompt tokens that were taken from the prefix cache.
    """

    token_ids: list[int]
    text: str | None
    logprobs: list[float]
    finish_reason: str
    stats: SpecStats
    weight_versions: tuple[tuple[int, int], ...] = dataclasses.field(default=(), compare=False)
    transformed_logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    records: np.ndarray | None = dataclasses.field(default=None, compare=False)
    origins: str = dataclasses.field(default="", compare=False)
    cached_tokens: int = dataclasses.field(default=0, compare=False)

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


@dataclasses.dataclass
class Totals(AcceptRates):
    """Sums over samples, so that no metric is a mean of means; see `AcceptRates`.

    Attributes:
      steps: the most steps of a strategy.
      tokens: number of generated tokens.
      longest: number of tokens of the longest sample.
      seconds: duration of the whole run.
    """

    steps: int
    tokens: int = 0
    longest: int = 0
    seconds: float = 0.0

    def __post_init__(self):
        self.histogram = np.zeros(self.steps + 2, np.int64)
        self.depths = np.zeros(self.steps + 1, np.int64)

    def add(self, sample: SampleOutput) -> None:
        self.count_rounds(sample.stats)
        self.tokens += len(sample.token_ids)
        self.longest = max(self.longest, len(sample.token_ids))

    def count_rounds(self, rounds: AcceptRates) -> None:
        """Adds the rounds of samples whose tokens are counted elsewhere."""
        self.histogram[: len(rounds.histogram)] += np.asarray(rounds.histogram, np.int64)
        self.depths[: len(rounds.depths)] += np.asarray(rounds.depths, np.int64)

    def merge(self, other: Totals) -> None:
        """Adds the sums of a later run."""
        self.count_rounds(other)
        self.tokens += other.tokens
        self.longest = max(self.longest, other.longest)
        self.seconds += other.seconds


# --- jobs -----------------------------------------------------------------------------------------


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
      stop: stop strings to find in its text.
      decode: function from token ids to text, to find them.
      request: index of its request in a call, for messages and telemetry.
      sample: index of the sample in its request, likewise.
      where: name of its prompt in messages.
      seeded: whether the caller gave the seed, and so may repeat the request.
    """

    prompt: Sequence[int]
    limit: int
    words: np.ndarray
    stop_ids: tuple[int, ...]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    request: int = 0
    sample: int = 0
    where: str = "the prompt"
    seeded: bool = False

    def is_repeatable(self, dtype: str) -> bool:
        """Whether the caller may expect the same bits again, from a policy that computes so."""
        params = self.params
        asks = params.logprobs is not None or params.transformed_logprobs
        return asks or ((self.seeded or params.temperature == 0) and dtype != "float32")

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
    text_of = functools.partial(
        decode,
        tokenizer,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
    if not params.include_stop_str_in_output:
        return text_of
    names = {token: name for name, token in special_stops(tokenizer, params).items()}
    return lambda ids: text_of(ids) + (names.get(ids[-1], "") if len(ids) else "")


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
    if tokenizer is None and (params.stop or any(isinstance(w, str) for w in params.bad_words)):
        raise ValueError(
            f"{where}: stop and bad_words hold strings, and there is no tokenizer; give token ids"
        )
    special = special_stops(tokenizer, params)
    eos_ids = () if params.ignore_eos else eos_ids
    stops = (*params.stop_token_ids, *special.values(), *eos_ids)
    given = params.seed is not None
    params, first = (seeds or CallSeeds()).take(prompt, params)
    sample = functools.partial(
        Job,
        prompt=prompt,
        limit=NO_LIMIT if params.max_tokens is None else len(prompt) + params.max_tokens,
        stop_ids=tuple(dict.fromkeys(stops)),
        params=params,
        bad_words=bad_word_ids(where, params.bad_words, tokenizer),
        stop=tuple(string for string in params.stop if string not in special),
        decode=decoder_of(tokenizer, params) if params.stop else None,
        request=request,
        where=where,
        seeded=given,
    )
    return [
        sample(words=request_words(params.seed, prompt, first + number), sample=number)
        for number in range(params.n)
    ]


def special_stops(tokenizer, params: SamplingParams) -> dict[str, int]:
    """The ids of special tokens whose names are stop strings and are left out of the text.

    Raises:
      ValueError: a stop string has such a name and more, which the text never has.
    """
    if not params.stop or not params.skip_special_tokens:
        return {}
    added = getattr(tokenizer, "get_added_vocab", dict)()
    held = {name: t for name, t in added.items() if any(name in stop for stop in params.stop)}
    hidden = {name: token for name, token in held.items() if not decode(tokenizer, [token])}
    for stop in params.stop:
        if stop not in added and (names := [name for name in hidden if name in stop]):
            raise ValueError(
                f"stop: {stop!r} has more than the special token {names[0]!r}, which is left out; "
                "name that alone, or set skip_special_tokens=False"
            )
    return {stop: hidden[stop] for stop in params.stop if stop in hidden}


def bad_word_ids(
    where: str, words: Sequence[str | tuple[int, ...]], tokenizer
) -> tuple[tuple[int, ...], ...]:
    """Bad words as token ids; a string is banned at the start of a text and after a space.

    As in vLLM a string is encoded with and without a space before it. (vLLM keeps the second one
    only where it has as many tokens as the first and begins differently, and so lets through words
    that a space merges into fewer tokens; here both are banned.)

    Raises:
      ValueError: a string has no tokens.
    """
    ids: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            ids[tuple(word)] = None
            continue
        for text in (word.lstrip(), " " + word.lstrip()):
            encoded = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not encoded:
                raise ValueError(
                    f"{where}: bad_words holds {word!r}, which the tokenizer makes no token of"
                )
            ids[encoded] = None
    return tuple(ids)


# --- options of jobs ------------------------------------------------------------------------------


def check_prompt(where: str, prompt: Iterable, vocab: int, tokenizer=None) -> list[int]:
    """The prompt as a list of token ids; the tokenizer gives errors the token's text.

    Raises:
      ValueError: the prompt is empty, or holds something that is no token id below `vocab`.
    """
    prompt = list(prompt)
    for token in prompt:
        if not isinstance(token, numbers.Integral) or isinstance(token, bool):
            raise ValueError(f"{where} holds {token!r}; expected token ids, which are integers")
    if not prompt:
        raise ValueError(f"{where} is empty; expected at least one token")
    ids = list(map(int, prompt))
    check_ids(where, ids, vocab, tokenizer)
    return ids


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a job in an engine.

    Attributes:
      cfg: config of the model.
      max_len: the most prompt and generated tokens.
      stop_width: the most stop tokens.
      acceptance: acceptance mode of the engine; None: it decodes plainly.
    """

    cfg: ModelConfig
    max_len: int
    stop_width: int
    acceptance: str | None


def check_job(where: str, job: Job, limits: Limits) -> None:
    """Raises ValueError if the job's parameters do not fit the model or the engine."""
    params, cfg = job.params, limits.cfg
    least = len(job.prompt) + 1 if job.limit == NO_LIMIT else job.limit
    if least > limits.max_len:
        raise ValueError(
            f"{where} has {len(job.prompt)} tokens and max_tokens is {params.max_tokens}, together "
            f"more than max_len {limits.max_len}; shorten one, or raise that"
        )
    if len(job.stop_ids) > limits.stop_width:
        raise ValueError(
            f"{where} has {len(job.stop_ids)} stop tokens, at most {limits.stop_width} fit"
        )
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("bad_words", [token for word in job.bad_words for token in word]),
    ):
        check_ids(f"{where}: {name}", ids, cfg.vocab_size)
    longest = max(map(len, job.bad_words), default=0)
    for what, count, most in (
        ("logit_bias has {} tokens", len(params.logit_bias), BIAS_WIDTH),
        ("bad_words come to {} token sequences", len(job.bad_words), BAD_WORDS),
        ("a bad word has {} tokens", longest, BAD_WORD_LENGTH),
    ):
        if count > most:
            raise ValueError(f"{where}: {what.format(count)}; at most {most}")
    banned = {word[0] for word in job.bad_words if len(word) == 1}
    banned.update(job.stop_ids if params.min_tokens else ())
    allowed = params.allowed_token_ids or range(cfg.vocab_size)
    if len(banned) >= len(allowed) and banned.issuperset(allowed):
        raise ValueError(
            f"{where}: no token is left to generate beside bad words and what min_tokens masks"
        )
    if limits.acceptance == "greedy" and params.temperature > 0:
        raise ValueError(
            f"{where} has temperature {params.temperature}, and acceptance 'greedy' is exact for "
            "temperature 0 only; use acceptance 'coupled', or temperature=0"
        )


def features_of(job: Job, vocab: int) -> Features:
    """The features that a program must have to run this job."""
    p = job.params
    sampled = p.temperature > 0
    return Features(
        sampled=sampled,
        top_k=sampled and 0 < p.top_k < vocab,
        top_p=sampled and p.top_p < 1,
        min_p=sampled and p.min_p > 0,
        penalties=(
            p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        ),
        bias=any(value != 0 for _, value in p.logit_bias),
        allowed=bool(p.allowed_token_ids),
        bad_words=bool(job.bad_words),
        min_tokens=p.min_tokens > 0 and bool(job.stop_ids),
        transformed_logprobs=p.transformed_logprobs,
        top_logprobs=bool(p.logprobs),
    )


def option_rows(jobs: Sequence[Job], vocab: int, stop_width: int) -> Options:
    """The jobs' options as numpy arrays, one row per job."""
    rows = neutral(len(jobs), vocab, stop_width, np=np)
    masks: dict[int, np.ndarray] = {}  # by id of the parameters, which a request's samples share
    for r, job in enumerate(jobs):
        p = job.params
        rows.temperature[r] = p.temperature
        # Greedy jobs keep neutral filters: where another job of the batch needs top-p, it must not
        # change their argmax among tokens that tie.
        if p.temperature > 0:
            rows.top_k[r] = p.top_k if 0 < p.top_k < vocab else 0  # 0 keeps all
            rows.top_p[r], rows.min_p[r] = p.top_p, p.min_p
        rows.repetition[r] = p.repetition_penalty
        rows.presence[r], rows.frequency[r] = p.presence_penalty, p.frequency_penalty
        for i, (token, value) in enumerate(p.logit_bias):
            rows.bias_ids[r, i], rows.bias_values[r, i] = token, value
        if p.allowed_token_ids:
            mask = masks.get(id(p))
            mask = bitmask(p.allowed_token_ids, vocab) if mask is None else mask
            rows.allowed[r] = masks[id(p)] = mask
        for i, word in enumerate(job.bad_words):
            rows.bad_words[r, i, -len(word) :] = word
        rows.stop_ids[r, : len(job.stop_ids)] = job.stop_ids
        rows.prompt_len[r] = len(job.prompt)
        rows.min_len[r] = len(job.prompt) + p.min_tokens if p.min_tokens else 0
        rows.speculate[r] = p.speculative
    return rows


def bitmask(ids: Sequence[int], vocab: int) -> np.ndarray:
    """Words [ceil(vocab / 32)] in which bit v % 32 of word v // 32 is set iff v is in `ids`."""
    ids = np.asarray(ids, np.uint32)
    words = np.zeros(-(-vocab // 32), np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32))
    return words
