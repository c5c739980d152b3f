"""Rewards that fail, gold answers that cannot be won, prompts that are too long."""

import json
import logging
import re
import types
from concurrent.futures import Future
from decimal import Decimal
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import odd_rewards
import pytest
import tiny_run

from specjax.command_line import ConfigError, parse_config
from specjax.tokenizer import load_tokenizer
from train import collect, data_report, rewards, rl
from train.collect import Rollouts
from train.data import problems
from train.inputs import Inputs, read_inputs
from train.log import read_metrics
from train.reward_calls import as_number, took_too_long
from train.reward_workers import Answer
from train.schema import DataConfig, RewardsSection, RLConfig
from train.scoring import (
    SampleFacts,
    Score,
    Scorer,
    check_gold,
    evenly,
    unwinnable,
    zero_reward_example,
)
from train.tasks.layout import Problem, split_of

# --- one reward ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [1, 0.5, -2, np.float32(0.5), np.int64(3), np.array(0.25), jnp.float32(2.0), jnp.bfloat16(0.5),
     jnp.array(1), Fraction(1, 2), Decimal("0.5"), 10**20, True, np.bool_(False), jnp.array(True)],
)  # fmt: skip
def test_numbers_of_every_library_are_rewards(value):
    found = as_number(value)
    assert type(found) is float and found == float(value)


@pytest.mark.parametrize("value", [*odd_rewards.NO_NUMBERS, np.array([1.0]), -np.inf,
                                   jnp.array(jnp.nan), {}, 10**400,
                                   float, b"1", Decimal("NaN")])  # fmt: skip
def test_what_is_no_finite_number_is_named_with_its_row_and_counts_as_nothing(value, caplog):
    scorer = Scorer("own:reward", lambda completion, answer: value)
    with caplog.at_level(logging.WARNING):
        assert scorer("text", Problem("p", "a", 4, "rows.jsonl:5")) == Score(0.0, failed=True)
    assert scorer.failures == 1
    message = caplog.text
    assert "'own:reward' returned" in message and "the row rows.jsonl:5" in message
    assert type(value).__name__ in message and "scored as 0" in message


def test_a_reward_that_raises_is_named_and_described_five_times_at_most(caplog):
    def raises(completion, answer):
        raise KeyError(completion)

    scorer = Scorer("own:raises", raises)
    for i in range(9):
        assert scorer(f"text {i}", Problem("p", "a", i)).failed
    assert scorer.failures == 9 and caplog.text.count("raised KeyError at test_scoring.py:") == 5
    assert "for problem 3: 'text 3'; scored as 0" in caplog.text
    assert "finite number" not in caplog.text
    assert "problem 3" in caplog.text and "only counted" in caplog.text
    with pytest.raises(KeyboardInterrupt):  # is no reward

        def interrupted(completion, answer):
            raise KeyboardInterrupt

        Scorer("own:interrupted", interrupted)("text", Problem("p", "a", 0))


def divides(completion, answer):
    return 1 / len(answer)


def parses(completion, answer):
    return json.loads(completion)  # raises in the standard library


def helps(completion, answer):
    return divides(completion, answer)


@pytest.mark.parametrize(
    ("reward", "inner", "kind"),
    [(divides, divides, "ZeroDivisionError"), (parses, parses, "JSONDecodeError"),
     (helps, divides, "ZeroDivisionError")],
)  # fmt: skip
def test_a_reward_that_raises_is_named_with_the_line_of_the_users_code(reward, inner, kind, caplog):
    scorer = Scorer("own:reward", reward)
    for index in (0, 0, 0, 1):
        assert scorer("", Problem("p", "", index)).failed
    line = inner.__code__.co_firstlineno + 1
    assert caplog.text.count(f"raised {kind} at test_scoring.py:{line} for problem 0: ") == 1
    assert len(caplog.messages) == 2 and scorer.failures == 4


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


@pytest.mark.parametrize(
    "reward",
    [lambda c, answer: answer, lambda c, **columns: columns["answer"], lambda c, gold: gold],
)
def test_a_users_reward_gets_several_gold_answers_as_a_list(reward):
    seen = []
    scorer = Scorer("own:reward", reward)
    [call] = scorer._calls
    call.function = lambda *args, **columns: seen.append((*args, *columns.values())[1]) or 1.0
    scorer("c", Problem("p", ("1", "2"), 0))
    assert seen == [["1", "2"]]


def completion_in_a_column(completion, **columns):
    return len(completion) + float(columns["answer"]) + len(columns["completion_ids"])


