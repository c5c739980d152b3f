"""Checkpoints in GGUF: every type of tensor, what metadata mean, and what is refused."""

import struct

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.cli.main import main
from specjax.checked_json import CheckpointError, UnsupportedModelError
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.convert import convert
from specjax.checkpoint.weights import load_model, read_config
from specjax.models.families.dense import dense_config
from specjax.models.rope import LinearScaling, RopeScaling
from specjax.models.transformer import init_params
from specjax.weights import gguf as format_gguf
from specjax.weights import load_tokenizer, open_checkpoint
from specjax.weights.gguf import GGUF
from tests.weights import gguf_files
from tests.weights.gguf_files import gguf, write

SIZES = dict(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, model_type="llama", qk_norm=False, eos_token_ids=(2, 3), bos_token_id=1,
    pad_token_id=0, max_position=64, rope_theta=50_000.0, rms_norm_eps=1e-5,
)  # fmt: skip
WIDE = SIZES | dict(hidden_size=256, intermediate_size=256, head_dim=64, num_layers=1)
KINDS = sorted(
    kind.name
    for kind in gguf.GGMLQuantizationType
    if kind in gguf.quants._type_traits or kind.name in ("F16", "F32")
)


def saved(path, sizes=SIZES, seed=0):
    """A checkpoint in Hugging Face's layout; biases and norms are random as well."""
    cfg, rng = dense_config(**sizes), np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: init_params(cfg))
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    hf.save_checkpoint(path, cfg, params)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("hf") / "small")


def assert_same_model(file, directory, cfg_too=True):
    """The file means what the directory holds."""
    cfg, params, head = hf.load_checkpoint(file)
    expected, wanted, _ = hf.load_checkpoint(directory)
    assert head is None
    if cfg_too:
        assert cfg == expected
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


# --- weights ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes may be infinite scales
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_that_the_package_dequantises_is_read(tmp_path, kind):
    source = saved(tmp_path / "hf", WIDE)
    means = write(tmp_path / "m.gguf", source, kind)
    reader = open_checkpoint(tmp_path / "m.gguf")
    dtype = {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
    assert reader.config()["dtype"] == dtype
    tensors = reader.tensors()
    assert tensors.keys() == means.keys()
    for name, meant in means.items():
        tensor = tensors[name]
        assert tensor.shape == meant.shape
        assert tensor.dtype == (dtype if meant.ndim == 2 else "float32")
        whole = (slice(None),) * meant.ndim
        np.testing.assert_array_equal(tensor[whole].astype(np.float32), meant)
        part = (slice(3, 17), slice(5, 200, 3))[: meant.ndim]
        np.testing.assert_array_equal(tensor[part].astype(np.float32), meant[part])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False},
        {"qkv_bias": True},
        {"rope_scaling": RopeScaling(32.0, 1.0, 4.0, 8192)},
        {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 2048), "head_dim": 16},
        {"model_type": "qwen2", "qkv_bias": True},
        {"model_type": "qwen3", "qk_norm": True, "head_dim": 16},
    ],
    ids=str,
)
def test_each_architecture_is_what_it_is_in_hugging_face_s_layout(tmp_path, changes):
    source = saved(tmp_path / "hf", SIZES | changes)
    write(tmp_path / "m.gguf", source)
    assert_same_model(tmp_path / "m.gguf", source)
    assert_same_model(tmp_path / "m.gguf", source)


def test_what_the_metadata_leave_out_is_what_llama_cpp_takes(tmp_path, small):
    absent = (
        "llama.attention.key_length", "llama.attention.value_length", "llama.rope.freq_base",
        "llama.rope.dimension_count", "llama.vocab_size",
    )  # fmt: skip
    write(tmp_path / "m.gguf", small, metadata=gguf_files.byte_level(), leave_out=absent)
    config = open_checkpoint(tmp_path / "m.gguf").config()
    assert (config["head_dim"], config["rope_theta"]) == (8, 10_000.0)
    assert config["vocab_size"] == len(gguf_files.byte_level()["tokenizer.ggml.tokens"])


