"""EAGLE-3 heads written by others draft what an independent torch implementation drafts.

golden/eagle3 has heads in both layouts, with every switch in each of its states, and what torch
drafts with them; `golden/make_eagle3.py` made it, with the torch implementation in
`eagle3_torch.py`.
"""

import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple

import drive
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle3_files import Body, Eagle3
from flax import nnx
from tiers import slow_but

from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.draft_files import load_draft_files
from specjax.drafts.eagle3 import Eagle3Source
from specjax.models.transformer import graphdef

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "eagle3"
HEADS = (
    "plain", "pickled", "nested", "final_state", "speculators", "speculators_3_1", "two_layers",
)  # fmt: skip
CHAIN, TREE = "3_1_4", "3x2"
LOGITS = 1e-4  # how far logits may differ


class Loaded(NamedTuple):
    """A policy and a head for it, as they were read."""

    cfg: object
    params: dict
    source: Eagle3Source
    head: dict


def loaded(policy: Path, head: Path) -> Loaded:
    cfg, params, _ = hf.load_checkpoint(policy, "float32")
    source, weights = load_draft_files(head, cfg)
    return Loaded(cfg, params, source, weights)


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
    target = drive.Target(found.params["embed"], lm_head)
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


def golden_logits(name: str, head: Loaded) -> tuple[list[np.ndarray], np.ndarray]:
    """What a head makes of the golden texts: logits of each level, and how far the golden chain's
    are from those of torch."""
    chain, tree, want = (golden()[f"{name}.{what}"] for what in ("chain", "tree", "logits"))
    # The three best below the root, and the chain's second below the first of them.
    grown = drive.Grown([tree[:, :3], chain[:, 1:2]], [np.tile([0], (len(chain), 3))])
    grown.parents.append(np.zeros((len(chain), 1), int))
    levels = proposed(head, golden()["texts"][: len(chain), :12], grown)
    found = np.stack([level[:, 0] for level in levels], axis=1)
    drafted = np.flatnonzero(np.isfinite(found[0, 0]))
    assert len(drafted) == want.shape[-1]
    return levels, found[..., drafted] - want


@pytest.mark.parametrize("name", slow_but(HEADS, "nested", "speculators_3_1", "two_layers"))
def test_drafts_of_chains_and_trees_are_those_of_torch(name):
    chain, tree = golden()[f"{name}.chain"], golden()[f"{name}.tree"]
    levels, off = golden_logits(name, loaded(GOLDEN / "policy", GOLDEN / name))
    assert np.abs(off).max() < 2 * LOGITS
    root, first, _ = levels
    for depth, level in enumerate(levels):
        np.testing.assert_array_equal(level[:, 0].argmax(-1), chain[:, depth])
    np.testing.assert_array_equal(best(root, 3)[:, 0], tree[:, :3])
    np.testing.assert_array_equal(best(first, 2).reshape(len(chain), -1), tree[:, 3:])


# A switch, a golden head, and the wrong value.
WRONG = {
    "taps": ("speculators_3_1", {"taps": (2, 5, 8)}),
    "norm_before_residual": ("speculators_3_1", {"norm_before_residual": True}),
    "fc_norm": ("speculators_3_1", {"fc_norm": "none"}),
    "norm_output": ("speculators_3_1", {"norm_output": False}),
}


@pytest.mark.parametrize("switch", WRONG)
def test_a_switch_that_is_wrong_gives_other_logits_than_those_of_torch(switch):
    """Else the test above would not see it."""
    name, wrong = WRONG[switch]
    head = loaded(GOLDEN / "policy", GOLDEN / name)
    source = dataclasses.replace(head.source, cfg=dataclasses.replace(head.source.cfg, **wrong))
    kept = {part: head.head[part] for part in source.rows()}  # those that it would have
    _, off = golden_logits(name, head._replace(source=source, head=kept))
    assert np.abs(off).max() > 100 * LOGITS


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param("nested", CHAIN, marks=pytest.mark.slow),
        pytest.param("two_layers", CHAIN, marks=pytest.mark.slow),
        ("speculators_3_1", TREE),
        pytest.param("final_state", CHAIN, marks=pytest.mark.slow),
    ],
)
def test_the_accept_length_is_that_of_torch_and_tokens_are_the_policys(name, strategy):
    llm = LLM(
        GOLDEN / "policy",
        SpecConfig(strategy, draft=GOLDEN / name),
        max_batch=16,
        max_len=64,
        scan_layers=True,
    )
    prompts, texts = golden()["prompts"], golden()["texts"]
    rounds = golden()[f"{name}.{'chain' if strategy == CHAIN else 'tree'}_rounds"]
    count = texts.shape[1] - prompts.shape[1]
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    samples = [out.samples[0] for out in llm.generate(prompts.tolist(), params)]
    assert [s.token_ids for s in samples] == texts[:, prompts.shape[1] :].tolist()
    taken = sum(s.stats.rounds for s in samples)
    assert rounds.sum() < 0.95 * len(prompts) * count, "too little is accepted to see a difference"
    assert taken == pytest.approx(rounds.sum(), rel=0.02)


def test_a_head_of_gpt_oss_as_nvidia_publishes_it_drafts_and_changes_no_token(tmp_path, edit_json):
    head = Eagle3(boundaries=(1, 2, 3), width=32, theta=150_000.0)
    path = head.write(tmp_path / "head", Body(width=32, layers=3, vocab=64), "safeailab")
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}
    edit_json(path / "config.json", eagle_config=nested, eagle_aux_hidden_state_layer_ids=...)
    spec = SpecConfig("2_1_3", draft=path)
    llm = LLM(GOLDEN.parent / "gpt_oss", spec, max_batch=1, max_len=64, dtype="float32")
    assert llm.source.cfg.taps == (1, 2, 3)  # 3 is the output of the last layer
    prompts = np.load(GOLDEN.parent / "gpt_oss" / "golden.npz")["tokens"].tolist()
    params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    drafted, plain = (
        llm.generate(prompts, dataclasses.replace(params, speculative=speculative))
        for speculative in (True, False)
    )
    for one, other in zip(drafted, plain, strict=True):
        assert one.samples[0].token_ids == other.samples[0].token_ids
        assert one.samples[0].stats.drafted_rounds


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
