"""Equal bits from every process that runs a program on a GPU: the setting `deterministic=true`.

On a GPU two runs of one program may differ for two reasons. Some operations add in the order in
which threads arrive: scatter-adds, as in the gradient of the embedding, and the backward pass of
cuDNN's attention. And XLA measures several algorithms for a product when it compiles it, and takes
the fastest, so that two processes may take different ones.

`set_up` sets XLA's flag against both. XLA then adds duplicates in sorted order, leaves algorithms
out that add by atomics, and measures nothing: it takes its default algorithms. On CPUs and TPUs
nothing is to be done: their compilers measure nothing.

Flags are read when jax starts its backends, once per process.
"""

from __future__ import annotations

import os

import jax

from specjax.kernels.names import GPUS

FLAG = "--xla_gpu_deterministic_ops"

_is_set_up = False


def set_up() -> None:
    """Makes the GPU programs of this process deterministic; a later call changes nothing.

    Nor does any call change anything where jax was told to use platforms without GPUs
    (JAX_PLATFORMS), or found none.

    Raises:
      ValueError: it is too late.
    """
    global _is_set_up
    flags = os.environ.get("XLA_FLAGS", "")
    if not may_have_gpus():
        return
    if f"{FLAG}=true" not in flags.split():
        if backends_run():
            if jax.devices()[0].platform != "gpu":
                return
            raise ValueError(
                "deterministic=true comes too late: jax read its flags when it started its "
                "backends; ask for it before the first computation, or start Python with "
                f"XLA_FLAGS={FLAG}=true"
            )
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}=true".strip()  # the last one counts
    _is_set_up = True


def may_have_gpus() -> bool:
    """Whether jax may find GPUs: it was not told to use other platforms alone."""
    named = (jax.config.jax_platforms or "").split(",")
    return named == [""] or any(name in GPUS for name in named)


def is_set_up() -> bool:
    """Whether `set_up` has set the flag of this process, or found it set."""
    return _is_set_up


def backends_run() -> bool:
    """Whether jax has started its backends: it then refuses another number of CPU devices."""
    count = jax.config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", max(count, 0) + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False
