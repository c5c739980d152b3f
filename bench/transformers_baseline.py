"""`python -m bench.transformers_baseline --model assets/sums`: is plain decoding a fair baseline?

A speed-up over a slow baseline is worth nothing. So plain decoding through `LLM` is measured
against `transformers.generate` on torch, with the same weights in float32 on the CPU, in turns:
sampling at temperature 1, prompts of the same held-out problems (left padded for torch), exactly
the same number of new tokens, end tokens ignored by both. Torch runs on one thread and on as many
as there are cores, and the faster of the two is what we compare with: on a small model, or beside
other work, its threads mostly wait for each other.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.common import (
    add_prompt_arguments,
    add_timing_arguments,
    alternate,
    bench_parser,
    figure,
    heldout_prompts,
    median_ratio_interval,
    write_result,
)
from specjax import LLM, SamplingParams

MISSING = (
    "this bench compares with torch, which is not installed (specjax itself does not need it): "
    "pip install torch --index-url of the CPU wheels, then run it again"
)


def torch_generator(
    model: str, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Callable[[int], np.ndarray]:
    """A function of the number of threads that generates `new_tokens` tokens after each prompt.

    Raises:
      ModuleNotFoundError: torch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(MISSING) from error
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    width = max(map(len, prompts))
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1

    @torch.inference_mode()
    def generate(threads: int) -> np.ndarray:
        torch.set_num_threads(threads)
        out = policy.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        return out[:, width:].numpy()

    return generate


def measure(args: argparse.Namespace, batch: int, tokenizer) -> dict[str, dict]:
    """Both at one batch size; figures for the result file."""
    prompts = heldout_prompts(
        tokenizer, args.task, args.data, batch, args.max_prompt_tokens, args.seed
    )
    theirs = torch_generator(args.model, prompts, args.new_tokens)
    llm = LLM(args.model, None, batch, args.max_prompt_tokens + args.new_tokens)
    params = SamplingParams(
        temperature=1.0, max_tokens=args.new_tokens, seed=args.seed, ignore_eos=True
    )

    def ours() -> np.ndarray:
        return np.array([out.samples[0].token_ids for out in llm.generate(prompts, params)])

    shapes = ours().shape, theirs(args.threads[0]).shape  # compiles, and warms torch up
    if shapes[0] != shapes[1]:
        raise ValueError(f"expected the same number of new tokens from both, got {shapes}")
    jobs = {f"transformers_threads_{n}": functools.partial(theirs, n) for n in args.threads}
    seconds = alternate({"specjax": ours, **jobs}, args.repeats)
    fastest = min(jobs, key=lambda name: statistics.median(seconds[name]))
    ratio, low, high = median_ratio_interval(seconds[fastest], seconds["specjax"])
    at = f"/batch_{batch}"
    unit = f"plain LLM / {fastest}, medians"
    figures = {f"speedup{at}": figure(ratio, unit, [low, high])}
    for name, values in seconds.items():
        rates = [batch * args.new_tokens / s for s in values]
        figures[f"{name}_tokens_per_sec{at}"] = figure(
            statistics.median(rates), "tok/s", [min(rates), max(rates)]
        )
    return figures


def run(args: argparse.Namespace) -> Path:
    """Measures every batch size and writes the result file."""
    from specjax.tokenizer import load_tokenizer

    tokenizer, figures = load_tokenizer(args.model), {}
    for batch in args.batches:
        here = measure(args, batch, tokenizer)
        figures |= here
        ratio = here[f"speedup/batch_{batch}"]
        low, high = ratio["interval"]
        rates = "  ".join(
            f"{name.partition('_tokens')[0]} {entry['value']:.0f}"
            for name, entry in here.items()
            if "tokens_per_sec" in name
        )
        print(
            f"batch {batch:>3}: {ratio['value']:.2f}x [{low:.2f}, {high:.2f}]  tok/s: {rates}",
            flush=True,
        )
    import torch
    import transformers

    settings = vars(args) | {"torch": torch.__version__, "transformers": transformers.__version__}
    name = f"transformers_baseline_{Path(args.model).name}"
    path = write_result(name, settings, figures, args.out)
    print(path)
    return path


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("transformers_baseline", __doc__, "transformers_baseline_<model>")
    add_prompt_arguments(parser)
    add_timing_arguments(parser, (1, 8, 32))
    add = parser.add_argument
    add("--new_tokens", type=int, default=64, help="of every sample")
    cores = sorted({1, os.cpu_count() or 1})
    add("--threads", type=int, nargs="+", default=cores, help="torch threads; the fastest counts")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    try:
        run(parse(argv))
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        sys.exit(f"bench.transformers_baseline: error: {error}")


if __name__ == "__main__":
    main()
