"""Checks that the tokens of `LLM` have the target's joint distribution, by a chi-square test.

Requests allow four tokens and end after three, so there are 64 outcomes. Their exact probabilities
need the logits after 21 contexts (the prompt, and the prompt with one or two of the four tokens),
which full forward passes compute. They use nothing of the decode loop but its sampling transforms:
no cache, no tree, no draft, no noise.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats  # jax itself depends on scipy
from tqdm import tqdm

from specjax.config import SamplingParams
from specjax.engine.compare import full_forward, padded_contexts, transformed
from specjax.engine.llm import LLM
from specjax.engine.request import Totals, features_of, make_jobs, option_rows, require_valid
from specjax.engine.runner import Runner
from specjax.verify.verdict import FAILED, PASSED, Check, InputError

ALPHA = 1e-6  # the p-value below which a check fails
WIDTH, LENGTH = 4, 3  # number of allowed tokens, and of positions
SMALLEST_EXPECTED = 5.0  # expected count below which a cell is pooled with others
ENOUGH_CELLS = 10  # cells that must reach it; the temperature is raised until they do
TEMPERATURES = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0)


def chi_square_checks(
    llm: LLM, prompt: Sequence[int], samples: int, seed: int, progress: bool = False
) -> list[Check]:
    """Runs one check per set of sampling options.

    Raises:
      InputError: there are so few samples that hardly any outcome is expected often enough.
    """
    tokens = likeliest(llm.engine.runner, prompt, WIDTH)
    joint = ExactJoint(llm.engine.runner, prompt, tokens, LENGTH)
    checks = []
    for name, options in option_sets(tokens).items():
        params, probabilities = _with_enough_cells(joint, options, samples)
        with tqdm(total=samples, desc=name, unit="sample", disable=not progress) as bar:
            checks.append(_check(name, llm, joint, params, probabilities, samples, seed, bar))
    return checks


def option_sets(tokens: Sequence[int]) -> dict[str, SamplingParams]:
    """Returns the sets of sampling options to check: temperature alone, and all options at once.

    Every set allows `tokens` only, so that the outcomes can be enumerated.
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


def _with_enough_cells(
    joint: ExactJoint, params: SamplingParams, samples: int
) -> tuple[SamplingParams, np.ndarray]:
    """Finds the lowest temperature at which enough outcomes are expected often enough.

    Returns:
      the parameters with that temperature, and the outcomes' probabilities.
    """
    for temperature in TEMPERATURES:
        hot = dataclasses.replace(params, temperature=temperature)
        probabilities = joint.probabilities(hot)
        if (probabilities * samples >= SMALLEST_EXPECTED).sum() >= ENOUGH_CELLS:
            return hot, probabilities
    raise InputError(
        f"{samples} samples are too few: fewer than {ENOUGH_CELLS} of {joint.outcomes} outcomes "
        f"are expected {SMALLEST_EXPECTED:g} times or more; use more samples, or another prompt"
    )


def _check(
    name: str,
    llm: LLM,
    joint: ExactJoint,
    params: SamplingParams,
    probabilities: np.ndarray,
    samples: int,
    seed: int,
    bar: tqdm,
) -> Check:
    """Generates samples, and compares the counts of their outcomes with their probabilities.

    The samples of a batch start together and have seeds of their own, so that no sample depends on
    the length of another.
    """
    counts, outside, totals = np.zeros(joint.outcomes, np.int64), 0, Totals(llm.engine.runner.steps)
    for done in range(0, samples, llm.max_batch):
        n = min(llm.max_batch, samples - done)
        sampling = dataclasses.replace(params, n=n, seed=seed + done)
        output = llm.generate([joint.prompt], sampling)[0]
        require_valid(output.samples)
        cells = joint.index(np.array([s.token_ids for s in output.samples]))
        counts += np.bincount(cells[cells >= 0], minlength=joint.outcomes)
        outside += int((cells < 0).sum())
        totals.merge(llm.totals)
        bar.update(n)
    fit = goodness_of_fit(counts, probabilities)
    passed = fit.p_value > ALPHA and not outside
    figures = {
        "outside": outside,
        "accepted": totals.accepted,
        "accept_length": totals.accept_length,
        "alpha": ALPHA,
        "temperature": params.temperature,
        "visible_bias": visible_bias(fit),
        **fit._asdict(),
    }
    details = []
    if outside:
        details.append(f"{outside} samples hold a token that allowed_token_ids excludes")
    elif not passed:
        details.append(f"such counts have a probability below {ALPHA:g} if the rule is exact")
    summary = (
        f"{fit.samples} samples of {LENGTH} tokens at temperature {params.temperature:g}, accept "
        f"length {totals.accept_length:.2f}: chi-square {fit.statistic:.1f} over {fit.cells} "
        f"cells, p = {fit.p_value:.2g}"
    )
    return Check(name, PASSED if passed else FAILED, summary, tuple(details), figures)


