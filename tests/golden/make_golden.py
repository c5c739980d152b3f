"""Makes the golden checkpoints beside this file; needs torch and transformers.

    python tests/golden/make_golden.py [FAMILY ..]

One directory per family, of all or of those that are named: tiny random weights as transformers
saves them (bfloat16, to be small) and golden.npz with what transformers computes from them in
float32: logits of two prompts, logits at every node of the default draft tree, each from running
its root-to-node path in full, and the greedy tokens after the first prompt. `mimo` has in addition
an MTP head and the outputs of the torch implementation in tests/models/mtp_oracle.py, the same head
under DeepSeek's names, and a Qwen2 body, for transformers has no MiMo.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "models"), str(HERE.parent.parent)]

from mtp_oracle import mtp_oracle, random_head_tensors  # noqa: E402

from specjax.checkpoint.huggingface import read_config  # noqa: E402
from specjax.config import Strategy  # noqa: E402
from specjax.decode.tree import build_tree  # noqa: E402

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": [2, 3],
    "bos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
FAMILIES = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "mimo": ("Qwen2Config", {"tie_word_embeddings": False}),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": 5}),
    "qwen3_sliding": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True, **SLIDING}),
}
GEMMA = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24}
ENDS = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5], "long_factor": [3.0, 4.0], "attention_factor": 1.2,
    "original_max_position_embeddings": 128,
}  # fmt: skip
FAMILIES |= {
    "gemma2": ("Gemma2Config", {**GEMMA, "final_logit_softcapping": 8.0,
        "attn_logit_softcapping": 4.0, "hidden_size": 36}),
    "gemma3_text": ("Gemma3TextConfig", {**GEMMA, "num_hidden_layers": 3, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention"]}),
    "olmo2": ("Olmo2Config", ENDS),
    "olmo3": ("Olmo3Config", {**ENDS, "sliding_window": 5, "num_hidden_layers": 4,
        "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        "full_attention": {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0,
            "original_max_position_embeddings": 16}}}),
    "smollm3": ("SmolLM3Config", {**ENDS, "no_rope_layer_interval": 2,
        "use_sliding_window": True, "sliding_window": 5}),
    "granite": ("GraniteConfig", {"embedding_multiplier": 3.0, "attention_multiplier": 0.5,
        "residual_multiplier": 0.4, "logits_scaling": 2.0}),
    "phi3": ("Phi3Config", {"rope_parameters": LONGROPE, "sliding_window": 5, **ENDS,
        "hidden_size": 32}),
    "ministral": ("MinistralConfig", {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 2,
        "layer_types": [
        "sliding_attention", "full_attention"]}),
}  # fmt: skip
ROUTED = {**ENDS, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES |= {
    "qwen3_moe": ("Qwen3MoeConfig", {**ROUTED, "head_dim": 16, "num_experts": 8,
        "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "mixtral": ("MixtralConfig", {**ENDS, "num_local_experts": 4, "sliding_window": 5}),
    "glm4_moe": ("Glm4MoeConfig", {**ROUTED, "head_dim": 16, "n_routed_experts": 16,
        "num_hidden_layers": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
        "num_experts_per_tok": 4, "n_shared_experts": 2, "use_qk_norm": True, "num_mtp_layers": 0,
        "attention_bias": True}),
}  # fmt: skip
LINEAR = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "num_hidden_layers": 3,
    "rms_norm_eps": 1e-4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
SHARED = {**ROUTED, **LINEAR, "num_experts": 8, "shared_expert_intermediate_size": 24}
FAMILIES |= {
    "qwen3_next": ("Qwen3NextConfig", {**SHARED, "mlp_only_layers": [1]}),
    "qwen3_5_text": (
        "Qwen3_5TextConfig",
        {**ENDS, **LINEAR, "linear_value_head_dim": 16, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", SHARED),
}
FAMILIES |= {
    "gpt_oss": ("GptOssConfig", {**ENDS, "head_dim": 16, "num_local_experts": 8,
        "num_experts_per_tok": 3, "intermediate_size": 32, "num_hidden_layers": 3,
        "sliding_window": 5, "swiglu_limit": 0.9, "swiglu_alpha": 1.5, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 50.0, "factor": 8.0, "beta_fast": 4.0,
        "beta_slow": 0.5, "truncate": False, "original_max_position_embeddings": 64}}),
}  # fmt: skip
LENGTHS, GREEDY = (12, 9), 24


def one_of(model, name):
    """The weight at which a norm multiplies by 1: Gemma's and the hybrids' add 1 to it."""
    kind = type(model).__name__
    adds = "Gemma" in kind or kind.startswith(("Qwen3Next", "Qwen3_5"))
    return 0 if adds and "linear_attn" not in name else 1


def randomise(model, seed):
    """Weights at which norms, biases and attention all matter (the default init hides them)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and "norm" in name
            parameter.copy_(one_of(model, name) + 0.1 * draw if is_norm else 0.3 * draw)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


