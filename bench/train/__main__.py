"""`python -m bench.train WHAT`: RL runs, compared with each other or recorded, and a head.

    run        one RL run, and its curves
    objectives GRPO, Dr.GRPO, GSPO and CISPO over several seeds
    verl_rows  GSM8K's rows in the layout of verl, which configs/dapo_gsm8k.yaml takes
    draft      a draft head before RL: held-out accept length against tokens trained on
    arms       plain rollouts, a frozen, an online and a random online draft head: are tokens,
               rewards and policies the same bits, and how fast is each
    schedule   rollouts that end early and go on in the next step, against steps that wait
    spot       draft training in the gaps of rollouts, against training after them

`WHAT --help` lists the settings. Each writes a result file below bench/results.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

DEVICES = "--xla_force_host_platform_device_count"
if __name__ == "__main__" and sys.argv[1:2] == ["spot"]:
    if DEVICES not in os.environ.get("XLA_FLAGS", ""):  # which jax reads when it is imported
        flags = f"{DEVICES}=2 --xla_cpu_multi_thread_eigen=false"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()

from bench.command import run_subcommand  # noqa: E402

FUNCTIONS = {
    "run": "bench.train.run:main",
    "objectives": "bench.train.objectives:main",
    "verl_rows": "bench.train.verl_rows:main",
    "draft": "bench.train.draft:main",
    "arms": "bench.train.arms:main",
    "schedule": "bench.train.schedule:main",
    "spot": "bench.train.spot:main",
}


def main(argv: Sequence[str] | None = None) -> None:
    run_subcommand("train", __doc__, FUNCTIONS, argv)


if __name__ == "__main__":
    main()
