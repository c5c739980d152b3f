"""What an EAGLE-3 head computes (Li et al. 2025, arXiv 2503.01840), and how its files say so.

Five settings change no shape, and give an accept length of 1.0 without an error where they are
wrong: which hidden states of the target the head takes, `norm_before_residual`, `fc_norm`,
`norm_output`, and the backbone. They are read by these rules, and may be set by hand, in
`SpecConfig.draft_overrides` (`specjax.config.overrides.OVERRIDES`):

    states                `boundary` b is the input of the target's layer b, before any norm; b = L
                          is the output of the last of its L layers. A list
                          `eagle_aux_hidden_state_layer_ids` at the top of config.json holds
                          boundaries. One inside `eagle_config` holds outputs of layers, boundary
                          id + 1, except where its maximum is L: then they are boundaries. Without a
                          list they are {2, L // 2, L - 3}. `use_aux_hidden_state` false: the state
                          after the final norm, and no `fc`.
    norm_before_residual  the key of that name; absent: false, which is the default of speculators,
                          too (vLLM takes true where a file of speculators lacks it).
    fc_norm               `joined`: a tensor `input_norm`, key `norm_before_fc`. `each`: tensors
                          `fc_norm.0`, .., key `fc_norm`. The tensors decide where a key is absent.
    norm_output           the key of that name, only in a file of speculators or with `fc_norm` of
                          each state; elsewhere the key has meant something else.
    backbone              `model_type`; llama where a file names none, and qwen3 where
                          `transformer_layer_config` of a file of speculators names none. A class
                          such as LlamaForCausalLMEagle3 outranks it, for its programs do not read
                          `model_type`, which may be the target's; but a norm of queries is qwen3's.

Files have one of two layouts: `safeailab` (SafeAILab's EAGLE, SpecForge, NVIDIA) names the first
layer `midlayer`, and `speculators` (vLLM) names it `layers.0`. Both name further layers `layers.1`,
and so on. Keys that were copied from the target's config mean nothing to the programs of the first
layout: they make one `midlayer` whatever `num_hidden_layers` is, and no biases whatever
`attention_bias` is, so that the tensors say both.

A layer has a window where `layer_types` names it `sliding_attention`, which speculators makes the
default of all layers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.checked_json import CheckpointError, Keys, UnsupportedModelError, shown
from specjax.config import ModelConfig
from specjax.config.checks import choice
from specjax.config.model import Layer
from specjax.config.overrides import BACKBONES, FC_NORMS, are_ids, checked_overrides
from specjax.models.families import common
from specjax.models.mixers.attention import Attention
from specjax.models.mlps.dense import Dense
from specjax.spelling import checks_keywords

LAYOUTS = ("speculators", "safeailab")
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
_QUANTISED = ("_scale", "_scale_inv", "_zero_point", ".qweight", ".qzeros", ".scales", "_packed")
# Classes of heads; models such as Eagle2_5_VLForConditionalGeneration have the word, too.
_EAGLE = re.compile(r"eagle-?3|eagle\w*(forcausallm|speculator|draftmodel)|forcausallmeagle")
# Classes whose layers are Llama's.
_LLAMA_CLASS = re.compile(r"LlamaForCausalLMEagle3?|Eagle3?LlamaForCausalLM")
# Keys that change what layers or logits compute, and the value with which they change nothing.
_SCALES = {
    "logit_scale": 1,  # vLLM multiplies the logits of a head by it
    "logits_scaling": 1,
    "final_logit_softcapping": 0,
    "attn_logit_softcapping": 0,
    "embedding_multiplier": 1,
    "scale_emb": 1,
    "residual_multiplier": 1,
    "scale_depth": 0,
}
_SWITCHES = {"is_causal": True, "is_neox_style": True, "rope_interleave": False}
_AUX = "eagle_aux_hidden_state_layer_ids"
_HEAD_DIM = {"llama": None, "qwen3": 128}  # where a file does not say it; None: D / heads
_POSITIONS = {"llama": 2048, "qwen3": 32768}  # likewise, of max_position_embeddings


@checks_keywords
@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 head for one target.

    Attributes:
      network: config of the head's layers: its width D, its number of draft tokens C as
        `vocab_size`, `rms_norm_eps`, and layers whose attention has the head's own RoPE. The first
        layer's queries, keys and values take 2 D numbers; the others are ordinary layers. The
        backbone llama or qwen3 is `qk_norm` of the attention, and `model_type`.
      target_width: width of the target's hidden states.
      target_vocab: vocabulary size V of the target.
      taps: the target's hidden states that `fc` takes, see `DraftNeeds.taps`: numbers of layers, or
        `post_norm` alone, which has no `fc`.
      norm_before_residual: whether the first layer's residual is hidden_norm(g) instead of g.
      fc_norm: the norm before `fc`. `none`; `joined`: one over all states side by side; `each`: one
        per state.
      norm_output: whether the state for the next step is norm(y) instead of y.
      own_embedding: whether the head has an embedding [V D]; else it uses the target's, whose width
        must be D.
      own_head: whether the head has a language-model head [D C]; else it uses the target's columns
        of its draft tokens.
      own_ids: whether its files list the draft tokens; else they are all V tokens.
      mask_token: id of the token that rows below the root's take in a P-EAGLE head (arXiv
        2602.01469), which drafts all tokens at once; None: it drafts one after the other.
    """

    network: ModelConfig
    target_width: int
    target_vocab: int
    taps: tuple[int | str, ...]
    norm_before_residual: bool = False
    fc_norm: str = "none"
    norm_output: bool = False
    own_embedding: bool = False
    own_head: bool = True
    own_ids: bool = False
    mask_token: int | None = None

    def __post_init__(self):
        choice("fc_norm", self.fc_norm, FC_NORMS)