def test_a_factor_of_rope_is_linear_where_the_file_names_no_type(tmp_path, small):
    for factor in (1.0, 0.0):
        write(tmp_path / "m.gguf", small, metadata={"llama.rope.scaling.factor": factor})
        assert read_config(tmp_path / "m.gguf") == read_config(small)
    write(tmp_path / "m.gguf", small, metadata={"llama.rope.scaling.factor": 2.0})
    mixer = read_config(tmp_path / "m.gguf").layers[0].mixer
    assert mixer.rope.scaling == LinearScaling(2.0)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_window_is_refused_for_llama_cpp_does_not_use_it(tmp_path, architecture):
    sizes = SIZES | {"model_type": architecture, "qkv_bias": architecture == "qwen2"}
    name = f"{architecture}.attention.sliding_window"
    source = saved(tmp_path / "hf", sizes)
    write(tmp_path / "m.gguf", source, metadata={name: 0})
    assert read_config(tmp_path / "m.gguf") == read_config(source)
    write(tmp_path / "m.gguf", source, metadata={name: 16})
    with pytest.raises(UnsupportedModelError, match=f"{name} 16 is not supported"):
        read_config(tmp_path / "m.gguf")


def test_factors_of_rope_belong_to_one_architecture(tmp_path):
    sizes = SIZES | {"model_type": "qwen2", "qkv_bias": True}
    factors = format_gguf.llama3_factors(8, 50_000.0, 32.0, 8192).astype(np.float32)
    file, source = tmp_path / "m.gguf", saved(tmp_path / "hf", sizes)
    write(file, source, tensors={"rope_freqs.weight": factors})
    with pytest.raises(CheckpointError, match="unexpected: rope_freqs.weight"):
        load_model(file)


def test_how_a_file_asks_to_be_sampled_is_read(tmp_path, small):
    asked = {
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.95,
    }
    write(tmp_path / "m.gguf", small, metadata=asked)
    cfg = read_config(tmp_path / "m.gguf")
    assert dict(cfg.generation) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "gemma3"}, 'general.architecture "gemma3" is not supported'),
        ({"general.type": "adapter"}, "it holds a adapter; expected a model"),
        ({"split.count": 3}, "one part of several"),
        ({"llama.attention.scale": 0.125}, "llama.attention.scale 0.125 is not supported"),
        ({"llama.logit_scale": 16.0}, "llama.logit_scale 16.0 is not supported"),
        ({"llama.expert_count": 8}, "num_experts 8 (mixture of experts)"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, '"yarn"'),
        ({"llama.rope.dimension_count": 4}, "partial_rotary_factor 0.5 is not supported"),
        ({"llama.attention.value_length": 16}, "value_length 16 is not supported"),
        ({"llama.block_count": None}, "lacks the key 'llama.block_count'"),
        ({"llama.block_count": "two"}, "llama.block_count: expected a positive integer"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv: expected a positive integer"),
        ({"llama.block_count": 3}, "missing: model.layers.2.input_layernorm.weight"),
        ({"tokenizer.ggml.eos_token_id": 99}, "eos_token_id: expected a token id from 0 to 31"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(tmp_path, small, metadata, words):
    file = tmp_path / "m.gguf"
    write(file, small, metadata=metadata)
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        load_model(file)
    assert words in str(caught.value) and str(file) in str(caught.value)


def test_factors_of_rope_beside_another_scaling_are_refused(tmp_path, small):
    """llama.cpp applies both. Factors of 1 change nothing."""
    file, metadata = tmp_path / "m.gguf", {"llama.rope.scaling.factor": 2.0}
    write(file, small, metadata=metadata, tensors={"rope_freqs.weight": np.ones(4, np.float32)})
    assert read_config(file).layers[0].mixer.rope.scaling == LinearScaling(2.0)
    factors = format_gguf.llama3_factors(8, 50_000.0, 32.0, 8192).astype(np.float32)
    write(file, small, metadata=metadata, tensors={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModelError, match="rope_freqs.weight is not supported beside"):
        load_model(file)


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (("<|eot_id|>", "<|eom_id|>"), {"<|eot_id|>", "<|eom_id|>"}),
        (("<end_of_turn>", "<other>"), {"<end_of_turn>"}),
        (("<|end|>", "<EOT>"), {"<|end|>", "<EOT>"}),
        (("<|end|>", "<|return|>", "<|call|>"), {"<|return|>", "<|call|>"}),
    ],
    ids=["two names", "a name", "of Phi and others", "of harmony"],
)
def test_turns_end_at_tokens_known_by_name(tmp_path, small, names, ends):
    """Whatever type the file gives them; they are special tokens, as in llama.cpp."""
    metadata = gguf_files.byte_level()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens.extend(names)
    metadata["tokenizer.ggml.token_type"].extend([1] * len(names))
    metadata = {**metadata, "tokenizer.ggml.eot_token_id": None}
    write(tmp_path / "m.gguf", small, metadata=metadata, leave_out=("llama.vocab_size",))
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    found = open_checkpoint(tmp_path / "m.gguf").config()["eos_token_id"]
    assert {*tokenizer.convert_ids_to_tokens(found)} == {"</s>", "<|im_end|>", *ends}
    for end in ends:
        assert tokenizer.encode(f"the{end}")[-1:] == [tokens.index(end)]


# --- damage -------------------------------------------------------------------------------------


def read_all(file):
    """Reads everything of a file; errors must be of these kinds, of one line, and name it."""
    try:
        reader = GGUF(file)
        reader.config()
        for tensor in reader.tensors().values():
            tensor[(slice(0, 2),) * len(tensor.shape)]
        reader.tokenizer()
    except (CheckpointError, UnsupportedModelError) as error:
        assert str(file) in str(error) and len(str(error).splitlines()) == 1
        return error
    return None


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small):
    file = tmp_path_factory.mktemp("whole") / "m.gguf"
    write(file, small, metadata=gguf_files.byte_level())
    assert read_all(file) is None
    return file.read_bytes()


