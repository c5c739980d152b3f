"""`python -m bench.draft losses --model assets/sums`: which loss gives the longest accept length.

An MTP head is trained with each loss from one random start, on the same samples of the policy at
temperature 1 in the same order. At several numbers of training tokens, real decoding of held-out
prompts with a chain (`4_1_5`) gives its accept length: greedily, and at temperature 1. Training
tokens are those in the loss of the first recursive step, each pass over the samples counted.

After training, held-out samples at temperature 1 give the acceptance alpha = sum min(p, q) of the
first drafted token, by the policy's entropy at that token (Bebop, arXiv 2606.12370, reports a
falling line).

Nothing is timed. All losses share one learning rate, and one seed: a difference smaller than the
intervals, which resample the prompts, means little. A loss whose figures are in the result file
already is not measured again, so that a run which was stopped can be started again.

Writes `losses_<task>.json` and a picture beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.command import add_prompt_arguments, bench_parser, heldout_prompts, user_errors
from bench.draft import pictures
from bench.record import RESULTS, figure, figures_in, report, write_result
from bench.rollout.acceptance import Counts
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.drafts.mtp import init_head_params
from specjax.models.layers import rms_norm
from specjax.tokenizer import load_tokenizer
from train import data
from train.draft_losses import DRAFT_LOSSES, Objective, Sampling
from train.heads import DraftConfig, DraftTrainer, draft_targets, frozen_policy_parts, roll_left
from train.logits import Head, head_name
from train.loss import sft_loss
from train.optim import OptimConfig
from train.packing import Sample, pack
from train.policy import PolicyTrainer

STEPS = 4  # drafted tokens of the chain, and recursive steps of training
TEMPERATURES = {"T_0": 0.0, "T_1": 1.0}
EDGES = (0.0, 0.01, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, np.inf)  # of bins of entropy, nats


class Bench(NamedTuple):
    """What all losses share.

    Attributes:
      cfg, params: the policy.
      start: parameters of the head before training.
      batches, states: packed micro-batches of the policy's samples, and the policy's states.
      llm: engine that measures accept lengths.
      prompts: token ids of held-out prompts.
      heldout: a packed micro-batch of samples of these, and the policy's states.
    """

    cfg: object
    params: dict
    start: dict
    batches: list
    states: list
    llm: LLM
    prompts: list[list[int]]
    heldout: tuple


def prepare(args: argparse.Namespace) -> Bench:
    """Samples from the policy, and computes the states that heads are trained on."""
    cfg, params, head = hf.load_checkpoint(args.model, "float32")
    cfg = cfg.running(compute_dtype="float32").replace(mtp_num_layers=1)
    tokenizer = load_tokenizer(args.model)
    start = init_head_params(cfg, args.seed)
    begin = tokenizer.encode(args.begin, add_special_tokens=False) if args.begin else []
    held = heldout_prompts(
        tokenizer, args.task, args.data, args.prompts, args.max_prompt_tokens, args.seed
    )
    held = [prompt + begin for prompt in held]
    prompts = [prompt + begin for prompt in _training_prompts(tokenizer, args)]
    longest = max(map(len, prompts + held)) + args.max_tokens
    spec = SpecConfig(draft="checkpoint", strategy=f"{STEPS}_1_{STEPS + 1}")
    llm = LLM(
        (cfg, params, start if head is None else head), spec, args.max_batch, longest,
        scan_layers=True,
    )  # fmt: skip
    sampling = SamplingParams(temperature=1.0, max_tokens=args.max_tokens, seed=args.seed)
    samples = _samples(llm, prompts, sampling, args.train_samples)
    mine = _samples(llm, held, sampling, args.samples)
    rows = args.rows, args.row_length
    policy = PolicyTrainer(cfg, sft_loss, OptimConfig().build())
    batches = [policy.place(batch) for batch in pack(samples, rows[1], rows[0])]
    states = [policy.states(params, batch) for batch in batches]
    [batch, *_] = [policy.place(batch) for batch in pack(mine, rows[1], rows[0])]
    return Bench(
        cfg, params, start, batches, states, llm, held, (batch, policy.states(params, batch))
    )


def _training_prompts(tokenizer, args: argparse.Namespace) -> list[list[int]]:
    source = data.problems(
        data.DataConfig(task=args.task, path=args.train_data, seed=args.seed), "train"
    )
    found, index = [], 0
    while len(found) < args.train_prompts and index < len(source):
        prompt = data.encode_prompt(tokenizer, source[index].prompt)
        found += [prompt] if len(prompt) <= args.max_prompt_tokens else []
        index += 1
    if len(found) < args.train_prompts:
        raise ValueError(
            f"expected {args.train_prompts} training prompts of at most {args.max_prompt_tokens} "
            f"tokens, got {len(found)}; lower --train_prompts, or give another --train_data"
        )
    return found


def _samples(llm: LLM, prompts, params: SamplingParams, n: int) -> list[Sample]:
    outputs = llm.generate(prompts, SamplingParams(**{**vars(params), "n": n}))
    made = [(out.prompt_token_ids, sample) for out in outputs for sample in out.samples]
    return [
        Sample(i, prompt, sample.token_ids)
        for i, (prompt, sample) in enumerate(made)
        if sample.token_ids
    ]


def accept_lengths(bench: Bench, head: dict, args: argparse.Namespace) -> dict[str, Counts]:
    """Measures a head by decoding the held-out prompts at every temperature, side by side."""
    bench.llm.update_head(head)
    names = [(name, prompt) for name in TEMPERATURES for prompt in bench.prompts]
    params = [
        SamplingParams(
            temperature=TEMPERATURES[name],
            n=args.samples if TEMPERATURES[name] else 1,  # greedy samples are all the same
            max_tokens=args.max_tokens,
            seed=args.seed + 1,
        )
        for name, _ in names
    ]
    outputs = bench.llm.generate([prompt for _, prompt in names], params)
    found = {}
    for name in TEMPERATURES:
        stats = [
            [sample.stats for sample in out.samples]
            for (other, _), out in zip(names, outputs, strict=True)
            if other == name
        ]
        found[name] = Counts(
            np.array([sum(s.accepted for s in row) for row in stats]),
            np.array([sum(s.rounds for s in row) for row in stats]),
        )
    return found


def entropy_and_acceptance(bench: Bench, source, head: dict) -> tuple[np.ndarray, np.ndarray]:
    """The policy's entropy, and alpha of the first drafted token, at every held-out token."""
    batch, states = bench.heldout
    cfg, policy = bench.cfg, frozen_policy_parts(bench.params)

    @jax.jit
    def run(head, policy, batch, states):
        tokens, segments = batch["tokens"], batch["segment_ids"]
        normed = rms_norm(states, policy["norm"], cfg.rms_norm_eps)
        hidden = normed if source.needs.taps == ("post_norm",) else states
        target = draft_targets(tokens, batch["loss_mask"], segments, 0)
        given = policy, hidden, [target.inputs], batch["positions"], segments
        [output] = source.unroll(head, *given)
        name = head_name(cfg)
        axes = ("vocab", "embed") if name == "embed" else ("embed", "vocab")
        lm = Head.of(None, axes, policy[name], tokens.shape, None)
        p_logits = roll_left(lm.all_logits(normed, policy[name]), segments, 1)
        objective = Objective("tv", Sampling(1.0))
        of = objective.target(p_logits, None)
        _, [aux] = objective.losses([lm.all_logits(output, policy[name])], [target.labels], [of])
        entropy = -jax.scipy.special.xlogy(of.p, of.p).sum(-1)
        return entropy, aux["overlap"], target.mask

    entropy, alpha, mask = map(np.asarray, run(head, policy, batch, states))
    inside = mask > 0
    return entropy[inside], alpha[inside]


