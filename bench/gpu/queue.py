"""Runs the parts that are not measured yet, one after the other, while there is time.

Each part runs in a process of its own, `python -m bench.gpu.queue '<task as JSON>'`, so that a
kernel that hangs or a driver that fails ends one part only.
"""

from __future__ import annotations

import contextlib
import fcntl
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

RESERVE = 10.0  # seconds of a call that are not given to parts
REAP = 30.0  # seconds to wait for the end of a killed process
CACHE_BYTES = 10_000_000  # bytes of compiled programs kept for the next call, for each card


class Call(NamedTuple):
    """The arguments of one call of `python -m bench.gpu`.

    Attributes:
      out: directory of the records.
      minutes: time limit of the call.
      parts: parts to choose from.
      again: names of parts that are run although they have a record.
      small: whether to use tiny sizes, for a CPU.
      seed: seed of weights and prompts.
    """

    out: str
    minutes: float
    parts: Sequence[Part] = PARTS
    again: Sequence[str] = ()
    small: bool = False
    seed: int = 0


def card_here(small: bool) -> str:
    """Returns the short name of this machine's card.

    Raises:
      ValueError: there is no GPU, and sizes are not small.
    """
    if small:
        jax.config.update("jax_platforms", "cpu")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the parts need the memory
    backend = jax.default_backend()
    if backend not in ("gpu", "cuda") and not small:
        raise ValueError(
            f"expected a GPU, got platform {backend!r}; run it on a machine that has one, with "
            "jax[cuda13], or try it out on a CPU with --small, --dry or --status"
        )
    return short_name(jax.devices()[0].device_kind)


def run(call: Call) -> int:
    """Runs the parts; returns 1 if one failed, else 0.

    Raises:
      ValueError: there is no GPU; or another call runs on the same records.
    """
    end = time.monotonic() + 60 * call.minutes - RESERVE
    card, status = card_here(call.small), 0
    with _alone(records.directory(call.out)), _ended_by_signals():
        # Parts that were short of time run after those that were not measured at all.
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
    """Returns whether the part was short of time and has no interrupted run."""
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
    """Ends the running part, which is in a session of its own, when this process gets SIGTERM."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _attempt(call: Call, part: Part, card: str) -> int | None:
    """Returns the number of a part's next attempt; None: it is skipped.

    A part whose run was interrupted by the end of the call runs once more.
    """
    if part.name in call.again:
        return 1
    running = records.read(records.path_of(call.out, part.name, card, running=True))
    if running is not None:
        attempts = running["settings"]["attempt"]
        if attempts < records.ATTEMPTS:
            print(f"--- {part.name}: its run was interrupted; it runs once more", flush=True)
            return attempts + 1
        why = f"its run was interrupted {attempts} times; run it by --again {part.name}"
        records.finish(call.out, records.ended(running, "interrupted", why))
        print(f"--- {part.name}: skipped: {why}", flush=True)
        return None
    if records.read(records.path_of(call.out, part.name, card)) is not None:
        return None
    return 1


def _environment(part: Part, card: str, small: bool) -> dict[str, str]:
    """Returns the environment variables of a part's process.

    Compiled programs and their tuning are cached for the next call, by card, up to a size that is
    small enough to transfer. A cache directory of the user's own is used without that limit, which
    would evict other programs from it.
    """
    env, own = dict(os.environ), dict(part.environment)
    env.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)  # set for this process only
    flags = env.get("XLA_FLAGS", ""), own.pop("XLA_FLAGS", "")
    env |= {**own, "XLA_FLAGS": " ".join(filter(None, flags))}
    if "JAX_COMPILATION_CACHE_DIR" not in env:
        env["JAX_COMPILATION_CACHE_DIR"] = str(Path(".cache/gpu", card).absolute())
        env["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(CACHE_BYTES)
    env.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if small:
        return env | {"JAX_PLATFORMS": "cpu"}
    if env.get("JAX_PLATFORMS"):  # references are computed on the host
        env["JAX_PLATFORMS"] = ",".join(dict.fromkeys([*env["JAX_PLATFORMS"].split(","), "cpu"]))
    env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(SHARE))
    return env


def _run_part(call: Call, part: Part, card: str, attempt: int) -> bool:
    """Runs a part in a process of its own, which is killed after its time limit.

    Returns:
      whether it succeeded.
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
    write_json(begun, running)  # the attempt counts, however it ends
    place = records.path_of(call.out, part.name, card)
    before, code = records.read(place), None
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.gpu.queue", json.dumps(task)],
        env=_environment(part, card, call.small),
        stdin=subprocess.PIPE,  # the part ends itself when this pipe is closed
        start_new_session=True,
    )
    try:
        code = process.wait(part.seconds)
        word, why = "failed", _describe(code)
    except subprocess.TimeoutExpired:
        word, why = "timed out", f"it was killed after its {part.seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its children too
        _reap(part, process)
    left_behind = records.read(running)
    if left_behind is None:
        # The part ended, and its record has the outcome, even if the process failed afterwards. If
        # an older record was kept, only the exit status is known.
        after = records.read(place)
        return code == 0 if after == before else records.ok(after)
    records.finish(call.out, records.ended(left_behind, word, why))  # the part did not end itself
    print(f"--- {part.name}: {word}: {why}", flush=True)
    return False


def _reap(part: Part, process: subprocess.Popen) -> None:
    """Waits up to `REAP` seconds for the end of a killed process, which a driver may delay."""
    try:
        process.wait(REAP)
    except subprocess.TimeoutExpired:
        line = f"its process {process.pid} was killed and still exists after {REAP:.0f} s"
        print(f"--- {part.name}: {line}; the next part starts beside it", flush=True)


def _describe(code: int) -> str:
    if code < 0:
        more = ", which the system sends when memory is short" if code == -signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(-code).name}{more}"
    return f"its process ended with exit status {code}"


# --- the process of a part ------------------------------------------------------------------------


def _end_with_parent() -> None:
    """Ends this process and its children when its parent has ended.

    The parent holds the other end of this process's standard input. Otherwise a part could still
    run beside one of the next call.
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
    part = Part(job.part, "", module)
    ok = job.run(lambda job: part.load().measure(job, **settings))  # errors of the import count too
    sys.exit(0 if ok else 3)


if __name__ == "__main__":
    main()
