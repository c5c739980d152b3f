"""Checks that speculative decoding is lossless for your model, on your machine.

    python -m specjax.verify --model DIR

Both checks generate through `LLM`, as any caller does:

identity: the tokens equal those of plain decoding, for requests that mix every sampling option.
    Differences that floating point explains (two tokens tie within rounding) are counted and
    allowed; any other is a bug.

chi-square: three tokens after a prompt follow the target's joint distribution, as computed by full
    forward passes. Requests allow four tokens, so that the outcomes can be enumerated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoint.weights import read_config, read_head
from specjax.config import SpecConfig
from specjax.config.dtype import AUTO
from specjax.control import ControlConfig
from specjax.engine.llm import LLM
from specjax.engine.request import InvalidLogitsError
from specjax.engine.settings import EngineConfig
from specjax.engine.sources import settle_draft
from specjax.hub import find_model
from specjax.kernels.dispatch import device_of
from specjax.tokenizer import prompt_ids
from specjax.verify.chi_square import ALPHA, chi_square_checks
from specjax.verify.identity import identity_check
from specjax.verify.verdict import Check, InputError, Verdict

__all__ = ["ALPHA", "Check", "InputError", "Verdict", "check", "load"]

DEFAULT_PROMPT = 8  # random tokens in the default prompt
MAX_TOKENS = 48  # max_tokens of a request of the identity check
# Noise numbers that a round may draw. They bound the batch, whose caches and logits take memory.
NOISE_NUMBERS = 1 << 23
MOST_SAMPLES, FEWEST_SAMPLES = 20_000, 600
# Parameters times samples that two cores decode in about a minute.
CPU_WORK = 1.3e11
LARGEST_BATCH = 256


def load(
    model: str | Path,
    spec: SpecConfig | None = None,
    dtype: str = AUTO,
    revision: str | None = None,
    control: ControlConfig | Mapping[str, Any] | str | None = None,
    attention: str = "auto",
) -> LLM:
    """Loads an `LLM` to check, which always speculates.

    If the checkpoint has no draft head, n-grams draft.

    Args:
      model: a Hugging Face directory or id, or a GGUF file.
      spec: how to speculate; None: `SpecConfig()`.
      revision: branch, tag or commit of an id.
      dtype, control: see `LLM`.
      attention: see `EngineConfig`.

    Raises:
      ValueError, OSError, CheckpointError: the directory holds no readable checkpoint, or `spec`
        does not fit it.
    """
    spec = spec or SpecConfig()
    if spec.is_off:
        raise InputError("strategy 'off' is plain decoding, which leaves nothing to check")
    path = find_model(model, revision)
    cfg = read_config(path)
    head = read_head(path, cfg)
    kind = None if head is None else type(head)
    drafting = settle_draft(spec, control, kind, may_stop=False, target=cfg)
    control = drafting.control
    arms = [arm for arm in control.arms if not arm.is_off] if control else []
    if control is not None and not arms:
        raise InputError("the controller may choose 'off' only, which leaves nothing to check")
    steps = max(each.steps for each in (*arms, spec.resolve()))
    width = cfg.vocab_size * (steps + 1)
    batch = int(np.clip(NOISE_NUMBERS // width, 1, LARGEST_BATCH))
    max_len = min(256, cfg.max_position)
    llm = LLM(
        path,
        drafting.spec,
        max_batch=batch,
        max_len=max_len,
        dtype=dtype,
        control=control,
        engine=EngineConfig(attention=attention),
    )
    llm.drafting = drafting  # the settings with the defaults of this function
    return llm


def check(
    llm: LLM,
    *,
    prompt: str | Sequence[int] | None = None,
    samples: int | None = None,
    requests: int = 16,
    seed: int = 0,
    progress: bool = False,
) -> Verdict:
    """Checks identity with plain decoding, and the distribution of tokens.

    Args:
      llm: what `load` returns, or another `LLM` that speculates.
      prompt: text, or token ids, after which the distribution is checked; None draws eight tokens.
      samples: number of samples for each set of sampling options; None: `usual_samples`.
      requests: number of requests of the identity check, with one or two samples each.
      progress: whether to show a bar for each check.

    Returns:
      the verdict, which is true iff no check failed.

    Raises:
      InputError: the input cannot be checked; the model may be right or wrong.
    """
    if llm.spec is None:
        raise InputError("this LLM decodes plainly, which leaves nothing to check; give it a spec")
    samples = usual_samples(llm) if samples is None else samples
    if samples < 1 or requests < 1:
        raise InputError(f"expected samples and requests >= 1, got {samples} and {requests}")
    ids = _prompt_ids(llm, prompt, seed)
    max_tokens = min(MAX_TOKENS, llm.max_len - 1)
    try:
        checks = [identity_check(llm, requests, max_tokens, seed, progress)]
        if not llm.engine.engines[0].warm_rows:
            raise InputError(
                "the requests were decoded plainly, as work that is short, which leaves nothing to "
                "check; name a strategy without a controller, or call warm_up() of the LLM before"
            )
        if llm.spec.acceptance != "greedy":  # `greedy` takes requests of temperature 0 only
            checks += chi_square_checks(llm, ids, samples, seed, progress)
    except InvalidLogitsError as error:
        raise InputError(f"there is nothing to compare: {error}") from error
    return Verdict(
        model=llm.cfg.model_type,
        strategy=", ".join(map(str, llm.drafting.strategies)),
        acceptance=llm.spec.acceptance,
        source=llm.drafting.named(),
        dtype=llm.cfg.run.compute_dtype,
        checks=tuple(checks),
    )


def usual_samples(llm: LLM) -> int:
    """The samples of a chi-square check: on CPUs so few that a check takes about a minute."""
    if device_of(llm.mesh).platform != "cpu":
        return MOST_SAMPLES
    size = sum(leaf.size for leaf in jax.tree.leaves(llm.params))
    return int(np.clip(CPU_WORK // size, FEWEST_SAMPLES, MOST_SAMPLES))


def _prompt_ids(llm: LLM, prompt, seed: int) -> list[int]:
    vocab = llm.cfg.vocab_size
    if prompt is None:
        prompt = np.random.default_rng(seed).integers(0, vocab, DEFAULT_PROMPT).tolist()
    elif isinstance(prompt, str):
        if llm.tokenizer is None:
            raise InputError("the checkpoint has no tokenizer for a text; give token ids instead")
        prompt = prompt_ids(llm.tokenizer, prompt)
    ids = [int(t) for t in prompt]
    wrong = [t for t in ids if not 0 <= t < vocab]
    if not ids or wrong:
        got = f"token id {wrong[0]}" if wrong else "none"
        raise InputError(f"expected a prompt of token ids below {vocab}, got {got}")
    return ids
