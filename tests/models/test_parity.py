"""The transformer equals transformers', the MTP head an independent torch implementation.

The golden files beside these tests make the comparison without torch; tests marked `torch` make it
again with whatever transformers is installed, through sharded checkpoints and back.
"""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

from bench.programs import change_dense
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.huggingface_names import policy_leaves
from specjax.config import Strategy
from specjax.config.model import LogitForm
from specjax.decode.tree import build_tree
from specjax.drafts.mtp import MTPHead, MTPSource, init_head_params
from specjax.engine.settings import EngineConfig
from specjax.interfaces import Room, Where
from specjax.memory import Commit, commit, empty
from specjax.models import transformer
from specjax.models.families.dense import dense_config
from specjax.models.mlps.dense import Dense
from specjax.models.rope import Rope, RopeScaling
from specjax.models.rows import param_axes
from specjax.models.transformer import graphdef, unroll_layers
from specjax.parallel.sharding import MeshConfig, ambient, make_mesh

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
# Families whose layers differ from Llama's; settings of their checkpoints are in make_golden.py.
NEW = (
    "gemma2", "gemma3_text", "granite", "ministral", "olmo2", "olmo3", "phi3", "smollm3",
    "gpt_oss", "qwen3_moe", "mixtral", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
)  # fmt: skip
HYBRIDS = NEW[-3:]
GOLDEN_CASES = (
    ("llama", "scanned"), ("qwen2", "unrolled"), ("qwen3", "looped"), ("mimo", "scanned"),
    ("qwen3_sliding", "scanned"), ("qwen3_sliding", "unrolled"),
    *((family, ("scanned", "unrolled")[place % 2]) for place, family in enumerate(NEW)),
    *(
        pytest.param(*case, marks=pytest.mark.slow)  # each family, and each layout, is above
        for case in (
            ("llama", "unrolled"), ("qwen2", "scanned"), ("qwen3", "scanned"),
            ("qwen3", "unrolled"),
        )
    ),
)  # fmt: skip
TREE = build_tree(Strategy.parse("default"))


def merged(cfg, params, layout):
    if layout == "unrolled":
        return nnx.merge(graphdef(cfg, "unrolled"), unroll_layers(params, cfg))
    return nnx.merge(graphdef(cfg), params)


def run_all(cfg, params, tokens, lengths, tree_tokens, layout="scanned"):
    """Logits of `hidden`, of `prefill`, and of tree rows decoded against the prefilled cache."""
    cfg = cfg.running(scan_layers=layout == "scanned")

    @jax.jit
    def program(params):
        model = merged(cfg, params, layout)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        segments = (positions < lengths[:, None]).astype(jnp.int32)
        trained = model.logits(model.hidden(tokens, positions, segments).x)
        read = model.prefill(tokens, lengths)
        room = Room(slots=len(tokens), pages=len(tokens), page_size=32)
        to = Commit(jnp.zeros_like(lengths))
        memory = commit(cfg, empty(cfg, room), read.scratch, None, lengths, to)
        positions = lengths[:, None] + TREE.shape.depth
        shape = TREE.shape
        where = Where(
            "tree", positions, prefix=lengths, visible=shape.bits, path_rows=shape.path_rows,
            depth=shape.depth,
        )  # fmt: skip
        decoded = model.decode(tree_tokens, where, memory)
        return trained, model.logits(read.x), model.logits(decoded.x)

    return program(params)


@pytest.mark.parametrize(("family", "layout"), GOLDEN_CASES)
def test_logits_equal_the_golden_ones_of_transformers_full_and_in_a_cached_tree(family, layout):
    golden = np.load(GOLDEN / family / "golden.npz")
    cfg, params, _ = hf.load_checkpoint(GOLDEN / family, param_dtype="float32")
    trained, prefilled, decoded = run_all(
        cfg, params, golden["tokens"], golden["lengths"], golden["tree_tokens"], layout
    )
    # Recurrent layers add up the rounding of every position, in an order that depends on the
    # processor: 1.3e-4 was seen.
    atol = 3e-4 if family in HYBRIDS else 1e-4
    for b, length in enumerate(golden["lengths"]):
        expected = golden["logits"][b, :length]
        np.testing.assert_allclose(trained[b, :length], expected, atol=atol, rtol=0)
        np.testing.assert_allclose(prefilled[b, :length], expected, atol=atol, rtol=0)
    np.testing.assert_allclose(decoded, golden["tree_logits"], atol=atol, rtol=0)


