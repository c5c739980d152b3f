"""Speculative decoding of one sequence over models of your own: propose, verify, accept, commit.

    speculate(draft, target, context, n=4, seed=0, max_tokens=64).tokens

`draft` and `target` are any objects with the methods of `Speculator`. The tokens have the target's
joint distribution, whatever the draft proposes: `specjax.decode.plain_arrays.speculative_accept`
decides which drafted tokens are kept. `SourceSpeculator` gives a target and a draft source of this
library the same protocol, to study one or to use it with a model of your own:

    both = SourceSpeculator(cfg, params, NgramSource(cfg.vocab_size), {})
    speculate(both, both, context, n=4, seed=0, max_tokens=64)

This runs one sequence at a time, from the host. To generate many, use `specjax.LLM`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from specjax.config import ModelConfig
from specjax.decode import sampling, shards
from specjax.decode.noise import DRAFT, request_keys, request_words, round_noise
from specjax.decode.options import Options, neutral
from specjax.decode.plain_arrays import (
    AcceptDecision,
    DraftProposal,
    VerifyResult,
    speculative_accept,
)
from specjax.decode.sampling import Columns
from specjax.decode.state import RUNNING, put_positions, take_positions
from specjax.decode.tree import chain_bits
from specjax.engine.sources import page_multiple, with_kernel
from specjax.interfaces import Draft, Level, Memory, Room, Scratch, Where
from specjax.kernels import dispatch
from specjax.memory import Commit, commit, empty
from specjax.models.transformer import Params, graphdef, to_decode_layout
from specjax.weights.matrix import precision_of

SHORTEST_PREFILL = 16  # the smallest of the powers of two that contexts are padded to


class Speculator(Protocol):
    """A model of your own: a draft has `propose`, a target has `verify`; `commit` is optional."""

    def propose(self, context: Sequence[int], n: int) -> DraftProposal:
        """Drafts at most `n` tokens to follow the context, with randomness of its own."""

    def verify(self, context: Sequence[int], tokens: Sequence[int]) -> VerifyResult:
        """Gives the target's distribution at each drafted token and, for a bonus, after the last.

        Without drafted tokens there is one row, the distribution after the context. Rows after a
        token of -1 are not used, but must be distributions all the same.
        """

    def commit(self, context: Sequence[int], tokens: Sequence[int]) -> None:
        """Updates the model's state with the tokens emitted after the context."""


class Speculation(NamedTuple):
    """Tokens emitted after the context, and the decision of each round (the last may be cut)."""

    tokens: tuple[int, ...]
    decisions: tuple[AcceptDecision, ...]

    @property
    def accept_length(self) -> float:
        """Tokens per round, bonus tokens included; 0 without a round."""
        return sum(d.total_tokens for d in self.decisions) / max(len(self.decisions), 1)


def speculate(
    draft: Speculator,
    target: Speculator,
    context: Sequence[int],
    n: int,
    seed: int,
    max_tokens: int,
    acceptance: str = "block",
    stop_ids: Collection[int] = (),
) -> Speculation:
    """Runs rounds of propose, verify, accept and commit, until `max_tokens` or a stop token.

    If the target gives no distribution after the last draft there is no bonus token: a round that
    accepts all n drafts emits n tokens.

    Args:
      draft: the model that proposes.
      target: the model that verifies.
      context: token ids, at least one.
      n: number of drafted tokens per round; the draft may propose fewer.
      seed: seed of the random numbers by which tokens are accepted.
      max_tokens: number of tokens to generate.
      acceptance: acceptance mode, see `speculative_accept`.
      stop_ids: tokens that end the generation; they are emitted.

    Raises:
      ValueError: the context is empty, or `speculative_accept` refuses the arrays.
    """
    if not len(context):
        raise ValueError("expected a context of at least one token, got none; pass the BOS token")
    context, decisions = list(context), []
    start = len(context)
    while len(context) - start < max_tokens:
        proposal = draft.propose(tuple(context), n)
        verified = target.verify(tuple(context), tuple(proposal.tokens.tolist()))
        decision = speculative_accept(proposal, verified, seed, len(context) - 1, acceptance)
        emitted = decision.tokens[: max_tokens - (len(context) - start)]
        stops = [i for i, token in enumerate(emitted) if token in stop_ids]
        emitted = emitted[: stops[0] + 1] if stops else emitted
        for model in (draft, target):
            commit = getattr(model, "commit", None)
            if commit is not None:
                commit(tuple(context), emitted)
        context += emitted
        decisions.append(decision)
        if stops:
            break
    return Speculation(tuple(context[start:]), tuple(decisions))


