"""A preset is the defaults of the section `algo`: it says what it sets, and what is set wins."""

import pytest

from specjax.command_line import parse_config
from train.loss.algo import algo
from train.loss.shared import Clip, GroupRelative
from train.presets import PRESETS
from train.schema import RLConfig


def read(*argv) -> RLConfig:
    return parse_config(RLConfig, argv)[0]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_it_says(name):
    cfg = read(f"algo={name}")
    assert {key: getattr(cfg.algo, key) for key in PRESETS[name]} == PRESETS[name]


def test_the_presets_are_the_papers():
    found = {name: read(f"algo={name}").algo for name in PRESETS}
    clips = {n: (a.clip_ratio, a.clip_ratio_high) for n, a in found.items()}
    assert clips == {
        "grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4),
        "cispo": (1.0, 4.0), "rloo": (0.2, 0.2), "reinforce_pp": (0.2, 0.2),
    }  # fmt: skip
    means = {n: a.loss_aggregation for n, a in found.items()}
    assert means["grpo"] == means["gspo"] == "sequence" and means["dr_grpo"] == "constant"
    assert {means[n] for n in ("dapo", "cispo", "rloo", "reinforce_pp")} == {"token"}
    assert not found["dr_grpo"].normalize_std and found["dapo"].normalize_std
    assert {n for n, a in found.items() if getattr(a, "std_correction", 0)} == {
        "grpo", "dapo", "gspo", "cispo",
    }  # fmt: skip
    assert {n for n, a in found.items() if a.dynamic_sampling} == {"dapo", "cispo"}
    assert found["dapo"].overlong_tokens(20_480) == 4_096
    built = {n: type(a) for n, a in found.items()}
    assert built["dapo"] is built["grpo"] is built["dr_grpo"]
    assert issubclass(built["gspo"], GroupRelative) and issubclass(built["rloo"], Clip)


def test_dr_grpo_divides_by_the_largest_length():
    assert read("algo=dr_grpo", "rollout.max_tokens=77").algo.loss_scale_factor == 77
    assert read("algo=dr_grpo", "algo.loss_scale_factor=5").algo.loss_scale_factor == 5
    assert read("rollout.max_tokens=77").algo.loss_scale_factor is None


def test_keys_that_are_set_win_wherever_they_stand(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("algo: {clip_ratio_high: 0.5, updates_per_rollout: 2}")
    wanted = algo(preset="dapo", clip_ratio_high=0.5, updates_per_rollout=2)
    assert read("--config", str(path), "algo=dapo").algo == wanted
    path.write_text("algo: dapo")
    more = ["algo.clip_ratio_high=0.5", "algo.updates_per_rollout=2"]
    assert read("--config", str(path), *more).algo == wanted
    # A default of the section wins, too, where the preset has another value.
    assert read("algo=grpo", "algo.dynamic_sampling=true").algo.dynamic_sampling
