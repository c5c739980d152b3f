"""Tokens are trained on, and scored, with the experts that were chosen when they were sampled.

The mlp is that of docs/extend.md: each row takes one of two experts, and says which. The policy is
a checkpoint of a family of its own.
"""

import re
import types
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import tiny_run

from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.weights import read_config
from specjax.command_line import parse_config
from specjax.config.model import Layer, ModelConfig
from specjax.interfaces import Stored
from specjax.models.families import FAMILIES, add_family
from specjax.models.families.dense import DenseFamily
from specjax.models.mixers.attention import Attention
from specjax.models.mlps.dense import Dense
from specjax.models.transformer import init_params, record_form
from train import rl
from train.loss.packing import Sample, pack
from train.loss.policy import PolicyTrainer
from train.loss.terms import sft_loss
from train.plan.programs import Shapes
from train.rollout.advantages import score_new_tokens
from train.rollout.groups import Group, Response
from train.schema import RLConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs/extend.md").read_text(encoding="utf-8")
[TEXT] = re.findall(r"^```python\n# my_mlp.py\n(.*?)^```$", PAGE, re.M | re.S)
PAGES_MLP = types.ModuleType("my_mlp")
exec(compile(TEXT, "my_mlp.py", "exec"), PAGES_MLP.__dict__)
OneOfTwo = PAGES_MLP.OneOfTwo


class ExpertFamily(DenseFamily):
    def read(self, keys):
        cfg = super().read(keys)
        return cfg.replace(layers=tuple(Layer(x.mixer, OneOfTwo()) for x in cfg.layers))

    def stored(self, cfg, layer):
        names = () if layer is None else layer.mlp.params(cfg.hidden_size)
        return {**super().stored(cfg, layer), **{n: Stored(f"mlp.{n}.weight") for n in names}}

    def write(self, cfg):
        return super().write(
            cfg.replace(layers=tuple(Layer(x.mixer, Dense(32)) for x in cfg.layers))
        )


FAMILY = ExpertFamily("experts", "ExpertsForCausalLM", qkv_bias=False, qk_norm=True)


def test_carried_tokens_are_scored_with_the_experts_that_sampled_them():
    mixer = Attention(4, 2, 8, qk_norm=True)
    cfg = ModelConfig(
        vocab_size=64, hidden_size=16, layers=(Layer(mixer, OneOfTwo()),) * 2, tie_embeddings=False
    )
    params = tiny_run._sharpened(init_params(cfg, 3))
    policy = PolicyTrainer(cfg, sft_loss, optax.sgd(0.0))

    def logprobs(batch):
        return np.asarray(policy.logprobs(params, policy.place(batch)))

    rng, responses = np.random.default_rng(0), []
    for given in (0, 3):
        tokens, records = rng.integers(0, 64, 9).tolist(), rng.integers(0, 2, (11, 2))
        response = Response(tokens, [-1.0] * 9, given, [-1.0] * given, finish_reason="stop")
        response.records = records.astype(np.int32)
        responses.append(response)
    group = Group(0, 1, 1, None, [5, 6, 7], responses)
    score_new_tokens([group], logprobs, row_length=32, rows=1)
    for response in responses:
        sample = Sample(0, group.prompt, response.token_ids, records=response.records)
        [batch] = pack([sample], 32, 1)
        trained, inside = logprobs(batch), batch["loss_mask"] > 0
        np.testing.assert_allclose(
            response.old_logprobs[response.num_carried :],
            trained[inside][response.num_carried :],
            atol=1e-5,
        )
        batch["records"] = 1 - batch["records"]
        others = logprobs(batch)[inside]
        assert np.abs(others - trained[inside]).max() > 0.1, "the experts make a difference"


@pytest.fixture
def policy(thin_policy, tmp_path):
    """A directory with the tokenizer of the tiny policy, and experts in its layers."""
    known = dict(FAMILIES.rows)
    add_family("test_record_replay:FAMILY")
    dense = read_config(thin_policy)
    layers = tuple(Layer(layer.mixer, OneOfTwo()) for layer in dense.layers)
    cfg = dense.replace(layers=layers, model_type="experts", mtp_num_layers=0)
    params = tiny_run._sharpened(init_params(cfg, 0))
    hf.save_checkpoint(tmp_path / "policy", cfg, params, tokenizer_dir=thin_policy)
    yield tmp_path / "policy"
    FAMILIES.rows.clear()
    FAMILIES.rows.update(known)


@pytest.mark.slow
def test_the_programs_of_a_run_are_the_warmed_and_the_planned_ones(policy, tmp_path):
    """With partial rollouts, which score what is carried before the update."""
    changes = {
        "family": "test_record_replay:FAMILY",
        "rollout.strategy": "off",
        "rollout.partial": "true",
        "rollout.over_sample": 2,
        "rollout.prompts": 2,
        "rollout.n": 2,
        "rollout.chunk_tokens": 4,
        "algo.dynamic_sampling": "false",
        "packing.rows": 1,
        "seed": 14,
    }
    cfg, _ = parse_config(RLConfig, tiny_run.arguments(policy, tmp_path / "run", **changes))
    trainer = rl.Trainer(cfg)
    assert record_form(trainer.model).shape == (trainer.model.num_layers,)
    ran, accumulate = [], trainer.policy._accumulate

    def watched(params, gradients, batch, counts):
        ran.append({name: (x.shape, x.dtype) for name, x in batch.items()})
        return accumulate(params, gradients, batch, counts)

    trainer.policy._accumulate = watched
    trainer.warm_up()
    score = trainer.policy.programs["score"]
    assert score._cache_size() == 1
    carried = 0
    for _ in range(3):
        metrics = trainer.step()
        carried += metrics["rollout/groups_carried"]
        assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert carried > 0 and score._cache_size() == 1 == accumulate._cache_size()
    planned = Shapes(cfg, jax.devices()[:1]).batch()
    assert {name: (x.shape, x.dtype) for name, x in planned.items()} == ran[0]