def of_entropy(loss: str, entropy: np.ndarray, alpha: np.ndarray) -> dict[str, dict]:
    """Figures of acceptance by entropy: means in bins, and the line through all tokens."""
    found, unit = {}, "mean of sum min(p, q)"
    for low, high in zip(EDGES, EDGES[1:], strict=False):
        inside = (entropy >= low) & (entropy < high)
        if (count := int(inside.sum())) < 10:
            continue
        mean, half = alpha[inside].mean(), 1.96 * alpha[inside].std() / np.sqrt(count)
        key = f"{loss}/entropy_{low:g}_to_{high:g}"
        found[f"acceptance/{key}"] = figure(mean, unit, [mean - half, mean + half])
        found[f"mean_entropy/{key}"] = figure(entropy[inside].mean(), "nats")
        found[f"tokens/{key}"] = figure(count, "tokens")
    slope, level = np.polyfit(entropy, alpha, 1)
    correlation = np.corrcoef(entropy, alpha)[0, 1]
    found[f"line_slope/{loss}"] = figure(slope, "acceptance per nat, least squares over tokens")
    found[f"line_level/{loss}"] = figure(level, "acceptance at entropy 0 on that line")
    found[f"line_correlation/{loss}"] = figure(correlation, "correlation of the two over tokens")
    return found


