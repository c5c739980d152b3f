"""Gives plain decoding a program of its own in `invariant` mode, where it has the same bits.

In that mode all strategies share the program of one tree, which makes plain decoding as slow as
the tree. Where rows lie in blocks (`Runner.own_plain`), plain decoding and the tree have products
of one shape, and attention computes each row alone: the two programs compute the same of a row.

Whether the compiler rounds it alike is found out at the start, on the device: both programs decode
plainly from the same new state, several chunks in a row, and every token and log-probability is
compared, to the bit. The order of sums does not depend on the numbers, so that another order would
show in some of them. Only features for which nothing differs get the program; for others plain
decoding goes on by the tree's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Several

import numpy as np

from specjax.control import OFF
from specjax.decode.chunk import Result
from specjax.decode.options import Features
from specjax.engine.graph_check import run_chunks
from specjax.engine.runner import Runner

log = logging.getLogger(__name__)


def check_plain(runner: Runner, features: Several[Features]) -> None:
    """Sets `Runner.exact_plain`; compiles a program for each set of features, resets the state.

    Args:
      features: sets for which the programs of other strategies are compiled.
    """
    if runner.own_plain is None:
        return
    for each in features:
        if each in runner.exact_plain:
            continue
        shared = run_chunks(runner, OFF, runner.batch, each)
        runner.exact_plain.add(each)
        found = _differing(runner, shared, run_chunks(runner, OFF, runner.batch, each))
        if found is not None:
            runner.exact_plain.remove(each)
            runner.executables.by_key.pop(("chunk", OFF, runner.batch, each))
            log.info("invariant: plain decoding runs the program of the tree, for %s", found)
        else:
            log.info("invariant: plain decoding runs a program of its own, which gives equal bits")
    runner.reset()


def _differing(runner: Runner, shared: Several[Result], own: Several[Result]) -> str | None:
    """What differs between chunks of the two programs; None: no bit does."""
    for number, (one, other) in enumerate(zip(shared, own, strict=True), 1):
        pairs = {
            "tokens": (one.tokens, other.tokens),
            "lengths": (one.length, other.length),
            "log-probabilities": (one.report.logprobs, other.report.logprobs),
            "processed log-probabilities": (one.report.transformed, other.report.transformed),
        }
        for name, (a, b) in pairs.items():
            if a is None:
                continue
            if a.ndim > 1:  # the tree's program has room for more tokens
                a, b = (x[:, : min(a.shape[1], b.shape[1])] for x in (a, b))
            valid = _emitted(one, a.shape[1]) if a.ndim > 1 else np.ones(a.shape, bool)
            wrong = (a.view(np.uint32) != b.view(np.uint32)) & valid
            if wrong.any():
                return f"{wrong.sum()} of {valid.sum()} {name} of chunk {number} have other bits"
    return None


def _emitted(result: Result, width: int) -> np.ndarray:
    """Which entries of [sequences width] are of tokens that the chunk emitted."""
    count = result.report.counts.sum(axis=0)
    return np.arange(width) < count[:, None]
