"""What `train.draft` trains on: samples of the policy, or given texts, as packed micro-batches.

The policy's own samples are written to `<out>/samples`, a file per block of prompts, each with one
JSON line per sample:

    {"position": 17, "prompt_token_ids": [...], "token_ids": [...], "finish_reason": "stop"}

A block is written when all of its samples have ended, and a run that is resumed generates the
blocks that are missing. So the samples, to the last bit, are those of a run that was never stopped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.checkpoint.huggingface import replacing
from specjax.command_line import ConfigError
from specjax.engine.engine import Engine
from specjax.engine.request import Totals, make_jobs, require_valid
from specjax.parallel.sharding import MeshConfig
from specjax.settings import require_same_settings
from specjax.tokenizer import prompt_ids
from train import data, tasks
from train.collect import group_seed
from train.draft_schema import DraftRunConfig
from train.heads import FIELDS
from train.inputs import Limit, Prompts, dropped_warning, require_most
from train.packing import PackedBatch, Sample, pack
from train.tasks.files import read_rows
from train.tasks.layout import Demonstration, Problem, shown, split_of, tools_of
from train.tasks.prompt import keyed

SAMPLES, SETTINGS = "samples", "settings.yaml"  # which is JSON, but no file of rows
WAVES = 4  # a block has so many samples per slot, so that few slots wait for its last ones
PACKED_TOGETHER = 8  # micro-batches that are filled from one part of the samples

log = logging.getLogger(__name__)


class Pair(NamedTuple):
    """A prompt and what follows it, as token ids; the latter is trained on."""

    prompt: Sequence[int]
    tokens: Sequence[int]


# --- given texts ----------------------------------------------------------------------------------


class Texts(NamedTuple):
    """The rows of `data.texts`.

    Attributes:
      train, heldout: the pairs of each split; those of `heldout` give prompts to evaluate.
      limit: largest number of tokens that are trained on together.
      cut: number of texts that were cut into pieces of that many.
      passed_over: number of demonstrations that were left out because they have more.
      dropped: warning about parts of demonstrations that are not imitated; None: there are none.
    """

    train: list[Pair]
    heldout: list[Pair]
    limit: Limit
    cut: int = 0
    passed_over: int = 0
    dropped: str | None = None


def takes_prompts(cfg: DraftRunConfig) -> bool:
    """Whether held-out prompts are taken from `data.texts`, which then are not trained on."""
    return cfg.data.texts is not None and cfg.data.path is None


def read_texts(cfg: DraftRunConfig, prompts: Prompts) -> Texts:
    """Reads and encodes the texts to train on.

    One question in sixteen is held out, unless `data.path` has others or nothing is evaluated.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a row cannot be read, or none is left to train on.
    """
    limit = Limit.of_rows(cfg.packing.row_length, prompts.model)
    length, splits, cut, sizes, names = limit.tokens, {"train": [], "heldout": []}, 0, [], []
    holds_out = takes_prompts(cfg) and cfg.eval.problems > 0
    dropped = []
    for name, key, pair, is_text, keys in _pairs(cfg, prompts):
        split = split_of(key) if holds_out else "train"
        size = len(pair.prompt) + len(pair.tokens)
        longer = size > length
        dropped += [] if keys is None else [keys]
        if not is_text:
            sizes.append(size)
            names.append(name)
        if is_text and split == "heldout":
            ids = [*pair.prompt, *pair.tokens]
            prompt_size = min(cfg.rollout.max_prompt_tokens, len(ids) // 2)
            splits[split].append(Pair(ids[:prompt_size], ids[prompt_size:]))
        elif longer and is_text:
            ids, cut = [*pair.prompt, *pair.tokens], cut + 1
            pieces = [ids[i : i + length] for i in range(0, len(ids), length)]
            splits[split] += [Pair(piece[:1], piece[1:]) for piece in pieces if piece[1:]]
        elif not longer and pair.tokens:
            splits[split].append(pair)
    require_most(cfg.data, sizes, names, limit, "demonstrations")
    if not splits["train"]:
        held = ""
        if splits["heldout"]:
            held = f"{len(splits['heldout'])} are held out (eval.problems=0 holds none out), and "
        raise ValueError(
            f"data.texts={shown_paths(cfg.data.texts)}: no row is left to train on: "
            f"{held}the others have more tokens than {limit}, or a single one; add more rows"
        )
    passed_over = sum(size > length for size in sizes)
    return Texts(
        **splits, limit=limit, cut=cut, passed_over=passed_over, dropped=dropped_warning(dropped)
    )


def shown_paths(paths: str | Sequence[str]) -> str:
    """A path, or several, for messages."""
    return paths if isinstance(paths, str) else ", ".join(paths)


def _pairs(
    cfg: DraftRunConfig, prompts: Prompts
) -> Iterator[tuple[str, str, Pair, bool, tuple[str, ...] | None]]:
    """Yields what `read_texts` needs of each row.

    That is its name, the text that decides the split, the pair, whether it is text without a
    prompt, and the keys of a demonstration that are not imitated (None if it is none).
    """
    task = None
    for place, row in read_rows(cfg.data.texts):
        name = f"the row {place}"
        if {"prompt_token_ids", "token_ids"} <= row.keys():
            pair = Pair(
                _token_ids(row, "prompt_token_ids", place, prompts),
                _token_ids(row, "token_ids", place, prompts),
            )
            yield name, str(pair.prompt), pair, False, None
            continue
        if isinstance(row.get("text"), str) and "prompt" not in row:
            ids = prompt_ids(prompts.tokenizer, row["text"])
            first, *rest = prompts.known(ids, name) or [None]
            if rest:
                yield name, row["text"], Pair([first], rest), True, None
            continue
        task = task or _task_of(cfg, row, place)
        example = data.read_row(task, row, place)
        response = data.response_of(
            example,
            task,
            place,
            "data.texts are trained on: give data.path in its place, and the policy answers the "
            "prompts itself",
        )
        prompt = data.prompt_of(cfg.data, task, example, prompts.chat)
        ids = prompts.demonstration(Demonstration(prompt, response, tools_of(row), place))
        pair = Pair(ids.prompt, ids.response)
        yield name, data.question_of(example.prompt), pair, False, ids.dropped


def _task_of(cfg: DraftRunConfig, row: dict[str, Any], place: str):
    if cfg.data.prompt_key or cfg.data.answer_key:
        return keyed(cfg.data.prompt_key, cfg.data.answer_key)
    task = tasks.find_task(cfg.data.task) if cfg.data.task != "auto" else tasks.recognise(row)
    if task is None:
        raise ValueError(
            f"{place}: cannot tell what the rows of data.texts mean: the columns are "
            f"{', '.join(row) or '(none)'}, and what is known is text; prompt_token_ids with "
            f"token_ids; {tasks.known_tasks()}; rename the columns, name that of the prompt as "
            "data.prompt_key, or set data.task to module:attribute, a task of your own"
        )
    return task


def _token_ids(row: dict[str, Any], column: str, place: str, prompts: Prompts) -> Sequence[int]:
    value = row[column]
    if not isinstance(value, list) or not value or any(type(token) is not int for token in value):
        raise ValueError(
            f"{place}: column {column!r}: expected a list of token ids that is not empty, got "
            f"{shown(value)}; correct or delete the row"
        )
    return prompts.known(value, f"the row {place}, whose samples must be the policy's,")


# --- the policy's own samples ---------------------------------------------------------------------


def check_samples(cfg: DraftRunConfig, out: Path, resume: bool, tokenizer) -> None:
    """Checks that samples in the run's directory are of the same settings; notes the settings.

    Args:
      cfg: settings of the run.
      out: directory of the run.
      resume: whether the run goes on with the samples.
      tokenizer: tokenizer of the policy.

    Raises:
      ConfigError: they are of other settings.
    """
    folder, now = out / SAMPLES, json.loads(json.dumps(cfg.sampled()))
    file = folder / SETTINGS
    if resume and file.exists():
        saved = data.saved_settings(json.loads(file.read_text()), cfg.data, tokenizer)
        require_same_settings(saved, now)
        return
    with replacing(folder.absolute()) as partial:
        (partial / SETTINGS).write_text(json.dumps(now, indent=2) + "\n")


def block_prompts(cfg: DraftRunConfig) -> int:
    """The number of prompts of a block."""
    return max(1, -(-WAVES * cfg.rollout.max_batch // cfg.rollout.n))


def read_samples(out: Path) -> list[Pair]:
    """The samples of all blocks, in order."""
    files = sorted((out / SAMPLES).glob("[0-9]*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [Pair(row["prompt_token_ids"], row["token_ids"]) for row in rows]


class Sampler:
    """Generates the samples that a run's directory lacks, block by block.

    Args:
      cfg: settings of the run.
      out: directory of the run.
      order: problems in the order of draws.
      prompts: encoder of their prompts.
    """

    def __init__(self, cfg: DraftRunConfig, out: Path, order: Sequence[Problem], prompts: Prompts):
        self.cfg, self._folder, self._order, self._prompts = cfg, out / SAMPLES, order, prompts
        size = block_prompts(cfg)
        self.sizes = [
            min(size, cfg.rollout.prompts - i) for i in range(0, cfg.rollout.prompts, size)
        ]
        self.dropped = self.drawn = 0

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
            drawn = []
            while len(drawn) < size:
                position, ids = self._next(position)
                drawn.append((position, ids))
                position += 1
            jobs = []
            for at, ids in drawn:
                params = self.cfg.rollout.sampling_params(group_seed(self.cfg.seed, 0, at), n)
                jobs += make_jobs(ids, params, eos_ids, request=at)
            before = sum(self.sizes[:block]) * n

            def show(ended: int, totals: Totals, before: int = before) -> None:
                on_progress(before + ended, totals)

            samples, _ = engine.generate(jobs, show)
            require_valid(samples, lambda i, jobs=jobs: f"the sample of row {jobs[i].request}")
            rows = [
                {
                    "position": job.request,
                    "prompt_token_ids": [*job.prompt],
                    "token_ids": [*map(int, sample.token_ids)],
                    "finish_reason": sample.finish_reason,
                }
                for job, sample in zip(jobs, samples, strict=True)
            ]
            partial = file.with_suffix(".partial")
            partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
            partial.replace(file)

    def _next(self, position: int) -> tuple[int, list[int]]:
        """The first position from `position` on whose prompt can be used, and that prompt."""
        most = 1000
        for at in range(position, position + most):
            ids, _ = self._prompts.fit(self._order[at])
            self.drawn += 1
            if ids is not None:
                return at, ids
            self.dropped += 1
        raise ConfigError(
            f"{most} prompts in a row are longer than rollout.max_prompt_tokens="
            f"{self.cfg.rollout.max_prompt_tokens}; raise it, or see `python -m train.data`"
        )


# --- micro-batches and the draft vocabulary -------------------------------------------------------


def pack_pairs(cfg: DraftRunConfig, pairs: Sequence[Pair]) -> list[PackedBatch]:
    """Packs pairs, shuffled by the run's seed, into the micro-batches of a pass.

    Returns:
      Micro-batches with the arrays that `train.heads` reads.
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