def visible_bias(fit: Fit) -> float:
    """Returns the bias, as a total variation, that the test detects about every second time.

    It assumes a bias that changes every probability by the same factor up or down: the statistic
    then exceeds its degrees of freedom by samples * (2 TV)^2 on average.
    """
    freedom = max(fit.cells - 1, 1)
    excess = stats.chi2.isf(ALPHA, freedom) - freedom
    return float(np.sqrt(excess / max(fit.samples, 1)) / 2)


class ExactJoint:
    """The exact probability of every sequence of `length` tokens out of `tokens` after a prompt.

    Args:
      runner: the runner whose policy computes the logits, in its dtype.
      prompt: token ids of the prompt.
      tokens: the only tokens that sampling allows.
      length: number of tokens in a sequence.
    """

    def __init__(self, runner: Runner, prompt: Sequence[int], tokens: Sequence[int], length: int):
        self.prompt, self.tokens, self.length = list(prompt), list(tokens), length
        self._vocab = runner.cfg.vocab_size
        self._contexts = [
            [*prompt, *path]
            for depth in range(length)
            for path in itertools.product(tokens, repeat=depth)
        ]
        self._logits = full_forward(runner, self._contexts)

    @property
    def outcomes(self) -> int:
        return len(self.tokens) ** self.length

    def probabilities(self, params: SamplingParams) -> np.ndarray:
        """Returns the probability of each sequence [outcomes], in the order of `index`.

        Args:
          params: parameters with a temperature above 0, allowed_token_ids equal to `tokens`, and no
            stop tokens.
        """
        conditional = self._conditional(params)
        at = {tuple(c[len(self.prompt) :]): row for row, c in enumerate(self._contexts)}
        joint = np.array(
            [
                np.prod([conditional[at[path[:d]], token] for d, token in enumerate(path)])
                for path in itertools.product(self.tokens, repeat=self.length)
            ]
        )
        return joint / joint.sum()

    def _conditional(self, params: SamplingParams) -> np.ndarray:
        """Returns next-token probabilities [contexts V] in float64 after all transforms."""
        count = len(self._contexts)
        job = make_jobs(self.prompt, dataclasses.replace(params, n=1, ignore_eos=True), ())[0]
        features = features_of(job, self._vocab)
        options = option_rows([job] * count, self._vocab, stop_width=1)
        tokens, lengths = padded_contexts(self._contexts)
        scores = transformed(features, options, tokens, lengths, self._logits)
        scores = np.asarray(scores, np.float64)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def index(self, samples: np.ndarray) -> np.ndarray:
        """Returns the outcome [N] of each sample [N length]; -1: it has a token not allowed."""
        place = np.full(self._vocab, -1)
        place[self.tokens] = np.arange(len(self.tokens))
        places = place[samples]
        cells = np.ravel_multi_index(
            tuple(np.maximum(places, 0).T), (len(self.tokens),) * self.length
        )
        return np.where((places >= 0).all(1), cells, -1)


def likeliest(runner: Runner, prompt: Sequence[int], count: int) -> list[int]:
    """Returns the `count` likeliest tokens after a prompt, best first."""
    logits = full_forward(runner, [prompt])[0]
    return np.argsort(-logits, kind="stable")[:count].tolist()


class Fit(NamedTuple):
    """The result of a chi-square test.

    Attributes:
      statistic: Pearson's sum of (count - expected)^2 / expected over the cells.
      cells: number of cells, after small ones were pooled.
      p_value: probability of a statistic at least as large if the probabilities are right; 0 if an
        outcome of probability 0 was counted.
      samples: the sum of the counts.
    """

    statistic: float
    cells: int
    p_value: float
    samples: int


def goodness_of_fit(counts: np.ndarray, probabilities: np.ndarray) -> Fit:
    """Pearson's chi-square test of counts against probabilities.

    Cells that expect fewer than `SMALLEST_EXPECTED` are pooled (the rarest first, until the sum
    expects enough), because otherwise the statistic does not follow its distribution.

    Args:
      counts: number of times that each outcome occurred [C].
      probabilities: probability of each outcome [C]; their sum is 1.
    """
    counts, probabilities = np.asarray(counts, np.int64), np.asarray(probabilities, np.float64)
    samples = int(counts.sum())
    if counts[probabilities == 0].any():
        return Fit(float("inf"), int((probabilities > 0).sum()), 0.0, samples)
    expected, counts = _pooled(probabilities * samples, counts)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    # With one cell the statistic has no degrees of freedom.
    p_value = float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0
    return Fit(statistic, len(expected), p_value, samples)


def _pooled(expected: np.ndarray, counts: np.ndarray):
    """Drops cells of probability 0 and pools small ones, rarest first."""
    order = np.argsort(expected)
    order = order[expected[order] > 0]
    expected, counts = expected[order], counts[order]
    small = int((expected < SMALLEST_EXPECTED).sum())
    while 0 < small < len(expected) and expected[:small].sum() < SMALLEST_EXPECTED:
        small += 1
    if small:
        expected = np.r_[expected[:small].sum(), expected[small:]]
        counts = np.r_[counts[:small].sum(), counts[small:]]
    return expected, counts
