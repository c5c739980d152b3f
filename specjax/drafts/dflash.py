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
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.checked_json import CheckpointError, Keys, UnsupportedModelError
from specjax.config import ModelConfig
from specjax.config.checks import choice
from specjax.config.model import Layer
from specjax.config.overrides import are_ids, checked_overrides
from specjax.decode.state import take_positions
from specjax.decode.tree import chain_bits, pack_bits
from specjax.drafts import eagle3_config
from specjax.drafts.file_head import FileHead, HeadNetwork, norm_row, within
from specjax.interfaces import (
    Level,
    Memory,
    Param,
    Params,
    Scratch,
    Stored,
    Where,
)
from specjax.memory import KVCache, with_marked_keys
from specjax.models.families import common
from specjax.models.layers import rms_norm
from specjax.models.mixers.attention import Attention
from specjax.models.mlps.dense import Dense
from specjax.models.rows import layer_rows
from specjax.parallel.sharding import whole_rows
from specjax.spelling import checks_keywords
from specjax.weights.matrix import dot

LAYOUTS = ("speculators", "z-lab")
_AUX = "aux_hidden_state_layer_ids"
_NON_CAUSAL = "sliding_window_non_causal"
_HEAD_DIM, _POSITIONS = 128, 32768  # of Qwen3, where a file does not say them
_BLOCK = 8  # of a file of speculators that does not say it


@checks_keywords
@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """A DFlash head for one target.

    Attributes:
      network: config of the head's layers, which are those of Qwen3 without biases: its width D,
        its number of draft tokens C as `vocab_size`, and `rms_norm_eps`.
      target_width: width of the target's hidden states.
      target_vocab: vocabulary size V of the target.
      taps: the target's hidden states that `fc` takes, see `DraftNeeds.taps`: numbers of layers.
      mask_token: id of the token that stands for those that are drafted.
      block: rows of the largest block that it was trained on, the root's included.
      own_embedding: whether the head has an embedding [V D]; else it uses the target's.
      own_head: whether the head has a language-model head [D C]; else it uses the target's columns
        of its draft tokens.
      own_ids: whether its files list the draft tokens; else they are all V tokens.
    """

    network: ModelConfig
    target_width: int
    target_vocab: int
    taps: tuple[int, ...]
    mask_token: int
    block: int
    own_embedding: bool = False
    own_head: bool = False
    own_ids: bool = False


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
            _, k, v = mixer.project(w, fused, *where.rotated_by(mixer.rotation), True)
            rows.append(KVCache(*with_marked_keys(k, v)))
        return tuple(rows)

    def block(
        self, x: Float[Array, "B T D"], where: Where, pages: tuple[KVCache, ...]
    ) -> Float[Array, "B T D"]:
        """Runs all layers over a block of embeddings behind the cached rows.

        Returns:
          states for the language-model head.
        """
        where, eps, rows = self.at(where), self.cfg.network.rms_norm_eps, x.shape[1]
        everywhere = where.replace(visible=pack_bits(np.ones((rows, rows), bool)))
        before = where.replace(visible=chain_bits(rows))
        for number, (layer, own) in enumerate(zip(self.cfg.network.layers, pages, strict=True)):
            w = self.w["layers"][number]
            normed = rms_norm(x, w["input_norm"], eps)
            seen = everywhere if layer.mixer.window is None else before
            x = x + layer.mixer.run(w, normed, seen, Memory(own, None), None)[0]
            x = x + layer.mlp.run(w, rms_norm(x, w["post_norm"], eps), where)[0]
        return rms_norm(x, self.w["norm"], eps)


