"""`python -m bench.results_page`: writes docs/results.md and README's table from the result files.

No figure is typed by hand: a table below names the keys of figures, and the pages show what the
files in bench/results say. A test compares the pages with what this module makes.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.command import user_errors
from specjax.command_line import ArgumentParser

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE, README = "bench/results", "docs/results.md", "README.md"
BEGIN, END = "<!-- results: made by python -m bench.results_page -->", "<!-- end of results -->"

# How a value is written: a factor, a format, and what follows.
FORMS = {
    "x": (1, ".2f", "x"),
    "%": (100, ".0f", "%"),
    "%.1": (100, ".1f", "%"),
    "percent": (1, ".1f", "%"),
    "n": (1, ",.0f", ""),
    "s": (1, ".2f", " s"),
    "s in ms": (1000, ".0f", " ms"),
    "ms": (1, ".1f", " ms"),
    "plain": (1, ".2f", ""),
    "rounds": (1, ".0f", " rounds"),
    "tok/s": (1, ",.0f", " tok/s"),
}


class Row(NamedTuple):
    """One line of a table: what it is, the key of its figure, and a key of `FORMS`.

    Two keys are written as "first -> last". Three forms are not in `FORMS`: "of" writes the unit
    after the value, "n of" two counts, and "text" the value as it is.
    """

    what: str
    keys: str | tuple[str, str]
    form: str = "x"


class Section(NamedTuple):
    """One table: result files as columns, figures as rows, and what limits them.

    `picture` is of the first file. `note` stands above the table.
    """

    title: str
    note: str
    files: Mapping[str, str]
    rows: Sequence[Row]
    picture: bool = False


def by_batch(what: str, key: str, batches: Sequence[int], form: str = "x") -> list[Row]:
    """Makes one row per batch size; both texts have a `{}` for it."""
    return [Row(what.format(batch), key.format(batch), form) for batch in batches]


EMBEDDED, GSM8K, H200 = "embedded policy", "GSM8K policy", "embedded policy, H200"
SECTIONS = [
    Section(
        "Are tokens those of plain decoding?",
        "Random models with heads of every quality and n-grams; chains, static and dynamic trees; "
        "batches of 1 to 32; temperature 0, 0.7 and 1, and every sampling option.",
        {"coupled mode": "identity.json"},
        [
            Row("tokens compared", "tokens_compared", "n"),
            Row("samples that differ, explained by floating point", "differences_explained", "n"),
            Row("samples that differ otherwise", "differences_unexplained", "n"),
        ],
    ),
    Section(
        "Four RL runs that differ in the draft head alone",
        "GRPO on the embedded policy, 4 slots, the long tail of a rollout on a larger machine. "
        "slime reports 1.37x and 1.14x for the first two ratios (MiMo-7B on H200). These steps "
        "move the policy too little to age a frozen head. The last rows replay the acceptance "
        "through step costs of an 8B model, which are rooflines: a prediction "
        "(`python -m bench.predict`).",
        {EMBEDDED: "arms.json"},
        [
            Row("steps with the same tokens, rewards and parameters", "steps_bit_identical", "of"),
            Row("rollout tok/s, online head / no speculation", "ratio/online/none"),
            Row("online head / frozen head", "ratio/online/frozen"),
            Row("online head that starts random / no speculation", "ratio/online_random/none"),
            Row("the longest sample, online head / no speculation", "longest_ratio/online/none"),
            Row(
                "accept length of `4_1_5`, first and last step, online head",
                ("accept_length_first/online", "accept_length_last/online"),
                "plain",
            ),
            Row(
                "frozen head",
                ("accept_length_first/frozen", "accept_length_last/frozen"),
                "plain",
            ),
            Row(
                "online head that starts random",
                ("accept_length_first/online_random", "accept_length_last/online_random"),
                "plain",
            ),
            Row(
                "draft training, share of the policy update",
                "draft_training_share/online",
                "percent",
            ),
            Row(
                "of the head that starts random (6 epochs on everything)",
                "draft_training_share/online_random",
                "percent",
            ),
            Row("predicted, online / none, 8B on an H200", "predicted_ratio/h200_8b/online"),
            Row("predicted, online / none, 8B on 4 TPU v5e", "predicted_ratio/v5e_4_8b/online"),
        ],
        picture=True,
    ),
    Section(
        "Rollouts that end early",
        "Over-sampling with partial rollouts (`partial`) against steps that wait for every sample. "
        "Samples here have much the same length and share a machine that is bound by arithmetic, "
        "so the early end gains no time; it gains where slots would be idle.",
        {EMBEDDED: "schedule.json"},
        [
            Row(
                "held-out reward (512 problems), before and after training, waiting",
                ("heldout_reward/start", "heldout_reward/plain"),
                "plain",
            ),
            Row("held-out reward after training, partial", "heldout_reward/partial", "plain"),
            Row("difference in reward, partial - waiting", "heldout_reward_difference", "plain"),
            Row("seconds of a rollout, partial / waiting", "rollout_ratio"),
            Row("trained tokens of older weights", "stale_token_share", "%"),
        ],
    ),
    Section(
        "Draft training in the gaps of rollouts",
        "Two replicas of one thread each; training in the gaps against the same updates after the "
        "rollout. Rollouts are so short here that one update takes longer than most tails.",
        {EMBEDDED: "spot.json", GSM8K: "spot_gsm8k.json"},
        [
            Row("steps with the same tokens, policy and head", "steps_identical", "n"),
            Row("seconds of rollout and draft training, gaps / after", "step_ratio"),
            Row("seconds gained per step", "seconds_gained", "s"),
            Row("how much later the rollout ends, share of its tail", "tail_delay", "%"),
            Row("updates in gaps, share of all", "updates_in_gaps", "%"),
        ],
        picture=True,
    ),
    Section(
        "Speculative / plain decoding through `LLM`",
        "Tokens per second, prefill included, strategy `4_1_5`, by XLA's programs. The kernels for "
        "CPUs, below, make plain decoding faster than they make speculation.",
        {EMBEDDED: "decode_sums.json", GSM8K: "decode_gsm8k.json"},
        [
            *by_batch("batch {}", "ratio/float32/batch_{}/speculative/plain", (1, 4, 32)),
            Row("accept length, batch 1", "accept_length/float32/batch_1/speculative", "plain"),
            Row(
                "samples with other tokens, batch 1",
                "samples_different/float32/batch_1/speculative/plain",
                "n",
            ),
        ],
    ),
    Section(
        "specjax's kernels for CPUs",
        "Tokens per second. A CPU whose weights lie in its cache is bound by arithmetic: verifying "
        "a row costs nearly what decoding a row does, so speculation gains at small batches only. "
        "Chips that wait for memory gain more. The kernels compute a row in one order, whatever "
        "stands beside it, and XLA does not.",
        {EMBEDDED: "kernels_sums.json"},
        [
            *by_batch(
                "plain, kernels / XLA, batch {}",
                "ratio/float32/batch_{}/plain/xla_plain",
                (1, 8, 32),
            ),
            *by_batch(
                "`4_1_5`, kernels / XLA, batch {}",
                "ratio/float32/batch_{}/speculative/xla_speculative",
                (1, 8, 32),
            ),
            *by_batch(
                "`4_1_5` / plain, both with kernels, batch {}",
                "ratio/float32/batch_{}/speculative/plain",
                (1, 8, 32),
            ),
            *by_batch(
                "samples whose log-probabilities differ in a bit, kernels, batch {}",
                "logprobs_different/float32/batch_{}/speculative/plain",
                (1, 8, 32),
                "n",
            ),
            *by_batch(
                "the same, XLA, batch {}",
                "logprobs_different/float32/batch_{}/xla_speculative/xla_plain",
                (1, 8, 32),
                "n",
            ),
        ],
    ),
    Section(
        "What `invariant` mode costs",
        "Tokens per second over the normal programs. Plain requests run through the program that "
        "speculation runs, with its rows.",
        {EMBEDDED: "invariant_sums.json"},
        [
            *(
                row
                for dtype in ("float32", "bfloat16")
                for batch in (1, 8)
                for row in (
                    Row(
                        f"speculative, {dtype}, batch {batch}",
                        f"ratio/{dtype}/batch_{batch}/invariant/speculative",
                    ),
                    Row(
                        f"plain, {dtype}, batch {batch}",
                        f"ratio/{dtype}/batch_{batch}/invariant_plain/plain",
                    ),
                )
            ),
            Row(
                "samples that differ, bfloat16, batch 8",
                "samples_different/bfloat16/batch_8/invariant/invariant_plain",
                "n",
            ),
        ],
    ),
    Section(
        "Peers: the same policy by other programs",
        "Tokens per second of specjax over the fastest peer among `transformers.generate`, plain "
        "and with its own MTP drafts, and a plain jitted JAX sampler. The long tail is of 32 "
        "prompts with log-normal budgets. `charged` includes measuring the strategies, spread over "
        "the repeats. On the embedded policy only a batch of one or two gains by speculation.",
        {EMBEDDED: "peers_sums.json", GSM8K: "peers_gsm8k.json"},
        [
            *by_batch("specjax / best peer, batch {}", "specjax_over_best/batch_{}", (1, 8, 32)),
            Row("long tail at batch 8", "specjax_over_best/long_tail"),
            Row("long tail, charged", "specjax_over_best_charged/long_tail"),
            Row("batch 1, `block` acceptance", "specjax_block_over_best/batch_1"),
            Row("batch 1, no speculation", "specjax_plain_over_best/batch_1"),
            Row("batch 32, no speculation", "specjax_plain_over_best/batch_32"),
            Row(
                "batch 1, over transformers with its own drafts",
                "specjax_over_transformers_assisted/batch_1",
            ),
            Row("specjax, batch 1", "specjax_tokens_per_sec/batch_1", "tok/s"),
            Row("best peer, batch 1", "best_peer/batch_1", "text"),
        ],
    ),
    Section(
        "A rollout with a long tail",
        "64 prompts, 4 samples each, 64 slots, lengths from a log-normal distribution whose 99th "
        "percentile is 20 medians. `goodput` is the default controller. It is charged with its "
        "calibration once for all repeats, as an engine is that lives through several rollouts; "
        "`apart` leaves the calibration out, `each` charges it to every rollout. On the CPU most "
        "of a rollout is bound by arithmetic, of which speculation needs more; on the H200 a round "
        "of this small policy is bound by starting kernels. The last row compares with the fastest "
        "strategy at each size of the batch, chosen afterwards.",
        {
            EMBEDDED: "longtail_sums.json",
            GSM8K: "longtail_gsm8k.json",
            H200: "longtail_sums_h200.json",
        },
        [
            Row("wall time, goodput / plain", "wall_ratio/goodput/plain_calibration_shared"),
            Row("apart", "wall_ratio/goodput/plain_calibration_apart"),
            Row("each", "wall_ratio/goodput/plain"),
            Row(
                "wall time, goodput / best static strategy",
                "wall_ratio/goodput/best_static_calibration_shared",
            ),
            Row("apart", "wall_ratio/goodput/best_static_calibration_apart"),
            Row("each", "wall_ratio/goodput/best_static"),
            Row("the best static strategy", "best_static", "text"),
            Row("tail, goodput / plain", "tail_seconds_ratio/goodput/plain"),
            Row("tok/s of the longest sample, goodput / plain", "longest_rate_ratio/goodput/plain"),
            Row("calibration", "calibration_seconds", "s"),
            Row("samples with other tokens", "samples_different/goodput", "n"),
            Row("ideal / best static strategy", "ideal/best_static"),
        ],
        picture=True,
    ),
    Section(
        "The same rollout on larger chips, predicted",
        "Step costs of an 8B model are rooflines, not measured. All samples run at once.",
        {EMBEDDED: "replay_sums.json"},
        [
            Row("H200, goodput / plain", "predicted_wall_ratio/h200_8b/goodput/plain"),
            Row(
                "H200, goodput / best static",
                "predicted_wall_ratio/h200_8b/goodput/best_static",
            ),
            Row("4 TPU v5e, goodput / plain", "predicted_wall_ratio/v5e_4_8b/goodput/plain"),
            Row(
                "4 TPU v5e, goodput / best static",
                "predicted_wall_ratio/v5e_4_8b/goodput/best_static",
            ),
        ],
    ),
    Section(
        "The controller at each batch size",
        "Tokens per second of goodput control over the best of five strategies (the best of five "
        "medians is flattered by noise), over `off`, and with a useless head over an engine that "
        "cannot speculate.",
        {EMBEDDED: "control_sums.json", GSM8K: "control_gsm8k.json"},
        [
            *by_batch(
                "goodput / best, batch {}", "over_best/batch_{}/goodput", (1, 2, 4, 8, 16, 32, 64)
            ),
            *by_batch("goodput / `off`, batch {}", "over_off/batch_{}/goodput", (1, 8, 32)),
            *by_batch(
                "useless head / plain, batch {}",
                "useless_head/batch_{}/goodput_over_plain",
                (1, 2, 4, 8, 16, 32, 64),
            ),
            Row(
                "whole sweep / best, calibration included",
                "whole_sweep/goodput_over_best/calibration_charged",
            ),
        ],
        picture=True,
    ),
    Section(
        "The head swapped for a random one and back",
        "Rounds until a controller is within 5% of the best strategy again, at batch 2, and "
        "seconds lost in the whole run; each of 7 runs calibrates anew. A controller that is not "
        "told of new weights leaves the bad head, and does not return to the good one within the "
        "run.",
        {EMBEDDED: "control_swap_sums.json", GSM8K: "control_swap_gsm8k.json"},
        [
            Row("goodput, from the start", "recovery_rounds/announced/goodput/start", "rounds"),
            Row(
                "after the swap for the bad head",
                "recovery_rounds/announced/goodput/swapped_for_a_bad_one",
                "rounds",
            ),
            Row("after the swap back", "recovery_rounds/announced/goodput/swapped_back", "rounds"),
            Row(
                "after the swap for the bad head, not told",
                "recovery_rounds/unannounced/goodput/swapped_for_a_bad_one",
                "rounds",
            ),
            *(
                Row(f"seconds lost, {name}", f"regret_seconds/announced/{name}", "s")
                for name in ("goodput", "static", "ema", "bandit")
            ),
            Row("seconds lost, goodput, not told", "regret_seconds/unannounced/goodput", "s"),
        ],
        picture=True,
    ),
    Section(
        "Accept length of rules and trees",
        "7 drafted tokens at temperature 1, by the policy's head. The defaults follow from it.",
        {EMBEDDED: "acceptance.json", GSM8K: "acceptance.json"},
        [
            Row("coupled, chain", "accept_length/{policy}/T_1/head/coupled/chain/nodes_7", "plain"),
            Row("block, chain", "accept_length/{policy}/T_1/head/block/chain/nodes_7", "plain"),
            Row(
                "coupled, dynamic tree of 4 children",
                "accept_length/{policy}/T_1/head/coupled/dynamic_wide_tau_0.6/nodes_7",
                "plain",
            ),
            Row(
                "recursive, static tree with a long branch",
                "accept_length/{policy}/T_1/head/recursive/spine/nodes_7",
                "plain",
            ),
        ],
        picture=True,
    ),
    Section(
        "Where the time of a round goes",
        "Parts of a round of `4_1_5` at batch 1; each position's noise is drawn once, as in plain "
        "decoding.",
        {"V = 1,024": "round.json", "Qwen3-0.6B shapes, V = 151,936": "round.json"},
        [
            Row(
                "accept and commit, of a round without noise",
                "share_without_noise/{shape}/4_1_5/temperature/accept_and_commit",
                "%.1",
            ),
            Row(
                "the same with top-p and penalties",
                "share_without_noise/{shape}/4_1_5/top_p_and_penalties/accept_and_commit",
                "%.1",
            ),
            Row("noise, of a round", "share/{shape}/4_1_5/temperature/noise", "%.1"),
            Row("drafting, of a round", "share/{shape}/4_1_5/temperature/draft", "%.1"),
            Row("verifying, of a round", "share/{shape}/4_1_5/temperature/verify", "%.1"),
        ],
    ),
    Section(
        "Four workloads",
        "Strategy `4_1_5` over plain decoding, at an eighth of the workloads' lengths (256 prompt "
        "and 16 output tokens): so few tokens make wide intervals. The embedded policy runs beyond "
        "the end of its texts there, where little is accepted and a controller would not draft.",
        {EMBEDDED: "workloads_sums.json", GSM8K: "workloads_gsm8k.json"},
        [
            *by_batch("greedy, {} at once", "speedup/greedy/concurrency_{}", (1, 4, 8)),
            *by_batch("T 0.7, top-p 0.9, {} at once", "speedup/sampled/concurrency_{}", (1, 4, 8)),
            Row("greedy with penalties", "speedup/penalties/concurrency_1"),
            Row("accept length, greedy", "accept_length/greedy/concurrency_1", "plain"),
            Row("accept length, T 0.7, top-p 0.9", "accept_length/sampled/concurrency_1", "plain"),
            Row("drafting, of a round, greedy", "draft_share/greedy/concurrency_1", "%"),
        ],
    ),
    Section(
        "How long the device waits for the host",
        "Seconds of the engine that its programs alone do not need, at batch 1. A profile of the "
        "host's functions lies beside each JSON.",
        {EMBEDDED: "host_sums.json", GSM8K: "host_gsm8k.json"},
        [
            Row("plain", "host_share/plain/batch_1", "%"),
            Row("speculative", "host_share/speculative/batch_1", "%"),
            Row("with a controller", "host_share/controlled/batch_1", "%"),
        ],
    ),
    Section(
        "The server against the batch API",
        "Requests that are not streamed, from 32 clients on the same machine. Both count why "
        "drafts are rejected; `LLM` by default does not.",
        {EMBEDDED: "serve_throughput.json"},
        [
            Row("tok/s, HTTP / `LLM`", "tokens_per_second_ratio/http/batch"),
            Row("no counting in `LLM`", "tokens_per_second_ratio/http/batch_without_telemetry"),
            Row("tokens", "tokens", "n"),
            Row("requests with other tokens", "requests_different", "n"),
        ],
    ),
    Section(
        "The server under load",
        "64 clients, requests of all kinds, for 16 slots: most of the wait for a first token is "
        "for a slot.",
        {EMBEDDED: "serve_load.json"},
        [
            Row("requests", "requests", "n"),
            Row("whose clients left", "requests_left", "n"),
            Row("malformed", "malformed", "n"),
            Row("malformed and accepted", "malformed_accepted", "n"),
            Row("lost", "requests_lost", "n"),
            Row("unlike plain decoding", "requests_wrong", "n"),
            Row("cache pages held at the end", "pages_used/after", "n"),
            Row("growth of memory", "memory_growth", "%.1"),
            Row("first token, median", "first_token_seconds/load/p50", "s"),
            Row("first token, 99th percentile", "first_token_seconds/load/p99", "s"),
            Row("between tokens, median", "inter_token_seconds/load/p50", "s in ms"),
            Row("between tokens, 99th percentile", "inter_token_seconds/load/p99", "s in ms"),
            Row("tok/s, speculation on / off", "tokens_per_second_ratio/on/off"),
        ],
    ),
    Section(
        "An 8B model on an H200",
        "Random weights in bfloat16, 1,024 tokens per sample, strategy `4_1_5`; drafts are "
        "accepted with a given probability, which a script decides. 36 layers are computed from "
        "12 and 4. [gpu.md](gpu.md) has the parts and their targets.",
        {f"batch {batch}": f"gpu/round.{batch}.h200.json" for batch in (1, 8, 32)},
        [
            Row("tok/s over plain decoding, probability 0.6", "speedup/0.6"),
            Row("tok/s over plain decoding, probability 0.8", "speedup/0.8"),
            Row("a round / a plain step", "round_over_plain"),
            Row("a plain step", "ms/36_layers/off", "ms"),
        ],
    ),
]


class Headline(NamedTuple):
    """A row of README's table."""

    what: str
    file: str
    row: Row


