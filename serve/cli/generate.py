"""`specjax generate`: generates samples of prompts, and writes each one when it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from serve.cli import Failure, UsageError, prompts
from serve.cli.arguments import DESCRIPTION, GenerateConfig
from serve.cli.outputs import JsonLines, TextInOrder, key_of, origin_of, row_of
from serve.cli.prompts import Prompt
from specjax import interrupts
from specjax.command_line import parse_config
from specjax.config import SamplingParams
from specjax.control.config import Speculation
from specjax.settings import part

if TYPE_CHECKING:  # they import jax
    from specjax import LLM
    from specjax.engine.request import CallSeeds, Job, SampleOutput, Totals


class Request(NamedTuple):
    """A prompt with its token ids, sampling parameters, one job per sample, and `key_of` hash."""

    prompt: Prompt
    ids: list[int]
    params: SamplingParams
    jobs: list[Job]
    key: str


def main(argv: Sequence[str], prog: str) -> int:
    """Runs `specjax generate`; returns the exit status."""
    cfg, _ = parse_config(GenerateConfig, argv, prog, DESCRIPTION, require=_check)
    if cfg.file is not None:
        given, problems = prompts.of_file(cfg.file, cfg.json_lines, cfg.chat)
    else:
        given, problems = prompts.of_arguments(cfg.prompts, cfg.chat), []
    for problem in problems:
        _print(problem)
    if not given:
        raise Failure("no prompt is left to generate for" if problems else "there are no prompts")
    for name in ("chat_template_kwargs", "chat_template"):
        if getattr(cfg, name) and all(prompt.messages is None for prompt in given):
            raise UsageError(
                f"{name} has no effect: no prompt is a conversation, and without --chat a text "
                "does not go through the chat template; add --chat, or leave it out"
            )
    if cfg.output is None:
        return _generate(cfg, given, len(problems), None)
    with contextlib.closing(JsonLines(cfg.output, cfg.resume, cfg.force)) as lines:
        return _generate(cfg, given, len(problems), lines)


def _check(cfg: GenerateConfig) -> None:
    """Raises ValueError for settings that contradict each other."""
    if cfg.file is not None and cfg.prompts:
        raise ValueError("expected prompts as arguments or --file, got both")
    if cfg.file is None and not cfg.prompts:
        raise ValueError("expected prompts as arguments, or --file FILE (- is standard input)")
    if cfg.output in (None, prompts.STDIN) and (cfg.resume or cfg.force):
        raise ValueError("--resume and --force are for --output FILE")
    if cfg.resume and cfg.force:
        raise ValueError("--resume continues a file and --force replaces it; choose one")


def _generate(
    cfg: GenerateConfig, given: list[Prompt], failed: int, lines: JsonLines | None
) -> int:
    params = cfg.sampling({"max_tokens": None})
    counts = [prompt.settings.get("n", params.n) for prompt in given]
    with interrupts.at_once("specjax generate"):
        from specjax.engine.request import CallSeeds

        llm = _load(cfg, sum(count for count in counts if isinstance(count, int)))
    params = _with_defaults(llm, cfg)
    if lines is not None:
        lines.require_same(_origin(llm, cfg), cfg.model)
    if params.seed is None:
        params = _seeded(params, given, lines)
    requests, seeds = [], CallSeeds()
    for prompt in given:
        try:
            requests.append(_ask(llm, prompt, params, cfg, seeds))
        except (ValueError, TypeError) as error:
            failed += 1
            _print(f"{prompt.where}: {error}")
    missing = [
        (request, job)
        for request in requests
        for job in request.jobs
        if lines is None or not lines.has(request.prompt, job.sample, request.key)
    ]
    kept = sum(len(request.jobs) for request in requests) - len(missing)
    if kept:
        _print(f"{kept} samples are in {cfg.output} already")
    compilers = logging.getLogger("specjax.engine.programs")
    compilers.disabled = cfg.quiet
    totals, compiling, ended = _run(llm, missing, lines, cfg)
    compilers.disabled = False
    invalid = sum(sample.error is not None for _, sample in ended)
    if cfg.stats:
        _print(_stats(llm, totals, len(missing), compiling))
        if (line := llm.engine.slower_than_plain()) is not None:
            _print(f"{line}; strategy=off decodes plainly")
    if llm.telemetry is not None:  # why drafts were rejected
        _print(str(llm.telemetry.summary()))
    if failed:
        _print(f"{failed} of {failed + len(requests)} prompts could not be used")
    if invalid:
        _print(f"{invalid} of {len(missing)} samples ended by an error")
    elif cfg.exact_mode and ended:
        failed += _count_differences(llm, ended, requests)
    return 1 if failed or invalid else 0


def _with_defaults(llm: LLM, cfg: GenerateConfig) -> SamplingParams:
    """The sampling parameters of the command line over the model's defaults."""
    from specjax.models.generation_config import describe_defaults, sampling_defaults

    if line := describe_defaults(llm.generation, "generation_config=none"):
        _print(line)
    try:
        return cfg.sampling(sampling_defaults(llm.generation))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _load(cfg: GenerateConfig, samples: int) -> LLM:
    """Loads the model, with no more slots than there are samples."""
    from serve.settings import EngineSection, ServeConfig, load_llm
    from specjax.checked_json import CheckpointError, UnsupportedModelError

    slots = min(cfg.max_batch, -(-max(1, samples) // max(1, cfg.replicas)))
    chunk = 16 if samples == 1 else 32
    engine = part(EngineSection, cfg, max_batch=slots, chunk_tokens=chunk)
    speculation = part(Speculation, cfg)
    try:
        llm = load_llm(part(ServeConfig, cfg, engine=engine, speculation=speculation), {})
    except (CheckpointError, UnsupportedModelError) as error:
        raise Failure(str(error)) from error
    except ValueError as error:  # a ConfigError among them
        raise UsageError(str(error)) from error
    for note in llm.notes:
        _print(note)
    if cfg.stats and not llm.drafting.by_default:  # which `LLM` warns of
        _print(llm.drafting.described())
    if cfg.stats:
        for line in llm.engine.engines[0].start_lines():
            _print(line)
    return llm


def _seeded(
    params: SamplingParams, given: Sequence[Prompt], lines: JsonLines | None
) -> SamplingParams:
    """The parameters with a seed: that of the samples to go on with, or one that is drawn."""
    from specjax.engine.request import draw_seed

    rows = {} if lines is None else lines.rows
    seeds = {index: row["seed"] for (index, _), row in rows.items()}
    kept = [seeds[p.index] for p in given if "seed" not in p.settings and p.index in seeds]
    params = dataclasses.replace(params, seed=kept[0] if kept else draw_seed())
    if params.temperature > 0 and lines is None:
        _print(f"--seed {params.seed} repeats these samples")
    return params


def _ask(
    llm: LLM, prompt: Prompt, params: SamplingParams, cfg: GenerateConfig, seeds: CallSeeds
) -> Request:
    """Encodes a prompt; raises ValueError or TypeError where the model cannot take it."""
    from specjax.engine.request import check_prompt, make_jobs

    if prompt.settings:
        params = dataclasses.replace(params, **prompt.settings)
    ids = _ids(llm, prompt, cfg.chat_template_kwargs)
    where, eos = "the prompt", llm.cfg.eos_token_ids  # the caller's message names it
    ids = check_prompt(where, ids, llm.cfg.vocab_size, llm.tokenizer)
    jobs = make_jobs(ids, params, eos, llm.tokenizer, prompt.index, where, seeds)
    llm.engine.make(jobs[0])
    local = Path(cfg.model).exists()
    place = str(Path(cfg.model).resolve()) if local else f"{cfg.model}@{cfg.revision or 'main'}"
    return Request(prompt, ids, params, jobs, key_of(place, jobs[0]))


def _ids(llm: LLM, prompt: Prompt, options: Mapping[str, Any]) -> Sequence[int]:
    from specjax.tokenizer import chat_ids, check_options, has_chat_template, prompt_ids

    tokenizer = llm.tokenizer
    if prompt.text is not None and not isinstance(prompt.text, str):
        return prompt.text
    if tokenizer is None:
        raise ValueError("the model has no tokenizer; expected token ids as JSON lines")
    if prompt.messages is None:
        return prompt_ids(tokenizer, prompt.text)
    if not has_chat_template(tokenizer):
        raise ValueError(
            "the model has no chat template; give one with --chat-template FILE, or write the "
            "prompt as the model expects it, as text without --chat"
        )
    check_options(tokenizer, options := {**options, **prompt.template})
    return chat_ids(tokenizer, prompt.messages, options)


def _origin(llm: LLM, cfg: GenerateConfig) -> dict[str, str]:
    source = "nothing" if llm.spec is None else llm.drafting.named()
    drafts = f"{', '.join(map(str, llm.drafting.strategies))} of {source}"
    return origin_of(llm, cfg.acceptance, drafts)


def _run(
    llm: LLM, jobs: list[tuple[Request, Job]], lines: JsonLines | None, cfg: GenerateConfig
) -> tuple[Totals, float, list[tuple[Job, SampleOutput]]]:
    """Runs all jobs, and writes each sample when it ends, unless it ended by an error.

    Returns:
      (totals, compiling, samples): sums over all steps but the first; the seconds of the first
      step, which compiles; and the jobs with their samples.
    """
    from tqdm import tqdm

    from specjax.engine.request import Totals, decoder_of
    from specjax.engine.sequence import SampleStream

    totals, samples = Totals(llm.engine.runner.steps), []
    stream, origin = None, _origin(llm, cfg)
    is_streamed = lines is None and len(jobs) == 1 and llm.tokenizer is not None
    ordered = TextInOrder([(request.prompt.index, job.sample) for request, job in jobs])
    start, compiled = time.perf_counter(), None
    added = {llm.engine.add(job): (request, job) for request, job in jobs}
    if is_streamed:
        [(sequence, (_, job))] = added.items()
        stream = SampleStream(sequence, decoder_of(llm.tokenizer, job.params))
    hidden = is_streamed or cfg.quiet or not sys.stderr.isatty()
    try:
        with tqdm(total=len(jobs), unit="sample", dynamic_ncols=True, disable=hidden) as bar:
            while llm.engine.has_work:
                ended = None
                events = llm.engine.step()
                compiled = compiled or time.perf_counter()
                for event in events:
                    request, job = added.pop(event.sequence)
                    sample = ended = llm.with_text(job, event.sample)
                    totals.add(sample)
                    samples.append((job, sample))
                    where, text = f"{request.prompt.where}, sample {job.sample}", None
                    if sample.error is not None:
                        _print(f"{where}: {sample.error}")
                    elif lines is not None:
                        lines.write(row_of(request.prompt, job, request.key, sample, origin))
                    elif stream is None:
                        heading = f"==> {where} <==\n" if len(jobs) > 1 else ""
                        ids = " ".join(map(str, sample.token_ids))  # without a tokenizer
                        text = heading + (ids if sample.text is None else sample.text)
                    ordered.add((request.prompt.index, job.sample), text)
                    bar.update()
                if stream is not None:
                    print(stream.take(ended)[1], end="" if ended is None else "\n", flush=True)
    except BaseException:
        llm.engine.clear()
        if lines is not None and cfg.output != prompts.STDIN:
            _print(f"the finished samples are in {cfg.output}; --resume generates the others")
        raise
    compiled = compiled or start
    totals.seconds = time.perf_counter() - compiled
    return totals, compiled - start, samples


def _count_differences(
    llm: LLM, ended: list[tuple[Job, SampleOutput]], requests: list[Request]
) -> int:
    """Decodes the generated samples plainly; returns how many have other tokens."""
    jobs, samples = zip(*ended, strict=True)
    where = {request.prompt.index: request.prompt.where for request in requests}
    tokens = sum(len(sample.token_ids) for sample in samples)
    differences = llm.compare_samples(jobs, samples)
    if differences:
        count = f"{len(differences)} of {len(jobs)} samples differ from plain decoding"
    else:
        count = f"all {tokens} tokens of {len(jobs)} samples are those of plain decoding"
    _print(f"compared: {count}")
    for difference in differences:
        _print(f"  {where[difference.request]}: {difference}")
    return len(differences)


def _stats(llm: LLM, totals: Totals, samples: int, compiling: float) -> str:
    rate = totals.tokens / totals.seconds if totals.seconds else 0.0
    speed = (
        f"{samples} samples, {totals.tokens} tokens in {totals.seconds:.2f} s ({rate:.0f} tok/s), "
        f"after {compiling:.2f} s of compiling"
    )
    if not totals.drafted_rounds:
        return f"{speed}\nnothing was drafted"
    depths = "  ".join(
        f"{depth}: {'-' if share != share else f'{share:.0%}'}"
        for depth, share in enumerate(totals.per_depth(), 1)
    )
    strategies = ", ".join(map(str, llm.drafting.strategies))
    how = f"{strategies}, {llm.spec.acceptance}, {llm.drafting.named()}"
    return (
        f"{speed}\nAcceptance length: {totals.accept_length:.2f} tokens per round over "
        f"{totals.rounds} rounds, {totals.rounds - totals.drafted_rounds} of them plain ({how})\n"
        f"accepted {totals.accept_rate:.0%} of what was drafted in depth; at depth {depths}"
    )


def _print(text: str) -> None:
    """Prints to standard error, because standard output may have the samples."""
    print(f"specjax generate: {text}", file=sys.stderr)
