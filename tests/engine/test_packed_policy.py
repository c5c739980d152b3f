"""Engines whose weights are packed: their memory, and tokens that are those of the kept weights."""

import functools
import gc
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from unittest import mock

import engines
import jax
import numpy as np
import pytest
from engines import LONG, engine_of, jobs_of, restless_of
from shared import compilations_of
from tiers import slow_but
from tiny import apt, prompts_of, sharpened

from specjax import LLM, EngineConfig, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.drafts.mtp import init_head_params
from specjax.engine import weights as engine_weights
from specjax.engine.llm import page_budget
from specjax.models.transformer import init_params, rounded, unroll_layers
from specjax.parallel.sharding import MeshConfig, make_mesh
from specjax.shipped import find_shipped
from specjax.weights.matrix import packed, unpack
from specjax.weights.packed import Packed
from specjax.weights.safetensors import Tensor
from tests.weights import test_fp8

quantised = test_fp8.quantised  # a fixture
needs_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "eos_token_id": [7],
    "max_position_embeddings": 256, "num_nextn_predict_layers": 1, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS = {
    "tied": {"model_type": "qwen3", "tie_word_embeddings": True, "num_experts_per_tok": ...},
    "mixture": {
        "model_type": "qwen3_moe", "num_experts": 8, "norm_topk_prob": True,
        "moe_intermediate_size": 256,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "num_local_experts": 8, "sliding_window": 6, "swiglu_limit": 1.0,
        "intermediate_size": 64,
    },
}  # fmt: skip
STORED = {"gpt_oss": "mxfp4"}
TWO_LAYERS = {"num_hidden_layers": 2, "decoder_sparse_step": 2}  # the second is a mixture
MIXED = {
    "layers.0.down": "mxfp4", "*.experts_*": "int4", "*.k": "xla", "draft.*.o": "fp8", "*": "int8",
}  # fmt: skip
ARMS = ("off", "3_1_4", "3_2_6", "2x2")  # plain, a chain, a dynamic tree, a static one
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(seed=0, max_tokens=20, ignore_eos=True, n=2)
PROMPTS = prompts_of(4, 64, seed=2, shortest=2)


