"""`python -m train.plan --config C --topology v5e:8x8`: does a run compile, and does it fit?

Lowers the programs that `train.rl` would run with this configuration (a micro-batch and the
optimizer's step of policy and head, moving the weights, prefill, placement, and a chunk for every
strategy and batch size), compiles each for the named topology, and prints a table of their memory.
It needs neither the chips nor the weights, only the model's config.json.

Exit status 0: every program compiles and fits; 3: one does not, and the table says which; 1 or 2:
the command or the configuration is wrong.
"""

from __future__ import annotations

if __name__ == "__main__":  # handle Ctrl-C from here on
    from specjax import interrupts

    interrupts.begin("train.plan")

import dataclasses
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from specjax.command_line import Call, ConfigError, parse_config
from specjax.settings import REQUIRED
from train.plan.figures import compiled, counted
from train.plan.programs import Shapes
from train.plan.report import Plan, lines
from train.plan.topology import find_topology
from train.run.start import USER_ERRORS
from train.schema import RLConfig

DOES_NOT_FIT = 3


@dataclasses.dataclass
class PlanCall(Call):
    """What a plan is told beside the run's settings.

    Attributes:
      topology: v5e:8x8, v5p:4x4x4, v6e:4x4, h100:8, h200:8, or cpu:8.
      only: regular expression; only programs whose names match.
      memory: HBM per chip, in GB; null: the chip's.
      count: compile nothing: count from shapes, in seconds.
      json: file to which every figure is also written as soon as it is known.
    """

    topology: str = REQUIRED
    only: str = ""
    memory: float | None = None
    count: bool = False
    json: str | None = None


def make_plan(cfg: RLConfig, call: PlanCall, command: str) -> Plan:
    """Lowers and compiles the programs of a run; figures are written after each of them.

    Raises:
      ConfigError: the settings contradict each other or need more chips than the topology has.
    """
    memory = None if call.memory is None else 1e9 * call.memory
    topology = find_topology(call.topology, memory, call.count)
    if topology.compiler == "tpu" and 1 in (cfg.mesh.size, cfg.rollout_devices):
        raise ConfigError(
            "programs for a topology need meshes, and mesh or rollout uses a single device; use "
            f"more devices of {topology.name}"
        )
    place = topology.for_replica(cfg.rollout.tp)
    shapes = Shapes(cfg, topology.devices, place, topology.platform)
    if shapes.fitted:
        print(shapes.fitted, file=sys.stderr, flush=True)
    programs = list(shapes.programs())
    chosen = [program for program in programs if re.search(call.only, program.name)]
    if not chosen:
        raise ConfigError(f"--only: no program's name has {call.only!r} in it")
    plan = Plan(call.config or "the defaults", topology, shapes, [], command=command)
    for i, program in enumerate(chosen, 1):
        if topology.compiler is None:
            plan.programs.append(counted(program, shapes))
        else:
            print(f"{i} of {len(chosen)}: {program.name}", file=sys.stderr, flush=True)
            plan.programs.append(compiled(program))
        plan.left_out = len(programs) - len(plan.programs)
        if call.json is not None:  # compilation may take hours
            plan.write(Path(call.json))
    return plan


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a plan; returns the status to exit with, 0 or `DOES_NOT_FIT`."""
    given = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "-m", "train.plan", *map(str, given)])
    cfg, call = parse_config(RLConfig, argv, "train.plan", "What a run needs of chips.", PlanCall)
    try:
        plan = make_plan(cfg, call, command)
    except (re.error, *USER_ERRORS) as error:
        sys.exit(f"train.plan: error: {error}")
    print("\n".join(lines(plan)))
    return 0 if plan.fits else DOES_NOT_FIT


if __name__ == "__main__":
    interrupts.run(main)
