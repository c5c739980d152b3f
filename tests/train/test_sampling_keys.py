"""`rollout.top_p` and its like in `train.rl`: what is sampled, and what is learned from it."""

import jax
import numpy as np
import pytest
import tiny_run

from specjax import LLM
from specjax.command_line import parse_config
from train import rl
from train.loss.packing import Sample, pack
from train.rollout.draws import group_params
from train.rollout.groups import token_versions
from train.schema import RLConfig

pytestmark = pytest.mark.usefixtures("shared_programs")

SAMPLING = {
    "rollout.temperature": 1.2,
    "rollout.top_p": 0.8,
    "rollout.repetition_penalty": 1.3,
    "rollout.presence_penalty": 0.5,
    "rollout.logit_bias": '{"7": 2.0}',
    "rollout.min_tokens": 3,
}
# Over two updates, against a reference, with tokens that older weights sampled.
LEARNING = {
    "algo.logprobs": "processed",
    "algo.updates_per_rollout": 2,
    "algo.kl_loss_coef": 0.1,
    "algo.tis": "true",
    "rollout.over_sample": 2,
    "rollout.partial": "true",
    "rollout.prompts": 2,
    "rollout.n": 2,
    "rollout.chunk_tokens": 4,
    "seed": 11,
    "rollout.telemetry": "true",
    "algo.dynamic_sampling": "false",
}
DRAFTS = {"draft.mode": "frozen"}


def make(model, out, /, **changes):
    return rl.Trainer(parse_config(RLConfig, tiny_run.arguments(model, out, **changes))[0])


@pytest.fixture(scope="module")
def processed(thin_policy, tmp_path_factory):
    """(trainer, metrics of its steps, what they sampled, weights that did)."""
    out = tmp_path_factory.mktemp("processed")
    trainer = make(thin_policy, out, **SAMPLING, **LEARNING, **DRAFTS)
    steps, rollouts, weights = [], [], {}
    for step in range(1, 5):
        weights[step] = jax.tree.map(np.asarray, trainer.params)
        steps.append(trainer.step())
        rollouts.append(trainer.last_rollout)
    return trainer, steps, rollouts, weights


@pytest.mark.slow
def test_a_rollout_samples_what_plain_decoding_does_with_the_same_parameters(
    processed, thin_policy
):
    trainer, _, rollouts, _ = processed
    llm = LLM(thin_policy, spec=None, max_batch=4, max_len=32)
    taken = 0
    for group in rollouts[0]:
        params = group_params(trainer.cfg, 1, group.position)
        assert params.top_p == 0.8 and params.logit_bias == ((7, 2.0),)
        again = llm.generate([group.prompt], params)[0].samples
        for mine, theirs in zip(group.responses, again, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert len(mine.token_ids) >= 3
            np.testing.assert_allclose(
                mine.transformed_logprobs, theirs.transformed_logprobs, atol=1e-4
            )
            taken += 1
    assert taken >= 4


def test_ratio_tis_and_metrics_are_of_the_distribution_that_was_sampled(processed):
    trainer, steps, rollouts, weights = processed
    assert steps[0]["rollout/stale_token_share"] == 0
    assert any(s["rollout/stale_token_share"] > 0 for s in steps)
    for step, rollout in zip(steps, rollouts, strict=True):
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert step["train/tis"] == pytest.approx(1, abs=1e-4)
        assert step["train/ratio"] == pytest.approx(1, abs=0.5) and step["train/ratio"] != 1
        every = np.concatenate([s.behaviour_logprobs for g in rollout for s in g.responses])
        scaled = np.concatenate([s.logprobs for g in rollout for s in g.responses])
        assert step["rollout/logprob_mean"] == pytest.approx(every.mean(), rel=1e-5)
        assert abs(every - scaled).max() > 0.1, "the transforms do something"
    assert steps[1]["train/kl"] > 0
    mixed = 0
    for rollout in rollouts:
        for group in rollout:
            for sample in group.responses:
                old = sample.old_logprobs
                versions = token_versions(sample.weight_versions, len(sample.token_ids))
                batch = pack([Sample(0, group.prompt, sample.token_ids)], 64, 2)[0]
                for version in set(versions.tolist()):
                    scored = trainer.policy.logprobs(weights[version], trainer.policy.place(batch))
                    scored = np.asarray(scored)[batch["loss_mask"] > 0]
                    mine = versions == version
                    engine = np.array(sample.behaviour_logprobs)
                    np.testing.assert_allclose(engine[mine], scored[mine], atol=1e-4)
                    stale = np.flatnonzero(mine[: len(old)])
                    np.testing.assert_allclose(np.array(old)[stale], scored[stale], atol=1e-5)
                mixed += len(set(versions.tolist())) > 1
    assert mixed > 0


def test_stop_strings_end_responses_which_are_trained_on_as_they_were_sampled(
    thin_policy, tmp_path
):
    free = make(thin_policy, tmp_path, **DRAFTS, **{"algo.dynamic_sampling": "false"})
    free.step()
    texts = [s.text for g in free.last_rollout for s in g.responses]
    stop = max({c for t in texts for c in t[1:] if c.isdigit()}, key="".join(texts).count)
    seen = []
    stopping = make(
        thin_policy, tmp_path, **DRAFTS,
        **{"algo.dynamic_sampling": "false", "rollout.stop": f"['{stop}']"},
    )  # fmt: skip
    update = stopping.policy.update

    def watched(params, opt_state, batches, *more):
        seen.extend(int(np.asarray(b["loss_mask"]).sum()) for b in batches)
        return update(params, opt_state, batches, *more)

    stopping.policy.update = watched
    stopping.step()
    cut = 0
    for free_group, group in zip(free.last_rollout, stopping.last_rollout, strict=True):
        for long, short in zip(free_group.responses, group.responses, strict=True):
            assert long.token_ids[: len(short.token_ids)] == short.token_ids
            assert stop not in short.text
            if stop in long.text:
                assert short.text == long.text[: long.text.index(stop)]
                assert short.finish_reason == "stop" and stop in free.tokenizer.decode(
                    short.token_ids[-1:]
                )
                cut += len(long.token_ids) > len(short.token_ids)
            else:
                assert (short.token_ids, short.text) == (long.token_ids, long.text)
    assert cut > 0
    assert sum(seen) == sum(len(s.token_ids) for g in stopping.last_rollout for s in g.responses)
    stopping.policy.update = update
