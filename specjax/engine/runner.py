"""Compiled programs over one decode state: prefill, place, run a chunk. No policy decides here.

Every program is held as a `.lower().compile()` executable, which refuses other shapes, so that
nothing compiles behind the caller's back; `compilations` counts what was built.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import sharding
from specjax.cache import narrow, widen
from specjax.config import ModelConfig, Strategy
from specjax.decode.admit import Admission, Prefilled, place, prefill
from specjax.decode.round import plain_round, run_chunk, spec_round
from specjax.decode.state import EMPTY, DecodeState, cache_slots, empty_state
from specjax.decode.tree import build_tree
from specjax.draft.mtp import head_graphdef
from specjax.models.transformer import Params, graphdef, unroll_layers


class Runner:
    """The device side of one engine: parameters, state, executables.

    Args:
      cfg: model config; `scan_layers` decides the parameter and cache layout of decoding.
      strategy: None is plain decoding.
      mode: acceptance mode.
      batch: slots. max_len: prompt and generated tokens of a slot at most.
      stop_width: stop tokens per request at most.
      mesh: shard parameters and state over it; None is the default device.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        strategy: Strategy | None,
        mode: str,
        batch: int,
        max_len: int,
        stop_width: int = 8,
        mesh: jax.sharding.Mesh | None = None,
    ):
        self.cfg, self.strategy, self.mode = cfg, strategy, mode
        self.batch, self.max_len, self.stop_width, self.mesh = batch, max_len, stop_width, mesh
        self.tree = build_tree(strategy) if strategy else None
        self.params: Params | None = None
        self.head: Params | None = None
        self.state: DecodeState | None = None
        self.compilations = 0
        self._chunk: dict[int, object] = {}
        self._prefill: dict[tuple[int, int], object] = {}
        self._place: dict[tuple, object] = {}
        self._layout = None

    @property
    def steps(self) -> int:
        return self.tree.steps if self.tree else 0

    def set_params(self, params: Params, head: Params | None) -> None:
        """Takes stacked policy parameters (and a head) into the decode layout and sharding.

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
        def convert(params):
            dtype = jnp.dtype(self.cfg.compute_dtype)
            params = jax.tree.map(lambda a: a.astype(dtype), params)
            return params if self.cfg.scan_layers else unroll_layers(params, self.cfg)

        if self.mesh is None:
            return jax.jit(convert)
        return lambda params: self._place_params(jax.jit(convert)(params))

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
        make = functools.partial(
            empty_state, self.cfg, self.batch, self.max_len, self.steps, self.stop_width
        )
        if self.mesh is None:
            return jax.jit(make)
        shardings = sharding.state_shardings(self.mesh, jax.eval_shape(make))
        return jax.jit(make, out_shardings=shardings)

    def prefill(self, tokens: np.ndarray, lengths: np.ndarray) -> Prefilled:
        """Runs prompts [R P]; one executable per shape."""
        key = tokens.shape
        if key not in self._prefill:

            def program(params, head, tokens, lengths):
                return prefill(*self.modules(params, head), self.steps, tokens, lengths)

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

    def chunk(self, max_rounds: int, leave_early: bool, reach: int | None = None) -> int:
        """Runs up to `max_rounds` rounds; returns how many ran.

        Args:
          reach: no running slot gets longer than this; attention then reads that much of the cache
            and no more. One executable per value: take few.
        """
        reach = self.max_len if reach is None else reach
        inputs = (
            self.params, self.head, self.state, np.int32(max_rounds), np.bool_(leave_early)
        )  # fmt: skip
        if reach not in self._chunk:
            def program(params, head, state, max_rounds, leave_early):
                model, head = self.modules(params, head)
                short, rounds = run_chunk(
                    lambda s: self._round(model, head, s),
                    self._narrow(state, reach),
                    max_rounds,
                    leave_early,
                )
                return self._widen(state, short), rounds

            self._chunk[reach] = self._compile(
                program, *inputs, donate=2, out=(self._state_shardings(), None)
            )
        self.state, rounds = self._chunk[reach](*inputs)
        return int(rounds)

    def _narrow(self, state: DecodeState, reach: int) -> DecodeState:
        """The state with caches of `reach` slots and the margin that commits may write into."""
        margin = cache_slots(self.cfg, self.max_len, self.steps) - self.max_len
        draft = state.draft
        if draft is not None:
            draft = draft._replace(cache=narrow(draft.cache, reach + margin))
        return state._replace(cache=narrow(state.cache, reach + margin), draft=draft)

    def _widen(self, state: DecodeState, short: DecodeState) -> DecodeState:
        draft = short.draft
        if draft is not None:
            draft = draft._replace(cache=widen(state.draft.cache, draft.cache))
        return short._replace(cache=widen(state.cache, short.cache), draft=draft)

    def _round(self, model, head, state):
        if self.tree is None:
            return plain_round(model, state)
        return spec_round(model, head, self.tree, self.mode, state)

    def modules(self, params: Params, head: Params | None):
        """Model and head as modules, inside a jitted function."""
        layout = "stacked" if self.cfg.scan_layers else "unrolled"
        model = nnx.merge(graphdef(self.cfg, layout), params)
        return model, (
            nnx.merge(head_graphdef(self.cfg), head) if head is not None else None
        )

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
