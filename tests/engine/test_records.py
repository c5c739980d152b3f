"""What layers record of rows comes out with the tokens, and goes back into training.

The mlp is that of docs/extend.md: each row takes one of two experts, and says which.
"""

import dataclasses
import functools
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import apt, prompts_of, sharpened

from specjax import LLM, SamplingParams, SpecConfig
from specjax.config import ModelConfig
from specjax.config.model import Layer
from specjax.drafts.mtp import init_head_params
from specjax.models.mixers.attention import Attention
from specjax.models.mlps.dense import Dense
from specjax.models.transformer import graphdef, init_params, record_form
from train.loss.packing import Sample, pack

VOCAB, MAX_LEN = 64, 64
PAGE = (Path(__file__).resolve().parents[2] / "docs/extend.md").read_text(encoding="utf-8")


@functools.cache
def one_of_two():
    [text] = re.findall(r"^```python\n# my_mlp.py\n(.*?)^```$", PAGE, re.M | re.S)
    module = types.ModuleType("my_mlp")
    exec(compile(text, "my_mlp.py", "exec"), module.__dict__)
    return module.OneOfTwo()


@functools.cache
def model(scan=False):
    """Three layers, the first of which records nothing, and a head made like the last: its heads
    are of another size, and its mlp records, too."""
    attention, own = Attention(4, 2, 8, qk_norm=True), one_of_two()
    layers = Layer(attention, Dense(24)), Layer(attention, own), Layer(Attention(2, 1, 12), own)
    cfg = ModelConfig(
        vocab_size=VOCAB, hidden_size=16, layers=layers,
        tie_embeddings=False, max_position=512, mtp_num_layers=1,
    ).running(scan_layers=scan)  # fmt: skip
    params = sharpened(init_params(cfg, 3), 10.0, 0.7)
    return cfg, params, apt(sharpened(init_head_params(cfg, 4), 10.0, 0.7), cfg)


def training(cfg, params, batch, given):
    """States and records of packed rows."""
    forward = jax.jit(nnx.merge(graphdef(cfg), params).hidden)
    rows = batch["tokens"], batch["positions"], batch["segment_ids"]
    return forward(*map(jnp.asarray, rows), given=given)


@pytest.fixture(
    scope="module", params=[("2x2", True), pytest.param(("3_2_6", False), marks=pytest.mark.slow)]
)
def rollout(request):
    """Samples of a tree of drafts, many of which are rejected, and the rows that train on them."""
    strategy, scan = request.param
    cfg, params, head = model(scan)
    llm = LLM((cfg, params, head), SpecConfig(strategy), max_batch=4, max_len=MAX_LEN)
    prompts = prompts_of(4, VOCAB, seed=1, shortest=2)
    found = llm.generate(prompts, SamplingParams(seed=0, max_tokens=30, n=2, ignore_eos=True))
    pairs = [(p, s) for p, out in zip(prompts, found, strict=True) for s in out.samples]
    assert sum(s.stats.accepted for _, s in pairs) > 10
    samples = [
        Sample(i, p, s.token_ids, s.logprobs, records=s.records) for i, (p, s) in enumerate(pairs)
    ]
    [batch] = pack(samples, 400, 1)
    return cfg, params, pairs, batch


def test_records_are_those_of_the_rows_that_decided_the_tokens(rollout):
    cfg, params, pairs, batch = rollout
    chosen = np.asarray(training(cfg, params, batch, None).records)
    assert chosen.shape == (1, 400, 2) and set(np.unique(chosen)) == {0, 1}
    known = batch["records"] >= 0
    assert known.all(-1).sum() == sum(len(p) + len(s.token_ids) - 1 for p, s in pairs)
    # Of a few rows two experts are as good as each other.
    assert (chosen[known] == batch["records"][known]).mean() > 0.99
    for prompt, sample in pairs:
        assert sample.records.shape == (len(prompt) + len(sample.token_ids) - 1, 2)


def test_training_takes_the_experts_that_it_is_given_and_chooses_for_other_rows(rollout):
    cfg, params, _, batch = rollout
    own = training(cfg, params, batch, None)
    again = training(cfg, params, batch, own.records)
    np.testing.assert_allclose(again.x, own.x, atol=1e-5)
    known = batch["records"] >= 0
    others = np.where(known, 1 - np.asarray(own.records), -1)
    forced = training(cfg, params, batch, others)
    np.testing.assert_array_equal(np.asarray(forced.records)[known], others[known])
    assert np.abs(forced.x - own.x)[known.all(-1)].max() > 0.1


# --- what is refused ------------------------------------------------------------------------------


def recording(dtype=jnp.int32, repeat=1):
    """The mlp with records of another dtype, or so many of them."""

    class Other(type(one_of_two())):
        kind = f"records {jnp.dtype(dtype)} x {repeat}"

        def run(self, w, x, where, given=None):
            out, chosen, _ = super().run(w, x, where, None)
            return out, jnp.stack([chosen.astype(dtype)] * repeat, axis=-1), None

    return dataclasses.dataclass(frozen=True)(Other)()


def test_records_that_are_no_integers_are_refused_when_the_engine_is_made():
    cfg, params, _ = model()
    layers = (cfg.layers[0], dataclasses.replace(cfg.layers[1], mlp=recording(jnp.float32)))
    with pytest.raises(ValueError, match="integer records .*float32"):
        LLM((cfg.replace(layers=layers, mtp_num_layers=0), params, None), None, 2, MAX_LEN)


def test_records_of_several_shapes_are_refused_by_the_names_of_their_mlps():
    cfg, _, _ = model()
    assert (
        record_form(cfg).shape == (2,) and record_form(cfg.replace(layers=cfg.layers[:1])) is None
    )
    mlps = recording(repeat=2), recording(repeat=3)
    layers = tuple(dataclasses.replace(cfg.layers[0], mlp=mlp) for mlp in mlps)
    with pytest.raises(ValueError, match=r"and shape .*\(2,\).*\(3,\)"):
        record_form(cfg.replace(layers=layers))
