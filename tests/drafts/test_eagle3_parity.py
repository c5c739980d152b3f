"""EAGLE-3 heads written by others draft what an independent torch implementation drafts.

golden/eagle3 has heads in both layouts, with every switch in each of its states, and what torch
drafts with them; `golden/make_eagle3.py` made it. Tests marked `torch` compare with torch itself,
on heads whose switches are drawn at random. The torch implementation is `eagle3_torch.py`.
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
from eagle3_files import LAYOUTS, Eagle3
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


# A switch, a golden head, and the wrong value.
WRONG = {
    "taps": ("speculators_3_1", {"taps": (2, 5, 8)}),
    "norm_before_residual": ("speculators_3_1", {"norm_before_residual": True}),
    "fc_norm": ("speculators_3_1", {"fc_norm": "none"}),
    "norm_output": ("speculators_3_1", {"norm_output": False}),
    "backbone": ("nested", {"backbone": "llama"}),
}
BOUNDARIES = (1, 2, 4, 5, 7, 8)  # that the heads above take, rightly or wrongly


@functools.cache
def boundary_states() -> tuple[dict, dict[int, jax.Array]]:
    """The golden policy's parameters, and its states [B S D] before the last token of contexts."""
    cfg, params, _ = hf.load_checkpoint(GOLDEN / "policy", "float32")
    tokens = jnp.asarray(golden()["texts"][:4, :11], jnp.int32)

    @jax.jit
    def states(params):
        model = nnx.merge(graphdef(cfg), params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return model.hidden(tokens, positions, jnp.ones_like(tokens), taps=BOUNDARIES).tapped

    parts = jnp.split(states(params), len(BOUNDARIES), axis=-1)
    return params, dict(zip(BOUNDARIES, parts, strict=True))


def named_by(rows: dict, arrays: dict) -> dict:
    """The arrays that a head of these rows has: of a Llama layer none that norms queries."""
    return {
        name: named_by(rows[name], array) if isinstance(array, dict) else array
        for name, array in arrays.items()
        if name in rows
    }


def set_to(source: Eagle3Source, backbone=None, **switches) -> Eagle3Source:
    """The head with other switches, for the weights that it has."""
    network = source.cfg.network
    if backbone is not None:
        layer = network.layers[0]
        mixer = dataclasses.replace(layer.mixer, qk_norm=backbone == "qwen3")
        layers = (dataclasses.replace(layer, mixer=mixer), *network.layers[1:])
        network = network.replace(layers=layers, model_type=backbone)
    cfg = dataclasses.replace(source.cfg, network=network, **switches)
    return dataclasses.replace(source, cfg=cfg)


@functools.partial(jax.jit, static_argnums=0)
def chain_logits(source, head, policy, states, tokens):
    """Logits [B K C] at the last row of each step, by the network's forward over whole rows."""
    positions = jnp.broadcast_to(jnp.arange(states.shape[1]), states.shape[:2])
    rows = source.unroll(head, policy, states, tokens, positions, jnp.ones_like(positions))
    normed = jnp.stack([x[:, -1] for x in rows], axis=1)
    return source.own_proposal(None, head, normed).scores


def logits_of(name: str, **switches) -> np.ndarray:
    """Logits of a golden head on the golden chain, with some switches set by hand."""
    policy, states = boundary_states()
    source, head = load_draft_files(GOLDEN / name, hf.read_config(GOLDEN / "policy"))
    source, chain = set_to(source, **switches), golden()[f"{name}.chain"]
    known = np.concatenate([golden()["texts"][:4, :12], chain], axis=1)
    tokens = [known[:, 1 + step : 12 + step] for step in range(chain.shape[1])]
    given = jnp.concatenate([states[tap] for tap in source.cfg.taps], axis=-1)
    parts = {"embed": policy["embed"]}
    head = named_by(source.rows(), head)
    return np.asarray(chain_logits(source, head, parts, given, tokens))


@pytest.mark.parametrize("switch", WRONG)
def test_a_switch_that_is_wrong_gives_other_logits_than_those_of_torch(switch):
    """Else the tests above would not see it."""
    name, wrong = WRONG[switch]
    want = golden()[f"{name}.logits"]
    np.testing.assert_allclose(logits_of(name), want, atol=LOGITS, rtol=1e-5)
    assert np.abs(logits_of(name, **wrong) - want).max() > 100 * LOGITS


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, CHAIN) for name in HEADS),
        ("speculators_3_1", TREE),
        *(
            pytest.param(name, TREE, marks=pytest.mark.slow)
            for name in HEADS
            if name != "speculators_3_1"
        ),
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
    kind = "chain" if strategy == CHAIN else "tree"
    compare(llm, prompts, texts, golden()[f"{name}.{kind}_rounds"])


def compare(llm: LLM, prompts: np.ndarray, texts: np.ndarray, rounds: np.ndarray) -> None:
    """Greedy tokens are those of `texts`, in as many rounds as the reference takes."""
    count = texts.shape[1] - prompts.shape[1]
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    samples = [out.samples[0] for out in llm.generate(prompts.tolist(), params)]
    assert [s.token_ids for s in samples] == texts[:, prompts.shape[1] :].tolist()
    taken = sum(s.stats.rounds for s in samples)
    assert rounds.sum() < 0.95 * len(prompts) * count, "too little is accepted to see a difference"
    assert taken == pytest.approx(rounds.sum(), rel=0.02)


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


LAYERS, VOCAB = 3, 48  # of the policy that heads are drawn for


