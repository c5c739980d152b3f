"""Verifiable rewards: `reward(response_text, answer) -> float`, found by name.

Names: `exact`, `number`, `math_verify`, or a dotted path `package.module:function` to your own.
The final answer of a response is what follows its last `####`, up to the end of that line.

`math_verify` runs sympy on text that a policy wrote, which may take forever (`9**9**9**9`) inside
one call that no signal interrupts. So it runs in a child process that is killed when time is up;
`python -m train.rewards` is that child, and speaks one JSON line per request.
"""

import atexit
import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

Reward = Callable[[str, str], float]

ANSWER_MARK = "####"
MATH_VERIFY_SECONDS = 10.0
_MATH_VERIFY_START_SECONDS = 120.0
_MATH_VERIFY_TAIL = 2000  # characters; longer text holds no answer worth a parser's time

_NUMBER = re.compile(
    r"(?:(?P<sign>[-+]?)\s*\$?|\$\s*(?P<inner>[-+]))\s*(?P<digits>\d+(\.\d*)?|\.\d+)\s*[%$]?\s*\.?",
    re.ASCII,
)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def extract_answer(text: str) -> str | None:
    """The rest of the line after the last `####`, stripped; None if there is no such mark."""
    _, mark, rest = text.rpartition(ANSWER_MARK)
    if not mark:
        return None
    lines = rest.strip().splitlines()
    return lines[0].strip() if lines else ""


def parse_number(text: str) -> Decimal | None:
    """Reads `1,234`, `$ 5.50`, `-$3`, `40%` or `7.` as a number; None if it is anything else."""
    match = _NUMBER.fullmatch(_THOUSANDS.sub("", text.strip()))
    if match is None:
        return None
    return Decimal((match["sign"] or match["inner"] or "") + match["digits"])


def exact(response_text: str, answer: str) -> float:
    """1.0 if the text after the last `####` is the answer, character for character."""
    found = extract_answer(response_text)
    return float(found is not None and found == _gold(answer))


def number(response_text: str, answer: str) -> float:
    """1.0 if the text after the last `####` is a number equal to the answer's, exactly.

    Thousands separators, `$`, `%`, spaces and a trailing period do not count.
    """
    found, wanted = parse_number(extract_answer(response_text) or ""), parse_number(_gold(answer))
    return float(found is not None and found == wanted)


def math_verify(response_text: str, answer: str) -> float:
    """1.0 if the math-verify library finds the response's answer equivalent to the given one.

    The response's answer is what follows the last `####`, or else whatever the library extracts
    from the whole text (`\\boxed{}`, `$...$`, the last number). Two plain numbers that are equal
    need no library. What cannot be parsed, fails or takes too long earns 0.0; nothing is raised
    for the response's sake.

    Raises:
      ModuleNotFoundError: the library is not installed.
    """
    found, gold = extract_answer(response_text), _gold(answer)
    if number(response_text, gold):
        return 1.0
    text = (response_text if found is None else found)[-_MATH_VERIFY_TAIL:]
    return float(bool(text.strip()) and _MATH_WORKER.equivalent(text, gold))


REWARDS: dict[str, Reward] = {"exact": exact, "number": number, "math_verify": math_verify}


def get_reward(name: str) -> Reward:
    """Finds a reward by its name or by dotted path `module:function`.

    Raises:
      ValueError: unknown name, or a path that leads to nothing callable.
    """
    if name in REWARDS:
        return REWARDS[name]
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ValueError(
            f"unknown reward {name!r}; choose one of {', '.join(REWARDS)}, or give your own as "
            "'package.module:function'"
        )
    try:
        reward = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"cannot load reward {name!r}: {error}; expected an importable module (check the "
            "working directory and PYTHONPATH) with a function of that name"
        ) from error
    if not callable(reward):
        raise ValueError(
            f"reward {name!r} is a {type(reward).__name__}; expected a function "
            "(response_text: str, answer: str) -> float"
        )
    return reward


def _gold(answer: str) -> str:
    found = extract_answer(answer)
    return answer.strip() if found is None else found


class _MathWorker:
    """A child process that compares expressions; started on first use, restarted after a kill."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def equivalent(self, text: str, gold: str) -> bool:
        with self._lock:
            if self._process is None:
                self._start()
            reply = self._ask({"text": text, "gold": gold}, MATH_VERIFY_SECONDS)
            if reply is None:
                self.close()
            return reply == "true"

    def _start(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ModuleNotFoundError(
                "reward 'math_verify' needs the math-verify package; install it, or use the "
                "reward 'number'"
            )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "train.rewards"],
            cwd=Path(__file__).resolve().parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        # Imports take seconds on a busy machine and must not be charged to the first answer.
        if self._ask({"text": "1", "gold": "1"}, _MATH_VERIFY_START_SECONDS) != "true":
            self.close()
            raise RuntimeError(
                f"the math-verify process gave no answer within {_MATH_VERIFY_START_SECONDS:.0f} s "
                f"of its start; run `{sys.executable} -m train.rewards` to see why"
            )

    def _ask(self, request: dict[str, str], seconds: float) -> str | None:
        process, expired = self._process, threading.Event()

        def expire():
            expired.set()
            process.kill()

        alarm = threading.Timer(seconds, expire)
        alarm.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            reply = process.stdout.readline().strip()
        except OSError:  # the pipe breaks when the process was killed or died
            reply = ""
        alarm.cancel()
        alarm.join()
        return None if expired.is_set() else reply or None

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


_MATH_WORKER = _MathWorker()
atexit.register(_MATH_WORKER.close)


def _serve_math_verify() -> None:
    """The child: one JSON request per line in, `true` or `false` per line out."""
    import logging

    from math_verify import parse, verify

    # The library warns once per call that timeouts are off; the parent is the timeout.
    logging.disable(logging.WARNING)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            gold = parse(request["gold"], parsing_timeout=None)
            found = parse(request["text"], parsing_timeout=None)
            same = bool(gold and found and verify(gold, found, timeout_seconds=None))
        except Exception:  # any text may come in, and none of it may end the process
            same = False
        print(json.dumps(same), flush=True)


if __name__ == "__main__":
    _serve_math_verify()
