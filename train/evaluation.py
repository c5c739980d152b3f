"""The held-out reward of a policy: problems that training never sees, sampled the same way each
time."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.config import SamplingParams
from specjax.engine.engine import Engine
from train import rollout
from train.data import Problem, encode_prompt
from train.rewards import Reward
from train.schema import RLConfig


def evaluate(
    engine: Engine,
    tokenizer,
    heldout: Sequence[Problem],
    eos_ids: Sequence[int],
    reward: Reward,
    cfg: RLConfig,
) -> dict[str, float]:
    """Metrics of the first `eval.problems` held-out problems whose prompts fit, by a policy that
    the engine has; their seeds are the same every time."""
    problems = [heldout[i] for i in range(min(cfg.eval.problems, len(heldout)))]
    prompts = [encode_prompt(tokenizer, p.prompt) for p in problems]
    fits = [i for i, p in enumerate(prompts) if len(p) <= cfg.rollout.max_prompt_tokens]
    params = [
        SamplingParams(
            temperature=cfg.rollout.temperature,
            max_tokens=cfg.rollout.max_tokens,
            seed=cfg.eval.seed + problems[i].index,
        )
        for i in fits
    ]
    result, totals = rollout.generate(
        engine,
        tokenizer,
        [problems[i] for i in fits],
        [prompts[i] for i in fits],
        params,
        eos_ids,
        reward,
    )
    return {
        "eval/reward": float(result.rewards.mean()),
        "eval/problems": float(len(fits)),
        "eval/response_length_mean": totals.tokens / max(len(fits), 1),
        "time/eval": totals.seconds,
    }
