"""Qwen3-Next, such as Qwen3-Next-80B-A3B: Gated DeltaNet, gated attention, and 512 experts."""

from specjax.models.families.hybrid import HYBRID, HybridMixtureFamily
from specjax.models.families.qwen3_moe import Qwen3MoeFamily


class Qwen3NextFamily(HybridMixtureFamily):
    """Layers may be dense, as in `Qwen3MoeFamily`."""

    sparse, sparse_json = Qwen3MoeFamily.sparse, Qwen3MoeFamily.sparse_json


FAMILY = Qwen3NextFamily(
    "qwen3_next", "Qwen3NextForCausalLM", by_key_head=True, normed=True, **HYBRID
)