class _Setup(NamedTuple):
    """The static arguments of the programs below."""

    cfg: ModelConfig
    source: Draft
    steps: int
    max_len: int

    @property
    def taps(self) -> tuple[int | str, ...]:
        """The target's hidden states that the source reads."""
        return self.source.needs.taps

    def model(self, params: Params):
        return nnx.merge(graphdef(self.cfg, self.cfg.run.decode_layout), params)


class _Sequence(NamedTuple):
    """The fields of a decode state that draft sources read, for one sequence.

    Attributes:
      keys: keys of a proposal's noise, new for each proposal.
      options: sampling options. The context that was prefilled counts as the prompt.
      memory: caches of the target.
      draft: caches of the draft source, as in a chunk that never ends.
    """

    tokens: Int[Array, "1 M"]
    length: Int[Array, " 1"]
    finish: Int[Array, " 1"]
    keys: UInt32[Array, "1 2"]
    options: Options
    memory: Memory
    draft: Memory
    table: None = None


class _Proposed(NamedTuple):
    """A drafted chain.

    Attributes:
      tokens: drafted tokens; -1 from index `count` on.
      q: distribution that each was drawn from.
      count: number of drafted tokens.
      work: what `Draft.step` returned beside the last proposal.
    """

    tokens: Int[Array, " steps"]
    q: Float[Array, "steps V"]
    count: Int[Array, ""]
    work: Any


class _Verified(NamedTuple):
    """The target's distributions, hidden states and scratch at the root and each drafted token."""

    p: Float[Array, "E V"]
    hidden: Float[Array, "1 E D"]
    scratch: tuple[Scratch, ...]


