"""A comparison of plain decoding by specjax and by transformers, compiled, with a static cache.

Both decode greedily with the same shapes, random weights and dtype, in turns in one process on one
device. Only decoding is compared: the tokens after the first of each sample. transformers compiles
its steps by itself if the cache is static (in CUDA graphs, `reduce-overhead`); its prefill is not
compiled, and not timed.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Sequence

from bench.gpu.job import Absent, Job
from bench.gpu.parts import peers
from bench.gpu.parts.peers import FULL, SMALL, OwnCalls, Shape
from bench.gpu.parts.round_parts import plain_model, sizes_of
from bench.record import alternate
from specjax.shipped import find_shipped

NOT_AHEAD = "it runs the peer's programs, and those of an engine, which other parts compile"


def import_torch(small: bool):
    """Imports torch.

    Raises:
      Absent: torch is not installed, or has no CUDA device although one is needed.
    """
    if importlib.util.find_spec("torch") is None:
        raise Absent("not installed", "torch is not installed")
    import torch

    if not small and not torch.cuda.is_available():
        raise Absent("not installed", f"torch {torch.__version__} has no CUDA device")
    return torch


class StaticCachePeer:
    """`transformers.generate` with compiled steps.

    Attributes:
      decoding: seconds from the first token to the last, for each call.
    """

    def __init__(self, torch, directory, layers: int, dtype: str, small: bool):
        import transformers

        transformers.logging.set_verbosity_error()
        self.torch, self.device = torch, "cpu" if small else "cuda"
        config = transformers.AutoConfig.from_pretrained(directory, num_hidden_layers=layers)
        if small:  # generates no code for the CPU; all else is as on a GPU
            self.compiling = transformers.CompileConfig(backend="eager", mode="default")
            self.compiling._compile_all_devices = True
        else:
            self.compiling = transformers.CompileConfig()
        with torch.device(self.device):
            self.policy = transformers.AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype)
            ).eval()
        self.policy.generation_config.eos_token_id = None  # only the limit ends a sample
        self.decoding: list[float] = []

    def run(self, prompts: Sequence[Sequence[int]], output: int) -> None:
        """Generates `output` tokens after each of several prompts of one length.

        Raises:
          ValueError: it generated another number of tokens.
        """
        torch, seen = self.torch, []

        def look(ids, scores, **_):
            if not seen:
                if self.device == "cuda":
                    torch.cuda.synchronize()
                seen.append(time.perf_counter())
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        ids = torch.tensor(prompts, device=self.device)
        with torch.inference_mode():
            out = self.policy.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=output,
                max_new_tokens=output,
                cache_implementation="static",
                compile_config=self.compiling,
                stopping_criteria=[look],
                pad_token_id=0,
            )
        generated = out[:, ids.shape[1] :].tolist()  # waits for the device
        self.decoding.append(time.perf_counter() - seen[0])
        if {len(row) for row in generated} != {output}:
            raise ValueError(
                f"expected {output} tokens of each sample, transformers generated "
                f"{sorted({len(row) for row in generated})}: rates would not be comparable"
            )


def measure(job: Job) -> None:
    """Measures `torch_tokens_per_sec/..`, `specjax_tokens_per_sec/..` and their ratio."""
    torch = import_torch(job.small)
    sizes, shape = sizes_of(job), SMALL if job.small else FULL
    job.tell(sizes=sizes._asdict(), lengths=shape._asdict(), torch=torch.__version__)
    peer = StaticCachePeer(torch, find_shipped(sizes.shape), sizes.layers, sizes.dtype, job.small)
    model = plain_model(sizes, job.seed)
    job.each(
        (
            f"specjax_over_torch/batch_{batch}",
            functools.partial(_figures, job, shape, batch, peer, model),
        )
        for batch in shape.batches
    )


def _figures(job: Job, shape: Shape, batch: int, peer: StaticCachePeer, model) -> dict:
    cfg, weights, _ = model
    prompts = peers.prompts_of(shape, batch, cfg.vocab_size, job.seed)
    ours = OwnCalls(cfg, weights, shape, prompts, job.seed)
    jobs = {"torch": lambda: peer.run(prompts, shape.output), **ours.jobs()}
    for run in (*jobs.values(), jobs["torch"]):
        run()  # compiles; transformers records its graphs in the second call
    peer.decoding.clear()
    seconds = alternate(jobs, shape.repeats)
    tokens = batch * (shape.output - 1)
    theirs = [s / tokens for s in peer.decoding]
    return peers.figures("torch", theirs, ours.costs(seconds), shape, batch)
