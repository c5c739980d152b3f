"""Command line of the checker.

    python -m specjax.verify --model DIR [--strategy 4_1_5] [--acceptance coupled] [--json FILE]

The exit status is 0 if every check passed, 1 if one failed, 2 if the input cannot be checked, 3 if
no check failed but too few drafts were accepted to test the acceptance rule.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

from specjax import interrupts
from specjax.checked_json import CheckpointError
from specjax.command_line import ArgumentParser
from specjax.config.dtype import AUTO, ENGINE_DTYPES
from specjax.models.families import add_family
from specjax.speculation import add_flags, as_flags, settings_of
from specjax.spelling import flags, spelled
from specjax.verify import FEWEST_SAMPLES, MOST_SAMPLES, InputError, Verdict, check, load

# Flags that are refused here, and why.
_REFUSED = {
    "exact_mode": "the check of identity compares every token with plain decoding's anyway; leave "
    "it out",
    "telemetry": "the checks use random requests, whose rejections do not predict those of your "
    "prompts; use `specjax generate --telemetry` with prompts of your own",
}


def main(argv: list[str] | None = None, prog: str = "python -m specjax.verify") -> int:
    parser = _parser(prog)
    args = parser.parse_args(argv)
    try:
        verdict = _check(args, parser.prog)
    except InputError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(verdict)
    if args.json:
        verdict.write(args.json)
    if not verdict.conclusive:
        return 3
    return 0 if verdict else 1


def _check(args: argparse.Namespace, prog: str) -> Verdict:
    try:
        settings = settings_of(args)
        if settings.spec().is_off:
            plain = as_flags(settings.plain_by)
            raise InputError(f"{plain} is plain decoding, which leaves nothing to check")
        add_family(args.family)
        llm = load(
            args.model,
            settings.spec(),
            args.dtype,
            args.revision,
            flags,
            settings.control_config(),
            args.attention,
        )
    except (ValueError, OSError, CheckpointError) as error:
        raise InputError(spelled(error, flags)) from error
    for note in (*llm.notes, f"{prog}: {llm.drafting.described(flags, always_drafts=True)}"):
        print(note, file=sys.stderr)
    try:
        verdict = check(
            llm,
            prompt=_token_ids(args.tokens) if args.tokens else args.prompt,
            samples=args.samples,
            requests=args.requests,
            seed=args.seed,
            progress=True,
        )
    except ValueError as error:  # a request that this model cannot serve
        raise InputError(spelled(error, flags)) from error
    return dataclasses.replace(verdict, model=args.model)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog=prog,
        description="Checks that speculative decoding of a model is lossless.",
    )
    model = "a Hugging Face directory or id, or a GGUF file"
    parser.add_argument("--model", required=True, help=model)
    parser.add_argument("--revision", help="branch, tag or commit of a Hugging Face id")
    parser.add_argument(
        "--family",
        metavar="MODULE:ATTRIBUTE",
        help="a model family of your own; it replaces the package's family of the same model_type, "
        "if there is one",
    )
    add_flags(parser.add_argument_group("speculation"), _REFUSED)
    parser.add_argument(
        "--samples",
        type=int,
        help=f"number per chi-square check (default: {MOST_SAMPLES}, on CPUs as many as take about "
        f"a minute, at least {FEWEST_SAMPLES})",
    )
    parser.add_argument(
        "--requests", type=int, default=32, help="number for the identity check (default: 32)"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--prompt",
        help="text after which the distribution is checked (default: random tokens)",
    )
    group.add_argument("--tokens", help="the prompt as token ids, such as 5,17,3")
    parser.add_argument(
        "--dtype",
        default=AUTO,
        choices=ENGINE_DTYPES,
        help="default: auto, the checkpoint's on GPU and TPU, float32 on CPU",
    )
    parser.add_argument("--seed", type=_seed, default=0, help="of all samples (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="also write the verdict there")
    return parser


def _seed(text: str) -> int:
    try:
        seed = int(text)
    except ValueError:
        seed = -1
    if not 0 <= seed < 1 << 63:  # the chi-square samples use the seeds after it
        raise argparse.ArgumentTypeError(
            f"expected an integer of 63 bits, 0 to {(1 << 63) - 1}, got {text!r}"
        )
    return seed


def _token_ids(text: str) -> list[int]:
    try:
        return [int(t) for t in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(f"--tokens expects token ids such as 5,17,3; got {text!r}") from None


if __name__ == "__main__":
    interrupts.run(main)
