"""Do the tokens that leave `LLM` have the target's joint distribution?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import stats

from specjax.config import SamplingParams
from specjax.engine.llm import LLM
from specjax.engine.request import require_valid
from specjax.verify.joint import ExactJoint, likeliest
from specjax.verify.statistics import SMALLEST_EXPECTED, Fit, goodness_of_fit
from specjax.verify.verdict import FAILED, PASSED, Check, Drafts, InputError

ALPHA = 1e-6
WIDTH, LENGTH = 4, 3  # tokens that are allowed, positions: 64 outcomes
ENOUGH_CELLS = 10
TEMPERATURES = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0)


def chi_square_checks(llm: LLM, prompt: Sequence[int], samples: int, seed: int) -> list[Check]:
    """One check per set of options.

    Raises:
      InputError: so few samples that hardly any outcome is expected often enough to be compared.
    """
    tokens = likeliest(llm.engine.runner, prompt, WIDTH)
    joint = ExactJoint(llm.engine.runner, prompt, tokens, LENGTH)
    checks = []
    for name, options in option_sets(tokens).items():
        params, probabilities = _hot_enough(joint, options, samples)
        counts, outside, drafts = count_outcomes(llm, joint, params, samples, seed)
        fit = goodness_of_fit(counts, probabilities)
        checks.append(_judged(name, params, fit, outside, drafts))
    return checks


def option_sets(tokens: Sequence[int]) -> dict[str, SamplingParams]:
    """What is checked: temperature alone, and all options at once.

    Every set allows nothing but `tokens`, so that the outcomes can be enumerated.
    """
    base = SamplingParams(
        max_tokens=LENGTH, ignore_eos=True, allowed_token_ids=tuple(tokens), temperature=1.0
    )
    everything = dataclasses.replace(
        base,
        top_k=len(tokens) - 1,
        top_p=0.97,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={tokens[0]: -0.5, tokens[-1]: 0.5},
        bad_words=((tokens[1], tokens[0]),),
    )
    return {"chi-square, temperature alone": base, "chi-square, every option": everything}


def _hot_enough(
    joint: ExactJoint, params: SamplingParams, samples: int
) -> tuple[SamplingParams, np.ndarray]:
    """The lowest temperature at which enough outcomes are expected often enough."""
    for temperature in TEMPERATURES:
        hot = dataclasses.replace(params, temperature=temperature)
        probabilities = joint.probabilities(hot)
        if (probabilities * samples >= SMALLEST_EXPECTED).sum() >= ENOUGH_CELLS:
            return hot, probabilities
    raise InputError(
        f"{samples} samples are too few: fewer than {ENOUGH_CELLS} of {joint.outcomes} outcomes "
        f"are expected {SMALLEST_EXPECTED:g} times or more; use more samples, or another prompt"
    )


def count_outcomes(
    llm: LLM, joint: ExactJoint, params: SamplingParams, samples: int, seed: int
) -> tuple[np.ndarray, int, Drafts]:
    """How often each outcome was generated, how many samples were none of them, what was accepted.

    All slots start together and with seeds of their own, so that no choice depends on how long
    another sample took.
    """
    counts, outside, done = np.zeros(joint.outcomes, np.int64), 0, 0
    drafts = Drafts(0, 0)
    while done < samples:
        n = min(llm.max_batch, samples - done)
        sampling = dataclasses.replace(params, n=n, seed=seed + done)
        output = llm.generate([joint.prompt], sampling)[0]
        require_valid(output.samples)
        cells = joint.index(np.array([s.token_ids for s in output.samples]))
        counts += np.bincount(cells[cells >= 0], minlength=joint.outcomes)
        outside += int((cells < 0).sum())
        drafts = Drafts(drafts.accepted + llm.totals.accepted, drafts.rounds + llm.totals.rounds)
        done += n
    return counts, outside, drafts


def _judged(name: str, params: SamplingParams, fit: Fit, outside: int, drafts: Drafts) -> Check:
    passed = fit.p_value > ALPHA and not outside
    figures = {
        "outside": outside,
        **drafts.figures(),
        "alpha": ALPHA,
        "temperature": params.temperature,
        "visible_bias": visible_bias(fit),
        **fit._asdict(),
    }
    details = []
    if outside:
        details.append(f"{outside} samples hold a token that allowed_token_ids excludes")
    elif fit.p_value == 0 and not np.isfinite(fit.statistic):
        details.append("an outcome of probability 0 was generated")
    elif not passed:
        details.append(f"such counts have a probability below {ALPHA:g} if the rule is exact")
    summary = (
        f"{fit.samples} samples of {LENGTH} tokens at temperature {params.temperature:g}, accept "
        f"length {drafts.accept_length:.2f}: chi-square {fit.statistic:.1f} over {fit.cells} "
        f"cells, p = {fit.p_value:.2g} (a bias of {figures['visible_bias']:.3f} would show)"
    )
    return Check(name, PASSED if passed else FAILED, summary, tuple(details), figures)


def visible_bias(fit: Fit) -> float:
    """The total variation that such a test rejects about every second time.

    For a bias that changes every probability by the same factor up or down: the statistic then
    exceeds its degrees of freedom by samples * (2 TV)^2 on average.
    """
    freedom = max(fit.cells - 1, 1)
    excess = stats.chi2.isf(ALPHA, freedom) - freedom
    return float(np.sqrt(excess / max(fit.samples, 1)) / 2)
