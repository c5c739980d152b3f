"""Compares chunks that are one CUDA graph with the same chunks as plain programs, at the start.

It runs the programs that were compiled in both ways (`Executables.plain_forms`): of every strategy
and set of features the first, which is that of the smallest bucket. Programs of other buckets
consist of the same operations at other sizes and get the same options; they are run once, so that
one that fails is noticed, but their results are compared with nothing.

Both programs run several chunks in a row from the same new state. The first chunk records a graph,
later ones update and launch it. Within them some sequences end, and waiting ones take their rows
over, so that all loops of a chunk run. Requests set an option of each feature, so that its branch
is taken. Everything that the host reads is compared, to the bit.

The comparison supposes that a plain program gives equal bits whenever it runs. Where results
differ, that is tried: the plain program runs again. Graphs are turned off in either case, since
nothing has shown that they are right. The line in the log says which case it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from specjax.config import SamplingParams
from specjax.decode.chunk import Result, Until
from specjax.decode.options import Features
from specjax.decode.state import RowMap
from specjax.engine.compiling import described
from specjax.engine.inputs import admission_of
from specjax.engine.pages import pages_for
from specjax.engine.plans import StrategyProgram
from specjax.engine.request import make_jobs
from specjax.engine.runner import Runner
from specjax.engine.scheduler import Start
from specjax.engine.sequence import Sequence
from specjax.error_text import first_line

CHUNKS = 3  # chunks in a row
ROUNDS = 24  # the most rounds of each
WAITING = 2  # sequences beyond the bucket, which take over rows


def check_graphs(runner: Runner) -> None:
    """Turns graphs off where they give other results, or fail; overwrites the state.

    Afterwards `Executables.end_check` must be called.
    """
    executables = runner.executables
    for key, plain in executables.plain_forms.items():
        graph = executables.by_key[key]
        try:
            executables.by_key[key] = plain
            wanted = _run(runner, key)
            executables.by_key[key] = graph
            got = _run(runner, key, graph=True)
            reason = _difference(wanted, got)
            if reason is not None and not isinstance(got, str):
                executables.by_key[key] = plain
                if _difference(wanted, _run(runner, key)) is not None:
                    reason += "; two runs without graphs differ as well, so that this shows nothing"
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


def run_chunks(
    runner: Runner,
    strategy: str,
    bucket: int,
    features: Features,
    run: StrategyProgram | None = None,
) -> list[Result]:
    """Runs several chunks of a strategy from a new state.

    Args:
      run: as in `Runner.chunk`.
    """
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
    chunks = range(CHUNKS)
    return [runner.chunk(strategy, features, row_map, until, run).open() for _ in chunks]


def _rounds(runner: Runner, strategy: str, bucket: int) -> int:
    return min(ROUNDS, runner.rounds(strategy, bucket), runner.own_rounds(bucket))


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
    options = _options(runner, features, longest // 2)
    params = SamplingParams(seed=0, max_tokens=None, n=count, ignore_eos=True, **options)
    found = []
    for slot, job in enumerate(make_jobs([0], params, ())):
        limit = min(first + slot * max(longest - first, 0) // max(count - 1, 1), longest)
        sequence = Sequence(dataclasses.replace(job, limit=limit), runner.steps)
        sequence.slot = slot
        found.append(sequence)
    return found, each


def _options(runner: Runner, features: Features, least: int) -> dict[str, Any]:
    """Options of a request for each feature that a program has, so that all its branches are taken.

    Args:
      least: tokens before which a stop token is masked.
    """
    vocab = runner.cfg.vocab_size
    asked = {
        "top_k": {"top_k": 20},
        "top_p": {"top_p": 0.9},
        "min_p": {"min_p": 0.01},
        "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
        "bias": {"logit_bias": {0: 1.0}},
        "allowed": {"allowed_token_ids": tuple(range(vocab // 2 + 1))},
        "bad_words": {"bad_words": ((0,), (1, 2))},
        "min_tokens": {"min_tokens": least, "stop_token_ids": (1,)},
    }
    if not runner.stop_width:
        del asked["min_tokens"]
    return {k: v for name in features.names for k, v in asked.get(name, {}).items()}


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
