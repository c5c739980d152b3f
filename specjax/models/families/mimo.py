"""MiMo (arXiv 2505.07608): a Qwen2 body, and an MTP head in the model's own files."""

from specjax.models.families.qwen2 import QwenFamily

FAMILY = QwenFamily("mimo", "MiMoForCausalLM", head_style="mimo", qkv_bias=True, slides=False)
