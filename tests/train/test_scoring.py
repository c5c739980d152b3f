"""Rewards that fail, gold answers that cannot be won, prompts that are too long."""

import json
import re
from decimal import Decimal
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import odd_rewards
import pytest
import tiny_run

from specjax.command_line import parse_config
from specjax.tokenizer import load_tokenizer
from train import rl
from train.data.checks import Inputs, read_inputs
from train.data.tasks.layout import Problem
from train.rewards.calls import as_number
from train.rewards.scoring import (
    Score,
    Scorer,
    unwinnable,
)
from train.rollout.draws import Draws
from train.run.files import read_metrics
from train.schema import RLConfig

pytestmark = pytest.mark.usefixtures("shared_programs")

# --- one reward ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [1, 0.5, -2, np.float32(0.5), np.int64(3), np.array(0.25), jnp.float32(2.0), jnp.bfloat16(0.5),
     jnp.array(1), Fraction(1, 2), Decimal("0.5"), 10**20, True, np.bool_(False), jnp.array(True)],
)  # fmt: skip
def test_numbers_of_every_library_are_rewards(value):
    found = as_number(value)
    assert type(found) is float and found == float(value)


@pytest.mark.parametrize("value", [*odd_rewards.NO_NUMBERS, -np.inf, jnp.array(jnp.nan), 10**400])
def test_what_is_no_finite_number_is_named_with_its_row_and_counts_as_nothing(value, caplog):
    scorer = Scorer("own:reward", lambda completion, answer: value)
    assert scorer("text", Problem("p", "a", 4, "rows.jsonl:5")) == Score(0.0, failed=True)
    assert "'own:reward' returned" in caplog.text and "the row rows.jsonl:5" in caplog.text


def test_a_reward_that_raises_is_named_and_described_five_times_at_most(caplog):
    def raises(completion, answer):
        raise KeyError(completion)

    scorer = Scorer("own:raises", raises)
    for i in range(9):
        assert scorer(f"text {i}", Problem("p", "a", i)).failed
    assert caplog.text.count("raised KeyError at test_scoring.py:") == 5
    with pytest.raises(KeyboardInterrupt):  # is no reward

        def interrupted(completion, answer):
            raise KeyboardInterrupt

        Scorer("own:interrupted", interrupted)("text", Problem("p", "a", 0))


def positional_only(completion, answer, /):
    return len(completion) + float(answer)


def other_name(text, gold):
    return len(text) + float(gold)


def variadic(*args):
    return len(args[0]) + float(args[1])


def named(completion, **columns):
    return len(completion) + float(columns["answer"])


def column_second(completion, level, flag=True):
    return len(completion) + level * flag


def messages_of_it(completion, messages):
    return len(completion) + len(messages) + 2


class Callable:
    def __call__(self, completion, answer, unused=None):
        return len(completion) + float(answer)


@pytest.mark.parametrize(
    "reward",
    [positional_only, other_name, variadic, named, column_second, messages_of_it, Callable(),
     lambda c, answer: len(c) + float(answer), lambda c, *, level: len(c) + level],
)  # fmt: skip
def test_a_reward_gets_the_columns_that_it_asks_for(reward):
    conversation = ({"role": "user", "content": "?"},)
    problem = Problem(conversation, "3", 0, "", {"level": 3, "topic": "x"})
    scorer = Scorer("own:reward", reward)
    scorer.check(problem)
    assert scorer("ab", problem) == Score(5.0)


@pytest.mark.parametrize("reward", ["exact", "number", "math_verify"])
def test_any_of_several_gold_answers_is_right(reward):
    scorer, write = Scorer(reward), "#### {}".format
    problem = Problem("p", ("12", "15", "((("), 0, "rows.jsonl:1")
    assert [scorer(write(x), problem).value for x in ("12", "15", "13", "12, 15")] == [1, 1, 0, 0]
    assert unwinnable(scorer, problem) is None
    if reward != "exact":
        neither = Problem("p", ("(((", "x +"), 0)
        assert unwinnable(scorer, neither) == "gold answers (any is right) '(((', 'x +'"
    assert unwinnable(scorer, Problem("p", ("", " "), 0)) == "the row has no answer"


