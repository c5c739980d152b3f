"""Qwen3's mixtures of experts (arXiv 2505.09388), such as Qwen3-30B-A3B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specjax.checked_json import Keys
from specjax.models.families.mixture import MixtureFamily
from specjax.models.families.qwen2 import QwenFamily


class Qwen3MoeFamily(MixtureFamily, QwenFamily):
    """Layers that `mlp_only_layers` lists are dense, and those between every few mixtures.

    A window that is in use is that of all layers, as in transformers.
    """

    def problems(self, keys: Keys) -> list[str]:
        normed = keys.raw.get("use_qk_norm", True)  # some files say so
        keys.asked.add("use_qk_norm")
        return [*super().problems(keys), *([] if normed is True else ["use_qk_norm false"])]

    def windows(self, keys: Keys, layers: int) -> tuple[int | None, ...]:
        used = keys.flag("use_sliding_window", None)
        window = keys.integer("sliding_window", 4096) if used else None
        keys.asked |= {"sliding_window", "max_window_layers", "layer_types"}
        return (window,) * layers

    def windows_json(self, windows: tuple[int | None, ...]) -> dict[str, Any]:
        if len({*windows}) > 1:
            self.refuse("has the same window in all layers", f"{windows}")
        used = windows[0] is not None
        return {"use_sliding_window": used, **({"sliding_window": windows[0]} if used else {})}

    def sparse(self, keys: Keys, layers: int) -> list[bool]:
        step, dense = keys.integer("decoder_sparse_step", 1), keys.numbers("mlp_only_layers")
        return [i not in dense and (i + 1) % step == 0 for i in range(layers)]

    def sparse_json(self, sparse: Sequence[bool]) -> dict[str, Any]:
        dense = [i for i, one in enumerate(sparse) if not one]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


FAMILY = Qwen3MoeFamily("qwen3_moe", "Qwen3MoeForCausalLM", qk_norm=True, normed=False)
