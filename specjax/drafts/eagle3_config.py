"""What an EAGLE-3 head computes (Li et al. 2025, arXiv 2503.01840), and how its files say so.

Five settings change no shape, and give an accept length of 1.0 without an error where they are
wrong: which hidden states of the target the head takes, `norm_before_residual`, `fc_norm`,
`norm_output`, and the backbone. They are read by these rules:

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

The layout of SafeAILab, SpecForge and NVIDIA names the first layer `midlayer`, and that of
speculators `layers.0`. Both name further layers `layers.1`, and so on; in the first layout the
tensors say how many there are, because its programs make one `midlayer` whatever
`num_hidden_layers` is.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from specjax.checked_json import UnsupportedModelError
from specjax.drafts.file_head import HeadConfig
from specjax.drafts.head_config import HeadFiles, is_of_speculators
from specjax.models.families import common

FINAL = ("post_norm",)  # the taps of a head without `fc`
BACKBONES = ("llama", "qwen3")
# Classes of heads; models such as Eagle2_5_VLForConditionalGeneration have the word, too.
_EAGLE = re.compile(r"eagle-?3|eagle\w*(forcausallm|speculator|draftmodel)|forcausallmeagle")
# Classes whose layers are Llama's.
_LLAMA_CLASS = re.compile(r"LlamaForCausalLMEagle3?|Eagle3?LlamaForCausalLM")
_AUX = "eagle_aux_hidden_state_layer_ids"


@dataclasses.dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """An EAGLE-3 head for one target, see `HeadConfig`.

    Of its network, the first layer's queries, keys and values take 2 D numbers; the others are
    ordinary layers. The backbone llama or qwen3 is `qk_norm` of the attention, and `model_type`.
    `taps` may be `post_norm` alone, which has no `fc`. With a `mask_token` it is a P-EAGLE head
    (arXiv 2602.01469), which drafts all tokens at once.

    Attributes:
      norm_before_residual: whether the first layer's residual is hidden_norm(g) instead of g.
      fc_norm: the norm before `fc`. `none`; `joined`: one over all states side by side; `each`: one
        per state.
      norm_output: whether the state for the next step is norm(y) instead of y.
    """

    own_head: bool = True
    norm_before_residual: bool = False
    fc_norm: str = "none"
    norm_output: bool = False


def first_layer(tensors: Mapping[str, Any]) -> str:
    """Returns how the names of the first layer's tensors begin."""
    middle = any(name.startswith("midlayer.") for name in tensors)
    return "midlayer." if middle else "layers.0."


def kind_of(raw: Mapping[str, Any], tensors: Mapping[str, Any]) -> str | None:
    """Returns the kind of a head; None: the files are of something else, such as a model.

    Args:
      raw: content of config.json; empty where there is none.
      tensors: the tensors of the files by name.
    """
    classes = raw.get("architectures")
    classes = classes if isinstance(classes, list) else []
    declared = str(raw.get("speculators_model_type", "")).lower()
    names = [declared, *(name.lower() for name in classes if isinstance(name, str))]

    def holds(*prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in tensors)

    if any("peagle" in n or "p_eagle" in n for n in names) or holds("mask_hidden"):
        return "P-EAGLE"
    first = first_layer(tensors)
    if first + "hidden_norm.weight" in tensors or holds("midlayer.", "d2t", "t2d"):
        return "EAGLE-3"
    if any(map(_EAGLE.search, names)) or raw.get("draft_vocab_size") is not None:
        return "EAGLE-3"
    if declared:
        return f"speculators_model_type {declared}"
    return "EAGLE-3" if holds(first) and "fc.weight" in tensors else None


