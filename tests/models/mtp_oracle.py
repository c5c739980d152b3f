"""An MTP head in torch, written from the papers and sharing no code with specjax.

It runs one position at a time, the way decoding does: a query sees the rows its module has for the
positions up to its own, then the rows of its own later steps. Weights carry MiMo's names.
"""

import torch
from torch.nn import functional as F


def _rope(x, position, rope):
    """Rotates the first part of [heads, H] as complex numbers, whose first half is real."""
    width, theta = rope.width(x.shape[-1]), rope.theta
    x, rest = x[:, :width], x[:, width:]
    half = width // 2
    freqs = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(half, dtype=torch.float64), position * freqs)
    turned = torch.complex(x[:, :half].double(), x[:, half:].double()) * turn
    return torch.cat([turned.real.float(), turned.imag.float(), rest], -1)


def _qkv(weights, x, position, cfg):
    def project(which, heads):
        bias = weights.get(f"self_attn.{which}_proj.bias")
        out = F.linear(x, weights[f"self_attn.{which}_proj.weight"], bias).view(heads, -1)
        scale = weights.get(f"self_attn.{which}_norm.weight")
        return out if scale is None else F.rms_norm(out, scale.shape, scale, cfg.rms_norm_eps)

    mixer = cfg.layers[0].mixer
    q, k = project("q", mixer.num_heads), project("k", mixer.num_kv_heads)
    v = project("v", mixer.num_kv_heads)
    return _rope(q, position, mixer.rope), _rope(k, position, mixer.rope), v


def _attend(q, rows):
    """One query [N, H] over a list of (key, value) [K, H]."""
    k, v = (torch.stack(part, 1) for part in zip(*rows, strict=True))
    out = F.scaled_dot_product_attention(q[None, :, None], k[None], v[None], enable_gqa=True)
    return out.reshape(-1)


def mtp_oracle(tensors, cfg, hidden, step_embeddings, hidden_first, mlps=None):
    """Outputs of every step, each [S, D], for one sequence at positions 0..S-1.

    Args:
      tensors: `model.mtp_layers.i.*`. cfg: sizes, eps, theta, mtp_num_layers, mtp_recycle.
      hidden: [S, D] of the target. step_embeddings: per step, [S, D].
      hidden_first: which operand the first D columns of `input_proj` belong to.
      mlps: function of each module that takes the place of its dense mlp.
    """
    modules = []
    for i in range(cfg.mtp_num_layers):
        prefix = f"model.mtp_layers.{i}."
        modules.append({k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)})

    def norm(x, weights, name):
        return F.rms_norm(x, x.shape[-1:], weights[name], cfg.rms_norm_eps)

    outputs, base, own = [], [], []
    for step, embedded in enumerate(step_embeddings):
        index = min(step, len(modules) - 1)
        w, first_use = modules[index], step == index
        if first_use:
            base, own = [], [[] for _ in range(len(hidden))]
        out, recycled = [], []
        for t in range(len(hidden)):
            h = norm(hidden[t], w, "hidden_layernorm.weight")
            e = norm(embedded[t], w, "token_layernorm.weight")
            x = F.linear(torch.cat([h, e] if hidden_first else [e, h]), w["input_proj.weight"])
            q, k, v = _qkv(w, norm(x, w, "input_layernorm.weight"), t + step, cfg)
            (base if first_use else own[t]).append((k, v))
            attended = _attend(q, base[: t + 1] + own[t])
            x = x + F.linear(attended, w["self_attn.o_proj.weight"])
            y = norm(x, w, "post_attention_layernorm.weight")
            if mlps is not None:
                x = x + mlps[index](y)
            else:
                gate = F.silu(F.linear(y, w["mlp.gate_proj.weight"]))
                up = F.linear(y, w["mlp.up_proj.weight"])
                x = x + F.linear(gate * up, w["mlp.down_proj.weight"])
            out.append(norm(x, w, "final_layernorm.weight"))
            recycled.append(out[-1] if cfg.mtp_recycle == "post_norm" else x)
        outputs.append(torch.stack(out))
        hidden = torch.stack(recycled)
    return outputs


def random_head_tensors(cfg, seed):
    """Random `model.mtp_layers.i.*` tensors of a Qwen2-like head (biases, no q/k norm)."""
    generator = torch.Generator().manual_seed(seed)
    mixer = cfg.layers[0].mixer
    d, f = cfg.hidden_size, cfg.layers[0].mlp.intermediate_size
    q_width, kv_width = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    shapes = {"input_proj.weight": (d, 2 * d), "self_attn.o_proj.weight": (d, q_width)}
    for which, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
        shapes[f"self_attn.{which}_proj.weight"] = (width, d)
        if mixer.qkv_bias:
            shapes[f"self_attn.{which}_proj.bias"] = (width,)
    if mixer.qk_norm:
        shapes |= {f"self_attn.{w}_norm.weight": (mixer.head_dim,) for w in "qk"}
    shapes |= {f"mlp.{name}_proj.weight": (f, d) for name in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (d, f)
    for name in ("token", "hidden", "final", "input", "post_attention"):
        shapes[f"{name}_layernorm.weight"] = (d,)
    tensors = {}
    for i in range(cfg.mtp_num_layers):
        for name, shape in shapes.items():
            draw = torch.randn(shape, generator=generator)
            is_norm = len(shape) == 1 and "norm" in name
            tensors[f"model.mtp_layers.{i}.{name}"] = 1 + 0.1 * draw if is_norm else 0.3 * draw
    return tensors
