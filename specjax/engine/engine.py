"""The host loop: admit waiting jobs into free slots, run a chunk, collect what finished.

Bookkeeping is plain Python; device work is in `Runner`'s executables. Slots are refilled as they
become free. By the keying of the noise it does not matter to the tokens when or where a job runs.
"""

from __future__ import annotations

import functools
import operator
import time
from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np

from specjax.config import ModelConfig, SamplingParams, SpecConfig
from specjax.decode.admit import Admission
from specjax.decode.options import Features
from specjax.decode.state import EMPTY, RUNNING
from specjax.draft.source import DraftSource
from specjax.engine.checks import Limits, check_job
from specjax.engine.collect import Finished, Running, rejections_until
from specjax.engine.options_rows import features_of, option_rows
from specjax.engine.prompts import Prompts, pad_prompts, padded_widths
from specjax.engine.request import Job, SampleOutput, Totals, make_jobs
from specjax.engine.runner import Runner
from specjax.models.transformer import Params
from specjax.telemetry import Collector, SlotInfo, active_transforms

PREFILL_ROWS = 8

Slots = list[Running | None]


class Engine:
    """Generates jobs on a fixed number of slots.

    Args:
      cfg: model config. spec: None is plain decoding. batch: slots.
      max_len: prompt and generated tokens of a sample at most.
      chunk_tokens: tokens per slot that one dispatch can emit at most; the host looks in between.
      stop_width: stop tokens per request at most, the model's own included.
      mesh: see `Runner`.
      prompt_widths: lengths that prompts are padded to, one set of executables each; none: powers
        of two.
      source: what drafts, see `Runner`.

    Attributes:
      telemetry: why drafts were rejected; None unless `spec` turns it on.
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
        source: DraftSource | None = None,
    ):
        spec = None if spec is None or spec.is_off else spec
        steps = spec.resolve().steps if spec else 0
        self.chunk_rounds = max(1, chunk_tokens // (steps + 1))
        self.runner = Runner(cfg, spec, batch, max_len, stop_width, mesh, source, self.chunk_rounds)
        self.limits = Limits(cfg, max_len, stop_width, spec.acceptance if spec else None)
        self.batch, self.max_len = batch, max_len
        self.prompt_widths = sorted(prompt_widths or padded_widths(max_len))
        self.prefill_rows = min(batch, PREFILL_ROWS)
        self.telemetry = Collector() if spec and spec.telemetry_on else None
        self._vocab = cfg.vocab_size

    def set_params(self, params: Params, head: Params | None = None) -> None:
        """Takes new weights; compiles nothing after the first time."""
        self.runner.set_params(params, head)

    def warm_up(self, features: Sequence[Features] = (Features(),)) -> None:
        """Compiles all that generation can need, for every prompt width.

        Args:
          features: one set of programs each. The default one serves requests that ask for nothing
            but a temperature; `Features.all()` serves all, slower. A request that no set covers
            compiles its own when it comes.
        """
        self.runner.reset()
        [job] = make_jobs([0], SamplingParams(temperature=0.0, max_tokens=1), ())
        for width in self.prompt_widths:
            prompts = Prompts(self.runner, [job], self.prefill_rows, [width])
            for count in self._place_sizes():
                prefilled, row = prompts.get(0)
                self.runner.place(prefilled, self._admission([(0, row, job)], count, width))
        # Smallest first: what a larger program covers already would not be compiled.
        for wanted in sorted(features, key=lambda f: f.size):
            self.runner.chunk(1, False, wanted)
        self.runner.stop(np.zeros(self.batch, bool))
        self._read()
        self.runner.reset()

    def generate(
        self, jobs: Sequence[Job], on_progress: Callable[[int, Totals], None] | None = None
    ) -> tuple[list[SampleOutput], Totals]:
        """Runs all jobs to their end.

        Args:
          on_progress: called after each chunk with the number of finished jobs and the totals.

        Returns:
          one output per job, in order (`text` is None but where a stop string cut it), and the
          totals.

        Raises:
          ValueError: a job does not fit. Nothing has run by then.
        """
        for job in {(id(job.params), len(job.prompt)): job for job in jobs}.values():
            check_job(f"prompt {job.request}", job, self.limits)
        start = time.perf_counter()
        totals = Totals(self.runner.steps, np.zeros(self.runner.steps + 2, np.int64))
        outputs: list[SampleOutput | None] = [None] * len(jobs)
        waiting, slots = deque(range(len(jobs))), [None] * self.batch
        prompts = Prompts(self.runner, jobs, self.prefill_rows, self.prompt_widths)
        wanted = self._features(jobs)
        self.runner.reset()
        finished = 0
        while waiting or any(slots):
            self._fill(jobs, waiting, slots, prompts)
            for slot, sample in self._chunk(slots, wanted, bool(waiting)):
                outputs[slots[slot].index] = sample
                totals.add(sample)
                slots[slot] = None
                finished += 1
            totals.seconds = time.perf_counter() - start
            if on_progress:
                on_progress(finished, totals)
        return outputs, totals

    def _features(self, jobs: Sequence[Job]) -> Features:
        requests = {id(job.params): job for job in jobs}.values()  # few, of many samples
        each = (features_of(job, self._vocab) for job in requests)
        return functools.reduce(operator.or_, each, Features.none())

    def _chunk(self, slots: Slots, wanted: Features, leave_early: bool):
        """Runs a chunk and collects: (slot, output) of every sample that ended in it."""
        running = [s for s in slots if s is not None]
        features = self._program(running, wanted)
        _, report = self.runner.chunk(self.chunk_rounds, leave_early, features)
        report = jax.device_get(report)
        results = self._collect(slots, report)
        if self.telemetry is not None:
            ends = np.full(self.batch, self.max_len)
            for slot, sample in results:
                ends[slot] = len(slots[slot].job.prompt) + len(sample.token_ids)
            who = [s and self._slot_info(s.job) for s in slots]
            self.telemetry.add(rejections_until(report.rejections, ends), who)
        return results

    def _slot_info(self, job: Job) -> SlotInfo:
        transforms = active_transforms(features_of(job, self._vocab))
        return SlotInfo(job.request, job.sample, len(job.prompt), transforms)

    def _program(self, running: list[Running], wanted: Features) -> Features:
        """What to ask the runner for, so that a call compiles once at most.

        A chunk takes the cheapest program that covers the samples in it. Where none of the
        programs covers all that this call will ask for, the next wider of a few fixed sets is
        compiled, and serves. In `invariant` mode all chunks run the program of the whole call, for
        only within one program equal inputs are sure to give equal bits.
        """
        if self.runner.plan.invariant or not self.runner.covers(wanted):
            return wanted.widened()
        return self._features([s.job for s in running])

    def _fill(self, jobs, waiting: deque[int], slots: Slots, prompts: Prompts) -> None:
        """Places waiting jobs into free slots, those of one prefill at a time."""
        drafts = self.runner.tree.rows - 1 if self.runner.tree else 0
        free = deque(i for i, s in enumerate(slots) if s is None)
        while free and waiting:
            prefilled, _ = prompts.get(waiting[0])
            placed = []
            while free and waiting:
                here, row = prompts.get(waiting[0])
                if here is not prefilled:
                    break
                index, slot = waiting.popleft(), free.popleft()
                slots[slot] = Running(index, jobs[index], drafts)
                placed.append((slot, row, jobs[index]))
            count = next(n for n in self._place_sizes() if n >= len(placed))
            width = jax.tree.leaves(prefilled.cache)[0].shape[-2]
            self.runner.place(prefilled, self._admission(placed, count, width))

    def _admission(self, placed: list[tuple[int, int, Job]], count: int, width: int) -> Admission:
        """Padded arrays; spare rows repeat the first request, which is then written twice."""
        padded = placed + [placed[0]] * (count - len(placed))
        jobs = [job for _, _, job in padded]
        tokens, lengths = pad_prompts(jobs, width)
        return Admission(
            slots=np.array([slot for slot, _, _ in padded], np.int32),
            rows=np.array([row for _, row, _ in padded], np.int32),
            tokens=tokens,
            lengths=lengths,
            limit=np.array([min(job.limit, self.max_len) for job in jobs], np.int32),
            words=np.stack([job.words for job in jobs]).astype(np.uint32),
            options=option_rows(jobs, self._vocab, self.runner.stop_width),
        )

    def _place_sizes(self) -> list[int]:
        """1, 4, 16, .. and the batch: how many requests one placement takes."""
        sizes = [1]
        while sizes[-1] < self.batch:
            sizes.append(min(sizes[-1] * 4, self.batch))
        return sizes

    def _read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Host copies of tokens, logprobs and histogram; the caches stay on the device."""
        s = self.runner.state
        return jax.device_get((s.tokens, s.logprobs, s.histogram))

    def _collect(self, slots: Slots, report) -> list[tuple[int, SampleOutput]]:
        """Outputs of the samples that ended in the last chunk, and an end to their slots."""
        state = self.runner.state
        finish, length = jax.device_get((state.finish, state.length))
        here = [i for i, s in enumerate(slots) if s is not None]
        ended = {i for i in here if finish[i] not in (RUNNING, EMPTY)}
        if not ended and not any(slots[i].has_stops for i in here):
            for i in here:
                slots[i].look(i, int(length[i]), report, None)
            return []
        tokens, logprobs, histogram = self._read()
        results, stopped = [], np.zeros(self.batch, bool)
        for i in here:
            cut = slots[i].look(i, int(length[i]), report, tokens[i])
            if cut is None and i not in ended:
                continue
            stopped[i] = i not in ended
            last = Finished(tokens[i], logprobs[i], histogram[i], int(length[i]), int(finish[i]))
            results.append((i, slots[i].output(last, cut)))
        if stopped.any():
            self.runner.stop(stopped)
        return results