def refuse_others(file: Any, raw: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
    """Returns the kind of a head that is implemented; raises UnsupportedModelError for another."""
    kind = kind_of(raw, tensors)
    if kind not in ("EAGLE-3", "P-EAGLE"):
        raise UnsupportedModelError(
            f"{file}: expected an EAGLE-3 head, got a head of {kind}, which is not supported"
        )
    return kind


def read(head: HeadFiles) -> Eagle3Config:
    """Reads what a head computes; of the tensors it reads `d2t` alone.

    Raises:
      CheckpointError: the files are damaged, contradict themselves, or are of a head for another
        target.
      UnsupportedModelError: it is another kind of head, or asks for what is not implemented.
    """
    top, tensors = head.top, head.tensors
    kind, backbone = refuse_others(head.file, top.raw, tensors), _backbone(head)
    layers = head.body.integer("num_hidden_layers", 1, most=common.MOST_LAYERS)
    if first_layer(tensors) == "midlayer.":
        further = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
        layers = min(layers, 1 + len(further))
    columns, own_ids = head.draft_tokens()
    network = head.network(backbone, layers, columns)
    head.refuse_others(network, {"is_causal": True})
    taps = _taps(head)
    fc_norm = "none" if taps == FINAL else _fc_norm(head)
    output = (head.speculators or fc_norm == "each") and top.flag("norm_output", None)
    mask = None
    if kind == "P-EAGLE":  # older files name it otherwise
        old = top.raw.get("mask_token_id") is None and "ptd_token_id" in top.raw
        name, most = "ptd_token_id" if old else "mask_token_id", head.target.vocab_size - 1
        mask = top.integer(name, least=0, most=most)
    return Eagle3Config(
        network=network,
        target_width=head.target.hidden_size,
        target_vocab=head.target.vocab_size,
        taps=taps,
        norm_before_residual=bool(top.flag("norm_before_residual", None)),
        fc_norm=fc_norm,
        norm_output=bool(output),
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors
        or is_tied(top.raw, tensors, columns == head.target.vocab_size),
        own_ids=own_ids,
        mask_token=mask,
    )


def is_tied(raw: Mapping[str, Any], tensors: Mapping[str, Any], every: bool) -> bool:
    """Returns whether files say that their embedding is the language-model head, too.

    It is in transformers and SGLang, for files of their layout that hold no `lm_head`.

    Args:
      every: whether all tokens of the target are draft tokens; else the two cannot be tied.
    """
    is_declared = raw.get("tie_word_embeddings") is True and not is_of_speculators(raw)
    holds_both = "lm_head.weight" in tensors or "embed_tokens.weight" not in tensors
    return is_declared and every and not holds_both


def unused(taps: tuple[int | str, ...]) -> tuple[str, ...]:
    """Returns how the names of tensors begin that a head does not use: `fc` and its norms.

    SafeAILab's and SpecForge's programs make them always, and vLLM skips them with the final state.
    """
    return ("fc.", "input_norm.", "fc_norm.") if taps == FINAL else ()


def _backbone(head: HeadFiles) -> str:
    declared, classes = head.body.text("model_type", None), head.body.texts("architectures")
    if any(map(_LLAMA_CLASS.fullmatch, classes)):
        normed = any(name.endswith(".self_attn.q_norm.weight") for name in head.tensors)
        return "qwen3" if declared == "qwen3" and normed else "llama"
    if declared is None:
        qwen = any(name.startswith("Qwen3") for name in classes)
        declared = "qwen3" if head.speculators or qwen else "llama"
    if declared not in BACKBONES:
        raise UnsupportedModelError(
            f"{head.file}: the head's layers are of model_type {declared!r}, expected one of "
            f"{', '.join(BACKBONES)}; if they compute what one of these does, correct model_type"
        )
    return declared


def _taps(head: HeadFiles) -> tuple[int | str, ...]:
    """Returns the target's states that the head takes, see the rules at the top of the module."""
    top, count, name = head.top, head.target.num_layers, "use_aux_hidden_state"
    nested = top.within("eagle_config")
    used = {keys.flag(name) for keys in (top, nested) if keys.raw.get(name) is not None}
    if used == {False}:
        return FINAL
    if len(used) > 1:
        raise top.error(name, "the same as inside eagle_config")
    if "fc.weight" not in head.tensors:
        raise head.error(
            f"missing: fc.weight; if the head takes the target's final state, set {name} to false"
        )
    outer, inner = head.ids(top, _AUX), head.ids(nested, _AUX, -1)
    if inner and max(inner) != count:
        inner = tuple(i + 1 for i in inner)
    if outer and inner and outer != inner:
        raise head.error(
            f"{_AUX} are the boundaries {list(outer)}, and those inside eagle_config, which are "
            f"outputs of layers, are the boundaries {list(inner)}; expected the same"
        )
    taps = outer or inner or (2, count // 2, count - 3)
    if tuple(head.tensors["fc.weight"].shape)[-1:] != (len(taps) * head.target.hidden_size,):
        taps = tuple(sorted(set(taps)))  # programs collect each state once, in order of layers
    return head.check_taps(taps, _AUX)


def _fc_norm(head: HeadFiles) -> str:
    """Returns the norm before `fc`, which the tensors say; the keys must not contradict them."""
    top, tensors = head.top, head.tensors
    is_each = any(name.startswith("fc_norm.") for name in tensors)
    held = "each" if is_each else "joined" if "input_norm.weight" in tensors else "none"
    says_joined, says_each = top.flag("norm_before_fc", None), top.flag("fc_norm", None)
    denied = [top.raw.get(name) is False for name in ("norm_before_fc", "fc_norm")]
    wrong = {
        "none": says_joined or says_each,
        "joined": denied[0] or says_each,
        # A file of version 3.1 may say that there is a norm before fc, and then which.
        "each": denied[1] or (denied[0] and not says_each),
    }
    if wrong[held]:
        raise head.error(
            f"norm_before_fc and fc_norm contradict the tensors, of input_norm and fc_norm.* "
            f"(norm: {held}): correct config.json"
        )
    return held
