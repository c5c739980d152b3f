"""Qwen3.5 and 3.6, dense and with experts, text alone: what reads images is left out."""

from typing import Any

from specjax.models.families.hybrid import HYBRID, HybridFamily, HybridMixtureFamily

_TEXT: dict[str, Any] = {
    **HYBRID,
    "mtp_key": "mtp_num_hidden_layers",
    "renamed": {"model.language_model.": "model."},
    "ignored": ("model.visual.*",),
    "inert": ("mamba_ssm_dtype",),  # the state is always float32
}
FAMILY = HybridFamily("qwen3_5_text", "Qwen3_5ForCausalLM", **_TEXT)
MOE = HybridMixtureFamily("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", **_TEXT)