def test_a_column_never_takes_the_place_of_a_completion():
    problem = Problem("p", "3", 0, "", {"completion": "a long one", "completions": [1]})
    scorer = Scorer("own:reward", completion_in_a_column)
    assert scorer("ab", problem, SampleFacts(0, [7, 8], "stop")) == Score(7.0)


ROW = {"question": "?", "sample": "abc", "prompt": "another", "answer": "so #### 7"}


@pytest.mark.parametrize(
    ("reward", "hidden"),
    [
        (lambda c, answer: 1, None),
        (lambda c, row: len(row["sample"]), None),
        (lambda c, answer, level=0: 1, None),
        (lambda c, sample: 1, "sample"),
        (lambda c, prompt: 1, "prompt"),
        (lambda sample, gold: 1, None),
        (lambda c, **columns: 1, "sample, prompt"),
        (lambda sample, **columns: 1, "sample, prompt"),
    ],
)
def test_a_column_that_is_hidden_by_what_a_reward_is_given_is_named(reward, hidden):
    columns = {name: value for name, value in ROW.items() if name != "question"}
    problem = Problem("?", "7", 0, "rows.jsonl:1", columns, ROW)
    said = Scorer("own:reward", reward).hidden(problem)
    assert (said is None) == (hidden is None)
    assert hidden is None or f"'own:reward': {hidden});" in said and "parameter `row`" in said
    other = Problem("?", "8", 0, "", columns, ROW)  # whose gold answer is not that column's
    assert "answer" in Scorer("own:reward", lambda c, answer: 1).hidden(other)


def test_a_reward_finds_all_columns_of_its_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**ROW, "level": i % 2}) + "\n" for i in (0, 1, 0)))
    cfg = DataConfig(path=str(path), heldout_path=str(path), prompt_key="question")
    found = problems(cfg, "heldout")
    assert [problem.row for problem in found] == [{**ROW, "level": i % 2} for i in (0, 1, 0)]
    assert found[0].answer == "7" and found[2].row["prompt"] is found[0].row["prompt"]
    scorer = Scorer("slow_rewards:row_as_it_is", options=RewardsSection(workers=0))
    scorer.check(found[0])
    assert scorer("x", found[0]) == Score(4.0) and scorer.hidden(found[0]) is None
    generated = problems(DataConfig(), "train")[0]
    assert Scorer("own:row", lambda c, row: len(row))("x", generated) == Score(0.0)


def test_a_reward_that_asks_for_what_no_column_has_is_refused():
    scorer = Scorer("own:asks", odd_rewards.asks_for_too_much)
    with pytest.raises(ValueError, match="asks for difficulty, .* are level, answer, prompt"):
        scorer.check(Problem("p", "a", 0, "", {"level": 1}))
    scorer.check(Problem("p", "a", 0, "", {"difficulty": 1}))


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


def test_rows_are_looked_at_evenly():
    assert evenly(range(5), 300) == [0, 1, 2, 3, 4]
    some = evenly(range(1000), 300)
    assert len(some) == len(set(some)) == 300 and some[0] == 0 and some[-1] >= 996
    problems = [Problem("p", "5" if i % 10 else "five", i) for i in range(100)]
    found, looked_at = check_gold(Scorer("number"), problems)
    assert looked_at == 100 and [p.index for p, _ in found] == list(range(0, 100, 10))


# --- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def programs():
    with tiny_run.shared_programs():
        yield


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