# --- gold answers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "gold", "wins"),
    [
        ("number", "5 apples", True), ("number", "1/2", True), ("number", "#### 1,000", True),
        ("number", r"\frac{3}{4}", True), ("number", "2.5 million", True),
        ("number", "Paris", False), ("number", r"2\sqrt{2}", False), ("number", "3, 5", False),
        ("number", "", False), ("number", "x+1", False),
        ("exact", "Paris", True), ("exact", "some work\n#### 5", True), ("exact", "a\nb", False),
        ("math_verify", r"2\sqrt{2}", True), ("math_verify", "(1, 2]", True),
        ("math_verify", r"x \geq 5", True), ("math_verify", "June 20", True),
        ("math_verify", r"\boxed{\frac{1}{2}}", True), ("math_verify", "", False),
        ("math_verify", r"\frac{1}{", False), ("math_verify", "((2)", False),
        ("math_verify", "x + + )", False),
    ],
)  # fmt: skip
def test_gold_answers_that_cannot_be_won_are_known(reward, gold, wins):
    scorer = Scorer(reward)
    problem = Problem("p", gold, 3, "rows.jsonl:4")
    reason = unwinnable(scorer, problem)
    assert (reason is None) == wins
    if gold and not wins:
        assert reason == f"gold answer {gold!r}"
    assert unwinnable(Scorer("own:reward", lambda c, a: 1.0), problem) is None


# --- runs ----------------------------------------------------------------------------------------


PLAIN = {"draft.mode": "none", "rollout.strategy": "off", "checkpoint.export": "false"}


