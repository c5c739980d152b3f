"""`specjax convert`: `specjax.checkpoint.convert` on the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from serve.cli import Failure, UsageError
from specjax import interrupts
from specjax.command_line import ArgumentParser
from specjax.registry import READERS

EPILOG = """The source may be a Hugging Face directory or id, a GGUF file, the directory of a run of
train.rl or train.sft, the one of its checkpoints, a draft head that such a run wrote
(RUN/draft/STEP), a head's safetensors file, or the directory of an EAGLE-3 head. The target is:

  Hugging Face -> Orbax   DIR/checkpoints/0 and DIR/tokenizer, which LLM(DIR), `specjax generate`,
                          `specjax serve`, train.rl (model=DIR) and POST /update_weights take.
                          A head alone: for train.rl (rollout.draft=DIR) and /update_weights
  GGUF -> Hugging Face    the weights as llama.cpp computes with them: dequantised
  Orbax -> Hugging Face   config.json, safetensors, tokenizer files, for these, transformers, vLLM
  EAGLE-3 -> EAGLE-3      config.json and safetensors in the layout of speculators (vLLM), whatever
                          that of the source is; --like names the policy

Weights keep every bit unless --dtype says otherwise. The target appears when it is complete, and
not at all if the disk is full or the command is killed.

examples:
  specjax convert runs/sums exported               the newest step of a run
  specjax convert runs/sums exported --step 12     an earlier one
  specjax convert assets/sums started --what head  its draft head, as Orbax
  specjax convert head other --like POLICY         an EAGLE-3 head in the layout of vLLM"""


def parser() -> argparse.ArgumentParser:
    """The parser of `specjax convert`."""
    made = ArgumentParser(
        prog="specjax convert",
        description="Converts checkpoints between the layouts of Hugging Face and Orbax.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("source", help="the checkpoint to read: a path, or a Hugging Face id")
    add("target", help="the directory to write; must not exist")
    add(
        "--to",
        choices=("hf", "orbax", "speculators"),
        help="layout to write (default: the other one)",
    )
    add(
        "--load-format",
        default="auto",
        metavar="NAME",
        help="file format of the source: auto, or one of "
        f"{', '.join(READERS.names)}, or your own as package.module:attribute (default: auto)",
    )
    add(
        "--family",
        metavar="MODULE:ATTRIBUTE",
        help="your own model family, for checkpoints of its model_type; it replaces specjax's "
        "family of that model_type",
    )
    add(
        "--what",
        choices=("policy", "head", "both"),
        help="part to write (default: all that the source has)",
    )
    add("--step", type=int, metavar="N", help="step of a run (default: the newest)")
    add("--revision", help="branch, tag or commit of a source that is a Hugging Face id")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the written weights (default: that of the source)",
    )
    add(
        "--like",
        metavar="MODEL",
        help="Hugging Face directory or id with config and tokenizer, for a source that does not "
        "say what it is: a head alone, or a run of an older version",
    )
    add(
        "--force",
        action="store_true",
        help="replace a checkpoint at the target, once the new one is complete; a directory that "
        "holds more than a checkpoint is never replaced",
    )
    return made


def run(argv: Sequence[str]) -> int:
    """Converts a checkpoint and prints what was written; returns the exit status."""
    args = parser().parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed

    with interrupts.at_once("specjax convert"):
        from specjax.checked_json import CheckpointError, UnsupportedModelError
        from specjax.checkpoint.convert import convert
        from specjax.models.families import add_family
        from specjax.spelling import flags, spelled
        from specjax.weights import AUTO

    try:
        if args.load_format != AUTO:
            READERS.find(args.load_format)
    except ValueError as error:
        raise UsageError(f"--load-format: {error}") from error
    try:
        add_family(args.family)
    except ValueError as error:
        raise UsageError(spelled(error, flags)) from error
    del args.family
    try:
        print(convert(**vars(args)))
    except (CheckpointError, UnsupportedModelError) as error:
        raise Failure(str(error)) from error
    return 0
