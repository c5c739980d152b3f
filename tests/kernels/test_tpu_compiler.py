"""The TPU compiler itself takes the kernel, and the programs that train.rl runs on a chip.

Slow, and skipped without libtpu: the programs of one topology take its compiler ten minutes of two
cores, and it lives in an environment of its own, which `make tpu-check` sets up.
"""

import functools
import json
import math
import os
from pathlib import Path

import jax
import other_python
import pytest
import tpu_programs
from sum_windows import SUM
from tpu_programs import MIXTURE, MIXTURES, PACKED, SPARSE

PLAN = other_python.ROOT / ".venv-plan" / "bin" / "python"
PYTHON = Path(os.environ.get("SPECJAX_TPU_PYTHON", PLAN))
TRAINING = ("policy update", "draft update")
ROLLOUT = ("kernel", "tree of 64", "piece", "prefill", "chunk")
PRODUCTS = ("chunk", "chunk in float32", "chunk of one")


WIDE = tuple(tpu_programs.WIDE_CHUNKS)
WIDE_TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1")
# What the compiler estimated when docs/tpu.md was written, and by how much more a chunk may take
# before a test fails: a share, and cycles or bytes that are noise of the compiler's choices.
RESULTS = other_python.ROOT / "bench" / "results" / "tpu"
SLACK, CYCLES, BYTES = 1.08, 20_000, 2**22
needs_libtpu = pytest.mark.skipif(
    not PYTHON.exists(),
    reason="no environment with libtpu: make it by `make tpu-check`, or set SPECJAX_TPU_PYTHON",
)


def compiled(topology: str, *names: str) -> dict[str, dict]:
    """What `tpu_programs.py` says of programs."""
    wanted = {"TPU_SKIP_MDS_QUERY": "1"}
    wanted["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # another test may be compiling
    return other_python.programs(PYTHON, "tpu_programs.py", topology, *names, **wanted)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize(
    "name", [*ROLLOUT[-2:], *PRODUCTS[1:], *TRAINING, *MIXTURES, [*PACKED][-1], WIDE[0]]
)
def test_the_programs_that_it_is_given_can_be_lowered(name):
    """Here for the CPU, so that the slow test below does not fall behind the code unseen."""
    mesh = tpu_programs.mesh_over(jax.devices()[:4])
    assert "sharding" in tpu_programs.PROGRAMS[name](mesh).as_text()


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    "topology, kind",
    [("v5e:2x2", "TPU v5 lite"), ("v5p:2x2x1", "TPU v5"), ("v6e:2x2", "TPU v6 lite")],
)
def test_the_tpu_compiler_takes_the_kernel_and_the_programs_around_it(topology, kind):
    found = compiled(topology, *ROLLOUT, *TRAINING)
    assert set(found) == {*ROLLOUT, *TRAINING}
    assert {program["device"] for program in found.values()} == {kind}
    for name in ROLLOUT:
        assert found[name]["tree_attention"] > 0, f"{name} runs without the kernel"
    for name in TRAINING:
        assert found[name]["splash"] > 0, f"{name} runs without splash attention"


@pytest.mark.slow
@needs_libtpu
def test_products_are_what_their_dtype_says_and_never_sums_of_one_row():
    found = compiled("v5e:2x2", *PRODUCTS)
    assert found["chunk in float32"]["precisions"] == ["highest"]
    assert found["chunk"]["precisions"] == found["chunk of one"]["precisions"] == ["default"]
    for name in PRODUCTS:
        windows = found[name]["windows"]
        assert set(windows) == {*"qkvo", "gate", "up", "down", "lm_head"}, name
        assert not [product for product, found in windows.items() if SUM in found], name


@pytest.mark.slow
@needs_libtpu
def test_rows_that_are_split_over_devices_are_attended_to_by_three_kernels():
    found = compiled("v5e:2x2", "split rows")["split rows"]
    assert found["flash"] == 3  # forward, queries and keys


def check_mixtures(found: dict[str, dict], chips: int) -> None:
    """Rows are multiplied by the matrices that they chose, which are read where they lie.

    Args:
      found: what `tpu_programs.of_experts` says of each of `MIXTURES`, and bytes of temporaries.
      chips: number of devices that the layer's matrices are divided over in a round.
    """
    width, count = SPARSE.hidden_size, MIXTURE.num_experts
    stack = count * width * MIXTURE.intermediate_size
    layer = 3 * stack * 2  # bytes
    step, one, update = (found[name] for name in MIXTURES)
    for program in (step, one):
        # An array of all rows for each matrix, or a copy of the matrices, would be as large.
        dense = 8 * 5 * count * width // chips
        assert program["largest"] < dense < stack // chips and program["by_xla"] < dense
        assert program["temporaries"] < 2 * dense
        assert program["kernels"] == {"experts": 3}
    assert one["blocks"] == MIXTURE.num_experts_per_tok  # one row reads no more matrices
    assert update["largest"] < 4096 * count * width and update["by_xla"] < stack
    # Gradients of both layers, and one layer's matrices and their gradients, before they are
    # stacked: four times the matrices of a layer. As much is there for what rows keep.
    assert update["temporaries"] < 8 * layer