def test_experts_with_biases_on_eight_devices_give_the_golden_logits():
    golden = np.load(GOLDEN / "gpt_oss" / "golden.npz")
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tp=2))
    cfg, params, _ = hf.load_checkpoint(GOLDEN / "gpt_oss", "float32", mesh)
    tokens = np.tile(golden["tokens"], (2, 1))  # a row for each device of fsdp and expert
    positions = np.arange(tokens.shape[1])[None].repeat(4, 0)

    @jax.jit
    def logits(params):
        model = merged(cfg, params, "scanned")
        return model.logits(model.hidden(tokens, positions, positions * 0 + 1).x)

    with ambient(mesh):
        found = logits(params)
    np.testing.assert_allclose(found[0], golden["logits"][0], atol=1e-4)


def test_golden_logits_depend_on_every_feature_that_they_are_meant_to_prove():
    golden = np.load(GOLDEN / "llama" / "golden.npz")
    cfg, params, _ = hf.load_checkpoint(GOLDEN / "llama", param_dtype="float32")
    assert cfg.layers[0].mixer.rope.scaling == RopeScaling(8.0, 1.0, 4.0, 16)
    unscaled = run_all(
        change_dense(cfg, rope_scaling=None),
        params,
        golden["tokens"],
        golden["lengths"],
        golden["tree_tokens"],
    )[1]
    assert np.abs(unscaled[0] - golden["logits"][0]).max() > 0.1


def in_layers(**fields):
    return lambda cfg: cfg.replace(
        layers=tuple(dataclasses.replace(layer, **fields) for layer in cfg.layers)
    )


def in_mixers(**fields):
    """Changes the mixers that have these fields."""

    def one(layer):
        has_all = all(hasattr(layer.mixer, name) for name in fields)
        mixer = dataclasses.replace(layer.mixer, **fields) if has_all else layer.mixer
        return dataclasses.replace(layer, mixer=mixer)

    return lambda cfg: cfg.replace(layers=tuple(map(one, cfg.layers)))


def in_mixtures(**fields):
    def one(layer):
        is_dense = isinstance(layer.mlp, Dense)
        mlp = layer.mlp if is_dense else dataclasses.replace(layer.mlp, **fields)
        return dataclasses.replace(layer, mlp=mlp)

    return lambda cfg: cfg.replace(layers=tuple(map(one, cfg.layers)))


def in_yarn(**fields):
    def one(layer):
        rope = layer.mixer.rope
        rope = dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, **fields))
        return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, rope=rope))

    return lambda cfg: cfg.replace(layers=tuple(map(one, cfg.layers)))


def narrower(cfg):
    """Windows of fewer positions, where there are any."""

    def one(layer):
        window = layer.mixer.window and 2
        return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=window))

    return cfg.replace(layers=tuple(map(one, cfg.layers)))


