"""Packing of variable-length samples into fixed rows.

A micro-batch is a dict of numpy arrays [R S]. R is one of few numbers, so that few programs are
compiled (`row_counts`):

    tokens               int32    prompt and response, one sample after the other; 0 in padding
    positions            int32    restart at 0 in every sample
    segment_ids          int32    1, 2, ... along a row; 0 is padding
    loss_mask            float32  1 where the policy sampled the token (stop token included); 0 in
                                  the prompt, and between the turns of a response
    advantages           float32  the sample's advantage on its loss tokens, 0 elsewhere
    old_logprobs         float32  the trainer's log-probability before the update, 0 until it is
                                  filled in; of stale tokens under the weights that sampled them
    staleness            int32    number of weight updates since the token was sampled
    behaviour_logprobs   float32  the log-probability of the engine that sampled the token
    sample_ids           int32    index of the sample in the rollout batch; -1 is padding
    records              [R S M ..] only for a model that records anything, see `SampleOutput`:
                                  record of the row of token t; all bits set if unknown

Index t describes token t. A sample is never split over rows. For example, samples
prompt [5 6] response [7 2], prompt [8] response [9 2], in a row of 8:

    tokens       5 6 7 2 8 9 2 0
    positions    0 1 2 3 0 1 2 0
    segment_ids  1 1 1 1 2 2 2 0
    loss_mask    0 0 1 1 0 1 1 0
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array

from specjax.models.transformer import no_records

_FIELDS = {
    "tokens": np.int32,
    "positions": np.int32,
    "segment_ids": np.int32,
    "loss_mask": np.float32,
    "advantages": np.float32,
    "old_logprobs": np.float32,
    "staleness": np.int32,
    "behaviour_logprobs": np.float32,
    "sample_ids": np.int32,
}

_COPIED = ("behaviour_logprobs", "old_logprobs", "staleness")

PackedBatch = dict[str, np.ndarray]


@dataclass
class Sample:
    """One prompt with one response; the unit of packing.

    Attributes:
      sample_id: index in the rollout batch, prompt * G + sample; it decides the packing order.
      prompt_ids: token ids of the prompt, at least one.
      response_ids: token ids of the response, at least one, the stop token included.
      behaviour_logprobs: the engine's log-probability of each response token; None for
        demonstrations.
      old_logprobs: the trainer's log-probability of each response token; None if not known yet.
      advantage: advantage of the whole response, or of each of its tokens.
      staleness: number of weight updates since each response token was sampled; None for 0.
      loss_mask: 1 or 0 for each response token, see above; None if all are in the loss.
      records: [prompt and response tokens - 1, M ..], see `SampleOutput`; None if the model records
        nothing, or its records are not to be used again.
    """

    sample_id: int
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    behaviour_logprobs: Sequence[float] | None = None
    old_logprobs: Sequence[float] | None = None
    advantage: float | Sequence[float] = 0.0
    staleness: Sequence[int] | None = None
    loss_mask: Sequence[int] | None = None
    records: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def row_counts(needed: int, sizes: Sequence[int]) -> list[int]:
    """The rows of each micro-batch, by which `needed` rows are filled with the fewest of padding.

    Micro-batches of the largest size come first; with no row there is one of the smallest. For
    example, 23 rows in sizes 16, 4 and 1 are 16 + 4 + 1 + 1 + 1.
    """
    counts, sizes = [], sorted(sizes)
    while needed > 0 or not counts:
        counts.append(next((size for size in reversed(sizes) if size <= needed), sizes[0]))
        needed -= counts[-1]
    return counts


def pack(
    samples: Iterable[Sample],
    row_length: int,
    rows: int | Sequence[int],
    num_batches: int | None = None,
    loss_on: str = "response",
) -> list[PackedBatch]:
    """Packs samples first-fit, in order of `sample_id`, into micro-batches [rows, row_length].

    The result does not depend on the order in which the samples finished.

    Args:
      samples: samples with distinct `sample_id`s.
      row_length: number of tokens per row, S.
      rows: number of rows per micro-batch, R, or several numbers to choose from (`row_counts`); the
        last micro-batch is filled up with padding.
      num_batches: number of micro-batches, the last ones perhaps all padding, with one number of
        rows; None for as many as are needed.
      loss_on: `response`, or `all` for every token that has a predecessor (pretraining style).

    Returns:
      Micro-batches in row order; with no samples and no `num_batches`, one of padding.

    Raises:
      ValueError: a sample longer than a row, or with log-probabilities or a mask of another length
        than its response; or more rows than `num_batches`.
    """
    sizes = (rows,) if isinstance(rows, int) else rows
    samples = sorted(samples, key=lambda sample: sample.sample_id)
    layout = _first_fit(samples, row_length)
    counts = row_counts(len(layout), sizes)
    if num_batches is not None:
        if len(layout) > num_batches * rows:
            raise ValueError(f"{len(layout)} rows do not fit {num_batches} x {rows}")
        counts = [rows] * num_batches
    facts = next((s.records for s in samples if s.records is not None), None)
    facts = None if facts is None else jax.ShapeDtypeStruct(facts.shape[1:], facts.dtype)
    batches = [empty_batch(count, row_length, facts) for count in counts]
    places = [(batch, row) for batch in batches for row in range(len(batch["tokens"]))]
    for (batch, row), members in zip(places, layout, strict=False):
        start = 0
        for segment, sample in enumerate(members, start=1):
            _write(batch, row, start, segment, sample, loss_on)
            start += len(sample)
    return batches


def padding_share(batches: Iterable[PackedBatch]) -> float:
    """The share of positions in micro-batches that hold no token of a sample."""
    padding = [batch["segment_ids"] == 0 for batch in batches]
    return float(sum(mask.sum() for mask in padding) / sum(mask.size for mask in padding))


def pack_demonstrations(
    pairs: Iterable[tuple[Sequence[int], Sequence[int]]],
    row_length: int,
    rows: int,
    num_batches: int | None = None,
    loss_on: str = "response",
) -> list[PackedBatch]:
    """Packs (prompt_ids, response_ids) pairs for supervised training, in order."""
    samples = [Sample(i, prompt, response) for i, (prompt, response) in enumerate(pairs)]
    return pack(samples, row_length, rows, num_batches, loss_on)


def empty_batch(
    rows: int, row_length: int, facts: jax.ShapeDtypeStruct | None = None
) -> PackedBatch:
    """A micro-batch of padding alone.

    Args:
      facts: [M ..] of a token's records, see `specjax.models.transformer.record_form`; None: of
        samples that bring none.
    """
    batch = {name: np.zeros((rows, row_length), dtype) for name, dtype in _FIELDS.items()}
    batch["sample_ids"] -= 1
    if facts is not None:
        batch["records"] = no_records(facts, rows, row_length)
    return batch


def routed_anew(batch: Mapping[str, Array]) -> dict[str, Array]:
    """Returns a micro-batch on devices in which nothing is known of the rows, see `Mlp.run`."""
    if "records" not in batch:
        return dict(batch)
    records = batch["records"]
    return {**batch, "records": records | np.array(-1).astype(records.dtype)}


def _first_fit(samples: Sequence[Sample], row_length: int) -> list[list[Sample]]:
    layout: list[list[Sample]] = []
    room: list[int] = []
    for sample in samples:
        row = next((r for r, free in enumerate(room) if free >= len(sample)), None)
        if row is None:
            row = len(layout)
            layout.append([])
            room.append(row_length)
        layout[row].append(sample)
        room[row] -= len(sample)
    return layout


def _write(
    batch: PackedBatch, row: int, start: int, segment: int, sample: Sample, loss_on: str
) -> None:
    prompt, end = start + len(sample.prompt_ids), start + len(sample)
    for field in (*_COPIED, "loss_mask"):  # numpy would spread a list of one number
        values = getattr(sample, field)
        if values is not None and len(values) != end - prompt:
            raise ValueError(
                f"sample {sample.sample_id}: expected {end - prompt} {field}, one per response "
                f"token, got {len(values)}"
            )
    batch["tokens"][row, start:prompt] = sample.prompt_ids
    batch["tokens"][row, prompt:end] = sample.response_ids
    batch["positions"][row, start:end] = np.arange(end - start)
    batch["segment_ids"][row, start:end] = segment
    batch["sample_ids"][row, start:end] = sample.sample_id
    # Nothing predicts the first token of a segment, so it can never be part of a loss.
    first = prompt if loss_on == "response" else start + 1
    mask = batch["loss_mask"][row]
    mask[first:end] = 1.0
    if sample.loss_mask is not None:
        mask[prompt:end] = sample.loss_mask
    batch["advantages"][row, first:end] = np.asarray(sample.advantage) * mask[first:end]
    if sample.records is not None:
        batch["records"][row, start : end - 1] = sample.records
    for field in _COPIED:
        if getattr(sample, field) is not None:
            batch[field][row, prompt:end] = getattr(sample, field)