def test_a_run_whose_first_rewards_fail_says_that_nothing_was_done(
    thin_policy, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(odd_rewards, "broken", True)
    changes = {**PLAIN, "reward": "odd_rewards:breaks", "max_failed_rewards": 0.25}
    said = failure(capsys, thin_policy, tmp_path / "run", **changes)
    assert "rewards of step 1 failed" in said and "no step was done before it" in said


def test_rewards_of_a_run_see_the_columns_of_rows(thin_policy, tmp_path, capsys):
    changes = settings(rows(tmp_path / "rows.jsonl"), reward="odd_rewards:by_level", steps=1)
    (step,) = run(thin_policy, tmp_path / "run", **changes)
    assert step["reward/failed"] == 0 and step["rollout/reward"] > 0.4
    assert "40 rows read as math" in capsys.readouterr().out
    changes["reward"] = "odd_rewards:asks_for_too_much"
    assert "asks for difficulty" in failure(capsys, thin_policy, tmp_path / "no", **changes)


def test_a_first_step_without_any_reward_shows_what_was_read(thin_policy, tmp_path, capsys):
    run(thin_policy, tmp_path / "run", **PLAIN, reward="tiny_run:nothing")
    (said,) = [x for x in capsys.readouterr().out.splitlines() if "scored 0" in x]
    assert said.startswith("WARNING: step 1: ") and "the gold answer '" in said
    assert re.search(r"a completion( \(cut off at rollout.max_tokens\))?: '", said)
    problem = Problem("p", "5", 0)
    said = zero_reward_example(Scorer("number"), "no number", problem, was_cut=False)
    assert "the answer that reward=number read in it: none" in said
    assert "data.prompt_template" in said


def read(policy, path, **changes) -> tuple[RLConfig, Inputs]:
    """The configuration of a run on these rows, and what it reads before it computes anything."""
    argv = tiny_run.arguments(policy, path.parent / "run", **settings(path, **changes))
    cfg = parse_config(RLConfig, argv)[0]
    return cfg, read_inputs(cfg, load_tokenizer(policy), str(policy))


def rollouts_of(cfg: RLConfig, inputs: Inputs) -> Rollouts:
    return Rollouts(cfg, inputs.problems, inputs.prompts, (1,), inputs.scorer)


@pytest.mark.parametrize("choice", ["drop", "keep"])
def test_rows_that_cannot_be_won_are_dropped_or_kept_by_choice(thin_policy, tmp_path, choice):
    path = tmp_path / "rows.jsonl"
    lines = [{"problem": f"{i}=", "answer": i if i % 2 else "five"} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cfg, inputs = read(thin_policy, path, reward="number", **{"data.unwinnable": choice})
    assert "cannot be won with reward=number, which" in inputs.notes[-1]
    assert inputs.notes[-1].endswith(f"(data.unwinnable={choice})")
    rollouts = rollouts_of(cfg, inputs)
    rollouts._at = 0
    drawn = [rollouts._draw(1).problem.answer for _ in range(8)]
    rollouts.position = rollouts._at
    assert ("five" in drawn) == (choice == "keep")
    assert (rollouts._prompt_metrics()["rollout/prompts_unwinnable"] > 0) == (choice == "drop")


def test_rows_to_drop_are_found_in_workers_ahead_of_their_use_and_once(
    thin_policy, tmp_path, monkeypatch
):
    path = tmp_path / "rows.jsonl"
    lines = [{"problem": f"{i}=", "answer": r"\frac{1}{" if i % 2 else "x+1"} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = {"data.unwinnable": "drop", "rewards.workers": 1, "rollout.prompts": 2}
    cfg, inputs = read(thin_policy, path, reward="math_verify", **changes)
    # The engine's thread compares nothing from here on.
    monkeypatch.setattr(rewards, "WORKER", None)
    asked, ask = [], inputs.scorer.ask
    monkeypatch.setattr(
        inputs.scorer, "ask", lambda *call, **named: asked.append(call[1][0]) or ask(*call, **named)
    )
    twice = [inputs.problems[i % len(inputs.problems)] for i in range(2 * len(inputs.problems))]
    rollouts = Rollouts(cfg, twice, inputs.prompts, (1,), inputs.scorer)
    rollouts._at = 0
    try:
        assert rollouts._draw(1).problem.answer == "x+1"
        assert len(asked) > rollouts.rule.in_flight, "the rows of the next step, too"
        kept = sum(problem.answer == "x+1" for problem in twice)
        assert [rollouts._draw(1).problem.answer for _ in range(kept - 1)] == ["x+1"] * (kept - 1)
        rollouts.position = len(twice)
        dropped = rollouts._prompt_metrics()["rollout/prompts_unwinnable"]
        assert dropped >= len(twice) - kept - 2 and len(asked) == len(inputs.problems)
        found = inputs.scorer.metrics()
        assert found["time/reward"] > 0 and found["time/reward_wait"] > 0
    finally:
        inputs.scorer.close()


LATE = took_too_long(5.0)


@pytest.fixture
def dropping(thin_policy, tmp_path, monkeypatch):
    """Makes rollouts that drop rows, and whose workers say what the test wants.

    Returns:
      A function of the rows, of the outcomes that the checks of a gold answer have one after the
      other, by the answer's first character, and of settings. It returns the rollouts and the gold
      answers that the workers checked.
    """
    monkeypatch.setattr(rewards, "WORKER", types.SimpleNamespace(same=lambda gold, found: True))

    def make(lines, outcomes, **changes):
        path, asked = tmp_path / "rows.jsonl", []
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        changes = {"data.unwinnable": "drop", "rewards.workers": 1, **changes}
        cfg, inputs = read(thin_policy, path, **changes)

        def submit(index, texts, rows, margin):
            gold, future = rows[0]["answer"], Future()
            outcome = outcomes[gold[0]][asked.count(gold)]
            asked.append(gold)
            future.set_result(Answer([outcome], 0.1))
            return future

        monkeypatch.setattr(inputs.scorer, "_workers", types.SimpleNamespace(submit=submit))
        rollouts = rollouts_of(cfg, inputs)
        rollouts._at = 0
        return rollouts, asked

    return make


def test_checks_that_fail_do_not_decide_which_rows_are_dropped(dropping, caplog):
    lines = [{"problem": f"{i}=", "answer": f"{'xyz'[i % 3]}+{i}"} for i in range(60)]
    outcomes = {"x": [LATE, 1.0], "y": [LATE, 0.0], "z": [LATE, LATE]}
    rollouts, asked = dropping(lines, outcomes, reward="math_verify")
    drawn = [rollouts._draw(1).problem.answer for _ in range(16)]
    assert {answer[0] for answer in drawn} == {"x", "z"}, "what was not answered is kept"
    assert max(map(asked.count, asked)) == 2
    said = [r.message for r in caplog.records if "the row is kept" in r.message]
    assert "took longer than 5 s per completion twice" in said[0] and len(said) == 5
    state = json.loads(json.dumps(rollouts.state()))
    outcomes = {"x": [1.0], "y": [0.0], "z": [0.0]}
    resumed, asked = dropping(lines, outcomes, reward="math_verify")
    resumed.load_state(state)
    resumed._at = 0
    assert [resumed._draw(1).problem.answer for _ in range(16)] == drawn, "as before the checkpoint"


def test_rewards_that_take_no_time_check_gold_answers_without_workers(dropping):
    lines = [{"problem": f"{i}=", "answer": i if i % 2 else "five"} for i in range(40)]
    rollouts, asked = dropping(lines, {}, reward="number")
    assert "five" not in [rollouts._draw(1).problem.answer for _ in range(8)] and not asked


def test_gold_answers_of_prompts_that_are_too_long_are_not_checked(dropping):
    long = "1" * 40
    lines = [
        {"problem": f"{i}{long * (i % 2)}=", "answer": f"{'xy'[i % 2]}+{i}"} for i in range(40)
    ]
    changes = {"reward": "math_verify", "data.overlong_prompts": "drop"}
    rollouts, asked = dropping(lines, {"x": [1.0], "y": [1.0]}, **changes)
    assert {rollouts._draw(1).problem.answer[0] for _ in range(8)} == {"x"}
    assert {gold[0] for gold in asked} == {"x"}


@pytest.mark.parametrize(
    ("reward", "write", "gold", "bad"),
    [("choice", "The answer is ({})".format, "B", "Paris"),
     ("math_verify", "so \\boxed{{{}+x}}".format, "x+B", r"\frac{1}{")],
)  # fmt: skip
def test_a_run_is_rewarded_for_letters_and_for_equal_formulas(
    thin_policy, tmp_path, monkeypatch, reward, write, gold, bad
):
    path = tmp_path / "rows.jsonl"
    lines = [{"problem": f"{i}+1=", "answer": bad if i % 4 == 0 else gold} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(
        collect.ResponseText, "__call__", lambda self, tokens: write("AB"[len(tokens) % 2])
    )
    changes = {"rewards.workers": 1, "data.unwinnable": "drop", "steps": 1, "log.samples": 16}
    changes = settings(path, reward=reward, **changes)
    (step,) = run(thin_policy, tmp_path / "run", **changes)
    samples = [json.loads(x) for x in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 16 and {x["reward"] for x in samples} == {0.0, 1.0}
    assert all(x["reward"] == (write("B") == x["completion"]) for x in samples)
    assert step["reward/failed"] == 0 and step["rollout/prompts_unwinnable"] > 0
    assert step["time/reward"] > 0


def test_what_rows_decide_about_rewards_is_said_before_a_run_begins(thin_policy, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    lines = [{"question": f"{i}?", "answer": f"#### {i}", "sample": i} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"reward": "auto", "rewards.workers": "null", "rewards.timeout": 3}
    with pytest.raises(ConfigError, match="timeout=3 changes nothing: reward=number, which suits"):
        read(thin_policy, path, **given)
    read(thin_policy, path, **given | {"rewards.workers": 1})
    _, inputs = read(thin_policy, path, reward="slow_rewards:counts_tokens")
    assert "WARNING: rows have columns whose names" in inputs.notes[1]
    assert "'slow_rewards:counts_tokens': sample)" in inputs.notes[1]
    argv = ["--model", str(thin_policy), "--reward", "slow_rewards:counts_tokens", str(path)]
    data_report.main([*argv, "--rows", "0"])
    assert inputs.notes[1] in capsys.readouterr().out


def test_prompts_that_are_too_long_are_counted_and_dropped_cut_or_refused(thin_policy, tmp_path):
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
        rollouts = rollouts_of(cfg, inputs)
        rollouts._at = 0
        sizes[choice] = {len(rollouts._draw(1).prompt) for _ in range(8)}
        rollouts.position = rollouts._at
        assert rollouts._prompt_metrics()["rollout/prompts_overlong"] > 0
    assert sizes == {"drop": {6}, "truncate": {6, 12}}
    with pytest.raises(ValueError, match=r"the row \S+rows.jsonl:\d+ has 22 tokens"):
        read(thin_policy, path, **common, **{"data.overlong_prompts": "error"})
    with pytest.raises(ValueError, match=r"rollout.max_prompt_tokens \(22 keeps 100%\)"):
        read(thin_policy, path, **common, **{"rollout.max_prompt_tokens": 3})


def test_a_file_too_small_to_hold_anything_out_is_trained_on_all_the_same(thin_policy, tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"{i}?", "answer": i} for i in range(20)]
    lines = [line for line in lines if split_of(line["prompt"]) == "train"][:3]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cfg, inputs = read(thin_policy, path, reward="tiny_run:coin", **{"eval.problems": 8})
    assert len(inputs.problems) == 3 and not inputs.heldout and cfg.eval.problems == 0
    said = next(
        x
        for x in inputs.notes
        if x.startswith("WARNING: no held-out problem of the data is evaluated: ")
    )
    assert "data.heldout_path" in said


def test_held_out_rows_are_looked_at_too(thin_policy, tmp_path):
    held = rows(tmp_path / "held.jsonl", count=6, answer="Paris")
    held.write_text(held.read_text().replace("1+1=", "1+1+1+1+1+1+1+1="))
    common = {
        "data.heldout_path": held,
        "data.overlong_prompts": "drop",
        "reward": "number",
        "eval.problems": 6,
    }
    path = rows(tmp_path / "rows.jsonl", count=9)
    path.write_text(path.read_text().replace("+1=", "+2="))
    _, inputs = read(thin_policy, path, **common)
    said = "\n".join(inputs.notes)
    assert "WARNING: 1 of 6 held-out prompts checked have more tokens" in said
    assert "WARNING: held out: 6 of 6 gold answers checked cannot be won" in said


def rewarded(rewards):
    responses = [
        types.SimpleNamespace(reward=reward, failed=False, finish_reason="stop", text="x", parts=())
        for reward in rewards
    ]
    return [types.SimpleNamespace(responses=responses, problem=Problem("p", "1", 0))]


@pytest.mark.parametrize(
    ("before", "then", "said"),
    [([0, 0], [0, 0], True), ([0, 1], [0, 0], False), ([0, -1.0], [0], False), ([0], [1], False)],
)
def test_a_resumed_run_knows_whether_there_was_a_reward_before(before, then, said):
    def rollouts():
        prompts = types.SimpleNamespace(tokenizer=None)
        return Rollouts(RLConfig(model="x", out="y"), [], prompts, (), Scorer("number"))

    first, resumed = rollouts(), rollouts()
    first._reward_metrics(rewarded(before))
    resumed.load_state(json.loads(json.dumps(first.state())))
    assert resumed.zero_reward_example() is None, "nothing was sampled yet"
    resumed._reward_metrics(rewarded(then))
    assert (resumed.zero_reward_example() is not None) == said
    older = {key: value for key, value in first.state().items() if key != "any_reward"}
    resumed.load_state(older)
    resumed._reward_metrics(rewarded([0]))
    assert resumed.zero_reward_example() is None


@pytest.mark.parametrize(
    ("reward", "answer", "reason"),
    [("number", "Paris", "a number, "), ("math_verify", r"\frac{1}{", "formulas that parse"),
     ("exact", "a\nb", "one line"), ("number", "12, 13", "a number, ")],
)  # fmt: skip
def test_gold_answers_that_cannot_be_won_end_a_run_before_it_begins(
    thin_policy, tmp_path, capsys, reward, answer, reason
):
    path = rows(tmp_path / "rows.jsonl")
    bad = json.dumps({"problem": "bad", "answer": answer})
    path.write_text(path.read_text() + bad + "\n")
    said = failure(capsys, thin_policy, tmp_path / "run", **settings(path, reward=reward))
    assert "1 of " in said and f"reward={reward}, which reads {reason}" in said
    assert f": the row {path}:41: gold answer {answer!r}. Correct" in said
    assert "data.unwinnable=drop" in said and not (tmp_path / "run").exists()
