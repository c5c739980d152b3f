"""SmolLM3: Llama's structure, with a rotary embedding in three of four layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from specjax.checked_json import Keys
from specjax.config.model import ModelConfig
from specjax.models.families import common
from specjax.models.families.dense import DenseFamily
from specjax.models.rope import Rope


class SmolLM3Family(DenseFamily):
    """A family of which some layers have no rotary embedding; these may have a window."""

    def windows(self, keys: Keys, layers: int) -> tuple[int | None, ...]:
        window = keys.integer("sliding_window", None)
        window = window if keys.flag("use_sliding_window") else None
        rotated = self._rotated(keys, layers)
        kinds = [common.window_kind(None if one else window) for one in rotated]
        if window is None and "sliding_attention" in keys.texts("layer_types"):
            return (None,) * layers  # as transformers reads it
        return common.layer_windows(keys, layers, window, kinds=kinds)

    def _rotated(self, keys: Keys, layers: int) -> list[bool]:
        every = keys.integer("no_rope_layer_interval", 4)
        flags = keys.numbers("no_rope_layers") or [(i + 1) % every for i in range(layers)]
        if len(flags) < layers:
            raise keys.error("no_rope_layers", f"a 1 or a 0 for each of the {layers} layers")
        return [flag != 0 for flag in flags[:layers]]

    def ropes(self, keys: Keys, max_position: int, windows: Sequence[int | None]) -> Sequence[Rope]:
        rope = common.read_rope(keys, max_position)
        none = dataclasses.replace(rope, share=0.0)
        return [rope if rotated else none for rotated in self._rotated(keys, len(windows))]

    def windows_json(self, windows: tuple[int | None, ...]) -> dict[str, Any]:
        window, kinds = self.one_window(windows)
        used = window is not None
        return {"use_sliding_window": used, "sliding_window": window, "layer_types": kinds}

    def ropes_json(self, cfg: ModelConfig) -> dict[str, Any]:
        ropes = [layer.mixer.rope for layer in cfg.layers]
        flags = [int(rope.share > 0) for rope in ropes]
        rope = dataclasses.replace(ropes[flags.index(1) if any(flags) else 0], share=1.0)
        return {**common.rope_json(rope), "no_rope_layers": flags}


FAMILY = SmolLM3Family(
    "smollm3", "SmolLM3ForCausalLM",
    defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
)  # fmt: skip
