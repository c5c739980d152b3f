"""`specjax convert`: `specjax.checkpoint.convert` on the command line."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import ClassVar

from serve.cli import Failure, UsageError
from specjax import interrupts
from specjax.command_line import parse_config
from specjax.registry import READERS
from specjax.settings import REQUIRED, option, values_of
from specjax.weights import AUTO

DESCRIPTION = """Converts checkpoints between the layouts of Hugging Face and Orbax.

The source may be a Hugging Face directory or id, a GGUF file, the directory of a run of
train.rl or train.sft, the one of its checkpoints, a head's safetensors file, or the directory of an
EAGLE-3 head. The target is:

  Hugging Face -> Orbax   DIR/checkpoints/0 and DIR/tokenizer, which LLM(DIR), `specjax generate`,
                          `specjax serve`, train.rl (model=DIR) and POST /update_weights take
  GGUF -> Hugging Face    the weights as llama.cpp computes with them: dequantised
  Orbax -> Hugging Face   config.json, safetensors, tokenizer files, for these, transformers, vLLM
  a head alone            mtp.safetensors, for train.rl (rollout.draft=FILE) and /update_weights
  EAGLE-3 -> EAGLE-3      config.json and safetensors in the layout of speculators (vLLM), whatever
                          that of the source is; --like names the policy

Weights keep every bit unless --dtype says otherwise. The target appears when it is complete, and
not at all if the disk is full or the command is killed.

examples:
  specjax convert runs/sums exported               the newest step of a run
  specjax convert runs/sums exported --step 12     an earlier one
  specjax convert assets/sums started --what head  its draft head alone
  specjax convert head other --like POLICY         an EAGLE-3 head in the layout of vLLM"""


@dataclasses.dataclass
class ConvertConfig:
    """`specjax convert`.

    Attributes:
      source: the checkpoint to read: a path, or a Hugging Face id.
      target: the directory to write; must not exist.
      to: layout to write; null: the other one.
      load_format: file format of the source: auto, or a name, or your own as
        package.module:attribute.
      family: your own model family as module:attribute, for checkpoints of its model_type; it
        replaces specjax's family of that model_type.
      what: part to write; null: all that the source has.
      step: step of a run; null: the newest.
      revision: branch, tag or commit of a source that is a Hugging Face id.
      dtype: dtype of the written weights; null: that of the source. mxfp4: that of the experts of
        gpt_oss, and bfloat16 of the rest.
      like: Hugging Face directory or id with config and tokenizer, for a source that does not say
        what it is: a head alone.
    """

    words: ClassVar[tuple[str, ...]] = ("source", "target")

    source: str = REQUIRED
    target: str = REQUIRED
    to: str | None = option(None, choices=("hf", "orbax", "speculators"))
    load_format: str = option(AUTO, choices=(AUTO, *READERS.names), own_path=True)
    family: str | None = None
    what: str | None = option(None, choices=("policy", "head", "both"))
    step: int | None = None
    revision: str | None = None
    dtype: str | None = option(None, choices=("float32", "bfloat16", "float16", "mxfp4"))
    like: str | None = None


def main(argv: Sequence[str], prog: str) -> int:
    """Converts a checkpoint and prints what was written; returns the exit status."""
    cfg, _ = parse_config(ConvertConfig, argv, prog, DESCRIPTION)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed

    with interrupts.at_once(prog):
        from specjax.checked_json import CheckpointError, UnsupportedModelError
        from specjax.checkpoint.convert import convert
        from specjax.models.families import add_family

    try:
        if cfg.load_format != AUTO:
            READERS.find(cfg.load_format)
        add_family(cfg.family)
    except ValueError as error:
        raise UsageError(str(error)) from error
    values = values_of(cfg)
    del values["family"]
    try:
        print(convert(**values))
    except (CheckpointError, UnsupportedModelError) as error:
        raise Failure(str(error)) from error
    return 0
