"""The multi-token-prediction draft head (DeepSeek-V3, arXiv 2412.19437, section 2.2; MiMo).

Row j takes (h_j, e(x_{j+1})): the target's state after token j and the embedding of the token that
followed. It predicts x_{j+2}. Drafting deeper feeds the head its own output in place of h. The head
owns its projection, layer(s) and norms; embedding and language-model head are the policy's, read
only.

Module s predicts at step s; a head with fewer modules than steps repeats its last module. In
training and in decoding alike, a query of step s of the last module sees that module's base rows
up to its own position, and of the later steps only its own rows (EAGLE-3's training-time test).

`MTPHead` is the network; `MTPSource` drafts with it, with a cache of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig, SpecConfig
from specjax.config.model import Layer
from specjax.decode.state import RUNNING, take_positions
from specjax.decode.tree import chain_bits, take_parents
from specjax.drafts import ABSORBED, vocabulary
from specjax.indexing import take_along
from specjax.interfaces import (
    Axes,
    Cost,
    Draft,
    DraftNeeds,
    Level,
    Memory,
    Mixer,
    Param,
    Proposal,
    Room,
    Scratch,
    Table,
    Where,
)
from specjax.kernels import dispatch
from specjax.memory import KVCache, after_of, bytes_of, commit_rows
from specjax.models.layers import Block, draw, rms_norm
from specjax.models.rows import axes_of, fuse, fused_rows, layer_rows, merge_axes, param_axes
from specjax.models.transformer import (
    Params,
    angles_of,
    embed_tokens,
    layers_by_kernel,
    lm_logits,
)
from specjax.parallel.context import Context
from specjax.parallel.sharding import whole_rows
from specjax.weights.matrix import PLAIN, cast, dot, pack

WINDOW = 128  # target states that a slot remembers while plain decoding runs


def head_layer(cfg: ModelConfig) -> Layer:
    """The decoder layer of each module: the model's last one, without a window.

    Raises:
      ValueError: that layer keeps recurrent state, which a head cannot.
    """
    last = cfg.layers[-1]
    mixer = last.mixer
    if getattr(mixer, "window", None) is not None:
        mixer = dataclasses.replace(mixer, window=None)
    if mixer_memory(mixer, cfg).slots is not None:
        raise ValueError(
            "an MTP head is made like the model's last layer, and keeps nothing but pages; the "
            f"last layer is {mixer.kind}, which keeps recurrent state: draft from n-grams or with "
            "a standalone model"
        )
    return dataclasses.replace(last, mixer=mixer)


def mixer_memory(mixer: Mixer, cfg: ModelConfig, page_size: int = 1) -> Memory:
    """Returns the shapes of a mixer's page and slot of one sequence; None where it keeps none."""
    room = Room(slots=1, pages=1, page_size=page_size)
    memory = jax.eval_shape(lambda: mixer.empty(cfg.run, room))
    return Memory(*(part if jax.tree.leaves(part) else None for part in memory))


def module_rows(cfg: ModelConfig) -> dict[str, Param]:
    """Returns the rows of a module's arrays outside its layer."""
    d = cfg.hidden_size
    scale = Param((d,), (None,), init=None)
    proj = Param((2 * d, d), ("embed", "mlp"), matrix=True)
    return {"embed_norm": scale, "hidden_norm": scale, "proj": proj, "norm": scale}


def weight_axes(cfg: ModelConfig) -> dict[str, tuple]:
    """Returns the logical axes of the arrays of a model and its head, by their names."""
    if not cfg.mtp_num_layers:
        return param_axes(cfg)
    layer = layer_rows(head_layer(cfg), cfg.hidden_size)
    return merge_axes([param_axes(cfg), axes_of(module_rows(cfg)), axes_of(layer)])


def _fuses(cfg: ModelConfig) -> bool:
    """Returns whether a head's layers are fused: for a number format, and unless they are split."""
    return cfg.run.fused and cfg.run.products != PLAIN


