"""Named sets of evaluation: their rows, what is sampled, their metrics, and when they run."""

import itertools
import json
import types
from fractions import Fraction

import numpy as np
import pytest

from specjax.command_line import ConfigError, parse_config
from specjax.engine.request import SampleOutput, SpecStats, Totals
from specjax.schema import describe
from specjax.tokenizer import load_tokenizer
from train import rl
from train.eval_schema import EvalSection, asked_sets
from train.evaluation import (
    described,
    evaluate,
    is_right,
    majority,
    pass_at_k,
    problem_sets,
    same_answer,
    sizes,
)
from train.inputs import Inputs, Prompts
from train.programs import settle_length
from train.rewards import CHOICE, EXACT, MATH_VERIFY, NUMBER
from train.schema import RLConfig
from train.scoring import Score, Scorer
from train.tasks.layout import Problem

# --- metrics of one problem ----------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_choices_in_which_a_sample_is_right():
    for n in range(1, 8):
        for right, k in itertools.product(range(n + 1), range(1, n + 1)):
            choices = list(itertools.combinations(range(n), k))
            share = Fraction(sum(min(chosen) < right for chosen in choices), len(choices))
            assert pass_at_k(n, right, k) == pytest.approx(float(share), abs=1e-12)


def test_pass_at_k_is_logged_for_powers_of_two_and_for_n():
    assert [sizes(n) for n in (1, 2, 3, 4, 12)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 8, 12],
    ]


@pytest.mark.parametrize(
    ("answers", "index"),
    [
        (["3", "4", "4"], 1),
        (["3", "4", "4", "3"], 0),  # as many of each: the first one
        ([None, "5", None, None], 1),  # no answer is no vote
        ([None, None], 0),
        (["1/2", "7", "0.5"], 0),
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


def test_the_reward_that_compares_answers_says_what_is_right():
    several = Scorer(["format", "number"])
    assert is_right(several, Score(1.0, parts=(0.0, 1.0)), 1.0)
    assert not is_right(several, Score(1.0, parts=(1.0, 0.0)), 1.0)
    own = Scorer("own:reward", lambda completion, answer: 0.5)
    assert is_right(own, Score(0.5), 0.5) and not is_right(own, Score(0.5), 1.0)


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
    assert "eval.sets.NAME.temperature=null" in describe(RLConfig)


def test_an_empty_mapping_replaces_the_sets_of_a_file(tmp_path):
    file = tmp_path / "file.yaml"
    file.write_text("eval: {sets: {a: {path: f}}}\n")
    for typed, names in (([], ["a"]), (["eval.sets={}"], []), (["eval.sets.b.path=g"], ["a", "b"])):
        cfg, _ = parse_config(RLConfig, ["--config", str(file), *typed])
        assert [*cfg.eval.sets] == names


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["eval.sets.a.pth=f"], "eval.sets: a: unknown key 'pth'; did you mean 'path'?"),
        (["eval.sets.a.path=f", "eval.sets.a.n=0"], "a.n: expected at least 1, got 0"),
        (["eval.sets={a: 3}"], "a: expected a mapping of its settings, got 3"),
        (["eval.sets.a.n=2"], "eval.sets.a: has no rows; set its path"),
        (["eval.sets.reward.path=f"], "names of letters, digits and underscores, other than"),
        (["eval.sets.heldout.path=f"], "truncated_ratio, heldout, train; got 'heldout'"),
        (["eval.sets.train.path=f"], "truncated_ratio, heldout, train; got 'train'"),
        (["eval.sets.a.path=f", "eval.sets.a.top_p=2"], "eval.sets.a.top_p must be greater than"),
        (["eval.sets.a={path: f, n: 2, temperature: 0}"], "eval.sets.a.n=2: with a temperature of"),
        (["eval.sets.a.path=f", "eval.sets.a.reward=nothing"], "eval.sets.a: unknown reward"),
        (["eval.sets.a={path: f, dataset: g}"], "dataset=g is of task=reasoning_gym, got auto"),
        (["eval.sets.a={path: f, dataset_args: {b: 1}}"], "a: dataset_args={'b': 1} is of task="),
        (["eval.sets.a={path: f, task: sums}"], "a: path=f changes nothing: the problems of"),
        (["eval.sets.a={path: f, weights: [0, 0]}"], "a: weights: expected finite numbers of"),
        (["eval.sets={}", "eval.sets.a.path=f"], "eval.sets={} leaves nothing of the mapping, and"),
        (["eval.problems=0", "eval.before=false"], "eval.problems=0 evaluates nothing"),
    ],
)
def test_a_wrong_set_is_refused_by_its_name(argv, said, capsys):
    with pytest.raises(SystemExit):
        parse_config(RLConfig, argv)
    assert said in capsys.readouterr().err


