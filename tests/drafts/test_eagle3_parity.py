"""EAGLE-3 heads written by others draft what an independent torch implementation drafts.

golden/eagle3 has heads in both layouts, with every switch in each of its states, and what torch
drafts with them; `golden/make_eagle3.py` made it. The torch implementation is `eagle3_torch.py`.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import drive
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.draft_files import load_draft_files
from specjax.drafts.eagle3 import Eagle3Source
from specjax.models.transformer import graphdef

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "eagle3"
HEADS = (
    "plain", "pickled", "nested", "final_state", "speculators", "speculators_3_1", "two_layers",
)  # fmt: skip
LOGITS = 1e-4  # how far logits may differ


class Target(NamedTuple):
    """What a head reads of the policy."""

    embed: jax.Array
    lm_head: jax.Array

    def embed_tokens(self, tokens):
        return self.embed[jnp.clip(tokens, 0, len(self.embed) - 1)]

    def head_weight(self):
        return self.lm_head


class Drafting(Eagle3Source):
    """With the size of the vocabulary that `drive.dense` asks for."""

    @property
    def vocab(self):
        return self.cfg.target_vocab


class Loaded(NamedTuple):
    """A policy and a head for it, as they were read."""

    cfg: object
    params: dict
    source: Drafting
    head: dict


def loaded(policy: Path, head: Path) -> Loaded:
    cfg, params, _ = hf.load_checkpoint(policy, "float32")
    source, weights = load_draft_files(head, cfg)
    return Loaded(cfg, params, Drafting(source.cfg, source.layout), weights)


def proposed(found: Loaded, contexts: np.ndarray, grown: drive.Grown) -> list[np.ndarray]:
    """Logits [B R V] below the root, the last token of each context, and below a tree's rows."""

    @jax.jit
    def states(params, tokens):
        model = nnx.merge(graphdef(found.cfg), params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        ones = jnp.ones_like(tokens)
        return model.hidden(tokens, positions, ones, taps=found.source.needs.taps).tapped

    hidden = states(found.params, jnp.asarray(contexts, jnp.int32))
    lm_head = found.params.get("lm_head", found.params["embed"].T)
    target = Target(found.params["embed"], lm_head)
    head = found.source.pack(found.head)
    steps = len(grown.tokens) + 1
    state = drive.empty_state(found.source, len(contexts), contexts.shape[1] + 8, steps)
    hidden = jnp.pad(hidden, [(0, 0), (0, 8), (0, 0)])
    state = drive.place(state, found.source, head, contexts.tolist(), 4, target, hidden)
    state = drive.resume(state, found.source, head, steps, target)
    return drive.propose(found.source, head, state, grown, True, target)[0]


def best(logits: np.ndarray, count: int) -> np.ndarray:
    """[B R count] the best tokens, the best first."""
    return np.argsort(-logits, axis=-1, kind="stable")[..., :count]


@functools.cache
def golden():
    return dict(np.load(GOLDEN / "golden.npz"))


@pytest.mark.parametrize("name", HEADS)
def test_drafts_of_chains_and_trees_are_those_of_torch(name):
    chain, tree, want = (golden()[f"{name}.{what}"] for what in ("chain", "tree", "logits"))
    contexts = golden()["texts"][: len(chain), :12]
    # The three best below the root, and the chain's second below the first of them.
    grown = drive.Grown([tree[:, :3], chain[:, 1:2]], [np.tile([0], (len(chain), 3))])
    grown.parents.append(np.zeros((len(chain), 1), int))
    head = loaded(GOLDEN / "policy", GOLDEN / name)
    root, first, second = proposed(head, contexts, grown)
    found = np.stack([root[:, 0], first[:, 0], second[:, 0]], axis=1)
    drafted = np.flatnonzero(np.isfinite(found[0, 0]))
    assert len(drafted) == want.shape[-1]
    np.testing.assert_allclose(found[..., drafted], want, atol=LOGITS, rtol=1e-5)
    np.testing.assert_array_equal(found.argmax(-1), chain)
    np.testing.assert_array_equal(best(root, 3)[:, 0], tree[:, :3])
    np.testing.assert_array_equal(best(first, 2).reshape(len(chain), -1), tree[:, 3:])


# --- with torch -----------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_policy_in_torch_is_that_of_transformers(qk_norm, tmp_path):
    """Else the hidden states that heads are given would prove nothing."""
    import torch
    from eagle3_torch import Policy, PolicySizes, policy_tensors, write_policy
    from transformers import AutoModelForCausalLM

    sizes = PolicySizes(layers=3, qk_norm=qk_norm)
    tensors = policy_tensors(sizes, 1)
    write_policy(tmp_path, sizes, tensors)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    tokens = torch.arange(10)[None] * 5
    with torch.no_grad():
        theirs = model(tokens, output_hidden_states=True)
        boundaries, final = (policy := Policy(sizes, tensors)).states(tokens)
        np.testing.assert_allclose(policy.logits(tokens), theirs.logits, atol=1e-5)
    for ours, state in zip([*boundaries[:-1], final], theirs.hidden_states, strict=True):
        np.testing.assert_allclose(ours, state, atol=1e-5)
