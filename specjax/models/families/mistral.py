"""Mistral 7B (arXiv 2310.06825): Llama's structure, with a window in every layer or in none."""

from __future__ import annotations

from typing import Any

from specjax.checked_json import Keys
from specjax.models.families import common
from specjax.models.families.dense import DenseFamily


class MistralFamily(DenseFamily):
    """The same window in all layers, as transformers reads it.

    Without the key Mistral's window is 4096 tokens; null means that there is none, as in later
    checkpoints. A config with layers of different kinds is refused.
    """

    def windows(self, keys: Keys, layers: int) -> tuple[int | None, ...]:
        window = keys.integer("sliding_window", None)
        if other := sorted({*keys.texts("layer_types")} - {common.window_kind(window)}):
            common.refuse(keys, [f"layer_types {', '.join(other)} (sliding_window {window})"])
        return (window,) * layers

    def windows_json(self, windows: tuple[int | None, ...]) -> dict[str, Any]:
        if len(set(windows)) != 1:
            self.refuse("has the same window in all layers", f"{windows}")
        return {"sliding_window": windows[0]}


FAMILY = MistralFamily(
    "mistral", "MistralForCausalLM", qkv_bias=False,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)  # fmt: skip
