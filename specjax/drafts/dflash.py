"""The DFlash draft head (Chen et al. 2026, arXiv 2602.06036), which drafts a block in one pass.

It keeps keys and values of the target's states, and no states of its own:

    c_j = hidden_norm(fc[target states after token j])      one row per token before the root
    k, v of layer i: of c_j, at position j                  what its cache holds
    x = embeddings of [root, mask, mask, ..]                the block, from the root's position on
    x = x + attention(input_norm(x))                        in each layer i, and then
    x = x + mlp(post_norm(x))
    logits = lm_head(norm(x))                               row s predicts the s-th token below

A row of the block attends to all cached rows and to the whole block, later rows too. In layers
with a window (`sliding_attention`, as in heads for hybrid models) it attends to its own position
and those before it within the window. Heads that say that rows see later ones there are refused;
files that do not say it are read as those who write the layout do: speculators'
`sliding_window_non_causal` is false by default, where vLLM takes true for an absent key, and for
files of the authors vLLM and SGLang take the window as causal. Its keys and values are of
`input_norm(x)`, by the same matrices as those of c_j. A round of n steps runs the root and n masks,
as vLLM and the authors' program do, so that what is proposed depends on n. What it proposes below a
token depends on the depth alone: all rows of a level get the same.

Files have one of two layouts, whose tensors have the same names: `z-lab` (the authors, SpecForge)
lists outputs of layers in `dflash_config.target_layer_ids`, and `speculators` (vLLM) boundaries in
`aux_hidden_state_layer_ids`. Boundary b is the input of the target's layer b, before any norm, so
that the output of layer i is boundary i + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.checked_json import UnsupportedModelError
from specjax.decode.state import take_positions
from specjax.decode.tree import chain_bits, pack_bits
from specjax.drafts.file_head import FileHead, HeadConfig, norm_row, within
from specjax.drafts.head import HeadNetwork
from specjax.drafts.head_config import HeadFiles, config_json
from specjax.interfaces import Level, Memory, Param, Params, Scratch, Stored, Where
from specjax.memory import KVCache, with_marked_keys
from specjax.models.families import common
from specjax.models.layers import block, rms_norm
from specjax.models.rows import layer_rows
from specjax.parallel.sharding import whole_rows
from specjax.weights.matrix import dot

_AUX = "aux_hidden_state_layer_ids"
_NON_CAUSAL = "sliding_window_non_causal"
_BLOCK = 8  # of a file of speculators that does not say it
# Keys by which a head computes something else, and the value with which they change nothing.
_NEUTRAL = {
    **dict.fromkeys(("sample_from_anchor", "shift_label", "is_causal", "causal", "use_swa"), False),
    **dict.fromkeys(("attention_sink_bias", "add_swa_attention_sink_bias"), False),
    "attention_bias": False,
    "use_aux_hidden_state": True,
    "projector_type": "dflash",
}


@dataclasses.dataclass(frozen=True)
class DFlashConfig(HeadConfig):
    """A DFlash head for one target, see `HeadConfig`; its layers are Qwen3's without biases.

    Attributes:
      block: rows of the largest block that it was trained on, the root's included.
    """

    block: int = _BLOCK


@dataclasses.dataclass(frozen=True)
class DFlashHead(HeadNetwork):
    """The network of a DFlash head, see `HeadNetwork`."""

    cfg: DFlashConfig

    def fused(self, states: Float[Array, "B T taps_width"]) -> Float[Array, "B T D"]:
        """Computes c of the target's states."""
        network = self.cfg.network
        states = states.astype(jnp.dtype(network.run.compute_dtype))
        # Devices of `tp` compute columns, which are then gathered: sums are those of one device.
        fused = whole_rows(dot(states, self.w["fc"]))
        return rms_norm(fused, self.w["hidden_norm"], network.rms_norm_eps)

    def context(self, fused: Float[Array, "B T D"], where: Where) -> tuple[KVCache, ...]:
        """Computes keys and values of each layer for rows of c."""
        where, rows = self.at(where), []
        for number, layer in enumerate(self.cfg.network.layers):
            mixer, w = layer.mixer, self.w["layers"][number]
            made = mixer.project(w, fused, where, True)
            rows.append(KVCache(*with_marked_keys(made.k, made.v)))
        return tuple(rows)

    def block(
        self, x: Float[Array, "B T D"], where: Where, pages: tuple[KVCache, ...]
    ) -> Float[Array, "B T D"]:
        """Runs all layers over a block of embeddings behind the cached rows.

        Returns:
          states for the language-model head.
        """
        where, rows = self.at(where), x.shape[1]
        everywhere = where.replace(visible=pack_bits(np.ones((rows, rows), bool)))
        before = where.replace(visible=chain_bits(rows))
        for number, (layer, held) in enumerate(zip(self.cfg.network.layers, pages, strict=True)):
            seen = everywhere if layer.mixer.window is None else before

            def mix(w, x, mixer=layer.mixer, seen=seen, held=held):
                return mixer.run(w, x, seen, Memory(held, None), None)

            x = block(layer, self.w["layers"][number], x, where, self.cfg.network, mix)[0]
        return rms_norm(x, self.w["norm"], self.cfg.network.rms_norm_eps)


