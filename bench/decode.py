"""`python -m bench.decode WHAT`: engines that generate the same samples in turns.

    speed       speculative, plain: what speculation gains
    invariant   these two, and both with `SpecConfig(invariant=True)`, where a request decodes
                plainly through the very program that speculation runs: what the mode costs, and
                that its samples never differ
    kernels     speculative and plain with specjax's own kernels for CPUs, and with XLA's programs
    identity    are coupled tokens those of plain decoding?

The first three decode held-out problems with the same seeds. A ratio is the median of the turns'
ratios. Several samples per slot keep the batch full: a slot is refilled when its sample ends.
Figures, by dtype and batch size:

    tokens_per_sec/../ENGINE            prefill included; interval: slowest and fastest turn
    accept_length/../ENGINE
    ratio/../ONE/OTHER                  tokens per second
    samples_different/../ONE/OTHER      samples with other tokens
    logprobs_different/../ONE/OTHER     samples of which any bit of a log-probability differs

A ratio below 1 at a large batch is no fault: verifying T rows costs T rows where a chip is bound by
arithmetic, and plain decoding is faster there.

`identity` compares at least --tokens tokens: chains, static and dynamic trees; heads of every
quality and n-grams; batches of 1 to 32; greedy and sampled requests mixed in one batch, every third
with all the sampling options of `specjax.verify.identity` drawn at random. Speculation gets the
prompts in another order than plain decoding. A sample counts up to its first difference, which
floating point explains (two tokens tie within rounding) or does not. The latter is a bug: the exit
status is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.command import add_prompt_arguments, bench_parser, heldout_prompts, user_errors
from bench.record import alternate, figure, ratio_figure, report, write_result
from specjax import LLM, ModelConfig, RunConfig, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.config import DEFAULT_TREE_PATHS
from specjax.drafts.mtp import init_head_params
from specjax.engine.compare import Difference, first_difference
from specjax.engine.request import make_jobs
from specjax.engine.settings import EngineConfig
from specjax.models.families.dense import dense_config
from specjax.models.transformer import Params, init_params
from specjax.tokenizer import load_tokenizer
from specjax.verify.identity import random_params

OWN = EngineConfig(products="panels", attention="cpu")
XLA = EngineConfig(products="xla", attention="reference")


class Turns:
    """Functions that generate and take turns, with the tokens and seconds of every call.

    Args:
      functions: functions by name; they take the number of the call and return the tokens of all
        samples.
    """

    def __init__(self, functions: Mapping[str, Callable[[int], list[list[int]]]]):
        self.functions = functions
        self.tokens: dict[str, list[int]] = {name: [] for name in functions}
        self.seconds: dict[str, list[float]] = {}

    def measure(self, repeats: int) -> None:
        """Calls each once, which compiles, and then all of them in turns."""
        for generate in self.functions.values():
            generate(0)
        jobs = {name: lambda name=name: self._call(name) for name in self.functions}
        self.seconds = alternate(jobs, repeats)

    def _call(self, name: str) -> None:
        samples = self.functions[name](1 + len(self.tokens[name]))
        self.tokens[name].append(sum(map(len, samples)))

    def costs(self, name: str) -> list[float]:
        """Seconds per token of each call."""
        return [s / n for s, n in zip(self.seconds[name], self.tokens[name], strict=True)]

    def rate(self, name: str) -> dict:
        rates = [1 / cost for cost in self.costs(name)]
        unit = "tok/s, median over turns; slowest and fastest"
        return figure(statistics.median(rates), unit, [min(rates), max(rates)])

    def ratio(self, one: str, other: str) -> dict:
        """Returns the tokens per second of `one` over those of `other`."""
        unit = f"tok/s, {one} / {other}, median over turns"
        return ratio_figure(self.costs(other), self.costs(one), unit)


# --- speed, invariant, kernels -------------------------------------------------------------------


class Engine(NamedTuple):
    """An `LLM`'s settings, and whether its requests may speculate."""

    spec: SpecConfig | None
    engine: EngineConfig | None = None
    speculative: bool = True


class Comparison(NamedTuple):
    """Engines by name, the pairs whose speed is compared, and those whose samples are."""

    engines: Callable[[argparse.Namespace], dict[str, Engine]]
    speeds: Sequence[tuple[str, str]]
    samples: Sequence[tuple[str, str]]
    defaults: Mapping[str, Any]


def _spec(args: argparse.Namespace, **more) -> SpecConfig:
    return SpecConfig(args.strategy, draft=args.draft, **more)


