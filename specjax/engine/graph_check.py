"""Compares chunks that are one CUDA graph with the same chunks as plain programs, at the start.

It runs the programs that were compiled in both ways (`Executables.twins`): of every strategy and
set of features the first, which is that of the smallest bucket. Programs of other buckets consist
of the same operations at other sizes and get the same options; they are run once, so that one that
fails is noticed, but their results are compared with nothing.

Both programs run several chunks in a row from the same new state. The first chunk records a graph,
later ones update and launch it. Within them some sequences end, and waiting ones take their rows
over, so that all loops of a chunk run. Everything that the host reads is compared, to the bit.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from specjax.config import SamplingParams
from specjax.decode.chunk import Result, Until
from specjax.decode.options import Features
from specjax.decode.state import RowMap
from specjax.engine.compiling import described, first_line
from specjax.engine.inputs import admission_of
from specjax.engine.pages import pages_for
from specjax.engine.request import make_jobs
from specjax.engine.runner import Runner
from specjax.engine.scheduler import Start
from specjax.engine.sequence import Sequence

CHUNKS = 3  # chunks in a row
ROUNDS = 24  # the most rounds of each
WAITING = 2  # sequences beyond the bucket, which take over rows


def check_graphs(runner: Runner) -> None:
    """Turns graphs off where they give other results, or fail; overwrites the state.

    Afterwards `Executables.forget_twins` must be called.
    """
    executables = runner.executables
    for key, plain in executables.twins.items():
        graph = executables.by_key[key]
        try:
            executables.by_key[key] = plain
            wanted = _run(runner, key)
            executables.by_key[key] = graph
            reason = _difference(wanted, _run(runner, key, graph=True))
        finally:
            executables.by_key[key] = graph
        if reason is not None:
            executables.graphs.stop(f"{described(key)} {reason}")
            return


def _run(runner: Runner, key: tuple, graph: bool = False) -> list[Result] | str:
    """Runs several chunks by the executable of `key`, from a new state.

    Args:
      graph: whether an error of the program is returned, as text; else it is raised.
    """
    _, program, bucket, features = key
    served = [name for name, run in runner.strategies.items() if run.program == program]
    strategy = max(served, key=lambda name: runner.plans[name].steps)
    try:
        return run_chunks(runner, strategy, bucket, features)
    except jax.errors.JaxRuntimeError as error:
        if not graph:
            raise
        runner.state = runner.kept = None
        return f"fails: {first_line(error)}"


def run_chunks(runner: Runner, strategy: str, bucket: int, features: Features) -> list[Result]:
    """Runs several chunks of a strategy from a new state."""
    runner.reset()
    sequences, each = _sequences(runner, strategy, bucket, features)
    for sequence in sequences:
        runner.place(admission_of([Start(sequence, 0)], 1, runner))
    jax.block_until_ready(runner.state)
    count, spare = len(sequences), runner.slots - 1
    slots = np.full(bucket + runner.extra_slots, spare, np.int32)
    slots[:count] = np.arange(count)
    table = np.zeros((len(slots), runner.table_width), np.int32)
    table[:count, :each] = 1 + np.arange(count * each).reshape(count, each)
    row_map = RowMap(slots, np.arange(len(slots)) < count, table)
    until = Until.of(_rounds(runner, strategy, bucket))
    return [runner.chunk(strategy, features, row_map, until).open() for _ in range(CHUNKS)]


def _rounds(runner: Runner, strategy: str, bucket: int) -> int:
    return min(ROUNDS, runner.rounds(strategy, bucket))


def _sequences(
    runner: Runner, strategy: str, bucket: int, features: Features
) -> tuple[list[Sequence], int]:
    """Sequences of one token that end at different lengths, and the number of pages of each."""
    pages, size = runner.pages - 1, runner.page_size
    count, rounds = min(bucket + WAITING, pages), _rounds(runner, strategy, bucket)
    most = min(1 + CHUNKS * rounds * (runner.steps + 1), runner.max_len)
    each = min(pages_for(most, size), pages // count)
    # The first one ends in the first chunk, and a waiting one takes its row over.
    first, longest = 1 + max(1, rounds // 2), min(most, each * size)
    # Filters that the program has do something.
    asked = {"top_p": 0.9, "top_k": 20, "min_p": 0.01}
    options = {name: value for name, value in asked.items() if getattr(features, name)}
    params = SamplingParams(temperature=1.0, max_tokens=None, n=count, ignore_eos=True, **options)
    found = []
    for slot, job in enumerate(make_jobs([0], params, ())):
        limit = min(first + slot * max(longest - first, 0) // max(count - 1, 1), longest)
        sequence = Sequence(dataclasses.replace(job, limit=limit), runner.steps)
        sequence.slot = slot
        found.append(sequence)
    return found, each


def _difference(wanted: list[Result], got: list[Result] | str) -> str | None:
    """What differs between the chunks of a plain program and of one graph; None: nothing."""
    if isinstance(got, str):
        return got
    for number, (plain, graph) in enumerate(zip(wanted, got, strict=True), 1):
        for name, a, b in zip(Result._fields, plain, graph, strict=True):
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
                if x.tobytes() != y.tobytes():
                    where = np.flatnonzero(_bytes(x) != _bytes(y)) // x.dtype.itemsize
                    others = len(np.unique(where))
                    return (
                        f"gives other results than without graphs: {others} of {x.size} values of "
                        f"{name!r} in chunk {number} of {CHUNKS}"
                    )
    return None


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.frombuffer(x.tobytes(), np.uint8)
