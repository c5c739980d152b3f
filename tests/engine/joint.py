"""The exact joint distribution of three tokens, and how often `LLM` generates each of them.

Probabilities come from full forward passes and the float64 reference of the transforms: no cache,
no tree, no noise and nothing of `specjax.decode` takes part.
"""

import dataclasses
import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
from decode.transform_reference import transform
from flax import nnx
from tiny import tiny_config, tiny_model

from specjax import LLM, SamplingParams, SpecConfig
from specjax.models.transformer import graphdef
from specjax.verify.chi_square import goodness_of_fit

VOCAB, EOS, TOKENS = 5, 4, 3
BATCH = 17 * 177  # whole batches come to little more than SAMPLES, of one request and of 17
PROMPT = [1, 3]
ALPHA = 1e-6
SAMPLES = 3_000  # per request in `make test`: each rule of test_mutations fails on as many
CELLS = (VOCAB + 1) ** TOKENS  # VOCAB stands for "ended before"


@functools.cache
def pair(seed: int, sure: float = 1.0, spread: float = 0.2, modules: int = 1):
    """A policy of five tokens and a head that has nothing to do with it.

    Args:
      sure: scales the head's logits: how sure it is of itself.
      modules: number of modules of the head; the policy is the same.
    """
    cfg = tiny_config(VOCAB, mtp=modules, tied=True, eos_token_ids=(EOS,))
    cfg, params, head = tiny_model(cfg, seed=seed, factor=15.0, embed_std=spread)
    for module in head["blocks"].values():
        module["norm"] = sure * module["norm"]
    return cfg, params, head


@functools.cache
def next_logits(*arguments, prompt=tuple(PROMPT)) -> dict[tuple[int, ...], np.ndarray]:
    """Raw logits [V] of a pair's policy after the prompt and every continuation of two tokens."""
    cfg, params, _ = pair(*arguments)
    paths = list(itertools.product(range(VOCAB), repeat=TOKENS - 1))
    sequences = np.array([[*prompt, *path] for path in paths])

    @jax.jit
    def logits(params):
        module = nnx.merge(graphdef(cfg), params)
        positions = jnp.broadcast_to(jnp.arange(sequences.shape[1]), sequences.shape)
        return module.logits(module.hidden(sequences, positions, jnp.ones_like(positions)).x)

    found = np.asarray(logits(params), np.float64)
    return {
        path[:depth]: found[row, len(prompt) - 1 + depth]
        for row, path in enumerate(paths)
        for depth in range(TOKENS)
    }


def exact_joint(logits, params: SamplingParams, prompt=PROMPT) -> np.ndarray:
    """[CELLS] probability of every outcome of up to three tokens."""
    stops = () if params.ignore_eos else (EOS,)
    joint = np.zeros((VOCAB + 1,) * TOKENS)

    def walk(path: tuple[int, ...], mass: float):
        if len(path) == TOKENS or (path and path[-1] in stops):
            joint[path + (VOCAB,) * (TOKENS - len(path))] += mass
            return
        scores = transform(logits[path], params, list(prompt), list(path), [], stops, VOCAB)
        weights = np.exp(scores - scores.max())
        for token in np.flatnonzero(weights):
            walk((*path, int(token)), mass * weights[token] / weights.sum())

    walk((), 1.0)
    assert abs(joint.sum() - 1) < 1e-9
    return joint.ravel() / joint.sum()


class Counted:
    """Outcomes of several requests that run together in full batches.

    Attributes:
      counts: per request, [CELLS]. lengths: rounds by tokens emitted. rounds: of a sample, at most.
    """

    def __init__(
        self,
        llm: LLM,
        params: list[SamplingParams],
        samples: int,
        first_seed: int = 0,
        prompt=PROMPT,
    ):
        each = llm.max_batch // len(params)
        self.counts = np.zeros((len(params), CELLS), np.int64)
        self.lengths, self.rounds = 0, 0
        for batch in range(-(-samples // each)):
            asked = [
                dataclasses.replace(p, max_tokens=TOKENS, n=each, seed=seed)
                for seed, p in enumerate(params, first_seed + batch * len(params))
            ]
            for k, out in enumerate(llm.generate([list(prompt)] * len(params), asked)):
                self.counts[k] += count_cells([s.token_ids for s in out.samples])
                self.rounds = max(self.rounds, max(s.stats.rounds for s in out.samples))
            self.lengths = self.lengths + llm.totals.histogram


def count_cells(samples: list[list[int]]) -> np.ndarray:
    full = np.array([ids + [VOCAB] * (TOKENS - len(ids)) for ids in samples])
    cells = np.ravel_multi_index(tuple(full.T), (VOCAB + 1,) * TOKENS)
    return np.bincount(cells, minlength=CELLS)


def fit_of(counts: np.ndarray, joint: np.ndarray):
    fit = goodness_of_fit(counts, joint)
    assert fit.cells >= 4, "too few cells are left to see anything"
    return fit


def spec_llm(
    model, acceptance: str, strategy: str, batch: int = BATCH, care: bool = False, **settings
) -> LLM:
    """An engine for so many samples at once.

    Args:
      care: its chunks run for longer than they compile, which those of other tests do not.
    """
    spec = SpecConfig(strategy=strategy, acceptance=acceptance, **settings)
    llm = LLM(model, spec, max_batch=batch, max_len=8)
    if care and os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] not in ("0", "false"):  # see conftest
        llm.engine.runner.executables.build = _with_some_care
    return llm


def _with_some_care(key, lower, donate):
    """Machine code as fast as users', made in half the time."""
    options = {"xla_backend_optimization_level": 1} if key[0] == "chunk" else None
    return lower().compile(compiler_options=options)