PAIR = ("speculative", "plain")
COMPARISONS = {
    "speed": Comparison(
        lambda args: {"speculative": Engine(_spec(args)), "plain": Engine(None)},
        [PAIR],
        [PAIR],
        {"batches": [1, 4, 32], "prompts": 8, "samples_per_slot": 2, "max_tokens": 160},
    ),
    "invariant": Comparison(
        lambda args: {
            "speculative": Engine(_spec(args)),
            "plain": Engine(None),
            "invariant": Engine(_spec(args, invariant=True)),
            "invariant_plain": Engine(_spec(args, invariant=True), speculative=False),
        },
        [("invariant", "speculative"), ("invariant_plain", "plain")],
        [PAIR, ("invariant", "invariant_plain")],
        {"batches": [1, 8], "prompts": 16, "n": 2, "dtypes": ["float32", "bfloat16"]},
    ),
    "kernels": Comparison(
        lambda args: {
            "speculative": Engine(_spec(args), OWN),
            "plain": Engine(None, OWN),
            "xla_speculative": Engine(_spec(args), XLA),
            "xla_plain": Engine(None, XLA),
        },
        [
            ("plain", "xla_plain"),
            ("speculative", "xla_speculative"),
            PAIR,
            ("xla_speculative", "xla_plain"),
        ],
        [PAIR, ("xla_speculative", "xla_plain")],
        {"batches": [1, 8, 32], "prompts": 16, "samples_per_slot": 1},
    ),
}


def measure(comparison: Comparison, args: argparse.Namespace) -> dict[str, dict]:
    """Measures one comparison with every dtype and batch size."""
    result, tokenizer = {}, load_tokenizer(args.model)
    for dtype in args.dtypes:
        cfg, weights, head = hf.load_checkpoint(args.model, dtype)
        model = cfg.running(compute_dtype=dtype), weights, head
        for batch in args.batches:
            count = max(args.prompts, args.samples_per_slot * batch)
            prompts = heldout_prompts(tokenizer, args, count)
            here = _figures(comparison, args, model, prompts, f"{dtype}/batch_{batch}", batch)
            print(report(here), flush=True)
            result |= here
    return result


def _figures(comparison: Comparison, args, model, prompts, at: str, batch: int) -> dict[str, dict]:
    engines, llms, samples = comparison.engines(args), {}, {}
    cfg, weights, head = model
    max_len = min(args.max_prompt_tokens + args.max_tokens, cfg.max_position)
    for spec, how, _ in engines.values():
        if (spec, how) not in llms:
            own = cfg, weights, head if spec else None
            llms[spec, how] = LLM(own, spec, batch, max_len, engine=how)
    params = SamplingParams(max_tokens=args.max_tokens, n=args.n, seed=args.seed)
    result = {}

    def generate(name: str) -> list[list[int]]:
        spec, how, speculative = engines[name]
        asked = params if speculative else dataclasses.replace(params, speculative=False)
        outputs = llms[spec, how].generate(prompts, asked)
        samples[name] = [sample for output in outputs for sample in output.samples]
        length = llms[spec, how].totals.accept_length
        result[f"accept_length/{at}/{name}"] = figure(length, "tokens per round")
        return [sample.token_ids for sample in samples[name]]

    turns = Turns({name: lambda _, name=name: generate(name) for name in engines})
    turns.measure(args.repeats)
    result |= {f"tokens_per_sec/{at}/{name}": turns.rate(name) for name in engines}
    for one, other in comparison.speeds:
        result[f"ratio/{at}/{one}/{other}"] = turns.ratio(one, other)
    for one, other in comparison.samples:
        pairs, unit = zip(samples[one], samples[other], strict=True), f"of {len(samples[one])}"
        found = [(a.token_ids != b.token_ids, a.logprobs != b.logprobs) for a, b in pairs]
        tokens, bits = sum(a for a, _ in found), sum(a or b for a, b in found)
        result[f"samples_different/{at}/{one}/{other}"] = figure(tokens, f"{unit} samples")
        result[f"logprobs_different/{at}/{one}/{other}"] = figure(bits, f"{unit}, in any bit")
    return result


# --- identity ------------------------------------------------------------------------------------

TEMPERATURES = (0.0, 0.7, 1.0)
MAX_TOKENS, LONGEST_PROMPT = 192, 48


