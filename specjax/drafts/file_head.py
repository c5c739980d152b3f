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

from specjax.checked_json import CheckpointError
from specjax.config import ModelConfig
from specjax.config.model import LogitForm
from specjax.drafts import vocabulary
from specjax.drafts.head import WINDOW, HeadSource
from specjax.drafts.head_config import HeadFiles, rows_of, shapes_of
from specjax.interfaces import (
    Axes,
    DraftFiles,
    DraftNeeds,
    Level,
    Param,
    Params,
    Proposal,
    Stored,
)
from specjax.models.rows import fuse, fused_rows, merge_axes
from specjax.models.transformer import embed_tokens, lm_logits
from specjax.weights.matrix import PLAIN, cast, pack, require_matches


def norm_row(name: str, width: int) -> Param:
    """Returns the row of a norm's scale, which files hold as `<name>.weight`."""
    return Param((width,), (None,), Stored(f"{name}.weight"), init=None)


def within(prefix: str, rows: Mapping[str, Param]) -> dict[str, Param]:
    """Returns a layer's rows with a prefix before the names of their tensors."""
    return {
        name: dataclasses.replace(row, stored=row.stored._replace(name=prefix + row.stored.name))
        for name, row in rows.items()
    }


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """What a head in files of its own computes, for one target.

    Attributes:
      network: config of the head's layers: its width D, its number of draft tokens C as
        `vocab_size`, `rms_norm_eps`, and layers whose attention has the head's own RoPE.
      target_width: width of the target's hidden states.
      target_vocab: vocabulary size V of the target.
      taps: the target's hidden states that the head takes, see `DraftNeeds.taps`.
      own_embedding: whether the head has an embedding [V D]; else it uses the target's, whose width
        must be D.
      own_head: whether the head has a language-model head [D C]; else it uses the target's columns
        of its draft tokens.
      own_ids: whether its files list the draft tokens; else they are all V tokens.
      mask_token: id of the token that stands for those that are drafted, in a head that drafts all
        tokens at once; None: it drafts one after the other.
    """

    network: ModelConfig
    target_width: int
    target_vocab: int
    taps: tuple[int | str, ...]
    own_embedding: bool = False
    own_head: bool = False
    own_ids: bool = False
    mask_token: int | None = None


