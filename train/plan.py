"""`python -m train.plan --config C --topology v5e:8x8`: will it fit, and how fast could it be?

Lowers the very programs that `train.rl` would run with this configuration (a micro-batch and the
optimizer's step of policy and head, handing over the weights, prefill, placement, and a chunk for
every strategy and batch size), compiles each for the named topology, and prints a table of what
they need. Neither the chips nor the weights have to be there, only the model's config.json.

Times are rooflines: what a chip could do at its peaks. They are lower bounds, and tokens per second
that follow from them upper bounds; measure before you believe them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from specjax.command_line import ConfigError, parse_config
from train.cli import USER_ERRORS
from train.plan_cost import Figures, compiled, counted
from train.plan_programs import Program, Shapes
from train.plan_report import Plan, lines
from train.plan_topology import Topology, find_topology
from train.schema import RLConfig


def make_plan(
    cfg: RLConfig,
    topology: Topology,
    only: str = "",
    config: str = "defaults",
    file: str | None = None,
) -> Plan:
    """Lowers and compiles everything.

    Args:
      only: a regular expression; programs whose names it is not found in are left out.
      config: the file's name, for the table.
      file: gets the figures as JSON, those known so far whenever a program is done.

    Raises:
      ConfigError: the settings do not fit together, or ask for more chips than there are.
    """
    if topology.compiler == "tpu" and 1 in (cfg.mesh.size, cfg.rollout_devices):
        raise ConfigError(
            "programs for a topology are laid out by meshes, and one of mesh and rollout asks for "
            f"a single device; use more of {topology.name}"
        )
    shapes = Shapes(cfg, topology.devices, topology.for_replica(cfg.rollout.tp))
    wanted = re.compile(only)
    plan = Plan(config, topology, shapes, [])
    for program in shapes.programs():
        if not wanted.search(program.name):
            plan.left_out += 1
            continue
        plan.programs.append(_figures(program, topology, shapes))
        if file:  # compilers may take hours
            plan.write(file)
    if not plan.programs:
        raise ConfigError(f"--only: no program's name has {only!r} in it")
    return plan


def _figures(program: Program, topology: Topology, shapes: Shapes) -> Figures:
    if topology.compiler is None:
        return counted(program, shapes)
    print(f"compiling {program.name} ..", end="", file=sys.stderr, flush=True)
    found = compiled(program)
    print(f" {found.seconds:.1f} s", file=sys.stderr, flush=True)
    return found


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topology", required=True, help="v5e:8x8, v5p:4x4x4, v6e:4x4, h100:8, h200:8, or cpu:8"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="of the programs' names")
    parser.add_argument("--chip", help="compare with this chip in place of the topology's")
    parser.add_argument("--memory", type=float, metavar="GB", help="HBM per chip, in its place")
    parser.add_argument(
        "--count", action="store_true", help="ask no compiler: count from shapes, in seconds"
    )
    parser.add_argument("--json", metavar="FILE", help="also write every figure there")


def main(argv: Sequence[str] | None = None) -> Plan:
    cfg, flags = parse_config(
        RLConfig, argv, "train.plan", "What a run needs of chips.", _add_arguments
    )
    try:
        memory = None if flags.memory is None else 1e9 * flags.memory
        topology = find_topology(flags.topology, flags.chip, memory, flags.count)
        plan = make_plan(cfg, topology, flags.only, flags.config or "the defaults", flags.json)
    except USER_ERRORS as error:
        sys.exit(f"train.plan: error: {error}")
    print("\n".join(lines(plan)))
    return plan


if __name__ == "__main__":
    main()
