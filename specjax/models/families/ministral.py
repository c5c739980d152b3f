"""Ministral (Mistral AI 2024): Mistral with a window in the layers that the file names."""

from specjax.models.families.dense import SlidingFamily

FAMILY = SlidingFamily(
    "ministral", "MinistralForCausalLM", qkv_bias=False,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)  # fmt: skip