@given(where=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_off_is_refused(whole, tmp_path_factory, where):
    file = tmp_path_factory.getbasetemp() / "cut.gguf"
    file.write_bytes(whole[: int(where * (len(whole) - 64))])
    assert isinstance(read_all(file), CheckpointError)


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_read_or_refused_in_one_line(whole, tmp_path_factory, where, bit):
    file = tmp_path_factory.getbasetemp() / "flipped.gguf"
    header = whole.rindex(b"token_embd")
    spoiled = bytearray(whole)
    spoiled[int(where * header)] ^= 1 << bit
    file.write_bytes(spoiled)
    read_all(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "damaged or cut off"),
        (b"PK\x03\x04 something else", "expected it to begin with 'GGUF'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (
            b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
            "expected a little-endian GGUF file of version 2 or 3, got 1",
        ),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "expected a little-endian GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "claims 1152921504606846976 items"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "lacks the key 'general.architecture'"),
    ],
)
def test_what_is_no_gguf_file_is_named(tmp_path, capsys, content, words):
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    assert main(["generate", "--model", str(file), "a"]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and words in lines[0] and str(file) in lines[0]


# --- doors --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same model and tokenizer as a GGUF file in a directory, and in Hugging Face's layout."""
    folder = tmp_path_factory.mktemp("pair")
    metadata = gguf_files.byte_level()
    sizes = SIZES | {"vocab_size": len(metadata["tokenizer.ggml.tokens"])}
    source = saved(folder / "hf", sizes)
    (folder / "gguf").mkdir()
    file = folder / "gguf" / "m.gguf"
    write(file, source, metadata=metadata)
    load_tokenizer(file).save_pretrained(source)
    return file, source


@pytest.mark.slow
def test_generate_takes_a_file_or_its_directory(pair, capsys):
    file, source = pair
    said = []
    for model, strategy in (
        (file, "off"), (file.parent, "off"), (source, "off"), (file, "4_2_8"),
    ):  # fmt: skip
        args = ["--temperature", "0", "--max-tokens", "12", "--strategy", strategy]
        assert main(["generate", "--model", str(model), *args, "the ab"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0].strip() and said == said[:1] * 4


def test_convert_writes_what_transformers_and_specjax_load(pair, tmp_path):
    file, source = pair
    assert main(["convert", "--to", "hf", str(file), str(tmp_path / "out")]) == 0
    assert_same_model(tmp_path / "out", source)
    assert_same_model(file, tmp_path / "out")
    ours, theirs = load_tokenizer(file), load_tokenizer(tmp_path / "out")
    assert ours.get_vocab() == theirs.get_vocab()
    text = "the ab 12\n\n's <tool><|im_end|> é"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.chat_template == theirs.chat_template
    found = convert(file, tmp_path / "half", dtype="bfloat16", to="hf")
    assert found.dtype == "bfloat16" and found.tokenizer
