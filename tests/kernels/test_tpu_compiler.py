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


def compiled(topology: str) -> dict[str, dict]:
    """What `tpu_programs.py` says of each program."""
    wanted = {"TPU_SKIP_MDS_QUERY": "1"}
    wanted["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # another test may be compiling
    names = *ROLLOUT, *TRAINING
    return other_python.programs(PYTHON, "tpu_programs.py", topology, *names, **wanted)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("name", [*ROLLOUT[-2:], *TRAINING])
def test_the_programs_that_it_is_given_can_be_lowered(name):
    """Here for the CPU, so that the slow test below does not fall behind the code unseen."""
    mesh = tpu_programs.mesh_over(jax.devices()[:4])
    assert "sharding" in tpu_programs.PROGRAMS[name](mesh).as_text()


@pytest.mark.slow
@pytest.mark.skipif(
    not PYTHON.exists(),
    reason="no environment with libtpu: `make plan` makes one, or SPECJAX_TPU_PYTHON names one",
)
@pytest.mark.parametrize(
    "topology, kind",
    [("v5e:2x2", "TPU v5 lite"), ("v5p:2x2x1", "TPU v5"), ("v6e:2x2", "TPU v6 lite")],
)
def test_the_tpu_compiler_takes_the_kernel_and_the_programs_around_it(topology, kind):
    found = compiled(topology)
    assert set(found) == {*ROLLOUT, *TRAINING}
    assert {program["device"] for program in found.values()} == {kind}
    for name in ROLLOUT:
        assert found[name]["tree_attention"] > 0, f"{name} runs without the kernel"
    for name in TRAINING:
        assert found[name]["splash"] > 0, f"{name} runs without splash attention"
