"""Samples of the policy, or given texts, that `train.draft` trains on, as packed micro-batches.

`cfg` are the settings of that program. The policy's own samples are written to `<out>/samples`, a
file per block of prompts, each with one JSON line per sample:

    {"position": 17, "prompt_token_ids": [...], "token_ids": [...], "finish_reason": "stop"}

A block is written when all of its samples have ended, and a run that is resumed generates the
blocks that are missing. So the samples, to the last bit, are those of a run that was never stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.command_line import ConfigError
from specjax.engine.engine import Engine
from specjax.engine.request import Totals, make_jobs, require_valid
from specjax.parallel.sharding import MeshConfig
from specjax.tokenizer import prompt_ids
from train.data import rows
from train.data.checks import Limit, dropped_warnings, require_most
from train.data.prompts import Pair, Prompts
from train.data.tasks.files import read_rows
from train.data.tasks.layout import Demonstration, Problem, shown, split_of, tools_of
from train.heads.training import FIELDS
from train.loss.packing import PackedBatch, Sample, pack
from train.run.files import replace
from train.run.start import require_same

SAMPLES, SETTINGS = "samples", "settings.yaml"  # which is JSON, but no file of rows
WAVES = 4  # a block has so many samples per slot, so that few slots wait for its last ones
PACKED_TOGETHER = 8  # micro-batches that are filled from one part of the samples


# --- given texts ----------------------------------------------------------------------------------


class Texts(NamedTuple):
    """The rows of `data.texts`.

    Attributes:
      train, heldout: the pairs of each split; those of `heldout` give prompts to evaluate.
      notes: lines to print at start.
    """

    train: list[Pair]
    heldout: list[Pair]
    notes: list[str]


def takes_prompts(cfg: Any) -> bool:
    """Returns whether held-out prompts are from `data.texts`, which then are not trained on."""
    return cfg.data.texts is not None and cfg.data.path is None and cfg.eval.problems > 0


def read_texts(cfg: Any, prompts: Prompts) -> Texts:
    """Reads and encodes the texts to train on.

    One question in sixteen is held out, unless `data.path` has others or nothing is evaluated.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a row cannot be read, or none is left to train on.
    """
    limit = Limit.of_rows(cfg.packing.row_length, prompts.model)
    length, train, heldout, cut, whole = limit.tokens, [], [], 0, []
    for key, pair, is_text in _text_rows(cfg, prompts):
        ids = [*pair.prompt, *pair.tokens]
        held = takes_prompts(cfg) and split_of(key) == "heldout"
        whole += [] if is_text else [pair]
        if is_text and held:
            size = min(cfg.rollout.max_prompt_tokens, len(ids) // 2)
            heldout.append(Pair(ids[:size], ids[size:]))
        elif is_text and len(ids) > length:
            cut += 1
            pieces = [ids[i : i + length] for i in range(0, len(ids), length)]
            train += [Pair(piece[:1], piece[1:]) for piece in pieces if piece[1:]]
        elif len(ids) <= length and pair.tokens:
            (heldout if held else train).append(pair)
    sizes = [len(pair.prompt) + len(pair.tokens) for pair in whole]
    require_most(cfg.data, sizes, limit, "demonstrations")
    paths = cfg.data.texts if isinstance(cfg.data.texts, str) else ", ".join(cfg.data.texts)
    if not train:
        raise ValueError(
            f"data.texts={paths}: no row is left to train on: {len(heldout)} are held out "
            f"(eval.problems=0 holds none out), and the others have more tokens than {limit}, or a "
            "single one; add more rows"
        )
    passed_over = sum(size > length for size in sizes)
    notes = [f"data: {paths}, {len(train)} texts to train on, {len(heldout)} held out"]
    if cut:
        notes.append(f"{cut} texts have more tokens than {limit} and are cut into pieces")
    if passed_over:
        notes.append(
            f"WARNING: {passed_over} demonstrations have more tokens than {limit} and are left "
            f"out; {limit.remedy} to train on them"
        )
    notes += [f"WARNING: {text}" for text in dropped_warnings(whole)]
    return Texts(train, heldout, notes)


def _text_rows(cfg: Any, prompts: Prompts) -> Iterator[tuple[str, Pair, bool]]:
    """Yields the rows of `data.texts`: the text that decides the split, the row as token ids, and
    whether it is text without a prompt."""
    task, otherwise = None, "set data.path instead, and the policy answers the prompts itself"
    for place, row in read_rows(cfg.data.texts):
        if {"prompt_token_ids", "token_ids"} <= row.keys():
            columns = "prompt_token_ids", "token_ids"
            pair = Pair(*(_token_ids(row, column, place, prompts) for column in columns))
            yield str(pair.prompt), pair, False
        elif isinstance(row.get("text"), str) and "prompt" not in row:
            ids = prompts.known(prompt_ids(prompts.tokenizer, row["text"]), f"the row {place}")
            if len(ids) > 1:
                yield row["text"], Pair(ids[:1], ids[1:]), True
        else:
            task = task or rows.task_of(cfg.data, row, f"{place} of data.texts")
            example = rows.read_row(task, row, place)
            response = rows.response_of(example, task, place, otherwise)
            prompt = rows.prompt_of(cfg.data, task, example, prompts.chat)
            pair = prompts.demonstration(Demonstration(prompt, response, tools_of(row), place))
            yield rows.question_of(example.prompt), pair, False


def _token_ids(row: dict[str, Any], column: str, place: str, prompts: Prompts) -> Sequence[int]:
    """Reads a column of token ids, which the policy must have."""
    value = row[column]
    if not isinstance(value, list) or not value or any(type(token) is not int for token in value):
        raise ValueError(
            f"{place}: column {column!r}: expected a list of token ids that is not empty, got "
            f"{shown(value)}; correct or delete the row"
        )
    return prompts.known(value, f"the row {place}, whose samples must be the policy's,")


# --- the policy's own samples ---------------------------------------------------------------------


def check_samples(cfg: Any, out: Path, resume: bool, tokenizer) -> None:
    """Checks that samples in the run's directory are of the same settings; notes the settings.

    Args:
      cfg: settings of the run.
      out: directory of the run.
      resume: whether the run goes on with the samples.
      tokenizer: tokenizer of the policy.

    Raises:
      ConfigError: they are of other settings.
    """
    file, now = out / SAMPLES / SETTINGS, json.loads(json.dumps(cfg.sampled()))
    if resume and file.exists():
        require_same(json.loads(file.read_text()), now, tokenizer)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    for block in file.parent.glob("*.jsonl"):  # of settings that are not known
        block.unlink()
    replace(file, [json.dumps(now, indent=2).encode() + b"\n"])


def read_samples(out: Path) -> list[Pair]:
    """Reads the samples of all blocks, in order."""
    files = sorted((out / SAMPLES).glob("[0-9]*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [Pair(line["prompt_token_ids"], line["token_ids"]) for line in lines]


class Sampler:
    """Generates the samples that a run's directory lacks, block by block.

    Args:
      cfg: settings of the run.
      out: directory of the run.
      order: problems in the order of draws.
      prompts: encoder of their prompts.
    """

    def __init__(self, cfg: Any, out: Path, order: Sequence[Problem], prompts: Prompts):
        self.cfg, self._folder, self._order, self._prompts = cfg, out / SAMPLES, order, prompts
        roll = cfg.rollout
        size = max(1, -(-WAVES * roll.max_batch // roll.n))
        self.sizes = [min(size, roll.prompts - i) for i in range(0, roll.prompts, size)]
        self.dropped = 0

    def _file(self, block: int) -> Path:
        return self._folder / f"{block:05d}.jsonl"

    @property
    def done(self) -> int:
        """The number of blocks that are written."""
        return sum(self._file(block).exists() for block in range(len(self.sizes)))

    def run(self, engine: Engine, eos_ids: Sequence[int], on_progress: Callable[..., None]) -> None:
        """Generates the missing blocks.

        Args:
          engine: engine with the policy's weights, which decodes plainly.
          eos_ids: tokens that end a sample.
          on_progress: function that is called often, with the number of samples that have ended,
            those of earlier blocks included, and the totals of this block.

        Raises:
          ConfigError: many prompts in a row cannot be used.
          InvalidLogitsError: the policy's logits are no distribution.
        """
        position, n = 0, self.cfg.rollout.n
        for block, size in enumerate(self.sizes):
            file = self._file(block)
            if file.exists():
                position = json.loads(file.read_text().splitlines()[-1])["position"] + 1
                continue
            jobs = []
            for _ in range(size):
                place, ids = self._next(position)
                params = self.cfg.rollout.sampling_params(
                    rows.group_seed(self.cfg.seed, 0, place), n
                )
                jobs += make_jobs(ids, params, eos_ids, request=place)
                position = place + 1
            before = sum(self.sizes[:block]) * n

            def show(ended: int, totals: Totals, before: int = before) -> None:
                on_progress(before + ended, totals)

            samples, _ = engine.generate(jobs, show)
            require_valid(samples, lambda i, jobs=jobs: f"the sample of row {jobs[i].request}")
            lines = [
                {
                    "position": job.request,
                    "prompt_token_ids": [*job.prompt],
                    "token_ids": [*map(int, sample.token_ids)],
                    "finish_reason": sample.finish_reason,
                }
                for job, sample in zip(jobs, samples, strict=True)
            ]
            replace(file, (json.dumps(line).encode() + b"\n" for line in lines))

    def _next(self, position: int) -> tuple[int, list[int]]:
        """Returns the first position from `position` on whose prompt can be used, and its ids."""
        most = 1000
        for place in range(position, position + most):
            ids, _ = self._prompts.fit(self._order[place])
            if ids is not None:
                return place, ids
            self.dropped += 1
        raise ConfigError(
            f"{most} prompts in a row are longer than rollout.max_prompt_tokens="
            f"{self.cfg.rollout.max_prompt_tokens}; raise it, or see `python -m train.data`"
        )


# --- micro-batches and the draft vocabulary -------------------------------------------------------


def pack_pairs(cfg: Any, pairs: Sequence[Pair]) -> list[PackedBatch]:
    """Packs pairs, shuffled by the run's seed, into the micro-batches of a pass.

    Returns:
      Micro-batches with the arrays that `train.heads.training` reads.
    """
    packing, batches = cfg.packing, []
    shuffled = np.random.default_rng([cfg.seed, 0]).permutation(len(pairs))
    rows = packing.sizes(MeshConfig())[0]  # one size, for each micro-batch is an update
    room = rows * packing.row_length * PACKED_TOGETHER
    part, tokens = [], 0

    def close() -> None:
        for batch in pack(part, packing.row_length, rows):
            batches.append({name: batch[name] for name in FIELDS})

    for index in shuffled.tolist():
        pair = pairs[index]
        size = len(pair.prompt) + len(pair.tokens)
        if part and tokens + size > room:
            close()
            part, tokens = [], 0
        part.append(Sample(len(part), pair.prompt, pair.tokens))
        tokens += size
    close()
    return batches


def order_of(cfg: Any, batches: int, epoch: int) -> np.ndarray:
    """Returns the order [batches] of micro-batches in a pass."""
    return np.random.default_rng([cfg.seed, 1 + epoch]).permutation(batches)


def always_drafted(cfg: Any, size: int, always: Sequence[int]) -> list[int]:
    """Checks `draft_vocab`; returns those of the tokens `always` that the policy has, ascending.

    Args and errors are those of `choose_vocabulary`.
    """
    always = sorted({token for token in always if token < size})
    if cfg.draft_vocab is not None and not len(always) <= cfg.draft_vocab <= size:
        raise ConfigError(
            f"draft_vocab: expected {len(always)} (the tokens that end a sample) to {size} (the "
            f"policy's vocabulary), got {cfg.draft_vocab}"
        )
    return always


def choose_vocabulary(
    cfg: Any, pairs: Sequence[Pair], size: int, always: Sequence[int]
) -> tuple[np.ndarray | None, float]:
    """Chooses the `draft_vocab` tokens that are most frequent in what is trained on.

    Args:
      cfg: settings of the run.
      pairs: what is trained on.
      size: size of the policy's vocabulary.
      always: tokens that are among them in any case: those that end a sample.

    Returns:
      [C] token ids, ascending, or None for the whole vocabulary; and the share of the tokens that
      are trained on which are among them.

    Raises:
      ConfigError: there are more of these than `draft_vocab`, or it is larger than the vocabulary.
    """
    most, always = cfg.draft_vocab, always_drafted(cfg, size, always)
    if most is None:
        return None, 1.0
    counts = np.zeros(size, np.int64)
    for pair in pairs:
        np.add.at(counts, np.asarray(pair.tokens, np.int64), 1)
    rank = counts.astype(np.float64)
    rank[always] = np.inf
    ids = np.sort(np.argsort(-rank, kind="stable")[:most]).astype(np.int32)
    return ids, float(counts[ids].sum() / max(counts.sum(), 1))
