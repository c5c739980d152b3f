"""The backend of the table's name `reference`: XLA's own programs of every operation but `layers`.

What they compute is in `reference.py`, and of rows that are split over devices in
`context_parallel.py`.
"""

from __future__ import annotations

from specjax.interfaces import Backend
from specjax.kernels import commit, context_parallel, experts
from specjax.kernels.reference import (
    causal_attention,
    causal_attention_with_own,
    product,
    tree_attention,
)


def _causal_attention(q, k, v, own, segment_ids, **options):
    if not own:
        return causal_attention(q, k, v, segment_ids, **options)
    return causal_attention_with_own(q, k, v, own, segment_ids, **options)


BACKEND = Backend(
    operations={
        "tree_attention": tree_attention,
        "causal_attention": _causal_attention,
        "context_attention": context_parallel.attention,
        "commit": commit.by_scatter,
        "product": product,
        "experts": experts.experts,
    },
    line="XLA reference",
    takes={
        "tree_attention": ("window", "soft_cap", "sinks", "with_lse"),
        "causal_attention": ("window", "soft_cap", "sinks"),
        "context_attention": ("window", "soft_cap", "sinks"),
    },
    by_device=False,
)
