"""Backends whose kernels are interpreted on CPU: slow, and without the device that they are for.

As names of kernels they are `tests.kernels.interpreted:TPU`, `:TRITON` and `:FLASH_GPU`.
"""

import functools

from specjax.interfaces import Backend
from specjax.kernels import context_parallel, flash, flash_gpu, library, tpu, triton

# Small, so that few rows and positions are many tiles, blocks, parts and chunks.
TPU_TUNING = tpu.Tuning(2**16, 32, 64 * tpu.MIB, part_positions=32, cores=2)
TRITON_TUNING = triton.Tuning(
    16, 2048, 2, least_chunk=32, chunk_per_row=1, unsplit_rows=64, programs=4
)
TPU = Backend(
    operations={
        "tree_attention": functools.partial(tpu.tree_attention, tuning=TPU_TUNING, interpret=True),
        "causal_attention": functools.partial(library.splash_attention, interpret=True),
        "context_attention": functools.partial(
            context_parallel.attention, local=flash.local(flash.Tiles(8, 16, interpret=True))
        ),
    },
    line="the TPU kernel in interpret mode",
    takes=tpu.V5E.takes,
)
TRITON = Backend(
    operations={
        "tree_attention": functools.partial(
            triton.tree_attention, tuning=TRITON_TUNING, interpret=True
        ),
    },
    line="the Triton kernel in interpret mode",
    takes=triton.BACKEND.takes,
)
FLASH_GPU = Backend(
    operations={"causal_attention": functools.partial(flash_gpu.causal_attention, interpret=True)},
    line="the GPU's flash attention in interpret mode",
    takes=flash_gpu.BACKEND.takes,
)
