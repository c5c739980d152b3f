"""EAGLE-3 heads in torch, from the papers' equations, to compare ours with.

Li et al. 2025 (arXiv 2503.01840); the switches of later heads are those of `eagle3_files.Eagle3`.
There is no cache: every drafted token comes from a full pass over the text and the path drafted so
far. Sums are in float64. Nothing of `specjax` takes part, and no config is read: weights come by
the names of a plain layout, from `Eagle3.tensors` or `policy_tensors`.

Row t of the head takes the policy's states after token t and the embedding of token t + 1, and
predicts token t + 2.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from eagle3_files import Body, Eagle3
from safetensors.numpy import save_file
from torch.nn.functional import cross_entropy, linear, pad, silu

torch.set_num_threads(1)


@dataclasses.dataclass(frozen=True)
class PolicySizes:
    """A Llama model, or a Qwen3 model where queries and keys are normed."""

    vocab: int = 64
    width: int = 16
    hidden: int = 24
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    qk_norm: bool = False
    tied: bool = False
    theta: float = 10000.0
    eps: float = 1e-6

    @property
    def body(self) -> Body:
        return Body(self.width, self.layers, self.vocab)

    def config(self) -> dict:
        """The content of config.json, as transformers writes it."""
        kind = "Qwen3" if self.qk_norm else "Llama"
        return {
            "architectures": [f"{kind}ForCausalLM"],
            "model_type": kind.lower(),
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "max_position_embeddings": 512,
            "tie_word_embeddings": self.tied,
            "eos_token_id": None,
            "bos_token_id": None,
        }


def write_policy(path: Path, sizes: PolicySizes, tensors: dict[str, np.ndarray]) -> Path:
    """Writes the directory of a policy."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(sizes.config(), indent=1))
    return path


def policy_tensors(sizes: PolicySizes, seed: int) -> dict[str, np.ndarray]:
    """Random weights by the names of transformers; what follows depends on several tokens."""
    rng, found = np.random.default_rng(seed), {}
    d, dims = sizes.width, sizes.head_dim

    def matrix(name, out, into, scale):
        found[f"{name}.weight"] = rng.normal(0, scale / np.sqrt(into), (out, into))

    def norm(name, size):
        found[f"{name}.weight"] = rng.uniform(0.6, 1.4, size)

    found["model.embed_tokens.weight"] = rng.normal(0, 1, (sizes.vocab, d))
    for i in range(sizes.layers):
        prefix = f"model.layers.{i}"
        norm(f"{prefix}.input_layernorm", d)
        norm(f"{prefix}.post_attention_layernorm", d)
        matrix(f"{prefix}.self_attn.q_proj", sizes.heads * dims, d, 2.0)
        matrix(f"{prefix}.self_attn.k_proj", sizes.kv_heads * dims, d, 2.0)
        matrix(f"{prefix}.self_attn.v_proj", sizes.kv_heads * dims, d, 1.5)
        matrix(f"{prefix}.self_attn.o_proj", d, sizes.heads * dims, 0.3)
        if sizes.qk_norm:
            norm(f"{prefix}.self_attn.q_norm", dims)
            norm(f"{prefix}.self_attn.k_norm", dims)
        matrix(f"{prefix}.mlp.gate_proj", sizes.hidden, d, 1.5)
        matrix(f"{prefix}.mlp.up_proj", sizes.hidden, d, 1.5)
        matrix(f"{prefix}.mlp.down_proj", d, sizes.hidden, 0.3)
    norm("model.norm", d)
    if not sizes.tied:
        matrix("lm_head", sizes.vocab, d, 3.0)
    return {name: x.astype(np.float32) for name, x in found.items()}


# --- layers ---------------------------------------------------------------------------------------