def test_a_set_that_is_longer_than_the_model_is_refused_by_its_name():
    section = EvalSection(problems=0, sets={"long": {"path": "f", "max_tokens": 1000}})
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
    section = EvalSection(problems=0, sets=sets)
    cfg = RLConfig(eval=section, **dict(settings))
    prompts = Prompts(tokenizer, cfg.data, cfg.rollout.max_prompt_tokens)
    return problem_sets(cfg, Inputs([], [], prompts, Scorer("number"), []), "policy")


class Scripted:
    """An engine whose samples have given texts, in the order of the jobs."""

    def __init__(self, tokenizer, *texts: str):
        self.tokenizer, self.texts, self.jobs = tokenizer, texts, []

    def generate(self, jobs, on_progress, on_sample):
        self.jobs += jobs
        stats, outputs = SpecStats(1, 0, 0, (1,)), []
        for text in self.texts:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            reason = "length" if text.endswith("...") else "stop"
            outputs.append(SampleOutput(ids, None, [0.0] * len(ids), reason, stats))
        assert len(outputs) == len(jobs)
        for index in reversed(range(len(jobs))):  # as they may end
            on_sample(index, outputs[index])
        totals = Totals(0, np.zeros(2, np.int64))
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
    assert described(found).startswith("gsm: avg@4 0.250, pass@1 0.250, ")
    assert "maj@4 0.500, truncated 0.125, length " in described(found)


def test_held_out_problems_have_the_lengths_that_sets_have(tokenizer):
    cfg = RLConfig(eval=EvalSection(problems=1))
    prompts = Prompts(tokenizer, cfg.data, cfg.rollout.max_prompt_tokens)
    problem = Problem("1+1?", "2", 0, "", {}, {})
    sets, _ = problem_sets(cfg, Inputs([], [problem], prompts, Scorer("number"), []), "policy")
    found = evaluate(Scripted(tokenizer, "no..."), sets, (1,), 0).metrics
    assert (found["eval/reward"], found["eval/truncated_ratio"]) == (0.0, 1.0)
    assert found["eval/response_length_mean"] == len(tokenizer.encode("no..."))


def test_a_problem_is_scored_while_others_are_sampled(tokenizer, tmp_path):
    path = lines(tmp_path / "x.jsonl", {"prompt": "1?", "answer": 1}, {"prompt": "2?", "answer": 2})
    [one], _ = read(tokenizer, x={"path": path, "n": 2})
    calls = []

    def batch(completions, answer):
        calls.append(list(completions))
        return [1.0] * len(completions)

    class Watched(Scripted):
        def generate(self, jobs, on_progress, on_sample):
            def watched(index, sample):
                on_sample(index, sample)
                self.seen.append((index, len(calls)))

            self.seen = []
            return super().generate(jobs, on_progress, watched)

    one = types.SimpleNamespace(**vars(one) | {"scorer": Scorer("a:b", batch)})
    engine = Watched(tokenizer, *"1234")
    evaluate(engine, [one], (1,), 0)
    assert engine.seen == [(3, 0), (2, 1), (1, 1), (0, 2)]
    assert calls == [["3", "4"], ["1", "2"]], "in the order of samples"


