"""What XLA's compiler for GPUs makes of an engine's programs: one graph, no copy of a page.

Those that compile are slow, and skipped without the compiler: it lives in jax's CUDA plugin, needs
no GPU, and a few minutes of two cores. `SPECJAX_GPU_PYTHON` names a Python that has
`jax-cuda13-plugin[with-cuda]` and what specjax needs; `make gpu-check` makes one, and runs this.
The others read programs that are lowered for GPUs and not compiled.
"""

import os
import re

import jax
import other_python
import pytest
from gpu_programs import PROGRAMS, UPDATES, engine_of, traced
from test_tpu_compiler import check_mixtures, check_packed
from tpu_programs import MIXTURES, PACKED

from bench.programs import change_dense

PYTHON = os.environ.get("SPECJAX_GPU_PYTHON")
compiles = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="SPECJAX_GPU_PYTHON names no Python with the plugin"),
]
LOWERED = ("chain", "prefill by cuDNN")  # for tests that compile nothing
# Kernels of a round by part, at most: a few more than there are, since compilers differ a little.
# A threshold of top-p has about 30, at each of two draft steps and in the verification.
MOST = {
    "plain": {"layers": 32, "noise": 2, "sampling": 5, "commit": 9, "rest": 16},
    "plain, one graph": {"layers": 32, "noise": 2, "sampling": 5, "commit": 9, "rest": 16},
    "chain, one graph": {"layers": 34, "draft": 52, "noise": 6, "sampling": 90, "commit": 16},
}


def compiled(*names: str) -> dict[str, dict]:
    """What `gpu_programs.py` says of each program."""
    wanted = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    return other_python.programs(PYTHON, "gpu_programs.py", *names, **wanted)


@pytest.fixture(scope="module")
def programs() -> dict[str, dict]:
    """Programs of engines, compiled by one process."""
    names = [name for name in PROGRAMS if name not in LOWERED]
    found = compiled(*names)
    assert set(found) == set(names)
    return found


@pytest.fixture(scope="module")
def updates() -> dict[str, dict]:
    return compiled(*UPDATES)


def for_cuda(wanted) -> str:
    """A program's text as it is lowered for GPUs, on a CPU."""
    device = jax.devices()[0]
    program = traced(engine_of(device, wanted), device, wanted)
    return program.lower(lowering_platforms=("cuda",)).as_text()


def gathers_of_pages(text: str, wanted) -> list[str]:
    pages = engine_of(jax.devices()[0], wanted).state.memory.pages[0].k.shape
    page = "x".join(map(str, pages[1:]))
    return [
        line for line in text.splitlines() if "stablehlo.gather" in line and f"x{page}x" in line
    ]


# --- lowered -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "chain"])
def test_chunks_gather_no_page(name):
    wanted = PROGRAMS[name]
    assert not gathers_of_pages(for_cuda(wanted), wanted)
    gathering = wanted._replace(attention="library:xla")
    assert gathers_of_pages(for_cuda(gathering), gathering)


@pytest.mark.slow
def test_drafts_multiply_by_the_columns_that_are_drafted_from():
    """With a draft vocabulary the whole head is for the verification alone."""

    model = change_dense(PROGRAMS["chain"].model, vocab_size=1536)  # no other width
    head = re.compile(r"512x1536xbf16|1536x512xbf16")

    def whole_heads(count: int | None) -> int:
        text = for_cuda(PROGRAMS["chain"]._replace(model=model, draft_vocab=count))
        products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        return sum(bool(head.search(product)) for product in products)

    assert whole_heads(256) == 1 < whole_heads(None)


# --- compiled ------------------------------------------------------------------------------------


class TestCompiled:
    pytestmark = compiles

    def test_attention_is_the_kernel_that_reads_pages_in_place(self, programs):
        for name, program in programs.items():
            if PROGRAMS[name].attention != "library:cudnn":
                figures, float32 = program["figures"], "float32" in name
                assert program["attention"] == ("triton" if float32 else "gpu"), name
                assert figures["own_kernels"] > 0 and not figures["library"], name
                assert not figures["gathers"], name
        by_library = programs["chain by cuDNN"]["figures"]
        assert by_library["gathers"] > 0 and by_library["library"] > 0  # so that they are found

    def test_no_cache_and_no_weight_is_copied(self, programs):
        for name, program in programs.items():
            figures = program["figures"]
            assert not figures["copied_inputs/round"], name
            if "devices" not in name:
                assert program["in_place"] > program["cache"], name
            assert program["temporaries"] < program["cache"] / 4, f"{name} copies the cache"

    def test_a_chunk_is_one_command_buffer_in_which_the_host_reads_nothing(self, programs):
        for name in (name for name, wanted in PROGRAMS.items() if wanted.graph):
            figures = programs[name]["figures"]
            assert (figures["buffers"], figures["decisions"], figures["outside"]) == (1, 0, 0), name
        assert programs["plain"]["figures"]["decisions"] > 0  # so that they are found

    def test_a_round_has_no_loop(self, programs):
        """Noise is drawn at once, thresholds are found by digits, layers are unrolled."""
        for name, program in programs.items():
            if PROGRAMS[name].what != "prefill":
                assert not program["figures"]["loops"], name

    @pytest.mark.parametrize("name", MOST)
    def test_a_round_launches_no_more_kernels_than_it_did(self, name, programs):
        figures = programs[name]["figures"]
        kernels = {part: figures[f"kernels/{part}"] for part in MOST[name]}
        over = {part: kernels[part] for part, most in MOST[name].items() if kernels[part] > most}
        assert not over, f"at most {MOST[name]}"

    def test_products_of_a_float32_model_are_float32(self, programs):
        assert programs["plain, float32"]["less_than_float32"] == []

    @pytest.mark.parametrize("name", UPDATES)
    def test_an_update_attends_by_flash_attention_and_has_no_array_of_pairs(self, name, updates):
        """Neither a mask nor logits of all tokens; gradients are not added by atomics."""
        update = updates[name]
        assert not update["figures"]["pairs"] and not update["figures"]["logits"]
        kernels = {"flash_gpu_forward", "flash_gpu_queries", "flash_gpu_keys"}
        assert kernels <= set(update["figures"]["kernels"]) and not update["cudnn"]
        assert not update["atomics"] and not update["less_than_float32"]

    def test_mixtures_multiply_by_the_matrices_that_rows_chose(self):
        found = compiled(*MIXTURES)
        check_mixtures(found, chips=1)
        # 320 rows of 128 groups, and rows of none, in blocks of 16.
        assert found["mixture"]["blocks"] == 320 // 16 + 129
        assert found["mixture update"]["kernels"] == {"experts": 6, "experts_outer": 3}

    def test_no_product_copies_its_packed_weights(self):
        check_packed(compiled(*PACKED))