@dataclasses.dataclass(frozen=True)
class DFlashSource(FileHead):
    """Drafts with a `DFlashHead`, whose parameters it takes. It is not trained here.

    Attributes:
      cfg: what the head computes.
      layout: layout of its files, `z-lab` or `speculators`.
      writes: whether `rows` has the tensor `t2d`, too, which is written and never read.
      assumes: whether files in the layout of speculators do not say `sliding_window_non_causal`,
        about which programs then differ.
    """

    cfg: DFlashConfig
    layout: str = "z-lab"
    writes: bool = False
    assumes: bool = dataclasses.field(default=False, compare=False)

    # --- files -----------------------------------------------------------------------------------

    layouts = LAYOUTS

    @classmethod
    def recognises(cls, raw: Mapping[str, Any], tensors: Mapping[str, Any]) -> bool:
        classes = raw.get("architectures")
        classes = classes if isinstance(classes, list) else []
        said = (raw.get("speculators_model_type"), *classes)
        if any(isinstance(name, str) and "dflash" in name.lower() for name in said):
            return True
        return "dflash_config" in raw or (
            "hidden_norm.weight" in tensors and any(n.startswith("layers.0.") for n in tensors)
        )

    @classmethod
    def read(
        cls,
        file: Any,
        raw: Mapping[str, Any],
        tensors: Mapping[str, Any],
        target: ModelConfig,
        overrides: Mapping[str, Any] | None = None,
    ) -> DFlashSource:
        """See `Draft.read`.

        Args:
          overrides: `aux_hidden_state_layer_ids`, a list of boundaries in the order in which `fc`
            takes them.
        """
        speculators = "speculators_model_type" in raw or "transformer_layer_config" in raw
        cfg = _read(Keys(file, raw), speculators, tensors, target, dict(overrides or {}))
        assumes = speculators and raw.get(_NON_CAUSAL) is None
        source = cls(cfg, "speculators" if speculators else "z-lab", assumes=assumes)
        known = {n: x for n, x in tensors.items() if not n.startswith("verifier_")}  # of training
        eagle3_config.check_tensors(file, _shapes(source.rows()), known, "DFlash")
        return source

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

    def saved(self, layout: str, dtype: str) -> tuple[dict[str, Any], DFlashSource]:
        """See `Draft.saved`; the layouts are `speculators` and `z-lab`."""
        raw = _write(self.cfg, layout, dtype)
        return raw, dataclasses.replace(self, layout=layout, writes=True, assumes=False)

    def expressed(self) -> tuple[DFlashSource, dict[str, Any]]:
        """See `Draft.expressed`: the states by hand, and a head that takes the first ones."""
        taps = tuple(range(1, 1 + len(self.cfg.taps)))
        plain = dataclasses.replace(self.cfg, taps=taps)
        return dataclasses.replace(self, cfg=plain), {_AUX: list(self.cfg.taps)}

    # --- for the user ----------------------------------------------------------------------------

    title = "DFlash"

    def switches(self) -> str:
        cfg = self.cfg
        said = f"{_AUX} {list(cfg.taps)}, mask_token_id {cfg.mask_token}, block_size {cfg.block}"
        if windows := self.windows():
            unsaid = " (the file does not say it; vLLM then takes false)" if self.assumes else ""
            said += f", {windows}, causal true{unsaid}"
        return said

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


