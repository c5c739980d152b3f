"""Qwen2 and Qwen2.5 (arXiv 2412.15115): biases on queries, keys and values."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.checked_json import Keys
from specjax.models.families import common
from specjax.models.families.dense import DenseFamily


@dataclasses.dataclass(frozen=True)
class QwenFamily(DenseFamily):
    """A family whose configs have a window, and a flag whether it is used.

    Attributes:
      slides: whether a window may be in use: in the layers that `layer_types` names, or where the
        file has no such key from layer `max_window_layers` on.
    """

    slides: bool = True

    def windows(self, keys: Keys, layers: int) -> tuple[int | None, ...]:
        used = keys.flag("use_sliding_window", None)
        window = keys.integer("sliding_window", None, least=0)
        first = keys.integer("max_window_layers", None, least=0)
        if "sliding_window" not in keys.raw:
            window = 4096
        first = 28 if first is None else first
        windows = common.layer_windows(keys, layers, window if used else None, first)
        if 0 in windows:
            raise keys.error("sliding_window", "at least 1, for it is in use")
        if not self.slides and set(windows) != {None}:
            common.refuse(keys, [f"a sliding window of {window} in use"])
        return windows

    def windows_json(self, windows: tuple[int | None, ...]) -> dict[str, Any]:
        window, kinds = self.one_window(windows)
        if window is None:
            return {"use_sliding_window": False}
        if not self.slides:
            self.refuse("has none", f"{windows}")
        return {
            "use_sliding_window": True,
            "sliding_window": window,
            "max_window_layers": kinds.index("sliding_attention"),
            "layer_types": kinds,
        }


FAMILY = QwenFamily("qwen2", "Qwen2ForCausalLM", qkv_bias=True)
