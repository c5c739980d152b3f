"""The programs over one decode state: prefill, place, run a chunk. It decides nothing.

A chunk's program is made for a strategy, a set of features and a *bucket*, a number of rows. It
takes slots out of the state, runs them as a batch of their own, and puts them back. So the batch
shrinks with the number of running sequences, which keep their slots, and strategies may change
between chunks.

`piece_of`, `admission_of` and `row_map_of` make the padded arrays that programs take from what the
scheduler decided.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from specjax.config import ModelConfig, SpecConfig, Strategy
from specjax.decode.admit import Admission, Piece, Prompts, empty_prompts, place, prefill
from specjax.decode.chunk import Result, Until, run_chunk
from specjax.decode.options import Features
from specjax.decode.state import DecodeState, Plan, RowMap, StateSizes, empty_state
from specjax.drafts.vocabulary import draft_ids
from specjax.engine.pages import NULL_PAGE, Reuse, pages_for
from specjax.engine.programs import Executables, Graphs, make_plans, programs_of
from specjax.engine.request import option_rows
from specjax.engine.scheduler import Prompt, Start
from specjax.engine.sequence import Sample
from specjax.engine.settings import EngineConfig, end_of_pieces, powers
from specjax.engine.weights import Weights
from specjax.interfaces import Draft
from specjax.kernels import check, dispatch
from specjax.memory import cost, keeps_state
from specjax.models.transformer import Params, graphdef, laid_out, record_form
from specjax.parallel import sharding
from specjax.parallel.agreement import agreement_of
from specjax.program_cache import keep_programs
from specjax.weights import matrix

PAGE_SIZE = 128
EXTRA_SLOTS = 8  # slots beyond those of a batch, for sequences that wait for a row
# Positions for which the default pool has pages for each sequence that waits for a row: its prompt
# and what two chunks emit. Longer ones take pages that rows do not need yet, or wait for pages.
WAITING_TOKENS = 2048
FEW = 4  # prompts that a small program reads, and sequences that it starts


class Runner:
    """The device side of one engine: state, weights, and the programs over them.

    Args:
      cfg: model config; `run.scan_layers` decides the parameter and cache layout of decoding, in
        which the mesh decides about `run.fused`, see `laid_out`.
      spec: how to speculate; None: plain decoding.
      batch: number of sequences that have a row at once.
      max_len: the most prompt and generated tokens of a sequence.
      stop_width: the most stop tokens of a request.
      mesh: mesh over which parameters and state are sharded; None: the default device.
      source: the draft source; None: the one that `spec` names, see `source_of`.
      strategies: strategies that chunks can run; None: `spec`'s alone.
      config: kernels, sizes of pages and chunks, largest size of the caches.
      most_page_bytes: largest size of the pages where `config` sets none for the caches; None: what
        all slots need.
      widths: lengths that pieces of prompts are padded to, ascending; all start at multiples of the
        last one, unless others stand in or a prefix is not read. Empty: at any position, and none
        is longer than the rest of the table.

    Attributes:
      cfg: the model's config, with the kernels that run.
      plans: the plan of each strategy, by name.
      plan: the plan of `spec`'s own strategy.
      strategies: the program that chunks of each strategy run, by name of the strategy.
      programs: the plans that chunks are compiled for, by name of the program: those of the
        strategies, or in `invariant` mode one for all.
      longest: the plan with the most steps.
      slots: number of slots of the state. The last one is always empty and fills up buckets.
      extra_slots: number of slots beyond `batch`, for sequences that wait for a row.
      prompts: number of rows for prompts that are being read; the last one is always empty.
      state_rows: rows behind those of prompts, for recurrent states that are kept, see `Reuse`.
      pages: number of pages, the null page included.
      table_width: number of entries of a slot in the page table: the most pages that it can hold,
        and then entries that are always `NULL_PAGE`, for the part of a round's path past the end,
        and for the padding of a prompt's last piece.
      stride: number of positions of which every piece's start is a multiple.
      weights: the weights of policy and draft.
      state: the state of the slots; None: it is not allocated.
      kept: the state of prompts that are being read, likewise.
      mark: an output of the program that was enqueued last, which is ready when the program is
        done; None if that was a chunk.
      latest: key of the program that was enqueued last, see `Executables`; None: there is none.
      executables: the compiled programs.
      agreement: how the hosts of the mesh take the same decisions.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        spec: SpecConfig | None,
        batch: int,
        max_len: int,
        stop_width: int = 8,
        mesh: jax.sharding.Mesh | None = None,
        source: Draft | None = None,
        strategies: Sequence[Strategy] | None = None,
        config: EngineConfig = EngineConfig(),  # noqa: B008
        most_page_bytes: int | None = None,
        widths: Sequence[int] = (),
    ):
        keep_programs()
        record_form(cfg)  # raises if the report has no room for the model's records
        self.batch, self.max_len, self.stop_width, self.mesh = batch, max_len, stop_width, mesh
        self.config, self.stride = config, widths[-1] if widths else 1
        drafts = spec is not None and not spec.is_off
        invariant = drafts and spec.invariant
        page_size = PAGE_SIZE if config.page_size is None else config.page_size or max_len
        page_size = min(page_size, max_len)
        named = strategies or ((spec.resolve(),) if drafts else ())
        settle = functools.partial(
            check.settle,
            mesh=mesh,
            asked=config.attention,
            invariant=invariant,
            rows=max((strategy.rows for strategy in named if not strategy.is_off), default=1),
            page_size=page_size,
            width=max(widths, default=1),
        )
        cfg = settle(laid_out(cfg, mesh), whose="attention")
        cfg = matrix.settle(cfg, mesh, config.products)
        if source is not None and source.network is not None:
            network = settle(source.network, whose="the draft's attention")
            products = matrix.of_draft(config.products)
            network = network.running(products=matrix.PLAIN)  # not those of the policy's files
            network = matrix.settle(network, mesh, products, whose="the draft's products")
            source = source.with_network(network)

        self.plans = make_plans(cfg, spec, source, strategies)
        self.strategies = programs_of(self.plans, spec.spec_verify_tokens if drafts else 1)
        self.cfg = cfg
        names = [spec.own_strategy.name, spec.resolve().name] if drafts else []
        self.plan = self.plans[next(name for name in (*names, *self.plans) if name in self.plans)]
        self.programs = {program.name: program.plan for program in self.strategies.values()}
        self.longest = max(self.programs.values(), key=lambda plan: plan.steps)
        source = self.longest.source
        models = [cfg] + ([source.network] if source and source.network else [])
        kernels = [model.run.attention for model in models]
        multiple = max(map(dispatch.page_multiple, kernels))
        self.page_size = -(-page_size // multiple) * multiple
        # What lies past a sequence's pages is never visible, but it is written, to the null page.
        past = pages_for(self.longest.steps + 1, self.page_size)
        read = end_of_pieces(max_len, widths, config.enable_prefix_caching)
        read = pages_for(read, self.page_size)
        self.table_width = max(pages_for(max_len, self.page_size) + past, read)
        self.extra_slots = EXTRA_SLOTS
        self.slots, self.prompts = counts_of(batch)
        kept = kept_states(batch, config) if keeps_state(cfg) else 0
        self.state_rows = range(self.prompts, self.prompts + kept)
        self.pages = self._count_pages(config.cache_bytes, most_page_bytes)
        self.weights = Weights(cfg, source, mesh, draft_ids(cfg, spec) if drafts else None)
        self.state: DecodeState | None = None
        self.kept: Prompts | None = None
        self.mark: jax.Array | None = None
        self.latest: tuple | None = None
        self.agreement = agreement_of(mesh)
        graphs = Graphs(dispatch.device_of(mesh), kernels, config.enforce_eager)
        self.executables = Executables(mesh, cfg, graphs, (self.programs, config))
        self.executables.in_order = self.agreement.is_shared

    # --- sizes -----------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of steps of the longest strategy."""
        return self.longest.steps

    @property
    def tail(self) -> int:
        """Number of positions before a root whose hidden states the draft source reads."""
        source = self.longest.source
        return source.needs.states if source else 0

    @property
    def rewritten(self) -> int:
        """Number of positions before the root that the draft source writes when a sample starts."""
        return max(self.tail - 1, 0)

    @functools.cached_property
    def draft_has_pages(self) -> bool:
        source = self.longest.source
        return source is not None and source.cost(self.page_size).page > 0

    @property
    def reuse(self) -> Reuse:
        """How pages serve prompts that begin with the same tokens.

        In `invariant` mode equal positions are read by equal programs, and so in whole pieces.
        """
        size, margin = self.page_size, self.tail + self.steps + 1
        if self.plan.invariant:
            return Reuse(self.tail, math.lcm(size, self.stride), None)
        return Reuse(self.tail, size, margin)

    @property
    def copied(self) -> int:
        """The most pages of its prompt that a sample gets copies of, because it rewrites them."""
        return 1 + pages_for(self.rewritten, self.page_size)

    def pages_of(self, positions: int) -> int:
        """The most pages that a sample takes, with copies of shared pages that it rewrites."""
        return pages_for(positions, self.page_size) + self.copied

    def _count_pages(self, given: int | None, most_bytes: int | None) -> int:
        """The number of pages: those that `given` bytes hold, or by default for all slots.

        By default each row has pages for a sequence of full length, and each sequence that waits
        some. There is one more for a copy of a prompt's last page, and page 0. There are no more
        than `most_bytes` have room for, but one sample of full length always fits.

        Raises:
          ValueError: `given` is less than two pages.
        """
        page = max(self.page_bytes, 1)
        if given is not None:
            slots = self.slot_bytes
            pages = (given - slots) // page
            if pages < 2:
                raise ValueError(
                    f"cache_bytes {given} is less than two pages, {page} each, and slots, {slots}"
                )
            return pages
        full = pages_for(self.max_len, self.page_size)
        waiting = min(full, pages_for(WAITING_TOKENS, self.page_size))
        pages = full * self.batch + waiting * (self.slots - self.batch)
        if most_bytes is not None:
            pages = min(pages, most_bytes // page - 2)
        return 2 + max(pages, self.pages_of(self.max_len) - 1)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, of target and draft together."""
        source, size = self.longest.source, self.page_size
        return cost(self.cfg, size).page + (source.cost(size).page if source else 0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the target's recurrent states: of slots, of prompts, and kept ones."""
        count = self.slots + self.prompts + len(self.state_rows)
        return count * cost(self.cfg, self.page_size).slot

    @property
    def compilations(self) -> int:
        """Number of programs that were compiled so far."""
        return self.executables.compilations

    def rounds(self, strategy: str, rows: int | None = None) -> int:
        """The most rounds of a chunk.

        Args:
          strategy: name of the strategy.
          rows: number of rows; None: those of a large batch.
        """
        return self._rounds(self.strategies[strategy].plan, rows)

    def _rounds(self, plan: Plan, rows: int | None) -> int:
        """The most rounds of a chunk by the program of a plan."""
        least, stretch = self.config.chunk_tokens, self.config.stretch
        tokens = least * max(1, stretch // (rows or stretch))
        if plan.tree is None and plan.source and plan.source.needs.window:
            # The draft keeps no more states while plain decoding runs.
            tokens = min(tokens, max(least, plan.source.needs.window))
        return max(1, tokens // (plan.steps + 1))

    def most_tokens(self, rows: int) -> int:
        """The most tokens that one row can emit in a chunk of `rows` rows."""
        return max(self.rounds(s, rows) * (plan.steps + 1) for s, plan in self.plans.items())

    def chunks(
        self, strategy: str, features: Features, soon: bool = False
    ) -> list[tuple[int, Features]]:
        """Bucket and features of each compiled program that serves this strategy and features.

        The smallest buckets come first, and of a bucket the fewest features.

        Args:
          soon: whether to list those that are being compiled, too.
        """
        return self.executables.chunks(self.strategies[strategy].name, features, soon)

    def chunk_key(self, strategy: str, features: Features, bucket: int) -> tuple:
        """The key of the program of chunks, see `Executables`."""
        return "chunk", self.strategies[strategy].name, bucket, features

    def piece_key(self, rows: int, width: int) -> tuple:
        """The key of the program that reads pieces of `width` positions of so many prompts."""
        return "prefill", (rows, width + self.tail)

    # --- state -----------------------------------------------------------------------------------

    def share_programs(self, other: Runner) -> None:
        """Takes the compiled programs of a runner of equal settings on the same devices."""
        self.executables, self._empty = other.executables, other._empty
        self.weights.share_programs(other.weights)

    def hold_shapes(self, policy: Params, head: Params | None) -> None:
        """Holds shapes where `Weights.set` and `reset` put arrays, for programs that are never run.

        `Executables.build` must then return a function that returns its donated inputs and None.

        Args:
          policy, head: as in `Weights.set`, arrays or their shapes.
        """
        self.weights.hold_shapes(policy, head)
        self.hold_state_shapes()

    def hold_state_shapes(self) -> None:
        """Holds shapes where `reset` puts arrays, for programs that do not run before it."""
        both = jax.eval_shape(self._empty)
        self.state, self.kept = sharding.shapes(both, self.mesh, sharding.state_shardings)

    def reset(self) -> None:
        """Makes an empty state, zeroed."""
        self.state = self.kept = None
        self.state, self.kept = self._empty()

    @functools.cached_property
    def _empty(self):
        """The jitted constructor of the state; it is kept, so that it compiles once."""
        sizes = StateSizes(
            slots=self.slots,
            pages=self.pages,
            page_size=self.page_size,
            max_len=self.max_len,
            stop_width=self.stop_width,
        )

        def make():
            return empty_state(self.longest, sizes), empty_prompts(
                self.longest, self.prompts, len(self.state_rows)
            )

        if self.mesh is None:
            return jax.jit(make)
        shardings = sharding.state_shardings(self.mesh, jax.eval_shape(make))
        return jax.jit(make, out_shardings=shardings)

    # --- programs --------------------------------------------------------------------------------

    def prefill(self, piece: Piece) -> jax.Array | None:
        """Reads pieces of prompts into pages; one executable per shape.

        Returns:
          records [rows T M ..] of the positions, which may not be computed yet; None: the model
          records nothing, or the program is being compiled.
        """

        def program(params, head, state, kept, piece):
            model = self.model(params)
            state, kept, records = prefill(model, head, self.longest, state, kept, piece)
            return state, kept, (state.length[0], records)

        inputs = (self.weights.policy, self.weights.draft, self.state, self.kept, piece)
        key = ("prefill", piece.tokens.shape)
        self.state, self.kept, done = self.run(key, program, inputs, (2, 3), piece)
        self.mark, records = done or (None, None)
        return records

    def place(self, new: Admission) -> None:
        """Starts sequences in slots; one executable per number of sequences."""

        def program(state, kept, new):
            state = place(self.longest, state, kept, new)
            return state, state.length[0]

        inputs = (self.state, self.kept, new)
        # Tokens and options are large; hosts compare `words`, which stand for them.
        same = new._replace(tokens=None, options=None)
        self.state, self.mark = self.run(("place", len(new.slots)), program, inputs, (0,), same)

    def chunk(
        self,
        strategy: str,
        features: Features,
        row_map: RowMap,
        until: Until,
    ) -> Result:
        """Enqueues a chunk; its result is on the device and may not be computed yet.

        Args:
          strategy: name of the strategy.
          features: features of its program, which is compiled if it is not.
          row_map: the slot of each row, and of `extra_slots` more. No slot is there
            twice, except the empty one. A slot that shall not run has only `NULL_PAGE` as pages.
          until: when the chunk ends.
        """
        bucket = len(row_map.slots) - self.extra_slots
        program = self.strategies[strategy]
        inputs = (self.weights.policy, self.weights.draft, self.state, row_map, until)
        if program.part is not None:
            inputs = (*inputs, program.part)
        call = functools.partial(self._chunk_program, program.plan, features, bucket)
        key = self.chunk_key(strategy, features, bucket)
        self.state, result = self.run(key, call, inputs, (2,), inputs[3:])
        self.mark = None
        return result

    def _chunk_program(
        self, plan, features, bucket, params, head, state, row_map, until, part=None
    ):
        model, capacity = self.model(params), self._rounds(plan, bucket)
        plan = dataclasses.replace(plan, features=features)
        pin = functools.partial(sharding.pin_slots, self.mesh)
        state, result = run_chunk(
            model, head, plan, state, row_map, bucket, capacity, until, pin, part
        )
        if self.mesh is not None:
            result = jax.lax.with_sharding_constraint(result, sharding.replicated(self.mesh))
        return state, result

    def drafts_from(self, others: str) -> bool:
        """Whether the draft source asks for tokens of others, by a field of `DraftNeeds`.

        In modes that draw by the round it gets none, see `may_search` in ngram.py.
        """
        source = self.longest.source
        return bool(source and getattr(source.needs, others)) and not self.longest.needs_q

    def model(self, params: Params):
        """The target as a module; for use inside a jitted function."""
        return nnx.merge(graphdef(self.cfg, self.cfg.run.decode_layout), params)

    def run(self, key: tuple, program: Callable, inputs: tuple, donate: tuple[int, ...], same: Any):
        """Enqueues a program, see `Executables`; returns its outputs.

        Args:
          key: key of the program.
          donate: indices of its donated inputs.
          same: the inputs that must be equal on all hosts.
        """
        if self.executables.compiler is not None:
            return self.executables.get(key, program, inputs, donate)(*inputs)
        self.latest = key
        self.agreement.announce(key, same)
        outputs = self.executables.get(key, program, inputs, donate)(*inputs)
        self.agreement.finished(outputs)
        return outputs


# --- what programs take ---------------------------------------------------------------------------


def counts_of(batch: int) -> tuple[int, int]:
    """The numbers of slots and of rows for prompts, each with one that is always empty."""
    return batch + EXTRA_SLOTS + 1, max(batch, FEW) + 1


def kept_states(batch: int, config: EngineConfig) -> int:
    """The number of recurrent states that are kept for later prompts: one for each slot."""
    return counts_of(batch)[0] if config.enable_prefix_caching else 0


def piece_of(
    prompts: Sequence[Prompt],
    rows: int,
    width: int,
    runner: Runner,
    keep: Sequence[int | None] = (),
) -> Piece:
    """The next `width` positions of each prompt; spare rows write to the null page only.

    They must end within the tables of the prompts, see `end_of_pieces`.

    Args:
      keep: rows for copies of the states at the ends; None: there is none.
    """
    tail, spare = runner.tail, runner.prompts - 1
    piece = Piece(
        tokens=np.zeros((rows, width + tail), np.int32),
        start=np.zeros(rows, np.int32),
        length=np.ones(rows, np.int32),
        prompts=np.full(rows, spare, np.int32),
        begin=np.full(rows, spare, np.int32),
        keep=np.full(rows, spare, np.int32),
        table=np.zeros((rows, runner.table_width), np.int32),
    )
    for row, prompt in enumerate(prompts):
        known = prompt.tokens[prompt.read : prompt.read + width + tail]
        piece.tokens[row, : len(known)] = known
        piece.start[row], piece.length[row] = prompt.read, prompt.read + prompt.left + 1
        piece.prompts[row] = prompt.row
        piece.begin[row] = prompt.row if prompt.state is None else prompt.state
        piece.table[row, : len(prompt.pages)] = prompt.pages
    for row, kept in enumerate(keep):
        piece.keep[row] = spare if kept is None else kept
    return piece


def admission_of(starts: Sequence[Start], count: int, runner: Runner) -> Admission:
    """The sequences to start, padded to `count` by repeating the first, which is harmless."""
    padded = [*starts] + [starts[0]] * (count - len(starts))
    sequences = [start.sequence for start in padded]
    jobs = [sequence.job for sequence in sequences]
    tokens = np.zeros((count, runner.max_len), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: sequence.length] = sequence.known
    copies = np.full((count, runner.copied, 2), NULL_PAGE, np.int32)
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
    alive: Sequence[Sample],
    rows: int,
    others: Sequence[Sample],
    seen: Sequence[int],
    runner: Runner,
) -> RowMap:
    """The row map of a chunk.

    Args:
      alive: samples that have the first rows.
      rows: number of rows.
      others: samples that wait for a row.
      seen: slots of ended samples to put into spare rows, whose tokens can be drafted from.
      runner: runner of the chunk.
    """
    slots = np.full(rows + runner.extra_slots, runner.slots - 1, np.int32)
    slots[len(alive) : len(alive) + len(seen)] = seen
    active = np.zeros(len(slots), bool)
    table = np.full((len(slots), runner.table_width), NULL_PAGE, np.int32)
    for row, sample in (*enumerate(alive), *enumerate(others, rows)):
        slots[row], active[row] = sample.slot, True
        table[row, : len(sample.pages)] = sample.pages
    return RowMap(slots, active, table)


def place_sizes(batch: int) -> list[int]:
    """The numbers of sequences for which a program that starts them is compiled, ascending."""
    return powers(max(batch, FEW), FEW, FEW)


def place_size(batch: int, count: int) -> int:
    """The size of the smallest program that starts `count` sequences, or else of the largest."""
    sizes = place_sizes(batch)
    return next((size for size in sizes if size >= count), sizes[-1])
