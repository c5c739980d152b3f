"""Compiles Hopper's tree attention for a card that is not there; prints a JSON line per call.

    JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \
      python tests/kernels/gpu_attention_programs.py h100 1x4x128 64x16x256:window,sinks,soft_cap

A call is rows x group x head size. The assembler says what the kernel takes; see `gpu_programs.py`
for what else this needs.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import tempfile
from contextlib import contextmanager

os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"

import attention_call
import jax
import jax.numpy as jnp
from jax.experimental import topologies

from specjax.chips import CARDS
from specjax.kernels import gpu

SIZES = attention_call.Sizes(slots=8, kv_heads=2, page=64, pages=16)
OPTIONS = {"window": 300, "soft_cap": 30.0}


@contextmanager
def told():
    """What the process writes, the assembler's lines among it."""
    found, outputs = [], [(out, os.dup(out)) for out in (1, 2)]
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as file:
        for out, _ in outputs:
            os.dup2(file.fileno(), out)
        try:
            yield found
        finally:
            for out, kept in outputs:
                os.dup2(kept, out)
            file.seek(0)
            found.append(file.read())


def lowered(device, name: str) -> jax.stages.Lowered:
    sizes, _, options = name.partition(":")
    rows, group, head = map(int, sizes.split("x"))
    arrays, sinks = attention_call.shapes(device, SIZES, rows, group, head, jnp.bfloat16)
    named = {key: OPTIONS[key] for key in options.split(",") if key in OPTIONS}
    attend = functools.partial(gpu.tree_attention, **named)
    if "sinks" not in options:
        return jax.jit(attend).lower(*arrays)
    return jax.jit(lambda sinks, *arrays: attend(*arrays, sinks=sinks)).lower(sinks, *arrays)


def main(card: str, *wanted: str) -> None:
    target = {"platform": "cuda", "topology": "1x1x1", "target_config": CARDS[card].config}
    [device] = topologies.get_topology_desc(card, **target).devices
    for name in wanted:
        with told() as lines:
            compiled = lowered(device, name).compile()
        text = compiled.as_text()
        spilled = re.findall(r"(\d+) bytes spill", lines[0])
        found = {
            "program": name,
            "registers": max(map(int, re.findall(r"Used (\d+) registers", lines[0]))),
            "spilled": sum(map(int, spilled)),
            "read": bool(spilled),
            "mosaic": text.count('custom_call_target="mosaic_gpu'),
            "triton": text.count('custom_call_target="__gpu$xla.gpu.triton"'),
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
