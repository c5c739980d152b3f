"""What the files of a draft head say, whatever the head: its layers, its tokens, its tensors.

Files have one of two layouts. In that of `speculators` (vLLM) the keys of the layers lie in
`transformer_layer_config`; in those of SafeAILab's EAGLE, SpecForge, NVIDIA and the authors of
DFlash config.json is like that of a model. Both are read, and `speculators` is written.

The layers are those of Llama or of Qwen3, the head's `backbone`, which norms queries and keys. The
tensors alone say which projections have biases, because keys may have been copied from the target's
config. A layer has a window where `layer_types` names it `sliding_attention`, which speculators
makes the default of all layers. Without `layer_types` a layer of Qwen3 has one as in transformers,
where `use_sliding_window` is true from layer `max_window_layers` on, and one of Llama has none. A
config of Qwen3 that names sliding layers and says that no window is in use is refused: transformers
would run it without a window, vLLM with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.checked_json import CheckpointError, Keys, UnsupportedModelError, shown
from specjax.config import ModelConfig
from specjax.config.model import Layer
from specjax.interfaces import Param
from specjax.models.families.qwen2 import QwenFamily
from specjax.models.families.qwen3 import FAMILY as QWEN3

LAYERS = "transformer_layer_config"
# Keys that change what layers or logits compute, and the value with which they change nothing.
NEUTRAL = {
    "is_neox_style": True,
    "rope_interleave": False,
    "logit_scale": 1,  # vLLM multiplies the logits of a head by it
    "logits_scaling": 1,
    "final_logit_softcapping": 0,
    "attn_logit_softcapping": 0,
    "embedding_multiplier": 1,
    "scale_emb": 1,
    "residual_multiplier": 1,
    "scale_depth": 0,
}
# Number of positions where a file does not say it.
_POSITIONS = {"llama": 2048, "qwen3": 32768}
_FLOATS = ("float64", "float32", "float16", "bfloat16")


class HeadFiles:
    """config.json and the tensors of a head for one target.

    Args:
      kind: name of the head, for messages.
      file: path of config.json, for messages.
      raw: its content.
      tensors: the tensors by name, see `specjax.interfaces.Reader.tensors`.
      target: config of the target; the head has its dtypes.

    Attributes:
      speculators: whether the layout is that of speculators.
      top: the keys of the whole file.
      body: the keys of the layers.

    Raises:
      CheckpointError: the file lacks its layers, or is of a head for another target.
    """

    def __init__(
        self,
        kind: str,
        file: Any,
        raw: Mapping[str, Any],
        tensors: Mapping[str, Any],
        target: ModelConfig,
    ):
        self.kind, self.file, self.tensors, self.target = kind, file, tensors, target
        self.top, self.speculators = Keys(file, raw), is_of_speculators(raw)
        if self.speculators and LAYERS not in raw:
            raise self.error(f"lacks the key {LAYERS!r}, which a head of speculators has")
        self.body = self.top.within(LAYERS) if self.speculators else self.top
        for keys, name, wanted in (
            (self.top, "target_hidden_size", target.hidden_size),
            (self.top, "num_target_layers", target.num_layers),
            (self.body, "vocab_size", target.vocab_size),
        ):
            got = keys.integer(name, None)
            if got not in (None, wanted):
                raise self.error(f"the head is for a target with {name} {got}, expected {wanted}")

    def error(self, problem: str) -> CheckpointError:
        """The error about files that are damaged, or of a head for another target."""
        return CheckpointError(
            f"{self.file}: {problem}; fetch the files again, or use a head for this target"
        )

    def refuse_others(self, network: ModelConfig, neutral: Mapping[str, Any], *places: Keys):
        """Refuses keys by which a head computes something else than its equations, by their names.

        Args:
          network: config of the head's layers.
          neutral: keys besides those of `NEUTRAL`, and the value with which they change nothing.
          places: further parts of config.json.

        Raises:
          UnsupportedModelError: there are such keys.
        """
        size = network.layers[0].mixer.head_dim  # the scale of scores follows from it
        scores = {"query_pre_attn_scalar": size, "attention_multiplier": size**-0.5}
        neutral = NEUTRAL | scores | neutral
        if network.model_type == "llama" and not self.body.texts("layer_types"):
            neutral |= {"use_sliding_window": False}
        problems = [
            f"{name} {shown(keys.raw[name])}"
            for keys in (self.top, self.body, *places)
            for name, usual in neutral.items()
            if keys.raw.get(name) not in (None, usual)
        ]
        if problems:
            raise UnsupportedModelError(
                f"{self.file}: this {self.kind} head needs what is not implemented: "
                f"{'; '.join(dict.fromkeys(problems))}; use another head"
            )

    def network(self, backbone: str, layers: int, vocabulary: int) -> ModelConfig:
        """Reads the config of the head's layers, as that of a model.

        Args:
          layers: number of layers.
          vocabulary: number of draft tokens.
        """
        raw = {"max_position_embeddings": _POSITIONS[backbone], **self.body.raw}
        raw |= {"model_type": backbone, "num_hidden_layers": layers, "vocab_size": vocabulary}
        raw |= {"tie_word_embeddings": False, "attention_bias": False, "architectures": []}
        raw["layer_types"] = self.body.texts("layer_types")[:layers]
        slides = "sliding_attention" in raw["layer_types"]
        if backbone == "llama" or (slides and raw.get("use_sliding_window") is None):
            raw["use_sliding_window"] = slides
        cfg = family_of(backbone).read(Keys(self.file, raw, LAYERS * self.speculators))
        norm = self.tensors.get("norm.weight")
        if norm is not None and tuple(norm.shape) != (cfg.hidden_size,):
            raise self.error(
                f"hidden_size is {cfg.hidden_size}, and norm.weight is {list(norm.shape)}"
            )
        biases = {"qkv_bias": self._biased("qkv"), "o_bias": self._biased("o")}
        return cfg.replace(layers=changed(cfg.layers, **biases), run=self.target.run)

    def _biased(self, projections: str) -> bool:
        """Whether there is a bias of one of some projections of attention, of any layer."""
        ends = tuple(f".self_attn.{x}_proj.bias" for x in projections)
        return any(name.endswith(ends) for name in self.tensors)

    def draft_tokens(self) -> tuple[int, bool]:
        """Reads the number of draft tokens, and whether the files list them as offsets, `d2t`."""
        size, tensors = self.target.vocab_size, self.tensors
        columns = self.top.integer("draft_vocab_size", None)
        listed = [tensors[name] for name in ("lm_head.weight", "d2t") if name in tensors]
        if columns is None:
            columns = next((x.shape[0] for x in listed if len(x.shape)), size)
        if columns > size or ("d2t" not in tensors and columns != size):
            raise self.error(
                f"the head has {columns} draft tokens of the target's {size}: expected at most "
                f"these, and a tensor d2t [{columns}], if they are fewer"
            )
        if "d2t" not in tensors:
            return columns, False
        shape, kind = tuple(tensors["d2t"].shape), str(tensors["d2t"].dtype)
        if shape != (columns,) or "int" not in kind:
            raise self.error(f"wrong: d2t, expected {columns} integers, got {list(shape)} {kind}")
        ids = np.arange(columns) + np.asarray(tensors["d2t"][(slice(None),)]).astype(np.int64)
        if len(np.unique(ids)) < columns or ids.min() < 0 or ids.max() >= size:
            raise self.error(
                f"d2t, of offsets, stands for {len(np.unique(ids))} different tokens from "
                f"{ids.min()} to {ids.max()}, expected {columns} from 0 to {size - 1}"
            )
        return columns, True

    def ids(self, keys: Keys, name: str, least: int = 0) -> tuple[int, ...]:
        """Reads a list of numbers of layers; empty where it is absent, null or empty."""
        value = keys.raw.get(name)
        if value is None or value == []:
            return ()
        if not isinstance(value, list) or any(type(i) is not int or i < least for i in value):
            raise keys.error(name, f"a list of integers of at least {least}")
        return tuple(value)

    def check_taps(self, taps: Sequence[int], name: str) -> tuple[int, ...]:
        """Checks the boundaries whose states a head takes: boundary b is the input of layer b.

        Args:
          name: name of the key that lists them, for messages.
        """
        count = self.target.num_layers
        # Programs differ in the order in which they join states of other boundaries.
        if not all(0 <= tap <= count for tap in taps) or list(taps) != sorted(taps):
            raise self.error(
                f"{name} are the boundaries {list(taps)}, expected ascending ones from 0 to {count}"
            )
        return tuple(taps)

    def check_tensors(
        self, expected: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...] = ()
    ) -> None:
        """Checks that files hold exactly a head's tensors, besides `d2t` and `t2d`.

        Args:
          expected: their shapes by name.
          ignored: beginnings of names of tensors that are not needed.

        Raises:
          CheckpointError: names every tensor that is missing, unexpected, or of a wrong shape or
            dtype.
        """
        tensors = self.tensors
        problems = [
            f"missing: {n}, expected {list(s)}" for n, s in expected.items() if n not in tensors
        ]
        for name, tensor in tensors.items():
            shape, dtype = tuple(tensor.shape), str(tensor.dtype)
            if name in ("d2t", "t2d") or "rotary_emb" in name.split("."):
                continue  # what a rotary embedding holds follows from the config
            wanted = expected.get(name)
            lacking = 0 if wanted is None else len(wanted) - len(shape)
            if wanted is None:
                if not name.startswith(ignored or " "):
                    problems.append(f"unexpected: {name}, {list(shape)}")
            elif shape != wanted[max(lacking, 0) :] or set(wanted[: max(lacking, 0)]) - {1}:
                problems.append(f"wrong shape: {name}, expected {list(wanted)}, got {list(shape)}")
            elif dtype not in _FLOATS:
                problems.append(f"wrong dtype: {name}, expected one of {_FLOATS}, got {dtype}")
        if problems:
            raise self.error(
                f"the tensors do not fit this {self.kind} head: {'; '.join(problems[:50])}"
            )


def is_of_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether config.json has the layout of speculators."""
    return "speculators_model_type" in raw or LAYERS in raw


