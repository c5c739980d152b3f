"""Qwen2 and Qwen2.5 (arXiv 2412.15115): biases on queries, keys and values."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.checked_json import Keys
from specjax.models.families import common
from specjax.models.families.dense import DenseFamily


@dataclasses.dataclass(frozen=True)
class QwenFamily(DenseFamily):
    """Configs that name a window and say apart from it whether it is in use; most do not use it."""

    def windows(self, keys: Keys, layers: int) -> tuple[int | None, ...]:
        used = keys.flag("use_sliding_window", None)
        window = keys.integer("sliding_window", None, least=0)
        full = keys.integer("max_window_layers", None, least=0)
        if "sliding_attention" in keys.texts("layer_types"):
            common.refuse(keys, [f"layer_types sliding_attention (sliding_window {window})"])
        if not keys.texts("layer_types") and used and window is not None:
            if (28 if full is None else full) < layers:
                common.refuse(keys, [f"a sliding window of {window} in use"])
        return common.layer_windows(keys, layers, None)

    def windows_json(self, windows: tuple[int | None, ...]) -> dict[str, Any]:
        return {**super().windows_json(windows), "use_sliding_window": False}


FAMILY = QwenFamily("qwen2", "Qwen2ForCausalLM", qkv_bias=True)