class SourceSpeculator:
    """A target and its draft source as a `Speculator`, with caches of the current context.

    `propose` runs the source, `verify` the target. One object can be both, and must be for a source
    that drafts from the target's hidden states. A context that does not continue the last one is
    prefilled again. It compiles once per padded prefill length, and nothing as the context grows.

    Args:
      cfg: config of the target.
      params: stacked parameters of the target.
      source: the draft source. If it drafts from ended samples it has none here, where none ends.
      source_params: parameters of the source in its decode layout.
      steps: the most tokens that are drafted and verified at a time.
      temperature: temperature of p and q; 0 is greedy.
      seed: seed of the draft's own random numbers.
      max_len: the most tokens of the context, with the emitted ones.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        source: Draft,
        source_params: Params,
        steps: int = 4,
        temperature: float = 1.0,
        seed: int = 0,
        max_len: int = 512,
    ):
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}; without drafts use plain LLM")
        if not temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {temperature}")
        settle = functools.partial(dispatch.settle, mesh=None)
        cfg, source = settle(cfg), with_kernel(source, settle)
        self._setup = _Setup(cfg, source, steps, max_len)
        self._temperature = np.array([temperature], np.float32)
        if source.needs.history:
            store = jax.tree.map(jnp.array, source.store())
            source_params = {**source_params, "history": store}
        self._params = jax.jit(to_decode_layout, static_argnums=1)(params, cfg), source_params
        self._seed, self._proposals = seed, 0
        self._forget()

    def propose(self, context: Sequence[int], n: int) -> DraftProposal:
        """Draws min(n, steps) tokens, or fewer where the source has no candidate.

        Raises:
          ValueError: the context is empty or too long, or holds ids out of range.
        """
        self._follow(context)
        self._proposals += 1  # no two proposals share random numbers
        with precision_of(self._setup.cfg):
            self._proposed = _propose(
                self._setup, *self._params, self._sequence, self._temperature, self._words
            )
        count = min(max(n, 0), int(self._proposed.count))
        tokens, q = np.asarray(self._proposed.tokens), np.asarray(self._proposed.q)
        return DraftProposal(tokens[:count], q[:count])

    def verify(self, context: Sequence[int], tokens: Sequence[int]) -> VerifyResult:
        """Runs one forward pass of the target over the root and at most `steps` tokens.

        Raises:
          ValueError: there are more tokens, or as in `propose`.
        """
        setup, tokens = self._setup, tuple(int(t) for t in tokens)
        if len(tokens) > setup.steps:
            raise ValueError(
                f"expected at most {setup.steps} tokens to verify, got {len(tokens)}; make the "
                "SourceSpeculator with more steps"
            )
        self._follow(context)
        padded = np.zeros((1, setup.steps), np.int32)
        padded[0, : len(tokens)] = tokens
        self._verified_tokens = tokens
        given = self._params[0], self._sequence, self._temperature, padded
        with precision_of(setup.cfg):
            self._verified = _verify(setup, *given)
        return VerifyResult(np.asarray(self._verified.p)[: len(tokens) + 1])

    def commit(self, context: Sequence[int], tokens: Sequence[int]) -> None:
        """Advances both caches over the tokens emitted after the context.

        If another model proposed or verified for this context, that step runs here first.
        """
        context, tokens = _ids(context), _ids(tokens)
        if not tokens or self._context == context + tokens:
            return  # draft and target may be one object, which is called as both
        if len(tokens) > self._setup.steps + 1:
            self._forget()
            return
        self._follow(context)
        if self._proposed is None:
            self.propose(context, self._setup.steps)
        path = tokens[:-1]
        if self._verified is None or self._verified_tokens[: len(path)] != path:
            self.verify(context, path)
        emitted = np.zeros((1, self._setup.steps + 1), np.int32)
        emitted[0, : len(tokens)] = tokens
        self._sequence = _commit(
            self._setup,
            self._sequence,
            self._proposed.work,
            self._verified,
            emitted,
            np.array([len(tokens)], np.int32),
        )
        self._context = context + tokens
        self._proposed = self._verified = None

    @property
    def _words(self) -> np.ndarray:
        """The words [1 5] that key the random numbers of the last proposal."""
        return request_words(self._seed, (), self._proposals)[None]

    def _forget(self) -> None:
        self._context: tuple[int, ...] = ()
        self._sequence: _Sequence | None = None
        self._proposed: _Proposed | None = None
        self._verified: _Verified | None = None
        self._verified_tokens: tuple[int, ...] = ()

    def _follow(self, context: Sequence[int]) -> None:
        """Prefills `context`, unless the caches are those of this context already."""
        context, setup = _ids(context), self._setup
        if context == self._context and context:
            return
        room = setup.max_len - setup.steps - 1
        if not 1 <= len(context) <= room:
            raise ValueError(
                f"expected a context of 1 to {room} tokens, got {len(context)}; raise max_len "
                f"(now {setup.max_len}, of which {setup.steps + 1} are kept for a round)"
            )
        wrong = [t for t in context if not 0 <= t < setup.cfg.vocab_size]
        if wrong:
            raise ValueError(
                f"expected token ids below {setup.cfg.vocab_size}, got {wrong[0]} in the context"
            )
        self._forget()
        width = max(SHORTEST_PREFILL, 1 << (len(context) - 1).bit_length())
        padded = np.zeros((1, min(width, setup.max_len)), np.int32)
        padded[0, : len(context)] = context
        length = np.array([len(context)], np.int32)
        with precision_of(setup.cfg):
            self._sequence = _prefill(
                setup, *self._params, padded, length, self._temperature, self._words
            )
        self._context = context


def _ids(tokens: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(t) for t in tokens)


@functools.partial(jax.jit, static_argnums=0)
def _prefill(setup: _Setup, params, source_params, tokens, length, temperature, words) -> _Sequence:
    """Makes caches of `max_len` positions and fills them with a context."""
    model, source, cfg = setup.model(params), setup.source, setup.cfg
    slots = setup.max_len + max(setup.steps + 1, source.margin(setup.steps))
    multiple = page_multiple(cfg, source)
    slots = -(-slots // multiple) * multiple
    found = model.prefill(tokens, length, setup.taps)
    target = empty(cfg, Room(slots=1, pages=1, page_size=slots))
    start, states = jnp.zeros_like(length), None
    hidden = found.tapped
    if source.needs.states:
        before = length[:, None] - 1 - source.needs.states + jnp.arange(source.needs.states)
        states = jnp.take_along_axis(hidden, jnp.maximum(before, 0)[..., None], axis=1)
    known = jnp.pad(tokens, ((0, 0), (0, source.needs.states)))
    fresh = source.empty(Room(1, 1, slots), setup.steps)
    memory = Memory(
        source.prefill(model, source_params, fresh.pages, known, start, hidden, None),
        source.start(tokens, length, states),
    )
    room = setup.max_len - tokens.shape[1]
    sequence = _Sequence(
        tokens=jnp.pad(tokens, ((0, 0), (0, room))),
        length=length,
        finish=jnp.full_like(length, RUNNING),
        keys=request_keys(words),
        options=neutral(1, cfg.vocab_size, 1)._replace(temperature=temperature, prompt_len=length),
        memory=commit(cfg, target, found.scratch, None, length - 1, Commit(start)),
        draft=source.pause(memory, fresh.slots),
    )
    # `resume` gives the source's memory the shapes that it has in every later round.
    return sequence._replace(draft=source.resume(model, source_params, sequence, setup.steps))


@functools.partial(jax.jit, static_argnums=0)
def _propose(setup: _Setup, params, source_params, sequence, temperature, words) -> _Proposed:
    """Drafts a chain, up to where the source has no finite logit."""
    model, source = setup.model(params), setup.source
    keys, nodes, total = request_keys(words), np.arange(setup.steps), setup.steps - 1
    sequence = sequence._replace(keys=keys)
    vocab, root = setup.cfg.vocab_size, sequence.length - 1
    noise = round_noise(keys, DRAFT, root, nodes, vocab)
    tokens = jnp.full((1, setup.steps), -1, jnp.int32)
    drawn, going = [], jnp.bool_(True)
    count = jnp.int32(0)
    for step in range(setup.steps):
        if step == 0:
            proposal, work = source.begin(model, source_params, sequence, setup.steps, total)
        else:
            level = Level(
                step=step,
                offset=step - 1,
                total=total,
                tokens=tokens[:, step - 1 : step],
                parents=np.zeros(1, int),
                visible=chain_bits(step)[-1:],
                path=tokens[:, :step],
            )
            proposal, work = source.step(model, source_params, work, level)
        columns = Columns(proposal.ids, vocab)
        logits = columns.masked(proposal.scores)
        going &= ~jnp.isneginf(logits).all()
        scores = sampling.tempered(sampling.sanitise(logits), temperature)
        perturbed = sampling.perturb(scores, temperature, columns.at(noise[:, step]))
        token = columns.tokens(shards.argmax(perturbed)[..., None])[0, 0, 0]
        tokens = tokens.at[0, step].set(jnp.where(going, token, -1).astype(jnp.int32))
        drawn.append(columns.spread(sampling.probabilities(scores, temperature))[0, 0])
        count += going
    return _Proposed(tokens[0], jnp.stack(drawn), count, work)


@functools.partial(jax.jit, static_argnums=0)
def _verify(setup: _Setup, params, sequence: _Sequence, temperature, drafted) -> _Verified:
    model, root = setup.model(params), sequence.length - 1
    tokens = jnp.concatenate([take_positions(sequence.tokens, root, 1), drafted], axis=1)
    positions = root[:, None] + np.arange(setup.steps + 1)
    where = Where("tree", positions, prefix=root, visible=chain_bits(setup.steps + 1))
    found = model.decode(tokens, where, sequence.memory, taps=setup.taps)
    scores = sampling.tempered(model.logits(found.x), temperature)
    p = sampling.probabilities(scores, temperature)[0]
    return _Verified(p, found.tapped, found.scratch)


@functools.partial(jax.jit, static_argnums=0)
def _commit(setup: _Setup, sequence: _Sequence, work, verified, emitted, count) -> _Sequence:
    return sequence._replace(
        tokens=put_positions(sequence.tokens, emitted, sequence.length, count),
        length=sequence.length + count,
        memory=commit(
            setup.cfg, sequence.memory, verified.scratch, None, count, Commit(sequence.length - 1)
        ),
        draft=setup.source.commit(sequence.draft, work, verified.hidden, count),
    )