@dataclasses.dataclass(frozen=True)
class DFlashSource(FileHead):
    """Drafts with a `DFlashHead`, whose parameters it takes. It is not trained here.

    Attributes:
      cfg: what the head computes.
      layout: layout of its files: `speculators`, or `z-lab`, which is read and not written.
      writes: whether `rows` has the tensor `t2d`, too, which is written and never read.
    """

    cfg: DFlashConfig
    layout: str = dataclasses.field(default="speculators", compare=False)
    writes: bool = dataclasses.field(default=False, compare=False)

    # --- files -----------------------------------------------------------------------------------

    @classmethod
    def is_of(cls, raw: Mapping[str, Any], tensors: Mapping[str, Any]) -> bool:
        classes = raw.get("architectures")
        names = (raw.get("speculators_model_type"), *(classes if isinstance(classes, list) else ()))
        if any(isinstance(name, str) and "dflash" in name.lower() for name in names):
            return True
        return "dflash_config" in raw or (
            "hidden_norm.weight" in tensors and any(n.startswith("layers.0.") for n in tensors)
        )

    @classmethod
    def read_files(
        cls, file: Any, raw: Mapping[str, Any], tensors: Mapping[str, Any], target
    ) -> DFlashSource:
        head = HeadFiles("DFlash", file, raw, tensors, target)
        return cls.made_of(
            head,
            _read(head),
            ("verifier_",),  # of training
            layout="speculators" if head.speculators else "z-lab",
        )

    def rows(self) -> dict[str, Any]:
        """See `Draft.rows`. `ids` is read from offsets, see `loaded`."""
        d, fc = self.cfg.network.hidden_size, Stored("fc.weight", True)
        return {
            "fc": Param((self.taps_width, d), ("embed", "mlp"), fc, matrix=True),
            "hidden_norm": norm_row("hidden_norm", d),
            "norm": norm_row("norm", d),
            "layers": {
                number: within(f"layers.{number}.", layer_rows(layer, d))
                for number, layer in enumerate(self.cfg.network.layers)
            },
            **self.own_rows(),
        }

    def saved(self, dtype: str) -> tuple[dict[str, Any], DFlashSource]:
        cfg, steps = self.cfg, self.cfg.block - 1
        kind = "dflash", "DFlashSpeculator"
        raw = {
            **config_json(*kind, steps, cfg.network, cfg.target_vocab, dtype),
            "block_size": cfg.block,
            _AUX: list(cfg.taps),
            "mask_token_id": cfg.mask_token,
            "sample_from_anchor": False,
            _NON_CAUSAL: False,
        }
        return raw, DFlashSource(cfg, writes=True)

    # --- for the user ----------------------------------------------------------------------------

    title = "DFlash"

    def refuses(self, strategy: Any) -> str | None:
        """See `Draft.refuses`: no more steps than the largest block has masks."""
        most = self.cfg.block - 1
        if strategy.steps <= most:
            return None
        return (
            f"this DFlash head has a block_size of {self.cfg.block}, so that it drafts at most "
            f"{most} tokens, got {strategy.steps} steps; use a strategy such as "
            f"'{most}_1_{most + 1}'"
        )

    # --- drafting --------------------------------------------------------------------------------

    def bound(self, params: Params) -> DFlashHead:
        return DFlashHead(self.cfg, params)

    def run_module(self, head: DFlashHead, index, hidden, embedded, where, pages, scratch=None):
        """See `HeadSource.run_module`: c of each row, and what it adds to the cache."""
        return hidden, hidden, Scratch(head.context(hidden, where), None)

    def begin(self, model, params, state, steps: int, total: int):
        """Caches the accepted tokens' rows, runs the block, and proposes what its row 1 says."""
        _, work = super().begin(model, params, state, steps, total)
        head = self._head(params)
        root = take_positions(state.tokens, state.length - 1, 1)
        masks = jnp.full((len(root), steps), self.cfg.mask_token, root.dtype)
        tokens = jnp.concatenate([root, masks], axis=1)
        where = Where(
            "tree",
            work.position[:, None] + 1 + jnp.arange(steps + 1),
            prefix=jnp.maximum(work.slot + 1, 0),
            table=work.table,
        )
        normed = head.block(self.embedded(model, head, tokens), where, work.pages[0])[:, 1:]
        return self._proposal(model, params, normed[:, :1]), work._replace(recycled=normed)

    def step(self, model, params, work, level: Level):
        """See `HeadSource.step`: what the block's row level.step + 1 says, below all rows."""
        normed = work.recycled[:, level.step : level.step + 1]
        return self.all_rows_alike(model, params, normed, level), work


