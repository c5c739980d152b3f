"""Gemma 3 (arXiv 2503.19786), text alone: Gemma 2 with normed queries and keys, without soft-caps.

A checkpoint that reads images, too, is of the type `gemma3` and has the text's config within; what
reads images is left out.
"""

from specjax.models.families.dense import SCALE_BY_SIZE, SlidingFamily
from specjax.models.families.gemma2 import DEFAULTS, GEMMA, SOFT_CAPS

FAMILY = SlidingFamily(
    "gemma3_text", "Gemma3ForCausalLM", period=6, period_key="sliding_window_pattern",
    qk_norm=True,
    options=(SCALE_BY_SIZE, *(cap._replace(default=None) for cap in SOFT_CAPS)),
    defaults={
        **DEFAULTS, "vocab_size": 262_208, "max_position_embeddings": 131_072,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
    thetas={"sliding_attention": "rope_local_base_freq", "full_attention": "rope_theta"},
    renamed={
        "language_model.model.": "model.",
        "model.language_model.": "model.",
        "language_model.lm_head.": "lm_head.",
    },
    ignored=("*vision_tower.*", "*multi_modal_projector.*"),
    **GEMMA,
)  # fmt: skip