@pytest.mark.slow
@needs_libtpu
def test_mixtures_multiply_by_the_matrices_that_rows_chose():
    found = compiled("v5e:2x2", *MIXTURES)
    check_mixtures(found, chips=4)
    assert found["mixture update"]["kernels"] == {"ragged-dot-none": 3, "gmm": 3, "tgmm": 3}


def check_packed(found: dict[str, dict]) -> None:
    """No product copies values; the scales of int4, a ninth of the bytes, may be copied.

    Args:
      found: temporaries and `tpu_programs.of_weights` of each of `PACKED`.
    """
    assert set(found) == set(PACKED)
    packed = {name: program for name, program in found.items() if "xla" not in name}
    copied = {name: p for name, p in packed.items() if p["temporaries"] > 2**20}
    assert not copied


@pytest.mark.slow
@needs_libtpu
def test_products_by_packed_weights_read_little_more_than_their_bytes():
    found = compiled("v5e:2x2", *PACKED)
    check_packed(found)
    full = found["xla matrix"]["weights"]
    for name in ("int8 matrix", "fp8 matrix"):  # those by kernels are not counted
        assert found[name]["bytes"] < 0.55 * full < found["xla matrix"]["bytes"]


def measured(topology: str, name: str) -> dict[str, float]:
    """The figures of a chunk in the committed result files; none if they have none."""
    file = RESULTS / f"{topology.partition(':')[0]}.json"
    if not file.exists():
        return {}
    figures = json.loads(file.read_text(encoding="utf-8"))["figures"]
    return {
        key.removeprefix(f"{name}/"): entry["value"]
        for key, entry in figures.items()
        if key.startswith(f"{name}/")
    }


@pytest.fixture(scope="module")
def wide():
    """What `tpu_programs.py` says of a chunk of `WIDE`; each is compiled once."""
    return functools.cache(lambda topology, name: compiled(topology, name)[name])


def every_wide_chunk(test):
    """Runs a slow test for every chunk and topology."""
    for mark in (
        pytest.mark.parametrize("name", WIDE),
        pytest.mark.parametrize("topology", WIDE_TOPOLOGIES),
        needs_libtpu,
        pytest.mark.slow,
    ):
        test = mark(test)
    return test


@every_wide_chunk
def test_a_round_costs_no_more_than_was_measured(wide, topology, name):
    before = measured(topology, name)
    assert before, f"no figures of {name} for {topology}; tests/compiled.py tpu makes them"
    found = wide(topology, name)
    figures = found["figures"]
    parts = [key for key in before if key.startswith(("cycles/", "cycles_"))]
    limits = {part: SLACK * before[part] + CYCLES for part in parts}
    assert {part: figures[part] for part in parts if figures[part] > limits[part]} == {}
    assert set(figures["counted_once"]) <= set(before["counted_once"])
    # What has no estimate must not become more either.
    counted = ("calls/", "unknown/")
    calls = {key: count for key, count in figures.items() if key.startswith(counted)}
    assert {key: n for key, n in calls.items() if n > before.get(key, 0)} == {}
    assert found["temporaries"] <= min(SLACK * before["temporaries"] + BYTES, 1e9)


@every_wide_chunk
def test_no_cache_and_no_weight_is_copied(wide, topology, name):
    figures, before = wide(topology, name)["figures"], measured(topology, name)
    for place in ("round", "entry"):
        assert figures[f"copied_inputs/{place}"] == {}
        assert figures[f"copied/{place}"] <= SLACK * before[f"copied/{place}"] + BYTES


@every_wide_chunk
def test_no_loop_of_a_round_goes_over_slots(wide, topology, name):
    assert wide(topology, name)["figures"]["loops"] == []


@every_wide_chunk
def test_the_vocabulary_and_the_heads_projection_stay_split(wide, topology, name):
    found = wide(topology, name)
    assert found["whole_vocabulary"] == []
    sizes = [math.prod(dims) for dims in found["projections"]]
    assert sizes == ([] if name.startswith("off") else [2 * 4096 * 4096 // 4])


@every_wide_chunk
def test_every_maximum_of_logits_is_kept_in_float32_and_attention_is_the_kernel(
    wide, topology, name
):
    found = wide(topology, name)
    assert not found["rounded"], "a reduction keeps a maximum in bfloat16"
    assert found["tree_attention"] > 0
