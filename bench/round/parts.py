"""The parts of a round: each function that `spec_round` calls, compiled as a program of its own.

A part's time is that of many calls, less that of an empty program with as many arguments and
results: a round in a chunk is not called from the host. Caches are donated, and the compiler's
options are a chunk's: on a GPU each program is one CUDA graph where chunks are. Noise is drawn as
in a chunk of the platform: on CPUs what is missing, on TPUs and GPUs all that the round may decide.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench.record import alternate
from bench.round.batch import fill, full_row_map
from specjax.decode import sampling
from specjax.decode.accept import accept
from specjax.decode.draft import DraftedTree, draft_tree
from specjax.decode.noise import after_round, prepare
from specjax.decode.options import Features
from specjax.decode.round import along_path, commit, spec_round, truncate, until_invalid, verify
from specjax.decode.sampling import Rows, context_of, count_tokens
from specjax.decode.state import RUNNING, DecodeState, Plan, take_slots
from specjax.engine.runner import Runner

PARTS = ("noise", "draft", "verify", "transform", "accept", "commit")
# As they are shown for a GPU, in order: "transform" is counted as part of "accept".
ROUND = ("draft", "verify", "noise", "accept", "commit")
EMPTY = ", empty"  # what is appended to the name of a part's empty program


class Buffers(NamedTuple):
    """What a round updates in place: every program here takes it and returns it."""

    pages: Any
    draft_cache: Any
    noise: Any


class Taken(NamedTuple):
    """A decoding state without its buffers; `ahead` is that of its `NoiseRing` within the round."""

    state: DecodeState
    ahead: tuple | None = None

    def whole(self, buffers: Buffers) -> DecodeState:
        state = self.state
        return state._replace(
            memory=state.memory._replace(pages=buffers.pages),
            draft=state.draft._replace(pages=buffers.draft_cache),
            noise=state.noise._replace(rows=buffers.noise, ahead=self.ahead),
        )


def split(state: DecodeState) -> tuple[Buffers, DecodeState]:
    """Splits a state into its buffers and the rest."""
    buffers = Buffers(state.memory.pages, state.draft.pages, state.noise.rows)
    draft, noise = state.draft._replace(pages=None), state.noise._replace(rows=None)
    memory = state.memory._replace(pages=None)
    return buffers, state._replace(memory=memory, draft=draft, noise=noise)


class Parts:
    """The compiled parts of one plan's round, by name; calling one runs it once and waits.

    Args:
      runner: runner with weights.
      features, options: features and sampling options of all slots.
      context: length of every slot.
      emitted: tokens of the last round, whose noise is drawn again.
      go_on: called after each part; returns whether to compile another one.
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
        self.draws_ahead = jax.default_backend() != "cpu"
        self.compiler_options = dict(runner.executables.graphs.options(("chunk",)))
        self.plan: Plan = dataclasses.replace(runner.plan, features=features)
        self.buffers, state = split(_filled(runner, options, context, emitted))
        self.programs: dict[str, Callable[[], None]] = {}
        for _ in self._build(Taken(self._counted(state))):
            if not go_on():
                break

    def _counted(self, state: DecodeState) -> DecodeState:
        plan = self.plan
        if not plan.features.penalties:
            return state
        count = jax.jit(count_tokens, static_argnums=3)
        prompt_len, vocab = state.options.prompt_len, plan.cfg.vocab_size
        return state._replace(counts=count(state.tokens, state.length, prompt_len, vocab))

    def _build(self, taken: Taken) -> Iterator[None]:
        """Compiles every part on the results of the parts before it; yields after each."""
        params, head = self.runner.params, self.runner.head
        between = taken
        _, ahead = self._add("noise", self._noise, taken)
        taken = taken._replace(ahead=ahead)
        yield
        draft = self._add("draft", self._draft, params, head, taken)
        yield
        verified = self._add("verify", self._verify, params, taken, draft)
        yield
        scores = self._add("transform", self._transform, taken, draft, verified[0])
        yield
        accepted = self._add("accept", self._accept, taken, draft, scores)
        yield
        self._add("commit", self._commit, taken, draft, verified, accepted)
        yield
        self._add("round", self._round, params, head, between)

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
        compiled = jitted.lower(self.buffers, *inputs).compile(self.compiler_options)

        def run() -> Any:
            self.buffers, result = compiled(self.buffers, *inputs)
            jax.block_until_ready((self.buffers, result))
            return result

        self.programs[name] = run

    # --- the parts of `spec_round`, in its order -------------------------------------------------

    def _context(self, taken: Taken):
        state = taken.state
        return context_of(state.tokens, state.length, self.plan.features, state.counts)

    def _noise(self, buffers: Buffers, taken: Taken):
        state = taken.whole(buffers)
        wanted = (state.finish == RUNNING) & (state.options.temperature > 0)
        count = self.plan.steps + 1
        chain = self.plan.tree.is_chain
        ring = prepare(state.noise, state.keys, state.length - 1, wanted, count, chain)
        # On a CPU nothing reads `ahead`: as a result its zeros would be computed.
        result = ring.until, ring.ahead if self.draws_ahead else None
        return buffers._replace(noise=ring.rows), result

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

    def _commit(self, buffers: Buffers, taken: Taken, draft, verified, accepted):
        state, draft, (logits, found) = taken.whole(buffers), self._again(draft, buffers), verified
        logits = along_path(self.plan, logits, accepted)
        accepted, invalid = until_invalid(state, logits, accepted)
        count, finish = truncate(state, accepted, invalid)
        state = commit(self.plan, state, draft, found, accepted, count, finish)
        return split(state._replace(noise=after_round(state.noise)))

    def _round(self, buffers: Buffers, params, head, taken: Taken):
        model, state = self.runner.model(params), taken.whole(buffers)
        state, _ = spec_round(model, head, self.plan, state)
        return split(state)

    def _again(self, draft: DraftedTree, buffers: Buffers) -> DraftedTree:
        """Restores a draft as `draft_tree` returned it: with the static shape and its cache."""
        work = draft.work._replace(pages=buffers.draft_cache)
        return draft._replace(shape=self.plan.tree.shape, work=work)