class Setup(NamedTuple):
    """One setting that is compared: strategy, batch size and draft source.

    Attributes:
      head: `random`, `fair`, the checkpoint's `own`, or `ngram` for no head at all.
      adaptive: see `SpecConfig.adaptive_width`.
    """

    strategy: str | tuple
    batch: int
    head: str
    modules: int = 1
    scan: bool = False
    adaptive: bool = False

    def spec(self, loaded: bool, seed: int) -> SpecConfig:
        """Returns its `SpecConfig`; `loaded` says that the model is a checkpoint with a head."""
        draft = "random" if loaded and self.head == "random" else "checkpoint"
        draft = "ngram" if self.head == "ngram" else draft
        return SpecConfig(self.strategy, draft=draft, head_seed=seed, adaptive_width=self.adaptive)


RANDOM_SETUPS = (
    Setup("1_1_2", 1, "random"),
    Setup("4_1_5", 4, "fair"),
    Setup("4_1_5", 32, "fair", modules=2),
    Setup("7_1_8", 8, "fair", modules=3),
    Setup("4x2x1", 1, "fair"),
    Setup("4x2x1", 16, "random", modules=2),
    Setup("default", 32, "fair", scan=True),
    Setup("4_4_16", 8, "fair"),
    Setup("6_3_24", 4, "fair", modules=2, adaptive=True),
    Setup("3_2_6", 16, "ngram"),
    Setup(DEFAULT_TREE_PATHS[:7] + ((1, 0), (1, 1), (1, 1, 0)), 2, "fair", modules=2),
)
CHECKPOINT_SETUPS = (
    Setup("4_1_5", 1, "own"),
    Setup("4_1_5", 32, "random"),
    Setup("7_1_8", 8, "own"),
    Setup("4x2x1", 4, "own"),
    Setup("default", 32, "own"),
    Setup("6_4_16", 8, "own"),
    Setup("4_2_8", 16, "ngram"),
)


def random_model(setup: Setup, seed: int) -> tuple[ModelConfig, Params, Params]:
    """Makes a small policy with peaked, context-dependent predictions, and a head for it.

    A `fair` head passes on the last token's embedding, which resembles the policy's state enough
    for whole paths to be accepted now and then.
    """
    cfg = dense_config(
        vocab_size=512,
        hidden_size=48,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        tie_embeddings=False,
        max_position=MAX_TOKENS + LONGEST_PROMPT,
        mtp_num_layers=setup.modules,
        run=RunConfig(scan_layers=setup.scan),
    )

    def scale(path, x):
        """Enlarges: as initialised, logits are nearly 0 and attention nearly uniform."""
        name = path[-1].key
        return x if "norm" in name else x * (25.0 if name in ("embed", "lm_head") else 6.0)

    params, head = (
        jax.tree_util.tree_map_with_path(scale, made)
        for made in (init_params(cfg, seed), init_head_params(cfg, seed + 1))
    )
    if setup.head == "fair":
        keep = jnp.concatenate([jnp.eye(cfg.hidden_size), jnp.zeros((cfg.hidden_size,) * 2)])
        for module in head["blocks"].values():
            module["proj"] = keep + 0.05 * module["proj"]
    return cfg, params, head


