"""`transformers.generate` on torch, a peer of `bench.throughput peers`: plain and assisted.

Assisted generation takes one sample at a time. Two ways to draft are tried, and the fastest counts:

    prompt lookup   `prompt_lookup_num_tokens`, for several numbers
    MTP             `use_mtp`, with the policy's own head, where transformers can take it

transformers drafts as many tokens with MTP as the checkpoint has modules, so the one module is
written as one, two or three equal ones into a directory of its own. transformers would also read
the head from disk at every call; here it is loaded once, to its advantage.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

MISSING = (
    "this bench compares with torch, which is not installed (specjax itself does not need it): "
    "pip install torch --index-url of the CPU wheels, or leave transformers out of --peers"
)
LOOKUPS = (2, 4, 8)
MTP_DEPTHS = (1, 2, 3)
TRIALS = 2  # of every way to draft, before one is chosen
HEAD_FILE = "mtp.safetensors"


def import_torch():
    """Imports torch.

    Raises:
      ModuleNotFoundError: it is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(MISSING) from error
    return torch


class TorchPeer:
    """A policy in float32 that generates in static batches, in the given order.

    Args:
      model: Hugging Face directory.
      batch: samples per batch.
      threads: number of torch's threads.
      ignore_eos: whether only the limit ends a sample.
      options: further arguments of `generate`; `use_mtp` needs a directory of `mtp_directory`.
    """

    def __init__(
        self,
        model: str | Path,
        batch: int,
        threads: int,
        ignore_eos: bool = False,
        options: dict[str, Any] | None = None,
    ):
        self.torch = torch = import_torch()
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.policy = self.policy.eval().to(self.device)
        self.batch, self.threads, self.options = batch, threads, options or {}
        stops = self.policy.generation_config.eos_token_id
        self.stops = {stops} if isinstance(stops, int) else set(stops or ())
        if ignore_eos:
            self.stops = set()
            self.policy.generation_config.eos_token_id = None
        self.head = None
        if self.options.get("use_mtp"):
            self._load_head()

    def _load_head(self) -> None:
        from transformers.modeling_layers import MtpModel

        cfg = self.policy.config
        layers = range(cfg.num_hidden_layers, cfg.num_hidden_layers + cfg.num_mtp_layers)
        # The names by which transformers separates the head's weights from the body's.
        self.policy._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{i}\." for i in layers]
        self.head = MtpModel.from_pretrained(self.policy, device_map={"": self.device}).eval()

    def __call__(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], seed: int
    ) -> list[list[int]]:
        """Generates the response to every prompt; a stop token is the last of its response."""
        self.torch.set_num_threads(self.threads)
        self.torch.manual_seed(seed)
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), self.batch):
            here = slice(first, first + self.batch)
            rows = self._generate(prompts[here], max(limits[here]))
            outputs += [self._cut(row, n) for row, n in zip(rows, limits[here], strict=True)]
        return outputs

    def _generate(self, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        torch, width = self.torch, max(map(len, prompts))
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros((len(prompts), width), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode(), self._kept_head():
            out = self.policy.generate(
                ids.to(self.device),
                attention_mask=mask.to(self.device),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=most,
                pad_token_id=0,
                **self.options,
            )
        return out[:, width:].tolist()

    def _kept_head(self):
        if self.head is None:
            return contextlib.nullcontext()
        from transformers.modeling_layers import MtpModel

        return mock.patch.object(MtpModel, "from_pretrained", lambda *a, **k: self.head)

    def _cut(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Cuts a row at its own end, behind which the batch went on."""
        stop = next((i + 1 for i, token in enumerate(tokens) if token in self.stops), limit)
        return list(tokens[: min(stop, limit)])


def mtp_directory(model: str | Path, target: Path, depth: int) -> str | None:
    """Writes a policy with its MTP head as transformers reads it, as `depth` equal modules.

    Returns:
      why transformers cannot draft with this head; None if it can, and `target` was written.
    """
    source = Path(model)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if not (source / HEAD_FILE).exists():
        return f"the policy has no {HEAD_FILE}"
    from safetensors.torch import load_file, save_file

    head, first = load_file(source / HEAD_FILE), f"model.layers.{config['num_hidden_layers']}."
    if not all(name.startswith(first) for name in head):
        return f"transformers reads heads whose tensors are {first}*, got {sorted(head)[0]}"
    switches = config.get("specjax_mtp", {})
    wanted = {"concat": "embedding_first", "recycle": "post_norm", "target_hidden": "post_norm"}
    if switches != wanted:
        return f"transformers' MTP layer is that of {wanted}, got {switches}"
    weights = {}
    for file in sorted(source.glob("model*.safetensors")):
        weights |= load_file(file)
    for index in range(depth):
        prefix = f"model.layers.{config['num_hidden_layers'] + index}."
        for name, tensor in head.items():
            name = re.sub(r"shared_head\.norm", "post_norm", prefix + name.removeprefix(first))
            weights[name] = tensor.clone()
    target.mkdir(parents=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_mtp_layers": depth, "mtp_layer_types": ["full_attention"] * depth}
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    name = "generation_config.json"
    if (source / name).exists():
        shutil.copy(source / name, target / name)
    return None


def fastest_assisted(
    model: str | Path,
    threads: int,
    ignore_eos: bool,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
) -> tuple[TorchPeer, str, dict[str, float]]:
    """Chooses the way to draft that takes the least time per token on these prompts.

    Returns:
      the peer, its name, and seconds per token of all ways that were tried.
    """
    found: dict[str, tuple[float, TorchPeer]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, make in _ways(model, Path(scratch), threads, ignore_eos):
            peer = make()
            costs = []
            for attempt in range(1 + TRIALS):
                start = time.perf_counter()
                tokens = sum(map(len, peer(prompts, limits, attempt)))
                costs.append((time.perf_counter() - start) / max(tokens, 1))
            found[name] = min(costs[1:]), peer
    best = min(found, key=lambda name: found[name][0])
    return found[best][1], best, {name: seconds for name, (seconds, _) in found.items()}


def _ways(model, scratch: Path, threads: int, ignore_eos: bool):
    """Yields the names of the ways to draft, and functions that make their peers."""

    def make(directory, options) -> Callable[[], TorchPeer]:
        return lambda: TorchPeer(directory, 1, threads, ignore_eos, options)

    for count in LOOKUPS:
        yield f"prompt lookup {count}", make(model, {"prompt_lookup_num_tokens": count})
    for depth in MTP_DEPTHS:
        directory = scratch / f"mtp_{depth}"
        reason = mtp_directory(model, directory, depth)
        if reason is not None:
            print(f"transformers drafts without MTP: {reason}", flush=True)
            return
        yield f"MTP {depth}", make(directory, {"use_mtp": True})


def cores() -> int:
    """Returns the number of threads that all programs use."""
    return os.cpu_count() or 1
