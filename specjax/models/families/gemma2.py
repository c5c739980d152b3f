"""Gemma 2 (arXiv 2408.00118): norms around both halves, soft-caps, windows in half the layers."""

from specjax.models.families.dense import SCALE_BY_SIZE, Option, SlidingFamily

SOFT_CAPS = (
    Option("attn_logit_softcapping", "mixer", "soft_cap", 50.0),
    Option("final_logit_softcapping", "logits", "soft_cap", 30.0),
)
DEFAULTS = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "tie_word_embeddings": True, "sliding_window": 4096,
}  # fmt: skip
GEMMA = {
    "norms": "both",
    "norm_offset": True,
    "scaled_embedding": True,
    "activation": "gelu_pytorch_tanh",
    "activation_key": "hidden_activation",
    "inert": ("hidden_act", "sliding_window_size"),  # which transformers does not read
}

FAMILY = SlidingFamily(
    "gemma2", "Gemma2ForCausalLM", period=2, options=(SCALE_BY_SIZE, *SOFT_CAPS),
    defaults=DEFAULTS, **GEMMA,
)  # fmt: skip
