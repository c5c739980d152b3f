"""GGUF files as llama.cpp's converter writes them, made of checkpoints in Hugging Face's layout."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from specjax.weights.gguf import llama3_factors

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (specjax[gguf])")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(rows, heads):
    """Rows of a projection as `LlamaModel.permute` of llama.cpp's converter puts them."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def name_of(name):
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[inner]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def quantised(values, kind):
    """Bytes of a tensor, random ones where the package cannot quantise to this type; and what they
    mean."""
    if values.ndim == 1:
        kind = gguf.GGMLQuantizationType.F32  # as llama.cpp leaves norms and biases
    try:
        data = gguf.quantize(values, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(values.size)
        shape = (values.shape[0], values.shape[1] // block * size)
        data = rng.integers(0, 256, shape, np.uint8)
    return data, kind, gguf.dequantize(data, kind)


def write(path, source, kind="F32", metadata=None, leave_out=(), tensors=None):
    """Writes the checkpoint in the directory `source` as a GGUF file.

    Args:
      kind: of matrices. metadata: further keys, or others. leave_out: keys not to write.
      tensors: further ones by GGUF's names.

    Returns:
      the weights that the file means, by the names of Hugging Face.
    """
    config = json.loads((Path(source) / "config.json").read_text())
    arch, heads = config["model_type"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    kind = gguf.GGMLQuantizationType[kind]
    keys = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": float(config["rope_theta"]),
        f"{arch}.rope.dimension_count": config["head_dim"],
        f"{arch}.vocab_size": config["vocab_size"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.padding_token_id": config["pad_token_id"],
        "general.name": "tiny",
    }
    eos = config["eos_token_id"]
    eos = eos if isinstance(eos, list) else [eos]
    named = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    keys |= dict(zip(named[: len(eos)], eos, strict=True))
    keys = {k: v for k, v in (keys | (metadata or {})).items() if v is not None}
    writer = gguf.GGUFWriter(path, keys.pop("general.architecture", arch))
    for key, value in keys.items():
        if key not in leave_out:
            add(writer, key, value)
    means = {}
    for name, values in load_file(Path(source) / "model.safetensors").items():
        values = values.astype(np.float32)
        order = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
        data, used, meant = quantised(values, kind)
        means[name] = meant
        if arch == "llama" and order:  # whole rows change places
            data = permuted(data, order)
        writer.add_tensor(name_of(name), np.ascontiguousarray(data), raw_dtype=used)
    scaling = config.get("rope_scaling")
    if scaling:
        factors = llama3_factors(
            config["head_dim"], config["rope_theta"], scaling["factor"],
            scaling["original_max_position_embeddings"],
        )  # fmt: skip
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return means


def add(writer, key, value):
    """A key with the type that llama.cpp gives it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def byte_level(**changes):
    """Metadata of a byte-level tokenizer with a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "Ġ th", "Ġth e", "i n", "1 2", "Ċ Ċ", "a b", "ab c", "' s", "Ġ Ġ"]
    tokens = ["<unk>", "<s>", "</s>", "<|im_end|>", "<tool>", *alphabet]
    tokens += [merge.replace(" ", "") for merge in merges]
    while len(tokens) % 16:
        tokens.append(f"[PAD{len(tokens)}]")
    kinds = [3, 3, 3, 3, 4] + [5 if t.startswith("[PAD") else 1 for t in tokens[5:]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
        "{% endfor %}",
    } | changes


def sentencepiece(**changes):
    """Metadata of a SentencePiece tokenizer: bytes, letters, and pieces with falling scores."""
    pieces = ["▁t", "he", "▁the", "in", "▁a", "nd", "▁and", "er", "th", "▁▁", "ing", "hell", "ll"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.:", "é", "ő"]
    special = ["<unk>", "<s>", "</s>", "<|im_end|>"]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)] + pieces + letters
    kinds = [2, 3, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(letters))
    while len(tokens) % 16:
        tokens.append(f"[PAD{len(tokens)}]")
        kinds.append(5)
    ranked = [0.0] * 260 + [-float(i) for i in range(len(tokens) - 260)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": ranked,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | changes