# Each changes a feature that the family's golden logits are meant to prove.
FEATURES = {
    "soft-cap of scores": ("gemma2", in_mixers(soft_cap=None)),
    "soft-cap of logits": ("gemma2", lambda cfg: cfg.replace(logits=LogitForm())),
    "scale": ("gemma2", in_mixers(scale=None)),
    "window": ("gemma2", narrower),
    "offset of norms": ("gemma2", in_layers(norm_offset=False)),
    "offset of the final norm": ("gemma2", lambda cfg: cfg.replace(norm_offset=False)),
    "factor of embeddings": ("gemma2", lambda cfg: cfg.replace(embedding_multiplier=1.0)),
    "activation": ("gemma2", in_layers(mlp=Dense(48))),
    "offset of queries": ("gemma3_text", in_mixers(norm_offset=False)),
    "RoPE by layer type": ("gemma3_text", in_mixers(rope=Rope())),
    "no RoPE": ("smollm3", in_mixers(rope=Rope(2e6))),
    "residual multiplier": ("granite", in_layers(residual_multiplier=1.0)),
    "logit multiplier": ("granite", lambda cfg: cfg.replace(logits=LogitForm())),
    "attention multiplier": ("granite", in_mixers(scale=None)),
    "partial RoPE": ("phi3", in_mixers(rope=Rope())),
    "long factors": ("phi3", lambda cfg: cfg.for_length(4097)),
    "sum of weights": ("qwen3_moe", in_mixtures(norm_topk_prob=False)),
    "groups of experts": ("glm4_moe", in_mixtures(n_group=1, topk_group=1)),
    "factor of weights": ("glm4_moe", in_mixtures(scaling=1.0)),
    "router": ("mixtral", in_mixtures(router="softmax", norm_topk_prob=False)),
    "sum of weights beside a shared expert": ("qwen3_next", in_mixtures(norm_topk_prob=False)),
    "offset of a hybrid's norms": ("qwen3_next", in_layers(norm_offset=False)),
    "RoPE of a quarter": ("qwen3_5_text", in_mixers(rope=Rope())),
    "offset of gated queries": ("qwen3_5_text", in_mixers(norm_offset=False)),
    "epsilon of gated norms": ("qwen3_5_text", in_mixers(norm_eps=1e-6)),
    "bias of the output projection": ("gpt_oss", in_mixers(o_bias=False)),
    "sinks": ("gpt_oss", in_mixers(sinks=False)),
    "window of every other layer": ("gpt_oss", narrower),
    "bounds of YaRN": ("gpt_oss", in_yarn(truncate=True)),
    "magnitude of YaRN": ("gpt_oss", in_yarn(magnitude=1.0)),
    "biases of experts": ("gpt_oss", in_mixtures(biases=False)),
    "limit": ("gpt_oss", in_mixtures(limit=7.0)),
    "alpha": ("gpt_oss", in_mixtures(alpha=1.0)),
    "activation of experts": ("gpt_oss", in_mixtures(limit=None)),
    "weights of the chosen": ("gpt_oss", in_mixtures(router="softmax", norm_topk_prob=False)),
    "taps of convolutions": ("qwen3_5_moe_text", in_mixers(conv_kernel=3)),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_golden_logits_depend_on_each_feature_of_a_family(feature):
    family, change = FEATURES[feature]
    golden = np.load(GOLDEN / family / "golden.npz")
    cfg, params, _ = hf.load_checkpoint(GOLDEN / family, param_dtype="float32")
    tokens, length = golden["tokens"][:1], golden["lengths"][:1]
    changed, arrays = change(cfg).running(scan_layers=False), flatten_dict(params).items()
    names = param_axes(changed)  # without a bias the model has no array for it
    params = unflatten_dict({path: array for path, array in arrays if path[-1] in names})
    model = merged(changed, params, "looped")
    found = model.logits(model.prefill(tokens, length).x)
    assert np.abs(found[0] - golden["logits"][0]).max() > 0.1


def test_groups_change_the_experts_of_many_rows_of_the_golden_tokens():
    golden = np.load(GOLDEN / "glm4_moe" / "golden.npz")
    cfg, params, _ = hf.load_checkpoint(GOLDEN / "glm4_moe", param_dtype="float32")

    def chosen(cfg):
        model = merged(cfg.running(scan_layers=False), params, "looped")
        records = model.prefill(golden["tokens"], golden["lengths"]).records
        return np.sort(records[0, :, 0])  # those of the first mixture, whose inputs are equal

    free = in_mixtures(n_group=1, topk_group=1)(cfg)
    assert (chosen(cfg) != chosen(free)).any(-1).mean() > 0.2


@pytest.mark.parametrize("family", NEW)
def test_greedy_tokens_are_those_of_transformers_with_and_without_speculation(family):
    golden = np.load(GOLDEN / family / "golden.npz")
    spec = SpecConfig("3_1_4", draft="ngram")
    llm = LLM(GOLDEN / family, spec, max_batch=2, max_len=64, dtype="float32")
    asked = [
        SamplingParams(
            temperature=0,
            max_tokens=len(golden["greedy"]),
            ignore_eos=True,
            speculative=drafting,
        )
        for drafting in (True, False)
    ]
    found = llm.generate([golden["tokens"][0].tolist()] * 2, asked)
    for output in found:
        assert output.samples[0].token_ids == golden["greedy"].tolist()


# Around the rows of a block of the delta rule, of a page, and of a piece of a prompt.
PROMPTS = (1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 129)


@pytest.fixture(scope="module")
def reader():
    """A hybrid that reads prompts in pieces, and decodes row by row."""
    cfg, params, _ = hf.load_checkpoint(GOLDEN / "qwen3_5_text", param_dtype="float32")
    spec = SpecConfig("2_1_3", draft="ngram", invariant=True)
    engine = EngineConfig(prefill_chunk=32, page_size=16)
    model = cfg.replace(max_position=256), params, None
    return LLM(model, spec, max_batch=4, max_len=144, engine=engine)


def test_a_prompt_that_is_read_in_pieces_is_continued_as_one_that_was_decoded(reader):
    asked = SamplingParams(seed=1, max_tokens=129, ignore_eos=True, logprobs=4)
    [whole] = reader.generate([[5]] * 4, asked)[0].samples  # a full batch, as the prompts are
    prompts = [[5, *whole.token_ids[: length - 1]] for length in PROMPTS]
    outputs = reader.generate(prompts, dataclasses.replace(asked, max_tokens=1))
    for length, output in zip(PROMPTS, outputs, strict=True):
        bests = output.samples[0].top_logprobs[0], whole.top_logprobs[length - 1]
        best, wanted = ([*one.items()][:4] for one in bests)
        np.testing.assert_allclose(best, wanted, atol=1e-4)


@pytest.mark.torch
def test_prompts_of_any_length_are_continued_as_by_transformers(reader):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        GOLDEN / "qwen3_5_text", dtype="float32", attn_implementation="eager"
    )
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 64, length).tolist() for length in PROMPTS]
    asked = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=4)
    for prompt, output in zip(prompts, reader.generate(prompts, asked), strict=True):
        [sample] = output.samples
        logits = torch_logits(model, [prompt + sample.token_ids[:-1]])[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == sample.token_ids
        scores = np.asarray(jax.nn.log_softmax(logits))
        for wanted, best in zip(scores, sample.top_logprobs, strict=True):
            np.testing.assert_allclose([*best.values()], wanted[[*best]], atol=1e-4)


# --- the MTP head -------------------------------------------------------------------------------


def unrolled(cfg, head, hidden, step_embeddings):
    """`MTPHead.unroll` on one sequence: [steps, S, D]."""

    @jax.jit
    def program(head):
        module = MTPHead(cfg, head)
        positions = jnp.arange(hidden.shape[0])[None]
        segments = jnp.ones_like(positions)
        steps = [e[None] for e in step_embeddings]
        return jnp.concatenate(module.unroll(hidden[None], steps, positions, segments))

    return program(head)


def rolled_embeddings(params, tokens, steps):
    embedded = np.asarray(params["embed"])[tokens]
    return [np.roll(embedded, -(1 + s), axis=0) for s in range(steps)]


@pytest.mark.parametrize("concat", ("hidden_first", "embedding_first"))
def test_mtp_head_equals_the_golden_torch_outputs_in_both_orders(concat):
    golden = np.load(GOLDEN / "mimo" / "golden.npz")
    cfg, params, head = hf.load_checkpoint(
        GOLDEN / "mimo", param_dtype="float32", mtp_concat=concat
    )
    steps = rolled_embeddings(params, golden["tokens"][0], 3)
    outputs = unrolled(cfg, head, golden["mtp_hidden"], steps)
    np.testing.assert_allclose(outputs, golden["mtp_outputs"], atol=1e-4, rtol=0)

    other = hf.load_head(GOLDEN / "mimo" / "head_deepseek.safetensors", cfg)
    jax.tree.map(np.testing.assert_array_equal, other, head)


def test_mtp_head_in_the_wrong_order_is_far_from_the_golden_outputs():
    golden = np.load(GOLDEN / "mimo" / "golden.npz")
    cfg, params, head = hf.load_checkpoint(GOLDEN / "mimo", param_dtype="float32")
    wrong = cfg.replace(mtp_concat="embedding_first")
    steps = rolled_embeddings(params, golden["tokens"][0], 1)
    outputs = unrolled(wrong, head, golden["mtp_hidden"], steps)
    assert np.abs(outputs[0] - golden["mtp_outputs"][0]).max() > 0.5


def test_head_states_of_the_target_are_the_golden_post_norm_ones():
    golden = np.load(GOLDEN / "mimo" / "golden.npz")
    cfg, params, _ = hf.load_checkpoint(GOLDEN / "mimo", param_dtype="float32")

    @jax.jit
    def states(params):
        model = merged(cfg, params, "looped")
        taps = (cfg.mtp_target_hidden,)
        return model.prefill(golden["tokens"], golden["lengths"], taps).tapped

    np.testing.assert_allclose(states(params)[0], golden["mtp_hidden"], atol=1e-4, rtol=0)


SMALL = dense_config(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=8, mtp_num_layers=1,
)  # fmt: skip


# --- against torch itself -----------------------------------------------------------------------

LIVE = {
    "llama": ("LlamaConfig", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}),
    "llama with biases": ("LlamaConfig", {"attention_bias": True, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 2.0,
        "original_max_position_embeddings": 16}}),
    "qwen2 sliding": ("Qwen2Config", {
        "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "mistral": ("MistralConfig", {"sliding_window": 4}),
    "qwen3": ("Qwen3Config", {"head_dim": 12, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6}}),
}  # fmt: skip


