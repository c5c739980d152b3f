"""Makes the padded arrays that programs take from the scheduler's decisions."""

from __future__ import annotations

from collections.abc import Sequence as Several

import numpy as np

from specjax.decode.admit import Admission, Piece
from specjax.decode.state import RowMap
from specjax.engine.options import option_rows
from specjax.engine.pages import NULL_PAGE, pages_for
from specjax.engine.runner import FEW, Runner
from specjax.engine.scheduler import Prompt, Start
from specjax.engine.sequence import Sequence
from specjax.engine.settings import powers


def piece_of(prompts: Several[Prompt], rows: int, width: int, runner: Runner) -> Piece:
    """The next `width` positions of each prompt; spare rows write to the null page only.

    Raises:
      ValueError: the piece goes on past the table of its prompt.
    """
    tail, most = runner.tail, runner.table_width * runner.page_size
    for prompt in prompts:
        if prompt.read + width > most:
            raise ValueError(
                f"a piece of {width} positions that begins at {prompt.read} ends within the table "
                f"of its prompt, which has {most}; make the table wider (`end_of_pieces`)"
            )
    piece = Piece(
        tokens=np.zeros((rows, width + tail), np.int32),
        start=np.zeros(rows, np.int32),
        length=np.ones(rows, np.int32),
        prompts=np.full(rows, runner.prompts - 1, np.int32),
        table=np.zeros((rows, runner.table_width), np.int32),
    )
    for row, prompt in enumerate(prompts):
        known = prompt.tokens[prompt.read : prompt.read + width + tail]
        piece.tokens[row, : len(known)] = known
        piece.start[row], piece.length[row] = prompt.read, len(prompt.tokens)
        piece.prompts[row] = prompt.row
        piece.table[row, : len(prompt.pages)] = prompt.pages
    return piece


def admission_of(starts: Several[Start], count: int, runner: Runner) -> Admission:
    """The sequences to start, padded to `count` by repeating the first, which is harmless."""
    padded = [*starts] + [starts[0]] * (count - len(starts))
    sequences = [start.sequence for start in padded]
    jobs = [sequence.job for sequence in sequences]
    tokens = np.zeros((count, runner.max_len), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: sequence.length] = sequence.known
    most = 1 + pages_for(runner.rewritten, runner.page_size)
    copies = np.full((count, most, 2), NULL_PAGE, np.int32)
    for row, start in zip(copies, padded, strict=True):
        row[: len(start.copies)] = np.array(start.copies, np.int32).reshape(-1, 2)
    return Admission(
        slots=np.array([sequence.slot for sequence in sequences], np.int32),
        prompts=np.array([start.prompt_row for start in padded], np.int32),
        source=copies[..., 0].ravel(),
        target=copies[..., 1].ravel(),
        tokens=tokens,
        lengths=np.array([sequence.length for sequence in sequences], np.int32),
        limit=np.array([job.limit for job in jobs], np.int32),
        words=np.stack([job.words for job in jobs]).astype(np.uint32),
        options=option_rows(jobs, runner.cfg.vocab_size, runner.stop_width),
    )


def row_map_of(
    alive: Several[Sequence],
    rows: int,
    others: Several[Sequence],
    seen: Several[int],
    table: np.ndarray,
    runner: Runner,
) -> RowMap:
    """The row map of a chunk.

    Args:
      alive: sequences that have the first rows.
      rows: number of rows.
      others: sequences that wait for a row.
      seen: slots of ended samples to put into spare rows, whose tokens can be drafted from.
      table: page table of all slots.
      runner: runner of the chunk.
    """
    given = [s.slot for s in alive] + [None] * (rows - len(alive)) + [s.slot for s in others]
    given += [None] * (rows + runner.extra_slots - len(given))
    active = np.array([slot is not None for slot in given])
    slots = np.array([runner.slots - 1 if slot is None else slot for slot in given], np.int32)
    slots[len(alive) : len(alive) + len(seen)] = seen
    return RowMap(slots, active, np.where(active[:, None], table[slots], NULL_PAGE))


def place_sizes(batch: int) -> list[int]:
    """The numbers of sequences for which a program that starts them is compiled, ascending."""
    return powers(max(batch, FEW), FEW)


def place_size(batch: int, count: int) -> int:
    """The size of the smallest program that starts `count` sequences."""
    return next(size for size in place_sizes(batch) if size >= count)