def rms_norm(x, weight, eps):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rotate(x, positions, theta):
    """RoPE on [.. R H]: the first half of a head is paired with the second."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() / theta ** (torch.arange(half).double() / half)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@dataclasses.dataclass(frozen=True)
class Layers:
    """What policy and head have in common: tensors, and how layers of a transformer use them."""

    tensors: dict[str, torch.Tensor]
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float

    def __getitem__(self, name):
        return self.tensors[f"{name}.weight"]

    def normed(self, name, x):
        return rms_norm(x, self[name], self.eps)

    def project(self, name, x):
        return linear(x, self[name], self.tensors.get(f"{name}.bias"))

    def attention(self, prefix, x, positions, sees, window=None):
        """Attention over rows [.. R D]; sees[i, j]: row i attends to row j.

        Args:
          window: number of positions that a row sees, its own included; None: all.
        """
        if window is not None:
            sees = sees & (positions[:, None] - positions[None] < window)

        def split(name, count):
            y = self.project(f"{prefix}.{name}_proj", x).unflatten(-1, (count, self.head_dim))
            if f"{prefix}.{name}_norm.weight" in self.tensors:
                y = self.normed(f"{prefix}.{name}_norm", y)
            return y.transpose(-3, -2)

        q, k, v = split("q", self.heads), split("k", self.kv_heads), split("v", self.kv_heads)
        q, k = rotate(q, positions, self.theta), rotate(k, positions, self.theta)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, -3) for y in (k, v))
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5
        mixed = scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v
        return self.project(f"{prefix}.o_proj", mixed.transpose(-3, -2).flatten(-2))

    def mlp(self, prefix, x):
        gate, up = linear(x, self[f"{prefix}.gate_proj"]), linear(x, self[f"{prefix}.up_proj"])
        return linear(silu(gate) * up, self[f"{prefix}.down_proj"])

    def block(self, prefix, x, positions, sees, window=None):
        """An ordinary layer, whose norms come first."""
        inner = self.normed(f"{prefix}.input_layernorm", x)
        x = x + self.attention(f"{prefix}.self_attn", inner, positions, sees, window)
        inner = self.normed(f"{prefix}.post_attention_layernorm", x)
        return x + self.mlp(f"{prefix}.mlp", inner)


def as_torch(tensors):
    return {name: torch.as_tensor(np.asarray(x)).double() for name, x in tensors.items()}


def causal(rows):
    return torch.ones(rows, rows).tril().bool()


class Policy:
    """The target.

    Args:
      tensors: weights by the names of transformers.
    """

    def __init__(self, sizes: PolicySizes, tensors: dict[str, np.ndarray]):
        self.sizes = sizes
        self.embedding = as_torch(tensors)["model.embed_tokens.weight"]
        plain = {name.removeprefix("model."): x for name, x in as_torch(tensors).items()}
        of = (sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.theta, sizes.eps)
        self.layers = Layers(plain, *of)
        self.lm_head = plain.get("lm_head.weight", self.embedding)

    def states(self, tokens) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Hidden states [.. S D] of tokens [.. S] at each boundary: the input of each layer, and
        the output of the last; and after the final norm."""
        x = self.embedding[torch.as_tensor(tokens)]
        rows = x.shape[-2]
        boundaries = [x]
        for i in range(self.sizes.layers):
            x = self.layers.block(f"layers.{i}", x, torch.arange(rows), causal(rows))
            boundaries.append(x)
        return boundaries, self.layers.normed("norm", x)

    def logits(self, tokens) -> torch.Tensor:
        return self.states(tokens)[1] @ self.lm_head.T

    def greedy(self, prompts, count) -> np.ndarray:
        """[N S + count] prompts [N S], each with the tokens that follow."""
        tokens = torch.as_tensor(prompts)
        for _ in range(count):
            tokens = torch.cat([tokens, self.logits(tokens)[:, -1:].argmax(-1)], 1)
        return tokens.numpy()


