"""A standalone smaller model as a draft source (Leviathan et al. 2023, arXiv 2211.17192).

The draft model reads the target's tokens and none of its states. It has a cache of its own, where a
row is at its absolute position. A round begins by running it over the tokens that the last round
emitted; the last of these, the root, gives the first prediction. The nodes of the tree then run
level by level against that cache and the levels before.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig
from specjax.decode.state import RUNNING, take_positions
from specjax.decode.tree import chain_bits
from specjax.drafts import ABSORBED, vocabulary
from specjax.interfaces import (
    Axes,
    Cost,
    Draft,
    DraftFiles,
    Level,
    Memory,
    Proposal,
    Room,
    Scratch,
    Table,
    Where,
)
from specjax.memory import Commit, after_of, commit, cost, empty, keeps_state
from specjax.models.rows import fixed_dtypes, param_axes
from specjax.models.transformer import (
    Params,
    Transformer,
    graphdef,
    laid_out,
    to_decode_layout,
    to_format,
)
from specjax.parallel.sharding import param_shardings
from specjax.weights.matrix import cast


class ModelSlots(NamedTuple):
    """What the draft model remembers of each slot.

    Attributes:
      pending: number of tokens at the end of the sequence, root included, whose rows are not in the
        draft's cache yet: the tokens emitted since it last ran, at least 1. Rows at positions below
        length - pending are valid.
    """

    pending: Int[Array, " B"]


class _Work(NamedTuple):
    """The work of a round, which each step hands to the next.

    Attributes:
      cache: pages of the draft model, with the rows up to the root committed.
      root: position of each slot's root.
      scratch: keys and values [.. B K total H] of the tree rows run so far, by layer.
      table: the pages of each slot.
    """

    cache: tuple
    root: Int[Array, " B"]
    scratch: tuple[Scratch, ...]
    table: Table


@dataclasses.dataclass(frozen=True)
class ModelSource(Draft):
    """Drafts with a standalone model, whose parameters are in their decode layout.

    Attributes:
      cfg: config of the draft model.
      vocab: vocabulary size of the target. Larger ids are padding of the draft model's tables and
        are cut off; ids that the draft model does not have are never proposed.
    """

    cfg: ModelConfig
    vocab: int

    def __post_init__(self):
        if keeps_state(self.cfg):
            raise ValueError(
                "a standalone draft model keeps keys and values alone, and this one has layers "
                "with recurrent state; draft with a head of the policy"
            )

    @classmethod
    def recognises(cls, files: DraftFiles, target: ModelConfig | None) -> bool:
        return True  # it is asked last

    @classmethod
    def read(cls, files: DraftFiles, target: ModelConfig) -> ModelSource:
        """See `Draft.read`; a draft head in the files is ignored.

        Raises:
          ValueError: the vocabularies differ, see `check_vocabulary`.
        """
        cfg, tokenizer = files.model_config(as_stored=True), files.tokenizer()
        check_vocabulary(cfg, target, tokenizer and tokenizer.get_vocab(), files.vocabulary)
        dtype = target.run.compute_dtype
        cfg = cfg.running(param_dtype=dtype, compute_dtype=dtype)
        return cls(laid_out(cfg, files.mesh), target.vocab_size)

    def load(self, files: DraftFiles) -> Params:
        params = files.policy(self.cfg.run.param_dtype)
        params = jax.jit(to_decode_layout, static_argnums=1)(params, self.cfg)
        if files.mesh is None:
            return params
        return jax.device_put(params, param_shardings(files.mesh, params, self.axes()))

    @property
    def network(self) -> ModelConfig:
        return self.cfg

    def axes(self) -> Axes:
        return param_axes(self.cfg)

    def with_network(self, cfg: ModelConfig) -> ModelSource:
        return dataclasses.replace(self, cfg=cfg)

    def pack(self, params: Params) -> Params:
        return to_format(cast(params, self.cfg.run.compute_dtype, fixed_dtypes(self.cfg)), self.cfg)

    def columns(self, params: Params, target: Params, ids) -> Params:
        """See `Draft.columns`; ids that the draft model does not have stand for no token."""
        head = vocabulary.head_of(params)
        ids = jnp.where(ids < head.shape[1], ids, self.vocab)
        return vocabulary.columns(head, ids, self.cfg)

    def cost(self, page_size: int) -> Cost:
        return Cost(cost(self.cfg, page_size).page, 4)

    def empty(self, room: Room, steps: int) -> Memory:
        pages = empty(self.cfg, room).pages
        return Memory(pages, ModelSlots(jnp.ones((room.slots,), jnp.int32)))

    def prefill(self, model, params, pages, tokens, start, hidden, table) -> tuple:
        x, rows = self._run(params, pages, tokens, start, table)
        return self._write(pages, rows, start, x, table)

    def _write(self, pages: tuple, rows, start, x, table) -> tuple:
        to = Commit(start, table, after_of(x))
        count = jnp.full_like(start, x.shape[1])
        return commit(self.cfg, self._memory(pages), rows, None, count, to).pages

    def _memory(self, pages: tuple) -> Memory:
        return Memory(pages, (None,) * len(pages))

    def start(self, tokens, prompt_len, states) -> ModelSlots:
        return ModelSlots(jnp.ones_like(prompt_len))

    def resume(self, model, params, state, steps: int) -> Memory:
        """Runs over pending tokens until no slot has more of them than a round can emit."""
        running = state.finish == RUNNING

        def behind(memory):
            return (running & (memory.slots.pending > steps + 1)).any()

        def absorb(memory):
            pending = memory.slots.pending
            start = state.length - pending
            tokens = take_positions(state.tokens, start, ABSORBED)
            x, rows = self._run(params, memory.pages, tokens, start, state.table)
            cache = self._write(memory.pages, rows, start, x, state.table)
            taken = jnp.where(running, jnp.clip(pending - 1, 0, ABSORBED), 0)
            return Memory(cache, ModelSlots(pending - taken))

        return jax.lax.while_loop(behind, absorb, state.draft)

    def begin(self, model, params, state, steps: int, total: int):
        """Runs the last steps + 1 tokens; no row sees the rows past the pending ones."""
        draft, (cache, (pending,)) = self._draft(params), state.draft
        window, start = steps + 1, state.length - pending
        tokens = take_positions(state.tokens, start, window)
        x, rows = self._run(params, cache, tokens, start, state.table)
        x = jnp.take_along_axis(x, (pending - 1)[:, None, None], axis=1)
        cache = self._write(cache, rows, start, x, state.table)
        scratch = jax.tree.map(
            lambda r: jnp.zeros((*r.shape[:-2], total, r.shape[-1]), r.dtype), rows
        )
        work = _Work(cache, state.length - 1, scratch, state.table)
        return self._proposal(draft, params, x), work

    def _run(self, params, cache: tuple, tokens, start, table):
        """Runs the draft model over consecutive tokens from position `start` [B] on."""
        count = tokens.shape[1]
        positions = start[:, None] + jnp.arange(count)
        where = Where("tree", positions, prefix=start, visible=chain_bits(count), table=table)
        found = self._draft(params).decode(tokens, where, self._memory(cache))
        return found.x, found.scratch

    def step(self, model, params, work: _Work, level: Level):
        """Runs one level against the cache, the root included, and the levels before."""
        draft = self._draft(params)
        positions = jnp.broadcast_to((work.root + level.step)[:, None], level.tokens.shape)
        where = Where(
            "tree",
            positions,
            prefix=work.root + 1,
            visible=level.visible,
            held=level.offset,
            table=work.table,
        )
        decoded = draft.decode(level.tokens, where, self._memory(work.cache), work.scratch)
        return self._proposal(draft, params, decoded.x), work._replace(scratch=decoded.scratch)

    def commit(self, memory: Memory, work: _Work | None, hidden, count) -> Memory:
        if work is None:
            return memory._replace(slots=ModelSlots(memory.slots.pending + count))
        pending = jnp.where(count > 0, count, memory.slots.pending)
        return Memory(work.cache, ModelSlots(pending))

    def _draft(self, params: Params) -> Transformer:
        params = vocabulary.network(params)
        return nnx.merge(graphdef(self.cfg, self.cfg.run.decode_layout), params)

    def _proposal(self, draft: Transformer, params: Params, x) -> Proposal:
        some = vocabulary.proposal(params, draft.final_norm(x), draft.cfg.logits)
        return some or Proposal(self._fit(draft.logits(x)))

    def _fit(self, logits: Float[Array, "B R own"]) -> Float[Array, "B R V"]:
        """Pads or cuts the draft's logits to the target's ids; -inf where it has no logit."""
        missing = self.vocab - logits.shape[-1]
        if missing <= 0:
            return logits[..., : self.vocab]
        return jnp.pad(logits, [(0, 0)] * 2 + [(0, missing)], constant_values=-jnp.inf)


def check_vocabulary(
    draft_cfg: ModelConfig,
    target_cfg: ModelConfig,
    draft_ids: dict[str, int] | None,
    target_ids: dict[str, int] | None,
) -> None:
    """Refuses a draft model whose token ids differ in meaning from the target's.

    Args:
      draft_cfg: config of the draft model.
      target_cfg: config of the target.
      draft_ids: id of each token by the draft model's tokenizer; None: it has none.
      target_ids: id of each token by the target's tokenizer; None: it has none.

    Raises:
      ValueError: an id stands for two different tokens; or the vocabulary sizes differ and a
        tokenizer is missing. (Models of one family often pad their embeddings to different sizes,
        and only a tokenizer tells padding from tokens.)
    """
    sizes = draft_cfg.vocab_size, target_cfg.vocab_size
    if draft_ids is None or target_ids is None:
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the draft model has a vocabulary of {sizes[0]}, the target of {sizes[1]}; "
                "expected the same, or a tokenizer beside each"
            )
        return
    theirs = {index: token for token, index in draft_ids.items()}
    clashes = sorted(
        (index, token) for token, index in target_ids.items() if theirs.get(index, token) != token
    )
    if clashes:
        index, token = clashes[0]
        raise ValueError(
            f"the draft model's tokenizer differs from the target's in {len(clashes)} ids: id "
            f"{index} is {theirs[index]!r}, expected {token!r}; use a model of the target's family"
        )