def random_transformers_model(name, **more):
    import torch
    import transformers

    sys.path.insert(0, str(GOLDEN))
    from make_golden import FAMILIES, one_of

    if name in NEW:
        config_name, extra = FAMILIES[name]
    else:
        config_name, extra = LIVE[name]
    sizes = {
        "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": 0,
    }  # fmt: skip
    config = getattr(transformers, config_name)(**{**sizes, **extra, **more})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and "norm" in name
            parameter.copy_(one_of(model, name) + 0.1 * draw if is_norm else 0.3 * draw)
            if name.endswith("o_proj.bias") and config.model_type != "gpt_oss":
                parameter.zero_()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def torch_logits(model, ids):
    import torch

    with torch.no_grad():
        return model(torch.as_tensor(np.asarray(ids)).long()).logits.numpy()


@pytest.mark.torch
@pytest.mark.parametrize("name", [*LIVE, *NEW])
def test_live_transformers_checkpoint_loads_decodes_and_exports_with_the_same_logits(
    name, tmp_path
):
    import transformers

    model = random_transformers_model(name)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    cfg, params, head = hf.load_checkpoint(tmp_path / "theirs")
    assert head is None

    rng = np.random.default_rng(2)
    tokens, tree_tokens = rng.integers(0, 61, (1, 14)), rng.integers(0, 61, (1, TREE.rows))
    lengths = np.array([11], np.int32)
    _, prefilled, decoded = run_all(cfg, params, tokens, lengths, tree_tokens)
    expected = torch_logits(model, tokens)
    np.testing.assert_allclose(prefilled[0, :11], expected[0, :11], atol=1e-4, rtol=0)
    for row in (0, 4, TREE.rows - 1):
        path = [row]
        while path[0]:
            path.insert(0, int(TREE.shape.parent[path[0]]))
        ids = np.concatenate([tokens[:, :11], tree_tokens[:, path]], axis=1)
        at_row = torch_logits(model, ids)[0, -1]
        np.testing.assert_allclose(decoded[0, row], at_row, atol=1e-4, rtol=0)

    head_cfg = cfg.replace(mtp_num_layers=1)
    hf.save_checkpoint(
        tmp_path / "ours",
        head_cfg,
        params,
        init_head_params(head_cfg, 0),
        max_shard_bytes=20_000,
    )
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    # GLM's files have its head behind the layers; transformers passes over those of 46 and 92.
    report["unexpected_keys"] = {n for n in report["unexpected_keys"] if ".layers.3." not in n}
    assert not any(report.values()), report
    np.testing.assert_allclose(torch_logits(again, tokens), expected, atol=1e-6, rtol=0)


