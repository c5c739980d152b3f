"""`specjax generate`: generates samples of prompts, and writes each one when it ends."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from serve.cli import Failure, UsageError, prompts
from serve.cli.arguments import build_parser, sampling_params
from serve.cli.outputs import (
    EXACT,
    JsonLines,
    TextInOrder,
    closing,
    key_of,
    origin_of,
    row_of,
)
from serve.cli.prompts import Prompt
from specjax import interrupts
from specjax.config import SamplingParams
from specjax.speculation import as_flags, settings_of
from specjax.spelling import flags, spelled

if TYPE_CHECKING:  # they import jax
    from specjax import LLM
    from specjax.engine.compare import Difference
    from specjax.engine.request import CallSeeds, Job, SampleOutput, Totals


class Asked(NamedTuple):
    """A prompt with its token ids, sampling parameters, one job per sample, and `key_of` hash."""

    prompt: Prompt
    ids: list[int]
    params: SamplingParams
    jobs: list[Job]
    key: str


def run(argv: Sequence[str]) -> int:
    """Runs `specjax generate`; returns the exit status."""
    parser = build_parser()
    args = parser.parse_intermixed_args(argv)
    try:
        # The model's defaults may allow more tokens, so that min_tokens is checked later.
        params = sampling_params(args, {"max_tokens": None})
        args.speculation = settings_of(args)
    except ValueError as error:
        raise UsageError(str(error)) from error
    _check_arguments(args)
    if args.file is not None:
        asked, problems = prompts.of_file(args.file, args.json_lines, args.chat)
    else:
        asked, problems = prompts.of_arguments(args.prompts, args.chat), []
    for problem in problems:
        _print(problem)
    if not asked:
        raise Failure("no prompt is left to generate for" if problems else "there are no prompts")
    _require_conversation(args, asked)
    lines = None if args.output is None else JsonLines(args.output, args.resume, args.force)
    with closing(lines):
        return _generate(args, params, asked, len(problems), lines)


def _check_arguments(args: argparse.Namespace) -> None:
    """Raises UsageError for arguments that contradict each other."""
    if args.file is not None and args.prompts:
        raise UsageError("expected prompts as arguments or --file, got both")
    if args.file is None and not args.prompts:
        raise UsageError("expected prompts as arguments, or --file FILE (- is standard input)")
    if args.json_lines and args.file is None:
        raise UsageError("--json-lines says how --file is read; add --file")
    if args.output in (None, prompts.STDIN) and (args.resume or args.force):
        raise UsageError("--resume and --force are for --output FILE")
    if args.resume and args.force:
        raise UsageError("--resume continues a file and --force replaces it; choose one")
    off, acceptance = args.speculation.spec().is_off, args.speculation.acceptance
    if args.compare and (off or acceptance not in EXACT):
        why = f"--acceptance {acceptance} is equal in distribution only; use `specjax verify`"
        if off:
            why = f"{as_flags(args.speculation.plain_by)} drafts nothing; leave one of them out"
        raise UsageError(f"--compare compares speculative tokens with plain decoding's, and {why}")


def _require_conversation(args: argparse.Namespace, asked: list[Prompt]) -> None:
    """Refuses flags of the chat template where no prompt goes through it."""
    if any(prompt.messages is not None for prompt in asked):
        return
    given = {
        "--chat-template-kwargs": args.chat_template_kwargs,
        "--chat-template": args.chat_template,
    }
    for flag, value in given.items():
        if value:
            raise UsageError(
                f"{flag} changes nothing: no prompt is a conversation, and without --chat a text "
                "does not go through the chat template; add --chat, or leave it out"
            )


def _require_template_options(llm: LLM, args: argparse.Namespace) -> None:
    """Refuses options that the model's chat template does not read."""
    from specjax.tokenizer import has_chat_template, require_template_options

    if llm.tokenizer is None or not has_chat_template(llm.tokenizer):
        return  # which each conversation says
    try:
        require_template_options(llm.tokenizer, args.chat_template_kwargs)
    except ValueError as error:
        raise UsageError(f"--chat-template-kwargs: {error}") from error