@st.composite
def heads(draw) -> tuple[Eagle3, str]:
    """A head with any switches, and the layout of its files."""
    boundaries = st.lists(st.integers(0, LAYERS), min_size=1, max_size=3, unique=True)
    taps = draw(st.one_of(st.just(()), boundaries.map(sorted).map(tuple)))
    switch, layout = st.booleans(), draw(st.sampled_from(LAYOUTS))
    fc_norm = draw(st.sampled_from(["none", "joined", "each"])) if taps else "none"
    # A list of layers' outputs cannot name the embeddings. Plain files say `norm_output` with a
    # norm of each state alone.
    nested, recycled = bool(taps) and 0 not in taps, layout == "speculators" or fc_norm == "each"
    layers, window = draw(st.integers(1, 2)), draw(st.integers(2, 6))
    windows = st.lists(st.sampled_from([None, window]), min_size=layers, max_size=layers)
    head = Eagle3(
        boundaries=taps,
        said="nested" if nested and draw(switch) else "top",
        norm_before_residual=draw(switch),
        fc_norm=fc_norm,
        norm_output=recycled and draw(switch),
        backbone=draw(st.sampled_from(["llama", "qwen3"])),
        layers=layers,
        windows=draw(st.one_of(st.just(()), windows.map(tuple))),
        biases=draw(
            st.sampled_from(["", "qkvo", "qkv"] if layout == "safeailab" else ["", "qkvo"])
        ),
        heads=2,
        kv_heads=1,
        hidden=20,
        vocab=draw(st.sampled_from([None, VOCAB // 2, VOCAB - 1])),
        own_embedding=draw(switch),
        own_head=draw(switch),
        theta=draw(st.sampled_from([500.0, 10000.0])),
        seed=draw(st.integers(0, 2**16)),
    )
    return head, layout


def many(count: int):
    """So many examples, which take as long as they take."""
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=count, suppress_health_check=checks)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """(directory, policy in torch)."""
    from eagle3_torch import Policy, PolicySizes, policy_tensors, write_policy

    sizes = PolicySizes(vocab=VOCAB, layers=LAYERS)
    tensors = policy_tensors(sizes, 3)
    path = write_policy(tmp_path_factory.mktemp("policy") / "files", sizes, tensors)
    return path, Policy(sizes, tensors)


def check_logits(policy, written: Path, drawn: Eagle3, tensors: dict) -> None:
    """Logits of a tree with branches, of two contexts, are those of torch."""
    from eagle3_torch import Head

    path, target = policy
    contexts = np.random.default_rng(0).integers(0, VOCAB, (2, 9))
    grown = drive.random_tree(np.random.default_rng(1), 2, (2, 3), VOCAB, True)
    found, reference = (
        proposed(loaded(path, written), contexts, grown),
        Head(drawn, target, tensors),
    )
    for slot, context in enumerate(contexts.tolist()):
        for level, logits in enumerate(found):
            paths = [[]] if level == 0 else drive.paths_of(grown, level - 1)[slot].tolist()
            for row, below in enumerate(paths):
                want = np.full(VOCAB, -np.inf)
                want[reference.ids] = reference.draft_logits(context, below)[-1]
                # Two layers with biases lose more digits than the golden heads.
                np.testing.assert_allclose(logits[slot, row], want, atol=3 * LOGITS, rtol=1e-5)


@pytest.mark.torch
@many(4)
@given(drawn=heads())
def test_logits_of_heads_with_any_switches_are_those_of_torch(policy, tmp_path_factory, drawn):
    head, layout = drawn
    body = policy[1].sizes.body
    written = head.write(tmp_path_factory.mktemp("head") / "files", body, layout)
    check_logits(policy, written, head, head.tensors(body))


@pytest.mark.slow
@pytest.mark.torch
@many(60)
@given(drawn=heads())
def test_logits_of_many_heads_are_those_of_torch(policy, tmp_path_factory, drawn):
    head, layout = drawn
    body = policy[1].sizes.body
    written = head.write(tmp_path_factory.mktemp("head") / "files", body, layout)
    check_logits(policy, written, head, head.tensors(body))


def check_accept_length(policy, path: Path, head: Eagle3, layout: str) -> None:
    """Trains a head in torch for a moment, and counts rounds there and in `LLM`."""
    from eagle3_torch import Head, counted_rounds, train

    target = policy[1]
    prompts = np.random.default_rng(2).integers(0, VOCAB, (16, 5))
    texts = target.greedy(prompts, 16)
    tensors = head.tensors(target.sizes.body)
    tensors |= train(Head(head, target, tensors), texts, steps=40)
    written = head.write(path, target.sizes.body, layout, tensors)
    reference = Head(head, target, tensors)
    rounds = [len(counted_rounds(text.tolist(), 5, (1, 1, 1), reference)) for text in texts]
    spec = SpecConfig(CHAIN, draft=written)
    llm = LLM(policy[0], spec, max_batch=16, max_len=64, scan_layers=True)
    compare(llm, prompts, texts, np.array(rounds))


@pytest.mark.torch
@many(2)
@given(drawn=heads())
def test_accept_lengths_of_heads_with_any_switches_are_those_of_torch(
    policy, tmp_path_factory, drawn
):
    check_accept_length(policy, tmp_path_factory.mktemp("head") / "files", *drawn)


@pytest.mark.slow
@pytest.mark.torch
@many(20)
@given(drawn=heads())
def test_accept_lengths_of_many_heads_are_those_of_torch(policy, tmp_path_factory, drawn):
    check_accept_length(policy, tmp_path_factory.mktemp("head") / "files", *drawn)
