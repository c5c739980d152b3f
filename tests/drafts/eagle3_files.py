"""Writes EAGLE-3 heads as others do, by numpy: random weights, a config, files in both layouts.

Nothing of `specjax` takes part, so that reading can be compared with what was meant. The layouts
are those of SafeAILab and SpecForge (`midlayer.*`, a config like that of a model) and of vLLM's
speculators (`layers.0.*`, a config with `transformer_layer_config`).
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


@dataclasses.dataclass(frozen=True)
class Body:
    """Sizes of the policy that a head drafts for.

    Attributes:
      width: of its hidden states.
      layers: number of its layers.
      vocab: number of its tokens.
    """

    width: int
    layers: int
    vocab: int


@dataclasses.dataclass(frozen=True)
class Eagle3:
    """What a head computes, and how its files say so.

    Attributes:
      boundaries: hidden states of the policy: boundary b is the input of layer b, before any norm.
        None: the default of three, which files do not list. (): the final state after the norm,
        without a product (`use_aux_hidden_state: false`).
      said: where files list the boundaries: `top`, as they are; `nested`, as layers whose output
        they are.
      norm_before_residual: whether the residual of the first layer is normed.
      fc_norm: norm before the product with the states: `none`, `joined` or `each`.
      norm_output: whether the next step takes the state after the final norm.
      backbone: `llama`, or `qwen3`, whose queries and keys are normed.
      layers: number of layers.
      width: of the head; the policy's, unless it has an embedding of its own.
      heads: number of query heads.
      kv_heads: number of key and value heads.
      head_dim: size of a head.
      hidden: width of the mlp.
      vocab: number of draft tokens; None: all tokens of the policy, and no list of them.
      own_embedding: whether the head has an embedding.
      own_head: whether the head has a language-model head.
      windows: of each layer the number of positions that a row sees, its own included; None: all.
        (): no layer has one, and files do not say it.
      biases: projections of attention that have biases: ``, `qkv` or `qkvo`.
      mask_token: token of the masks of a P-EAGLE head, which drafts all tokens at once; None: an
        EAGLE-3 head.
      theta: base of RoPE.
      eps: of the norms.
      seed: of the weights.
    """

    boundaries: tuple[int, ...] | None = None
    said: str = "top"
    norm_before_residual: bool = False
    fc_norm: str = "none"
    norm_output: bool = False
    backbone: str = "llama"
    layers: int = 1
    width: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    hidden: int = 24
    vocab: int | None = None
    own_embedding: bool = False
    own_head: bool = True
    windows: tuple[int | None, ...] = ()
    biases: str = ""
    mask_token: int | None = None
    theta: float = 10000.0
    eps: float = 1e-6
    seed: int = 0

    def boundaries_for(self, body: Body) -> tuple[int, ...]:
        """Those that the head takes, in the order in which it takes them."""
        if self.boundaries is None:
            return 2, body.layers // 2, body.layers - 3
        return self.boundaries

    def draft_tokens(self, body: Body) -> np.ndarray:
        """[C] ids of the policy's tokens that are drafted, ascending."""
        if self.vocab is None:
            return np.arange(body.vocab)
        rng = np.random.default_rng(self.seed + 1000)
        return np.sort(rng.permutation(body.vocab)[: self.vocab])

    def tensors(self, body: Body) -> dict[str, np.ndarray]:
        """Random weights, by the names of a plain layout; matrices are [out, in]."""
        rng = np.random.default_rng(self.seed)
        d, dims = self.width, self.head_dim
        tokens = self.draft_tokens(body)
        found: dict[str, np.ndarray] = {}

        def matrix(name, out, into, scale=1.0):
            found[f"{name}.weight"] = rng.normal(0, scale / np.sqrt(into), (out, into))

        def norm(name, size):
            found[f"{name}.weight"] = rng.uniform(0.5, 1.5, size)

        taps = self.boundaries_for(body)
        if taps:
            matrix("fc", d, len(taps) * body.width)
            if self.fc_norm == "joined":
                norm("input_norm", len(taps) * body.width)
            if self.fc_norm == "each":
                for i in range(len(taps)):
                    norm(f"fc_norm.{i}", body.width)
        for i in range(self.layers):
            prefix, into = f"layers.{i}", 2 * d if i == 0 else d
            norm(f"{prefix}.input_layernorm", d)
            if i == 0:
                norm(f"{prefix}.hidden_norm", d)
            norm(f"{prefix}.post_attention_layernorm", d)
            matrix(f"{prefix}.self_attn.q_proj", self.heads * dims, into, 2.0)
            matrix(f"{prefix}.self_attn.k_proj", self.kv_heads * dims, into, 2.0)
            matrix(f"{prefix}.self_attn.v_proj", self.kv_heads * dims, into, 2.0)
            matrix(f"{prefix}.self_attn.o_proj", d, self.heads * dims, 2.0)
            for x in self.biases:
                rows = len(found[f"{prefix}.self_attn.{x}_proj.weight"])
                found[f"{prefix}.self_attn.{x}_proj.bias"] = rng.normal(0, 0.5, rows)
            if self.backbone == "qwen3":
                norm(f"{prefix}.self_attn.q_norm", dims)
                norm(f"{prefix}.self_attn.k_norm", dims)
            matrix(f"{prefix}.mlp.gate_proj", self.hidden, d, 2.0)
            matrix(f"{prefix}.mlp.up_proj", self.hidden, d, 2.0)
            matrix(f"{prefix}.mlp.down_proj", d, self.hidden, 2.0)
        norm("norm", d)
        if self.own_head:
            matrix("lm_head", len(tokens), d, 3.0)
        if self.own_embedding:
            found["embed_tokens.weight"] = rng.normal(0, 1, (body.vocab, d))
        if self.mask_token is not None:
            found["mask_hidden"] = rng.normal(0, 1, (1, 1, len(taps) * body.width))
        found = {name: x.astype(np.float32) for name, x in found.items()}
        if self.vocab is not None:
            found["d2t"] = tokens - np.arange(len(tokens))
            found["t2d"] = np.isin(np.arange(body.vocab), tokens)
        return found

    def layer_config(self, body: Body) -> dict:
        sliding = {}
        if self.windows:
            kinds = ["full_attention" if w is None else "sliding_attention" for w in self.windows]
            size = next((w for w in self.windows if w is not None), None)
            sliding = {
                "layer_types": kinds,
                "sliding_window": size,
                "use_sliding_window": bool(size),
            }
        return {
            "model_type": self.backbone,
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": bool(self.biases),
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "max_position_embeddings": 512,
            "vocab_size": body.vocab,
            **sliding,
        }

    def config(self, body: Body, layout: str) -> dict:
        """The content of config.json."""
        taps, vocab = self.boundaries, self.vocab or body.vocab
        switches = {
            "draft_vocab_size": vocab,
            "target_hidden_size": body.width,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.fc_norm == "joined",
            "fc_norm": self.fc_norm == "each",
            "norm_output": self.norm_output,
            "tie_word_embeddings": False,
        }
        if taps and self.said == "top":
            switches["eagle_aux_hidden_state_layer_ids"] = list(taps)
        nested = {}
        if taps and self.said == "nested":
            nested["eagle_aux_hidden_state_layer_ids"] = [b - 1 for b in taps]
        if taps == ():
            nested["use_aux_hidden_state"] = False
        if self.mask_token is not None:
            switches["mask_token_id"] = self.mask_token
        if nested:
            switches["eagle_config"] = {"use_aux_hidden_state": True, **nested}
        if layout == "safeailab":
            return {
                "architectures": [f"{self.backbone.capitalize()}ForCausalLMEagle3"],
                **self.layer_config(body),
                **switches,
            }
        kind = "eagle3" if self.mask_token is None else "peagle"
        return {
            "architectures": ["Eagle3Speculator" if kind == "eagle3" else "PEagleSpeculator"],
            "speculators_model_type": kind,
            "speculators_version": "0.3.0",
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": "policy", "architectures": ["LlamaForCausalLM"]},
            },
            "transformer_layer_config": self.layer_config(body),
            **switches,
        }

    def write(self, path: Path, body: Body, layout: str, tensors: dict | None = None) -> Path:
        """Writes a directory with safetensors and config.json."""
        path.mkdir(parents=True)
        tensors = self.tensors(body) if tensors is None else tensors
        save_file(named(tensors, layout), path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(self.config(body, layout), indent=1))
        return path


def named(tensors: dict[str, np.ndarray], layout: str) -> dict[str, np.ndarray]:
    """The tensors by the names of a layout: the first layer of the plain one is `midlayer`."""
    if layout == "speculators":
        return dict(tensors)
    return {name.replace("layers.0.", "midlayer."): x for name, x in tensors.items()}
