"""Problems that reasoning-gym generates, and its own scores."""

import sys
import types
from types import SimpleNamespace

import pytest

from specjax.command_line import ConfigError
from specjax.settings import require_same_settings
from specjax.tokenizer import load_tokenizer
from train.data import rows as data
from train.data.checks import describe_data, read_inputs
from train.data.tasks import reasoning_gym
from train.eval_schema import EvalSection, EvalSet
from train.rewards.scoring import Scorer
from train.rollout.sets import problem_sets
from train.schema import DataConfig, RLConfig
from train.trainer import Trainer


class Doubles:
    """A stand-in for a data set: few questions, half a point for the right number of digits."""

    def __init__(self, seed=None, size=500, most=1000):
        if most < 1:
            raise AssertionError("most must be positive")
        self.seed, self.most = seed, most

    def __getitem__(self, index):
        number = (self.seed * 7919 + index * 31) % self.most
        metadata = {"source_dataset": "doubles", "source_index": index}
        return {"question": f"2 * {number} =", "answer": str(2 * number), "metadata": metadata}

    def score_answer(self, answer, entry):
        assert set(entry) == {"question", "answer", "metadata"}
        if answer is None:
            return 0.0
        return 1.0 if answer == entry["answer"] else 0.5 * (len(answer) == len(entry["answer"]))


@pytest.fixture
def doubles(monkeypatch):
    """`reasoning_gym` with that data set alone."""
    package, factory = types.ModuleType("reasoning_gym"), types.ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"doubles": (Doubles, None)}
    package.factory, package.create_dataset = factory, lambda name, **given: Doubles(**given)
    for name, module in (("reasoning_gym", package), ("reasoning_gym.factory", factory)):
        monkeypatch.setitem(sys.modules, name, module)
    caches = reasoning_gym._data_set, reasoning_gym._held_out
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def config(**changes) -> DataConfig:
    sizes = {"train_size": 60, "heldout_size": 20}
    return DataConfig(**{"task": "reasoning_gym", "dataset": "doubles", **sizes, **changes})


def prompts_of(cfg, split="train"):
    return [problem.prompt for problem in data.problems(cfg, split, chat=True)]


def test_problems_are_generated_by_name_seed_and_arguments(doubles):
    cfg = config()
    found = data.problems(cfg, "train", chat=True)
    assert len(found) == 60 and len(data.problems(cfg, "heldout")) == 20
    number = int(found[7].prompt.split()[2])
    assert (found[7].answer, found[7].index) == (str(2 * number), 7)
    assert prompts_of(cfg) == prompts_of(config()) != prompts_of(config(seed=1))
    assert all(int(p.split()[2]) < 90 for p in prompts_of(config(dataset_args={"most": 90})))
    assert data.default_reward(cfg) == "reasoning_gym"
    assert data.problems(cfg, "train")[7].prompt == f"{found[7].prompt}\nAnswer:"
    templated = config(prompt_template="Q: {question}")
    assert data.problems(templated, "train", chat=True)[7].prompt == f"Q: {found[7].prompt}"
    said = describe_data(SimpleNamespace(cfg=cfg, chat=True, date=None), None)
    beginning = "data: doubles of reasoning-gym, generated with seed 0; each prompt one message"
    assert said.startswith(beginning)


def test_no_question_is_in_both_splits(doubles):
    cfg = config(dataset_args={"most": 70})  # of 80 entries some questions repeat
    held, train = set(prompts_of(cfg, "heldout")), prompts_of(cfg)
    assert len(train) == 60 and not held & set(train)
    raw = Doubles(seed=0, most=70)
    assert held & {raw[i]["question"] for i in range(60)}, "without care some were in both"
    few = data.problems(config(dataset_args={"most": 3}), "train")
    with pytest.raises(ValueError, match="100 questions in a row are held out.*heldout_size=20"):
        few[0]


def read_sets(policy, **sets):
    """The problems of training, the sets of evaluation, and the warnings about questions."""
    cfg = RLConfig(data=config(), eval=EvalSection(problems=0, sets=sets))
    cfg.rewards.workers = 0
    inputs = read_inputs(cfg, load_tokenizer(policy), "policy")
    found, notes = problem_sets(cfg, inputs, "policy")
    asked = [[problem.columns["entry"]["question"] for problem in each.problems] for each in found]
    trained = {problem.columns["entry"]["question"] for problem in inputs.problems}
    return trained, asked, [note for note in notes if "trained on" in note]


def doubles_set(problems, **args):
    given = {"task": "reasoning_gym", "dataset": "doubles", "dataset_args": args}
    return EvalSet(**given, problems=problems)


def test_no_question_of_a_set_of_the_same_data_set_is_trained_on(doubles, thin_policy):
    few, many = doubles_set(10), doubles_set(400)
    trained, (first, second), notes = read_sets(thin_policy, few=few, many=many)
    assert len(second) == 400 > config().heldout_size and set(first) <= set(second)
    assert len(trained) == 60 and not trained & set(second) and not notes
    later = [f"2 * {(i * 31) % 1000} =" for i in range(60, 460)]
    assert second == later, "the entries after those of training"


def test_a_run_is_not_resumed_with_sets_that_hold_out_other_problems(doubles):
    def settings(**sets) -> dict:
        cfg = RLConfig(model="m", data=config(), eval=EvalSection(problems=0, sets=sets))
        return Trainer.fingerprint(types.SimpleNamespace(cfg=cfg))

    others = {"file": EvalSet("rows.jsonl", 900)}
    few, many, more = settings(), *(settings(many=doubles_set(n), **others) for n in (400, 401))
    require_same_settings(few, settings(few=doubles_set(20), **others))
    for saved, current in ((few, many), (many, few), (many, more)):
        with pytest.raises(ConfigError, match="made with other settings of eval; "):
            require_same_settings(saved, current)


@pytest.mark.parametrize(
    ("completion", "share"),
    [
        ("<think>..</think><answer> {right} </answer> or 1", 1), ("The answer is {right}.", 1),
        ("#### {right}", 1), ("\\boxed{{{right}}}", 1), ("so it is:\n{right}\n", 1),
        (r"<ANSWER>\boxed{{{right}}}</ANSWER>", 1),
        ("<answer>{wrong}</answer>", 0.5), ("{right} or so", 0), ("", 0),
    ],
)  # fmt: skip
def test_completions_are_scored_by_the_data_set(doubles, completion, share):
    problem = data.problems(config(seed=3), "train")[1]
    wrong = str(int(problem.answer) + (-1 if problem.answer.startswith("9") else 1))
    scorer = Scorer("reasoning_gym")
    scorer.check(problem)
    assert scorer(completion.format(right=problem.answer, wrong=wrong), problem).value == share


def test_what_reasoning_gym_does_not_have_is_named(doubles):
    with pytest.raises(ValueError, match="no data set 'double' of .*; similar ones are doubles"):
        data.problems(config(dataset="double"), "train")
    for given in ({"most": 0}, {"least": 1}):
        with pytest.raises(ValueError, match="data.dataset_args: doubles .* does not take"):
            data.problems(config(dataset_args=given), "train")
    for name in ("size", "seed"):
        with pytest.raises(ValueError, match=f"data.dataset_args: leave out {name}"):
            data.problems(config(dataset_args={name: 3}), "train")


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning_gym._data_set.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'specjax\[reasoning-gym\]'"):
        data.problems(config(), "train")
