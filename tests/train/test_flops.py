"""Operations of an update: against a count by hand, XLA's own, and on devices of known peaks."""

import types

import pytest

from specjax.models.families.dense import dense_config
from train.loss.flops import UpdateSpeed

SIZES = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mtp_num_layers": 1}
CFG = dense_config(256, 64, 160, **SIZES)


def device(kind="cpu"):
    return types.SimpleNamespace(device_kind=kind)


def counted(cfg, lengths) -> int:
    return UpdateSpeed(cfg, [device()]).update(lengths)


def test_an_update_is_three_times_what_a_count_by_hand_finds_for_the_forward_pass():
    per_token = 64 * (4 * 16) + 2 * 64 * (2 * 16) + (4 * 16) * 64  # q, k and v, o
    per_token += 3 * 64 * 160 + 64 * 256  # gate, up, down; language-model head
    pairs = (5 * 6 + 3 * 4) // 2
    forward = 2 * per_token * (5 + 3) + 4 * 4 * 16 * pairs
    assert counted(CFG, [5, 3]) == 3 * forward
    tied = dense_config(256, 64, 160, tie_embeddings=True, **SIZES)
    assert counted(tied, [5, 3]) == 3 * forward, "the product is the same"
    twice = dense_config(256, 64, 160, **SIZES | {"num_layers": 2})
    per_layer = forward - 2 * 64 * 256 * 8
    assert counted(twice, [5, 3]) == 3 * (forward + per_layer)


def test_the_share_is_of_the_peak_of_all_devices_together():
    speed = UpdateSpeed(CFG, [device("NVIDIA H100 80GB HBM3")] * 4)
    found = speed.metrics([100, 50], 0.5)
    rate = counted(CFG, [100, 50]) / 0.5 / 4
    assert found == {
        "perf/tflops/actor": pytest.approx(rate / 1e12),
        "perf/mfu/actor": pytest.approx(rate / 989e12),
    }
    assert speed.notes == []
