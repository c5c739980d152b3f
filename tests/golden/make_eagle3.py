"""Makes golden/eagle3: EAGLE-3 heads as others write them, and what torch drafts with them.

    python tests/golden/make_eagle3.py

It needs torch. A tiny random policy, and heads that were trained for a moment on its greedy texts,
so that a wrong switch is seen in the accept length. Every head has files in one of the layouts.
golden.npz has the prompts and the policy's greedy texts, and of each head: the logits of its
drafts at every step of a chain, the tokens of chains and trees, and how many rounds each prompt
takes. The torch implementation is tests/drafts/eagle3_torch.py.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "drafts"))

from eagle3_files import Eagle3, named  # noqa: E402
from eagle3_torch import (  # noqa: E402
    Head,
    Policy,
    PolicySizes,
    counted_rounds,
    policy_tensors,
    train,
    write_policy,
)

SIZES = PolicySizes()
PROMPTS, SHORT, LENGTH = 16, 6, 24  # prompts of 6 tokens, and 24 after each
DRAFTED, CONTEXT = 4, 12  # chains and trees of 4 texts are kept, below the 12th token
CHAIN, TREE = (1, 1, 1), (3, 2)
SMALL = {"heads": 2, "kv_heads": 1, "head_dim": 8, "hidden": 20}
# Each switch in each of its states, each layout, each kind of file.
HEADS = {
    "plain": ("safeailab", {"vocab": 40}),
    "pickled": ("safeailab", {"vocab": 48, "own_head": True, "theta": 500.0}),
    "nested": (
        "safeailab",
        {"boundaries": (2, 5, 8), "said": "nested", "fc_norm": "joined", "backbone": "qwen3"},
    ),
    "final_state": ("safeailab", {"boundaries": (), "own_head": False, "vocab": 40}),
    "speculators": ("speculators", {"norm_before_residual": True, "own_embedding": True}),
    "speculators_3_1": (
        "speculators",
        {"boundaries": (1, 4, 7), "fc_norm": "each", "norm_output": True, "vocab": 40},
    ),
    "two_layers": (
        "speculators",
        {"boundaries": (3, 6), "layers": 2, "norm_before_residual": True, "backbone": "qwen3"},
    ),
}


def main() -> None:
    out = HERE / "eagle3"
    shutil.rmtree(out, ignore_errors=True)
    tensors = policy_tensors(SIZES, seed=0)
    write_policy(out / "policy", SIZES, tensors)
    policy, rng = Policy(SIZES, tensors), np.random.default_rng(0)
    prompts = rng.integers(0, SIZES.vocab, (PROMPTS, SHORT))
    texts = policy.greedy(prompts, LENGTH)
    found = {"prompts": prompts, "texts": texts}
    for seed, (name, (layout, switches)) in enumerate(HEADS.items()):
        cfg = Eagle3(seed=seed, **SMALL, **switches)
        made = cfg.tensors(SIZES.body)
        made |= train(Head(cfg, policy, made), texts[::2], steps=60)
        if name == "pickled":  # SafeAILab's own files are in half precision
            made = {n: x.astype(np.float16) if n.endswith("weight") else x for n, x in made.items()}
        write(cfg, out / name, layout, made, pickle=name == "pickled")
        head, lengths = Head(cfg, policy, made), []
        for kind, widths in (("chain", CHAIN), ("tree", TREE)):
            rounds = [len(counted_rounds(t.tolist(), SHORT, widths, head)) for t in texts]
            found[f"{name}.{kind}_rounds"] = np.array(rounds)
            lengths.append(f"{PROMPTS * LENGTH / sum(rounds):.2f} by {kind}s")
        contexts = [text[:CONTEXT].tolist() for text in texts[:DRAFTED]]
        chains = [head.chain(context, len(CHAIN)) for context in contexts]
        logits = [head.draft_logits(c, path[:-1]) for c, path in zip(contexts, chains, strict=True)]
        trees = [[path[-1] for path in head.tree(context, TREE)] for context in contexts]
        found |= {
            f"{name}.chain": np.array(chains),
            f"{name}.logits": torch.stack(logits).numpy().astype(np.float32),
            f"{name}.tree": np.array(trees),
        }
        print(f"{name}: tokens per round {', '.join(lengths)}", flush=True)
    np.savez_compressed(out / "golden.npz", **found)


def write(cfg: Eagle3, path: Path, layout: str, tensors: dict, pickle: bool) -> None:
    cfg.write(path, SIZES.body, layout, tensors)
    if pickle:
        made = {n: torch.as_tensor(x) for n, x in named(tensors, layout).items()}
        torch.save(made, path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()


if __name__ == "__main__":
    main()
