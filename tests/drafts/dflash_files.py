"""Writes DFlash heads as others do, by numpy: random weights, a config, files in both layouts.

Nothing of `specjax` takes part. The layouts are those of the authors and SpecForge (`z-lab`), and
of vLLM's speculators.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
from eagle3_files import Body
from safetensors.numpy import save_file


@dataclasses.dataclass(frozen=True)
class DFlash:
    """What a head computes.

    Attributes:
      boundaries: hidden states of the policy: boundary b is the input of layer b, before any norm.
      mask_token: token that stands for those that are drafted.
      block: rows of its blocks, the root's included.
      layers: number of layers.
      heads: number of query heads.
      kv_heads: number of key and value heads.
      head_dim: size of a head.
      hidden: width of the mlp.
      columns: draft tokens in the order of its files; None: all tokens of the policy.
      theta: base of RoPE.
      eps: of the norms.
      seed: of the weights.
    """

    boundaries: tuple[int, ...]
    mask_token: int
    block: int
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    hidden: int = 20
    columns: tuple[int, ...] | None = None
    theta: float = 5000.0
    eps: float = 1e-6
    seed: int = 0

    def tensors(self, body: Body, dtype=np.float32) -> dict[str, np.ndarray]:
        """Random weights by the names of both layouts; matrices are [out, in]."""
        d, h, queries, keys = body.width, self.head_dim, self.heads, self.kv_heads
        shapes = {"fc": (d, len(self.boundaries) * d), "hidden_norm": (d,), "norm": (d,)}
        for i in range(self.layers):
            attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
            shapes |= {
                f"{attention}.q_proj": (queries * h, d), f"{attention}.q_norm": (h,),
                f"{attention}.k_proj": (keys * h, d), f"{attention}.k_norm": (h,),
                f"{attention}.v_proj": (keys * h, d), f"{attention}.o_proj": (d, queries * h),
                f"{mlp}.gate_proj": (self.hidden, d), f"{mlp}.up_proj": (self.hidden, d),
                f"{mlp}.down_proj": (d, self.hidden), f"layers.{i}.input_layernorm": (d,),
                f"layers.{i}.post_attention_layernorm": (d,),
            }  # fmt: skip
        if self.columns is not None:
            shapes["lm_head"] = (len(self.columns), d)
        rng = np.random.default_rng(self.seed)
        found = {f"{name}.weight": rng.normal(size=s).astype(dtype) for name, s in shapes.items()}
        if self.columns is not None:
            tokens = np.array(self.columns, np.int64)
            found["d2t"] = tokens - np.arange(len(tokens))
            found["t2d"] = np.isin(np.arange(body.vocab), tokens)
        return found

    def layer_config(self, body: Body) -> dict:
        return {
            "model_type": "qwen3", "hidden_size": body.width, "intermediate_size": self.hidden,
            "vocab_size": body.vocab, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "num_hidden_layers": self.layers,
            "head_dim": self.head_dim, "rms_norm_eps": self.eps, "max_position_embeddings": 512,
            "rope_theta": self.theta,
        }  # fmt: skip

    def config(self, body: Body, layout: str) -> dict:
        """The content of config.json; of `z-lab` as z-lab's Qwen3-8B-DFlash-b16 has it."""
        boundaries, layers = list(self.boundaries), self.layer_config(body)
        if layout == "z-lab":
            ids = [boundary - 1 for boundary in boundaries]
            return {
                "architectures": ["DFlashDraftModel"],
                "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
                **layers,
                "block_size": self.block,
                "dflash_config": {"mask_token_id": self.mask_token, "target_layer_ids": ids},
                "num_target_layers": body.layers,
                "layer_types": ["full_attention"] * self.layers,
                "use_sliding_window": False,
                "sliding_window": None,
            }
        return {
            "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
            "transformer_layer_config": layers, "block_size": self.block,
            "draft_vocab_size": body.vocab if self.columns is None else len(self.columns),
            "aux_hidden_state_layer_ids": boundaries, "mask_token_id": self.mask_token,
            "projector_type": "dflash", "sample_from_anchor": False,
            "sliding_window_non_causal": False, "shift_label": False,
        }  # fmt: skip

    def write(self, path: Path, body: Body, layout: str) -> Path:
        """Writes a directory with safetensors and config.json."""
        return written(path, self.config(body, layout), self.tensors(body))


def written(path: Path, raw: dict, tensors: dict[str, np.ndarray]) -> Path:
    """Writes a directory with a config and tensors."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, path / "model.safetensors")
    return path