HEADLINES = [
    Headline(
        "tokens that differ from plain decoding's (chains, trees, batch 1 to 32, any temperature)",
        "identity.json",
        Row("", ("differences_unexplained", "tokens_compared"), "n of"),
    ),
    Headline(
        "RL runs with and without speculation: steps with the same tokens, rewards and policy",
        "arms.json",
        Row("", "steps_bit_identical", "of"),
    ),
    Headline(
        "RL rollouts at 4 slots, online head / no speculation",
        "arms.json",
        Row("", "ratio/online/none"),
    ),
    Headline(
        "accept length of a head that starts random, first and last of 20 RL steps",
        "arms.json",
        Row("", ("accept_length_first/online_random", "accept_length_last/online_random"), "plain"),
    ),
    Headline(
        "held-out reward, before and after 24 RL steps",
        "schedule.json",
        Row("", ("heldout_reward/start", "heldout_reward/plain"), "plain"),
    ),
    Headline(
        "GSM8K policy, batch 1, specjax / the fastest peer",
        "peers_gsm8k.json",
        Row("", "specjax_over_best/batch_1"),
    ),
    Headline(
        "GSM8K policy, long tail at batch 8, specjax / the fastest peer",
        "peers_gsm8k.json",
        Row("", "specjax_over_best/long_tail"),
    ),
    Headline(
        "plain decoding with specjax's kernels for CPUs / by XLA, batch 8",
        "kernels_sums.json",
        Row("", "ratio/float32/batch_8/plain/xla_plain"),
    ),
    Headline(
        "8B on an H200, batch 8, drafts accepted with probability 0.8, speculative / plain",
        "gpu/round.8.h200.json",
        Row("", "speedup/0.8"),
    ),
    Headline(
        "through HTTP, 32 clients / the batch API",
        "serve_throughput.json",
        Row("", "tokens_per_second_ratio/http/batch"),
    ),
]