# --- names ----------------------------------------------------------------------------------------


def prefix_of(layout: str, layer: int = 0) -> str:
    """Returns how the names of a layer's tensors begin.

    Raises:
      ValueError: there is no such layout.
    """
    choice("layout", layout, LAYOUTS)
    return "midlayer." if layout == "safeailab" and layer == 0 else f"layers.{layer}."


def layout_of(tensors: Mapping[str, Any]) -> str:
    """Returns the layout of files, by the names of their tensors."""
    found = any(name.startswith("midlayer.") for name in tensors)
    return "safeailab" if found else "speculators"


def tensor_shapes(cfg: Eagle3Config, layout: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of a head's weights by name, without `d2t` and `t2d`."""
    d, c, states = cfg.network.hidden_size, cfg.network.vocab_size, len(cfg.taps)
    out: dict[str, tuple[int, ...]] = {"norm.weight": (d,)}
    if cfg.taps != ("post_norm",):
        out["fc.weight"] = (d, states * cfg.target_width)
    if cfg.fc_norm == "joined":
        out["input_norm.weight"] = (states * cfg.target_width,)
    if cfg.fc_norm == "each":
        out |= {f"fc_norm.{i}.weight": (cfg.target_width,) for i in range(states)}
    if cfg.own_head:
        out["lm_head.weight"] = (c, d)
    if cfg.own_embedding:
        out["embed_tokens.weight"] = (cfg.target_vocab, d)
    if cfg.mask_token is not None:
        out["mask_hidden"] = (1, 1, states * cfg.target_width)
    for number, layer in enumerate(cfg.network.layers):
        mixer, inner = layer.mixer, layer.mlp.intermediate_size
        inputs = 2 * d if number == 0 else d
        queries, keys = (n * mixer.head_dim for n in (mixer.num_heads, mixer.num_kv_heads))
        names = {
            "input_layernorm": (d,),
            "post_attention_layernorm": (d,),
            "self_attn.q_proj": (queries, inputs),
            "self_attn.k_proj": (keys, inputs),
            "self_attn.v_proj": (keys, inputs),
            "self_attn.o_proj": (d, queries),
            "mlp.gate_proj": (inner, d),
            "mlp.up_proj": (inner, d),
            "mlp.down_proj": (d, inner),
        }
        if number == 0:
            names["hidden_norm"] = (d,)
        if mixer.qk_norm:
            names |= {f"self_attn.{x}_norm": (mixer.head_dim,) for x in "qk"}
        prefix = prefix_of(layout, number)
        out |= {f"{prefix}{name}.weight": shape for name, shape in names.items()}
        biased = ("qkv" if mixer.qkv_bias else "") + ("o" if mixer.o_bias else "")
        for name in (f"self_attn.{x}_proj" for x in biased):
            out[f"{prefix}{name}.bias"] = names[name][:1]
    return out


# --- recognising ----------------------------------------------------------------------------------


def recognises(raw: Mapping[str, Any], tensors: Mapping[str, Any]) -> bool:
    """Says whether files are of an EAGLE-3 head, or of another head that `read` refuses by name.

    Args:
      raw: content of config.json; empty where there is none.
      tensors: the tensors of the files by name.
    """
    return _kind(raw, tensors) is not None


def _kind(raw: Mapping[str, Any], tensors: Mapping[str, Any]) -> str | None:
    """Returns the kind of a head; None: the files are of something else, such as a model."""
    classes = raw.get("architectures")
    classes = [c.lower() for c in classes if isinstance(c, str)] if _is_list(classes) else []
    said = str(raw.get("speculators_model_type", "")).lower()

    def named(word: str) -> bool:
        return word in said or any(word in name for name in classes)

    def holds(*prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in tensors)

    if named("medusa") or "medusa_num_heads" in raw or holds("medusa_head"):
        return "Medusa"
    if named("hydra") or "hydra_num_heads" in raw or holds("hydra_"):
        return "Hydra"
    if named("peagle") or named("p_eagle") or holds("mask_hidden"):
        return "P-EAGLE"
    first = prefix_of(layout_of(tensors))
    three = first + "hidden_norm.weight" in tensors
    body = holds("layers.0.", "midlayer.") and "fc.weight" in tensors
    if body and not three and not holds(first + "input_layernorm."):
        return "EAGLE-1 or EAGLE-2"
    if body and not three:
        shape = tuple(tensors["fc.weight"].shape)
        query = tensors.get(first + "self_attn.q_proj.weight")
        narrow = query is not None and tuple(query.shape)[-1:] == shape[:1]
        if narrow and len(shape) == 2 and shape[1] == 2 * shape[0]:
            return "EAGLE-1 or EAGLE-2"
    if said == "eagle" or any(name.startswith("eagleforcausal") for name in classes):
        return "EAGLE-1 or EAGLE-2"
    if three or holds("midlayer.", "d2t", "t2d") or any(map(_EAGLE.search, (said, *classes))):
        return "EAGLE-3"
    if said:
        return f"speculators_model_type {said}"
    return "EAGLE-3" if body or raw.get("draft_vocab_size") is not None else None


_REFUSED = {
    "EAGLE-1 or EAGLE-2": "it predicts hidden states, from one state of the target",
    "Medusa": "its heads predict several tokens at once from the final state",
    "Hydra": "its heads predict several tokens at once from the final state",
}


def _refuse_kind(file: Any, raw: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    kind = _kind(raw, tensors)
    if kind not in (None, "EAGLE-3", "P-EAGLE"):
        why = f" ({_REFUSED[kind]})" if kind in _REFUSED else ""
        raise UnsupportedModelError(
            f"{file}: expected an EAGLE-3 head, got a head of {kind}{why}, which is not supported; "
            "use an EAGLE-3 head of this model, or draft with n-grams"
        )
    if kind is None:
        listed = ", ".join(sorted(tensors)[:3]) or "no tensors"
        raise CheckpointError(
            f"{file}: expected an EAGLE-3 head (tensors `fc.weight`, `midlayer.*` or `layers.0.*`),"
            f" got {listed}; name the directory of a head"
        )


# --- reading --------------------------------------------------------------------------------------


def read(
    file: Any,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Any],
    target: ModelConfig,
    overrides: Mapping[str, Any] | None = None,
) -> Eagle3Config:
    """Reads what a head computes; of the tensors it reads `d2t` and `t2d` alone.

    Args:
      file: path of config.json, for messages.
      raw: content of config.json.
      tensors: the tensors of the files by name, see `specjax.interfaces.Reader.tensors`.
      target: config of the target; the head has its dtypes.
      overrides: settings in place of those of the files, see `specjax.config.overrides`;
        `aux_hidden_state_layer_ids` is a list of boundaries in the order in which `fc` takes them,
        or `post_norm`.

    Raises:
      CheckpointError: the files are damaged, contradict themselves, or are of a head for another
        target.
      UnsupportedModelError: it is another kind of head, or asks for what is not implemented.
      ValueError: an override is unknown, or has an invalid value.
    """
    given = checked_overrides(overrides or {})
    _refuse_kind(file, raw, tensors)
    top = Keys(file, raw)
    speculators = _of_speculators(raw)
    if speculators and "transformer_layer_config" not in raw:
        raise CheckpointError(
            f"{file} lacks the key 'transformer_layer_config', which a head of speculators has; "
            "fetch the file again"
        )
    body = top.within("transformer_layer_config") if speculators else top
    refuse_quantised(file, (top, body), tensors)
    backbone = _backbone(body, speculators, tensors, given)
    network = _network(body, backbone, speculators, tensors, target)
    width = _shape(file, tensors, "norm.weight", 1)[0]
    if width != network.hidden_size:
        raise CheckpointError(
            f"{file}: hidden_size is {network.hidden_size}, and the tensor norm.weight is [{width}]"
            "; fetch the files again"
        )
    refuse_scales("EAGLE-3", (top, body), network, _SWITCHES)
    check_target(file, top, body, target)
    taps = _taps(file, top, tensors, target, network, given)
    unused = _unused(taps, tensors)
    tensors = {name: x for name, x in tensors.items() if name not in unused}
    fc_norm = _fc_norm(top, tensors, taps, given)
    columns, own_ids = draft_tokens(file, top, tensors, target)
    tied = _says_tied(raw, tensors, columns == target.vocab_size)
    cfg = Eagle3Config(
        network=network.replace(vocab_size=columns),
        target_width=target.hidden_size,
        target_vocab=target.vocab_size,
        taps=taps,
        norm_before_residual=given.get(
            "norm_before_residual", top.flag("norm_before_residual", None)
        ),
        fc_norm=fc_norm,
        norm_output=given.get("norm_output", _norm_output(top, speculators, fc_norm)),
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors or tied,
        own_ids=own_ids,
        mask_token=_mask_token(top, target) if _kind(raw, tensors) == "P-EAGLE" else None,
    )
    expected = tensor_shapes(cfg, layout_of(tensors))
    if tied:
        del expected["lm_head.weight"]
    if cfg.mask_token is not None:  # some programs leave out the leading axes
        shape = expected["mask_hidden"]
        got = tuple(tensors["mask_hidden"].shape) if "mask_hidden" in tensors else shape
        expected["mask_hidden"] = got if got in (shape[1:], shape[2:]) else shape
    check_tensors(file, expected, tensors, backbone=network.model_type)
    check_borrowed(file, cfg, top)
    return cfg


def is_tied(tensors: Mapping[str, Any], cfg: Eagle3Config) -> bool:
    """Returns whether a head's own embedding is its language-model head, too.

    Args:
      tensors: the tensors of the files by name.
      cfg: what `read` made of them.
    """
    return cfg.own_head and "lm_head.weight" not in tensors


def _says_tied(raw: Mapping[str, Any], tensors: Mapping[str, Any], every: bool) -> bool:
    """Returns whether files say that their embedding is the language-model head, too.

    It is in transformers and SGLang, for files of their layout that hold no `lm_head`.

    Args:
      raw: content of config.json, which has been checked.
      tensors: the tensors of the files by name.
      every: whether all tokens of the target are draft tokens; else the two cannot be tied.
    """
    said = raw.get("tie_word_embeddings") is True and not _of_speculators(raw)
    return said and every and "embed_tokens.weight" in tensors and "lm_head.weight" not in tensors


def _of_speculators(raw: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in raw or "transformer_layer_config" in raw


def _mask_token(top: Keys, target: ModelConfig) -> int:
    """Returns the token of a P-EAGLE head's masks; older files name it `ptd_token_id`."""
    name = "mask_token_id" if top.raw.get("mask_token_id") is not None else "ptd_token_id"
    token = top.integer(name, None, least=0)
    if token is None:
        raise CheckpointError(
            f"{top.file} lacks the key 'mask_token_id', the token that a P-EAGLE head takes where "
            "none is known yet; fetch the file again"
        )
    if token >= target.vocab_size:
        raise top.error(name, f"a token of the target, from 0 to {target.vocab_size - 1}")
    return token


def _backbone(
    body: Keys, speculators: bool, tensors: Mapping[str, Any], given: Mapping[str, Any]
) -> str:
    if "backbone" in given:
        return given["backbone"]
    said, classes = body.text("model_type", None), body.texts("architectures")
    if any(map(_LLAMA_CLASS.fullmatch, classes)):
        normed = any(name.endswith(".self_attn.q_norm.weight") for name in tensors)
        return "qwen3" if said == "qwen3" and normed else "llama"
    if said is None:
        qwen = any(name.startswith("Qwen3") for name in classes)
        said = "qwen3" if speculators or qwen else "llama"
    if said not in BACKBONES:
        raise UnsupportedModelError(
            f"{body.file}: the head's layers are of model_type {said!r}, expected one of "
            f"{', '.join(BACKBONES)}; if they compute what one of these does, set backbone in "
            "draft_overrides"
        )
    return said


def _network(
    body: Keys,
    backbone: str,
    speculators: bool,
    tensors: Mapping[str, Any],
    target: ModelConfig,
) -> ModelConfig:
    """Returns the config of the head's layers; its vocabulary is not the head's yet."""
    layers = body.integer("num_hidden_layers", 1, most=common.MOST_LAYERS)
    if layout_of(tensors) == "safeailab":
        further = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
        layers = min(layers, 1 + len(further))
    heads, kv_heads, head_dim = common.read_heads(body, _HEAD_DIM[backbone])
    eps = body.number("rms_norm_eps", 1e-6, least=0.0)
    positions = body.integer("max_position_embeddings", _POSITIONS[backbone])
    problems = []
    if speculators:
        qkv_bias = o_bias = body.flag("attention_bias", None)
        problems += ["mlp_bias true"] if body.flag("mlp_bias", None) else []
    else:
        qkv_bias, o_bias = _biased(tensors, "qkv"), _biased(tensors, "o")
    if body.text("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act {body.raw['hidden_act']!r} (expected 'silu')")
    used, kinds = body.flag("use_sliding_window", None), body.texts("layer_types")
    if used and not kinds and backbone == "llama":
        problems.append("use_sliding_window true without layer_types")
    if problems:
        raise UnsupportedModelError(
            f"{body.file}: this EAGLE-3 head needs what is not implemented: {'; '.join(problems)}; "
            "use another head"
        )
    rope, mlp = common.read_rope(body, positions), Dense(body.integer("intermediate_size"))
    mixers = [
        Attention(
            heads, kv_heads, head_dim, rope, qkv_bias=qkv_bias, qk_norm=backbone == "qwen3",
            norm_eps=eps, window=window, o_bias=o_bias,
        )
        for window in _windows(body, backbone, layers)
    ]  # fmt: skip
    return ModelConfig(
        vocab_size=target.vocab_size,
        hidden_size=body.integer("hidden_size"),
        layers=tuple(Layer(mixer, mlp) for mixer in mixers),
        model_type=backbone,
        rms_norm_eps=eps,
        tie_embeddings=False,
        max_position=positions,
        run=target.run,
    )


def _biased(tensors: Mapping[str, Any], projections: str) -> bool:
    """Returns whether files hold a bias of one of some projections of attention, of any layer."""
    ends = tuple(f".self_attn.{x}_proj.bias" for x in projections)
    return any(name.endswith(ends) for name in tensors)


def _windows(body: Keys, backbone: str, layers: int) -> tuple[int | None, ...]:
    """Returns the window of each layer.

    `layer_types` decides, as in vLLM and speculators. Without it a Qwen3 layer has a window as in
    transformers, where `use_sliding_window` is true from layer `max_window_layers` on, and a Llama
    layer has none. A Qwen3 config that names sliding layers and says that no window is in use is
    refused: transformers would run it without a window, vLLM with it.
    """
    used, qwen = body.raw.get("use_sliding_window"), backbone == "qwen3"
    sliding = "sliding_attention" in body.texts("layer_types")[:layers]
    window, first = None, 0
    if (sliding and not (qwen and used is False)) or (qwen and used):
        absent = None if sliding or "sliding_window" in body.raw else 4096
        window = body.integer("sliding_window", absent)
    if qwen:
        first = body.integer("max_window_layers", None, least=0)
        first = 28 if first is None else first
    return common.layer_windows(body, layers, window, first, longer=True)


def refuse_scales(
    kind: str, places: Sequence[Keys], network: ModelConfig, switches: Mapping[str, bool]
) -> None:
    """Refuses keys by which a head computes something else than its equations, by their names.

    Args:
      kind: kind of the head, for the message.
      places: parts of config.json.
      network: config of the head's layers.
      switches: further keys, and the value with which they change nothing.
    """
    head_dim = network.layers[0].mixer.head_dim  # the scale of scores follows from it
    scores = {"query_pre_attn_scalar": head_dim, "attention_multiplier": head_dim**-0.5}
    found = [
        f"{name} {shown(keys.raw[name])}"
        for keys in places
        for name, neutral in (_SCALES | scores | switches).items()
        if keys.raw.get(name) not in (None, neutral)
    ]
    if found:
        raise UnsupportedModelError(
            f"{places[0].file}: this {kind} head needs what is not implemented: "
            f"{'; '.join(dict.fromkeys(found))}; use another head, or remove from config.json what "
            "the program that trained this one does not read"
        )


def check_target(file: Any, top: Keys, body: Keys, target: ModelConfig) -> None:
    for keys, name, wanted in (
        (top, "target_hidden_size", target.hidden_size),
        (body, "vocab_size", target.vocab_size),
    ):
        got = keys.integer(name, None)
        if got not in (None, wanted):
            raise CheckpointError(
                f"{file}: the head is for a target with {name} {got}, expected {wanted}, as in the "
                "config of this target; use a head that was trained for it"
            )


# --- which hidden states --------------------------------------------------------------------------


def _taps(
    file: Any,
    top: Keys,
    tensors: Mapping[str, Any],
    target: ModelConfig,
    network: ModelConfig,
    given: Mapping[str, Any],
) -> tuple[int | str, ...]:
    """Returns the target's states that the head takes, see the rules at the top of the module."""
    count, width = target.num_layers, target.hidden_size
    by_hand = given.get("aux_hidden_state_layer_ids")
    final = by_hand == "post_norm" if by_hand is not None else not _uses_aux(top)
    if final:
        if width != network.hidden_size:
            raise CheckpointError(
                f"{file}: the head takes the target's final state, of width {width}, and its own "
                f"width is {network.hidden_size}, expected the same; use a head for this target"
            )
        return ("post_norm",)
    if "fc.weight" not in tensors:
        raise CheckpointError(
            f"{file}: missing: fc.weight, expected [{network.hidden_size}, states * {width}]; "
            "fetch the files again, or set aux_hidden_state_layer_ids to post_norm in "
            "draft_overrides if the head takes the target's final state"
        )
    rows, columns = _shape(file, tensors, "fc.weight", 2)
    if rows != network.hidden_size or columns % width:
        raise CheckpointError(
            f"{file}: wrong shape: fc.weight, expected [{network.hidden_size}, states * {width}] "
            f"for a target of width {width}, got [{rows}, {columns}]; use a head that was trained "
            "for this target"
        )
    states = columns // width
    if by_hand is not None:
        found, order, what = by_hand, by_hand, "aux_hidden_state_layer_ids in draft_overrides"
    else:
        found, what = _boundaries(top, count)
        order = tuple(sorted(found))
    if not all(0 <= b <= count for b in found):
        raise CheckpointError(
            f"{file}: {what} are the boundaries {list(found)}, expected numbers from 0 to {count} "
            f"for a target of {count} layers; use a head for this target, or set "
            "aux_hidden_state_layer_ids in draft_overrides"
        )
    if len(found) == states and found == order:
        return found
    if by_hand is None and len(found) != states and len(set(found)) == states:
        return tuple(sorted(set(found)))  # programs collect each state once, in order of layers
    if len(found) == states:
        raise CheckpointError(
            f"{file}: {what} are the boundaries {list(found)}, expected ascending ones: programs "
            "differ in the order in which they join others; set aux_hidden_state_layer_ids in "
            "draft_overrides, in the order of fc.weight"
        )
    fits = columns % len(found) == 0
    raise CheckpointError(
        f"{file}: fc.weight is [{rows}, {columns}], which takes {states} states of the target's "
        f"width {width}, and {what} are the boundaries {list(found)}, expected {states} of them"
        f"{f', or a target of width {columns // len(found)}' if fits else ''}; use a head for "
        "this target, or set aux_hidden_state_layer_ids in draft_overrides"
    )


def _uses_aux(top: Keys) -> bool:
    name, nested = "use_aux_hidden_state", top.within("eagle_config")
    said = [keys.flag(name) for keys in (top, nested) if keys.raw.get(name) is not None]
    if len(set(said)) > 1:
        raise top.error(name, f"{said[1]}, as inside eagle_config")
    return said[0] if said else True


def _boundaries(top: Keys, count: int) -> tuple[tuple[int, ...], str]:
    """Returns the boundaries that a file names, or the default ones, and a name for messages."""
    outer, inner = _ids(top, 0), _ids(top.within("eagle_config"), -1)
    if inner and max(inner) != count:
        inner = tuple(i + 1 for i in inner)
    if outer and inner and outer != inner:
        raise CheckpointError(
            f"{top.file}: {_AUX} are the boundaries {list(outer)}, and those inside eagle_config, "
            f"which are outputs of layers, are the boundaries {list(inner)}; expected the same: "
            "set aux_hidden_state_layer_ids in draft_overrides"
        )
    if outer or inner:
        return outer or inner, _AUX
    return (2, count // 2, count - 3), f"the default states of a target of {count} layers"


def _ids(keys: Keys, least: int) -> tuple[int, ...]:
    """Returns a list of layers; empty where it is absent, null or empty."""
    value = keys.raw.get(_AUX)
    if value is None or value == []:
        return ()
    if not _is_list(value) or not are_ids(value, least):
        raise keys.error(_AUX, f"a list of integers of at least {least}")
    return tuple(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _unused(taps: tuple[int | str, ...], tensors: Mapping[str, Any]) -> list[str]:
    """Lists the tensors that a head does not use: `fc` and its norms, with the final state.

    SafeAILab's and SpecForge's programs make them always, and vLLM skips them then.
    """
    if taps != ("post_norm",):
        return []
    norms = ("input_norm.weight", "fc_norm.")
    return sorted(n for n in tensors if n == "fc.weight" or n.startswith(norms))


def remarks(
    raw: Mapping[str, Any], tensors: Mapping[str, Any], cfg: Eagle3Config
) -> tuple[str, ...]:
    """Returns what a user should know of how a head's files were read.

    Args:
      raw: content of config.json.
      tensors: the tensors of the files by name.
      cfg: what `read` made of them.
    """
    found = []
    if unused := _unused(cfg.taps, tensors):
        found.append(f"not used with the final state: {', '.join(unused)}")
    named = raw.get("num_hidden_layers", 1)
    if not _of_speculators(raw) and named != cfg.network.num_layers:
        held = cfg.network.num_layers
        run = "is" if held == 1 else "are"
        found.append(f"num_hidden_layers is {named}, and the files hold {held}, which {run} run")
    if is_tied(tensors, cfg):
        found.append("tie_word_embeddings is true; vLLM then uses the target's lm_head")
    if not _of_speculators(raw) and any(x.mixer.window for x in cfg.network.layers):
        found.append("the window is that of vLLM; SpecForge and SGLang run this layout without one")
    return tuple(found)


# --- norms ----------------------------------------------------------------------------------------


def _fc_norm(
    top: Keys,
    tensors: Mapping[str, Any],
    taps: tuple[int | str, ...],
    given: Mapping[str, Any],
) -> str:
    """Returns the norm before `fc`."""
    if taps == ("post_norm",):
        if given.get("fc_norm", "none") != "none":
            raise ValueError(
                "fc_norm must be none for a head that takes the target's final state, which has "
                f"no fc; got {given['fc_norm']!r}"
            )
        return "none"
    if "fc_norm" in given:
        return given["fc_norm"]
    joined = "input_norm.weight" in tensors
    each = any(name.startswith("fc_norm.") for name in tensors)
    if joined and each:
        raise CheckpointError(
            f"{top.file}: the files hold input_norm and fc_norm, expected one norm before fc; "
            "fetch the files again"
        )
    found = "joined" if joined else "each" if each else "none"
    said = [
        None if top.raw.get(name) is None else top.flag(name)
        for name in ("norm_before_fc", "fc_norm")
    ]
    wrong = {
        "none": said[0] or said[1],
        "joined": said[0] is False or said[1],
        # A file of version 3.1 may say that there is a norm before fc, and then which.
        "each": said[1] is False or (said[1] is None and said[0] is False),
    }[found]
    if wrong:
        held = {"none": "neither", "joined": "input_norm", "each": "fc_norm.*"}[found]
        raise CheckpointError(
            f"{top.file}: norm_before_fc is {shown(said[0])} and fc_norm {shown(said[1])}, and of "
            f"their tensors, input_norm and fc_norm.*, the files hold {held}; expected the tensors "
            "of the norm that config.json names: correct it, or set fc_norm in draft_overrides"
        )
    return found


def _norm_output(top: Keys, speculators: bool, fc_norm: str) -> bool:
    return (speculators or fc_norm == "each") and top.flag("norm_output", None)


# --- tensors --------------------------------------------------------------------------------------


def _shape(file: Any, tensors: Mapping[str, Any], name: str, rank: int) -> tuple[int, ...]:
    """Returns the shape of a tensor that must be there, with a number of axes."""
    if name not in tensors:
        raise CheckpointError(f"{file}: missing: {name}; fetch the files again")
    shape = tuple(tensors[name].shape)
    if len(shape) != rank:
        raise CheckpointError(
            f"{file}: wrong shape: {name}, expected {rank} axes, got {list(shape)}; fetch the "
            "files again"
        )
    return shape


def refuse_quantised(file: Any, places: tuple[Keys, ...], tensors: Mapping[str, Any]) -> None:
    found = [
        f"{name} {keys.within(name).text('quant_method', '')}".strip()
        for keys in places
        for name in ("quantization_config", "compression_config")
        if keys.within(name).raw
    ]
    found += [name for name in sorted(tensors) if name.endswith(_QUANTISED)][:3]
    if found:
        raise UnsupportedModelError(
            f"{file}: expected a head with floating-point weights, got quantised ones "
            f"({', '.join(dict.fromkeys(found))}); use the head that was not quantised"
        )


def draft_tokens(
    file: Any, top: Keys, tensors: Mapping[str, Any], target: ModelConfig
) -> tuple[int, bool]:
    """Returns the number of draft tokens, and whether the files list them."""
    size = target.vocab_size
    columns = top.integer("draft_vocab_size", None)
    listed = [n for n in ("lm_head.weight", "d2t") if n in tensors]
    if columns is None:
        rank = 2 if listed[:1] == ["lm_head.weight"] else 1
        columns = _shape(file, tensors, listed[0], rank)[0] if listed else size
    if columns > size:
        raise CheckpointError(
            f"{file}: the head has {columns} draft tokens, expected at most the {size} of the "
            "target's vocabulary; use a head that was trained for this target"
        )
    if "d2t" not in tensors:
        if columns != size:
            raise CheckpointError(
                f"{file}: missing: d2t, expected [{columns}], the offsets of the draft tokens: the "
                f"head drafts {columns} of {size} tokens; fetch the files again"
            )
        ids = np.arange(size)
    else:
        _require(file, tensors, "d2t", (columns,), _INTEGERS)
        # NumPy integers wrap around; Python's do not.
        offsets = np.asarray(tensors["d2t"][(slice(None),)]).astype(object)
        ids = np.arange(columns).astype(object) + offsets
        outside = [(i, t) for i, t in enumerate(ids) if not 0 <= t < size]
        if outside:
            at, token = outside[0]
            raise CheckpointError(
                f"{file}: d2t[{at}] is {offsets[at]}, which stands for token {token} "
                f"({at} + {offsets[at]}), expected tokens from 0 to {size - 1}; d2t holds offsets, "
                "not tokens: use a head for this target"
            )
        ids = ids.astype(np.int64)
        if len(set(ids.tolist())) != columns:
            numbers, counts = np.unique(ids, return_counts=True)
            raise CheckpointError(
                f"{file}: d2t stands for token {numbers[counts > 1][0]} more than once, expected "
                f"{columns} different tokens; fetch the files again"
            )
    if "t2d" in tensors:
        _require(file, tensors, "t2d", (size,), ("bool", *_INTEGERS))
        marked = np.flatnonzero(np.asarray(tensors["t2d"][(slice(None),)]))
        if not np.array_equal(marked, np.sort(ids)):
            differ = sorted(set(marked.tolist()) ^ set(ids.tolist()))
            raise CheckpointError(
                f"{file}: t2d and d2t contradict each other about {len(differ)} tokens, such as "
                f"token {differ[0]}; expected t2d to mark the tokens of d2t: fetch the files again"
            )
    return columns, "d2t" in tensors


def _require(
    file: Any, tensors: Mapping[str, Any], name: str, shape: tuple[int, ...], dtypes: Sequence[str]
) -> None:
    got, dtype = tuple(tensors[name].shape), str(tensors[name].dtype)
    if got != shape:
        raise CheckpointError(
            f"{file}: wrong shape: {name}, expected {list(shape)}, got {list(got)}; use a head "
            "that was trained for this target, or fetch the files again"
        )
    if dtype not in dtypes:
        kind = "floating-point numbers" if dtypes == _FLOATS else " or ".join(dtypes[:2])
        raise CheckpointError(
            f"{file}: wrong dtype: {name}, expected {kind}, got {dtype}; fetch the files again"
        )


def check_tensors(
    file: Any,
    expected: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Any],
    kind: str = "EAGLE-3",
    backbone: str | None = None,
) -> None:
    """Checks that files hold exactly a head's tensors, besides `d2t` and `t2d`.

    Args:
      expected: shape of each tensor of the head.
      kind: kind of the head, for messages.
      backbone: what config.json names the layers, where that may be wrong; None: nothing.

    Raises:
      CheckpointError: names every tensor that is missing, unexpected, or of a wrong shape or dtype.
    """
    problems = [
        f"missing: {n}, expected {list(s)}" for n, s in expected.items() if n not in tensors
    ]
    for name, tensor in tensors.items():
        shape, dtype = tuple(tensor.shape), str(tensor.dtype)
        if name in ("d2t", "t2d") or "rotary_emb" in name.split("."):
            continue  # what a rotary embedding holds follows from the config
        if name not in expected:
            problems.append(f"unexpected: {name}, {list(shape)}")
        elif shape != expected[name]:
            problems.append(
                f"wrong shape: {name}, expected {list(expected[name])}, got {list(shape)}"
            )
        elif dtype not in _FLOATS:
            problems.append(f"wrong dtype: {name}, expected one of {_FLOATS}, got {dtype}")
    if not problems:
        return
    advice = "fetch the files again, or use a head that was trained for this target"
    if backbone and any("_norm.weight" in p and "self_attn" in p for p in problems):
        advice = (
            f"the backbone is {backbone}, and of {', '.join(BACKBONES)} only qwen3 "
            "has q_norm and k_norm: set backbone in draft_overrides if config.json names it wrongly"
        )
    head = f"{file}: the tensors do not fit this {kind} head"
    if len(problems) == 1:
        raise CheckpointError(f"{head}: {problems[0]}; {advice}")
    raise CheckpointError(f"{head}; {advice}:\n  " + "\n  ".join(problems[:50]))


def check_borrowed(file: Any, cfg: Eagle3Config, top: Keys) -> None:
    """Checks that the target's embedding and language-model head fit where the head lacks them.

    Args:
      top: the keys of config.json. Of a file of speculators, that of its layers may have been
        copied from the target's, and says nothing of the head's embedding.
    """
    lacking = [
        name
        for name, own in (("embed_tokens", cfg.own_embedding), ("lm_head", cfg.own_head))
        if not own
    ]
    if lacking and cfg.network.hidden_size != cfg.target_width:
        raise CheckpointError(
            f"{file}: the files hold no {' and no '.join(lacking)}, so that the head uses the "
            f"target's, whose width is {cfg.target_width}, and the head's is "
            f"{cfg.network.hidden_size}, expected the same; use a head for this target"
        )
    tied = top.flag("tie_word_embeddings", None)
    every = cfg.network.vocab_size == cfg.target_vocab  # else an embedding cannot be the head
    if lacking == ["lm_head"] and tied and every:
        raise UnsupportedModelError(
            f"{file}: tie_word_embeddings is true, so that the head's own embedding would be its "
            "language-model head, expected a tensor lm_head.weight; write it into the files, or "
            "set tie_word_embeddings to false to use the target's"
        )


# --- writing --------------------------------------------------------------------------------------


def write(cfg: Eagle3Config, layout: str, dtype: str) -> dict[str, Any]:
    """Returns the content of config.json that `read` reads as `cfg`.

    Args:
      layout: `speculators` or `safeailab`.
      dtype: dtype of the weights in the files.

    Raises:
      ValueError: there is no such layout, or it has no key for a setting of the head.
    """
    choice("layout", layout, LAYOUTS)
    network, final = cfg.network, cfg.taps == ("post_norm",)
    if layout == "speculators" and final:
        raise ValueError(
            "the layout speculators has no key for a head that takes the target's final state; "
            "write the layout safeailab"
        )
    if layout == "safeailab" and cfg.norm_output and cfg.fc_norm != "each":
        raise ValueError(
            f"the layout safeailab has norm_output only together with fc_norm each, and this head "
            f"has fc_norm {cfg.fc_norm}; write the layout speculators"
        )
    if not final:
        require_ascending(cfg.taps)
    mixer = network.layers[0].mixer
    if layout == "speculators" and mixer.qkv_bias != mixer.o_bias:
        raise ValueError(
            "the layout speculators has biases in all projections of attention or in none, and "
            f"this head has qkv_bias {mixer.qkv_bias} and o_bias {mixer.o_bias}; write the layout "
            "safeailab"
        )
    body = {**layers_json(network, cfg.target_vocab), "mlp_bias": False}
    if any(layer.mixer.window is not None for layer in network.layers):
        body |= windows_json(network)
    top = {
        "draft_vocab_size": network.vocab_size,
        "target_hidden_size": cfg.target_width,
        "norm_before_residual": cfg.norm_before_residual,
        "norm_before_fc": cfg.fc_norm == "joined",
        "fc_norm": cfg.fc_norm == "each",
        "norm_output": cfg.norm_output,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if not final:
        top[_AUX] = list(cfg.taps)
    if cfg.mask_token is not None:
        top["mask_token_id"] = cfg.mask_token
    if layout == "speculators":
        plain = cfg.mask_token is None
        kind = ("eagle3", "Eagle3Speculator") if plain else ("peagle", "PEagleSpeculator")
        return {**speculators_json(*kind, 3, body), **top}
    eagle: dict[str, Any] = {"use_aux_hidden_state": not final}
    if not final:
        eagle[_AUX] = [b - 1 for b in cfg.taps]
    name = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Qwen3ForCausalLMEagle3"}
    return {"architectures": [name[network.model_type]], **body, **top, "eagle_config": eagle}


def require_ascending(taps: Sequence[int], different: bool = False) -> None:
    """Refuses to write a head whose states are not in the order in which files list them.

    Args:
      taps: boundaries of the states.
      different: whether files cannot list a boundary twice.

    Raises:
      ValueError: they do not ascend.
    """
    if list(taps) != sorted(set(taps) if different else taps):
        raise ValueError(
            f"files list the boundaries of the head's states in ascending order, and this head has "
            f"{list(taps)}; reorder the columns of its fc"
        )


def layers_json(network: ModelConfig, vocabulary: int) -> dict[str, Any]:
    """Returns what config.json says of a head's layers, which differ in nothing but windows.

    Args:
      network: config of the layers.
      vocabulary: vocabulary size of the target.
    """
    mixer = network.layers[0].mixer
    return {
        "model_type": network.model_type,
        "vocab_size": vocabulary,
        "hidden_size": network.hidden_size,
        "intermediate_size": network.layers[0].mlp.intermediate_size,
        "num_hidden_layers": network.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "hidden_act": "silu",
        "attention_bias": mixer.qkv_bias or mixer.o_bias,
        "attention_dropout": 0.0,
        "max_position_embeddings": network.max_position,
        "rms_norm_eps": network.rms_norm_eps,
        "tie_word_embeddings": False,
        **common.rope_json(mixer.rope),
    }


def windows_json(network: ModelConfig) -> dict[str, Any]:
    """Returns the keys of the layers' windows.

    Raises:
      ValueError: layers have different windows.
    """
    windows = [layer.mixer.window for layer in network.layers]
    in_use = {window for window in windows if window is not None}
    if len(in_use) > 1:
        raise ValueError(f"files have one window for all layers, and this head has {windows}")
    return {
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
        "use_sliding_window": bool(in_use),
        "sliding_window": max(in_use, default=None),
    }


def speculators_json(
    kind: str, architecture: str, steps: int, body: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the keys that config.json has in the layout `speculators` whatever the head.

    Args:
      kind: `speculators_model_type`.
      architecture: name of the class in speculators.
      steps: number of tokens that vLLM drafts unless told otherwise.
      body: what `transformer_layer_config` holds.
    """
    proposal = {"proposal_type": "greedy", "speculative_tokens": steps}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": [], "name_or_path": None},
        },
        "transformer_layer_config": dict(body),
        "tie_word_embeddings": False,
    }