@pytest.fixture
def glm_with_head(tmp_path, monkeypatch):
    """(transformers' model and MTP head of two modules, a directory with both)."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.modeling_layers import MtpModel

    model = random_transformers_model("glm4_moe")
    model.config.num_nextn_predict_layers = 2
    # Its loader knows the layers of the published models by their numbers.
    names = [rf"model\.layers\.{i}\..*" for i in (3, 4)]
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", names)
    head = MtpModel(model, 2).float()
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in (*head.layers.named_parameters(), *head.layers.named_buffers()):
            draw = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * draw if "norm" in name else 0.3 * draw)
    model.save_pretrained(tmp_path / "theirs")
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    for name, array in head.layers.state_dict().items():
        number, _, rest = name.partition(".")
        rest = rest.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
        tensors |= of_files(f"model.layers.{3 + int(number)}.{rest}", array)
    save_file(tensors, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    return model, head, tmp_path / "theirs"


def candidates(model, head, tokens):
    """The tokens that transformers drafts after `tokens` [1 S], and the states of its modules."""
    import torch
    from transformers.cache_utils import MtpCache

    states, layer = [], head.forward_layer

    def kept(*args, **named):
        states.append(layer(*args, **named))
        return states[-1]

    head.forward_layer = kept
    with torch.no_grad():
        hidden = model.model(tokens[:, :-1]).last_hidden_state
        drafted, *_ = head(
            tokens[:, 1:], hidden, None, torch.arange(1, tokens.shape[1])[None],
            MtpCache(config=model.config.get_mtp_config()),
        )  # fmt: skip
    head.forward_layer = layer
    return drafted[0].tolist(), hidden[0], torch.cat(states).numpy()


@pytest.mark.torch
def test_glms_head_drafts_what_transformers_drafts_and_what_a_reference_drafts_beyond(
    glm_with_head, tmp_path
):
    import torch
    import transformers
    from mtp_oracle import mtp_oracle
    from safetensors.torch import load_file
    from transformers.modeling_layers import MtpModel

    model, head, path = glm_with_head
    cfg, params, ours = hf.load_checkpoint(path)
    assert cfg.mtp_num_layers == 2 and cfg.mtp_concat == "embedding_first"
    tokens = torch.as_tensor(np.random.default_rng(2).integers(0, 61, (1, 12)))
    drafted, hidden, wanted = candidates(model, head, tokens)
    known = np.r_[tokens[0].numpy(), drafted, 0]
    table = np.asarray(params["embed"])
    steps = [table[known[1 + step : 12 + step]] for step in range(3)]
    outputs = unrolled(cfg, ours, hidden.numpy(), steps)
    np.testing.assert_allclose(outputs[:2], wanted, atol=1e-4)
    logits = outputs[:2, -1] @ np.asarray(params["lm_head"])
    assert logits.argmax(-1).tolist() == drafted

    names = {
        "enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
        "shared_head.norm": "final_layernorm",
    }  # fmt: skip
    tensors = {}
    for name, array in load_file(path / "model.safetensors").items():
        for i in (0, 1):
            own = name.removeprefix(f"model.layers.{3 + i}.")
            for theirs, mimos in names.items():
                own = own.replace(theirs, mimos)
            tensors |= {f"model.mtp_layers.{i}.{own}": array} if own != name else {}
    for recycle in ("post_norm", "pre_norm"):
        cfg = cfg.replace(mtp_recycle=recycle)
        mlps = [lambda y, i=i: head.layers[i].mtp_block.mlp(y[None, None])[0, 0] for i in (0, 1)]
        with torch.no_grad():
            reference = mtp_oracle(tensors, cfg, hidden, torch.as_tensor(steps), False, mlps)
        outputs = unrolled(cfg, ours, hidden.numpy(), steps)
        np.testing.assert_allclose(outputs, torch.stack(reference).numpy(), atol=1e-4)

    hf.save_checkpoint(tmp_path / "ours", cfg, params, ours)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    assert candidates(again, MtpModel.from_pretrained(again), tokens)[0] == drafted


def head_of_parts(model):
    """A hybrid's MTP head out of transformers' layer and norms, by their names in files."""
    from make_golden import randomise
    from torch.nn import Linear, ModuleDict, ModuleList

    config = model.config
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    parts = {name: type(model.model.norm)(24, config.rms_norm_eps) for name in norms}
    layers = ModuleList([type(model.model.layers[1])(config, 1)])
    head = ModuleDict({**parts, "fc": Linear(48, 24, bias=False), "layers": layers}).float()
    randomise(head, 6)
    return head


def outputs_of_parts(model, head, hidden, steps):
    """Outputs of the steps [steps S D], whose rows stand behind those of the earlier steps."""
    import torch

    rows, outputs = [], []
    for number, embedded in enumerate(steps):
        e, h = head["pre_fc_norm_embedding"](embedded), head["pre_fc_norm_hidden"](hidden)
        rows.append(head["fc"](torch.cat([e, h], -1)))
        step, index = np.divmod(np.arange(len(hidden) * (number + 1)), len(hidden))
        sees = (step == 0) & (index <= index[:, None])
        sees |= (step <= step[:, None]) & (index == index[:, None])
        mask = torch.where(torch.as_tensor(sees), 0.0, -torch.inf)[None, None]
        x = torch.cat(rows)[None]
        turns = model.model.rotary_emb(x, torch.as_tensor(index + step)[None])
        x = head["layers"][0](x, position_embeddings=turns, attention_mask=mask)
        hidden = head["norm"](x[0, -len(hidden) :])
        outputs.append(hidden)
    return torch.stack(outputs).numpy()


@pytest.mark.torch
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrids_head_computes_what_transformers_parts_do_and_survives_an_export(
    family, tmp_path
):
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    has_key = family != "qwen3_next"
    more = {"mtp_num_hidden_layers": 1} if has_key else {"mlp_only_layers": []}
    model = random_transformers_model(family, **more)
    head, file = head_of_parts(model), tmp_path / "theirs" / "model.safetensors"
    model.save_pretrained(file.parent)
    tensors = load_file(file)
    for name, array in head.state_dict().items():
        tensors |= of_files(f"mtp.{name}", array.clone())
    save_file({name: x.contiguous() for name, x in tensors.items()}, file, {"format": "pt"})
    cfg, params, ours = hf.load_checkpoint(file.parent)

    tokens, lengths = np.random.default_rng(2).integers(0, 61, (1, 12)), np.array([12])
    steps = rolled_embeddings(params, tokens[0], 3)
    with torch.no_grad():
        hidden = model.model(torch.as_tensor(tokens)).last_hidden_state[0]
        wanted = outputs_of_parts(model, head, hidden, torch.as_tensor(np.stack(steps)))
    taps = (cfg.mtp_target_hidden,)
    read = jax.jit(lambda params: merged(cfg, params, "looped").prefill(tokens, lengths, taps))
    outputs = unrolled(cfg, ours, read(params).tapped[0], steps)
    np.testing.assert_allclose(outputs, wanted, rtol=1e-4, atol=1e-4)

    hf.save_checkpoint(tmp_path / "ours", cfg, params, ours)
    exported = hf.load_checkpoint(tmp_path / "ours")
    assert exported[0] == cfg
    jax.tree.map(np.testing.assert_array_equal, exported[1:], (params, ours))
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    expected = torch_logits(model, tokens)
    np.testing.assert_allclose(torch_logits(again, tokens), expected, atol=1e-6, rtol=0)
    if not has_key:  # the weights alone say that there is a head
        llm = LLM(file.parent, SpecConfig("2_1_3"), max_batch=1, max_len=32, dtype="float32")
        asked = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        [sample] = llm.generate(tokens.tolist(), asked)[0].samples
        logits = torch_logits(model, [tokens[0].tolist() + sample.token_ids[:-1]])
        assert logits[0, 11:].argmax(-1).tolist() == sample.token_ids
        assert isinstance(llm.source, MTPSource) and sample.stats.drafted_rounds


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "family"), [("Qwen3_5", "qwen3_5_text"), ("Qwen3_5Moe", "qwen3_5_moe_text")]
)
def test_files_as_published_hold_a_text_whose_experts_are_one_tensor_or_each_its_own(
    kind, family, tmp_path
):
    import transformers
    from safetensors.torch import save_model

    text = random_transformers_model(family)
    raw = text.config.to_dict()
    raw["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    vision = dict.fromkeys(("hidden_size", "intermediate_size", "num_position_embeddings"), 16)
    vision |= {"depth": 1, "num_heads": 2, "out_hidden_size": 24}
    parts = {"text_config": raw, "vision_config": vision}
    tied = text.config.tie_word_embeddings
    config = getattr(transformers, f"{kind}Config")(**parts, tie_word_embeddings=tied)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(tmp_path / "each")
    raw = json.loads((tmp_path / "each" / "config.json").read_text())
    raw["text_config"] |= {"mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"}
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.json").write_text(json.dumps(raw))
    save_model(model, str(tmp_path / "one" / "model.safetensors"), {"format": "pt"})
    cfg, params, _ = hf.load_checkpoint(tmp_path / "one")
    jax.tree.map(np.testing.assert_array_equal, params, hf.load_checkpoint(tmp_path / "each")[1])
    tokens = np.random.default_rng(2).integers(0, 61, (1, 14))
    drafted = np.zeros((1, TREE.rows), int)
    _, logits, _ = run_all(cfg, params, tokens, np.array([14]), drafted)
    np.testing.assert_allclose(logits, torch_logits(model, tokens), atol=1e-4)


def test_decays_are_float32_in_memory_and_in_files_of_bfloat16(tmp_path):
    file = tmp_path / "theirs" / "model.safetensors"
    shutil.copytree(GOLDEN / "qwen3_5_text", file.parent)
    tensors = load_file(file)
    precise = [name for name in tensors if name.endswith(("A_log", "dt_bias"))]
    for name in precise:
        tensors[name] = tensors[name].astype(np.float32) + np.float32(1e-4)
    save_file(tensors, file, {"format": "pt"})
    cfg, params, _ = hf.load_checkpoint(file.parent)
    hf.save_checkpoint(tmp_path / "ours", cfg, params)
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert precise and cfg.run.param_dtype == "bfloat16"
    for name, array in tensors.items():
        assert written[name].dtype == array.dtype
        np.testing.assert_array_equal(written[name], array)


def of_files(name, array):
    """Arrays by the names of files, in which each expert has tensors of its own."""
    prefix, stacked, kind = name.partition("experts.")
    if not stacked or array.ndim < 3:
        return {name: array}
    parts = kind.removesuffix("_proj").split("_")  # gate and up are one array
    height = array.shape[1] // len(parts)
    return {
        f"{prefix}experts.{number}.{part}_proj.weight": expert[i * height : (i + 1) * height]
        for number, expert in enumerate(array)
        for i, part in enumerate(parts)
    }


def gradients_of(model):
    """Gradients by the names of files; the corrections of routers are buffers and have none."""
    gradients = {name: np.zeros(b.shape) for name, b in model.named_buffers() if "e_score" in name}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.numpy()
            one = model.config.model_type == "gpt_oss"  # experts are one tensor
            gradients |= {name: gradient} if one else of_files(name, gradient)
    return gradients


@pytest.mark.torch
@pytest.mark.parametrize(
    "family", ["gemma3_text", "olmo3", "gpt_oss", "qwen3_moe", "glm4_moe", *HYBRIDS]
)
def test_gradients_are_those_of_torch(family, tmp_path):
    import torch

    model = random_transformers_model(family)
    model.save_pretrained(tmp_path / "theirs")
    cfg, params, _ = hf.load_checkpoint(tmp_path / "theirs")
    tokens = np.random.default_rng(2).integers(0, 61, (2, 14))
    scores = torch.log_softmax(model(torch.as_tensor(tokens)).logits[:, :-1], -1)
    loss = -scores.gather(-1, torch.as_tensor(tokens)[:, 1:, None]).mean()
    loss.backward()

    @jax.jit
    @jax.grad
    def gradients(params):
        trained, positions = merged(cfg, params, "looped"), jnp.arange(14)[None].repeat(2, 0)
        found = trained.hidden(tokens, positions, jnp.ones_like(positions)).x
        scores = jax.nn.log_softmax(trained.logits(found)[:, :-1])
        return -jnp.take_along_axis(scores, jnp.asarray(tokens)[:, 1:, None], -1).mean()

    ours = hf.named_weights(policy_leaves(cfg), gradients(params), "float32")
    theirs = gradients_of(model)
    assert len(ours) == len(theirs)
    for written in ours:
        wanted = theirs[written.name]
        np.testing.assert_allclose(
            written.read(), wanted, atol=1e-3 * np.abs(wanted).max(), err_msg=written.name
        )


@pytest.mark.torch
def test_exported_mimo_body_runs_as_qwen2_in_transformers_with_the_same_logits(tmp_path):
    import transformers

    golden = np.load(GOLDEN / "mimo" / "golden.npz")
    cfg, params, head = hf.load_checkpoint(GOLDEN / "mimo", mtp_concat="embedding_first")
    hf.save_checkpoint(tmp_path / "out", cfg, params, head, dtype="float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    model, report = transformers.Qwen2ForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert all(key.startswith("model.mtp_layers.0.") for key in report["unexpected_keys"])
    logits = torch_logits(model, golden["tokens"])
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-5, rtol=0)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("concat", "modules", "recycle"),
    (
        ("embedding_first", 1, "post_norm"),
        ("hidden_first", 1, "pre_norm"),
        ("embedding_first", 2, "pre_norm"),
        ("hidden_first", 2, "post_norm"),
    ),
)
def test_mtp_head_equals_torch_over_recursive_steps(concat, modules, recycle):
    import torch
    from mtp_oracle import mtp_oracle, random_head_tensors

    qk_norm = recycle == "pre_norm"  # Qwen3's layer in half of the cases, Qwen2's in the others
    cfg = change_dense(
        SMALL, mtp_concat=concat, mtp_num_layers=modules, mtp_recycle=recycle, qk_norm=qk_norm,
        qkv_bias=not qk_norm, rope_theta=500.0,
    )  # fmt: skip
    tensors = random_head_tensors(cfg, seed=3)
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(9, cfg.hidden_size)).astype(np.float32)
    steps = list(rng.normal(size=(3, 9, cfg.hidden_size)).astype(np.float32))
    expected = mtp_oracle(
        tensors, cfg, torch.tensor(hidden), [torch.tensor(e) for e in steps],
        hidden_first=concat == "hidden_first",
    )  # fmt: skip
    actual = unrolled(cfg, head_from_tensors(tensors, modules), hidden, steps)
    np.testing.assert_allclose(actual, torch.stack(expected).numpy(), atol=1e-4, rtol=0)


def head_from_tensors(tensors, modules):
    """MiMo's names to our tree, written out here so that the loader is not its own witness."""
    attention = {
        f"{w}{suffix}": f"self_attn.{w}_{name}"
        for w in "qkv"
        for suffix, name in (("", "proj.weight"), ("_bias", "proj.bias"), ("_norm", "norm.weight"))
    } | {"o": "self_attn.o_proj.weight"}
    mlp = {name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    norms = {"input_norm": "input_layernorm.weight", "post_norm": "post_attention_layernorm.weight"}
    blocks = {}
    for i in range(modules):

        def get(name, i=i):
            tensor = tensors[f"model.mtp_layers.{i}.{name}"].numpy()
            return jnp.asarray(tensor.T if tensor.ndim == 2 else tensor)

        names = attention | mlp | norms
        layer = {
            ours: get(name)
            for ours, name in names.items()
            if f"model.mtp_layers.{i}.{name}" in tensors
        }
        blocks[i] = {
            "embed_norm": get("token_layernorm.weight"),
            "hidden_norm": get("hidden_layernorm.weight"),
            "proj": get("input_proj.weight"),
            "norm": get("final_layernorm.weight"),
            "layer": layer,
        }
    return {"blocks": blocks}


def test_unrolled_layers_that_are_alike_are_traced_and_lowered_once(monkeypatch):
    calls, run = [], transformer.Block.run
    monkeypatch.setattr(
        transformer.Block, "run", lambda block, *args: calls.append(block) or run(block, *args)
    )
    cfg, params, _ = hf.load_checkpoint(GOLDEN / "qwen2", "float32")
    model = merged(cfg.running(attention="reference"), params, "unrolled")
    assert cfg.num_layers > 1
    tokens, lengths = jnp.arange(8)[None] % cfg.vocab_size, jnp.array([8])
    text = jax.jit(model.prefill).lower(tokens, lengths).as_text()
    assert len(calls) == 1
    assert text.count("call @_run_block") == cfg.num_layers
    assert text.count("func.func private @_run_block") == 1
