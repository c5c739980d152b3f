"""`python -m bench.quantised [MODEL ...]`: a policy in packed number formats, and heads for it.

Acceptance is exact for the policy that decodes: a packed policy's tokens are those that it would
sample alone. So what packing changes is told apart from what speculation changes:

    kl, top1                of a packed policy, beside the full one: KL(full || packed) in nats per
                            token, and how often both find the same token likeliest, on the full
                            policy's samples at temperature 1
    samples_different       samples of a policy that are not the same with all drafters and in plain
                            decoding: expected none
    accept_length, ..       of each policy with each drafter, by strategy and temperature

Figures, MODEL being the name of the directory, POLICY `full`, a format of matrices or one of those
below, and ARM POLICY/DRAFTER/STRATEGY/temperature_T:

    kl, top1/MODEL/POLICY
    bytes/MODEL/POLICY              of all weights as they decode
    reward/MODEL/POLICY/temperature_T
    accept_length/MODEL/ARM
    depth_N/MODEL/ARM               share of rounds that accept a token drafted at this depth
    difference/reward/MODEL/POLICY/temperature_T    from the full policy's reward
    difference/accept_length/MODEL/ARM/OTHER        from that of policy OTHER with `head`
    samples_different/MODEL/POLICY/temperature_T
    cause_NAME/MODEL/full/head/4_1_5/top_p_0.9      share of rejections at temperature 1, see
                                    `specjax.telemetry.CAUSES`; of all arms, which have no filter,
                                    the cause is that draft and policy disagree

Intervals are 95%, bootstrap over prompts, of differences with the same draws for both; counts,
bytes and causes have none.

Drafters are `head`, `head_FORMAT` and `ngram`. `head_FORMAT` is measured with the full policy and
with that of the same format; the tree, with `head`, and n-grams with the full policy and those of
--aligned. For the latter there are also `head+METHOD`, aligned on samples of other prompts
(`specjax.drafts.alignment`); `head+bias`, which adds to each drafted token's logit the log of its
mean probability under the policy over that under the head; and two policies with `head`:
`FORMAT_taps`, whose layers below the last state that the head takes are int8, and `FORMAT_tables`,
whose embedding and language-model head are.

`--draft HEAD` is another head for the last MODEL, measured as MODEL+draft with the chain alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.command import bench_parser, user_errors
from bench.record import figure, report, write_result
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint.weights import Head, load_model
from specjax.drafts import alignment
from specjax.drafts.mtp import MTPSource
from specjax.engine.settings import EngineConfig
from specjax.engine.sources import load_head
from specjax.hub import find_model
from specjax.models.transformer import rounded
from specjax.tokenizer import with_tokenizer_end
from specjax.weights import load_tokenizer
from train.data import rows
from train.data.prompts import Prompts
from train.heads.training import FIELDS
from train.loss.packing import Sample, empty_batch, pack
from train.rewards.scoring import SampleFacts, Scorer
from train.schema import DataConfig

FULL, HEAD, NGRAM, TAPS, TABLES = "full", "head", "ngram", "_taps", "_tables"
FORMATS = ("int8", "fp8", "fp8_block", "mxfp4", "int4")
HEADS = ("int8", "mxfp4", "int4")  # formats of heads
CHAIN, TREE = "4_1_5", "4_4_16"
TEMPERATURES = (0.0, 1.0)
ROWS = 8  # samples of which all logits exist at once


class Biased:
    """A head with a bias of each drafted token, the entry `bias` of its parameters."""

    def own_proposal(self, model, params, normed):
        found = super().own_proposal(model, params, normed)
        return found._replace(scores=found.scores + params["bias"])

    def pack(self, params):
        rest = {name: value for name, value in params.items() if name != "bias"}
        return {**super().pack(rest), "bias": params["bias"]}

    def axes(self):
        return {**super().axes(), "bias": (None,)}


def with_bias(cfg, head: Head, policy, batches: Sequence[Mapping]) -> Head:
    """Adds the bias log(mean p / mean q) of the first step, over calibration tokens."""

    @jax.jit
    def sums(batch):
        row, *_ = alignment.proposed(cfg, head.source, 1, 1.0, head.params, policy, batch)
        mask = row.mask[..., None]
        return jnp.stack([(x * mask).sum((0, 1)) for x in (row.p, jax.nn.softmax(row.scores))])

    p, q = sum(map(sums, batches)) + 1e-3  # tokens; unseen ones have no bias
    kind = type("BiasedHead", (Biased, type(head.source)), {})
    return Head(kind(**vars(head.source)), {**head.params, "bias": jnp.log(p / q)})


def interval(counts: Sequence, unit: str, less: Sequence | None = None) -> dict:
    """Returns the figure of a ratio of sums over prompts, [prompts 2] counts, less another one."""
    drawn = np.random.default_rng(0).integers(0, len(counts), (2000, len(counts)))
    drawn = np.concatenate([[np.arange(len(counts))], drawn])  # first the prompts as they are

    def ratios(counts):
        over, under = np.asarray(counts, float)[drawn].sum(1).T
        return over / np.maximum(under, 1)

    value, *others = ratios(counts) - (0 if less is None else ratios(less))
    return figure(float(value), unit, np.quantile(others, [0.025, 0.975]).tolist())


def base(policy: str) -> str:
    """Returns the policy without the suffix of a mix with int8."""
    return policy.removesuffix(TAPS).removesuffix(TABLES)


class Bench:
    """A model with a head, the prompts, and the figures that are measured.

    Args:
      path: directory or file of the model.
      draft: path of a head in place of its own.
    """

    def __init__(self, path: str, draft: str | None, args: argparse.Namespace):
        loaded = load_model(find_model(path), "auto")
        self.args, self.tokenizer = args, load_tokenizer(loaded.tokenizer)
        self.length = args.max_prompt_tokens + args.max_tokens
        self.cfg, self.params = with_tokenizer_end(loaded.cfg, self.tokenizer), loaded.policy
        self.name, self.head = Path(path).name, loaded.head
        self.is_other = draft is not None
        if draft is not None:
            self.name, (self.cfg, self.head) = f"{self.name}+draft", load_head(draft, self.cfg)
        if self.head is None:
            raise ValueError(f"{path} has no draft head; name one with --draft")
        sums = args.data is None or Path(path).name == "sums"
        given = {} if sums else {"task": "auto", "path": args.data}
        data = DataConfig(seed=args.seed, **given)
        prompts, self.scorer = Prompts(self.tokenizer, data), Scorer(rows.default_reward(data))
        self.problems = {}
        for split in ("heldout", "train"):
            pairs = ((row, prompts.whole(row)) for row in rows.problems(data, split, prompts.chat))
            fitting = (pair for pair in pairs if len(pair[1]) <= args.max_prompt_tokens)
            self.problems[split] = [*itertools.islice(fitting, args.prompts)]
            if (count := len(self.problems[split])) < args.prompts:
                raise ValueError(f"--prompts {args.prompts}: {split} has {count} short enough")
        self.figures: dict[str, dict] = {}
        self.tokens: dict[tuple, list] = {}  # of each policy and temperature: plain, by drafter
        self.counts: dict[tuple, list] = {}  # of each policy's rewards, and accept lengths by arm

    def products(self, policy: str, head: str = FULL) -> Any:
        """Returns the map of patterns of a policy and a format of its head."""
        name, found = base(policy), {"draft.*": "xla" if head == FULL else head}
        if policy.endswith(TABLES):
            found |= {"embed": "int8"} | ({} if self.cfg.tie_embeddings else {"lm_head": "int8"})
        if policy.endswith(TAPS):
            taps, count = self.head.source.needs.taps, self.cfg.num_layers
            below = max(tap if isinstance(tap, int) else count for tap in taps)
            found |= {f"layers.{number}.*": "int8" for number in range(below)}
        return found | {"*": "xla" if name == FULL else name}

    def engine(self, policy: str, draft: str = HEAD, strategy: str = CHAIN, head=None) -> LLM:
        """Makes the engine of an arm."""
        form = draft.partition("_")[2] or FULL
        how = EngineConfig(products=self.products(policy, form), prefill_chunk=16)
        kind = NGRAM if draft == NGRAM else "checkpoint"
        spec = SpecConfig(strategy, draft=kind, telemetry=True)
        given = (self.cfg, self.params, head or self.head), spec, self.args.batch, self.length
        scan = not policy.endswith(TAPS)  # which compiles faster, for layers that are alike
        return LLM(*given, tokenizer=self.tokenizer, scan_layers=scan, engine=how)

    def generate(self, llm: LLM, temperatures=(1.0,), split="heldout", **options: Any) -> dict:
        """Returns a sample for each prompt, by temperature; all run through one program."""
        prompts, limits = [ids for _, ids in self.problems[split]], (self.args.max_tokens,)
        asked = [SamplingParams(t, *limits, seed=self.args.seed, **options) for t in temperatures]
        outputs = llm.generate([ids for ids in prompts for _ in asked], asked * len(prompts))
        samples = [output.samples[0] for output in outputs]
        return {t: samples[i :: len(asked)] for i, t in enumerate(temperatures)}

    def measure(self, llm: LLM, policy: str, draft: str, strategy: str = CHAIN) -> None:
        """Measures an arm at all temperatures."""
        others = {FULL, base(policy)} - {policy} if draft == HEAD else {base(policy)}
        for temperature, samples in self.generate(llm, TEMPERATURES).items():
            self.tokens[policy, temperature].append([sample.token_ids for sample in samples])
            stats, unit = [sample.stats for sample in samples], "tokens per round"
            counts = [(one.accepted + one.rounds, one.rounds) for one in stats]
            self.counts[policy, draft, strategy, temperature] = counts
            arm = f"{self.name}/{policy}/{draft}/{strategy}/temperature_{temperature:g}"
            figures = {f"accept_length/{arm}": interval(counts, unit)}
            for other in sorted(others):
                less = self.counts[other, HEAD, strategy, temperature]
                figures[f"difference/accept_length/{arm}/{other}"] = interval(counts, unit, less)
            for depth in range(1, len(stats[0].depths)):
                counts = [(sum(x.histogram[depth + 1 :]), sum(x.depths[depth:])) for x in stats]
                figures[f"depth_{depth}/{arm}"] = interval(counts, "of rounds")
            self.add(figures)

    def add(self, found: dict[str, dict]) -> None:
        print(report(found), flush=True)
        self.figures |= found

    def batches(self, samples: Sequence, split: str = "heldout") -> Iterator[dict]:
        """Yields samples, given by their token ids, with their prompts, one in a row."""
        pairs = zip(self.problems[split], samples, strict=True)
        packed = [Sample(i, ids, sample) for i, ((_, ids), sample) in enumerate(pairs)]
        for first in range(0, len(packed), ROWS):
            rows_of = [pack([sample], self.length, 1)[0] for sample in packed[first : first + ROWS]]
            rows_of += [empty_batch(1, self.length)] * (ROWS - len(rows_of))
            yield {name: np.concatenate([row[name] for row in rows_of]) for name in FIELDS}

    def rounded(self, policy: str) -> Any:
        return rounded(self.params, self.cfg.running(products=tuple(self.products(policy).items())))

    def compare(self, policy: str, llm: LLM) -> None:
        """Decodes a policy plainly, and compares it with the full one, teacher-forced."""
        other, counts, figures = self.rounded(policy), [], {}
        plain = self.generate(llm, TEMPERATURES, speculative=False)
        for temperature, samples in plain.items():
            self.tokens[policy, temperature] = [[sample.token_ids for sample in samples]]
            facts = [SampleFacts(0, s.token_ids, s.finish_reason) for s in samples]
            scored = zip(samples, self.problems["heldout"], facts, strict=True)
            rewards = [(self.scorer(s.text, row, fact).value, 1) for s, (row, _), fact in scored]
            self.counts[policy, temperature] = rewards
            arm, unit = f"{self.name}/{policy}/temperature_{temperature:g}", "mean of prompts"
            figures[f"reward/{arm}"] = interval(rewards, unit)
            less = self.counts[FULL, temperature]
            figures[f"difference/reward/{arm}"] = interval(rewards, unit, less)

        @jax.jit
        def sums(full, other, batch):
            both = (alignment.forward(self.cfg, w, batch)[1][:, :-1] for w in (full, other))
            p, q = map(jax.nn.log_softmax, both)
            kl, same = (jnp.exp(p) * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1)
            mask = batch["loss_mask"][:, 1:]
            return jnp.stack([(x * mask).sum(1) for x in (kl, same, mask)], axis=1)

        for batch in self.batches(self.tokens[FULL, 1.0][0]):
            counts += [*np.asarray(sums(self.params, other, batch))]
        counts = np.array(counts)[: self.args.prompts]  # without what fills up the last batch
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))
        arm = f"{self.name}/{policy}"
        figures[f"kl/{arm}"] = interval(counts[:, [0, 2]], "nats per token")
        figures[f"top1/{arm}"] = interval(counts[:, [1, 2]], "of tokens")
        figures[f"bytes/{arm}"] = figure(size, "bytes")
        self.add(figures)

    def run(self) -> dict[str, dict]:
        """Measures all arms."""
        for policy in (FULL, *self.args.formats):
            llm = self.engine(policy)
            if policy == FULL:  # first, for its program serves samples without a filter, too
                self.generate(llm, top_p=0.9)
                summary, arm = llm.telemetry.summary(), f"{self.name}/{FULL}/{HEAD}/{CHAIN}"
                for cause in summary.causes:
                    share = figure(summary.share(cause), "of rejections")
                    self.add({f"cause_{cause}/{arm}/top_p_0.9": share})
            self.compare(policy, llm)
            self.measure(llm, policy, HEAD)
            if policy in self.args.aligned:
                self.align(llm, policy)
            forms = [form for form in HEADS if policy in (FULL, form)]
            arms = [(f"head_{form}", CHAIN) for form in forms if form in self.args.formats]
            if policy in (FULL, *self.args.aligned):
                arms += [(HEAD, TREE), (NGRAM, CHAIN)]
            for draft, strategy in [] if self.is_other else arms:
                self.measure(self.engine(policy, draft, strategy), policy, draft, strategy)
        for (policy, temperature), (plain, *drafts) in self.tokens.items():
            different = sum(len({*map(tuple, x)}) > 1 for x in zip(plain, *drafts, strict=True))
            key = f"samples_different/{self.name}/{policy}/temperature_{temperature:g}"
            unit = f"of {len(plain)} samples, plain decoding and {len(drafts)} drafter(s)"
            self.add({key: figure(different, unit)})
        return self.figures

    def align(self, llm: LLM, policy: str) -> None:
        """Measures heads aligned with a packed policy on its samples of other prompts, and mixes of
        its format with int8."""
        samples = [sample.token_ids for sample in self.generate(llm, split="train")[1.0]]
        batches = [*self.batches(samples, "train")]
        weights, source = self.rounded(policy), self.head.source
        arms = {name: (name,) for name in alignment.METHODS} | {"all": alignment.METHODS}
        for name, methods in arms.items():
            if isinstance(source, MTPSource):  # which has the norm already
                methods = tuple(method for method in methods if method != "norm")
            if methods:
                given = self.cfg, self.params, weights, batches, methods
                head = Head(*alignment.align(source, self.head.params, *given))
                aligned = self.engine(policy, head=head) if "norm" in methods else llm
                aligned.update_head(head)
                self.measure(aligned, policy, f"head+{name}")
        biased = with_bias(self.cfg, self.head, weights, batches)
        self.measure(self.engine(policy, head=biased), policy, "head+bias")
        for mixed in (policy + TAPS, policy + TABLES):
            llm = self.engine(mixed)
            self.compare(mixed, llm)
            self.measure(llm, mixed, HEAD)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser("quantised", __doc__, "quantised")
    add = parser.add_argument
    add("models", nargs="*", default=["assets/sums"], metavar="MODEL")
    add("--draft", metavar="HEAD", help="another head for the last MODEL")
    add("--data", metavar="FILE", help="rows of all models but assets/sums, such as GSM8K's")
    add("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    add("--aligned", nargs="*", default=("mxfp4", "int4"), choices=FORMATS)
    add("--prompts", type=int, default=96, help="held-out ones, and as many to calibrate with")
    add("--max_tokens", type=int, default=128)
    add("--max_prompt_tokens", type=int, default=128, help="longer prompts are passed over")
    add("--batch", type=int, default=8, help="samples that run at once")
    return parser.parse_args(argv)


def made_by(head: str | None) -> dict[str, str]:
    """Returns how `train.draft` was called for a head in the directory of its run."""
    file = Path(head or "").parent / "run.json"
    if head is None or not file.exists():
        return {}
    calls = [call["command"] for call in json.loads(file.read_text())]
    lines = [shlex.join(["python", "-m", "train.draft", *words]) for words in calls]
    return {"draft_made_by": " && ".join(lines)}


def main(argv: Sequence[str] | None = None) -> None:
    args, figures = parse(argv), {}
    with user_errors("quantised"):
        heads = [(model, None) for model in args.models]
        for model, draft in [*heads, *([(args.models[-1], args.draft)] if args.draft else [])]:
            figures |= Bench(model, draft, args).run()
            print(write_result("quantised", vars(args) | made_by(args.draft), figures, args.out))


if __name__ == "__main__":
    main()