class FileHead(HeadSource):
    """Drafts with a head in files of its own, which has one cache for all of its layers.

    A subclass is a frozen dataclass with these attributes, and writes
    `is_of(raw, tensors)`: whether a config.json and tensors, by name, are those of such a head;
    `read_files(file, raw, tensors, target)`: makes the head of them, see `Draft.read`;
    `rows`: the layers' arrays under `layers`, and those of `own_rows`; `saved`; `title`: the name
    of this kind of head; and `bound`, which returns a `HeadNetwork`.

    Attributes:
      cfg: what the head computes.
      layout: layout of its files.
      writes: whether `rows` has the tensor `t2d`, too, which is written and never read.
    """

    cfg: HeadConfig
    layout: str = ""
    writes: bool = False
    has_files = True

    def __post_init__(self):
        cfg, width = self.cfg, self.cfg.network.hidden_size
        borrowed = {"embedding": not cfg.own_embedding, "language-model head": not cfg.own_head}
        borrowed["final state"] = "post_norm" in cfg.taps
        names = [name for name, is_lent in borrowed.items() if is_lent]
        if names and width != cfg.target_width:
            raise ValueError(
                f"a head that uses the target's {' and '.join(names)} must have the target's width "
                f"{cfg.target_width}, got {width}; give it its own, or use a head for this target"
            )

    # --- files -----------------------------------------------------------------------------------

    @classmethod
    def recognises(cls, files: DraftFiles, target) -> bool:
        return files.is_directory and cls.is_of(files.config(), files.tensors(required=False))

    @classmethod
    def read(cls, files: DraftFiles, target) -> FileHead:
        raw = files.config()
        if not raw:
            raise CheckpointError(
                f"{files.path} holds the weights of a draft head and no config.json; fetch it, too"
            )
        return cls.read_files(files.file, raw, files.tensors(), target)

    @classmethod
    def made_of(
        cls, head: HeadFiles, cfg: HeadConfig, ignored: tuple[str, ...] = (), **fields
    ) -> FileHead:
        """Makes the head that files describe, which must hold exactly its tensors.

        Args:
          ignored: see `HeadFiles.check_tensors`.
          fields: further fields of the class.

        Raises:
          CheckpointError: the tensors or sizes do not fit.
        """
        try:
            source = cls(cfg, **fields)
        except ValueError as error:
            raise head.error(str(error)) from error
        shapes = shapes_of(source.rows())
        expected = {name: shape for name, shape in shapes.items() if name not in source.aliases}
        head.check_tensors(expected, ignored)
        return source

    def load(self, files: DraftFiles) -> Params:
        return files.arrays(self, self.network.run.param_dtype)

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

    # --- for the user ----------------------------------------------------------------------------

    def described(self) -> str:
        """See `Draft.described`: names every setting, for some of them change no shape."""
        network, settings = self.cfg.network, dict(vars(self.cfg))
        settings |= {
            "network": f"{network.model_type} of width {network.hidden_size}",
            "windows": [layer.mixer.window for layer in network.layers],
            "draft_tokens": network.vocab_size,
        }
        named = ", ".join(f"{name} {value}" for name, value in settings.items())
        return f"{self.title} head ({self.layout}): {named}"

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
    def needs(self) -> DraftNeeds:
        return DraftNeeds(self.cfg.taps, self.modules, WINDOW)

    @property
    def network(self) -> ModelConfig:
        return self.cfg.network

    def with_network(self, cfg: ModelConfig) -> FileHead:
        return dataclasses.replace(self, cfg=dataclasses.replace(self.cfg, network=cfg))

    def axes(self) -> Axes:
        columns = {"lm_head": ("embed", "vocab")}  # also those of the entry `vocabulary`
        return merge_axes([*({name: row.axes} for name, row in rows_of(self.rows())), columns])

    def pack(self, params: Params) -> Params:
        """See `Draft.pack`; for a number format layers are fused, unless a mesh splits them."""
        run, of = self.network.run, dataclasses.replace(self, writes=False).rows()
        fixed = {name: params[name] for name in ("ids",) if name in params}
        params = cast({k: v for k, v in params.items() if k not in fixed}, run.compute_dtype)
        if run.fused and run.products != PLAIN:
            params["layers"] = {i: fuse(w, of["layers"][i]) for i, w in params["layers"].items()}
            of["layers"] = {i: fused_rows(rows) for i, rows in of["layers"].items()}
        require_matches(run.products, of)
        return {**pack(params, of, self.network), **fixed}

    def columns(self, params: Params, target: Params, ids: Int[Array, " C"]) -> Params:
        """See `Draft.columns`; tokens that the head does not draft stand for no token."""
        source = params if self.cfg.own_head else target
        head, places = vocabulary.head_of(source), ids
        if self.cfg.own_ids:
            known = params["ids"]
            place = jnp.minimum(jnp.searchsorted(known, ids), len(known) - 1)
            ids = jnp.where(known[place] == ids, ids, self.cfg.target_vocab)
            order = jnp.argsort(ids)
            ids, places = ids[order], (place if self.cfg.own_head else places)[order]
        entry = vocabulary.columns(head, places, self.network)
        return {**entry, "ids": ids}

    @property
    def taps_width(self) -> int:
        return len(self.cfg.taps) * self.cfg.target_width

    def embedded(self, model, head: Any, tokens):
        """Looks up the embeddings of tokens in the head's own table, or in the target's.

        Published heads take the target's embeddings as its table has them (vLLM, SpecForge).
        """
        if self.cfg.own_embedding:
            return embed_tokens(head.w["embed"], tokens, self._target_sized())
        return model.embed_tokens(tokens, scaled=False)

    def logit_form(self, model) -> LogitForm:
        """Returns that of the head, if the matrix is its own."""
        return (self.network if self.cfg.own_head else model.cfg).logits

    def own_proposal(self, model, params: Params, normed) -> Proposal:
        """Multiplies by the head's columns, or takes its tokens of the target's logits."""
        ids, has_own = params.get("ids"), self.cfg.own_head
        head = params["lm_head"] if has_own else model.head_weight()
        logits = lm_logits(normed, head, self.logit_form(model))
        return Proposal(logits if has_own or ids is None else jnp.take(logits, ids, axis=-1), ids)

    def all_rows_alike(
        self, model: Any, params: Params, normed: Float[Array, "B 1 D"], level: Level
    ) -> Proposal:
        """Proposes the same below all rows of a level, for heads that draft all tokens at once."""
        found = self._proposal(model, params, normed)
        batch, rows = level.tokens.shape
        scores = jnp.broadcast_to(found.scores, (batch, rows, found.scores.shape[-1]))
        return Proposal(scores, found.ids)
