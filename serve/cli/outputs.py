"""Output of samples as JSON lines, as texts in order, or as one text while it is generated."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve.cli import Failure, UsageError
from serve.cli.prompts import STDIN, Prompt

if TYPE_CHECKING:  # they import jax
    from specjax.engine.request import Job, SampleOutput

_SPECULATION = ("speculative", "n")  # options that change no token of a sample
EXACT = ("coupled", "greedy")  # acceptance modes with the tokens of plain decoding


def key_of(model: str, job: Job) -> str:
    """A hash of model, prompt and options; samples with equal keys and numbers are equal.

    Args:
      model: name of the model.
      job: the first sample of the request.
    """
    options = dataclasses.asdict(job.params)
    options = {name: value for name, value in options.items() if name not in _SPECULATION}
    text = json.dumps([model, list(job.prompt), job.words.tolist(), options], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def origin_of(llm, acceptance: str, drafts: str) -> dict[str, str]:
    """The weights, dtype and acceptance on which the samples of a call depend.

    Args:
      llm: the `LLM` that generates.
      acceptance: the acceptance mode.
      drafts: the draft source and its strategies, on which samples depend in modes that are equal
        to plain decoding in distribution only.
    """
    sums = llm.engine.runner.weights.checksums
    origin = {"weights": f"{sums['policy']:08x}", "dtype": llm.cfg.run.compute_dtype}
    if llm.spec is None or acceptance in EXACT:
        return {**origin, "acceptance": "exact"}
    draft = f", head {sums['draft']:08x}" if "draft" in sums else ""
    return {**origin, "acceptance": f"{acceptance}, {drafts}{draft}"}


def row_of(
    prompt: Prompt, job: Job, key: str, out: SampleOutput, origin: Mapping[str, str]
) -> dict[str, Any]:
    """The JSON line of a sample with its text."""
    stats = out.stats
    more = {"transformed_logprobs": out.transformed_logprobs, "top_logprobs": out.top_logprobs}
    content = {"messages": prompt.messages} if prompt.text is None else {"prompt": prompt.text}
    return {
        "index": prompt.index,
        "sample": job.sample,
        "seed": job.params.seed,
        **({} if prompt.id is None else {"id": prompt.id}),
        **content,
        "text": out.text,
        "finish_reason": out.finish_reason,
        "prompt_tokens": len(job.prompt),
        "token_ids": out.token_ids,
        "logprobs": out.logprobs,
        **{name: values for name, values in more.items() if values is not None},
        "accept_length": stats.accept_length if stats.rounds else None,
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "key": key,
        "origin": dict(origin),
    }


class JsonLines:
    """Writes one line per sample, and flushes it as soon as the sample has ended.

    Args:
      name: name of the file; `-` is standard output.
      resume: whether to continue an incomplete file.
      replace: whether to overwrite the file.

    Attributes:
      rows: the samples that the file has, by index and number of the sample.

    Raises:
      UsageError: the file is not empty and is neither resumed nor replaced, or it was not written
        by `specjax generate`.
    """

    def __init__(self, name: str, resume: bool = False, replace: bool = False):
        self._name = name
        self.rows: dict[tuple[int, int], dict[str, Any]] = {}
        if name == STDIN:
            self._file = sys.stdout
            return
        path = Path(name)
        try:
            if path.exists() and path.stat().st_size and not replace:
                if not resume:
                    raise UsageError(
                        f"--output {name} exists; --resume goes on with it, --force replaces it"
                    )
                self._read_samples(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w" if replace else "a", encoding="utf-8", newline="\n")
        except OSError as error:
            raise UsageError(f"--output {name}: {error.strerror}") from error

    def _read_samples(self, path: Path) -> None:
        """Reads the samples of the file, and cuts off an incomplete last line."""
        raw = path.read_bytes()
        whole = raw.rfind(b"\n") + 1
        for number, line in enumerate(raw[:whole].splitlines(), 1):
            try:
                row = json.loads(line)
                needed = {name: row[name] for name in ("key", "seed", "origin")}
                self.rows[row["index"], row["sample"]] = needed
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"--resume: {path} line {number} was not written by `specjax generate`; choose "
                    "another --output"
                ) from error
        with path.open("r+b") as file:
            file.truncate(whole)

    def require_same(self, origin: Mapping[str, str], model: str) -> None:
        """Raises UsageError if samples of the file depend on other weights, dtype or acceptance.

        Args:
          origin: `origin_of` this call.
          model: name of the model as the user typed it.
        """
        for other in (row["origin"] for row in self.rows.values()):
            changed = [name for name in origin if other.get(name) != origin[name]]
            if changed:
                what = ", ".join(f"{name} {other.get(name)}" for name in changed)
                now = ", ".join(f"{name} {origin[name]}" for name in changed)
                newer = f" ({model} may hold a newer checkpoint)" if "weights" in changed else ""
                raise UsageError(
                    f"--resume: {self._name} has samples of {what}, and this call is of {now}"
                    f"{newer}; choose another --output, or --force to generate all anew"
                )

    def has(self, prompt: Prompt, sample: int, key: str) -> bool:
        """Whether the file has this sample.

        Raises:
          UsageError: the file has this sample of another prompt, model or options.
        """
        known = self.rows.get((prompt.index, sample))
        if known is not None and known["key"] != key:
            raise UsageError(
                f"--resume: {self._name} has sample {sample} of {prompt.where} from another "
                "prompt, model or other options; choose another --output"
            )
        return known is not None

    def write(self, row: dict[str, Any]) -> None:
        """Writes a line; raises `Failure` if it cannot, for example on a full disk."""
        try:
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            self.close()
            raise Failure(
                f"writing {self._name} failed: {error.strerror}; make room and continue with "
                "--resume"
            ) from error

    def close(self) -> None:
        """Closes the file, unless it is standard output."""
        if self._file is not sys.stdout:
            with contextlib.suppress(OSError):  # closing writes the buffer again
                self._file.close()


class TextInOrder:
    """Prints texts of several samples in order, each as soon as all before it have ended."""

    def __init__(self, places: Sequence[tuple[int, int]]):
        self._open = collections.deque(places)
        self._texts: dict[tuple[int, int], str | None] = {}
        self._printed = False

    def add(self, place: tuple[int, int], text: str | None) -> None:
        """Adds a sample that has ended; None: nothing is printed of it."""
        self._texts[place] = text
        while self._open and self._open[0] in self._texts:
            text = self._texts.pop(self._open.popleft())
            if text is not None:
                print(f"\n{text}" if self._printed else text, flush=True)
                self._printed = True
