"""The host loop: admit waiting jobs into free slots, run a chunk, collect what finished.

Bookkeeping is plain Python; device work is in `Runner`'s executables. Slots are refilled as they
become free. By the keying of the noise it does not matter to the tokens when or where a job runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np

from specjax.config import ModelConfig, SpecConfig
from specjax.decode.admit import Admission, Prefilled
from specjax.decode.state import EMPTY, LENGTH, RUNNING, STOPPED
from specjax.engine.request import Job, SampleOutput, SpecStats, Totals
from specjax.engine.runner import Runner
from specjax.models.transformer import Params

FINISH_REASONS = {STOPPED: "stop", LENGTH: "length"}
PREFILL_ROWS = 8
# Lengths up to which attention reads the cache, one executable each; then the whole of it.
REACHES = (64, 128, 256, 512, 1024, 2048, 4096)


class Engine:
    """Generates jobs on a fixed number of slots.

    Args:
      cfg: model config. spec: None is plain decoding. batch: slots.
      max_len: prompt and generated tokens of a sample at most.
      chunk_tokens: tokens per slot that one dispatch can emit at most; the host looks in between.
      mesh: see `Runner`.
      prompt_widths: lengths that prompts are padded to, one set of executables each; none: powers
        of two.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        spec: SpecConfig | None,
        batch: int,
        max_len: int,
        chunk_tokens: int = 32,
        stop_width: int = 8,
        mesh: jax.sharding.Mesh | None = None,
        prompt_widths: Sequence[int] | None = None,
    ):
        off = spec is None or spec.is_off
        strategy = None if off else spec.resolve()
        mode = "coupled" if off else spec.acceptance
        self.runner = Runner(cfg, strategy, mode, batch, max_len, stop_width, mesh)
        self.batch, self.max_len = batch, max_len
        self.prompt_widths = sorted(prompt_widths or _default_widths(max_len))
        self.prefill_rows = min(batch, PREFILL_ROWS)
        self._reaches = [n for n in REACHES if n < max_len] + [max_len]
        self._lengths = np.zeros(batch, np.int64)
        self.chunk_rounds = max(1, chunk_tokens // (self.runner.steps + 1))

    def set_params(self, params: Params, head: Params | None = None) -> None:
        """Takes new weights; compiles nothing after the first time."""
        self.runner.set_params(params, head)

    def warm_up(self) -> None:
        """Compiles everything that generation can need, for every prompt width."""
        self.runner.reset()
        job = Job([0], 2, np.zeros(5, np.uint32), 0.0, ())
        for width in self.prompt_widths:
            prompts = _Prompts(self.runner, [job], self.prefill_rows, [width])
            for count in self._place_sizes():
                prefilled, row = prompts.get(0)
                self.runner.place(prefilled, self._admission([(0, row, job)], count, width))
        for reach in self._reaches:
            self.runner.chunk(1, False, reach)
        self._read()
        self.runner.reset()

    def generate(
        self, jobs: Sequence[Job], on_progress: Callable[[int, Totals], None] | None = None
    ) -> tuple[list[SampleOutput], Totals]:
        """Runs all jobs to their end.

        Args:
          on_progress: called after each chunk with the number of finished jobs and the totals.

        Returns:
          one output per job, in order (`text` is None), and the totals.
        """
        start = time.perf_counter()
        totals = Totals(self.runner.steps, np.zeros(self.runner.steps + 2, np.int64))
        outputs: list[SampleOutput | None] = [None] * len(jobs)
        waiting, slots = deque(range(len(jobs))), [None] * self.batch
        prompts = _Prompts(self.runner, jobs, self.prefill_rows, self.prompt_widths)
        self.runner.reset()
        finished = 0
        while waiting or any(s is not None for s in slots):
            self._fill(jobs, waiting, slots, prompts)
            self.runner.chunk(self.chunk_rounds, bool(waiting), self._reach(jobs, slots))
            for slot, sample in self._collect(jobs, slots):
                outputs[slots[slot]] = sample
                totals.add(sample)
                slots[slot] = None
                finished += 1
            totals.seconds = time.perf_counter() - start
            if on_progress:
                on_progress(finished, totals)
        return outputs, totals

    def _reach(self, jobs, slots) -> int:
        """The shortest reach that no running slot can outgrow in the next chunk."""
        running = [i for i, s in enumerate(slots) if s is not None]
        longest = max(int(self._lengths[i]) for i in running)
        ahead = self.chunk_rounds * (self.runner.steps + 1)
        limit = max(jobs[slots[i]].limit for i in running)
        return next(n for n in self._reaches if n >= min(longest + ahead, limit, self.max_len))

    def _fill(self, jobs, waiting, slots, prompts: _Prompts) -> None:
        """Places waiting jobs into free slots, those of one prefill at a time."""
        free = deque(i for i, s in enumerate(slots) if s is None)
        while free and waiting:
            prefilled, _ = prompts.get(waiting[0])
            placed = []
            while free and waiting:
                here, row = prompts.get(waiting[0])
                if here is not prefilled:
                    break
                index, slot = waiting.popleft(), free.popleft()
                slots[slot] = index
                self._lengths[slot] = len(jobs[index].prompt)
                placed.append((slot, row, jobs[index]))
            count = next(n for n in self._place_sizes() if n >= len(placed))
            width = jax.tree.leaves(prefilled.cache)[0].shape[-2]
            self.runner.place(prefilled, self._admission(placed, count, width))

    def _admission(
        self, placed: list[tuple[int, int, Job]], count: int, width: int
    ) -> Admission:
        """Padded arrays; spare rows repeat the first request, which is then written twice."""
        padded = placed + [placed[0]] * (count - len(placed))
        jobs = [job for _, _, job in padded]
        stops = np.full((count, self.runner.stop_width), -1, np.int32)
        for r, job in enumerate(jobs):
            stops[r, : len(job.stop_ids)] = job.stop_ids
        tokens, lengths = _pad_prompts(jobs, width)
        return Admission(
            slots=np.array([slot for slot, _, _ in padded], np.int32),
            rows=np.array([row for _, row, _ in padded], np.int32),
            tokens=tokens,
            lengths=lengths,
            limit=np.array([min(job.limit, self.max_len) for job in jobs], np.int32),
            words=np.stack([job.words for job in jobs]).astype(np.uint32),
            temperature=np.array([job.temperature for job in jobs], np.float32),
            stop_ids=stops,
        )

    def _place_sizes(self) -> list[int]:
        """1, 4, 16, .. and the batch: how many requests one placement takes."""
        sizes = [1]
        while sizes[-1] < self.batch:
            sizes.append(min(sizes[-1] * 4, self.batch))
        return sizes

    def _read(self):
        """Small host copies of what the host needs; the caches stay on the device."""
        s = self.runner.state
        return jax.device_get((s.tokens, s.logprobs, s.length, s.finish, s.rounds, s.histogram))

    def _collect(self, jobs, slots) -> list[tuple[int, SampleOutput]]:
        """Outputs of the slots that finished in the last chunk."""
        state = self.runner.state
        finish, self._lengths = (
            np.array(x) for x in jax.device_get((state.finish, state.length))
        )
        done = [
            i for i, s in enumerate(slots) if s is not None and finish[i] not in (RUNNING, EMPTY)
        ]
        if not done:
            return []
        tokens, logprobs, length, finish, rounds, histogram = self._read()
        results = []
        for i in done:
            begin, end = len(jobs[slots[i]].prompt), int(length[i])
            emitted = end - begin
            stats = SpecStats(
                rounds=int(rounds[i]),
                drafted=int(rounds[i]) * (self.runner.tree.rows - 1 if self.runner.tree else 0),
                accepted=emitted - int(rounds[i]),
                histogram=tuple(int(x) for x in histogram[i]),
            )
            results.append(
                (
                    i,
                    SampleOutput(
                        token_ids=tokens[i, begin:end].tolist(),
                        text=None,
                        logprobs=logprobs[i, begin:end].tolist(),
                        finish_reason=FINISH_REASONS[int(finish[i])],
                        stats=stats,
                    ),
                )
            )
        return results


class _Prompts:
    """Prefilled prompts of the jobs at hand: each distinct prompt runs once, ahead of its use.

    Prefills always have the same number of rows, so that a prompt's keys and values do not depend,
    not even in their last bits, on what runs beside it.
    """

    def __init__(self, runner: Runner, jobs: Sequence[Job], rows: int, widths: Sequence[int]):
        self._runner, self._jobs, self._rows, self._widths = runner, jobs, rows, widths
        self._keys = [tuple(job.prompt) for job in jobs]
        self._ready: dict[tuple, tuple[Prefilled, int]] = {}

    def get(self, index: int) -> tuple[Prefilled, int]:
        """The prefill that holds job `index`'s prompt, and its row there."""
        key = self._keys[index]
        if key not in self._ready:
            self._ready = self._run(index)  # jobs come in order: the last prefill is done with
        return self._ready[key]

    def _run(self, index: int) -> dict[tuple, tuple[Prefilled, int]]:
        """Prefills the next distinct prompts of the first one's width."""
        width = self._width(len(self._keys[index]))
        chosen: dict[tuple, Job] = {}
        for key, job in zip(self._keys[index:], self._jobs[index:], strict=True):
            if key not in chosen and (
                len(chosen) == self._rows or self._width(len(key)) != width
            ):
                break
            chosen[key] = job
        jobs = list(chosen.values())
        jobs += [jobs[0]] * (self._rows - len(jobs))
        prefilled = self._runner.prefill(*_pad_prompts(jobs, width))
        return {key: (prefilled, row) for row, key in enumerate(chosen)}

    def _width(self, length: int) -> int:
        return next(w for w in self._widths if w >= length)


def _pad_prompts(jobs: Sequence[Job], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts right-padded to [jobs, width], and their lengths."""
    tokens = np.zeros((len(jobs), width), np.int32)
    for r, job in enumerate(jobs):
        tokens[r, : len(job.prompt)] = job.prompt
    return tokens, np.array([len(job.prompt) for job in jobs], np.int32)


def _default_widths(max_len: int) -> list[int]:
    """16, 32, 64, .. and `max_len`."""
    widths = [min(16, max_len)]
    while widths[-1] < max_len:
        widths.append(min(widths[-1] * 2, max_len))
    return widths
