"""A draft of one's own is trained on the states that it asks for, by the trainer of the head."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from specjax.command_line import parse_config
from specjax.config import ModelConfig
from specjax.interfaces import Draft, DraftNeeds
from specjax.models.families.dense import dense_config
from specjax.models.transformer import embed_tokens, init_params
from train.heads.training import DraftConfig, DraftTrainer, inner_taps
from train.loss.optim import OptimConfig
from train.loss.packing import Sample, pack
from train.loss.policy import PolicyTrainer
from train.loss.terms import sft_loss
from train.programs import build_programs
from train.schema import RLConfig

CFG = dense_config(32, 16, 24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8)


@dataclasses.dataclass(frozen=True)
class TwoTaps(Draft):
    """One matrix over the states after the first layer, those after the norm, and the token."""

    cfg: ModelConfig

    needs = DraftNeeds(taps=("post_norm", 1))

    def axes(self):
        return {"mix": (None, None)}

    def init(self, seed):
        width = self.cfg.hidden_size
        return {"mix": 0.1 * jax.random.normal(jax.random.key(seed), (3 * width, width))}

    def unroll(self, params, policy, states, tokens, positions, segments, context=None):
        embedded = [embed_tokens(policy["embed"], ids, self.cfg) for ids in tokens]
        rows = [jnp.concatenate([states, e], axis=-1) for e in embedded]
        return [x @ params["mix"] for x in rows]


@pytest.fixture(scope="module")
def setting():
    """(source, its trainer, policy, batches, states)."""
    source, params = TwoTaps(CFG), init_params(CFG, 0)
    # The embedding is also the language-model head: it must tell tokens apart.
    params["embed"] = 30 * params["embed"]
    optim = OptimConfig(lr=3e-2, warmup_steps=0)
    policy = PolicyTrainer(CFG, sft_loss, optim.build(()), taps=inner_taps(source))
    samples = [Sample(i, [i], [(i + 3 * j) % 32 for j in range(1, 15)]) for i in range(6)]
    batches = [policy.place(batch) for batch in pack(samples, 32, 2)]
    states = [policy.states(params, batch) for batch in batches]
    trainer = DraftTrainer(CFG, DraftConfig(unroll_steps=2, optim=optim), source=source)
    return source, trainer, params, batches, states


def test_an_own_draft_learns_and_the_policy_stays(setting):
    source, trainer, params, batches, states = setting
    before = jax.tree.map(np.array, params)
    weights, losses = source.init(0), []
    opt = trainer.init_opt_state(weights)
    for _ in range(12):
        weights, opt, sums = trainer.update(weights, opt, params, batches, states)
        losses.append(sums["mtp_loss_sum"] / sums["mtp_tokens"])
    assert sums["draft_update_norm"] > 0 and losses[-1].shape == (2,)
    assert (losses[-1] < 0.7 * losses[0]).all()
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_the_programs_of_a_run_collect_what_its_draft_is_trained_on(thin_policy):
    cfg = parse_config(RLConfig, tiny_run.arguments(thin_policy, "unused"))[0]
    cfg.draft.mode = "online"
    built = build_programs(cfg, CFG, TwoTaps(CFG), None, [None])
    assert built.policy.taps == (1,) and built.draft.source == TwoTaps(CFG)
    shape = built.policy.states_shape(2, 8).shape
    assert shape == (2, 8, 2 * CFG.hidden_size)
    cfg.draft.mode = "frozen"
    built = build_programs(cfg, CFG, TwoTaps(CFG), None, [None])
    assert built.policy.taps == () and built.draft is None
