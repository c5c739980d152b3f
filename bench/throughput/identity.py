"""`python -m bench.throughput identity`: are coupled tokens those of plain decoding?

It compares at least --tokens tokens: chains, static and dynamic trees; heads of every quality
(random ones too) and n-grams; batches of 1 to 32; greedy and sampled requests mixed in one batch,
every third with all the sampling options of `specjax.verify.identity` drawn at random. Speculation
gets the prompts in another order than plain decoding. A sample counts up to its first difference,
which floating point explains (two tokens tie within rounding) or does not. The latter is a bug: the
exit status is 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bench.command import bench_parser
from bench.record import figure, write_result
from specjax import LLM, ModelConfig, RunConfig, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.config import DEFAULT_TREE_PATHS
from specjax.drafts.mtp import init_head_params
from specjax.engine.compare import Difference, first_difference
from specjax.engine.request import make_jobs
from specjax.models.families.dense import dense_config
from specjax.models.transformer import Params, init_params
from specjax.verify.identity import random_params

TEMPERATURES = (0.0, 0.7, 1.0)
MAX_TOKENS, LONGEST_PROMPT = 192, 48
MAX_LEN = MAX_TOKENS + LONGEST_PROMPT


@dataclasses.dataclass(frozen=True)
class Setup:
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

    def __str__(self) -> str:
        name = self.strategy if isinstance(self.strategy, str) else "paths"
        notes = ", scanned" * self.scan + ", adaptive width" * self.adaptive
        return f"{name:8} batch {self.batch:2} {self.head:6} modules {self.modules}{notes}"

    def _draft(self, loaded: bool) -> str:
        if self.head == "ngram":
            return "ngram"
        return "random" if loaded and self.head == "random" else "checkpoint"

    def spec(self, loaded: bool, seed: int) -> SpecConfig:
        """Returns its `SpecConfig`; `loaded` says that the model is a checkpoint with a head."""
        return SpecConfig(
            strategy=self.strategy,
            draft=self._draft(loaded),
            head_seed=seed,
            adaptive_width=self.adaptive,
        )


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
        max_position=MAX_LEN,
        mtp_num_layers=setup.modules,
        run=RunConfig(scan_layers=setup.scan),
    )
    params = _scaled(init_params(cfg, seed), 6.0)
    head = _scaled(init_head_params(cfg, seed + 1), 6.0)
    if setup.head == "fair":
        keep = jnp.concatenate([jnp.eye(cfg.hidden_size), jnp.zeros((cfg.hidden_size,) * 2)])
        for module in head["blocks"].values():
            module["proj"] = keep + 0.05 * module["proj"]
    return cfg, params, head


def _scaled(params: Params, factor: float) -> Params:
    """Enlarges parameters: as initialised, logits are nearly 0 and attention nearly uniform."""

    def scale(path, x):
        name = path[-1].key
        if "norm" in name:
            return x
        return x * (25.0 if name in ("embed", "lm_head") else factor)

    return jax.tree_util.tree_map_with_path(scale, params)


def requests(cfg: ModelConfig, samples: int, rng: np.random.Generator):
    """Draws prompts; temperatures in turn, two samples of some, all options for every third."""
    prompts, params = [], []
    while sum(p.n for p in params) < samples:
        length = int(rng.integers(1, LONGEST_PROMPT + 1))
        prompts.append(rng.integers(0, cfg.vocab_size, length).tolist())
        if len(params) % 3 == 2:
            params.append(random_params(rng, cfg, MAX_TOKENS))
            continue
        params.append(
            SamplingParams(
                temperature=TEMPERATURES[len(params) // 3 % 3],
                max_tokens=int(rng.integers(MAX_TOKENS // 2, MAX_TOKENS + 1)),
                seed=int(rng.integers(2**62)),
                n=1 + len(params) % 2,
                ignore_eos=len(params) % 4 != 0,
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
            runner = spec.engine.runner
            difference = first_difference(runner, job, a.token_ids, b.token_ids)
            compared += difference.position - len(job.prompt) + 1 - len(a.token_ids)
            found.append(difference)
    return compared, found


def arms(model_dir: str | None, seed: int) -> Iterator[tuple[Setup, LLM, LLM]]:
    """Yields every setup with its two engines: speculative, plain."""
    loaded = None
    if model_dir:
        cfg, params, head = hf.load_checkpoint(model_dir, "float32")
        loaded = cfg.running(compute_dtype="float32"), params, head
    for setup in CHECKPOINT_SETUPS if model_dir else RANDOM_SETUPS:
        model = loaded or random_model(setup, seed)
        spec = setup.spec(loaded is not None, seed)
        sizes = {"max_batch": setup.batch, "max_len": MAX_LEN}
        yield setup, LLM(model, spec, **sizes), LLM((*model[:2], None), None, **sizes)


def run(tokens: int, model_dir: str | None, seed: int) -> tuple[dict, list[dict]]:
    """Compares at least `tokens` tokens, shared among the setups.

    Returns:
      figures for the result file, and one record per setup.
    """
    rng = np.random.default_rng(seed)
    count = len(CHECKPOINT_SETUPS if model_dir else RANDOM_SETUPS)
    records, total, differences = [], 0, []
    for index, (setup, spec, plain) in enumerate(arms(model_dir, seed)):
        share = -(-(tokens - total) // (count - index))
        compared, found = 0, []
        while compared < share:
            samples = max(3, -(-(share - compared) // (3 * MAX_TOKENS // 4)))
            more, new = compare(spec, plain, *requests(spec.cfg, samples, rng), rng)
            compared += more
            found += new
        for difference in found:
            print(f"    {difference}")
        accept_length = spec.totals.accept_length
        unexplained = sum(not d.explained for d in found)
        print(
            f"{setup}: {compared} tokens, accept length {accept_length:.2f}, differences: "
            f"{len(found) - unexplained} explained, {unexplained} unexplained",
            flush=True,
        )
        records.append(
            dataclasses.asdict(setup)
            | {"tokens": compared, "accept_length": accept_length, "differences": found}
        )
        total, differences = total + compared, differences + found
    explained = sum(d.explained for d in differences)
    figures = {
        "tokens_compared": figure(total, "tokens"),
        "differences_explained": figure(explained, "samples"),
        "differences_unexplained": figure(len(differences) - explained, "samples"),
    }
    return figures, records


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser("throughput identity", __doc__, "identity")
    parser.add_argument("--tokens", type=int, default=100_000, help="compare at least this many")
    parser.add_argument("--model", help="a checkpoint directory (default: random models)")
    args = parser.parse_args(argv)
    if args.tokens < 1:
        parser.error(f"--tokens must be at least 1, got {args.tokens}")
    figures, records = run(args.tokens, args.model, args.seed)
    settings = {"tokens": args.tokens, "model": args.model or "random", "seed": args.seed}
    settings |= {"temperatures": TEMPERATURES, "setups": records}
    path = write_result("identity", settings, figures, args.out)
    unexplained = figures["differences_unexplained"]["value"]
    print(
        f"{figures['tokens_compared']['value']} tokens: "
        f"{figures['differences_explained']['value']} differences explained by floating point, "
        f"{unexplained} unexplained; written to {path}"
    )
    return 1 if unexplained else 0
