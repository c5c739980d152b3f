"""What every draft head does whose row j takes (h_j, e(x_{j+1})) and predicts x_{j+2}.

h_j is the target's state after token j, and e(x_{j+1}) the embedding of the token that followed.
Drafting deeper feeds the head its own output in place of h. A head has one or more modules: module
s predicts at step s, and the last one is repeated where there are more steps than modules.

`HeadNetwork` is the network of such a head. `HeadSource` keeps its cache, and the target's states
that are not in it yet.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig
from specjax.config.model import Layer, LogitForm
from specjax.decode.state import RUNNING, take_positions
from specjax.decode.tree import chain_bits, take_parents
from specjax.drafts import ABSORBED, vocabulary
from specjax.indexing import take_along
from specjax.interfaces import (
    Cost,
    Draft,
    Level,
    Memory,
    Params,
    Proposal,
    Room,
    Scratch,
    Table,
    Where,
)
from specjax.memory import after_of, bytes_of, commit_rows
from specjax.models.layers import draw
from specjax.models.transformer import angles_of, embed_tokens, lm_logits
from specjax.parallel.context import Context

WINDOW = 128  # target states that a slot remembers while plain decoding runs


class HeadSlots(NamedTuple):
    """What the head remembers of each slot.

    Row j of its cache is (h_j, e(x_{j+1})); skipped positions have no row and are not counted.

    Attributes:
      hidden: target states of the rows that are not yet in the cache. The first
        `modules` - 1 are of rows that are in it: module s lags s tokens behind.
      pending: number of valid rows after those.
      skipped: number of positions that have no row in the cache, because plain decoding ran for
        longer than the window.
    """

    hidden: Float[Array, "B window taps_width"]
    pending: Int[Array, " B"]
    skipped: Int[Array, " B"]


class _Work(NamedTuple):
    """The work of a round, which each step hands to the next.

    Attributes:
      pages: pages of every module, with the accepted rows committed.
      slot: number of the last committed row in the cache.
      position: position of that row in the sequence.
      table: the pages of each slot.
      recycled: the head's states at the rows run last, used in place of the target's.
      scratch: buffers [B K total H] with the rows expanded so far.
      start: number of the first of these rows that the module that runs now has made (a Python
        integer).
    """

    pages: tuple
    slot: Int[Array, " B"]
    position: Int[Array, " B"]
    table: Table
    recycled: Float[Array, "B R D"]
    scratch: Scratch
    start: int = 0


class _Pass(NamedTuple):
    """The result of all modules over some rows.

    Attributes:
      normed: [B T D] states of the first module for the language-model head.
      recycled: [B T D] states of the first module to use as h of the next step.
      rows: for every module, what its rows add to its pages.
    """

    normed: Array
    recycled: Array
    rows: tuple


@dataclasses.dataclass(frozen=True)
class HeadNetwork:
    """The network of a head with its parameters; its methods are pure functions of them.

    A subclass writes `through`, and overrides what differs of the other methods.

    Attributes:
      cfg: what the head computes; its `network` is the config of its layers.
      w: its parameters.
    """

    cfg: Any
    w: Params

    @property
    def network(self) -> ModelConfig:
        """Returns the config of the layers."""
        return self.cfg.network

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Returns the layers of a module."""
        return self.network.layers

    @property
    def modules(self) -> int:
        """Returns the number of modules: step s uses module min(s, modules - 1)."""
        return 1

    def through(
        self,
        index: int,
        hidden: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        where: Where,
        mix: Callable,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], list[Scratch]]:
        """Runs module `index` over T rows.

        Args:
          hidden: h of each row.
          embedded: embedding of the token that follows each row.
          where: positions of the rows.
          mix: runs the mixer of a layer, given the layer's number, the mixer, its arrays and rows.

        Returns:
          states for the language-model head, states to recycle, and what each layer's rows add to
          its pages.
        """

    def fused(self, states: Float[Array, "B T taps_width"]) -> Float[Array, "B T D"]:
        """Makes h of the target's states; by default they are h."""
        return states

    def at(self, where: Where) -> Where:
        """Returns `where` with the kernel and the angles of the head's own layers."""
        angles = angles_of(self.layers, where.positions)
        return where.replace(kernel=self.network.run.attention, angles=angles)

    def decode(
        self,
        index: int,
        hidden: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        where: Where,
        pages: tuple,
        scratch: Scratch | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], Scratch]:
        """Runs module `index` over T rows, behind its pages and earlier scratch rows.

        Args:
          index: number of the module.
          hidden: h of each row.
          embedded: embedding of the token that follows each row.
          where: positions of the form `tree`; its `prefix` counts the rows in the pages.
          pages: pages of each layer of this module, read only.
          scratch: buffers with room for all rows of the round, see `Mixer.run`.

        Returns:
          states for the language-model head, states to recycle, and scratch, whose `pages` are a
          tree as `HeadSource.module_pages` makes it.
        """
        where = self.at(where)

        def mix(number: int, mixer, w, x):
            held = None if scratch is None else Scratch(scratch.pages[number], None)
            return mixer.run(w, x, where, Memory(pages[number], None), held)

        normed, hidden, rows = self.through(index, hidden, embedded, where, mix)
        return normed, hidden, Scratch(tuple(new.pages for new in rows), None)

    def entering(self, step: int, hidden: Float[Array, "R S D"]) -> Float[Array, "R S D"]:
        """Returns h of a step of training; by default what the step before recycled."""
        return hidden

    def unroll(
        self,
        hidden: Float[Array, "R S D"],
        embedded: Sequence[Float[Array, "R S D"]],
        positions: Int[Array, "R S"],
        segments: Int[Array, "R S"],
        context: Context | None = None,
    ) -> list[Float[Array, "R S D"]]:
        """Runs recursive steps over packed rows in training, see `Draft.unroll`.

        Row t of a step takes the head's own output of the step before. It sees the rows of the
        first step that its module ran up to its own, and its own rows of later ones.

        Args:
          hidden: h of the target's states, detached.
          embedded: for each step s the embeddings e(x_{t+1+s}) at index t, rolled within segments.
          context: how rows are split over devices; all per-token arrays are in its order.

        Returns:
          for each step s, states for the language-model head, of which index t predicts x_{t+2+s}.
        """
        outputs, earlier = [], []
        for step, following in enumerate(embedded):
            index = min(step, self.modules - 1)
            if step == index:  # the module's first use
                earlier = []
            where = Where("train", positions + step, segments=segments, context=context)
            where, hidden = self.at(where), self.entering(step, hidden)
            mix = functools.partial(_mix_again, where, tuple(earlier))
            normed, hidden, rows = self.through(index, hidden, following, where, mix)
            earlier.append(rows)
            outputs.append(normed)
        return outputs


