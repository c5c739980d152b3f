"""Mistral 7B (arXiv 2310.06825): Llama's structure, with a window in every layer or in none."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.checked_json import Keys
from specjax.models.families import common
from specjax.models.families.dense import DenseFamily


@dataclasses.dataclass(frozen=True)
class MistralFamily(DenseFamily):
    """Mistral's window, read as transformers reads it.

    Without the key the window is 4096 tokens; null means that there is none, as in later
    checkpoints. A config with layers of different kinds is refused.
    """

    def windows(self, keys: Keys, layers: int) -> tuple[int | None, ...]:
        window = 4096
        if "sliding_window" in keys.raw:
            window = keys.integer("sliding_window", None)
        kind = "full_attention" if window is None else "sliding_attention"
        if other := sorted(set(keys.texts("layer_types")) - {kind}):
            common.refuse(keys, [f"layer_types {', '.join(other)} (sliding_window {window})"])
        return (window,) * layers

    def windows_json(self, windows: tuple[int | None, ...]) -> dict[str, Any]:
        if len(set(windows)) != 1:
            self.refuse("has the same window in all layers", f"{windows}")
        return {"sliding_window": windows[0]}


FAMILY = MistralFamily("mistral", "MistralForCausalLM", qkv_bias=False, kv_heads=8)
