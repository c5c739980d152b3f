"""The batch API: `LLM(path).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import numbers
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from specjax.checkpoint.weights import Head, load_model
from specjax.config import ModelConfig, SamplingParams, SpecConfig, Strategy
from specjax.config.dtype import AUTO, about_dtype
from specjax.config.spec import RANDOM_DRAFT
from specjax.control import ControlConfig
from specjax.engine.base import BaseEngine
from specjax.engine.compare import Difference, first_differences
from specjax.engine.engine import Engine
from specjax.engine.programs import OnProgram
from specjax.engine.prompt_scores import PromptScorer
from specjax.engine.replicas import Replicas
from specjax.engine.request import (
    CallSeeds,
    Job,
    RequestOutput,
    SampleOutput,
    Totals,
    check_job,
    check_prompt,
    decoder_of,
    draw_seed,
    features_of,
    make_jobs,
    require_valid,
)
from specjax.engine.runner import counts_of, kept_states
from specjax.engine.sequence import SampleStream
from specjax.engine.settings import EngineConfig
from specjax.engine.sources import head_class, load_source, require_same_draft, settle_draft
from specjax.engine.start_up import StartUp
from specjax.hub import find_model
from specjax.interfaces import Draft, Room
from specjax.kernels.cpu import native
from specjax.memory import bytes_of, cost, empty, empty_slots
from specjax.models.families import add_family
from specjax.models.generation_config import asked_for, sampling_defaults
from specjax.models.transformer import Params, init_params, laid_out, to_decode_layout
from specjax.parallel import sharding
from specjax.telemetry import Collector
from specjax.tokenizer import chat_ids, has_chat_template, prompt_ids, with_tokenizer_end
from specjax.weights import load_tokenizer
from specjax.weights.matrix import Products, asked_of, is_exact

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
PromptDict = Mapping[str, Any]  # {"prompt": text} or {"prompt_token_ids": ids}
Message = Mapping[str, Any]  # with the keys `role` and `content`

LEAST_LENGTH = 2048  # tokens of a sample that fit by default, whatever memory there is
PLAINLY = "decoding plainly"  # name of a bar
DEVICE_SHARE = 0.9  # of an accelerator's memory, for weights and caches; vLLM's default
# Of a computer's memory, which other programs use, and in which weights are read and converted.
HOST_SHARE = 1 / 16
PAGE = 128  # positions
WARN_ROUNDS = 300  # drafted rounds of a call that say whether its accept length is too low
LEAST = 1.05  # accept length below which a draft is not the one for its target, or is run wrongly


class Piece(NamedTuple):
    """What a sample of `LLM.stream` has grown by.

    Attributes:
      sample: number of the sample.
      text: the new text; no later token changes it.
      token_ids: the new tokens. Text that they begin, such as a part of a character, comes later.
      output: the whole sample, in its last piece; else None.
    """

    sample: int
    text: str
    token_ids: list[int]
    output: SampleOutput | None


class LLM:
    """A policy with its draft source, ready to generate.

    Args:
      model: a Hugging Face directory or id (`Qwen/Qwen3-0.6B`), a GGUF file, the directory of a
        training run (of which the newest checkpoint is loaded), or (ModelConfig, params, head),
        where the head is a `specjax.checkpoint.weights.Head`, the parameters of an MTP head, or
        None.
      spec: how to speculate; None: plain decoding. By default the checkpoint's head drafts, or
        n-grams if it has none; a line in the log says which.
      max_batch: the most samples that run at once; further ones are queued.
      max_len: the most prompt and generated tokens of a sample; None: the model's limit, or as many
        as the caches have room for (`EngineConfig.cache_bytes`), but at least 2,048; a note then
        says so.
      dtype: dtype of parameters and arithmetic: `"float32"`, `"bfloat16"`, `"float16"`; `"auto"` is
        the checkpoint's on GPU and TPU, and float32 on CPU. A ModelConfig has its own.
      mesh: mesh to shard over; see `specjax.parallel.sharding.make_mesh`.
      tokenizer: tokenizer in place of the one in the directory; without one, prompts are token ids.
      scan_layers: whether to scan over the layers instead of unrolling them, which compiles faster
        and decodes slower, on one device or a mesh. None: as the config says, which for a directory
        is unrolled.
      max_stop_tokens: the most stop tokens of a request, the model's own included.
      engine: settings of chunks, cache pages and the order of requests.
      control: how strategies are chosen while running: a ControlConfig, a map of its settings, or
        the name of a controller; None: always the strategy of `spec`. A controller chooses that one
        only if it is listed, too. All strategies are compiled, and measured, by `warm_up` or at the
        first request.
      replicas: number of independent engines of `max_batch` slots each, fed from one queue.
      tp: number of devices of each replica.
      revision: branch, tag or commit of a Hugging Face id.
      generation_config: source of the default sampling parameters of `generate` and `chat`: `auto`,
        the checkpoint's own generation_config.json; `none`, none; or a directory with such a file.
      family: a `specjax.interfaces.Family` of your own, `module:attribute`, for all checkpoints of
        its `model_type` in this process, see `specjax.models.families.add_family`.

    Attributes:
      drafting: the draft source and the controller that run.
      source: what drafts; None: plain decoding.
      head: the parameters of what drafts, or of the head that is not used; None: there are none.
      generation: the default sampling parameters, see `generation_config`.
      notes: lines that say what was chosen for the caller.
      telemetry: the collector of rejected drafts; None unless `SpecConfig.telemetry` is on.
      totals: sums over the samples of the last call.
      differences: with `SpecConfig(exact_mode=True)`, the first difference from plain decoding of
        every sample of the last call that differs; None if nothing was compared.

    Raises:
      ValueError: speculation is asked for and the checkpoint has no draft head, or the draft
        model's vocabulary is not the target's; or a controller is given with plain decoding.
      CheckpointError, UnsupportedModelError: there is no such model, or it cannot be used.
    """

    def __init__(
        self,
        model: str | Path | tuple[ModelConfig, Params, Head | Params | None],
        spec: SpecConfig | None = SpecConfig(),  # noqa: B008
        max_batch: int = 32,
        max_len: int | None = None,
        dtype: str = AUTO,
        mesh: jax.sharding.Mesh | None = None,
        tokenizer=None,
        scan_layers: bool | None = None,
        max_stop_tokens: int = 8,
        engine: EngineConfig | None = None,
        control: ControlConfig | Mapping[str, Any] | str | None = None,
        replicas: int = 1,
        tp: int = 1,
        revision: str | None = None,
        generation_config: str = "auto",
        family: str | None = None,
    ):
        add_family(family)
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        several = replicas > 1 or tp > 1
        if several and mesh is not None:
            raise ValueError("replicas and tp make meshes of their own; leave out mesh, or both")
        meshes = sharding.replica_meshes(replicas, tp) if several else [mesh]
        self.notes: list[str] = []
        generation = asked_for(generation_config)
        if isinstance(model, (str, Path)):
            products, path = (engine or EngineConfig()).products, find_model(model, revision)
            if sharding.platform_of(meshes[0]) == "cpu":  # while weights are read
                native.load_soon()
            loaded = load_model(path, dtype, mesh, products=products)
            cfg, params, head = loaded.cfg, loaded.policy, loaded.head
            if (dtype, loaded.stored) != (AUTO, "float32"):  # else there is nothing to choose
                self.notes.append(about_dtype(dtype, cfg.run.param_dtype, loaded.stored))
            if tokenizer is None and loaded.tokenizer is not None:
                tokenizer = load_tokenizer(loaded.tokenizer, required=False)
            cfg = with_tokenizer_end(cfg, tokenizer)
        else:
            cfg, params, head = model
        self.drafting = settle_draft(spec, control, head_class(head), target=cfg)
        spec, control = self.drafting.spec, self.drafting.control
        if self.drafting.strategies == (Strategy.OFF,):  # nothing drafts: no head is needed
            spec, control = spec and dataclasses.replace(spec, strategy=Strategy.OFF), None
        self.spec = None if spec is None or spec.is_off else spec
        if scan_layers is not None:
            cfg = cfg.running(scan_layers=scan_layers)
        cfg, source = laid_out(cfg, meshes[0]), None
        if self.spec is not None:
            cfg, source, head = load_source(cfg, self.spec, head, tokenizer, meshes[0], params)
        # A user who has no head may have forgotten to name a draft, and is warned.
        level = logging.WARNING if self.drafting.by_default else logging.INFO
        log.log(level, "%s", self.drafting.described())
        self.cfg, self.tokenizer, self.mesh = cfg, tokenizer, mesh
        self.generation = cfg.generation if generation is None else generation
        self.max_batch, self.max_stop_tokens = max_batch, max_stop_tokens
        self.max_len = min(max_len or cfg.max_position, cfg.max_position)
        given = engine.cache_bytes if engine else None
        count = sum(counts_of(max_batch)) + kept_states(max_batch, engine or EngineConfig())
        slots = jax.eval_shape(lambda: empty_slots(cfg, count))
        self._page_budget = (
            page_budget(cfg, source, meshes[0], slots, engine.products if engine else AUTO)
            if given is None
            else given - bytes_of(slots)
        )
        if max_len is None:
            self._shorten(source)
        self.cfg = cfg = cfg.for_length(self.max_len)
        source = source and source.for_length(self.max_len)
        if source is not None and (line := source.described()):
            self.notes.append(f"draft: {line}")
        self.source = source
        self.head = head.params if isinstance(head, Head) else head
        self._engine_config = engine or EngineConfig()
        engines = [self._engine(spec, source, control, place) for place in meshes]
        self.engine = Replicas(engines) if several else engines[0]
        self.telemetry: Collector | None = self.engine.telemetry
        for line in engines[0].start_lines():
            log.info("%s", line)
        self.engine.set_params(params, self.head if self.spec else None)
        self.params = self._held(params)
        self._plain: Engine | None = None
        self.totals: Totals | None = None
        self.differences: list[Difference] | None = None
        # A draft without weights may find nothing, and a new head has not learnt anything yet.
        has_network = source is not None and source.network is not None
        self._may_warn = has_network and self.spec.draft != RANDOM_DRAFT

    def _engine(self, spec: SpecConfig | None, source=None, control=None, mesh=None) -> Engine:
        return Engine(
            self.cfg,
            spec,
            self.max_batch,
            self.max_len,
            stop_width=self.max_stop_tokens,
            mesh=mesh,
            source=source,
            config=self._engine_config,
            control=control,
            most_page_bytes=self._page_budget,
        )

    def _shorten(self, source: Draft | None) -> None:
        """Lowers `max_len` to what the caches have room for, and says so in a note."""
        room, fits = self._page_budget, LEAST_LENGTH
        if room is not None:
            page = cost(self.cfg, PAGE).page + (source.cost(PAGE).page if source else 0)
            # Besides there are the null page, copies of a prompt's last page, and those past the
            # last token.
            fits = max((room // max(page, 1) - 4) * PAGE, LEAST_LENGTH)
        if fits >= self.max_len:
            return
        self.max_len = fits
        size = "memory that is not known" if room is None else f"{room / 1e9:.2g} GB"
        self.notes.append(
            f"a prompt and its sample have at most {fits:,} tokens, of the model's "
            f"{self.cfg.max_position:,}, because caches have {size}; raise cache_bytes, "
            "or set max_len"
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of prompts that come without any, see `generation_config`."""
        return SamplingParams(**sampling_defaults(self.generation))

    def warm_up(
        self,
        requests: Sequence[SamplingParams] = (SamplingParams(),),  # noqa: B008
        on_program: OnProgram | None = None,
        background: bool = False,
    ) -> StartUp:
        """Compiles ahead of the first request: all strategies, for every size of the batch.

        Without it a call compiles the programs that it needs at its beginning, for one batch size.
        When compiling takes more than a few seconds, warnings in the log show the progress.

        Args:
          requests: sampling parameters like those of the requests to come. A request with options
            beyond these compiles a program when it comes: one of a few, each of which serves all
            further requests of its kind.
          on_program: function called, in place of the log, with the number of programs that are
            ready and the number of all.
          background: whether to return when few programs are ready that serve all requests, and
            compile the others while requests are served, see `BaseEngine.warm_up`.

        Returns:
          the time and memory that it took.
        """
        jobs = [job for p in requests for job in make_jobs([0], p, (), self.tokenizer)]
        wanted = {features_of(job, self.cfg.vocab_size).widened() for job in jobs}
        return self.engine.warm_up([*wanted], on_program, background)

    def update_weights(
        self, params: Params, head: Head | Params | None = None, running: str = "recompute"
    ) -> None:
        """Replaces the parameters of the policy and, if given, of the draft; compiles nothing.

        Args:
          params: parameters of the policy.
          head: a head of the kind that drafts, or parameters of the draft source; None keeps the
            present ones.
          running: what becomes of the caches of samples that run (`llm.engine` may hold some), see
            `BaseEngine.set_params`.

        Raises:
          ValueError: the head is of another kind, or computes something else, than the one that
            drafts.
        """
        head = self.head if head is None else self._own(head)
        self.engine.set_params(params, head if self.spec else None, running)
        self.params, self.head = self._held(params), head
        if self._plain is not None:
            self._plain.set_params(self.params)

    def _held(self, params: Params) -> Params:
        """The parameters of the policy to hold: packed ones are those that decode."""
        weights = self.engine.runner.weights
        return params if is_exact(weights.cfg.run.products) else weights.policy

    def update_head(self, head: Head | Params) -> None:
        """Replaces the draft's parameters alone; running samples go on, see `Engine.set_head`.

        Raises:
          ValueError: as in `update_weights`.
        """
        head = self._own(head)
        self.engine.set_head(head)
        self.head = head

    def _own(self, head: Head | Params) -> Params:
        """The parameters of a head that is to draft in place of the present one."""
        if not isinstance(head, Head):
            return head
        if self.source is not None:
            require_same_draft(head.source, self.source)
        return head.params

    def generate(
        self,
        prompts: Prompt | PromptDict | Sequence[Prompt | PromptDict],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generates `sampling_params.n` samples for each prompt.

        Args:
          prompts: strings (see `specjax.tokenizer.prompt_ids`), lists of token ids, or vLLM's
            {"prompt": text} and {"prompt_token_ids": ids}; a single prompt need not be in a list.
          sampling_params: sampling parameters for all prompts, or a list with one for each; None:
            `get_default_sampling_params()`. Without a seed, one is drawn for the call.
          progress: whether to show a bar with tok/s and accept length. If drafting was slower
            than plain decoding would have been, the log says so: with a bar as a warning, else as
            information.

        Returns:
          one `RequestOutput` per prompt, in order, with the seed of its samples. A sample whose
          logits were no distribution has the finish reason `error` and a message in `error`; other
          samples are not affected.

        Raises:
          ValueError: prompts or params have another form, a prompt is empty or too long, an id is
            out of range, there are too many stop tokens, biases or bad words, no tokenizer for a
            string, a temperature that the acceptance mode does not take, or the number of params is
            neither one nor that of the prompts. Nothing has run then.
        """
        ids, jobs = self._jobs(prompts, sampling_params)
        samples, self.totals = self._run(jobs, progress)
        for job, sample in zip(jobs, samples, strict=True):
            if sample.error is not None:
                log.error("prompt %d, sample %d: %s", job.request, job.sample, sample.error)
        self.differences = None
        if self.spec is not None and self.spec.exact_mode:
            self.differences = self.compare_samples(jobs, samples, progress)
            for difference in self.differences:
                log.warning("speculative and plain decoding differ: %s", difference)
        params_of: dict[int, SamplingParams] = {job.request: job.params for job in jobs}
        scores = self._prompt_logprobs(ids, params_of)
        outputs = [
            RequestOutput(prompt, [], params_of[index].seed, scores.get(index))
            for index, prompt in enumerate(ids)
        ]
        for job, sample in zip(jobs, samples, strict=True):
            outputs[job.request].samples.append(self.with_text(job, sample))
        return outputs

    def stream(
        self,
        prompt: Prompt | PromptDict | Sequence[Message],
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[Piece]:
        """Generates the samples of one prompt, and yields them in pieces while they grow.

        The pieces of a sample together are its text and its tokens in `generate`. A caller that
        leaves the loop aborts the samples.

        Args:
          prompt: a prompt as in `generate`, or a conversation as in `chat`.
          sampling_params: as in `generate`.

        Raises:
          ValueError: as in `generate` and `chat`; or the call asks for `prompt_logprobs` or
            `exact_mode`, which `generate` alone has.
        """
        if self.spec is not None and self.spec.exact_mode:
            raise ValueError("exact_mode compares whole samples; use generate in place of stream")
        given = prompt if isinstance(prompt, (str, Mapping)) else list(prompt)
        if isinstance(given, list) and given and isinstance(given[0], Mapping):
            [given] = self._chat_prompts(given)
        _, jobs = self._jobs([given], sampling_params)
        if jobs[0].params.prompt_logprobs is not None:
            raise ValueError("stream has no prompt_logprobs; leave it out, or use generate")
        return self._streamed(jobs)

    def _streamed(self, jobs: list[Job]) -> Iterator[Piece]:
        self.engine.require_no_work()
        started = time.perf_counter()
        self.totals = totals = Totals(self.engine.runner.steps)
        self.differences, streams = None, {}
        for job in jobs:
            decode = decoder_of(self.tokenizer, job.params) if self._has_text(job) else None
            sample = self.engine.add(job)
            streams[sample] = job, SampleStream(sample, decode)
        try:
            while self.engine.has_work:
                ended = {event.sequence: event.sample for event in self.engine.step()}
                totals.seconds = time.perf_counter() - started
                for sample, (job, stream) in list(streams.items()):
                    output = None
                    if sample in ended:
                        output = self.with_text(job, ended[sample])
                        totals.add(output)
                        del streams[sample]
                    tokens, text = stream.take(output)
                    if tokens or text or output is not None:
                        yield Piece(job.sample, text, tokens, output)
        finally:
            if self.engine.has_work:
                self.engine.clear()

    def _has_text(self, job: Job) -> bool:
        return self.tokenizer is not None and job.params.detokenize

    def with_text(self, job: Job, sample: SampleOutput) -> SampleOutput:
        """Returns the sample of a job with its text, if the job asks for one."""
        if sample.text is not None or not self._has_text(job):
            return sample
        text = decoder_of(self.tokenizer, job.params)(sample.token_ids)
        return dataclasses.replace(sample, text=text)

    def _prompt_logprobs(
        self, prompts: list[list[int]], params_of: dict[int, SamplingParams]
    ) -> dict[int, list[dict[int, float] | None]]:
        """See `RequestOutput.prompt_logprobs`; by index of the prompts that ask for them."""
        by_index = {}
        for most in {params.prompt_logprobs for params in params_of.values()} - {None}:
            scorer = PromptScorer(self.engine, self.max_len)
            those = [index for index, params in params_of.items() if params.prompt_logprobs == most]
            scores = scorer.read(scorer.start([prompts[index] for index in those]), most)
            by_index |= {index: scored.top for index, scored in zip(those, scores, strict=True)}
        return by_index

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Generates the next message of one conversation, or of several.

        Args:
          messages: one conversation, a list of {"role": .., "content": ..}, or a list of several.
            The tokenizer's chat template makes a prompt of each.
          sampling_params: as in `generate`.
          progress: as in `generate`.
          chat_template_kwargs: further variables of the template, such as `enable_thinking`.
          add_generation_prompt: whether the prompt ends with the beginning of the assistant's turn.
          continue_final_message: whether the prompt ends within the last message, which is then
            continued; not with `add_generation_prompt`.
          tools: JSON schemas of functions that the template describes; none is called.

        Raises:
          ValueError: there is no tokenizer, it has no chat template, the template refuses the
            messages, or as in `generate`.
        """
        prompts = self._chat_prompts(
            messages,
            chat_template_kwargs,
            add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        )
        return self.generate(prompts, sampling_params, progress)

    def _chat_prompts(self, messages, *args, **named) -> list[list[int]]:
        """The prompts of conversations, as token ids; further arguments are those of `chat_ids`."""
        if self.tokenizer is None or not has_chat_template(self.tokenizer):
            raise ValueError(
                "chat needs a chat template; give LLM(..., tokenizer=...) that has one"
            )
        return [
            chat_ids(self.tokenizer, conversation, *args, **named)
            for conversation in as_conversations(messages)
        ]

    def compare_with_plain(
        self,
        prompts: Prompt | PromptDict | Sequence[Prompt | PromptDict],
        params: SamplingParams | Sequence[SamplingParams],
        progress: bool = False,
    ) -> list[Difference]:
        """Generates with and without speculation and explains every sample that differs.

        Args:
          prompts, params: as in `generate`; a seed that is drawn is drawn once.
          progress: whether to show a bar for each of the two.

        Returns:
          one `Difference` per differing sample, none when all tokens are equal. In `block` and
          `recursive` differences are expected: these rules are equal in distribution, not token by
          token.

        Raises:
          InvalidLogitsError: a sample has the finish reason `error`: there is nothing to compare.
        """
        _, jobs = self._jobs(prompts, params)
        samples, self.totals = self._run(jobs, progress)
        require_valid(samples, lambda index: f"prompt {jobs[index].request}")
        return self.compare_samples(jobs, samples, progress)

    def compare_samples(
        self, jobs: Sequence[Job], samples: Sequence[SampleOutput], progress: bool = False
    ) -> list[Difference]:
        """Decodes the jobs plainly as well and explains every sample that differs.

        Args:
          jobs: jobs that were decoded with speculation.
          samples: the sample of each job.
          progress: whether to show a bar.
        """
        if self.spec is not None and self.spec.invariant:
            again = [job.without_speculation() for job in jobs]
            plain, _ = self._run(again, progress, self.engine, PLAINLY)
        else:
            if self._plain is None:
                self._plain = self._engine(None, mesh=self.mesh)
                self._plain.set_params(self.params)
            plain, _ = self._run(jobs, progress, self._plain, PLAINLY)
        return first_differences(self.engine.runner, jobs, plain, samples)

    # --- input and output ------------------------------------------------------------------------

    def _jobs(self, prompts: Any, params: Any) -> tuple[list[list[int]], list[Job]]:
        """Checks prompts and params; returns the prompts as token ids, and one job per sample."""
        prompts = as_prompts(prompts)
        params = self.get_default_sampling_params() if params is None else params
        agree = self.engine.runner.agreement.agree  # all processes of a replica draw the same seed
        ids, jobs, seeds = [], [], CallSeeds(lambda: int(agree(float(draw_seed()))))
        pairs = zip(prompts, as_params(params, len(prompts)), strict=True)
        for index, (prompt, sampling) in enumerate(pairs):
            where = f"prompt {index}"
            if isinstance(prompt, str):
                if self.tokenizer is None:
                    raise ValueError(
                        f"{where} is a string, and there is no tokenizer; give token ids"
                    )
                prompt = prompt_ids(self.tokenizer, prompt)
            ids.append(check_prompt(where, prompt, self.cfg.vocab_size, self.tokenizer))
            eos = self.cfg.eos_token_ids
            mine = make_jobs(ids[-1], sampling, eos, self.tokenizer, index, seeds=seeds)
            check_job(where, mine[0], self.engine.limits)
            jobs += mine
        return ids, jobs

    def _run(
        self,
        jobs: Sequence[Job],
        progress: bool,
        engine: BaseEngine | None = None,
        doing: str | None = None,
    ) -> tuple[list[SampleOutput], Totals]:
        """Runs jobs; shows a bar if asked for, and logs whether drafting was slow.

        Args:
          engine: the engine that runs them; None: the LLM's own.
          doing: name of the bar.
        """
        engine = self.engine if engine is None else engine
        bar = tqdm(
            total=len(jobs), desc=doing, unit="sample", dynamic_ncols=True, disable=not progress
        )

        def show(finished: int, totals: Totals) -> None:
            bar.update(finished - bar.n)
            rate = totals.tokens / max(totals.seconds, 1e-9)
            bar.set_postfix_str(f"{rate:.0f} tok/s, accept length {totals.accept_length:.2f}")

        with bar:
            result = engine.generate(jobs, show if progress else None)
        _, totals = result
        length = totals.drafted_accept_length
        if self._may_warn and totals.drafted_rounds >= WARN_ROUNDS and length < LEAST:
            self._may_warn = False
            log.warning(
                "accept length has been %.2f for %d rounds: speculation only costs time; is the "
                "draft the one that belongs to this policy?", length, totals.drafted_rounds
            )  # fmt: skip
        if (line := engine.slower_than_plain()) is not None:
            log.log(logging.WARNING if progress else logging.INFO, "%s", line)
        return result


# --- what a call is given -------------------------------------------------------------------------


def as_prompts(given: Any) -> list[Prompt]:
    """Makes a list of texts and token lists; `check_prompt` checks the token ids.

    Args:
      given: a prompt or a sequence of prompts. A prompt is text, token ids (a list or an array), or
        one of vLLM's prompt dicts.

    Raises:
      ValueError: `given` is none of these.
    """
    several = _as_list(given)
    if several is None or (several and isinstance(several[0], numbers.Number)):
        several = [given]
    if not several:
        raise ValueError("no prompts were given; expected at least one")
    return [_as_prompt(f"prompt {index}", prompt) for index, prompt in enumerate(several)]


def _as_prompt(where: str, given: Any) -> Prompt:
    prompt = given
    if isinstance(given, Mapping) and len(given) == 1:
        prompt = given.get("prompt", given.get("prompt_token_ids"))
        if isinstance(prompt, str) != ("prompt" in given):
            prompt = None
    prompt = prompt if isinstance(prompt, str) else _as_list(prompt)
    if prompt is None:
        raise ValueError(
            f"{where}: expected text, a list of token ids, or a dict with one key, "
            f"{{'prompt': text}} or {{'prompt_token_ids': ids}}, got {_named(given)}; for messages "
            "use LLM.chat"
        )
    return prompt


def as_params(given: Any, prompts: int) -> list[SamplingParams]:
    """Makes a list with one `SamplingParams` for each prompt.

    Args:
      given: one for all prompts, or a sequence with one for each.
      prompts: number of prompts.

    Raises:
      ValueError: `given` is something else, or their number is not that of the prompts.
    """
    if isinstance(given, SamplingParams):
        return [given] * prompts
    several = _as_list(given) or []
    if len(several) != prompts or not all(isinstance(p, SamplingParams) for p in several):
        raise ValueError(
            f"params: expected SamplingParams, or a list with one for each of {prompts} prompts, "
            f"got {_named(given)}"
        )
    return several


def as_conversations(given: Any) -> list[list[Message]]:
    """Makes a list of conversations, each a list of messages, of one conversation or several.

    Raises:
      ValueError: `given` is neither, or a message has no role.
    """
    items = _as_list(given) or [None]
    conversations = [items] if isinstance(items[0], Mapping) else list(map(_as_list, items))
    if not all(c and all(isinstance(m, Mapping) and "role" in m for m in c) for c in conversations):
        raise ValueError(
            "messages are a list of {'role': 'user', 'content': text}, or a list of such lists "
            f"for several conversations, got {_named(given)}"
        )
    return conversations


def _as_list(given: Any) -> list | None:
    """A sequence or array as a list; None for text, bytes, mappings and anything else."""
    if hasattr(given, "tolist") and getattr(given, "ndim", 0):
        return given.tolist()
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray, memoryview)):
        return list(given)
    return None


