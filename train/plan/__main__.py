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
from train.plan.figures import Figures, compiled, counted
from train.plan.programs import Program, Shapes
from train.plan.report import Plan, lines
from train.plan.topology import Topology, find_topology
from train.run.start import USER_ERRORS
from train.schema import RLConfig

DOES_NOT_FIT = 3


def make_plan(
    cfg: RLConfig,
    topology: Topology,
    only: str = "",
    config: str = "defaults",
    file: Path | None = None,
    command: str = "",
) -> Plan:
    """Lowers and compiles the programs of a run.

    Args:
      cfg: the run's configuration.
      topology: the chips to plan for.
      only: a regular expression; programs whose names do not match are left out.
      config: name of the config file, for the table.
      file: file to write figures to, as JSON, after each program.
      command: the command line, for the file.

    Raises:
      ConfigError: the settings contradict each other or need more chips than the topology has.
    """
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
    try:
        chosen = [program for program in programs if re.search(only, program.name)]
    except re.error as error:
        raise ConfigError(
            f"--only: expected a regular expression, got {only!r}: {error}"
        ) from error
    if not chosen:
        raise ConfigError(f"--only: no program's name has {only!r} in it")
    plan = Plan(config, topology, shapes, [], len(programs), command)
    known: dict[int, Figures] = {}
    for i, program in enumerate(chosen, 1):
        if (same := known.get(id(program.lower))) is None:
            figures = _figures(program, topology, shapes, f"{i} of {len(chosen)}")
        else:  # evaluation has programs of rollouts
            figures = dataclasses.replace(same, name=program.name, part=program.part)
        known[id(program.lower)] = figures
        plan.programs.append(figures)
        plan.left_out = len(programs) - len(plan.programs)
        if file is not None:  # compilation may take hours
            plan.write(file)
    return plan


def _figures(program: Program, topology: Topology, shapes: Shapes, which: str) -> Figures:
    if topology.compiler is None:
        return counted(program, shapes)
    print(f"{which}: compiling {program.name} ..", end="", file=sys.stderr, flush=True)
    figures = compiled(program)
    refused = f", REFUSED: {figures.failed}" if figures.failed else ""
    print(f" {figures.seconds:.1f} s{refused}", file=sys.stderr, flush=True)
    return figures


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


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a plan; returns the status to exit with, 0 or `DOES_NOT_FIT`."""
    given = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "-m", "train.plan", *map(str, given)])
    cfg, call = parse_config(RLConfig, argv, "train.plan", "What a run needs of chips.", PlanCall)
    try:
        memory = None if call.memory is None else 1e9 * call.memory
        topology = find_topology(call.topology, memory, call.count)
        config, file = call.config or "the defaults", call.json and Path(call.json)
        plan = make_plan(cfg, topology, call.only, config, file, command)
    except USER_ERRORS as error:
        sys.exit(f"train.plan: error: {error}")
    print("\n".join(lines(plan)))
    return 0 if plan.fits else DOES_NOT_FIT


if __name__ == "__main__":
    interrupts.run(main)
