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
from specjax.decode.admit import Admission
from specjax.decode.state import EMPTY, LENGTH, RUNNING, STOPPED
from specjax.engine.request import Job, SampleOutput, SpecStats, Totals
from specjax.engine.runner import Runner
from specjax.models.transformer import Params

FINISH_REASONS = {STOPPED: "stop", LENGTH: "length"}
SMALLEST_PROMPT_BUCKET = 16


class Engine:
    """Generates jobs on a fixed number of slots.

    Args:
      cfg: model config. spec: None is plain decoding. batch: slots.
      max_len: prompt and generated tokens of a sample at most.
      chunk_tokens: tokens per slot that one dispatch can emit at most; the host looks in between.
      mesh: see `Runner`.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        spec: SpecConfig | None,
        batch: int,
        max_len: int,
        chunk_tokens: int = 64,
        stop_width: int = 8,
        mesh: jax.sharding.Mesh | None = None,
    ):
        off = spec is None or spec.is_off
        strategy = None if off else spec.resolve()
        mode = "coupled" if off else spec.acceptance
        self.runner = Runner(cfg, strategy, mode, batch, max_len, stop_width, mesh)
        self.batch, self.max_len = batch, max_len
        self.chunk_rounds = max(1, chunk_tokens // (self.runner.steps + 1))

    def set_params(self, params: Params, head: Params | None = None) -> None:
        """Takes new weights; compiles nothing after the first time."""
        self.runner.set_params(params, head)

    def warm_up(self, prompt_lengths: Sequence[int]) -> None:
        """Compiles everything that prompts of these lengths can need."""
        self.runner.reset()
        buckets = sorted({self._prompt_bucket(n) for n in prompt_lengths})
        for rows in _powers_of_two(self.batch):
            for width in buckets:
                job = Job([0], 2, np.zeros(5, np.uint32), 0.0, ())
                self.runner.admit(self._admission([(0, job)], rows, width))
        self.runner.chunk(1, False)
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
        self.runner.reset()
        finished = 0
        while waiting or any(s is not None for s in slots):
            self._fill(jobs, waiting, slots)
            self.runner.chunk(self.chunk_rounds, leave_early=bool(waiting))
            for slot, sample in self._collect(jobs, slots):
                outputs[slots[slot]] = sample
                totals.add(sample)
                slots[slot] = None
                finished += 1
            totals.seconds = time.perf_counter() - start
            if on_progress:
                on_progress(finished, totals)
        return outputs, totals

    def _fill(self, jobs, waiting, slots) -> None:
        """Admits as many waiting jobs as there are free slots; the longest prompt sets width."""
        free = [i for i, s in enumerate(slots) if s is None]
        placed = []
        while free and waiting:
            slot, index = free.pop(0), waiting.popleft()
            slots[slot] = index
            placed.append((slot, jobs[index]))
        if placed:
            rows = next(n for n in _powers_of_two(self.batch) if n >= len(placed))
            width = self._prompt_bucket(max(len(job.prompt) for _, job in placed))
            self.runner.admit(self._admission(placed, rows, width))

    def _admission(self, placed: list[tuple[int, Job]], rows: int, width: int) -> Admission:
        """Padded arrays; spare rows repeat the first request, which is then written twice."""
        stop_width = self.runner.stop_width
        padded = placed + [placed[0]] * (rows - len(placed))
        tokens = np.zeros((rows, width), np.int32)
        stops = np.full((rows, stop_width), -1, np.int32)
        for r, (_, job) in enumerate(padded):
            tokens[r, : len(job.prompt)] = job.prompt
            stops[r, : len(job.stop_ids)] = job.stop_ids
        return Admission(
            slots=np.array([slot for slot, _ in padded], np.int32),
            tokens=tokens,
            lengths=np.array([len(job.prompt) for _, job in padded], np.int32),
            limit=np.array([min(job.limit, self.max_len) for _, job in padded], np.int32),
            words=np.stack([job.words for _, job in padded]).astype(np.uint32),
            temperature=np.array([job.temperature for _, job in padded], np.float32),
            stop_ids=stops,
        )

    def _read(self):
        """Small host copies of what the host needs; the caches stay on the device."""
        s = self.runner.state
        return jax.device_get((s.tokens, s.logprobs, s.length, s.finish, s.rounds, s.histogram))

    def _collect(self, jobs, slots) -> list[tuple[int, SampleOutput]]:
        """Outputs of the slots that finished in the last chunk."""
        finish = np.asarray(jax.device_get(self.runner.state.finish))
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

    def _prompt_bucket(self, length: int) -> int:
        bucket = SMALLEST_PROMPT_BUCKET
        while bucket < length:
            bucket *= 2
        return min(bucket, self.max_len)


def _powers_of_two(top: int) -> list[int]:
    """1, 2, 4, .. and `top` itself."""
    sizes = [1]
    while sizes[-1] < top:
        sizes.append(min(sizes[-1] * 2, top))
    return sizes
