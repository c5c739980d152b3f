"""Llama 3 (arXiv 2407.21783), and what shares its config: SmolLM2 and others."""

from specjax.models.families.dense import DenseFamily

FAMILY = DenseFamily("llama", "LlamaForCausalLM")