@functools.cache
def model(name, **changes):
    """Config, parameters of a policy and of a head that is accepted now and then."""
    raw = {**SIZES, **MODELS[name], **changes}
    raw = {key: value for key, value in raw.items() if value is not ...}
    cfg = hf.config_of(Path("config.json"), raw, {})
    policy = sharpened(init_params(cfg, 3), 6.0, 0.7)
    return cfg, policy, apt(sharpened(init_head_params(cfg, 4), 6.0, 0.7), cfg)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Writes a model without its head, once, and returns its directory."""

    @functools.cache
    def write(name, **changes):
        path = tmp_path_factory.mktemp(name) / "model"
        hf.save_checkpoint(path, *model(name, **changes)[:2], dtype=STORED.get(name))
        return path

    return write


def llm_of(given, products, spec=None, **more):
    how = EngineConfig(products=products, stretch=1, prefill_chunk=16)
    return LLM(given, spec, 4, 96, engine=how, generation_config="none", **more)


def tokens(llm, params=DRAWN):
    return [[one.token_ids for one in out.samples] for out in llm.generate(PROMPTS, params)]


def bytes_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def formats(tree):
    """The name of the class of each matrix in a nested dict."""
    if isinstance(tree, dict):
        return {name: formats(value) for name, value in tree.items()}
    return type(tree).__name__ if isinstance(tree, Packed) else "array"


def assert_same(packed, arrays):
    full = jax.tree.map(unpack, packed, is_leaf=lambda leaf: isinstance(leaf, Packed))
    jax.tree.map(np.testing.assert_array_equal, full, arrays)


# --- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("tied", "int8"),
        ("mixture", "int4"),
        pytest.param("tied", "fp8", marks=pytest.mark.slow),
        pytest.param("mixture", "fp8_block", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "mxfp4", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_those_of_the_weights_that_are_kept(name, products, saved):
    cfg, stacked, _ = hf.load_checkpoint(saved(name), "float32")
    kept = rounded(stacked, cfg.running(products=products))
    wanted = tokens(llm_of((cfg, kept, None), "xla"), GREEDY)
    assert tokens(llm_of(saved(name), products, dtype="float32"), GREEDY) == wanted


def restless(name, products, **changes):
    """An engine with little room, which changes its strategy all the time; and plain decoding."""
    cfg, *params = model(name, **changes)
    made = {"cfg": cfg, "params": params, "products": products}
    return restless_of(ARMS, [4], **made), engine_of(None, 1, **made), *params


@pytest.mark.parametrize("products", ["mxfp4", "int8"])
def test_preempted_samples_of_any_strategy_have_the_tokens_of_plain_decoding(products):
    engine, plain, *_ = restless("tied", products)
    jobs = engines.random_jobs(np.random.default_rng(1), 6) + jobs_of([5], replace(LONG, n=4))
    (samples, totals), (wanted, _) = (one.generate(jobs) for one in (engine, plain))
    assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in wanted]
    assert engine.preemptions and totals.accepted


@pytest.mark.slow
@pytest.mark.parametrize("products", ["int8", "fp8", "fp8_block", "mxfp4", "int4"])
def test_10_000_tokens_under_chaos_are_those_of_plain_decoding(products):
    engine, plain, policy, head = restless("mixture", products, **TWO_LAYERS)
    heads = head, jax.tree.map(lambda array: array * np.float32(0.9), head)
    _, unexplained, _ = engines.chaos(engine, plain, [policy], heads, 10_000)
    assert not unexplained, "\n".join(map(str, unexplained))


@pytest.mark.parametrize("draft", ["auto", "ngram"])
def test_what_drafts_over_a_packed_policy_changes_no_token(draft):
    cfg, policy, head = model("tied")
    given = cfg, policy, head if draft == "auto" else None
    products = {"embed": "xla", "draft.*": "int8", "*": "mxfp4"}
    llm = llm_of(given, products, SpecConfig("2_1_3", draft=draft))
    assert llm.compare_with_plain(PROMPTS, DRAWN) == [] and llm.totals.accepted


# --- memory --------------------------------------------------------------------------------------

LARGE = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 2048,
}  # fmt: skip
SHARES = {"int8": 0.55, "fp8": 0.55, "fp8_block": 0.55, "mxfp4": 0.3, "xla": None}


def arrays():
    gc.collect()
    return bytes_of(jax.live_arrays())


@pytest.mark.parametrize("products", slow_but(SHARES, "mxfp4", "int8", "xla"))
def test_a_policy_that_is_packed_is_never_held_in_full(products, saved, monkeypatch):
    """Neither while it is loaded nor later; and what `xla` holds shows that it would be noticed.

    Arrays of numpy and of devices may be the same on CPU, and are not added up.
    """
    policy = model("tied", **LARGE)[1]
    size, layer = (bytes_of(tree) // 2 for tree in (policy, policy["layers"]))  # in bfloat16
    how = EngineConfig(products=products, cache_bytes=2**20)
    make = functools.partial(
        LLM, saved("tied", **LARGE), None, 2, 64, "bfloat16", engine=how, generation_config="none"
    )
    make()  # what compiling leaves behind is not counted below
    read, most, before = Tensor.__getitem__, [], arrays()

    def counted(tensor, index):
        part = read(tensor, index)
        on_devices = bytes_of(jax.live_arrays()) - before
        most.append(max(tracemalloc.get_traced_memory()[0], on_devices))
        return part

    def compared(*given, **more):  # when the engine has taken the weights
        most.append(bytes_of(jax.live_arrays()) - before)
        return compare(*given, **more)

    compare = engine_weights.require_same
    monkeypatch.setattr(engine_weights, "require_same", compared)
    monkeypatch.setattr(Tensor, "__getitem__", counted)
    tracemalloc.start()
    try:
        llm = make()
    finally:
        tracemalloc.stop()
    runner = llm.engine.runner
    held = arrays() - before - bytes_of((runner.state, runner.kept))
    bound = size * SHARES["int8" if products == "xla" else products]
    assert (held <= bound) == (max(most) <= bound + layer / 8 + 2**20) == (products != "xla")
    if products != "xla":
        pairs = zip(*map(jax.tree.leaves, (llm.params, runner.weights.policy)), strict=True)
        assert all(a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer() for a, b in pairs)


def test_packed_weights_leave_their_room_to_caches():
    """gpt-oss-20b on a card of 80 GB, which would hold it in bfloat16 but once."""
    cfg = hf.read_config(find_shipped("assets/shapes/gpt-oss-20b"))
    card = mock.Mock(platform="gpu", process_index=0, memory_stats=lambda: {"bytes_limit": 80e9})
    with mock.patch("jax.local_devices", lambda: [card]):
        sizes = [
            page_budget(cfg, None, None, {}, (("*experts*", name),)) for name in ("mxfp4", "xla")
        ]
    assert sizes[0] > 40e9 and sizes[1] == 0


def test_weights_of_files_are_rounded_once(saved):
    """Not to the dtype of the run before."""
    wanted = packed(model("tied")[1]["embed"], "int8", table=True)
    held = llm_of(saved("tied"), "int8", dtype="bfloat16").params["embed"]
    jax.tree.map(np.testing.assert_array_equal, held, wanted)


# --- files that are packed -----------------------------------------------------------------------


@pytest.fixture
def folder(saved, tmp_path):
    """Copies a checkpoint to where `quantised` changes it."""

    def copy(name):
        path = saved(name) if name in MODELS else GOLDEN / name
        return Path(shutil.copytree(path, tmp_path / name))

    return copy


@pytest.fixture
def in_fp8(quantised, monkeypatch):
    """Writes a checkpoint in fp8 with a scale for each square of so many inputs and outputs.

    With squares of one it has a scale for each output instead.
    """

    def write(name, side):
        if side == 1:
            monkeypatch.setattr(test_fp8, "METHOD", test_fp8.OUTPUTS)
            return quantised(name)[0]
        monkeypatch.setattr(test_fp8, "BLOCK", [side, side])
        monkeypatch.setitem(test_fp8.METHOD, "weight_block_size", [side, side])
        return quantised(name)[0]

    return write


@needs_devices
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("name", "kind", "side"),
    [
        ("tied", "Fp8Block", 128),
        ("tied", "Fp8", 1),
        ("mixture", "Fp8Block", 128),
        ("mixture", "Fp8", 1),
        ("gpt_oss", "Mxfp4", 0),
    ],
)
def test_packed_files_keep_their_values_and_new_weights_are_packed_alike(
    name, kind, side, tp, in_fp8, saved
):
    path = in_fp8(name, side) if side else saved(name)
    cfg, stacked, _ = hf.load_checkpoint(path, "float32")
    packed = llm_of(path, "auto", dtype="float32", tp=tp)
    first = formats(packed.params)
    assert kind in jax.tree.leaves(first)
    assert_same(packed.params, unroll_layers(stacked, cfg.running(fused=False)))
    tokens(packed)
    packed.update_weights(stacked)
    again = lambda: (packed.update_weights(stacked), tokens(packed))  # noqa: E731
    assert compilations_of(again) == 0 and formats(packed.params) == first


@pytest.mark.parametrize(("name", "side"), [("tied", 24), ("qwen3_next", 128)])
def test_fp8_matrices_that_would_be_rounded_again_are_dequantised(name, side, in_fp8):
    """Blocks of another size, and matrices of which a file holds several as one."""
    path = in_fp8(name, side)
    cfg, stacked, _ = hf.load_checkpoint(path, "float32")
    _, kept, _ = hf.load_checkpoint(path, "float32", products="auto")
    is_packed = "Fp8Block" in jax.tree.leaves(formats(kept))
    assert is_packed == (side == 128)
    assert_same(kept, unroll_layers(stacked, cfg.running(fused=False)) if is_packed else stacked)


def test_what_is_packed_in_files_stays_so_for_whole_halves_and_for_the_policy_alone(in_fp8, saved):
    path = saved("gpt_oss", intermediate_size=96)
    kept = formats(hf.load_checkpoint(path, "float32", products="auto")[1])
    assert kept["layers"][0]["experts_gate"] == "Mxfp4"
    assert kept["layers"][0]["experts_down"] == "array"  # of three blocks of inputs
    spec = SpecConfig("1_1_2", draft="random", draft_kind="eagle3")
    llm = llm_of(in_fp8("tied", 128), "auto", spec, dtype="float32")
    assert "Fp8Block" in jax.tree.leaves(formats(llm.params))
    assert {*jax.tree.leaves(formats(llm.engine.runner.weights.head))} == {"array"}


# --- rules ---------------------------------------------------------------------------------------


def test_the_first_pattern_that_matches_a_matrix_decides():
    llm = llm_of(model("mixture", **TWO_LAYERS), MIXED, SpecConfig("1_1_2"))
    dense, sparse = formats(llm.params["layers"]).values()
    assert (dense["down"], dense["up"], dense["k"]) == ("Mxfp4", "Int8", "array")
    assert (sparse["experts_down"], sparse["o"], sparse["router"]) == ("Int4", "Int8", "array")
    assert (formats(llm.params)["embed"], formats(llm.params)["norm"]) == ("Int8", "array")
    layer = formats(llm.engine.runner.weights.head)["blocks"][0]["layer"]
    assert (layer["o"], layer["q"]) == ("Fp8", "array")


def test_layers_that_are_scanned_have_one_format():
    cfg, policy, _ = model("tied", num_hidden_layers=2)
    given, products = (cfg, policy, None), {"*.down": "int4", "*": "int8"}
    scanned, unrolled = (llm_of(given, products, scan_layers=scan) for scan in (True, False))
    assert tokens(scanned, GREEDY) == tokens(unrolled, GREEDY)
    with pytest.raises(ValueError, match=r"^expected one format for down of all .* int4, int8; "):
        llm_of(given, {"layers.0.*": "int4", "*": "int8"}, scan_layers=True)


@pytest.mark.parametrize("pattern", ["model.layers.*.down_proj", "lm_head", "draft.*.wq"])
def test_a_pattern_that_matches_no_matrix_is_refused(pattern):
    matched = pattern.removeprefix("draft.").replace("*", r"\*")
    with pytest.raises(ValueError, match=rf"^products: expected patterns .*, got '{matched}', "):
        llm_of(model("tied"), {pattern: "int8"}, SpecConfig("1_1_2"))


@pytest.mark.parametrize("products", ["int9", {"*.down": "int8", "*": "int9"}])
def test_an_unknown_format_is_refused_on_one_line(products):
    with pytest.raises(ValueError, match=r"^products must be one of .*; got 'int9'$"):
        EngineConfig(products=products)


# --- devices -------------------------------------------------------------------------------------


@functools.cache
def of_one_device():
    cfg, policy, _ = model("mixture", **TWO_LAYERS)
    return tokens(llm_of((cfg, policy, None), MIXED))


@needs_devices
@pytest.mark.parametrize(
    "places", [{"tp": 4}, {"tp": 2, "replicas": 2}, {"tp": 2, "data": 2, "fsdp": 2}], ids=str
)
def test_tokens_of_several_devices_are_those_of_one_after_new_weights_too(places):
    cfg, policy, _ = model("mixture", **TWO_LAYERS)
    how = {"mesh": make_mesh(MeshConfig(**places))} if "fsdp" in places else places
    llm = llm_of((cfg, jax.tree.map(lambda array: array * 0.9, policy), None), MIXED, **how)
    tokens(llm)
    llm.update_weights(policy)
    assert tokens(llm) == of_one_device()

    def share(weight):
        """The part of a matrix that a device holds."""
        parts = jax.tree.leaves(weight)
        return sum(part.addressable_shards[0].data.nbytes for part in parts) / bytes_of(parts)

    layers, ways = llm.params["layers"], places["tp"]
    assert share(layers[0]["down"]) >= 1 / places.get("fsdp", 1)  # its halves have three groups
    for name in ("experts_gate", "experts_up", "experts_down"):
        assert share(layers[1][name]) <= 1 / ways
