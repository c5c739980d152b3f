"""Compiled programs over one decode state: prefill, place, run a chunk. No policy decides here.

Every program is held as a `.lower().compile()` executable, which refuses other shapes, so that
nothing compiles behind the caller's back; `compilations` counts what was built.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import sharding
from specjax.config import ModelConfig, SpecConfig
from specjax.decode.admit import Admission, Prefilled, place, prefill
from specjax.decode.options import Features
from specjax.decode.plan import Plan
from specjax.decode.report import Report
from specjax.decode.round import plain_round, run_chunk, spec_round
from specjax.decode.state import EMPTY, STOPPED, DecodeState, empty_state
from specjax.decode.tree import build_tree
from specjax.draft.source import DraftSource
from specjax.engine.sources import source_of
from specjax.models.transformer import Params, graphdef, to_decode_layout


class Runner:
    """The device side of one engine: parameters, state, executables.

    Args:
      cfg: model config; `scan_layers` decides the parameter and cache layout of decoding.
      spec: how to speculate; None is plain decoding.
      batch: slots. max_len: prompt and generated tokens of a slot at most.
      stop_width: stop tokens per request at most.
      mesh: shard parameters and state over it; None is the default device.
      source: what drafts; none: as `spec` says, see `source_of`.
      chunk_rounds: rounds that one dispatch runs at most.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        spec: SpecConfig | None,
        batch: int,
        max_len: int,
        stop_width: int = 8,
        mesh: jax.sharding.Mesh | None = None,
        source: DraftSource | None = None,
        chunk_rounds: int = 32,
    ):
        self.cfg, self.chunk_rounds = cfg, chunk_rounds
        self.batch, self.max_len, self.stop_width, self.mesh = batch, max_len, stop_width, mesh
        self.plan = _plan(cfg, spec, source)
        self.params: Params | None = None
        self.head: Params | None = None
        self.state: DecodeState | None = None
        self.compilations = 0
        self._chunk: dict[Features, object] = {}
        self._prefill: dict[tuple[int, int], object] = {}
        self._place: dict[tuple, object] = {}
        self._stop = None
        self._layout = None

    @property
    def tree(self):
        return self.plan.tree

    @property
    def steps(self) -> int:
        return self.plan.steps

    def set_params(self, params: Params, head: Params | None) -> None:
        """Takes stacked policy parameters into the decode layout and sharding.

        Args:
          head: parameters of the draft source, in its own decode layout.

        The state is dropped: masked rows of an old cache count for nothing as long as they are
        finite, and those of weights that went to NaN are not.
        """
        self.state = None
        if self._layout is None:
            self._layout = self._build_layout()
        self.params = self._layout(params)
        if self.tree is not None:
            if head is None:
                raise ValueError(
                    "speculation needs a draft head, got none; pass the head's parameters or use "
                    "spec=None"
                )
            self.head = self._place_params(head)

    def _build_layout(self):
        convert = jax.jit(functools.partial(to_decode_layout, cfg=self.cfg))
        if self.mesh is None:
            return convert
        return lambda params: self._place_params(convert(params))

    def _place_params(self, params: Params) -> Params:
        if self.mesh is None:
            return params
        return jax.device_put(params, sharding.param_shardings(self.mesh, params))

    def reset(self) -> None:
        """Empties every slot."""
        if self.state is None:
            self.state = self._empty_state()
            return
        empty = np.full((self.batch,), EMPTY, np.int32)
        finish = jax.device_put(empty, self.state.finish.sharding)
        self.state = self.state._replace(finish=finish)

    @functools.cached_property
    def _empty_state(self):
        """The jitted constructor of the state, kept so that a second call compiles nothing."""
        make = functools.partial(empty_state, self.plan, self.batch, self.max_len, self.stop_width)
        if self.mesh is None:
            return jax.jit(make)
        shardings = sharding.state_shardings(self.mesh, jax.eval_shape(make))
        return jax.jit(make, out_shardings=shardings)

    def prefill(self, tokens: np.ndarray, lengths: np.ndarray) -> Prefilled:
        """Runs prompts [R P]; one executable per shape."""
        key = tokens.shape
        if key not in self._prefill:

            def program(params, head, tokens, lengths):
                return prefill(self.model(params), head, self.plan, tokens, lengths)

            self._prefill[key] = self._compile(program, self.params, self.head, tokens, lengths)
        return self._prefill[key](self.params, self.head, tokens, lengths)

    def place(self, prefilled: Prefilled, new: Admission) -> None:
        """Puts requests into slots; one executable per number of requests and prompts."""
        key = (new.tokens.shape, len(jax.tree.leaves(prefilled.cache)[0]))
        if key not in self._place:
            self._place[key] = self._compile(
                place, self.state, prefilled, new, donate=0, out=self._state_shardings()
            )
        self.state = self._place[key](self.state, prefilled, new)

    def chunk(
        self,
        max_rounds: int,
        leave_early: bool,
        features: Features = Features(),  # noqa: B008
    ) -> tuple[int, Report]:
        """Runs up to `max_rounds` rounds.

        Args:
          features: what the running slots ask for. Of the programs that were compiled and cover
            it, the smallest runs; if there is none, one is compiled.

        Returns:
          how many rounds ran, and what they report (on the device).
        """
        program = self._covering(features)
        inputs = (
            self.params, self.head, self.state, np.int32(max_rounds), np.bool_(leave_early)
        )  # fmt: skip
        if program not in self._chunk:
            self._chunk[program] = self._compile(
                functools.partial(self._chunk_program, program),
                *inputs,
                donate=2,
                out=(self._state_shardings(), None, None),
            )
        self.state, report, rounds = self._chunk[program](*inputs)
        return int(rounds), report

    def covers(self, features: Features) -> bool:
        """Whether a program that was compiled serves requests that ask for this."""
        return any(f.covers(features) for f in self._chunk)

    def _covering(self, features: Features) -> Features:
        compiled = [f for f in self._chunk if f.covers(features)]
        return min(compiled, key=lambda f: f.size, default=features)

    def _chunk_program(self, features, params, head, state, max_rounds, leave_early):
        plan = dataclasses.replace(self.plan, features=features)
        model = self.model(params)

        def one_round(state, side, index):
            if plan.tree is None:
                return plain_round(model, plan, state, side, index)
            return spec_round(model, head, plan, state, side, index)

        return run_chunk(one_round, plan, state, self.chunk_rounds, max_rounds, leave_early)

    def stop(self, slots: np.ndarray) -> None:
        """Ends the slots where `slots` [B] is true; they can be refilled."""
        if self._stop is None:

            def program(state, slots):
                return state._replace(finish=jnp.where(slots, STOPPED, state.finish))

            self._stop = self._compile(
                program, self.state, slots, donate=0, out=self._state_shardings()
            )
        self.state = self._stop(self.state, slots)

    def model(self, params: Params):
        """The target as a module, inside a jitted function."""
        return nnx.merge(graphdef(self.cfg, self.cfg.decode_layout), params)

    def _state_shardings(self):
        """Where the state must come back to, so that executables accept it again."""
        if self.mesh is None:
            return None
        return jax.tree.map(lambda a: a.sharding, self.state)

    def _compile(self, program, *inputs, donate: int | None = None, out=None):
        self.compilations += 1
        if self.mesh is None or out is None:
            jitted = jax.jit(program, donate_argnums=() if donate is None else donate)
        else:
            jitted = jax.jit(program, donate_argnums=donate, out_shardings=out)
        return jitted.lower(*inputs).compile()


def _plan(cfg: ModelConfig, spec: SpecConfig | None, source: DraftSource | None) -> Plan:
    """The static half of a round, before anybody asked for a feature."""
    if spec is None or spec.is_off:
        return Plan(cfg)
    strategy = spec.resolve()
    widest = strategy.dynamic[1] if strategy.dynamic else 1 + max(map(max, strategy.paths))
    if widest > cfg.vocab_size:
        raise ValueError(
            f"strategy {strategy.name!r} has nodes with {widest} children, more than the "
            f"vocabulary's {cfg.vocab_size} tokens; use a narrower tree"
        )
    return Plan(
        cfg,
        build_tree(strategy),
        source or source_of(cfg, spec),
        spec.acceptance,
        aligned=spec.aligned,
        tau=spec.tau,
        adaptive_width=spec.adaptive_width,
        invariant=spec.invariant,
        telemetry=spec.telemetry_on,
    )