class Head:
    """An EAGLE-3 head for a policy.

    Args:
      cfg: what it computes.
      tensors: weights by the names of a plain layout.
    """

    def __init__(self, cfg: Eagle3, policy: Policy, tensors: dict[str, np.ndarray]):
        self.cfg, self.policy = cfg, policy
        floats = {n: x for n, x in tensors.items() if n.endswith((".weight", ".bias"))}
        of = (cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.theta, cfg.eps)
        self.layers = Layers(as_torch(floats), *of)
        # The target's id of draft token i is i + d2t[i].
        vocab = policy.sizes.vocab
        offsets = tensors.get("d2t", np.zeros(cfg.vocab or vocab, np.int64))
        self.ids = torch.arange(len(offsets)) + torch.as_tensor(np.asarray(offsets))

    @property
    def embedding(self):
        return self.layers.tensors.get("embed_tokens.weight", self.policy.embedding)

    @property
    def lm_head(self):
        return self.layers.tensors.get("lm_head.weight", self.policy.lm_head[self.ids])

    def inputs(self, tokens) -> torch.Tensor:
        """g of tokens [.. S]: what the head makes of the policy's states."""
        boundaries, final = self.policy.states(tokens)
        wanted = self.cfg.boundaries_for(self.policy.sizes.body)
        if not wanted:
            return final
        states = [boundaries[b] for b in wanted]
        if self.cfg.fc_norm == "each":
            states = [self.layers.normed(f"fc_norm.{i}", x) for i, x in enumerate(states)]
        joined = torch.cat(states, -1)
        if self.cfg.fc_norm == "joined":
            joined = self.layers.normed("input_norm", joined)
        return linear(joined, self.layers["fc"])

    def run(self, g, embedded, positions, sees):
        """Rows through the layers: logits [R C], and g of the next step [R D]."""
        of, windows = self.layers, self.cfg.windows or (None,) * self.cfg.layers
        normed = of.normed("layers.0.hidden_norm", g)
        u = torch.cat([of.normed("layers.0.input_layernorm", embedded), normed], -1)
        residual = normed if self.cfg.norm_before_residual else g
        a = residual + of.attention("layers.0.self_attn", u, positions, sees, windows[0])
        y = a + of.mlp("layers.0.mlp", of.normed("layers.0.post_attention_layernorm", a))
        for i in range(1, self.cfg.layers):
            y = of.block(f"layers.{i}", y, positions, sees, windows[i])
        out = of.normed("norm", y)
        return out @ self.lm_head.T, out if self.cfg.norm_output else y

    def draft_logits(self, context, path=(), g=None) -> torch.Tensor:
        """[len(path) + 1, C] logits below the root, the last of `context`, and below each token of
        a path under it.

        Args:
          g: `inputs` of a text that begins with the context, which do not depend on its end.
        """
        g = (self.inputs(context[:-1]) if g is None else g)[: len(context) - 1]
        tokens, found = list(context[1:]), []
        for following in (*path, None):
            positions = torch.arange(len(g))
            embedded = self.embedding[torch.as_tensor(tokens)]
            logits, states = self.run(g, embedded, positions, causal(len(g)))
            found.append(logits[-1])
            g, tokens = torch.cat([g, states[-1:]]), [*tokens, following]
        return torch.stack(found)

    def best(self, context, path, count, g=None) -> list[int]:
        """The target's ids of the best tokens below a path, the best first."""
        logits = self.draft_logits(context, path, g)[-1]
        return self.ids[logits.argsort(descending=True, stable=True)[:count]].tolist()

    def chain(self, context, steps) -> list[int]:
        """The tokens that are drafted below the root, one per step."""
        path = []
        for _ in range(steps):
            path += self.best(context, path, 1)
        return path

    def tree(self, context, widths) -> list[tuple[int, ...]]:
        """The paths of a tree that has so many children at every node of each level."""
        level, found = [()], []
        for width in widths:
            level = [(*p, t) for p in level for t in self.best(context, p, width)]
            found += level
        return found


def counted_rounds(text, start: int, widths, head: Head) -> list[int]:
    """Tokens that each round emits: the drafts that the text goes on with, and one more.

    Args:
      text: a prompt and the policy's greedy tokens after it.
      start: length of the prompt.
      widths: children per node of each level; ones are a chain.
    """
    emitted, g = [], head.inputs(text)
    while (at := start + sum(emitted)) < len(text):
        accepted = 0
        # Nothing is accepted below a token that the policy does not choose: that is not drafted.
        while accepted < len(widths) and at + accepted < len(text):
            path, following = text[at : at + accepted], text[at + accepted]
            if following not in head.best(text[:at], path, widths[accepted], g):
                break
            accepted += 1
        emitted.append(min(accepted + 1, len(text) - at))
    return emitted


def train(head: Head, texts: np.ndarray, steps: int, unroll: int = 3, rate: float = 2e-2) -> dict:
    """Trains all but token ids and the embedding on greedy texts [N S], with unrolled steps.

    In step k the row of token t takes what step k - 1 made of it, and sees the rows of step 0 up to
    its own, and its own of the later steps.

    Returns:
      the tensors that changed, in float32.
    """
    trained = {n: x for n, x in head.layers.tensors.items() if n != "embed_tokens.weight"}
    for x in trained.values():
        x.requires_grad_(True)
    place = torch.full((head.policy.sizes.vocab,), -100)  # no token to predict
    place[head.ids] = torch.arange(len(head.ids))
    tokens = torch.as_tensor(texts)
    rows = tokens.shape[1] - 1 - unroll  # as many as have all their labels
    own = torch.eye(rows).bool()
    optimizer = torch.optim.Adam(trained.values(), rate)
    for _ in range(steps):
        loss = 0.0
        positions, sees = torch.arange(rows), causal(rows)
        g, embedded = head.inputs(tokens[:, :rows]), head.embedding[tokens[:, 1 : 1 + rows]]
        for k in range(unroll):
            logits, states = head.run(g, embedded, positions, sees)
            following = tokens[:, 2 + k : 2 + k + rows]
            loss = loss + cross_entropy(logits[:, -rows:].flatten(0, 1), place[following].flatten())
            g = torch.cat([g, states[:, -rows:]], 1)
            embedded = torch.cat([embedded, head.embedding[following]], 1)
            positions = torch.cat([positions, torch.arange(rows) + k + 1])
            sees = torch.cat([pad(sees, (0, rows)), torch.cat([sees[-rows:], own], 1)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for x in trained.values():
        x.requires_grad_(False)
    return {n: x.numpy().astype(np.float32) for n, x in trained.items()}
