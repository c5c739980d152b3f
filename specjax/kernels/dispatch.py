"""One signature for attention, whatever the platform.

Today every platform runs the XLA reference; a platform kernel takes its place here and nowhere
else, so that models and the decode loop never name a kernel.
"""

from specjax.kernels.reference import (
    causal_attention,
    causal_attention_with_own,
    tree_attention,
    tree_attention_by_position,
)

__all__ = [
    "causal_attention",
    "causal_attention_with_own",
    "tree_attention",
    "tree_attention_by_position",
]
