"""`python -m uneven_hosts`: `train.rl` in a process whose clock says other things than its peers'.

By turns plain decoding takes long, or drafting does; in every second process it is the other way
round, and compiling takes longer. Programs that are ready run in the place of others, unlike in
other runs. What the controllers choose is noted in `out`, one file per process.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax

from specjax.control.base import OFF, Controller
from specjax.engine import start_up
from specjax.engine.chunks import InFlight
from specjax.engine.programs import Executables
from train import rl
from train.rollout_schema import RolloutSection

TURN = 8  # chunks after which a process finds dear what was cheap


def main() -> None:
    measure, select, choices, chunks = InFlight.wait_for, Controller.select, [], [0]

    def uneven(in_flight, chunk):
        result, _ = measure(in_flight, chunk)
        chunks[0] += 1
        dear = (chunks[0] // TURN + jax.process_index()) % 2
        return result, 1.0 if (chunk.strategy == OFF) == (dear == 0) else 1e-3

    def noted(controller, *seen):
        name = select(controller, *seen)
        choices.append(name)
        return name

    build, configure = Executables._build, RolloutSection.engine_config

    def slow(*arguments):
        time.sleep(0.5 * jax.process_index())
        return build(*arguments)

    def step(trainer, made=rl.Trainer.step):
        metrics = made(trainer)
        trainer.engine.runner.executables.background.join()  # in the first step others stand in
        return metrics

    def standing_in(section):
        return dataclasses.replace(configure(section), stand_in=True)

    Executables._build, RolloutSection.engine_config = slow, standing_in
    InFlight.wait_for, Controller.select, rl.Trainer.step = uneven, noted, step
    # Costs that are measured at the start are small, however busy the machine is.
    start_up.time = SimpleNamespace(
        perf_counter=lambda: time.perf_counter() * 1e-3 * (1 + 9 * jax.process_index())
    )
    try:
        rl.main()
    finally:
        out = next(Path(arg[4:]) for arg in sys.argv if arg.startswith("out="))
        (out / f"choices-{jax.process_index()}.json").write_text(json.dumps(choices))


if __name__ == "__main__":
    main()