def rows_of(rows: Mapping[Any, Any]) -> Iterable[tuple[Any, Param]]:
    """Yields the rows of a tree, each with the name of its array."""
    for name, row in rows.items():
        if isinstance(row, Mapping):
            yield from rows_of(row)
        else:
            yield name, row


def shapes_of(rows: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of rows by name, without lists of draft tokens."""
    return {
        row.stored.name: row.shape[::-1] if row.stored.transpose else row.shape
        for name, row in rows_of(rows)
        if name not in ("ids", "t2d")
    }


def family_of(backbone: str) -> QwenFamily:
    """Returns how files describe layers: by Qwen3's keys, also about the windows of Llama's."""
    if backbone == "qwen3":
        return QWEN3
    return dataclasses.replace(QWEN3, model_type=backbone, qk_norm=False, defaults={})


def changed(layers: Iterable[Layer], **fields: Any) -> tuple[Layer, ...]:
    """Returns layers with other fields of their attention."""
    return tuple(
        dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **fields))
        for layer in layers
    )


def config_json(
    kind: str, architecture: str, steps: int, network: ModelConfig, vocabulary: int, dtype: str
) -> dict[str, Any]:
    """Returns what config.json says in the layout `speculators`, whatever the head.

    Args:
      kind: `speculators_model_type`.
      architecture: name of the class in speculators.
      steps: number of tokens that vLLM drafts unless told otherwise.
      network: config of the layers, which differ in nothing but windows.
      vocabulary: vocabulary size of the target.
      dtype: dtype of the weights in the files.
    """
    plain = network.replace(layers=changed(network.layers, o_bias=False))
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}],
            "verifier": {"architectures": [], "name_or_path": None},
        },
        LAYERS: {
            **family_of(network.model_type).write(plain),
            "model_type": network.model_type,
            "vocab_size": vocabulary,
            "attention_bias": network.layers[0].mixer.qkv_bias,
            "mlp_bias": False,
        },
        "tie_word_embeddings": False,
        "draft_vocab_size": network.vocab_size,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