class MTPModule(nnx.Module):
    """One module: norms of both inputs, their projection to D, a decoder layer, a final norm."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        """Makes the module; its layer is fused where `_fuses` says so, see `to_format`."""
        self.cfg = cfg
        for name, row in module_rows(cfg).items():
            setattr(self, name, draw(row, rngs, cfg.run.param_dtype))
        self.layer = Block(head_layer(cfg), cfg, rngs, fused=_fuses(cfg))

    def inputs(self, hidden: Float[Array, "B T D"], embedded: Float[Array, "B T D"]) -> Array:
        """Computes the layer's input; `mtp_concat` says which operand is the first half."""
        eps = self.cfg.rms_norm_eps
        e = rms_norm(embedded, self.embed_norm[...], eps)
        h = rms_norm(hidden.astype(embedded.dtype), self.hidden_norm[...], eps)
        halves = [e, h] if self.cfg.mtp_concat == "embedding_first" else [h, e]
        # Devices of `tp` compute columns, which are then gathered: sums are those of one device.
        return whole_rows(dot(jnp.concatenate(halves, -1), self.proj.get_value()))

    def at(self, where: Where) -> Where:
        """Returns `where` with the kernel and the layer's own angles."""
        angles = angles_of([self.layer.layer], where.positions)
        return where.replace(kernel=self.cfg.run.attention, angles=angles)

    def outputs(self, x: Float[Array, "B T D"]) -> tuple[Array, Array]:
        """Returns states for the language-model head, and states to use as h of the next step."""
        normed = rms_norm(x, self.norm[...], self.cfg.rms_norm_eps)
        return normed, (normed if self.cfg.mtp_recycle == "post_norm" else x)