def order_of(cfg: DraftRunConfig, batches: int, epoch: int) -> np.ndarray:
    """The order [batches] of micro-batches in a pass."""
    return np.random.default_rng([cfg.seed, 1 + epoch]).permutation(batches)


class Vocabulary(NamedTuple):
    """The tokens that a head drafts from.

    Attributes:
      ids: [C] token ids, ascending; None: the whole vocabulary.
      covered: share of the tokens that are trained on which are among them.
    """

    ids: np.ndarray | None
    covered: float = 1.0


def always_drafted(cfg: DraftRunConfig, size: int, always: Sequence[int]) -> list[int]:
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
    cfg: DraftRunConfig, pairs: Sequence[Pair], size: int, always: Sequence[int]
) -> Vocabulary:
    """The `draft_vocab` tokens that are most frequent in what is trained on.

    Args:
      cfg: settings of the run.
      pairs: what is trained on.
      size: size of the policy's vocabulary.
      always: tokens that are among them in any case: those that end a sample.

    Raises:
      ConfigError: there are more of these than `draft_vocab`, or it is larger than the vocabulary.
    """
    most, always = cfg.draft_vocab, always_drafted(cfg, size, always)
    if most is None:
        return Vocabulary(None)
    counts = np.zeros(size, np.int64)
    for pair in pairs:
        np.add.at(counts, np.asarray(pair.tokens, np.int64), 1)
    rank = counts.astype(np.float64)
    rank[always] = np.inf
    ids = np.sort(np.argsort(-rank, kind="stable")[:most]).astype(np.int32)
    return Vocabulary(ids, float(counts[ids].sum() / max(counts.sum(), 1)))
