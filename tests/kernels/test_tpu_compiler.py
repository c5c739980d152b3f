"""The TPU compiler itself takes the kernel, and the programs that train.rl runs on a chip.

Slow, and skipped without libtpu: the programs of one topology take its compiler three minutes of
two cores, and it lives in an environment of its own, which `make plan` sets up.
"""

import os
from pathlib import Path

import jax
import other_python
import pytest
import tpu_programs

PLAN = other_python.ROOT / ".venv-plan" / "bin" / "python"
PYTHON = Path(os.environ.get("SPECJAX_TPU_PYTHON", PLAN))
TRAINING = ("policy update", "draft update")
ROLLOUT = ("kernel", "tree of 64", "piece", "prefill", "chunk")


WIDE = tuple(tpu_programs.WIDE_CHUNKS)
needs_libtpu = pytest.mark.skipif(
    not PYTHON.exists(),
    reason="no environment with libtpu: `make plan` makes one, or SPECJAX_TPU_PYTHON names one",
)


def compiled(topology: str, *names: str) -> dict[str, dict]:
    """What `tpu_programs.py` says of programs."""
    wanted = {"TPU_SKIP_MDS_QUERY": "1"}
    wanted["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # another test may be compiling
    return other_python.programs(PYTHON, "tpu_programs.py", topology, *names, **wanted)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("name", [*ROLLOUT[-2:], *TRAINING, WIDE[0]])
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
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
def test_no_chunk_copies_the_cache_or_keeps_a_maximum_in_bfloat16(topology):
    """Of one sequence and of 64, at a vocabulary of 152k split in four."""
    found = compiled(topology, *WIDE)
    assert set(found) == set(WIDE)
    for name, program in found.items():
        assert program["tree_attention"] > 0, f"{name} runs without the kernel"
        assert not program["copies_of_pages"], f"{name} copies pages in its loop"
        assert not program["rounded"], f"{name} keeps a maximum in bfloat16"
        assert program["temporaries"] < 1e9, f"{name} needs a GB beside its arguments"