def measure(bench: Bench, loss: str, args: argparse.Namespace) -> dict[str, dict]:
    """Trains a head with one loss, and measures it on the way."""
    optim = OptimConfig(lr=args.lr, warmup_steps=args.warmup, b2=0.95)
    settings = DraftConfig(loss=loss, unroll_steps=STEPS, optim=optim)
    trainer = DraftTrainer(bench.cfg, settings, 1.0)
    head = jax.tree.map(jnp.array, bench.start)
    state, policy = trainer.init_opt_state(head), frozen_policy_parts(bench.params)
    points = {round(args.updates * i / args.points) for i in range(args.points + 1)}
    figures, tokens, overlap = {}, 0, None
    for update in range(args.updates + 1):
        if update in points:
            lengths = accept_lengths(bench, jax.tree.map(jnp.array, head), args)
            for name, counts in lengths.items():
                key = f"accept_length/{loss}/{name}/tokens_{tokens}"
                figures[key] = figure(counts.accept_length, "tokens per round", counts.interval())
            text = "  ".join(f"{n} {c.accept_length:.3f}" for n, c in lengths.items())
            print(f"{loss}  {tokens} tokens: {text}  training overlap {overlap}", flush=True)
        if update < args.updates:
            i = update % len(bench.batches)
            given = head, state, policy, bench.batches[i], bench.states[i]
            head, state, sums = trainer.start_update(*given)
            tokens += int(sums["mtp_tokens"][0])
            overlap = np.round(np.asarray(sums["mtp_overlap"] / sums["mtp_tokens"]), 3)
    entropy = entropy_and_acceptance(bench, trainer.source, head)
    return figures | of_entropy(loss, *entropy)


def run(args: argparse.Namespace) -> Path:
    """Measures the losses that the result file lacks, and draws it."""
    # Nothing is timed, and programs compile faster without optimizations.
    jax.config.update("jax_disable_most_optimizations", True)
    path = Path(args.out or RESULTS / "draft" / f"losses_{args.task}.json")
    if path.is_dir():
        path = path / f"losses_{args.task}.json"
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "losses")}
    settings["strategy"], settings["unroll_steps"] = f"{STEPS}_1_{STEPS + 1}", STEPS
    figures, shared = figures_in(path, settings), None
    for loss in args.losses:
        if f"line_slope/{loss}" in figures:
            print(f"{loss}: measured before", flush=True)
            continue
        begin = time.perf_counter()
        shared = prepare(args) if shared is None else shared
        figures = figures | measure(shared, loss, args)
        seconds = time.perf_counter() - begin
        write_result(f"losses_{args.task}", settings, figures, path)
        print(f"{loss}: {seconds:.0f} s", flush=True)
    write_result(f"losses_{args.task}", settings, figures, path)
    print(report({k: v for k, v in figures.items() if k.startswith("line_slope/")}))
    print(path)
    print(pictures.draw(path))
    return path


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("draft losses", __doc__, "draft/losses_<task>")
    add_prompt_arguments(parser)
    add = parser.add_argument
    add("--train_data", metavar="FILE", help="file of rows to train on, for tasks that have one")
    begin = "what answers begin with; with ' so' the embedded policy works sums step by step"
    add("--begin", metavar="TEXT", default="", help=begin)
    add("--losses", nargs="+", default=list(DRAFT_LOSSES), choices=list(DRAFT_LOSSES))
    add("--updates", type=int, default=60, help="updates of each head")
    add("--points", type=int, default=3, help="measurements after the first, evenly spaced")
    add("--train_prompts", type=int, default=48, help="prompts of the training samples")
    add("--train_samples", type=int, default=4, help="training samples per prompt")
    add("--prompts", type=int, default=16, help="held-out prompts")
    add("--samples", type=int, default=2, help="samples per held-out prompt at temperature 1")
    add("--max_tokens", type=int, default=64, help="response tokens at most")
    add("--max_batch", type=int, default=32, help="slots that run at once")
    add("--rows", type=int, default=8, help="rows of a micro-batch")
    add("--row_length", type=int, default=256, help="tokens of a row")
    add("--lr", type=float, default=2e-3, help="learning rate of every loss")
    add("--warmup", type=int, default=5, help="updates of linear warm-up")
    args = parser.parse_args(argv)
    for name in ("updates", "points", "train_prompts", "train_samples", "prompts", "samples"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(args, name)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("draft losses"):
        run(parse(argv))