def _generate(
    args: argparse.Namespace,
    params: SamplingParams,
    given: list[Prompt],
    failed: int,
    lines: JsonLines | None,
) -> int:
    counts = [prompt.settings.get("n", params.n) for prompt in given]
    with interrupts.at_once("specjax generate"):
        from specjax.engine.programs import no_messages
        from specjax.engine.request import CallSeeds

        llm = _load(args, sum(count for count in counts if isinstance(count, int)))
    params = _with_defaults(llm, args)
    _require_template_options(llm, args)
    if lines is not None:
        lines.require_same(_origin(llm, args), args.model)
    if params.seed is None:
        params = _seeded(llm, params, given, lines)
    asked, seeds = [], CallSeeds()
    for prompt in given:
        try:
            asked.append(_ask(llm, prompt, params, args, seeds))
        except (ValueError, TypeError) as error:
            failed += 1
            _print(f"{prompt.where}: {spelled(error, flags)}")
    missing = [
        (one, job)
        for one in asked
        for job in one.jobs
        if lines is None or not lines.has(one.prompt, job.sample, one.key)
    ]
    kept = sum(len(one.jobs) for one in asked) - len(missing)
    if kept:
        _print(f"{kept} samples are in {args.output} already")
    with no_messages() if args.quiet else contextlib.nullcontext():
        totals, compiling, ended = _run(llm, missing, lines, args)
    invalid = sum(sample.error is not None for _, sample in ended)
    if args.stats:
        _print(_stats(llm, totals, len(missing), compiling))
        if (line := llm.engine.slower_than_plain()) is not None:
            _print(f"{line}; --strategy off decodes plainly")
    if llm.telemetry is not None:
        _print_rejections(llm)
    if failed:
        _print(f"{failed} of {failed + len(asked)} prompts could not be used")
    if invalid:
        _print(f"{invalid} of {len(missing)} samples ended by an error")
    elif args.speculation.exact_mode and ended and not _compare_ended(llm, ended, asked):
        return 1
    elif args.compare and asked and not _compare(llm, asked):
        return 1
    return 1 if failed or invalid else 0


