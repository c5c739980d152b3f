"""Granite 3 (IBM 2024): Llama's structure with four multipliers."""

from specjax.models.families.dense import DenseFamily, Option

FAMILY = DenseFamily(
    "granite", "GraniteForCausalLM",
    options=(
        Option("embedding_multiplier", "model", "embedding_multiplier", 1.0),
        Option("attention_multiplier", "mixer", "scale", 1.0),
        Option("residual_multiplier", "layer", "residual_multiplier", 1.0),
        Option("logits_scaling", "logits", "multiplier", 1.0, lambda x: 1 / x, lambda x: 1 / x),
    ),
)  # fmt: skip
