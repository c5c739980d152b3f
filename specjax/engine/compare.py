"""Decides why speculative and plain decoding of one request differ: rounding, or a bug.

In `coupled` mode both draw the same noise. So their tokens can differ only where the logits of the
two programs differ in their last bits, and either the two best perturbed scores are that close, or
one of the two tokens lies at the edge of a filter (top-k, top-p, min-p). `first_difference`
recomputes the logits at the first differing position by three programs (full forward, one-row
decode, tree-row decode), measures how far apart they are, and tries whether changes of the logits
by no more than that make either token win.

Where a mixture of experts recorded the experts of each row, these are compared first. A row that
has other experts in one decoding, because its router's scores nearly tied, has other logits than by
rounding, and so have the rows after it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.config import ModelConfig
from specjax.decode import sampling
from specjax.decode.noise import request_keys, target_noise
from specjax.decode.options import Features, Options
from specjax.decode.sampling import context_of, count_tokens, root_rows
from specjax.decode.tree import chain_bits
from specjax.engine.request import Job, features_of, option_rows
from specjax.engine.settings import padded_widths
from specjax.interfaces import Param, Room, Where
from specjax.memory import Commit, commit, empty
from specjax.models.mlps.moe import Mixture
from specjax.models.transformer import graphdef, no_records, record_form, recording_layers
from specjax.parallel import sharding
from specjax.weights.matrix import precision_of

# A difference of logits beyond this share of the largest logit is not rounding.
ROUNDING_LIMIT = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
# The least change that is tried: sums over a large vocabulary in float32 differ by about this share
# between orders of summation.
LEAST_SLACK = 1e-5


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference between the two decodings of one sample.

    Attributes:
      request: index of the request.
      sample: index of the sample in the request.
      position: absolute position of the differing token.
      plain_token: token of plain decoding; -1: it had already ended.
      spec_token: token of speculative decoding; -1: it had already ended.
      logit_difference: largest difference of a logit between the programs at this position.
      explained: whether floating point explains the difference: the logits differ by no more than
        rounding, and in both programs either token would be sampled after some change of the logits
        by no more than that difference. Or other experts were chosen at a near-tie before it.
      flip: the first row, and the number of its layer, that has other experts in both decodings.
    """

    request: int
    sample: int
    position: int
    plain_token: int
    spec_token: int
    logit_difference: float
    explained: bool
    flip: tuple[int, int] | None = None

    def __str__(self) -> str:
        verdict = "explained by floating point" if self.explained else "NOT explained: a bug"
        if self.flip is not None:
            row, layer = self.flip
            tie = "at a near-tie of its router" if self.explained else "and its router has no tie"
            verdict += f"; row {row} has other experts in layer {layer}, {tie}"
        return (
            f"request {self.request} sample {self.sample} position {self.position}: plain "
            f"{self.plain_token}, speculative {self.spec_token}; logit difference "
            f"{self.logit_difference:.3g}; {verdict}"
        )


def first_differences(
    runner, jobs: Sequence[Job], plain: Sequence[Any], spec: Sequence[Any]
) -> list[Difference]:
    """The first difference of every job whose tokens differ, see `first_difference`.

    Args:
      runner: runner of the speculative engine.
      jobs: jobs that both engines decoded.
      plain: tokens, or the sample, of each job by plain decoding.
      spec: the same by speculative decoding.
    """
    return [
        first_difference(runner, job, a, b)
        for job, a, b in zip(jobs, plain, spec, strict=True)
        if _tokens_of(a) != _tokens_of(b)
    ]


def _tokens_of(sample: Any) -> Sequence[int]:
    return getattr(sample, "token_ids", sample)


