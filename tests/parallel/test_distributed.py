"""How a job of several processes is found, and what happens when it does not come together."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specjax.parallel import distributed
from specjax.parallel.distributed import DistributedConfig, Job, find_job

ROOT = Path(__file__).resolve().parents[1]
SLURM = {"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
EXPLICIT = {"coordinator": "a:1", "num_processes": 4, "process_id": 3}
VARIABLES = {
    "JAX_COORDINATOR_ADDRESS": "a:1",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}


@pytest.mark.parametrize(
    ("settings", "environment", "job"),
    [
        ({}, {}, None),
        ({}, {"SLURM_NTASKS": "2"}, None),  # in a batch script, outside of srun
        ({}, SLURM, Job(None, None, None)),
        ({}, {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, Job(None, None, None)),
        ({}, {"TPU_WORKER_HOSTNAMES": "a"}, None),
        ({}, {"OMPI_COMM_WORLD_SIZE": "8"}, Job(None, None, None)),
        ({"mode": "off"}, SLURM, None),
        ({"mode": "on"}, {}, Job(None, None, None)),
        (EXPLICIT, {}, Job("a:1", 4, 3)),
        ({}, VARIABLES, Job("a:1", 4, 3)),
        ({"process_id": 0}, VARIABLES, Job("a:1", 4, 0)),
        ({"coordinator": "b:2"}, SLURM, Job("b:2", None, None)),
        (EXPLICIT | {"num_processes": 1, "process_id": 0}, {}, None),
    ],
)
def test_a_job_is_found_in_settings_and_environment(settings, environment, job):
    assert find_job(DistributedConfig(**settings), environment) == job


@pytest.mark.slow
def test_a_process_that_waits_in_vain_says_for_whom():
    program = (
        "from specjax.parallel.distributed import DistributedConfig, start; "
        "start(DistributedConfig(coordinator='127.0.0.1:1', num_processes=2, process_id=1, "
        "start_timeout=1), 2)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode != 0
    assert "process 1 of 2, which connect to 127.0.0.1:1, within 1 s" in ended.stderr


def test_one_process_starts_nothing_and_has_only_itself_to_ask():
    distributed.start(DistributedConfig(), 1)
    assert not distributed.is_several() and distributed.is_first()
    assert distributed.gather({"a": 1}, "here") == [{"a": 1}]
    assert not distributed.told_to_end(1)