class MTPHead(nnx.Module):
    """`mtp_num_layers` modules; step s uses module min(s, mtp_num_layers - 1)."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        if cfg.mtp_num_layers < 1:
            raise ValueError(
                f"an MTP head needs mtp_num_layers >= 1, got {cfg.mtp_num_layers}; set it in the "
                "model config"
            )
        self.cfg = cfg
        self.blocks = nnx.List([MTPModule(cfg, rngs) for _ in range(cfg.mtp_num_layers)])

    def module_for(self, step: int) -> tuple[int, MTPModule]:
        index = min(step, len(self.blocks) - 1)
        return index, self.blocks[index]

    def decode(
        self,
        index: int,
        hidden: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        where: Where,
        pages: Any,
        scratch: Scratch | None = None,
    ) -> tuple[Array, Array, Scratch]:
        """Runs module `index` over T rows, behind its pages and earlier scratch rows.

        Args:
          where: positions of the form `tree`; its `prefix` counts the rows in the pages.
          pages: pages of this module, read only.
          scratch: buffers with room for all rows of the round, see `Mixer.run`.

        Returns:
          states for the head [B T D], states to recycle [B T D], and scratch.
        """
        module = self.blocks[index]
        x = module.inputs(hidden, embedded)
        if dispatch.runs_layers(self.cfg):
            buffers = scratch and [scratch.pages]
            arrays = where.positions, [pages], where.prefix, where.visible, buffers, where.held
            x, (rows,) = layers_by_kernel(self.cfg, [module.layer], x, *arrays, where.table)
            return *module.outputs(x), Scratch(KVCache(*rows), None)
        x, scratch, _ = module.layer.run(x, module.at(where), Memory(pages, None), scratch)
        return *module.outputs(x), scratch

    def unroll(
        self,
        hidden: Float[Array, "R S D"],
        step_embeddings: list[Float[Array, "R S D"]],
        positions: Int[Array, "R S"],
        segment_ids: Int[Array, "R S"],
        context: Context | None = None,
    ) -> list[Float[Array, "R S D"]]:
        """Runs `len(step_embeddings)` recursive steps over packed rows in training.

        Args:
          hidden: states of the target, detached.
          step_embeddings: for each step s the embeddings e(x_{t+1+s}) at index t, rolled within
            segments.
          context: how rows are split over devices; all per-token arrays are in its order.

        Returns:
          for each step s, states for the language-model head, of which index t predicts x_{t+2+s}.
        """
        outputs, earlier = [], []
        for step, embedded in enumerate(step_embeddings):
            index, module = self.module_for(step)
            x = module.inputs(hidden, embedded)
            where = Where("train", positions + step, segments=segment_ids, context=context)
            if step == index:  # the module's first use: its rows are the base rows
                x, rows, _ = module.layer.run(x, module.at(where), None, None)
                earlier = [rows]
            else:
                x, rows = module.layer.run_again(x, module.at(where), earlier)
                earlier.append(rows)
            normed, hidden = module.outputs(x)
            outputs.append(normed)
        return outputs


def init_head_params(cfg: ModelConfig, seed: int = 0) -> Params:
    """Makes random head parameters as a plain nested dict, in the layout of checkpoints."""
    head = MTPHead(cfg.running(products=PLAIN), nnx.Rngs(seed))
    return nnx.to_pure_dict(nnx.state(head, nnx.Param))


def to_format(params: Params, cfg: ModelConfig) -> Params:
    """Fuses layers of a head, unless they are split; converts matrices to `cfg.run.products`."""
    rows, blocks = layer_rows(head_layer(cfg), cfg.hidden_size), params["blocks"]
    if _fuses(cfg):
        blocks = {
            index: {**module, "layer": fuse(module["layer"], rows)}
            for index, module in blocks.items()
        }
        rows = fused_rows(rows)
    of = {"blocks": {index: {**module_rows(cfg), "layer": rows} for index in blocks}}
    return pack(cast({**params, "blocks": blocks}, cfg.run.compute_dtype), of, cfg)


def head_graphdef(cfg: ModelConfig):
    """Returns the static half of a head; merge it with parameters inside a jitted function."""
    return nnx.split(nnx.eval_shape(lambda: MTPHead(cfg, nnx.Rngs(0))))[0]


# --- the head as a draft --------------------------------------------------------------------------


class HeadSlots(NamedTuple):
    """What the head remembers of each slot.

    Row j of its cache is (h_j, e(x_{j+1})); skipped positions have no row and are not counted.

    Attributes:
      hidden: target states of the rows that are not yet in the cache. The first mtp_num_layers - 1
        are of rows that are in it: module s lags s tokens behind.
      pending: number of valid rows after those.
      skipped: number of positions that have no row in the cache, because plain decoding ran for
        longer than the window.
    """

    hidden: Float[Array, "B window D"]
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
class MTPSource(Draft):
    """Drafts with an `MTPHead`, whose parameters it takes."""

    cfg: ModelConfig

    @classmethod
    def of(cls, target: ModelConfig, spec: SpecConfig) -> MTPSource:
        return cls(target)

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds((self.cfg.mtp_target_hidden,), self.cfg.mtp_num_layers, WINDOW)

    @property
    def network(self) -> ModelConfig:
        return self.cfg

    def axes(self) -> Axes:
        return weight_axes(self.cfg)

    def init(self, seed: int) -> Params:
        return init_head_params(self.cfg, seed)

    def unroll(
        self, params, policy, states, tokens, positions, segments, context=None
    ) -> list[Array]:
        head: MTPHead = nnx.merge(head_graphdef(self.cfg), params)
        embedded = [embed_tokens(policy["embed"], ids, self.cfg) for ids in tokens]
        return head.unroll(states, embedded, positions, segments, context)

    def with_network(self, cfg: ModelConfig) -> MTPSource:
        return dataclasses.replace(self, cfg=cfg)

    def pack(self, params: Params) -> Params:
        return to_format(params, self.cfg)

    def columns(self, params: Params, target: Params, ids) -> Params:
        return vocabulary.columns(vocabulary.head_of(target), ids, self.cfg)

    def margin(self, steps: int) -> int:
        return max(steps, ABSORBED) + self.cfg.mtp_num_layers

    def cost(self, page_size: int) -> Cost:
        cfg = self.cfg
        state = cfg.hidden_size * jnp.dtype(cfg.run.compute_dtype).itemsize
        slot = (WINDOW + cfg.mtp_num_layers) * state + 8
        page = bytes_of(mixer_memory(head_layer(cfg).mixer, cfg, page_size).pages)
        return Cost(cfg.mtp_num_layers * page, slot)

    def empty(self, room: Room, steps: int) -> Memory:
        cfg, batch = self.cfg, room.slots
        window = max(steps, WINDOW) + cfg.mtp_num_layers
        slots = HeadSlots(
            hidden=jnp.zeros((batch, window, cfg.hidden_size), jnp.dtype(cfg.run.compute_dtype)),
            pending=jnp.ones((batch,), jnp.int32),
            skipped=jnp.zeros((batch,), jnp.int32),
        )
        mixer = head_layer(cfg).mixer
        pages = tuple(mixer.empty(cfg.run, room).pages for _ in range(cfg.mtp_num_layers))
        return Memory(pages, slots)

    def prefill(self, model, params, pages, tokens, start, hidden, table, run=1) -> tuple:
        """See `Draft.prefill`; `begin` rewrites rows whose tokens are not known yet."""
        count = hidden.shape[1]
        shifted = [tokens[:, 1 + s : 1 + s + count] for s in range(self.cfg.mtp_num_layers)]
        ran = self._run(model, params, pages, hidden, shifted, start, start, table)
        return self._write(pages, ran.rows, start, ran.normed, table, run)

    def _write(self, pages: tuple, rows: tuple, start, normed, table, run=1) -> tuple:
        return commit_rows(
            pages, rows, start, after_of(normed), table, run, kernel=self.cfg.run.attention
        )

    def start(self, tokens, prompt_len, states) -> HeadSlots:
        """See `Draft.start`: the first round runs the head over one row, the state before the root;
        the rows before it in the window are in the cache already."""
        ones = jnp.ones_like(prompt_len)
        return HeadSlots(states, ones, 0 * ones)

    def resume(self, model, params, state, steps: int) -> Memory:
        """Runs over pending rows until no slot has more of them than a round can emit."""
        memory, lag = state.draft, self.cfg.mtp_num_layers - 1
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
        slots, lag = memory.slots, self.cfg.mtp_num_layers - 1
        width, known = slots.hidden.shape[1], lag + slots.pending
        dropped = jnp.maximum(known + count - width, 0)
        at = dropped[:, None] + jnp.arange(width)
        behind = width + at - known[:, None]
        index = jnp.where(at < known[:, None], at, behind)
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
        slots, lag = memory.slots, self.cfg.mtp_num_layers - 1
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
        first = state.length - 1 - slots.pending - (self.cfg.mtp_num_layers - 1)
        missing, first = jnp.maximum(-first, 0), jnp.maximum(first, 0)
        index = jnp.minimum(missing[:, None] + jnp.arange(count), width - 1)
        hidden = take_along(slots.hidden, index[..., None], axis=1)
        tokens = [
            take_positions(state.tokens, first + 1 + s, count)
            for s in range(self.cfg.mtp_num_layers)
        ]
        slot = first - slots.skipped
        run = self._run(model, params, memory.pages, hidden, tokens, first, slot, state.table)
        return run, slot, missing

    def _run(self, model, params, pages, hidden, tokens, first, slot, table) -> _Pass:
        """Runs every module over T rows from position `first` [B] on, behind `slot` cached rows.

        Args:
          tokens: for each module the tokens [B T] that follow the rows.
        """
        head, count = self._head(params), hidden.shape[1]
        positions = first[:, None] + jnp.arange(count)
        where = Where("tree", positions, prefix=slot, visible=chain_bits(count), table=table)
        rows, outputs = [], None
        for s, following in enumerate(tokens):
            shifted = where.replace(positions=positions + s)
            normed, hidden, new = head.decode(
                s, hidden, model.embed_tokens(following), shifted, pages[s]
            )
            rows.append(new.pages)
            outputs = outputs or (normed, hidden)
        return _Pass(*outputs, tuple(rows))

    def step(self, model, params, work: _Work, level: Level):
        """Runs module min(step, last) over one level; only the last module sees earlier levels."""
        modules = self.cfg.mtp_num_layers
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
        normed, recycled, scratch = self._head(params).decode(
            index,
            take_parents(work.recycled, level.parents),
            model.embed_tokens(level.tokens),
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
        """Multiplies by the policy's language-model head, or some of its columns."""
        some = vocabulary.proposal(params, normed)
        return some or Proposal(lm_logits(normed, model.head_weight()))

    def _head(self, params):
        return nnx.merge(head_graphdef(self.cfg), vocabulary.network(params))


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
    keep = [sum(1 << bit for bit in range(32) if at + bit >= start) for at in first]
    return words & np.array(keep, np.uint32)