def first_difference(runner, job: Job, plain: Any, spec: Any) -> Difference:
    """Finds the first difference between two token lists of one job, and whether it is rounding.

    In `invariant` mode both decodings run the same arithmetic, so rounding explains no difference.

    Args:
      runner: runner of the speculative engine, of which the parameters and the tree are used.
      job: the sample that was decoded.
      plain: tokens of plain decoding, or the sample with its tokens and records.
      spec: the same of speculative decoding.
    """
    records = [getattr(sample, "records", None) for sample in (plain, spec)]
    plain, spec = _tokens_of(plain), _tokens_of(spec)
    index = next(
        (i for i, (a, b) in enumerate(zip(plain, spec, strict=False)) if a != b),
        min(len(plain), len(spec)),
    )
    position = len(job.prompt) + index
    a = plain[index] if index < len(plain) else -1
    b = spec[index] if index < len(spec) else -1
    context = np.array([*job.prompt, *plain[:index]], np.int32)
    logits = _logits_by_program(runner, context)
    spread = float(max(np.abs(row - logits[0]).max() for row in logits[1:]))
    largest = max(1.0, float(np.abs(logits[0]).max()))
    slack = max(spread, LEAST_SLACK, np.finfo(np.float32).eps * largest)

    def moved(row: np.ndarray, token: int, by: float) -> np.ndarray:
        row = row - by
        row[token] += 2 * by
        return row

    # Each token gains, or the other one loses, against all others.
    moves = (a, slack), (b, -slack), (b, slack), (a, -slack)
    rows = [moved(row, *move) for row in logits[1:] for move in moves]
    perturbed = _perturbed(runner, job, context, np.stack(rows))
    sampled = perturbed.argmax(-1).reshape(2, 2, 2)  # by program, token and way
    either = (sampled == np.array([[a], [b]])).any(-1).all()

    # Rounding neither ends a sample early nor moves a mask.
    flip, is_tie = None, False
    if all(record is not None for record in records):
        flip, is_tie = _flip(runner, context, *records)
    if flip is not None:
        by_own = np.stack([_replayed(runner, context, record) for record in records])
        slack = ROUNDING_LIMIT[runner.cfg.run.compute_dtype] * largest
        rows = np.stack([moved(row, t, slack) for row, t in zip(by_own, (a, b), strict=True)])
        can_win = (_perturbed(runner, job, context, rows).argmax(-1) == (a, b)).all()
        explained = is_tie and bool(can_win) and a >= 0 and b >= 0 and not runner.plan.invariant
        return Difference(job.request, job.sample, position, a, b, spread, explained, flip)
    is_rounding = spread <= ROUNDING_LIMIT[runner.cfg.run.compute_dtype] * largest
    explained = is_rounding and not runner.plan.invariant and a >= 0 and b >= 0 and bool(either)
    return Difference(job.request, job.sample, position, a, b, spread, explained)


def _flip(
    runner, context: np.ndarray, plain: np.ndarray, spec: np.ndarray
) -> tuple[tuple[int, int] | None, bool]:
    """Finds the first row and layer with other experts, and whether its router nearly ties.

    The scores are those of a full forward pass with the experts of plain decoding. It is a near-tie
    if changes of the scores that rounding explains make both choices.
    """
    rows, cfg = min(len(context), len(plain), len(spec)), runner.cfg
    differs = (np.sort(plain[:rows]) != np.sort(spec[:rows])).any(-1)
    if not differs.any():
        return None, False
    row, place = np.unravel_index(differs.argmax(), differs.shape)
    layer = [*recording_layers(cfg)][place]
    mlp = cfg.layers[layer].mlp
    if not isinstance(mlp, Mixture):
        return None, False
    tokens, given = _given(cfg, context, plain)
    with sharding.ambient(runner.mesh), precision_of(cfg):
        bits = _scores(cfg, runner.weights.policy, tokens, given)
    scores = np.asarray(bits)[0, row, place].view(np.float32)
    one, other = (set(record[row, place].tolist()) for record in (plain, spec))
    involved = np.abs(scores[[*(one | other)]]).max()
    slack = ROUNDING_LIMIT[cfg.run.compute_dtype] * max(1.0, float(involved))

    def can_choose(wanted: set[int], instead_of: set[int]) -> bool:
        moved = scores.copy()
        moved[[*(wanted - instead_of)]] += slack
        moved[[*(instead_of - wanted)]] -= slack
        return {*np.asarray(mlp.choose(moved)).tolist()} == wanted

    return (int(row), layer), can_choose(one, other) and can_choose(other, one)


