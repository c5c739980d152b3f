"""Compiles the Triton tree attention for GPUs that are not there; prints JSON lines.

    JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \
      python tests/kernels/triton_programs.py a100:float32:128:5 l40:bfloat16:256:512

Arguments are card, dtype, size of a head, and tree rows. Needs jax's CUDA plugin and the libraries
that it comes with; `test_triton.py` runs it.
"""

from __future__ import annotations

import functools
import json
import re
import sys

import attention_call
import jax
from jax.experimental import topologies

from specjax.chips import CARDS
from specjax.kernels import triton

# Facts that differ from an H100's: name, compute capability, multiprocessors, and bytes of shared
# memory of a program and of a multiprocessor.
OTHERS = {
    "a100": ("NVIDIA A100-SXM4-80GB", "8.0", 108, 166912, 167936),
    "l40": ("NVIDIA L40", "8.9", 142, 101376, 102400),
    "b200": ("NVIDIA B200", "10.0", 148, 232448, 233472),
}
# 8B's heads, half of a table of 4,096 positions in pages of 64.
SIZES, GROUP = attention_call.Sizes(slots=8, kv_heads=8, page=64, pages=64), 4


def config_of(card: str) -> str:
    """The card's GpuTargetConfigProto, as text: an H100's with the facts of another."""
    text = CARDS["h100"].config
    if card in CARDS:
        return CARDS[card].config
    kind, capability, cores, program, core = OTHERS[card]
    major, minor = capability.split(".")
    features = "feature_extension: ACCELERATED_FEATURES"
    kept = features if int(major) >= 9 else ""
    for old, new in [
        (re.escape(CARDS["h100"].kind), kind),
        (f"major: 9 {features}", f"major: {major} minor: {minor} {kept}"),
        (r"Compute Capability 9.0a", f"Compute Capability {capability}"),
        (r"core_count: \d+", f"core_count: {cores}"),
        (r"optin: \d+", f"optin: {program}"),
        (r"shared_memory_per_core: \d+", f"shared_memory_per_core: {core}"),
    ]:  # fmt: skip
        text, count = re.subn(old, new, text)
        assert count, old
    return text


def compiled(card: str, dtype: str, head: int, rows: int, **options) -> jax.stages.Compiled:
    """Compiles one call with everything that a layer may ask for."""
    described = {"topology": "1x1x1", "target_config": config_of(card)}
    [device] = topologies.get_topology_desc(card, "cuda", **described).devices
    arrays, sinks = attention_call.shapes(device, SIZES, rows, GROUP, head, dtype)
    attend = functools.partial(triton.tree_attention, with_lse=True, **options)
    return jax.jit(attend).lower(*arrays, sinks=sinks).compile()


def main(*names: str) -> None:
    for name in names:
        card, dtype, head, rows = name.split(":")
        program = compiled(card, dtype, int(head), int(rows), soft_cap=30.0)
        text = program.as_text()
        found = {
            "program": name,
            "kernels": len(re.findall(r'custom_call_target="__gpu\$xla\.gpu\.triton"', text)),
            "beside": len(re.findall(r" (?:fusion|gather|dynamic-slice|copy)\(", text)),
            "temporaries": program.memory_analysis().temp_size_in_bytes,
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