def load(file: str) -> dict:
    return json.loads((ROOT / RESULTS / file).read_text(encoding="utf-8"))


def cell(result: Mapping, row: Row, **names: str) -> str:
    """Writes a figure with its interval; empty where the file does not have it."""
    keys = [row.keys] if isinstance(row.keys, str) else row.keys
    entries = [result["figures"].get(key.format(**names)) for key in keys]
    if None in entries:
        return ""
    first = entries[0]
    if row.form == "of":
        return f"{first['value']} {first['unit']}"
    if row.form == "n of":
        return " of ".join(f"{entry['value']:,}" for entry in entries)
    if row.form == "text":
        return f"`{first['value']}`"
    factor, spec, after = FORMS[row.form]

    def number(value: float | None) -> str:
        return "none" if value is None else format(factor * value, spec)

    values = " -> ".join(number(entry["value"]) + after for entry in entries)
    if len(entries) > 1 or first["interval"] is None:
        return values
    return f"{values} [{', '.join(map(number, first['interval']))}]"


def source(label: str, file: str, result: Mapping) -> str:
    """Says where a column comes from: command, JSON, machine, versions and date."""
    machine, versions = result["machine"], result["versions"]
    where = machine["device"] if machine["platform"] != "cpu" else machine["processor"]
    cores = "" if machine["platform"] != "cpu" else f", {machine['cores']} cores"
    return (
        f"- {label}: `{result['command']}` ([JSON](../{RESULTS}/{file}); {where}{cores}; jax "
        f"{versions['jax']}; {result['date'][:10]})"
    )