def _filled(runner: Runner, options: Mapping, context: int, emitted: int) -> DecodeState:
    """Returns the state within a chunk, `context` tokens per slot and `emitted` noise rows missing.

    It consumes the runner's own state.
    """
    fill(runner, context, options)

    def begin(params, head, state, rows):
        here, plan = take_slots(state, rows), runner.plan
        memory = plan.source.resume(runner.model(params), head, here, plan.steps)
        until = jnp.full_like(here.length, context + plan.steps + 1 - emitted)
        return here._replace(draft=memory, noise=here.noise._replace(until=until))

    inputs = (runner.params, runner.head, runner.state, full_row_map(runner))
    runner.state = None
    return jax.jit(begin)(*inputs)


# --- times -----------------------------------------------------------------------------------


def milliseconds(parts: Parts, window: float, repeats: int) -> dict[str, tuple[float, float]]:
    """Returns the least and median time of each part and the round, less its empty program's.

    Args:
      window: see `turn_times`.
    """
    found = turn_times(parts, window, repeats)
    return {
        name: tuple(
            max(of(found[name]) - min(found[f"{name}{EMPTY}"]), 0.0)
            for of in (min, statistics.median)
        )
        for name in (*PARTS, "round")
    }


def turn_times(parts: Parts, window: float, repeats: int) -> dict[str, list[float]]:
    """Returns the milliseconds of one call of each program in each of `repeats` windows.

    Args:
      window: seconds that a window should last; a program that takes longer runs once.
    """
    calls = {}
    for name, run in parts.programs.items():
        once = min(alternate({name: run}, 3)[name])
        calls[name] = max(1, min(200, round(window / once)))

    def several(name: str) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls[name]):
                parts.programs[name]()

        return run

    seconds = alternate({name: several(name) for name in parts.programs}, repeats)
    return {name: [1e3 * s / calls[name] for s in values] for name, values in seconds.items()}