def _with_defaults(llm: LLM, args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters of the command line over the model's defaults."""
    from specjax.models.generation_config import describe_defaults, sampling_defaults

    if line := describe_defaults(llm.generation, "--generation-config none"):
        _print(line)
    try:
        return sampling_params(args, sampling_defaults(llm.generation))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _load(args: argparse.Namespace, samples: int) -> LLM:
    """Loads the model, with no more slots than there are samples."""
    from serve.settings import EngineSection, ServeConfig, load_llm
    from specjax.checked_json import CheckpointError, UnsupportedModelError

    slots = min(args.max_batch, -(-max(1, samples) // max(1, args.replicas)))
    try:
        cfg = ServeConfig(
            model=args.model,
            revision=args.revision,
            family=args.family,
            chat_template=args.chat_template,
            generation_config=args.generation_config,
            engine=EngineSection(
                max_batch=slots,
                max_len=args.max_len,
                dtype=args.dtype,
                replicas=args.replicas,
                tp=args.tp,
                chunk_tokens=16 if samples == 1 else 32,
                max_stop_tokens=args.max_stop_tokens,
                attention=args.attention,
            ),
            speculation=args.speculation,
        )
        llm = load_llm(cfg, flags)
    except (CheckpointError, UnsupportedModelError) as error:
        raise Failure(str(error)) from error
    except ValueError as error:  # a ConfigError among them
        raise UsageError(as_flags(spelled(error.__cause__ or error, flags))) from error
    for note in llm.notes:
        _print(note)
    if llm.drafting.by_default or args.stats:  # else the checkpoint's head drafts, as expected
        _print(llm.drafting.described(flags))
    if args.stats:
        for line in llm.engine.engines[0].start_lines():
            _print(line)
    return llm


def _seeded(
    llm: LLM, params: SamplingParams, given: Sequence[Prompt], lines: JsonLines | None
) -> SamplingParams:
    """The parameters with a seed: that of the samples to go on with, or one that is drawn."""
    from specjax.engine.request import draw_seed

    seeds = {} if lines is None else lines.seeds
    kept = [seeds[p.index] for p in given if "seed" not in p.settings and p.index in seeds]
    params = dataclasses.replace(params, seed=kept[0] if kept else draw_seed())
    if params.temperature > 0 and lines is None:
        _print(f"--seed {params.seed} repeats these samples")
    return params


def _ask(
    llm: LLM, prompt: Prompt, params: SamplingParams, args: argparse.Namespace, seeds: CallSeeds
) -> Asked:
    """Encodes a prompt; raises ValueError or TypeError where the model cannot take it."""
    from specjax.engine.request import check_prompt, make_jobs

    if prompt.settings:
        params = dataclasses.replace(params, **prompt.settings)
    ids = _ids(llm, prompt, args.chat_template_kwargs)
    where, eos = "the prompt", llm.cfg.eos_token_ids  # the caller's message names it
    ids = check_prompt(where, ids, llm.cfg.vocab_size, llm.tokenizer)
    jobs = make_jobs(ids, params, eos, llm.tokenizer, prompt.index, where, seeds)
    llm.engine.check(jobs[0])
    local = Path(args.model).exists()
    place = str(Path(args.model).resolve()) if local else f"{args.model}@{args.revision or 'main'}"
    return Asked(prompt, ids, params, jobs, key_of(place, jobs[0]))


def _ids(llm: LLM, prompt: Prompt, options: Mapping[str, Any]) -> Sequence[int]:
    from specjax.tokenizer import chat_ids, has_chat_template, prompt_ids

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
    return chat_ids(tokenizer, prompt.messages, {**options, **prompt.template})


def _origin(llm: LLM, args: argparse.Namespace) -> dict[str, str]:
    drafts = f"{', '.join(map(str, llm.drafting.strategies))} of {_source(llm)}"
    return origin_of(llm, args.speculation.acceptance, drafts)


def _source(llm: LLM) -> str:
    """The name of the draft source."""
    return "nothing" if llm.spec is None else llm.drafting.named()


def _run(
    llm: LLM, jobs: list[tuple[Asked, Job]], lines: JsonLines | None, args: argparse.Namespace
) -> tuple[Totals, float, list[tuple[Job, SampleOutput]]]:
    """Runs all jobs, and writes each sample when it ends, unless it ended by an error.

    Returns:
      (totals, compiling, samples): sums over all steps but the first; the seconds of the first
      step, which compiles; and the jobs with their samples.
    """
    import numpy as np
    from tqdm import tqdm

    from specjax.engine.request import Totals, decoder_of
    from specjax.engine.sequence import SampleStream

    steps = llm.engine.runner.steps
    totals, samples = Totals(steps, np.zeros(steps + 2, np.int64)), []
    stream = ordered = None
    origin = _origin(llm, args)
    is_streamed = lines is None and len(jobs) == 1 and llm.tokenizer is not None
    if lines is None and not is_streamed:
        places = [(one.prompt.index, job.sample) for one, job in jobs]
        ordered = TextInOrder(places, headings=len(jobs) > 1)
    start, compiled = time.perf_counter(), None
    added = {llm.engine.add(job): (one, job) for one, job in jobs}
    if is_streamed:
        [(sequence, (_, job))] = added.items()
        stream = SampleStream(sequence, decoder_of(llm.tokenizer, job.params))
    hidden = is_streamed or args.quiet or not sys.stderr.isatty()
    try:
        with tqdm(total=len(jobs), unit="sample", dynamic_ncols=True, disable=hidden) as bar:
            while llm.engine.has_work:
                ended = None
                events = llm.engine.step()
                compiled = compiled or time.perf_counter()
                for event in events:
                    one, job = added.pop(event.sequence)
                    sample = ended = llm.with_text(job, event.sample)
                    totals.add(sample)
                    samples.append((job, sample))
                    if sample.error is not None:
                        _print(f"{one.prompt.where}, sample {job.sample}: {sample.error}")
                        if ordered is not None:
                            ordered.leave_out(one.prompt, job.sample)
                    elif lines is not None:
                        row = row_of(one.prompt, job, one.key, sample, origin)
                        lines.write(row)
                    elif ordered is not None:
                        ordered.add(one.prompt, job.sample, _text(sample))
                    bar.update()
                if stream is not None:
                    print(stream.take(ended)[1], end="" if ended is None else "\n", flush=True)
    except BaseException:
        llm.engine.clear()
        if lines is not None and args.output != prompts.STDIN:
            _print(f"the finished samples are in {args.output}; --resume generates the others")
        raise
    compiled = compiled or start
    totals.seconds = time.perf_counter() - compiled
    return totals, compiled - start, samples


def _text(sample: SampleOutput) -> str:
    """The text of a sample, or without a tokenizer its token ids."""
    return " ".join(map(str, sample.token_ids)) if sample.text is None else sample.text


def _compare(llm: LLM, asked: list[Asked]) -> bool:
    """Generates with and without speculation; returns whether every token is equal."""
    differences = llm.compare_with_plain([a.ids for a in asked], [a.params for a in asked])
    samples = sum(len(one.jobs) for one in asked)
    where = [one.prompt.where for one in asked]
    return _same(differences, samples, llm.totals.tokens, lambda request: where[request])


def _compare_ended(llm: LLM, ended: list[tuple[Job, SampleOutput]], asked: list[Asked]) -> bool:
    """Decodes the generated samples plainly; returns whether every token is equal."""
    jobs, samples = zip(*ended, strict=True)
    where = {one.prompt.index: one.prompt.where for one in asked}
    tokens = sum(len(sample.token_ids) for sample in samples)
    return _same(llm.compare_samples(jobs, samples), len(jobs), tokens, where.__getitem__)


def _same(
    differences: list[Difference], samples: int, tokens: int, where: Callable[[int], str]
) -> bool:
    if not differences:
        _print(f"compared: all {tokens} tokens of {samples} samples are those of plain decoding")
        return True
    _print(f"compared: {len(differences)} of {samples} samples differ from plain decoding")
    for difference in differences:
        _print(f"  {where(difference.request)}: {difference}")
    return False


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
    how = f"{', '.join(map(str, llm.drafting.strategies))}, {llm.spec.acceptance}, {_source(llm)}"
    return (
        f"{speed}\nAcceptance length: {totals.accept_length:.2f} tokens per round over "
        f"{totals.rounds} rounds, {totals.rounds - totals.drafted_rounds} of them plain ({how})\n"
        f"accepted {totals.accept_rate:.0%} of what was drafted in depth; at depth {depths}"
    )


def _print_rejections(llm: LLM) -> None:
    """Prints tables of why drafts were rejected."""
    from rich.console import Console

    from specjax.telemetry.__main__ import tables

    console = Console(stderr=True, highlight=False)
    for table in tables(llm.telemetry.summary()):
        console.print(table)


def _print(text: str) -> None:
    """Prints to standard error, because standard output may have the samples."""
    print(f"specjax generate: {text}", file=sys.stderr)