@pytest.mark.parametrize(
    ("own", "described"),
    [
        ({"reward": ["number", "format"]}, "number + 0.2 format"),
        ({"reward": ["format", "number"]}, "0.2 format + number"),
        ({"reward": ["exact", "format"]}, "exact + 0.2 format"),
        ({"reward": "format"}, "format"),
        ({"reward": ["number", "format"], "weights": [0.5, 2]}, "0.5 number + 2 format"),
        ({}, "number + 0.2 format"),
    ],
)
def test_weights_of_a_set_are_those_of_the_runs_rewards_by_name(
    tokenizer, tmp_path, own, described
):
    path = lines(tmp_path / "x.jsonl", {"prompt": "1?", "answer": 1})
    cfg = RLConfig(reward=["number", "format"], eval=EvalSection(0, {"x": {"path": path} | own}))
    cfg.rewards.weights = [1.0, 0.2]
    prompts = Prompts(tokenizer, cfg.data, cfg.rollout.max_prompt_tokens)
    scorer = Scorer(cfg.reward, options=cfg.rewards)
    [one], _ = problem_sets(cfg, Inputs([], [], prompts, scorer, []), "policy")
    assert one.scorer.described.startswith(described)
    same = described == "number + 0.2 format"
    assert (one.scorer is scorer) == same and one.alone != same


def test_rewards_that_sets_share_end_once(tokenizer, tmp_path, monkeypatch):
    path = lines(tmp_path / "x.jsonl", {"prompt": "1?", "answer": 1})
    sets, _ = read(tokenizer, a={"path": path, "reward": "exact"},
                   b={"path": path, "reward": "exact"})  # fmt: skip
    assert sets[0].scorer is sets[1].scorer and sets[0].alone
    ends = []
    monkeypatch.setattr(Scorer, "close", lambda self: ends.append("close"))
    monkeypatch.setattr(Scorer, "metrics", lambda self: ends.append("scored") or {
        "time/reward": 1.5, "time/reward_wait": 0.5, "reward/timed_out": 2.0})  # fmt: skip
    found = evaluate(Scripted(tokenizer, "1", "1"), sets, (1,), 0).metrics
    assert ends[:2] == ["scored", "scored"] and set(ends[2:]) == {"close"}
    assert (found["time/eval_reward"], found["time/eval_reward_wait"]) == (3.0, 1.0)
    assert found["eval/b/reward_timed_out"] == 2.0


def test_columns_that_the_reward_does_not_see_are_named(tokenizer, tmp_path):
    path = lines(tmp_path / "x.jsonl", {"prompt": "1?", "answer": 1, "sample": 3})
    _, notes = read(tokenizer, x={"path": path, "reward": "slow_rewards:takes_all"})
    assert any("WARNING: eval.sets.x: rows have columns whose names" in note for note in notes)


def test_a_set_whose_questions_are_trained_on_is_warned_of(tokenizer, tmp_path):
    path = lines(tmp_path / "x.jsonl", *({"prompt": f"{i}?", "answer": i} for i in range(3)))
    cfg = RLConfig(eval=EvalSection(0, {"x": {"path": path}, "y": {"path": path, "problems": 1}}))
    prompts = Prompts(tokenizer, cfg.data, cfg.rollout.max_prompt_tokens)
    trained = [Problem(f"{i}?", "0", i, "", {}, {}) for i in (2, 1, 7)]
    _, notes = problem_sets(cfg, Inputs(trained, [], prompts, Scorer("number"), []), "policy")
    said = [note for note in notes if "are trained on" in note]
    assert len(said) == 1, "the only question of y is not"
    assert said[0].startswith("WARNING: eval.sets.x: 2 of its 3 questions are trained on, too")


def together(completions, answer):
    """A reward of batch form: how many completions it got, and whether for one problem."""
    return [len(completions) + 10.0 * len(set(answer))] * len(completions)