def rows(path, count=40, **changes):
    """`problem`/`answer` rows with prompts of about ten tokens."""
    lines = [
        {"problem": f"{i}+1=", "answer": i + 1, "level": i % 3, **changes} for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def settings(path, **changes):
    common = {"data.path": path, "data.prompt_template": "{question}", "data.task": "auto"}
    return {**PLAIN, **{k: f"'{v}'" if "{" in str(v) else v for k, v in common.items()}, **changes}


def run(model, out, **changes):
    rl.main(tiny_run.arguments(model, out, **changes))
    return [r for r in read_metrics(out) if r["step"] > 0]


def failure(capsys, model, out, **changes) -> str:
    with pytest.raises(SystemExit) as error:
        rl.main(tiny_run.arguments(model, out, **changes))
    said = f"{capsys.readouterr().err}{error.value}"
    assert "error: " in said and "Traceback" not in said
    return said


@pytest.mark.slow
def test_a_run_survives_rewards_that_fail_now_and_then(thin_policy, tmp_path, caplog, capsys):
    changes = {"reward": "odd_rewards:sometimes", "max_failed_rewards": 0.9, "eval.problems": 4}
    changes["algo.dynamic_sampling"] = "false"  # no group is replaced
    steps = run(thin_policy, tmp_path / "run", **PLAIN, **changes)
    failed = sum(r["reward/failed"] for r in steps)
    assert len(steps) == 2 and 0 < failed < 32
    assert all(0 <= r["rollout/reward"] <= 1 for r in steps)
    assert all(r["reward/failed_share"] == r["reward/failed"] / 16 for r in steps)
    assert "reward 'odd_rewards:sometimes' " in caplog.text and "problem " in caplog.text
    everything = read_metrics(tmp_path / "run")
    assert all("eval/reward_failed" in r for r in everything if "eval/reward" in r)


def test_a_run_whose_rewards_fail_ends_and_can_be_resumed(
    thin_policy, tmp_path, capsys, monkeypatch
):
    changes = {**PLAIN, "reward": "odd_rewards:breaks", "steps": 3}
    whole = run(thin_policy, tmp_path / "whole", **changes)
    step = rl.Trainer.step

    def breaking(self):
        monkeypatch.setattr(odd_rewards, "broken", self.done_steps == 1)
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(rl.Trainer, "step", breaking)
        said = failure(capsys, thin_policy, tmp_path / "run", **changes)
    assert "100% of the rewards of step 2 failed" in said and "max_failed_rewards=0.5" in said
    assert "step 1 is saved in" in said and "--resume" in said
    monkeypatch.setattr(odd_rewards, "broken", False)
    rl.main([*tiny_run.arguments(thin_policy, tmp_path / "run", **changes), "--resume"])
    resumed = [r for r in read_metrics(tmp_path / "run") if r["step"] > 0]
    for name in ("rollout/tokens_sha", "rollout/reward", "train/loss"):
        assert [r.get(name) for r in resumed] == [r.get(name) for r in whole]


def read(policy, path, **changes) -> tuple[RLConfig, Inputs]:
    """The configuration of a run on these rows, and what it reads before it computes anything."""
    argv = tiny_run.arguments(policy, path.parent / "run", **settings(path, **changes))
    cfg = parse_config(RLConfig, argv)[0]
    return cfg, read_inputs(cfg, load_tokenizer(policy), str(policy))


def draws_of(cfg: RLConfig, inputs: Inputs) -> Draws:
    draws = Draws(cfg, inputs.problems, inputs.prompts, (1,))
    draws.begin(1)
    return draws


def test_rows_that_cannot_be_won_are_kept_by_choice(thin_policy, tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [{"problem": f"{i}=", "answer": i if i % 2 else "five"} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cfg, inputs = read(thin_policy, path, reward="number", **{"data.unwinnable": "keep"})
    assert "cannot be won with reward=number: " in inputs.notes[-1]
    assert inputs.notes[-1].endswith("(data.unwinnable=keep)")
    draws = draws_of(cfg, inputs)
    assert "five" in [draws.draw().problem.answer for _ in range(8)]


def test_prompts_that_are_too_long_are_counted_and_dropped_or_cut(thin_policy, tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": "1" * (4 if i % 3 else 20), "answer": "1"} for i in range(30)]
    lines = [line | {"prompt": line["prompt"] + f"{i:02d}"} for i, line in enumerate(lines)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = {"reward": "tiny_run:coin", "eval.problems": 4}
    sizes = {}
    for choice in ("drop", "truncate"):
        cfg, inputs = read(thin_policy, path, **common, **{"data.overlong_prompts": choice})
        said = next(x for x in inputs.notes if "max_prompt_tokens" in x)
        assert re.search(r"WARNING: \d+ of \d+ prompts checked have more tokens", said)
        assert "the longest 22" in said and f"data.overlong_prompts={choice}" in said
        draws = draws_of(cfg, inputs)
        sizes[choice] = {len(draws.draw().prompt) for _ in range(8)}
        assert draws.end(draws.position)["rollout/prompts_overlong"] > 0
    assert sizes == {"drop": {6}, "truncate": {6, 12}}
    with pytest.raises(ValueError, match=r"rollout.max_prompt_tokens \(22 keeps 100%\)"):
        read(thin_policy, path, **common, **{"rollout.max_prompt_tokens": 3})


@pytest.mark.parametrize(("reward", "answer"), [("number", "Paris"), ("math_verify", r"\frac{1}{")])
def test_gold_answers_that_cannot_be_won_end_a_run_before_it_begins(
    thin_policy, tmp_path, capsys, reward, answer
):
    path = rows(tmp_path / "rows.jsonl")
    bad = json.dumps({"problem": "bad", "answer": answer})
    path.write_text(path.read_text() + bad + "\n")
    said = failure(capsys, thin_policy, tmp_path / "run", **settings(path, reward=reward))
    assert f"reward={reward}" in said and f"the row {path}:41: gold answer {answer!r}" in said
    assert "data.unwinnable=keep" in said and not (tmp_path / "run").exists()
