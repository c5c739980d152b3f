"""XLA's compiler for GPUs writes to caches where they lie, and takes the kernel within a chunk.

Slow, and skipped without it: it lives in jax's CUDA plugin, needs no GPU, and two minutes of two
cores. `SPECJAX_GPU_PYTHON` names a Python that has `jax-cuda13-plugin[with-cuda]` and what specjax
needs; `make gpu-check` makes one, and runs this.
"""

import os

import gpu_programs
import jax
import other_python
import pytest

PYTHON = os.environ.get("SPECJAX_GPU_PYTHON")


def compiled(attention: str, *programs: str) -> dict[str, dict]:
    """What `gpu_programs.py` says of each program."""
    wanted = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    return other_python.programs(PYTHON, "gpu_programs.py", attention, *programs, **wanted)


@pytest.mark.parametrize("program", ["off:1", "prefill:1:16"])
def test_gpus_write_to_caches_by_scatters(program):
    """A slice at a time would be an operation per sequence, layer and array; and pages that are
    written so by chunks of one sequence are all turned around, as the next test would find."""
    device = jax.devices()[0]

    def writes(attention: str) -> list[str]:
        runner = gpu_programs.runner_of(device, attention)
        text = gpu_programs.lowered(runner, device, program).as_text()
        page = "x".join(map(str, runner.state.memory.pages[0].k.shape)) + "xbf16"
        return [
            line for line in text.splitlines() if "dynamic_update_slice" in line and page in line
        ]

    assert not writes("library:xla") and writes("reference")


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="SPECJAX_GPU_PYTHON names no Python with jax's plugin")
def test_the_gpu_compiler_copies_no_cache_and_takes_the_kernel():
    names = ("off:1", "off:8", "4_1_5:1", "4_1_5:16", "prefill:4:128")
    found = compiled("library", *names)
    assert set(found) == set(names)
    for name, program in found.items():
        assert program["attention"] == "library:cudnn"
        assert program["in_place"] > program["cache"], name
        assert program["temporaries"] < program["cache"] / 4, f"{name} copies the cache"
    own = compiled("auto", "4_1_5:16")["4_1_5:16"]
    assert own["attention"] == "gpu"
    assert own["mosaic"] > 0 and own["temporaries"] < found["4_1_5:16"]["temporaries"]