def test_a_reward_of_batch_form_gets_the_samples_of_one_problem(tokenizer, tmp_path):
    path = lines(tmp_path / "x.jsonl", *({"prompt": f"{i}?", "answer": i} for i in range(3)))
    sets, _ = read(tokenizer, x={"path": path, "n": 2})
    sets = [types.SimpleNamespace(**vars(sets[0]) | {"scorer": Scorer("a:b", together)})]
    found = evaluate(Scripted(tokenizer, *"123456"), sets, (1,), 0).metrics
    assert found["eval/x/avg@2"] == 12.0
    assert "eval/x/maj@2" not in found, "it compares no answers"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"path": "{}/none.jsonl"}, "no such file|not exist|none.jsonl"),
        ({"path": "{}/odd.jsonl"}, r"cannot tell what .*eval\.sets\.bad\.prompt_key"),
        ({"path": "{}/rows.jsonl", "prompt_key": "nothing"}, "nothing"),
        (
            {"path": "{}/rows.jsonl", "max_prompt_tokens": 1},
            r"eval\.sets\.bad\.max_prompt_tokens=1",
        ),
        ({"path": "{}/rows.jsonl", "reward": "odd_rewards:asks_for_too_much"}, "difficulty"),
        ({"path": "{}/rows.jsonl", "chat": "on"}, r"eval\.sets\.bad\.chat=on: .*no chat template"),
        ({"path": "{}/rows.jsonl", "prompt_template": "x"}, r"eval\.sets\.bad\.prompt_template"),
    ],
)
def test_a_set_that_cannot_be_read_is_refused_by_its_name(tokenizer, tmp_path, settings, said):
    lines(tmp_path / "odd.jsonl", {"a": 1, "b": 2})
    lines(tmp_path / "rows.jsonl", {"question": "1+1?", "answer": "#### 2"})
    settings = settings | {"path": settings["path"].format(tmp_path)}
    with pytest.raises(ConfigError, match=rf"^eval\.sets\.bad: .*({said})"):
        read(tokenizer, bad=settings)


def test_the_runs_template_is_not_for_a_set_of_conversations(tokenizer, tmp_path):
    tokenizer = load_tokenizer(tokenizer.name_or_path)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    rows = {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}
    path = lines(tmp_path / "chat.jsonl", rows)
    text = lines(tmp_path / "text.jsonl", {"prompt": "1+1", "answer": "2"})
    data = {"data": RLConfig().data}
    data["data"].prompt_template = "Q {question}"
    sets, _ = read(tokenizer, data, chat={"path": path}, text={"path": text})
    assert [each.prompts.text(each.problems[0]) for each in sets] == ["<1+1>", "<Q 1+1>"]


# --- when ----------------------------------------------------------------------------------------


class Stub:
    """A trainer of nothing, which counts its evaluations."""

    def __init__(self, done=0):
        self.done_steps, self.evaluated, self.eval_engine = done, [], "engine"
        self.source = self.exact = None
        self.last_rollout, self.eval_sets, self.last_evaluation = [], [], {}
        self.rollouts = types.SimpleNamespace(
            zero_reward_example=lambda: None, short=None, position=0
        )

    def evaluate(self):
        self.evaluated.append(self.done_steps)
        return {"eval/reward": 0.5}

    def step(self):
        self.done_steps += 1
        return {}

    def save(self, *_, **__):
        pass


@pytest.mark.parametrize(
    ("settings", "done", "resumed", "at"),
    [
        ({}, 0, False, [0, 5]),
        ({"every": 2}, 0, False, [0, 2, 4, 5]),
        ({"before": False}, 0, False, [5]),
        ({"every": 2}, 2, True, [4, 5]),  # the evaluation before the first step was made
    ],
)
def test_an_evaluation_is_before_the_first_step_at_every_kth_and_at_the_end(
    settings, done, resumed, at
):
    cfg, stub, log = RLConfig(steps=5, eval=EvalSection(**settings)), Stub(done), {}
    log = types.SimpleNamespace(log=lambda *_: None, log_evaluation=lambda *_: None)
    rl._steps(cfg, stub, log, log, None, None, resumed=resumed)
    assert stub.evaluated == at
