"""What draft heads in files of their own have in common: whose tokens, embedding and head they use.

Such a head drafts all of the target's tokens, or some of them (`own_ids`), and has an embedding and
a language-model head of its own or uses the target's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig
from specjax.drafts import vocabulary
from specjax.drafts.head import HeadSource
from specjax.interfaces import Axes, Level, Param, Params, Proposal, Room, Stored
from specjax.models.rows import fuse, fused_rows, merge_axes
from specjax.models.transformer import embed_tokens, lm_logits
from specjax.weights.matrix import PLAIN, cast, pack


class FileHead(HeadSource):
    """Drafts with a head in files of its own, which has one cache for all of its layers.

    A subclass is a frozen dataclass with these two attributes, and writes `rows` (the layers'
    arrays under `layers`, and those of `own_rows`), `needs`, `bound` and the network.

    Attributes:
      cfg: what the head computes. Of it, this class reads `network` (the config of the layers, with
        the number C of draft tokens as `vocab_size`), `target_width`, `target_vocab`, `taps`,
        `own_embedding`, `own_head` and `own_ids`, see `specjax.drafts.eagle3_config.Eagle3Config`.
      writes: whether `rows` has the tensor `t2d`, too, which is written and never read.
    """

    cfg: Any
    writes: bool = False

    # --- files -----------------------------------------------------------------------------------

    def own_rows(self) -> dict[str, Param]:
        """Returns the rows of the head's own tokens, embedding and language-model head."""
        cfg, d, c = self.cfg, self.cfg.network.hidden_size, self.cfg.network.vocab_size
        out: dict[str, Param] = {}
        if cfg.own_head:
            stored = Stored("lm_head.weight", True)
            out["lm_head"] = Param((d, c), ("embed", "vocab"), stored, matrix=True)
        if cfg.own_embedding:
            stored = Stored("embed_tokens.weight")
            out["embed"] = Param((cfg.target_vocab, d), ("vocab", "embed"), stored, table=True)
        if cfg.own_ids:
            out["ids"] = Param((c,), (None,), Stored("d2t"), init=0)
            if self.writes:
                out["t2d"] = Param((cfg.target_vocab,), (None,), Stored("t2d"), init=0)
        return out

    def loaded(self, params: Params) -> Params:
        """Makes ascending `ids` of the files' offsets d2t: column i is of token i + d2t[i]."""
        if not self.cfg.own_ids:
            return params
        offsets = np.asarray(params["ids"], np.int64)
        ids = np.arange(len(offsets)) + offsets
        order = np.argsort(ids)
        params = {**params, "ids": jnp.asarray(ids[order], jnp.int32)}
        if self.cfg.own_head and not np.array_equal(order, np.arange(len(order))):
            params["lm_head"] = jnp.take(params["lm_head"], order, axis=1)
        return params

    def stored(self, params: Params) -> Params:
        """Makes the offsets d2t (int64 [C]) of `ids`, and `t2d` (bool [V]): which are drafted."""
        if not self.cfg.own_ids:
            return params
        ids = np.asarray(params["ids"], np.int64)
        drafted = np.zeros(self.cfg.target_vocab, bool)
        drafted[ids] = True
        return {**params, "ids": ids - np.arange(len(ids)), "t2d": drafted}

    # --- training --------------------------------------------------------------------------------

    fixed = frozenset({"ids", "embed"})

    def head(self, params: Params) -> tuple[Array | None, Array | None] | None:
        """See `Draft.head`."""
        if "lm_head" not in params and "ids" not in params:
            return None
        return params.get("lm_head"), params.get("ids")

    def _target_sized(self) -> ModelConfig:
        """Returns the network's config with the target's number of tokens."""
        return self.cfg.network.replace(vocab_size=self.cfg.target_vocab)

    # --- drafting --------------------------------------------------------------------------------

    @property
    def network(self) -> ModelConfig:
        return self.cfg.network

    def with_network(self, cfg: ModelConfig) -> FileHead:
        return dataclasses.replace(self, cfg=dataclasses.replace(self.cfg, network=cfg))

    def axes(self) -> Axes:
        def tables(rows):
            for name, row in rows.items():
                if not isinstance(row, Mapping):
                    yield {name: row.axes}
                elif name == "fc_norm":
                    yield {name: (None,)}
                else:
                    yield from tables(row)

        columns = {"lm_head": ("embed", "vocab")}  # also those of the entry `vocabulary`
        return merge_axes([*tables(self.rows()), columns])

    def pack(self, params: Params) -> Params:
        """See `Draft.pack`; for a number format layers are fused, unless a mesh splits them."""
        run, of = self.network.run, dataclasses.replace(self, writes=False).rows()
        fixed = {name: params[name] for name in ("ids",) if name in params}
        params = cast({k: v for k, v in params.items() if k not in fixed}, run.compute_dtype)
        if run.fused and run.products != PLAIN:
            params["layers"] = {i: fuse(w, of["layers"][i]) for i, w in params["layers"].items()}
            of["layers"] = {i: fused_rows(rows) for i, rows in of["layers"].items()}
        return {**pack(params, of, self.network), **fixed}

    def columns(self, params: Params, target: Params, ids: Int[Array, " C"]) -> Params:
        """See `Draft.columns`; tokens that the head does not draft stand for no token."""
        source = params if self.cfg.own_head else target
        head, at = vocabulary.head_of(source), ids
        if self.cfg.own_ids:
            own = params["ids"]
            place = jnp.minimum(jnp.searchsorted(own, ids), len(own) - 1)
            ids = jnp.where(own[place] == ids, ids, self.cfg.target_vocab)
            order = jnp.argsort(ids)
            ids, at = ids[order], (place if self.cfg.own_head else at)[order]
        entry = vocabulary.columns(head, at, self.network)
        return {**entry, "ids": ids}

    @property
    def taps_width(self) -> int:
        return len(self.cfg.taps) * self.cfg.target_width

    def embedded(self, model, head: Any, tokens):
        """Looks up the embeddings of tokens in the head's own table, or in the target's."""
        if self.cfg.own_embedding:
            return embed_tokens(head.w["embed"], tokens, self._target_sized())
        return model.embed_tokens(tokens)

    def own_proposal(self, model, params: Params, normed) -> Proposal:
        """Multiplies by the head's columns, or takes its tokens of the target's logits."""
        ids = params.get("ids")
        if self.cfg.own_head:
            return Proposal(lm_logits(normed, params["lm_head"]), ids)
        logits = lm_logits(normed, model.head_weight())
        return Proposal(logits if ids is None else jnp.take(logits, ids, axis=-1), ids)

    def module_pages(self, room: Room) -> tuple:
        run = self.network.run
        return tuple(layer.mixer.empty(run, room).pages for layer in self.network.layers)

    def all_rows_alike(
        self, model: Any, params: Params, normed: Float[Array, "B 1 D"], level: Level
    ) -> Proposal:
        """Proposes the same below all rows of a level, for heads that draft all tokens at once."""
        found = self._proposal(model, params, normed)
        batch, rows = level.tokens.shape
        scores = jnp.broadcast_to(found.scores, (batch, rows, found.scores.shape[-1]))
        return Proposal(scores, found.ids)
