"""Gives plain decoding a program of its own in `invariant` mode, where it has the same bits.

In that mode all strategies share the program of one tree, which makes plain decoding as slow as
the tree. Where rows lie in blocks (`Runner.own_plain`), plain decoding and the tree have products
of one shape, and attention computes each row alone: the two programs compute the same of a row.

Whether the compiler rounds it alike is found out at the start, on the device. From the same new
state both programs decode plainly, several chunks in a row, and the tree's program drafts as well,
by the strategy with the most steps. Every token and log-probability of its own program is compared
with both, to the bit; with the one that drafts as far as both have come. The order of sums does not
depend on the numbers, so that another order would show in some of them. Only features for which
nothing differs get the program; for others, and where it fails, plain decoding goes on by the
tree's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Several

import jax
import numpy as np

from specjax.control import OFF
from specjax.decode.chunk import Result
from specjax.decode.options import Features
from specjax.engine.graph_check import run_chunks
from specjax.engine.runner import Runner
from specjax.error_text import first_line

log = logging.getLogger(__name__)


def served_by(runner: Runner, features: Features) -> Features:
    """The features of the shared program that serves `features`, see `Runner.program_of`."""
    shared = runner.strategies[OFF].program
    return runner.executables.covering(shared, runner.batch, features)


def check_plain(runner: Runner, features: Several[Features]) -> None:
    """Sets `Runner.exact_plain`, and resets the state; compiles what is not compiled yet.

    Args:
      features: sets for which the programs of other strategies are compiled.
    """
    own = runner.own_plain
    if own is None:
        return
    for each in dict.fromkeys(served_by(runner, each) for each in features):
        if each in runner.exact_plain:
            continue
        reason = _why_not(runner, each)
        if reason is None:
            runner.exact_plain.add(each)
            log.info("invariant: plain decoding runs a program of its own, which gives equal bits")
        else:
            runner.executables.by_key.pop(("chunk", own.program, runner.batch, each), None)
            log.info("invariant: plain decoding runs the program of the tree, for %s", reason)
    runner.reset()


def _why_not(runner: Runner, features: Features) -> str | None:
    """Why plain decoding's own program cannot be used for features; None: it can."""
    longest = max(runner.plans, key=lambda name: runner.plans[name].steps)
    shared = run_chunks(runner, OFF, runner.batch, features)
    drafted = run_chunks(runner, longest, runner.batch, features)
    try:
        own = run_chunks(runner, OFF, runner.batch, features, runner.own_plain)
    except jax.errors.JaxRuntimeError as error:
        return f"its own fails: {first_line(error)}"
    if any(not np.array_equal(a.length, b.length) for a, b in zip(shared, own, strict=True)):
        return "samples have other lengths than the tree's"
    return _differing(shared, own, "plain") or _differing(drafted, own, longest)


_VALUES: dict[str, Callable[[Result], np.ndarray | None]] = {
    "tokens": lambda result: result.tokens,
    "log-probabilities": lambda result: result.report.logprobs,
    "processed log-probabilities": lambda result: result.report.transformed,
}


def _differing(shared: Several[Result], own: Several[Result], how: str) -> str | None:
    """What differs between chunks of the two programs, as far as both have come; None: no bit does.

    Args:
      how: name of the strategy of the shared program.
    """
    for name, values in _VALUES.items():
        if values(own[0]) is None:
            continue
        wrong = total = 0
        for a, b in zip(_emitted(shared, values), _emitted(own, values), strict=True):
            both = min(len(a), len(b))
            total += both
            wrong += int((a[:both].view(np.uint32) != b[:both].view(np.uint32)).sum())
        if wrong:
            return f"{wrong} of {total} {name} have other bits than the tree's ({how})"
    return None


def _emitted(results: Several[Result], values: Callable) -> list[np.ndarray]:
    """The values of all tokens that chunks in a row emitted, of each sequence."""
    counts = [result.report.counts.sum(axis=0) for result in results]
    return [
        np.concatenate([values(r)[i, : n[i]] for r, n in zip(results, counts, strict=True)])
        for i in range(len(counts[0]))
    ]
