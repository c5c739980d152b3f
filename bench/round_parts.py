"""One round taken apart: every function that `spec_round` is made of, as a program of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench.full_batch import everyone, fill
from specjax.decode import report, rng, sampling
from specjax.decode.accept import accept
from specjax.decode.draft import DraftedTree, draft_tree
from specjax.decode.history import Rows, context_of, count_tokens
from specjax.decode.options import Features
from specjax.decode.plan import Plan
from specjax.decode.round import Side, commit, spec_round
from specjax.decode.state import RUNNING, DecodeState, take_slots
from specjax.decode.verify import verify
from specjax.engine.runner import Runner

PARTS = ("noise", "draft", "verify", "transform", "accept", "commit")
# As they are shown for a GPU, in order: "transform" is counted as part of "accept".
ROUND = ("draft", "verify", "noise", "accept", "commit")
EMPTY = ", empty"  # what is appended to the name of a part's empty program


class Buffers(NamedTuple):
    """What a round updates in place, and every program here is given and gives back."""

    pages: Any
    draft_cache: Any
    noise: Any


class Taken(NamedTuple):
    """A state without its buffers, and what a round needs beside it."""

    state: DecodeState
    side: Side

    def whole(self, buffers: Buffers) -> DecodeState:
        state = self.state
        return state._replace(
            memory=state.memory._replace(pages=buffers.pages),
            draft=state.draft._replace(pages=buffers.draft_cache),
            noise=state.noise._replace(rows=buffers.noise),
        )


def split(state: DecodeState) -> tuple[Buffers, DecodeState]:
    """The buffers, and the state without them."""
    buffers = Buffers(state.memory.pages, state.draft.pages, state.noise.rows)
    draft, noise = state.draft._replace(pages=None), state.noise._replace(rows=None)
    memory = state.memory._replace(pages=None)
    return buffers, state._replace(memory=memory, draft=draft, noise=noise)


class Parts:
    """The programs of one plan; calling one runs it once and waits.

    Args:
      runner: with weights. features, options: what all slots ask for.
      context: length of every slot. emitted: tokens that the last round is taken to have emitted.
      go_on: asked after each part, whether another one is to be compiled.
    """

    def __init__(
        self,
        runner: Runner,
        features: Features,
        options: dict,
        context: int,
        emitted: int,
        go_on: Callable[[], bool] = lambda: True,
    ):
        self.runner = runner
        self.plan: Plan = dataclasses.replace(runner.plan, features=features)
        self.buffers, state = split(_filled(runner, options, context, emitted))
        self.programs: dict[str, Callable[[], None]] = {}
        for _ in self._build(Taken(state, self._side(state))):
            if not go_on():
                break

    def _side(self, state: DecodeState) -> Side:
        plan, counts = self.plan, None
        if plan.features.penalties:
            vocab = plan.cfg.vocab_size
            count = jax.jit(count_tokens, static_argnums=3)
            counts = count(state.tokens, state.length, state.options.prompt_len, vocab)
        told = report.start(plan, state.length.shape[0], 1)
        return Side(counts, told, state.length, jnp.int32(0))

    def _build(self, taken: Taken) -> Iterator[None]:
        """Compiles every part on the results of the parts before it; yields after each."""
        params, head = self.runner.params, self.runner.head
        self._add("noise", self._noise, taken)
        yield
        draft = self._add("draft", self._draft, params, head, taken)
        yield
        verified = self._add("verify", self._verify, params, taken, draft)
        yield
        scores = self._add("transform", self._transform, taken, draft, verified.logits)
        yield
        accepted = self._add("accept", self._accept, taken, draft, scores)
        yield
        self._add("commit", self._commit, taken, draft, verified, scores, accepted)
        yield
        self._add("round", self._round, params, head, taken)

    def _add(self, name: str, function, *inputs) -> Any:
        """Compiles `function(buffers, *inputs) -> (buffers, result)` and returns a result of it."""
        self._compile(name, function, *inputs)
        result = self.programs[name]()

        def empty(buffers, *_):
            return buffers, jax.tree.map(lambda x: jnp.zeros(1, x.dtype), result)

        self._compile(f"{name}{EMPTY}", empty, *inputs)
        return result

    def _compile(self, name: str, function, *inputs) -> None:
        jitted = jax.jit(function, donate_argnums=0, keep_unused=True)
        compiled = jitted.lower(self.buffers, *inputs).compile()

        def run() -> Any:
            self.buffers, result = compiled(self.buffers, *inputs)
            jax.block_until_ready((self.buffers, result))
            return result

        self.programs[name] = run

    # --- the parts of `spec_round`, in its order -------------------------------------------------

    def _context(self, taken: Taken):
        state = taken.state
        return context_of(state.tokens, state.length, self.plan.features, taken.side.counts)

    def _noise(self, buffers: Buffers, taken: Taken):
        state = taken.whole(buffers)
        wanted = (state.finish == RUNNING) & (state.options.temperature > 0)
        count = self.plan.steps + 1
        ring = rng.refill(state.noise, state.keys, state.length - 1, wanted, count)
        return buffers._replace(noise=ring.rows), ring.until

    def _draft(self, buffers: Buffers, params, head, taken: Taken):
        model, state = self.runner.model(params), taken.whole(buffers)
        draft = draft_tree(model, head, self.plan, state, self._context(taken))
        buffers = buffers._replace(draft_cache=draft.work.pages)
        return buffers, draft._replace(shape=None, work=draft.work._replace(pages=None))

    def _verify(self, buffers: Buffers, params, taken: Taken, draft: DraftedTree):
        model, state = self.runner.model(params), taken.whole(buffers)
        return buffers, verify(model, self.plan, state, self._again(draft, buffers))

    def _transform(self, buffers: Buffers, taken: Taken, draft: DraftedTree, logits):
        rows, features = Rows(self.plan.tree.shape.depth, draft.paths), self.plan.features
        context = self._context(taken)
        return buffers, sampling.transform(logits, taken.state.options, features, context, rows)

    def _accept(self, buffers: Buffers, taken: Taken, draft: DraftedTree, scores):
        state = taken.whole(buffers)
        return buffers, accept(self.plan, state, self._again(draft, buffers), scores)

    def _commit(self, buffers: Buffers, taken: Taken, draft, verified, scores, accepted):
        state, context = taken.whole(buffers), self._context(taken)
        draft = self._again(draft, buffers)
        state, side = commit(
            self.plan, state, taken.side, 0, context, draft, verified, scores, accepted
        )
        buffers, state = split(state)
        return buffers, (state, side)

    def _round(self, buffers: Buffers, params, head, taken: Taken):
        model, state = self.runner.model(params), taken.whole(buffers)
        state, side = spec_round(model, head, self.plan, state, taken.side, 0)
        buffers, state = split(state)
        return buffers, (state, side)

    def _again(self, draft: DraftedTree, buffers: Buffers) -> DraftedTree:
        """A draft as `draft_tree` returned it: with the static shape, and the cache it wrote."""
        work = draft.work._replace(pages=buffers.draft_cache)
        return draft._replace(shape=self.plan.tree.shape, work=work)


def _filled(runner: Runner, options: Mapping, context: int, emitted: int) -> DecodeState:
    """Every slot runs within a chunk, at `context` tokens; noise of `emitted` positions is missing.

    The runner's own state is given up for it.
    """
    fill(runner, context, options)

    def begin(params, head, state, rows):
        here, plan = take_slots(state, rows), runner.plan
        memory = plan.source.resume(runner.model(params), head, here, plan.steps)
        until = jnp.full_like(here.length, context + plan.steps + 1 - emitted)
        return here._replace(draft=memory, noise=here.noise._replace(until=until))

    inputs = (runner.params, runner.head, runner.state, everyone(runner))
    runner.state = None
    return jax.jit(begin)(*inputs)
