"""Tiny models with recurrent state, and plain decoding to compare them with."""

import functools
import re
import types
from pathlib import Path

import engines
import jax
import numpy as np
from shared import EOS
from tiny import apt, prompts_of, sharpened

from specjax import SamplingParams
from specjax.config import ModelConfig
from specjax.config.model import Layer
from specjax.drafts.mtp import init_head_params
from specjax.engine.engine import Engine
from specjax.engine.request import make_jobs
from specjax.models.mixers.attention import Attention
from specjax.models.mixers.gated_delta import GatedDelta
from specjax.models.mlps.dense import Dense
from specjax.models.rope import Rope
from specjax.models.transformer import init_params

VOCAB = engines.VOCAB
PAGE_TEXT = Path(__file__).resolve().parents[2] / "docs/extend.md"


def of_page(name: str) -> types.ModuleType:
    """An example of the page, as it stands there."""
    block = rf"^```python\n# {name}.py\n(.*?)^```$"
    [text] = re.findall(block, PAGE_TEXT.read_text(), re.M | re.S)
    module = types.ModuleType(name)
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module


LEAKY = of_page("my_mixer").LeakySum(16)


def toy(repeats=1, **run) -> ModelConfig:
    """The leaky sum of docs/extend.md, beside attention."""
    attention = Attention(4, 2, 8, qk_norm=True, window=4)
    return _config([Layer(LEAKY, Dense(24)), Layer(attention, Dense(24))] * repeats, **run)


def hybrid(repeats=1, **run) -> ModelConfig:
    """As Qwen3.5: Gated DeltaNet, and gated attention that rotates a quarter of its heads."""
    attention = Attention(4, 2, 8, Rope(share=0.25), qk_norm=True, norm_offset=True, gate=True)
    mixers = GatedDelta(2, 4, 8, 8), attention
    layers = [Layer(mixer, Dense(24), norm_offset=True) for mixer in mixers]
    return _config(layers * repeats, norm_offset=True, **run)


def _config(layers, norm_offset=False, **run) -> ModelConfig:
    cfg = ModelConfig(
        vocab_size=VOCAB, hidden_size=16, layers=tuple(layers), tie_embeddings=False,
        norm_offset=norm_offset, max_position=512, mtp_num_layers=1, eos_token_ids=(EOS,),
    )  # fmt: skip
    return cfg.running(**run)


# Of the value heads of `hybrid`: one keeps nearly all of its state, one half of it at each token,
# one nothing (g = -100 and less) at some tokens and all at others, and one a little.
DECAYS = {
    "A_log": np.log([0.05, 1.0, 60.0, 1.0]),
    "dt_bias": np.array([0.0, 0.0, -3.0, 2.0]),
}


@functools.cache
def weights(cfg: ModelConfig):
    """Parameters of the policy and of a head that is accepted now and then."""
    params = init_params(cfg, 3)

    def decaying(path, sharp, x):
        name = path[-1].key
        if name == "delta_a":
            return sharp * np.float32([1, 1, 6, 1])
        if name in DECAYS:
            return np.broadcast_to(DECAYS[name], x.shape).astype(x.dtype)
        return x if name.startswith("conv_") else sharp

    sharp = sharpened(params, 10.0, 0.7)
    params = jax.device_put(jax.tree_util.tree_map_with_path(decaying, sharp, params))
    return params, apt(sharpened(init_head_params(cfg, 4), 10.0, 0.7), cfg)


def engine_of(cfg, spec, batch, control=None, **config) -> Engine:
    policy, head = weights(cfg)
    params = policy, {} if spec and spec.draft == "ngram" else head
    return engines.engine_of(spec, batch, control, cfg=cfg, params=params, **config)


@functools.cache
def plain(cfg: ModelConfig) -> Engine:
    """One slot: one sample after the other, each prompt read at once."""
    return engine_of(cfg, None, 1)


def jobs_of(count=6, n=2, max_tokens=50):
    prompts = [[5], *prompts_of(count - 1, VOCAB, seed=1, shortest=2, longest=40)]
    jobs = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=(1.0, 0.0, 0.7)[i % 3], max_tokens=max_tokens, ignore_eos=True, n=n, seed=i
        )
        jobs += make_jobs(prompt, params, (), None)
    return jobs


def tokens(engine, jobs):
    return [sample.token_ids for sample in engine.generate(jobs)[0]]
