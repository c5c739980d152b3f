"""Families whose layers are not Llama's are trained, and drafted for."""

import jax
import numpy as np
import pytest
import tiny_run
from test_draft_run import arguments

from specjax import LLM, SamplingParams, SpecConfig
from specjax.command_line import parse_config
from train import draft, rl
from train.run.files import read_metrics
from train.schema import RLConfig

GEMMA2 = {
    "model_type": "gemma2", "sliding_window": 6, "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 4.0, "final_logit_softcapping": 9.0,
}  # fmt: skip
GEMMA3 = {"model_type": "gemma3_text", "sliding_window": 6, "query_pre_attn_scalar": 24}


@pytest.mark.usefixtures("shared_programs")
def test_speculation_changes_no_bit_of_gemma2_and_rollouts_have_the_trainers_log_probabilities(
    tmp_path,
):
    policy, found = tiny_run.write_policy(tmp_path / "policy", raw=GEMMA2), []
    for mode in ("none", "online"):
        argv = tiny_run.arguments(policy, tmp_path / mode, **{"draft.mode": mode})
        trainer = rl.Trainer(parse_config(RLConfig, argv)[0])
        found.append((trainer, [trainer.step() for _ in range(2)]))
    (plain, plain_steps), (drafted, steps) = found
    for a, b in zip(plain_steps, steps, strict=True):
        assert a["rollout/tokens_sha"] == b["rollout/tokens_sha"]
        assert a["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert b["rollout/spec_accept_length"] > 1
    jax.tree.map(np.testing.assert_array_equal, plain.params, drafted.params)
    jax.tree.map(np.testing.assert_array_equal, plain.opt_state, drafted.opt_state)


def test_an_eagle3_head_is_trained_for_gemma3_and_drafts_for_it(tmp_path):
    policy = tiny_run.write_policy(tmp_path / "policy", with_head=False, raw=GEMMA3)
    draft.main(arguments(policy, tmp_path / "run", kind="eagle3", epochs=8, eval__problems=2))
    losses = [m["train/mtp_loss"] for m in read_metrics(tmp_path / "run") if "train/mtp_loss" in m]
    assert losses[-1] < 0.8 * losses[0]
    spec = SpecConfig("2_1_3", draft=str(tmp_path / "run" / "head"))
    llm = LLM(policy, spec, max_batch=1, max_len=60)
    drafted, plain = (
        llm.generate(
            [5, 9, 4],
            SamplingParams(max_tokens=30, seed=1, ignore_eos=True, speculative=speculative),
        )[0].samples[0]
        for speculative in (True, False)
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.accepted > 0
