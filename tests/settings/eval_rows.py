"""Rows of a named set of evaluation."""

from __future__ import annotations

import types

from rows import Row, Stopped, outcome
from train_rows import DAPO, GSM8K, stand_in_for_reasoning_gym, templated

from train.eval_schema import EvalSection, EvalSet
from train.evaluation import evaluate, is_right, problem_sets
from train.inputs import Inputs, Prompts
from train.schema import RLConfig
from train.scoring import Score, Scorer


def read(chosen: EvalSet):
    """What an engine is asked for, how, and what a reward of 0.5 counts for."""
    with stand_in_for_reasoning_gym():
        return outcome(lambda: _read(chosen))


def _read(chosen: EvalSet):
    cfg = RLConfig(eval=EvalSection(problems=0, sets={"own": chosen}))
    cfg.data.heldout_size = 5
    inputs = Inputs([], [], Prompts(templated(), cfg.data), Scorer("exact"), [])
    [found], _ = problem_sets(cfg, inputs, "policy")
    asked = []

    def generate(jobs, on_progress, on_sample):
        asked.extend(jobs)
        raise Stopped

    outcome(lambda: evaluate(types.SimpleNamespace(generate=generate), [found], (1,), 0))
    right = is_right(found.scorer, Score(0.5), found.pass_reward)
    answers = [problem.answer for problem in found.problems]
    return [(job.prompt, job.params) for job in asked], answers, found.scorer.described, right


GYM = {"path": None, "task": "reasoning_gym", "dataset": "ones"}
BASE = {EvalSet: {"path": GSM8K, "max_prompt_tokens": 40}}
EVAL_SET = {
    "path": Row(DAPO, read),
    "problems": Row(3, read),
    "n": Row(2, read),
    "temperature": Row(0.5, read),
    "max_tokens": Row(7, read),
    "max_prompt_tokens": Row(15, read),
    "top_k": Row(5, read),
    "top_p": Row(0.5, read),
    "min_p": Row(0.1, read),
    "stop": Row(["a"], read),
    "reward": Row("exact", read),
    "weights": Row([2.0], read),
    "pass_reward": Row(0.5, read),
    "task": Row("prompt", read, {"path": DAPO}),
    "prompt_key": Row("answer", read),
    "answer_key": Row("question", read, {"reward": "format"}),
    "prompt_template": Row("Q: {question}", read),
    "chat": Row("off", read),
    "chat_template_kwargs": Row({"mark": "!"}, read),
    "dataset": Row("twos", read, GYM),
    "dataset_args": Row({"first": 3}, read, GYM),
}
