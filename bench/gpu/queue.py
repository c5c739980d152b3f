"""Runs the parts that are not measured yet, one after the other, as far as there is time.

Each part runs in a process of its own, `python -m bench.gpu.queue '<task as JSON>'`: where a kernel
hangs or the driver fails, that process ends and the other parts go on.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from bench.gpu import records
from bench.gpu.job import Job
from bench.gpu.program import SHARE, short_name
from bench.gpu.table import PARTS, Part
from bench.record import figure, result_of, write_json

RESERVE = 10.0  # seconds of a call that no part gets, for what lies around them
REAP = 30.0  # seconds that a killed process has to be gone
CACHE_BYTES = 12_000_000  # of compiled programs that are kept for the next call, for each card


class Call(NamedTuple):
    """What was asked for.

    Attributes:
      out: directory of the records. minutes: for everything. parts: to choose from.
      again: names of parts that are run although they have a record.
      small: sizes for a CPU. seed: of weights and prompts.
    """

    out: str
    minutes: float
    parts: Sequence[Part] = PARTS
    again: Sequence[str] = ()
    small: bool = False
    seed: int = 0


def card_here(small: bool) -> str:
    """The short name of this machine's card.

    Raises:
      ValueError: there is no GPU, and sizes are not small.
    """
    if small:
        jax.config.update("jax_platforms", "cpu")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # here; the parts want the memory
    backend = jax.default_backend()
    if backend not in ("gpu", "cuda") and not small:
        raise ValueError(
            f"expected a GPU, got platform {backend!r}; run it on a machine that has one, with "
            "jax[cuda13], or try it out on a CPU with --small, --dry or --status"
        )
    return short_name(jax.devices()[0].device_kind)


def run(call: Call) -> int:
    """Measures what is next; 1 if a part failed.

    Raises:
      ValueError: there is no GPU; or another call runs on the same records.
    """
    end = time.monotonic() + 60 * call.minutes - RESERVE
    card, status = card_here(call.small), 0
    with _alone(records.directory(call.out)), _ended_by_signals():
        # What was measured in part for want of time comes after what was not measured at all.
        again = [part for part in call.parts if _wants_time(call, part, card)]
        first = [part for part in call.parts if part not in again]
        for part in (*first, *again):
            attempt = 1 if part in again else _attempt(call, part, card)
            if attempt is None:
                continue
            left = end - time.monotonic()
            if part.seconds > left:
                need = f"it may take {part.seconds:.0f} s, and {max(left, 0):.0f} s are left"
                print(f"--- {part.name}: not started: {need}", flush=True)
                continue
            print(f"--- {part.name} on {card}: at most {part.seconds:.0f} s", flush=True)
            status |= not _run_part(call, part, card, attempt)
    return int(status)


def _wants_time(call: Call, part: Part, card: str) -> bool:
    """Whether the part was short of time, and has no run that was interrupted."""
    if part.name in call.again or records.path_of(call.out, part.name, card, True).exists():
        return False
    record = records.read(records.path_of(call.out, part.name, card))
    return record is not None and records.wants_time(record)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another call of bench.gpu runs on the records in {directory}; wait for its end, "
                "or give this one another --out"
            ) from None
        yield


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM to this process ends its part as well, which is in a session of its own."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _attempt(call: Call, part: Part, card: str) -> int | None:
    """Which attempt at a part comes next; None where it is to be skipped.

    A part whose run was cut off, by the end of the call that ran it, is tried once more.
    """
    if part.name in call.again:
        return 1
    running = records.read(records.path_of(call.out, part.name, card, running=True))
    if running is not None:
        attempts = running["settings"]["attempt"]
        if attempts < records.ATTEMPTS:
            print(f"--- {part.name}: its run was cut off before; once more", flush=True)
            return attempts + 1
        why = f"its run was cut off {attempts} times; ask for it with --again {part.name}"
        records.finish(call.out, records.ended(running, "interrupted", why))
        print(f"--- {part.name}: skipped: {why}", flush=True)
        return None
    if records.read(records.path_of(call.out, part.name, card)) is not None:
        return None
    return 1


def _environment(part: Part, card: str, small: bool) -> dict[str, str]:
    """The environment variables of a part's process.

    Compiled programs are kept for the next call, by kind of card, as many as can be carried along;
    what was tuned for them lies beside them, where jax puts it. A cache of the user's own is taken
    as it is: what has no place in so small a cache would be thrown out of it.
    """
    env, own = dict(os.environ), dict(part.environment)
    env.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)  # it was for this process
    flags = env.get("XLA_FLAGS", ""), own.pop("XLA_FLAGS", "")
    env |= {**own, "XLA_FLAGS": " ".join(filter(None, flags))}
    if "JAX_COMPILATION_CACHE_DIR" not in env:
        env["JAX_COMPILATION_CACHE_DIR"] = str(Path(".cache/gpu", card).absolute())
        env["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(CACHE_BYTES)
    env.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if small:
        return env | {"JAX_PLATFORMS": "cpu"}
    if env.get("JAX_PLATFORMS"):  # some references are computed on the host
        env["JAX_PLATFORMS"] = ",".join(dict.fromkeys([*env["JAX_PLATFORMS"].split(","), "cpu"]))
    env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(SHARE))
    return env


def _run_part(call: Call, part: Part, card: str, attempt: int) -> bool:
    """Runs a part in a process of its own, which is killed when its time is over.

    Returns:
      whether all went well.
    """
    task = {
        "part": part.name,
        "module": part.module,
        "settings": dict(part.settings),
        "card": card,
        "out": str(call.out),
        "seconds": part.seconds,
        "attempt": attempt,
        "small": call.small,
        "seed": call.seed,
    }
    running = records.path_of(call.out, part.name, card, running=True)
    settings = {name: task[name] for name in ("part", "card", "attempt", "seconds", "small")}
    begun = result_of(f"gpu/{part.name}", settings, {"outcome": figure(records.RUNNING, "")})
    write_json(begun, running)  # the attempt counts, whatever becomes of it
    place = records.path_of(call.out, part.name, card)
    before, code = records.read(place), None
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.gpu.queue", json.dumps(task)],
        env=_environment(part, card, call.small),
        stdin=subprocess.PIPE,  # its end tells the part that this process is gone
        start_new_session=True,
    )
    try:
        code = process.wait(part.seconds)
        word, why = "failed", _describe(code)
    except subprocess.TimeoutExpired:
        word, why = "timed out", f"it was ended after its {part.seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # all that it began, too
        _reap(part, process)
    left_behind = records.read(running)
    if left_behind is None:
        # It came to its end, and its record says how, even if its process did not end well. Where
        # an older record was kept, the exit status is all that is known.
        after = records.read(place)
        return code == 0 if after == before else records.ok(after)
    records.finish(call.out, records.ended(left_behind, word, why))  # it did not come to its end
    print(f"--- {part.name}: {word}: {why}", flush=True)
    return False


def _reap(part: Part, process: subprocess.Popen) -> None:
    """Waits for a process that was killed, for a while: a driver may keep it."""
    try:
        process.wait(REAP)
    except subprocess.TimeoutExpired:
        line = f"its process {process.pid} was killed and is still there after {REAP:.0f} s"
        print(f"--- {part.name}: {line}; the next part is begun beside it", flush=True)


def _describe(code: int) -> str:
    if code < 0:
        more = ", as the system does when memory is short" if code == -signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(-code).name}{more}"
    return f"its process ended with exit status {code}"


# --- the process of a part ------------------------------------------------------------------------


def _end_with_parent() -> None:
    """Ends this process and those that it started when the process that started it has ended.

    The parent holds the other end of this one's standard input. Without this, a part would go on
    computing beside one of the next call.
    """

    def watch() -> None:
        # Not `sys.stdin`: Python could not close it while this thread waits.
        while os.read(0, 4096):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Runs the part that the command line describes as JSON, see `_run_part`."""
    _end_with_parent()
    task = json.loads(sys.argv[1])
    module, settings = task.pop("module"), task.pop("settings")
    job = Job(**task)
    ok = job.run(functools.partial(_measure, Part(job.part, "", module), settings))
    sys.exit(0 if ok else 3)


def _measure(part: Part, settings: dict, job: Job) -> None:
    part.load().measure(job, **settings)


if __name__ == "__main__":
    main()
