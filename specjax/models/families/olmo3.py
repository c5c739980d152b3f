"""OLMo 3 (arXiv 2512.13961): OLMo 2 with a window in three of four layers."""

from specjax.models.families.dense import SlidingFamily
from specjax.models.families.olmo2 import OLMO

FAMILY = SlidingFamily(
    "olmo3", "Olmo3ForCausalLM", period=4,
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5},
    thetas={"sliding_attention": "rope_theta", "full_attention": "rope_theta"},
    **OLMO,
)  # fmt: skip