@torch.no_grad()
def logits_of(model, ids):
    return model(torch.as_tensor(np.asarray(ids))).logits.float().numpy()


def body(folder, config_name, extra, seed):
    """Saves a random checkpoint; returns the float32 model that it holds, and golden arrays."""
    config = getattr(transformers, config_name)(**{**SIZES, **extra})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model, seed)
    model.to(torch.bfloat16).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    rng = np.random.default_rng(seed)
    tree = build_tree(Strategy.parse("default"))
    tokens = rng.integers(0, SIZES["vocab_size"], (2, LENGTHS[0]))
    tree_tokens = rng.integers(0, SIZES["vocab_size"], (2, tree.rows))
    tree_logits = np.zeros((2, tree.rows, SIZES["vocab_size"]), np.float32)
    for b, length in enumerate(LENGTHS):
        for row in range(tree.rows):
            path = [row]
            while path[0]:
                path.insert(0, int(tree.shape.parent[path[0]]))
            ids = np.concatenate([tokens[b, :length], tree_tokens[b, path]])
            tree_logits[b, row] = logits_of(model, ids[None])[0, -1]
    ids = tokens[0].tolist()
    for _ in range(GREEDY):
        ids.append(int(logits_of(model, [ids])[0, -1].argmax()))
    golden = {
        "greedy": np.array(ids[-GREEDY:], np.int32),
        "tokens": tokens.astype(np.int32),
        "lengths": np.array(LENGTHS, np.int32),
        "logits": logits_of(model, tokens),
        "tree_tokens": tree_tokens.astype(np.int32),
        "tree_logits": tree_logits,
    }
    return model, golden


@torch.no_grad()
def add_mtp(folder, model, golden):
    """Turns a Qwen2 checkpoint into a MiMo one with a head, and adds the head's outputs."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    cfg = read_config(folder)
    head = {k: v.bfloat16() for k, v in random_head_tensors(cfg, seed=9).items()}
    tensors = load_file(folder / "model.safetensors") | head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rename = {
        "token_layernorm": "enorm",
        "hidden_layernorm": "hnorm",
        "input_proj": "eh_proj",
        "final_layernorm": "shared_head.norm",
    }
    other = {}
    for name, tensor in head.items():
        _, _, _, leaf = name.split(".", 3)
        for ours, theirs in rename.items():
            leaf = leaf.replace(ours, theirs)
        if leaf == "eh_proj.weight":
            h, e = tensor.chunk(2, dim=1)
            tensor = torch.cat([e, h], dim=1)
        other[f"model.layers.{cfg.num_layers}.{leaf}"] = tensor.contiguous()
    save_file(other, folder / "head_deepseek.safetensors", metadata={"format": "pt"})

    ids = torch.as_tensor(golden["tokens"][0]).long()
    hidden = model.model(ids[None]).last_hidden_state[0]
    embedded = model.model.embed_tokens(ids)
    steps = [torch.roll(embedded, -(1 + s), 0) for s in range(3)]
    head = {k: v.float() for k, v in head.items()}
    outputs = mtp_oracle(head, cfg, hidden, steps, hidden_first=True)
    golden["mtp_outputs"] = torch.stack(outputs).numpy()
    golden["mtp_hidden"] = hidden.numpy()


def main():
    transformers.logging.set_verbosity_error()
    for seed, (name, (config_name, extra)) in enumerate(FAMILIES.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model, golden = body(folder, config_name, extra, seed)
        if name == "mimo":
            add_mtp(folder, model, golden)
        np.savez_compressed(folder / "golden.npz", **golden)


if __name__ == "__main__":
    main()