# --- config.json ----------------------------------------------------------------------------------


def _read(head: HeadFiles) -> DFlashConfig:
    """Reads what a head computes."""
    top, nested, body, target = head.top, head.top.within("dflash_config"), head.body, head.target
    kind = top.text("speculators_model_type", None) or "dflash"
    others = [f"speculators_model_type {kind}"] if kind.lower() != "dflash" else []
    others += [
        name
        for name in top.texts("architectures")
        if "dflash" in name.lower() and name not in ("DFlashDraftModel", "DFlashSpeculator")
    ]
    if body.text("model_type", "qwen3") != "qwen3":
        others.append(f"layers of model_type {body.raw['model_type']}")
    if others:
        raise UnsupportedModelError(
            f"{head.file}: this DFlash head needs what is not implemented: {'; '.join(others)}"
        )
    columns, own_ids = head.draft_tokens()
    layers = body.integer("num_hidden_layers", most=common.MOST_LAYERS)
    network = head.network("qwen3", layers, columns)
    neutral = _NEUTRAL
    if any(layer.mixer.window for layer in network.layers):
        # Here false says that rows see later ones in their window, and so does the other key.
        neutral = _NEUTRAL | {"is_causal": None, "causal": None, _NON_CAUSAL: False}
    head.refuse_others(network, neutral, nested)
    sizes = nested if not head.speculators and nested.raw.get("block_size") is not None else top
    usual = (_BLOCK,) if head.speculators else ()
    keys, most = top if head.speculators else nested, target.vocab_size - 1
    mask = keys.integer("mask_token_id", least=0, most=most)
    return DFlashConfig(
        network=network,
        target_width=target.hidden_size,
        target_vocab=target.vocab_size,
        taps=_taps(head, layers),
        mask_token=mask,
        block=sizes.integer("block_size", *usual, least=2),
        own_embedding="embed_tokens.weight" in head.tensors,
        own_head="lm_head.weight" in head.tensors,
        own_ids=own_ids,
    )


def _taps(head: HeadFiles, layers: int) -> tuple[int, ...]:
    """Returns the boundaries whose states `fc` takes, in its order."""
    count, nested = head.target.num_layers, head.top.within("dflash_config")
    if head.speculators:
        return head.check_taps(head.ids(head.top, _AUX), _AUX)
    # Without a list, as the authors' program chooses them.
    span = (count - 4) / max(layers - 1, 1)
    usual = [round(1 + i * span) for i in range(layers)] if layers > 1 else [count // 2]
    outputs = head.ids(nested, "target_layer_ids") or usual
    if count - 1 in outputs:
        # transformers, which the authors' program reads it from, gives it after the final norm.
        raise head.error(
            f"target_layer_ids names the output of the target's last layer {count - 1}, which "
            "programs take before or after the final norm; speculators' layout tells the two apart"
        )
    return head.check_taps([i + 1 for i in outputs], "target_layer_ids")
