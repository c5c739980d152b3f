"""The section `algo` has the options of the objective that it names, wherever that is named."""

import dataclasses

import numpy as np
import pytest

from specjax.command_line import parse_config
from specjax.interfaces import Denominators
from train.algo import algo
from train.collect import to_samples
from train.groups import Group, Response
from train.loss import policy_loss
from train.objectives.grpo import GRPO
from train.objectives.shared import GroupRelative
from train.schema import RLConfig


@dataclasses.dataclass(frozen=True)
class Own(GroupRelative):
    """An objective of one's own.

    Attributes:
      sharpness: a power.
    """

    normalize_std: bool = False
    sharpness: float = 2.0

    def __post_init__(self):
        super().__post_init__()
        if self.sharpness <= 0:
            raise ValueError(f"expected sharpness > 0, got {self.sharpness}")

    def per_token(self, logprobs, advantages, segments, loss_mask):
        return -((advantages * logprobs.new) ** self.sharpness), {}


@dataclasses.dataclass(frozen=True)
class Taken(Own):
    tis: float = 1.0


@dataclasses.dataclass(frozen=True)
class Hides(Own):
    build: int = 1


@dataclasses.dataclass(frozen=True)
class Bare:
    eps: float

    per_token = advantages = weights = Own.per_token


class Loose:
    per_token = advantages = weights = Own.per_token


def read(*argv) -> RLConfig:
    return parse_config(RLConfig, argv)[0]


def test_the_usual_objective_is_grpo_and_its_options_keep_their_names():
    cfg = read("algo.loss_aggregation=sequence", "algo.normalize_std=false")
    assert type(cfg) is RLConfig and read("algo.objective=grpo") == RLConfig()
    assert cfg.algo.build() == GRPO(loss_aggregation="sequence", normalize_std=False)


@pytest.mark.parametrize(
    "argv",
    [
        ["algo.objective=test_algo:Own", "algo.sharpness=3"],
        ["--algo.objective", "test_algo:Own", "--algo.sharpness", "3"],
        ["--algo.sharpness=3", "--algo.objective=grpo", "algo.objective=test_algo:Own"],
        ["algo={objective: test_algo:Own, sharpness: 3}"],
        ["--config", "FILE"],
        ["--config=FILE", "algo.tis=false"],
    ],
)
def test_options_of_ones_own_objective_are_keys_wherever_it_is_named(argv, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("algo: {objective: test_algo:Own, sharpness: 3}")
    cfg = read(*(argument.replace("FILE", str(path)) for argument in argv))
    assert cfg.algo.build() == Own(sharpness=3.0)
    assert cfg.algo == algo("test_algo:Own", sharpness=3.0)
    rewards = np.array([[0.0, 2.0]])
    assert cfg.algo.build().advantages(rewards).tolist() == [[-1.0, 1.0]]


def test_the_command_line_decides_and_not_its_file(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("algo: {objective: test_algo:Own}")
    assert read(f"--config={path}", "algo.objective=grpo") == RLConfig()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["algo.objective=gpro"], "algo.objective: unknown objective 'gpro'; choose one of grpo"),
        (["algo.objective=test_algo:none"], "cannot load objective 'test_algo:none'"),
        (["algo.objective=test_algo:Loose"], "expected a frozen dataclass with the methods adv"),
        (["algo.objective=test_algo:read"], "expected a frozen dataclass with the methods adv"),
        (["algo.objective=test_algo:Bare"], "an option 'eps' without a default; give it one"),
        (["algo.objective=test_algo:Taken"], "an option 'tis', which the section algo has for all"),
        (["algo.objective=test_algo:Hides"], "an option 'build', which the section algo has for"),
        (["algo.objective=test_algo:Own", "algo.sharpnes=3"], "did you mean 'algo.sharpness'?"),
        (["algo.objective=test_algo:Own", "algo.clip_ratio=0.1"], "unknown key 'algo.clip_ratio'"),
        (["algo.objective=test_algo:Own", "algo.sharpness=0"], "expected sharpness > 0, got 0.0"),
        (["algo.objective=test_algo:Own", "algo.sharpness=a"], "algo.sharpness: expected a number"),
        (
            ["algo.objective=test_algo:Own", "algo.advantage_eps=1"],
            "algo.advantage_eps=1.0 changes",
        ),
        (["algo.sharpness=3"], "unknown key 'algo.sharpness'"),
        (["algo.clip_ratio_low=0.1"], "did you mean 'algo.clip_ratio'?"),
        (["algo={objective: ["], "algo: expected a value"),
    ],
)
def test_a_mistake_in_objective_or_options_is_one_message(argv, said, capsys):
    with pytest.raises(SystemExit):
        read(*argv)
    assert said in capsys.readouterr().err


def test_help_has_the_options_of_the_objective_with_its_own_defaults(capsys):
    with pytest.raises(SystemExit):
        read("--help", "algo.objective=test_algo:Own")
    said = capsys.readouterr().out
    assert "algo.sharpness=2.0" in said and "a power" in said
    assert "algo.normalize_std=false" in said and "algo.clip_ratio" not in said


def test_a_section_that_is_made_for_another_objective_is_refused():
    with pytest.raises(ValueError, match=r"make it by train.algo.algo\('grpo', ...\)"):
        dataclasses.replace(algo("test_algo:Own"), objective="grpo")


@dataclasses.dataclass(frozen=True)
class Averaged(Own):
    def per_token(self, logprobs, advantages, segments, loss_mask):
        return (logprobs.new * advantages).mean(), {}


@dataclasses.dataclass(frozen=True)
class Named(Own):
    def per_token(self, logprobs, advantages, segments, loss_mask):
        return logprobs.new, {"mine": logprobs.new, "kl": logprobs.old}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Averaged", r"of shape \(1, 4\), from per_token and weights, got loss of shape \(\)"),
        ("Named", "per_token logs kl, which is logged of every objective"),
    ],
)
def test_an_objective_that_gives_other_than_is_expected_is_told_so(name, said):
    names = ("advantages", "old_logprobs", "behaviour_logprobs", "loss_mask", "segment_ids")
    batch = {name: np.ones((1, 4), np.float32) for name in names}
    batch["segment_ids"] = batch["segment_ids"].astype(np.int32)
    with pytest.raises(ValueError, match=said):
        policy_loss(batch["old_logprobs"], batch, algo(f"test_algo:{name}"), Denominators(4, 1))


def test_advantages_of_another_shape_than_the_rewards_are_refused():
    group = Group(0, 1, 1, None, [1], [Response([2]), Response([3])], [0.0, 0.0])
    with pytest.raises(ValueError, match=r"the shape of the rewards, \(1, 2\), got \(2,\)"):
        to_samples([group], np.zeros(2))
