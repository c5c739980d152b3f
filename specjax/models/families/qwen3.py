"""Qwen3 (arXiv 2505.09388): queries and keys are normed per head, whose size is its own."""

from specjax.models.families.qwen2 import QwenFamily

FAMILY = QwenFamily("qwen3", "Qwen3ForCausalLM", qk_norm=True, defaults={"head_dim": 128})