def _given(
    cfg: ModelConfig, context: np.ndarray, records: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a context as padded tokens [1 M], and its records."""
    tokens, _ = padded_contexts([context])
    given, rows = no_records(record_form(cfg), *tokens.shape), min(len(context), len(records))
    given[0, :rows] = records[:rows]
    return tokens, given


def _replayed(runner, context: np.ndarray, records: np.ndarray) -> np.ndarray:
    """Returns the next-token logits [V] of a full forward pass with the experts of a decoding."""
    tokens, given = _given(runner.cfg, context, records)
    lengths = np.array([len(context)], np.int32)
    with sharding.ambient(runner.mesh), precision_of(runner.cfg):
        logits = _full(runner.cfg, runner.weights.policy, tokens, lengths, given)
    return np.asarray(logits[0], np.float32)


@dataclasses.dataclass(frozen=True)
class _Scored:
    """A mixture that records the bits of its scores in place of the experts."""

    mlp: Mixture
    kind: ClassVar[str] = "scored"

    def params(self, width: int) -> Mapping[str, Param]:
        return self.mlp.params(width)

    def run(self, w, x, where, given=None):
        out, _, figures = self.mlp.run(w, x, where, given)
        bits = jax.lax.bitcast_convert_type(self.mlp.scores(w, x), jnp.int32)
        return out, bits, figures


@functools.partial(jax.jit, static_argnums=0)
def _scores(cfg: ModelConfig, params, tokens, given):
    """Scores of the routers of all mixtures in a full forward pass, as bits [1 M layers E]."""
    layers = (
        dataclasses.replace(layer, mlp=_Scored(layer.mlp))
        if isinstance(layer.mlp, Mixture)
        else layer
        for layer in cfg.layers
    )
    model = _model(cfg.replace(layers=tuple(layers)), params)
    positions = jnp.arange(tokens.shape[1])[None]
    return model.hidden(tokens, positions, jnp.ones_like(positions), given=given).records


def _perturbed(runner, job: Job, context: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """The scores [N V] for the token after `context`, with the noise of its position, in float64.

    Args:
      logits: logits before all transforms, [N V].
    """
    vocab, count = runner.cfg.vocab_size, len(logits)
    features = dataclasses.replace(
        features_of(job, vocab), transformed_logprobs=False, top_logprobs=False
    )
    options = option_rows([job] * count, vocab, runner.stop_width)
    tokens, lengths = padded_contexts([context] * count)
    scores, noise = _scores_and_noise(features, options, tokens, lengths, logits, job.words)
    if job.params.temperature <= 0:
        noise = np.zeros(vocab)
    return np.asarray(scores, np.float64) + np.asarray(noise, np.float64)


@functools.partial(jax.jit, static_argnames="features")
def _scores_and_noise(features: Features, options: Options, tokens, lengths, logits, words):
    scores = transformed(features, options, tokens, lengths, logits)
    noise = target_noise(request_keys(words[None]), lengths[None, :1], logits.shape[-1])
    return scores, noise[0, 0]


@functools.partial(jax.jit, static_argnames="features")
def transformed(features: Features, options: Options, tokens, lengths, logits):
    """Applies the sampling transforms to the logits [N V] of the token after each of N contexts.

    Args:
      features: features of the transforms.
      options: sampling options, one row per context.
      tokens: token ids, [N M], of which the first `lengths` of each row are the context.
      lengths: length of each context, [N].
      logits: logits, [N V].

    Returns:
      scores, [N V].
    """
    counts = None
    if features.penalties:
        counts = count_tokens(tokens, lengths, options.prompt_len, logits.shape[-1])
    context = context_of(tokens, lengths, features, counts)
    rows = root_rows(len(lengths))
    return sampling.transform(logits[:, None], options, features, context, rows)[:, 0]


def _logits_by_program(runner, context: np.ndarray) -> np.ndarray:
    """The next-token logits [3 V] of a context by full forward, one-row and tree-row decoding."""
    rows = runner.plan.tree.rows if runner.plan.tree else 2
    tokens, lengths = padded_contexts([context] * runner.batch)
    inputs = runner.weights.policy, tokens, lengths[0]
    with sharding.ambient(runner.mesh), precision_of(runner.cfg):
        by_rows = [_by_rows(runner.cfg, count, *inputs) for count in (1, rows)]
    return np.stack([full_forward(runner, [context])[0], *jax.device_get(by_rows)])


def _model(cfg: ModelConfig, params):
    return nnx.merge(graphdef(cfg, cfg.run.decode_layout), params)


def full_forward(runner, contexts: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the raw float32 logits [contexts V] of the token after each context."""
    tokens, lengths = padded_contexts(contexts)
    with sharding.ambient(runner.mesh), precision_of(runner.cfg):
        logits = _full(runner.cfg, runner.weights.policy, tokens, lengths)
    return np.asarray(logits, np.float32)


def padded_contexts(contexts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns contexts as padded tokens [contexts M], and their lengths [contexts]."""
    lengths = np.array([len(context) for context in contexts], np.int32)
    # So that not every length compiles a program.
    width = next(w for w in padded_widths(1 << 30) if w >= lengths.max())
    tokens = np.zeros((len(contexts), width), np.int32)
    for row, context in zip(tokens, contexts, strict=True):
        row[: len(context)] = context
    return tokens, lengths


@functools.partial(jax.jit, static_argnums=0)
def _full(cfg: ModelConfig, params, tokens, lengths, given=None):
    model = _model(cfg, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    x = model.hidden(tokens, positions, segments, given=given).x
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    return model.logits(last)[:, 0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _by_rows(cfg: ModelConfig, count: int, params, tokens, length):
    """The next-token logits [V], with the last `count` tokens decoded as the rows of a chain.

    A context that is shorter fills the first rows, and padding the others.
    """
    model, batch = _model(cfg, params), tokens.shape[0]
    start = jnp.maximum(length - count, 0)
    prefix = jnp.full((batch,), start)
    room = Room(slots=batch, pages=batch, page_size=tokens.shape[1])
    read = model.prefill(tokens, jnp.full((batch,), length)).scratch
    memory = commit(cfg, empty(cfg, room), read, None, prefix, Commit(jnp.zeros_like(prefix)))
    positions = jnp.broadcast_to(start + jnp.arange(count), (batch, count))
    rows = jnp.take(tokens, jnp.minimum(positions[0], tokens.shape[1] - 1), axis=1)
    where = Where("tree", positions, prefix=prefix, visible=chain_bits(count))
    decoded = model.decode(rows, where, memory)
    return model.logits(decoded.x[0, length - 1 - start])
