"""Named sets of evaluation: their rows, what is sampled, and their metrics."""

import itertools
import json
import types
from fractions import Fraction

import numpy as np
import pytest

from specjax.command_line import ConfigError, parse_config
from specjax.engine.request import SampleOutput, SpecStats, Totals
from specjax.settings import describe, keys_of
from specjax.tokenizer import load_tokenizer
from train.data.checks import Inputs
from train.data.prompts import Prompts
from train.data.tasks.layout import Problem
from train.eval_schema import EvalSection, EvalSet, asked_sets
from train.programs import settle_length
from train.rewards.builtin import CHOICE, EXACT, MATH_VERIFY, NUMBER
from train.rewards.scoring import Scorer
from train.rollout.evaluation import (
    described,
    evaluate,
    majority,
    pass_at_k,
    same_answer,
)
from train.rollout.sets import problem_sets
from train.schema import RLConfig

# --- metrics of one problem ----------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_choices_in_which_a_sample_is_right():
    for n in range(1, 8):
        for right, k in itertools.product(range(n + 1), range(1, n + 1)):
            choices = list(itertools.combinations(range(n), k))
            share = Fraction(sum(min(chosen) < right for chosen in choices), len(choices))
            assert pass_at_k(n, right, k) == pytest.approx(float(share), abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "index"),
    [
        (["3", "4", "4", "3"], 0),  # as many of each: the first one
        ([None, "5", None, None], 1),  # no answer is no vote
        ([None, "7", "1/2", "0.5", "7", "0.50"], 2),
    ],
)
def test_the_majority_is_the_first_sample_with_the_answer_of_most(answers, index):
    assert majority(answers, same_answer(NUMBER)) == index


@pytest.mark.parametrize(
    ("reward", "one", "other", "same"),
    [
        (NUMBER, "1,000", "1000", True),
        (NUMBER, "3 apples", "3 pears", False),
        (EXACT, "a b", "ab", False),
        (CHOICE, "B", "B", True),
        (MATH_VERIFY, "\\dfrac{1}{2}", "0.5", True),
        (MATH_VERIFY, "\\dfrac{x}{2}", "\\frac{x}{ 2}", True),
        (MATH_VERIFY, "x+1", "1+x", False),  # it needs time, and is not asked
    ],
)
def test_answers_are_compared_by_the_reward_where_that_takes_no_time(reward, one, other, same):
    assert same_answer(reward)(one, other) == same


# --- settings ------------------------------------------------------------------------------------


def test_a_set_takes_from_the_rollouts_what_it_does_not_say():
    argv = ["eval.problems=0", "rollout.temperature=0.7", "rollout.max_tokens=99"]
    argv += ["eval.sets.a.path=f", "eval.sets.a.n=4", "eval.sets.b={path: g, temperature: 0}"]
    argv += ["--eval.sets.b.prompt_template", "{question}: x"]
    cfg, _ = parse_config(RLConfig, argv)
    a, b = asked_sets(cfg.eval, cfg.rollout)
    assert (a.name, a.n, a.params().temperature, a.params().max_tokens) == ("a", 4, 0.7, 99)
    assert (b.name, b.n, b.params().temperature) == ("b", 1, 0.0)
    assert cfg.eval.sets["b"].prompt_template == "{question}: x"
    assert "eval.sets.NAME.temperature=null" in describe(keys_of(RLConfig))


def test_a_set_that_is_longer_than_the_model_is_refused_by_its_name():
    section = EvalSection(problems=0, sets={"long": EvalSet("f", max_tokens=1000)})
    with pytest.raises(ConfigError, match=r"eval\.sets\.long: .*at most 256, the longest"):
        settle_length(RLConfig(eval=section), types.SimpleNamespace(max_position=256))


# --- rows, samples and rewards -------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(thin_policy):
    return load_tokenizer(thin_policy)