NAMES = {EMBEDDED: {"policy": "sums"}, GSM8K: {"policy": "gsm8k"}, H200: {"policy": "sums"}}
SHAPES = {"V = 1,024": "vocab_1024", "Qwen3-0.6B shapes, V = 151,936": "qwen3_0.6b"}


def table(section: Section) -> str:
    """Writes one section of the page.

    Raises:
      ValueError: no file has a row's figure.
    """
    results = {label: load(file) for label, file in section.files.items()}
    lines = [f"## {section.title}", "", textwrap.fill(section.note, 100), ""]
    lines += [f"| | {' | '.join(results)} |", "|---" * (1 + len(results)) + "|"]
    for row in section.rows:
        cells = [
            cell(result, row, **NAMES.get(label, {}), shape=SHAPES.get(label, ""))
            for label, result in results.items()
        ]
        if not any(cells):
            raise ValueError(f"{section.title}: no file has the figure {row.keys}")
        lines.append(f"| {row.what} | {' | '.join(cells)} |")
    lines.append("")
    told: dict[str, list[str]] = {}
    for label, file in section.files.items():
        told.setdefault(file, []).append(label)
    for file, labels in told.items():
        lines.append(source(", ".join(labels), file, results[labels[0]]))
    if section.picture:
        pictures = [f"../{RESULTS}/{Path(file).with_suffix('.png')}" for file in told]
        lines += ["", *(f"![{section.title}]({picture})" for picture in pictures[:1])]
        for label, picture in zip(list(results)[1:], pictures[1:], strict=False):
            lines.append(f"([the picture for the {label}]({picture}))")
    return "\n".join(lines)