def _shapes(rows: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of rows by name, without `d2t`."""
    found: dict[str, tuple[int, ...]] = {}
    for row in rows.values():
        if isinstance(row, Mapping):
            found |= _shapes(row)
        else:
            found[row.stored.name] = row.shape[::-1] if row.stored.transpose else row.shape
    return {name: shape for name, shape in found.items() if name != "d2t"}


# --- config.json ----------------------------------------------------------------------------------


def _read(
    top: Keys,
    speculators: bool,
    tensors: Mapping[str, Any],
    target: ModelConfig,
    overrides: Mapping[str, Any],
) -> DFlashConfig:
    """Reads what a head computes, see `DFlashSource.read`."""
    if unknown := sorted(set(overrides) - {_AUX}):
        raise ValueError(
            f"a DFlash head has no setting {', '.join(map(repr, unknown))}; expected {_AUX}"
        )
    by_hand = checked_overrides(overrides).get(_AUX)
    own, file = top.within("dflash_config"), top.file
    body = top.within("transformer_layer_config") if speculators else top
    _refuse_others(top, own, body)
    eagle3_config.refuse_quantised(file, (top, body), tensors)
    eagle3_config.check_target(file, top, body, target)
    if speculators:
        block, masks = top.integer("block_size", _BLOCK, least=2), top
    else:
        sizes = own if own.raw.get("block_size") is not None else top
        block, masks = sizes.integer("block_size", least=2), own
    mask_token = masks.integer("mask_token_id", least=0)
    if mask_token >= target.vocab_size:
        raise masks.error("mask_token_id", f"a token of the target, to {target.vocab_size - 1}")
    columns, own_ids = eagle3_config.draft_tokens(file, top, tensors, target)
    network = _network(body, target).replace(vocab_size=columns)
    eagle3_config.refuse_scales("DFlash", (top, own, body), network, {})
    cfg = DFlashConfig(
        network=network,
        target_width=target.hidden_size,
        target_vocab=target.vocab_size,
        taps=_taps(top, own, speculators, network, target, by_hand),
        mask_token=mask_token,
        block=block,
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        own_ids=own_ids,
    )
    eagle3_config.check_borrowed(file, cfg, top)
    return cfg


def _refuse_others(top: Keys, own: Keys, body: Keys) -> None:
    """Refuses heads that compute something else than the module's equations, by name."""
    classes = top.texts("architectures")
    kind = top.text("speculators_model_type", None) or "dflash"
    known = ("DFlashDraftModel", "DFlashSpeculator")
    found = [f"speculators_model_type {kind}"] if kind.lower() != "dflash" else []
    found += [name for name in classes if "dflash" in name.lower() and name not in known]
    for place in dict.fromkeys((top, own, body)):
        for name in ("sample_from_anchor", "shift_label", "is_causal", "causal", "use_swa"):
            found += [f"{name} true"] if place.flag(name, None) else []
        for name in ("attention_sink_bias", "add_swa_attention_sink_bias"):
            found += [f"{name} true"] if place.flag(name, None) else []
        for name, usual in (("use_aux_hidden_state", True), ("is_neox_style", True)):
            found += [f"{name} false"] if not place.flag(name, usual) else []
        if place.text("projector_type", None) not in (None, "dflash"):
            found.append(f"projector_type {place.raw['projector_type']}")
    if body.text("model_type", "qwen3") != "qwen3":
        found.append(f"layers of model_type {body.raw['model_type']} (expected 'qwen3')")
    if body.text("hidden_act", "silu") != "silu":
        found.append(f"hidden_act {body.raw['hidden_act']} (expected 'silu')")
    found += ["attention_bias true"] if body.flag("attention_bias", None) else []
    kinds = body.texts("layer_types")
    if not kinds and body.flag("use_sliding_window", None):
        found.append("use_sliding_window true without layer_types")
    if "sliding_attention" in kinds:  # keys that say that rows see later ones in their window
        for place in dict.fromkeys((top, own, body)):
            for name in ("is_causal", "causal"):
                found += [f"{name} false"] if place.raw.get(name) is False else []
            found += [f"{_NON_CAUSAL} true"] if place.flag(_NON_CAUSAL, None) else []
    if found:
        raise UnsupportedModelError(
            f"{top.file}: this DFlash head needs what is not implemented: {'; '.join(found)}; use "
            "a head without it, or draft with n-grams"
        )


def _network(body: Keys, target: ModelConfig) -> ModelConfig:
    """Returns the config of the head's layers; its vocabulary is not the head's yet."""
    layers = body.integer("num_hidden_layers", most=common.MOST_LAYERS)
    heads, kv_heads, head_dim = common.read_heads(body, _HEAD_DIM)
    eps = body.number("rms_norm_eps", 1e-6, least=0.0)
    positions = body.integer("max_position_embeddings", _POSITIONS)
    rope = common.read_rope(body, positions)
    mlp = Dense(body.integer("intermediate_size"))
    window = None
    if "sliding_attention" in body.texts("layer_types") and body.flag("use_sliding_window", True):
        window = body.integer("sliding_window", least=1)
    mixers = [
        Attention(heads, kv_heads, head_dim, rope, qk_norm=True, norm_eps=eps, window=each)
        for each in common.layer_windows(body, layers, window)
    ]
    return ModelConfig(
        vocab_size=target.vocab_size,
        hidden_size=body.integer("hidden_size"),
        layers=tuple(Layer(mixer, mlp) for mixer in mixers),
        model_type="qwen3",
        rms_norm_eps=eps,
        tie_embeddings=False,
        max_position=positions,
        run=target.run,
    )


def _taps(
    top: Keys,
    own: Keys,
    speculators: bool,
    network: ModelConfig,
    target: ModelConfig,
    by_hand: Sequence[int] | str | None,
) -> tuple[int, ...]:
    """Returns the boundaries whose states `fc` takes, in its order."""
    count = target.num_layers
    of_target = top.integer("num_target_layers", None)
    if of_target not in (None, count):
        raise CheckpointError(
            f"{top.file}: the head is for a target with num_target_layers {of_target}, expected "
            f"{count}, as in the config of this target; use a head that was trained for it"
        )
    if by_hand == "post_norm":
        raise ValueError(f"{_AUX} of a DFlash head must be a list of boundaries; got 'post_norm'")
    if by_hand is not None:
        found, keys, name = tuple(by_hand), top, _AUX
    elif speculators:
        keys, name = top, _AUX
        found = _listed(keys, name)
    else:
        keys, name = own, "target_layer_ids"
        listed = keys.raw.get(name) is not None
        ids = _listed(keys, name) if listed else _default_outputs(count, network.num_layers)
        found = tuple(i + 1 for i in ids)
        if count in found:
            # transformers, which the authors' program reads it from, gives it after the final norm.
            raise CheckpointError(
                f"{top.file}: {name} names the output of the target's last layer {count - 1}, "
                f"which programs take before or after the final norm; set {_AUX} in "
                f"draft_overrides: {count} is the state before it"
            )
    if not all(0 <= b <= count for b in found):
        raise CheckpointError(
            f"{top.file}: the head takes the boundaries {list(found)} of its target, expected "
            f"numbers from 0 to {count}; use a head for this target, or set {_AUX} in "
            "draft_overrides"
        )
    if by_hand is None and list(found) != sorted(set(found)):
        raise CheckpointError(
            f"{top.file}: {name} are the boundaries {list(found)}, expected ascending ones: "
            f"programs differ in the order in which they join others; set {_AUX} in "
            "draft_overrides, in the order of fc.weight"
        )
    return found


def _listed(keys: Keys, name: str) -> tuple[int, ...]:
    value = keys.raw.get(name)
    if not isinstance(value, list) or not value or not are_ids(value, 0):
        raise keys.error(name, "a list of numbers of layers")
    return tuple(value)


def _default_outputs(count: int, layers: int) -> list[int]:
    """Returns the layers whose outputs a head takes where its files do not say it."""
    if layers == 1:
        return [count // 2]
    span = (count - 3) - 1
    return [round(1 + i * span / (layers - 1)) for i in range(layers)]


def _write(cfg: DFlashConfig, layout: str, dtype: str) -> dict[str, Any]:
    """Returns the content of config.json that `DFlashSource.read` reads as `cfg`."""
    choice("layout", layout, LAYOUTS)
    eagle3_config.require_ascending(cfg.taps, different=True)
    network = cfg.network
    windows = eagle3_config.windows_json(network)
    body = {
        **eagle3_config.layers_json(network, cfg.target_vocab),
        "model_type": "qwen3",
        **windows,
    }
    top = {
        "draft_vocab_size": network.vocab_size,
        "block_size": cfg.block,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if layout == "speculators":
        return {
            **eagle3_config.speculators_json("dflash", "DFlashSpeculator", cfg.block - 1, body),
            "target_hidden_size": cfg.target_width,
            _AUX: list(cfg.taps),
            "mask_token_id": cfg.mask_token,
            # vLLM takes true for an absent key.
            **({_NON_CAUSAL: False} if windows["use_sliding_window"] else {}),
            **top,
        }
    if cfg.target_width != network.hidden_size or 0 in cfg.taps:
        raise ValueError(
            "the layout z-lab has no key for a head that takes the target's embeddings, or is of "
            "another width than the target; write the layout speculators"
        )
    ids = {"mask_token_id": cfg.mask_token, "target_layer_ids": [b - 1 for b in cfg.taps]}
    return {"architectures": ["DFlashDraftModel"], **body, **top, "dflash_config": ids}
