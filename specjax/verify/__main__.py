"""Command line of the checker.

    python -m specjax.verify --model DIR [--strategy 4_1_5] [--acceptance coupled] [--json FILE]

The exit status is 0 if every check passed, 1 if one failed, 2 if the input cannot be checked, 3 if
no check failed but too few drafts were accepted to test the acceptance rule.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import ClassVar

from specjax import interrupts
from specjax.checked_json import CheckpointError
from specjax.command_line import parse_config
from specjax.config.dtype import AUTO, ENGINE_DTYPES
from specjax.control.config import Speculation
from specjax.kernels.names import ATTENTION
from specjax.models.families import add_family
from specjax.settings import REQUIRED, option
from specjax.verify import InputError, Verdict, check, load


@dataclasses.dataclass(frozen=True)
class VerifyConfig(Speculation):
    """`python -m specjax.verify`.

    Attributes:
      model: a Hugging Face directory or id, or a GGUF file.
      revision: branch, tag or commit of a Hugging Face id.
      family: a model family of your own as module:attribute; it replaces the package's family of
        the same model_type, if there is one.
      samples: number per chi-square check; null: as many as sharpen the verdict, on CPUs as many
        as take about a minute.
      requests: number for the identity check.
      prompt: text after which the distribution is checked; null: random tokens.
      tokens: the prompt as token ids, such as 5,17,3.
      dtype: dtype of weights and arithmetic; auto: the checkpoint's on GPU and TPU, float32 on CPU.
      attention: the attention kernel: auto, the platform's own; or by name, which is refused where
        it cannot run.
      seed: seed of all samples.
      json: file to which the verdict is also written.
    """

    unread: ClassVar[Mapping[str, str]] = {
        "exact_mode": "the check of identity compares every token with plain decoding's anyway; "
        "leave it out",
        "telemetry": "the checks use random requests, whose rejections do not predict those of "
        "your prompts; use `specjax generate --telemetry` with prompts of your own",
    }

    model: str = REQUIRED
    revision: str | None = None
    family: str | None = None
    samples: int | None = None
    requests: int = 16
    prompt: str | None = option(None, needs="!tokens")
    tokens: list[int] | None = None
    dtype: str = option(AUTO, choices=ENGINE_DTYPES)
    attention: str = option("auto", choices=ATTENTION, own_path=True)
    # Of 63 bits, because the chi-square samples use the seeds after it.
    seed: int = option(0, least=0, below=1 << 63)
    json: str | None = None


def main(argv: list[str] | None = None, prog: str = "python -m specjax.verify") -> int:
    """Checks a model and prints the verdict; returns the exit status."""
    description = "Checks that speculative decoding of a model is lossless."
    cfg, _ = parse_config(VerifyConfig, argv, prog, description)
    try:
        verdict = _check(cfg, prog)
    except InputError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    print(verdict)
    if cfg.json:
        verdict.write(cfg.json)
    if not verdict.conclusive:
        return 3
    return 0 if verdict else 1


def _check(cfg: VerifyConfig, prog: str) -> Verdict:
    try:
        if not cfg.speculates:
            raise InputError("strategy=off is plain decoding, which leaves nothing to check")
        add_family(cfg.family)
        control = cfg.control_config()
        llm = load(cfg.model, cfg.spec(), cfg.dtype, cfg.revision, control, cfg.attention)
        for note in (*llm.notes, f"{prog}: {llm.drafting.described()}"):
            print(note, file=sys.stderr)
        verdict = check(
            llm,
            prompt=cfg.tokens or cfg.prompt,
            samples=cfg.samples,
            requests=cfg.requests,
            seed=cfg.seed,
            progress=True,
        )
    except (ValueError, OSError, CheckpointError) as error:
        raise InputError(str(error)) from error
    return dataclasses.replace(verdict, model=cfg.model)


if __name__ == "__main__":
    interrupts.run(main)
