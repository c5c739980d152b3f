"""The program says so when speculation or draft training does nothing."""

import re

import jax
import pytest
import tiny_run

from specjax.checkpoint import huggingface as hf
from train import rl


@pytest.mark.slow
def test_the_alarms_are_printed_by_the_program(thin_policy, tmp_path, capsys):
    model, params, head = hf.load_checkpoint(thin_policy, "float32")
    # A head that is sure of the wrong tokens, and a learning rate that leaves it so.
    wrong = jax.tree_util.tree_map_with_path(
        lambda path, a: -50 * a if path[-1].key == "norm" else a, head
    )
    hf.save_checkpoint(tmp_path / "wrong", model, params, wrong, tokenizer_dir=thin_policy)
    changes = {"steps": 4, "draft.optim.lr": 0, "checkpoint.export": "false"}
    rl.main(tiny_run.arguments(tmp_path / "wrong", tmp_path / "run", **changes))
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match(r"rollouts: compiled \d+ programs in .* s .*temporaries", x) for x in lines)
    once = ["Speculative decoding enabled: True", "Using strategy: 1_1_2", "attention kernel: "]
    for begin in (*once, "rollouts: compiling "):
        assert sum(x.startswith(begin) for x in lines) == 1, begin
    steps = [x for x in lines if x.startswith("step ")]
    assert steps and all("strategy 1_1_2  accept length 1.0" in x for x in steps[1:])
    lines = [x for x in lines if x.startswith("WARNING")]
    # Once, at the third step in a row.
    flat = [x for x in lines if "speculation only costs time" in x]
    assert len(flat) == 1 and flat[0].startswith("WARNING: step 3: accept length has been 1.0")
