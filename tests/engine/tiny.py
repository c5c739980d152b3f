"""Tiny random models whose next token really depends on the context."""

import jax
import numpy as np

from specjax.config import ModelConfig
from specjax.drafts.mtp import init_head_params
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params


def tiny_config(vocab=64, mtp=1, layers=1, tied=False, **changes) -> ModelConfig:
    """One layer: decoding unrolls them, and compiles twice as much for two (`test_identity`)."""
    return dense_config(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=24,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=512,
        mtp_num_layers=mtp,
        tie_embeddings=tied,
        **changes,
    )


def sharpened(params, factor, embed_std):
    """Matrices scaled up: as initialised, every logit is nearly 0 and attention nearly uniform.

    By numpy, which compiles nothing.
    """

    def scale(path, x):
        name = path[-1].key
        if "norm" in name:
            return x
        by = embed_std / 0.02 if name in ("embed", "lm_head") else factor
        return jax.device_put(np.asarray(x) * np.asarray(by, x.dtype))

    return jax.tree_util.tree_map_with_path(scale, params)


def tiny_model(cfg: ModelConfig, seed=0, factor=10.0, embed_std=0.7):
    """(cfg, params, head) as `LLM` takes them; logits have a standard deviation of about 3."""
    params = sharpened(init_params(cfg, seed), factor, embed_std)
    head = sharpened(init_head_params(cfg, seed + 1), factor, embed_std)
    return cfg, params, head


def apt(head, cfg: ModelConfig, share=0.3):
    """A head that mostly passes on the last token's embedding, which is a fair guess of the state.

    Random heads are rejected nearly always; paths deep into the tree are walked with this one.
    """
    width = cfg.hidden_size
    keep_embedding = np.concatenate([np.eye(width), np.zeros((width, width))])

    def scaled(by, x):
        return np.asarray(x) * np.asarray(by, x.dtype)

    def soften(module):
        layer = {k: v if "norm" in k else scaled(share, v) for k, v in module["layer"].items()}
        proj = module["proj"]
        proj = keep_embedding.astype(proj.dtype) + scaled(0.02, proj)
        return jax.device_put(dict(module, layer=layer, proj=proj))

    return {"blocks": {i: soften(module) for i, module in head["blocks"].items()}}


def prompts_of(count, vocab, seed=0, shortest=1, longest=12) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, count)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]