def requests(cfg: ModelConfig, samples: int, rng: np.random.Generator):
    """Draws prompts; temperatures in turn, two samples of some, all options for every third."""
    prompts, params = [], []
    while sum(p.n for p in params) < samples:
        length, count = int(rng.integers(1, LONGEST_PROMPT + 1)), len(params)
        prompts.append(rng.integers(0, cfg.vocab_size, length).tolist())
        if count % 3 == 2:
            params.append(random_params(rng, cfg, MAX_TOKENS))
            continue
        params.append(
            SamplingParams(
                temperature=TEMPERATURES[count // 3 % 3],
                max_tokens=int(rng.integers(MAX_TOKENS // 2, MAX_TOKENS + 1)),
                seed=int(rng.integers(2**62)),
                n=1 + count % 2,
                ignore_eos=count % 4 != 0,
            )
        )
    return prompts, params


def compare(
    spec: LLM, plain: LLM, prompts: list, params: list[SamplingParams], rng: np.random.Generator
) -> tuple[int, list[Difference]]:
    """Returns the tokens compared, the differing one of each sample included, and differences."""
    order = rng.permutation(len(prompts))
    expected = plain.generate(prompts, params)
    shuffled = spec.generate([prompts[i] for i in order], [params[i] for i in order])
    compared, found = 0, []
    for out, i in zip(shuffled, order, strict=True):
        for k, (a, b) in enumerate(zip(expected[i].samples, out.samples, strict=True)):
            compared += len(a.token_ids)
            if a.token_ids == b.token_ids:
                continue
            job = make_jobs(prompts[i], params[i], spec.cfg.eos_token_ids, request=int(i))[k]
            found.append(first_difference(spec.engine.runner, job, a, b))
            compared += found[-1].position - len(job.prompt) + 1 - len(a.token_ids)
    return compared, found


def pairs(model_dir: str | None, seed: int) -> Iterator[tuple[Setup, LLM, LLM]]:
    """Yields every setup with its two engines: speculative, plain."""
    loaded = None
    if model_dir:
        cfg, params, head = hf.load_checkpoint(model_dir, "float32")
        loaded = cfg.running(compute_dtype="float32"), params, head
    for setup in CHECKPOINT_SETUPS if model_dir else RANDOM_SETUPS:
        model = loaded or random_model(setup, seed)
        sizes = {"max_batch": setup.batch, "max_len": MAX_TOKENS + LONGEST_PROMPT}
        spec = setup.spec(loaded is not None, seed)
        yield setup, LLM(model, spec, **sizes), LLM((*model[:2], None), None, **sizes)


def identity(args: argparse.Namespace) -> tuple[dict, list[dict]]:
    """Compares at least `--tokens` tokens, shared among the setups.

    Returns:
      figures for the result file, and one record per setup.
    """
    rng = np.random.default_rng(args.seed)
    left = len(CHECKPOINT_SETUPS if args.model else RANDOM_SETUPS)
    records, total, differences = [], 0, []
    for setup, spec, plain in pairs(args.model, args.seed):
        share, compared, found = -(-(args.tokens - total) // left), 0, []
        while compared < share:
            samples = max(3, -(-(share - compared) // (3 * MAX_TOKENS // 4)))
            more, new = compare(spec, plain, *requests(spec.cfg, samples, rng), rng)
            compared, found = compared + more, found + new
        length = spec.totals.accept_length
        print(f"{setup}: {compared} tokens, accept length {length:.2f}", *found, sep="\n    ")
        records.append(
            setup._asdict() | {"tokens": compared, "accept_length": length, "differences": found}
        )
        left, total, differences = left - 1, total + compared, differences + found
    explained = sum(d.explained for d in differences)
    return {
        "tokens_compared": figure(total, "tokens"),
        "differences_explained": figure(explained, "samples"),
        "differences_unexplained": figure(len(differences) - explained, "samples"),
    }, records


# --- command line --------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("decode", __doc__)
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, comparison in COMPARISONS.items():
        add_to = whats.add_parser(name, description=f"see python -m bench.decode --help: {name}")
        add_prompt_arguments(add_to)
        add = add_to.add_argument
        add("--batches", type=int, nargs="+", help="slots that run at once")
        add("--repeats", type=int, default=7, help="measurements of each, at least 5 for a figure")
        add("--strategy", default="4_1_5", help="what a round drafts")
        add("--draft", default="checkpoint", choices=("checkpoint", "random"))
        add("--prompts", type=int, help="held-out problems at least")
        add("--samples_per_slot", type=int, default=0, help="problems per slot at least")
        add("--n", type=int, default=1, help="samples of each problem")
        add("--max_tokens", type=int, default=96, help="response tokens at most")
        add("--dtypes", nargs="+", default=["float32"], choices=("float32", "bfloat16"))
        add_to.set_defaults(**comparison.defaults)
    add = whats.add_parser("identity", description="see python -m bench.decode --help").add_argument
    add("--tokens", type=int, default=100_000, help="compare at least this many")
    add("--model", help="a checkpoint directory (default: random models)")
    for one in whats.choices.values():
        one.add_argument("--seed", type=int, default=0, help="seed of problems and samples")
        more = "file or directory; default: bench/results/<WHAT>_<model>.json"
        one.add_argument("--out", help=more)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args, settings = parse(argv), {}
    with user_errors(f"decode {args.what}"):
        if args.what == "identity":
            figures, settings["setups"] = identity(args)
            wrong, name = figures["differences_unexplained"]["value"], "identity"
        else:
            figures = measure(COMPARISONS[args.what], args)
            name = f"{args.what}_{Path(args.model).name}"
            ends = "/invariant/invariant_plain"
            keys = [k for k in figures if k.startswith("samples_") and k.endswith(ends)]
            wrong = sum(figures[key]["value"] for key in keys)
        print(write_result(name, vars(args) | settings, figures, args.out))
    if wrong:
        sys.exit(f"bench.decode {args.what}: {wrong} samples differ, expected none: a bug")


if __name__ == "__main__":
    main()