def lines(path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(tokenizer, settings=(), **sets):
    made = {name: EvalSet(**keys) for name, keys in sets.items()}
    cfg = RLConfig(eval=EvalSection(problems=0, sets=made), **dict(settings))
    prompts = Prompts(tokenizer, cfg.data, cfg.rollout.max_prompt_tokens)
    return problem_sets(cfg, Inputs([], [], prompts, Scorer("number"), []), "policy")


class Scripted:
    """An engine whose samples have given texts, in the order of the jobs."""

    def __init__(self, tokenizer, *texts: str):
        self.tokenizer, self.texts, self.jobs = tokenizer, texts, []

    def generate(self, jobs, on_progress, on_sample):
        self.jobs += jobs
        stats, outputs = SpecStats((0, 1)), []
        for text in self.texts:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            reason = "length" if text.endswith("...") else "stop"
            outputs.append(SampleOutput(ids, None, [0.0] * len(ids), reason, stats))
        assert len(outputs) == len(jobs)
        for index in reversed(range(len(jobs))):  # as they may end
            on_sample(index, outputs[index])
        totals = Totals(0)
        totals.seconds = 2.0
        return outputs, totals


def test_every_set_has_metrics_of_its_own(tokenizer, tmp_path):
    gsm = lines(tmp_path / "gsm.jsonl", {"question": "1+1?", "answer": "1+1=2\n#### 2"},
                {"question": "2+2?", "answer": "#### 4"})  # fmt: skip
    own = lines(tmp_path / "own.jsonl", {"q": "A or B?", "gold": "B"})
    sets, notes = read(
        tokenizer,
        gsm={"path": gsm, "n": 4, "temperature": 0.5, "max_tokens": 9},
        own={"path": own, "prompt_key": "q", "answer_key": "gold", "reward": "choice",
             "temperature": 0, "prompt_template": "Q: {question}"},
    )  # fmt: skip
    texts = ["\\boxed{2}", "\\boxed{3}", "\\boxed{2.0}", "no..."]
    engine = Scripted(tokenizer, *texts, *["\\boxed{7}"] * 4, "\\boxed{B}")
    found = evaluate(engine, sets, (1,), seed=50).metrics
    times = {name: found.pop(name) for name in [*found] if name.startswith("time/")}
    assert times.keys() == {"time/eval", "time/eval_reward", "time/eval_reward_wait"}
    assert 0 < times["time/eval_reward"] < times["time/eval"]
    size = np.mean([len(tokenizer.encode(text)) for text in (*texts, *["\\boxed{7}"] * 4)])
    assert found == pytest.approx({
        "eval/gsm/avg@4": 0.25, "eval/gsm/pass@1": 0.25, "eval/gsm/pass@2": (1 - 1 / 6) / 2,
        "eval/gsm/pass@4": 0.5, "eval/gsm/maj@4": 0.5, "eval/gsm/truncated_ratio": 1 / 8,
        "eval/gsm/response_length_mean": size, "eval/gsm/reward_timed_out": 0,
        "eval/gsm/problems": 2, "eval/gsm/reward_failed": 0,
        "eval/gsm/prompts_overlong": 0, "eval/own/avg@1": 1, "eval/own/pass@1": 1,
        "eval/own/maj@1": 1, "eval/own/truncated_ratio": 0, "eval/own/reward_timed_out": 0,
        "eval/own/problems": 1, "eval/own/reward_failed": 0,
        "eval/own/response_length_mean": len(tokenizer.encode("\\boxed{B}")),
        "eval/own/prompts_overlong": 0,
    })  # fmt: skip
    seeds = [(job.params.seed, job.sample, job.params.temperature) for job in engine.jobs]
    first, second = ([(seed, g, 0.5) for g in range(4)] for seed in (50, 51))
    assert seeds == [*first, *second, (50, 0, 0.0)]
    assert tokenizer.decode(engine.jobs[-1].prompt) == "Q: A or B?"
    said = "\n".join(notes)
    assert f"eval.sets.gsm: {gsm}, 2 rows read as gsm8k" in said and "reward choice" in said
    assert described(found).startswith("gsm/avg@4 0.250, gsm/pass@1 0.250, ")
    assert "gsm/maj@4 0.500" in described(found)


def test_a_set_whose_questions_are_trained_on_is_warned_of(tokenizer, tmp_path):
    path = lines(tmp_path / "x.jsonl", *({"prompt": f"{i}?", "answer": i} for i in range(3)))
    cfg = RLConfig(eval=EvalSection(0, {"x": EvalSet(path), "y": EvalSet(path, 1)}))
    prompts = Prompts(tokenizer, cfg.data, cfg.rollout.max_prompt_tokens)
    trained = [Problem(f"{i}?", "0", i, "", {}, {}) for i in (2, 1, 7)]
    _, notes = problem_sets(cfg, Inputs(trained, [], prompts, Scorer("number"), []), "policy")
    said = [note for note in notes if "are trained on" in note]
    assert len(said) == 1, "the only question of y is not"
    assert said[0].startswith("WARNING: eval.sets.x: 2 of its 3 questions are trained on, too")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"path": "{}/odd.jsonl"}, "cannot tell what .*data.prompt_key"),
        ({"path": "{}/rows.jsonl", "reward": "odd_rewards:asks_for_too_much"}, "difficulty"),
        ({"path": "{}/rows.jsonl", "chat": "on"}, "chat=on: .*no chat template"),
    ],
)
def test_a_set_that_cannot_be_read_is_refused_by_its_name(tokenizer, tmp_path, settings, said):
    lines(tmp_path / "odd.jsonl", {"a": 1, "b": 2})
    lines(tmp_path / "rows.jsonl", {"question": "1+1?", "answer": "#### 2"})
    settings = settings | {"path": settings["path"].format(tmp_path)}
    with pytest.raises(ConfigError, match=rf"^eval\.sets\.bad: .*({said})"):
        read(tokenizer, bad=settings)
