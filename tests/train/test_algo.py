"""The section `algo` has the options of the objective that it names, wherever that is named."""

import dataclasses

import numpy as np
import pytest

from specjax.command_line import parse_config
from train.loss.algo import algo
from train.loss.shared import GroupRelative
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


def read(*argv) -> RLConfig:
    return parse_config(RLConfig, argv)[0]


@pytest.mark.parametrize(
    "argv",
    [
        ["algo.objective=test_algo:Own", "algo.sharpness=3"],
        ["algo={objective: test_algo:Own, sharpness: 3}"],
        ["--config", "FILE"],
        ["--config=FILE", "algo.tis=false"],
    ],
)
def test_options_of_ones_own_objective_are_keys_wherever_it_is_named(argv, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("algo: {objective: test_algo:Own, sharpness: 3}")
    cfg = read(*(argument.replace("FILE", str(path)) for argument in argv))
    assert isinstance(cfg.algo, Own) and cfg.algo == algo("test_algo:Own", sharpness=3.0)
    rewards = np.array([[0.0, 2.0]])
    assert cfg.algo.advantages(rewards).tolist() == [[-1.0, 1.0]]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["algo.objective=test_algo:none"], "cannot load objective 'test_algo:none'"),
        (
            ["algo.objective=test_algo:read"],
            "that inherits from train.loss.algo.AlgoSection",
        ),
        (["algo.objective=test_algo:Own", "algo.clip_ratio=0.1"], "unknown key 'algo.clip_ratio'"),
        (["algo.objective=test_algo:Own", "algo.sharpness=0"], "expected sharpness > 0, got 0.0"),
        (
            ["algo.objective=test_algo:Own", "algo.sharpness=a"],
            "sharpness: expected float, got a",
        ),
        (["algo.sharpness=3"], "unknown key 'algo.sharpness'"),
        (["algo.clip_ratio_low=0.1"], "did you mean 'algo.clip_ratio'?"),
    ],
)
def test_a_mistake_in_objective_or_options_is_one_message(argv, said, capsys):
    with pytest.raises(SystemExit):
        read(*argv)
    assert said in capsys.readouterr().err