HEAD = """# What was measured

This page is made from the files in `bench/results/` by `python -m bench.results_page`
(`make results`). Brackets hold 95% intervals, or for rates the slowest and the fastest turn. What
is compared took turns in one run. The embedded policy (`assets/sums`) has 12 layers of width 192
and adds numbers; the GSM8K policy was trained with specjax, and its weights are not in the
repository. `4_1_5` is a chain of 4 drafted tokens.

Commands, and the keys of some figures, were renamed on 27 November 2026, in older files too; the
values are those that were measured. Each file names the commit that it measured; programs have
changed since.
"""


def page() -> str:
    """Returns the text of docs/results.md."""
    return HEAD + "\n" + "\n\n".join(table(section) for section in SECTIONS) + "\n"


def readme_table() -> str:
    """Returns README's table."""
    lines = ["| what | measured | command |", "|---|---|---|"]
    for what, file, row in HEADLINES:
        result = load(file)
        lines.append(f"| {what} | {cell(result, row)} | `{short(result['command'])}` |")
    return "\n".join(lines)


def short(command: str) -> str:
    """Returns a command up to its first option, and its config."""
    words = command.split()
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    kept = words[:first]
    if "--config" in words:
        kept += ["--config", words[words.index("--config") + 1]]
    return " ".join(kept)


def with_table(readme: str) -> str:
    """Replaces what lies between the two marks of README; without marks it is unchanged."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{BEGIN}\n{readme_table()}\n{END}{after}" if begin and end else readme


def main(argv: Sequence[str] | None = None) -> None:
    parser: argparse.ArgumentParser = ArgumentParser(
        prog="python -m bench.results_page", description=__doc__
    )
    parser.parse_args(argv)
    with user_errors("results_page"):
        readme = ROOT / README
        made = {ROOT / PAGE: page(), readme: with_table(readme.read_text(encoding="utf-8"))}
        for path, text in made.items():
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
