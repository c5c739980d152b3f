"""Makes tests/golden/trl: what TRL's GRPOTrainer computes of a tiny model; needs torch and trl.

    python tests/golden/make_trl.py

Random weights of a Llama of one layer, fixed prompts and completions, advantages, and old
log-probabilities so far from the model's that clipping occurs. For each objective: TRL's loss and
its gradient in every parameter, in the file layout of the weights. `trl.json` has the versions that
made them, and the settings of TRL's configuration. With `mask_truncated_completions` the completion
of the largest length is masked, as TRL does where it generates completions.
"""

import importlib.metadata
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from datasets import Dataset
from datasets.table import InMemoryTable
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from trl import GRPOConfig, GRPOTrainer

FOLDER = Path(__file__).resolve().parent / "trl"
VOCAB, TEMPERATURE, BETA, MAX_TOKENS = 24, 0.8, 0.1, 9
PROMPT, LENGTHS = 3, (3, 5, 8, 4, 7, 9)
DAPO = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}
CASES = {
    "grpo": {"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.2},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon": 0.2, "epsilon_high": 0.2},
    "dapo": DAPO,
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "dual_clip": {**DAPO, "delta": 1.5},
    "kl": {**DAPO, "beta": BETA, "use_bias_correction_kl": False},
    "entropy": {**DAPO, "entropy_coef": 0.05},
}
CASES |= {
    f"{name}_truncated": {**CASES[name], "mask_truncated_completions": True}
    for name in ("grpo", "dr_grpo", "dapo")
}


def tiny_model():
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=64,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * draw if "norm" in name else 0.5 * draw)
    return model


def logprobs_of(model, tokens, mask):
    """Log-probabilities of the completions at the temperature, by transformers alone."""
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask).logits[:, PROMPT - 1 : -1] / TEMPERATURE
    found = logits.log_softmax(-1)
    return found.gather(-1, tokens[:, PROMPT:, None])[..., 0]


def inputs_of(model):
    rng = np.random.default_rng(0)
    samples, longest = len(LENGTHS), max(LENGTHS)
    mask = (np.arange(longest)[None] < np.array(LENGTHS)[:, None]).astype(np.int64)
    prompts = rng.integers(3, VOCAB, (samples // 3, PROMPT)).repeat(3, axis=0)
    completions = rng.integers(3, VOCAB, (samples, longest)) * mask
    whole = np.concatenate([np.ones_like(prompts), mask], axis=1)
    tokens = torch.as_tensor(np.concatenate([prompts, completions], axis=1))
    new = logprobs_of(model, tokens, torch.as_tensor(whole)).numpy()
    off = rng.normal(0, 0.4, new.shape) * mask
    for i in (0, 3):  # the ratio of these samples as a whole is within GSPO's bounds
        off[i] -= (off[i].sum() / LENGTHS[i] - 1e-4) * mask[i]
    ref = (new + rng.normal(0, 0.5, new.shape)) * mask
    return {
        "prompt_ids": prompts,
        "completion_ids": completions,
        "completion_mask": mask,
        "advantages": np.array([1.2, -0.7, -0.5, -1.1, 0.3, 0.8], np.float32),
        "old_per_token_logps": ((new - off) * mask).astype(np.float32),
        "ref_per_token_logps": ref.astype(np.float32),
    }


def trainer_of(model, settings, folder):
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>", bos_token="<s>", eos_token="</s>",
    )  # fmt: skip
    config = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to=[], num_generations=3,
        per_device_train_batch_size=len(LENGTHS), gradient_accumulation_steps=1,
        temperature=TEMPERATURE, max_completion_length=MAX_TOKENS,
        **{"beta": 0.0, **settings},
    )  # fmt: skip
    prompts = InMemoryTable.from_pydict({"prompt": ["w3 w4"] * len(LENGTHS)})
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset(prompts, fingerprint="prompts"),
        processing_class=tokenizer,
    )


def main():
    FOLDER.mkdir(exist_ok=True)
    model = tiny_model()
    given = inputs_of(model)
    model.save_pretrained(FOLDER)
    (FOLDER / "generation_config.json").unlink(missing_ok=True)
    # For `beta` the trainer loads a reference from where the model is, which `inputs` replace.
    model = transformers.LlamaForCausalLM.from_pretrained(FOLDER)
    inputs = {name: torch.as_tensor(value) for name, value in given.items()}
    inputs["prompt_mask"] = torch.ones_like(inputs["prompt_ids"])
    is_truncated = torch.as_tensor(LENGTHS)[:, None] == MAX_TOKENS
    losses = {}
    for name, settings in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(model, settings, folder)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        model.zero_grad()
        own = dict(inputs)
        if trainer.mask_truncated_completions:
            own["completion_mask"] = own["completion_mask"] * ~is_truncated
        own["num_items_in_batch"] = own["completion_mask"].sum()
        if not trainer.beta:
            del own["ref_per_token_logps"]
        loss = trainer.compute_loss(trainer.model, own)
        loss.backward()
        losses[name] = loss.item()
        gradients = {n: p.grad.clone().contiguous() for n, p in model.named_parameters()}
        save_file(gradients, FOLDER / f"{name}.safetensors", {"format": "pt"})
    np.savez_compressed(FOLDER / "inputs.npz", **given)
    versions = {p: importlib.metadata.version(p) for p in ("trl", "torch", "transformers")}
    about = {
        "versions": versions,
        "temperature": TEMPERATURE,
        "beta": BETA,
        "max_completion_length": MAX_TOKENS,
        "settings": CASES,
        "losses": losses,
    }
    (FOLDER / "trl.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
