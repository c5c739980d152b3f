"""The held-out reward of a policy: problems that training never sees, sampled the same way each
time."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.engine.engine import Engine
from train import rollout
from train.prompts import Prompts
from train.schema import RLConfig
from train.scoring import Scorer
from train.tasks.layout import Problem


def evaluate(
    engine: Engine,
    prompts: Prompts,
    heldout: Sequence[Problem],
    eos_ids: Sequence[int],
    scorer: Scorer,
    cfg: RLConfig,
) -> dict[str, float]:
    """Metrics of the first `eval.problems` held-out problems whose prompts fit, by a policy that
    the engine has. One response to each is sampled as the rollout samples (temperature, filters,
    penalties, bias, stops), with seeds that are the same every time."""
    problems = [heldout[i] for i in range(min(cfg.eval.problems, len(heldout)))]
    looked_at = [(problem, *prompts.look(problem)) for problem in problems]
    fits = [(problem, ids) for problem, ids, _ in looked_at if ids is not None]
    failures = scorer.failures
    params = [cfg.rollout.sampling_params(cfg.eval.seed + problem.index) for problem, _ in fits]
    result, totals = rollout.generate(
        engine,
        prompts.tokenizer,
        [problem for problem, _ in fits],
        [ids for _, ids in fits],
        params,
        eos_ids,
        scorer,
    )
    return {
        "eval/reward": float(result.rewards.mean()),
        "eval/problems": float(len(fits)),
        "eval/prompts_overlong": float(sum(why is not None for _, _, why in looked_at)),
        "eval/reward_failed": float(scorer.failures - failures),
        "eval/response_length_mean": totals.tokens / max(len(fits), 1),
        "time/eval": totals.seconds,
    }
