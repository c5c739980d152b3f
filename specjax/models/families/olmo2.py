"""OLMo 2 (arXiv 2501.00656): norms behind both halves, queries and keys normed over all heads."""

from specjax.models.families.dense import DenseFamily

OLMO = {"norms": "after", "qk_norm": True, "wide_norm": True}

FAMILY = DenseFamily("olmo2", "Olmo2ForCausalLM", defaults={"rms_norm_eps": 1e-5}, **OLMO)