def _named(value: Any) -> str:
    """A value and its type, short enough for one line."""
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


# --- memory ---------------------------------------------------------------------------------------


def page_budget(
    cfg: ModelConfig,
    source: Draft | None,
    mesh: jax.sharding.Mesh | None,
    slots: Any,
    products: Products,
) -> int | None:
    """Computes the most bytes that the pages of an `LLM`'s replica take where no setting says it.

    The budget depends on the machine and the model alone, so that every start compiles the same
    programs.

    Args:
      slots: shapes of the recurrent states of all sequences, which take their part first.
      products: formats of matrices that are asked for.

    Returns:
      bytes over all devices of the replica; None: not known (the devices of several processes, or
      those that a program is only compiled for).
    """
    devices = [jax.local_devices()[0]] if mesh is None else list(mesh.devices.flat)
    if {device.process_index for device in devices} != {jax.process_index()}:
        return None
    if devices[0].platform == "cpu":
        on_one = int(host_memory() * HOST_SHARE) // jax.local_device_count()
    else:
        limits = [_memory_limit(device) for device in devices]
        if None in limits:
            return None
        policy = jax.eval_shape(lambda: init_params(cfg))
        weights = 2 * bytes_of(policy)  # `LLM` keeps them beside those in the layout that decodes
        if not is_exact(products := asked_of(cfg, products)):  # it keeps the packed ones alone
            run = cfg.running(products=products, fused=False, scan_layers=False)
            weights = bytes_of(jax.eval_shape(functools.partial(to_decode_layout, cfg=run), policy))
        if source and source.network:
            weights += 2 * bytes_of(jax.eval_shape(lambda: init_params(source.network)))
        on_one = int(min(limits) * DEVICE_SHARE) - weights // len(devices)
    page = jax.eval_shape(lambda: empty(cfg, Room(slots=0, pages=1, page_size=PAGE)).pages)
    # Heads that the devices cannot divide among themselves lie on each of them.
    states, one_page = (
        sharding.device_bytes(sharding.shapes(tree, mesh, sharding.state_shardings))
        for tree in (slots, page)
    )
    return int(max(on_one - states, 0) * bytes_of(page) / max(one_page, 1))


def _memory_limit(device: jax.Device) -> int | None:
    """Returns the bytes of an accelerator that a process may use; None: not known."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None  # programs are only compiled for this device


# Limits of the control group of a container, in both versions of control groups.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int:
    """Returns the bytes of memory of this computer, or of the container that it runs in."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or no limit
            sizes.append(int(Path(file).read_text()))
    return min(sizes)