def drawn(rows: Mapping[Any, Any], network: ModelConfig, seed: int) -> Params:
    """Draws parameters of a head with layers of a config, in the order of a tree of rows."""
    rngs, dtype = nnx.Rngs(seed), network.run.param_dtype

    def walk(row):
        if isinstance(row, Mapping):
            return {name: walk(inner) for name, inner in row.items()}
        return draw(row, rngs, dtype, depth=network.num_layers).get_value()

    return walk(rows)


def _mix_again(where: Where, earlier: Sequence[list[Scratch]], number: int, mixer, w, x):
    """Runs the mixer of a layer in training, behind its rows of earlier steps."""
    before = [rows[number] for rows in earlier]
    return mixer.run_again(w, x, where, before) if before else mixer.run(w, x, where, None, None)


class HeadSource(Draft):
    """Drafts with a head that has a cache of its own, and trains it.

    A subclass writes `needs` (its `states` is `modules`, and its `window` says how many states a
    slot remembers while plain decoding runs), `network`, `taps_width` and `bound`, and overrides
    what differs of the other methods.
    """

    @property
    def modules(self) -> int:
        """Returns the number of modules, see `HeadNetwork`."""
        return self.bound({}).modules

    @property
    def taps_width(self) -> int:
        """Returns the width of the target's states that a slot remembers, all taps side by side."""

    def bound(self, params: Params) -> HeadNetwork:
        """Returns the network with its parameters, which the methods below take as `head`.

        Args:
          params: the draft's parameters, without the entry `vocabulary`.
        """

    def embedded(self, model: Any, head: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Looks up the embeddings of tokens; by default in the target's."""
        return model.embed_tokens(tokens)

    def module_pages(self, room: Room) -> tuple:
        """Makes the pages of one module, for each layer a tree of arrays [P K page_size H]."""
        head = self.bound({})
        return tuple(layer.mixer.empty(head.network.run, room).pages for layer in head.layers)

    def run_module(self, head: Any, index: int, hidden, embedded, where, pages, scratch=None):
        """Runs module `index` of the network over T rows, see `HeadNetwork.decode`."""
        return head.decode(index, hidden, embedded, where, pages, scratch)

    def logit_form(self, model: Any) -> LogitForm:
        """Returns how logits follow from the products of the head's matrix: the target's."""
        return model.cfg.logits

    def own_proposal(self, model: Any, params: Params, normed: Float[Array, "B R D"]) -> Proposal:
        """Proposes what follows normed states; by default by the target's language-model head."""
        return Proposal(lm_logits(normed, model.head_weight(), self.logit_form(model)))

    # --- training --------------------------------------------------------------------------------

    def embeddings(self, params: Params, policy: Params, tokens: Sequence) -> list[Array]:
        """Looks up the embeddings of the tokens of each step; by default in the policy's."""
        return [embed_tokens(policy["embed"], ids, self.network) for ids in tokens]

    def unroll(
        self, params, policy, states, tokens, positions, segments, context=None
    ) -> list[Array]:
        """See `Draft.unroll`."""
        head, embedded = self.bound(params), self.embeddings(params, policy, tokens)
        return head.unroll(head.fused(states), embedded, positions, segments, context)

    # --- its memory and its rounds ----------------------------------------------------------------

    def cost(self, page_size: int) -> Cost:
        state = self.taps_width * jnp.dtype(self.network.run.compute_dtype).itemsize
        slot = (self.needs.window + self.modules) * state + 8
        page = jax.eval_shape(lambda: self.module_pages(Room(1, 1, page_size)))
        return Cost(self.modules * bytes_of(page), slot)

    def empty(self, room: Room, steps: int) -> Memory:
        batch, dtype = room.slots, jnp.dtype(self.network.run.compute_dtype)
        window = max(steps, self.needs.window) + self.modules
        slots = HeadSlots(
            hidden=jnp.zeros((batch, window, self.taps_width), dtype),
            pending=jnp.ones((batch,), jnp.int32),
            skipped=jnp.zeros((batch,), jnp.int32),
        )
        return Memory(tuple(self.module_pages(room) for _ in range(self.modules)), slots)

    def prefill(self, model, params, pages, tokens, start, hidden, table) -> tuple:
        """See `Draft.prefill`; `begin` rewrites rows whose tokens are not known yet."""
        count = hidden.shape[1]
        shifted = [tokens[:, 1 + s : 1 + s + count] for s in range(self.modules)]
        ran = self._run(model, params, pages, hidden, shifted, start, start, table)
        return self._write(pages, ran.rows, start, ran.normed, table)

    def _write(self, pages: tuple, rows: tuple, start, normed, table) -> tuple:
        return commit_rows(
            pages, rows, start, after_of(normed), table, kernel=self.network.run.attention
        )

    def start(self, tokens, prompt_len, states) -> HeadSlots:
        """See `Draft.start`: the first round runs the head over one row, the state before the root;
        the rows before it in the window are in the cache already."""
        ones = jnp.ones_like(prompt_len)
        return HeadSlots(states, ones, 0 * ones)

    def resume(self, model, params, state, steps: int) -> Memory:
        """Runs over pending rows until no slot has more of them than a round can emit."""
        memory, lag = state.draft, self.modules - 1
        running, width = state.finish == RUNNING, memory.slots.hidden.shape[1]
        count = min(ABSORBED + lag, width)

        def behind(memory):
            return (running & (memory.slots.pending > steps + 1)).any()

        def absorb(memory):
            slots = memory.slots
            run, slot, _ = self._over_window(model, params, state, memory, count)
            pages = self._write(memory.pages, run.rows, slot, run.normed, state.table)
            taken = jnp.where(running, jnp.clip(slots.pending - 1, 0, count - lag), 0)
            index = jnp.minimum(taken[:, None] + jnp.arange(width), width - 1)
            hidden = take_along(slots.hidden, index[..., None], axis=1)
            return Memory(pages, HeadSlots(hidden, slots.pending - taken, slots.skipped))

        # The rows that plain decoding dropped may include some before the first token.
        first = state.length - 1 - memory.slots.pending - lag
        skipped = jnp.minimum(memory.slots.skipped, jnp.maximum(first, 0))
        memory = memory._replace(slots=memory.slots._replace(skipped=skipped))
        memory = jax.lax.while_loop(behind, absorb, memory)
        window = memory.slots.hidden[:, : steps + lag + 1]
        return memory._replace(slots=memory.slots._replace(hidden=window))

    def pause(self, memory: Memory, between: HeadSlots) -> Memory:
        slots = memory.slots
        room = between.hidden.shape[1] - slots.hidden.shape[1]
        hidden = jnp.pad(slots.hidden, ((0, 0), (0, room), (0, 0)))
        return memory._replace(slots=slots._replace(hidden=hidden))

    def _remember(self, memory: Memory, hidden, count) -> Memory:
        """Appends the states of the roots of plain rounds.

        Where they do not fit the earliest are dropped, and the head's cache goes on without their
        positions, which costs acceptance but changes no token. The rows that the window repeats are
        among them: the later modules do not have theirs in the cache.
        """
        slots, lag = memory.slots, self.modules - 1
        width, known = slots.hidden.shape[1], lag + slots.pending
        dropped = jnp.maximum(known + count - width, 0)
        place = dropped[:, None] + jnp.arange(width)
        behind = width + place - known[:, None]
        index = jnp.where(place < known[:, None], place, behind)
        index = jnp.minimum(index, width + hidden.shape[1] - 1)
        both = jnp.concatenate([slots.hidden, hidden.astype(slots.hidden.dtype)], axis=1)
        return memory._replace(
            slots=HeadSlots(
                hidden=take_along(both, index[..., None], axis=1),
                pending=slots.pending + count - dropped,
                skipped=slots.skipped + dropped,
            )
        )

    def begin(self, model, params, state, steps: int, total: int):
        """Runs every module over the window of pending rows and commits their keys and values.

        The window's last valid row is the prediction at the root.
        """
        memory = state.draft
        slots, lag = memory.slots, self.modules - 1
        window = slots.hidden.shape[1]
        run, slot, missing = self._over_window(model, params, state, memory, window)
        last = jnp.maximum(lag + slots.pending - 1 - missing, 0)[:, None, None]
        normed, recycled = (take_along(x, last, axis=1) for x in (run.normed, run.recycled))
        buffers = jax.tree.map(  # for one module's rows: all modules have the same layer
            lambda x: jnp.zeros((*x.shape[:-2], total, x.shape[-1]), x.dtype), run.rows[0]
        )
        pages = self._write(memory.pages, run.rows, slot, run.normed, state.table)
        end, scratch = state.length - 2, Scratch(buffers, None)
        work = _Work(pages, end - slots.skipped, end, state.table, recycled, scratch)
        return self._proposal(model, params, normed), work

    def _over_window(self, model, params, state, memory: Memory, count: int):
        """Runs every module over `count` rows of the window.

        Returns:
          the pass, the slot of its first row, and [B] how many rows were left out because they lie
          before the sequence's first token.
        """
        slots, width = memory.slots, memory.slots.hidden.shape[1]
        first = state.length - 1 - slots.pending - (self.modules - 1)
        missing, first = jnp.maximum(-first, 0), jnp.maximum(first, 0)
        index = jnp.minimum(missing[:, None] + jnp.arange(count), width - 1)
        hidden = take_along(slots.hidden, index[..., None], axis=1)
        tokens = [take_positions(state.tokens, first + 1 + s, count) for s in range(self.modules)]
        slot = first - slots.skipped
        run = self._run(model, params, memory.pages, hidden, tokens, first, slot, state.table)
        return run, slot, missing

    def _run(self, model, params, pages, hidden, tokens, first, slot, table) -> _Pass:
        """Runs every module over T rows from position `first` [B] on, behind `slot` cached rows.

        Args:
          tokens: for each module the tokens [B T] that follow the rows.
        """
        head, count = self._head(params), hidden.shape[1]
        hidden = head.fused(hidden)
        positions = first[:, None] + jnp.arange(count)
        where = Where("tree", positions, prefix=slot, visible=chain_bits(count), table=table)
        rows, outputs = [], None
        for s, following in enumerate(tokens):
            shifted = where.replace(positions=positions + s)
            embedded = self.embedded(model, head, following)
            normed, hidden, new = self.run_module(head, s, hidden, embedded, shifted, pages[s])
            rows.append(new.pages)
            outputs = outputs or (normed, hidden)
        return _Pass(*outputs, tuple(rows))

    def step(self, model, params, work: _Work, level: Level):
        """Runs module min(step, last) over one level; only the last module sees earlier levels."""
        modules = self.modules
        index = min(level.step, modules - 1)
        start = level.offset if level.step == index else work.start
        # Module s > 0 has no base row past slot - s: those rows need tokens not yet known.
        prefix = work.slot + 1 if index == 0 else work.slot - (index - 1)
        positions = jnp.broadcast_to((work.position + level.step)[:, None], level.tokens.shape)
        where = Where(
            "tree",
            positions,
            prefix=jnp.maximum(prefix, 0),
            visible=_rows_from(level.visible, start),
            held=level.offset,
            table=work.table,
        )
        head = self._head(params)
        normed, recycled, scratch = self.run_module(
            head,
            index,
            take_parents(work.recycled, level.parents),
            self.embedded(model, head, level.tokens),
            where,
            work.pages[index],
            work.scratch,
        )
        work = work._replace(recycled=recycled, scratch=scratch, start=start)
        return self._proposal(model, params, normed), work

    def commit(self, memory: Memory, work: _Work | None, hidden, count) -> Memory:
        if work is None:
            return self._remember(memory, hidden, count)
        slots, running = memory.slots, count > 0
        window = _pending_window(slots, hidden)
        return Memory(
            work.pages,
            HeadSlots(
                hidden=jnp.where(running[:, None, None], window, slots.hidden),
                pending=jnp.where(running, count, slots.pending),
                skipped=slots.skipped,
            ),
        )

    def _proposal(self, model, params, normed) -> Proposal:
        """Proposes by the columns of the entry `vocabulary`, where there is one."""
        some = vocabulary.proposal(params, normed, self.logit_form(model))
        return some or self.own_proposal(model, params, normed)

    def _head(self, params):
        return self.bound(vocabulary.network(params))


def _pending_window(slots: HeadSlots, hidden: Float[Array, "B A D"]) -> Array:
    """Returns the rows that the head will run over: the last few valid ones, then the new ones."""
    lag = slots.hidden.shape[1] - hidden.shape[1]
    if not lag:
        return hidden
    old_first = slots.pending[:, None] + jnp.arange(lag)  # last `lag` valid rows of the window
    carried = jnp.take_along_axis(slots.hidden, old_first[..., None], axis=1)
    return jnp.concatenate([carried, hidden], axis=1)


def _rows_from(words, start: int):
    """Clears the bits of rows before `start`."""
    first = np.arange(words.shape[-1]) * 32
    keep = [sum(1 << bit for bit in range(32) if word + bit >= start) for word in first]
    return words & np.array(keep, np.uint32)
