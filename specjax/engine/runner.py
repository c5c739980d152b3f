"""The programs over one decode state: prefill, place, run a chunk. It decides nothing.

A chunk's program is made for a strategy, a set of features and a *bucket*, a number of rows. It
takes slots out of the state, runs them as a batch of their own, and puts them back. So the batch
shrinks with the number of running sequences, which keep their slots, and strategies may change
between chunks.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.config import ModelConfig, SpecConfig, Strategy
from specjax.control import OFF
from specjax.decode.admit import (
    Admission,
    Piece,
    Prompts,
    Scores,
    empty_prompts,
    place,
    prefill,
    score,
)
from specjax.decode.chunk import Result, Until, run_chunk
from specjax.decode.options import Features
from specjax.decode.state import DecodeState, Plan, RowMap, StateSizes, empty_state
from specjax.engine.agreement import agreement_of
from specjax.engine.checksum import Checksum, require_same
from specjax.engine.compiling import Executables
from specjax.engine.graphs import Graphs
from specjax.engine.pages import NULL_PAGE, pages_for
from specjax.engine.plans import StrategyProgram, make_plans, own_name, programs_of, row_block
from specjax.engine.settings import end_of_pieces, stretched
from specjax.engine.sources import laid_out, page_multiple, with_kernel
from specjax.engine.vocabulary import draft_ids
from specjax.interfaces import Draft, FinishedSample, Memory, Room
from specjax.kernels import check, dispatch
from specjax.memory import cost, empty
from specjax.models.rows import merge_axes, param_axes, repeated_names
from specjax.models.transformer import Params, graphdef, record_shape, to_decode_layout
from specjax.parallel import sharding
from specjax.parallel.reshard import Mover
from specjax.spelling import SettingError
from specjax.weights import matrix

PAGE_SIZE = 128
EXTRA_SLOTS = 8  # slots beyond those of a batch, for sequences that wait for a row
# Positions for which the default pool has pages for each sequence that waits for a row: its prompt
# and what two chunks emit. Longer ones take pages that rows do not need yet, or wait for pages.
WAITING_TOKENS = 2048
FEW = 4  # prompts that a small program reads, and sequences that it starts

log = logging.getLogger(__name__)
T = TypeVar("T")


class Runner:
    """The device side of one engine: parameters, state, executables.

    Args:
      cfg: model config; `run.scan_layers` decides the parameter and cache layout of decoding, in
        which the mesh decides about `run.fused`, see `laid_out`.
      spec: how to speculate; None: plain decoding.
      batch: number of sequences that have a row at once.
      max_len: the most prompt and generated tokens of a sequence.
      stop_width: the most stop tokens of a request.
      mesh: mesh over which parameters and state are sharded; None: the default device.
      source: the draft source; None: the one that `spec` names, see `source_of`.
      chunk_tokens: the most tokens per slot that one chunk can emit when many slots run.
      stretch: factor by which a chunk is longer when few slots run, see `EngineConfig`.
      strategies: strategies that chunks can run; None: `spec`'s alone.
      page_size: positions per page; None: 128; 0: each sequence has one page of full length.
      cache_bytes: largest size of the pages of all caches in bytes, see `EngineConfig`.
      most_cache_bytes: largest size where `cache_bytes` is None, see `Engine`.
      widths: lengths that pieces of prompts are padded to, ascending; all start at multiples of the
        last one. Empty: at any position, and none is longer than the rest of the table.
      attention: name of the attention kernel, see `specjax.kernels.check.settle`.
      products: name of the kernel that multiplies by weights, see `specjax.weights.matrix.settle`.
      enforce_eager: whether GPUs run without CUDA graphs.

    Attributes:
      cfg: the model's config, with the kernels that run.
      plans: the plan of each strategy, by name.
      plan: the plan of `spec`'s own strategy.
      strategies: the program that chunks of each strategy run, by name of the strategy.
      programs: the plans that chunks are compiled for, by name of the program: those of the
        strategies, or in `invariant` mode one for all.
      own_plain: a program for `off` alone where all strategies share another, see
        `specjax.engine.plain_check`; None: there is none.
      exact_plain: features of the shared programs whose bits it has.
      longest: the plan with the most steps.
      slots: number of slots of the state. The last one is always empty and fills up buckets.
      extra_slots: number of slots beyond `batch`, for sequences that wait for a row.
      prompts: number of rows for prompts that are being read; the last one is always empty.
      pages: number of pages, the null page included.
      mark: an output of the program that was enqueued last, which is ready when the program is
        done; None if that was a chunk.
      latest: key of the program that was enqueued last, see `Executables`; None: there is none.
      ids: the token ids that are drafted from, ascending; None: all.
      vocabulary: parameters that draft `ids`, see `Draft.columns`; None: there are none.
      store: what the draft source keeps of samples that have ended, on the host; None: nothing.
      history: a copy of `store` on the device.
      takes_samples: whether `feed` is to be called with samples that have ended.
      checksums: checksums of the weights that are held, by `policy` and `draft`.
      executables: the compiled programs.
      agreement: how the hosts of the mesh take the same decisions.
      moved: the most bytes that a device received for the weights when they were last set.
      table_width: number of entries of a slot in the page table: the most pages that it can hold,
        and then entries that are always `NULL_PAGE`, for the part of a round's path past the end,
        and for the padding of a prompt's last piece.
      stride: number of positions of which every piece's start is a multiple.
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
        chunk_tokens: int = 32,
        strategies: Sequence[Strategy] | None = None,
        page_size: int | None = None,
        cache_bytes: int | None = None,
        widths: Sequence[int] = (),
        attention: str = "auto",
        products: str = "auto",
        stretch: int = 1,
        enforce_eager: bool = False,
        most_cache_bytes: int | None = None,
    ):
        record_shape(cfg)  # raises if the report has no room for the model's records
        drafts = spec is not None and not spec.is_off
        invariant = drafts and spec.invariant
        named = strategies or ((spec.resolve(),) if drafts else ())
        settle = functools.partial(
            check.settle,
            mesh=mesh,
            asked=attention,
            invariant=invariant,
            rows=max((strategy.rows for strategy in named if not strategy.is_off), default=1),
            page_size=min(PAGE_SIZE if page_size is None else page_size or max_len, max_len),
            width=max(widths, default=1),
        )
        cfg = settle(laid_out(cfg, mesh), whose="attention")
        source = with_kernel(source, settle)
        cfg = matrix.settle(cfg, mesh, products)
        # A kernel that is named for the policy may refuse the draft, whose layers and dtype can
        # differ. So the draft's own is chosen automatically.
        asked = matrix.PLAIN if products == matrix.PLAIN else matrix.AUTO
        settle_products = functools.partial(matrix.settle, mesh=mesh, asked=asked)
        source = with_kernel(source, settle_products, "products")
        self.cfg, self.stride = cfg, widths[-1] if widths else 1
        self.chunk_tokens, self.stretch = chunk_tokens, stretch
        self.batch, self.max_len, self.stop_width, self.mesh = batch, max_len, stop_width, mesh
        most_rows = spec.spec_verify_tokens if drafts else 1
        self.plans = make_plans(cfg, spec, source, strategies)
        self.strategies = programs_of(self.plans, most_rows)
        self.own_plain, self.exact_plain = None, set()
        size = row_block(dispatch.device_of(mesh), batch, self.strategies) if invariant else None
        if size is not None:
            self.cfg = cfg = cfg.running(row_block=size)
            self.plans = make_plans(cfg, spec, source, strategies)
            self.strategies = programs_of(self.plans, most_rows)
            self.own_plain = StrategyProgram(OFF, self.plans[OFF])
        self.plan = self.plans[own_name(spec, self.plans)]
        self.programs = {run.program: run.plan for run in self.strategies.values()}
        self.longest = max(self.programs.values(), key=lambda plan: plan.steps)
        self.page_size = min(PAGE_SIZE if page_size is None else page_size or max_len, max_len)
        multiple = page_multiple(cfg, source)
        self.page_size = -(-self.page_size // multiple) * multiple
        full = pages_for(max_len, self.page_size)
        # What lies past a sequence's pages is never visible, but it is written, to the null page.
        past = pages_for(self.longest.steps + 1, self.page_size)
        read = pages_for(end_of_pieces(max_len, widths), self.page_size)
        self.table_width = max(full + past, read)
        self.extra_slots = EXTRA_SLOTS
        self.slots, self.prompts = batch + self.extra_slots + 1, max(batch, FEW) + 1
        self.pages = self._pages_by_default(full, most_cache_bytes)
        if cache_bytes is not None:
            self.pages = (cache_bytes - self.slot_bytes) // max(self.page_bytes, 1)
            if self.pages < 2:
                slots = f" beside {self.slot_bytes} bytes of slots" if self.slot_bytes else ""
                raise SettingError(
                    lambda spell: (
                        f"{spell('cache_bytes')} {cache_bytes} is less than two pages of "
                        f"{self.page_bytes} bytes, of which one is spare{slots}; raise it, or use "
                        f"a smaller {spell('page_size')}"
                    )
                )
        self.params: Params | None = None
        self.head: Params | None = None
        self.vocabulary: Params | None = None
        remembers = bool(self.longest.source) and self.longest.source.needs.history
        self.store = self.longest.source.store() if remembers else None
        self.history: Params | None = None
        self.takes_samples = remembers and not self.longest.needs_q
        self.ids = draft_ids(cfg, spec) if drafts else None
        self.state: DecodeState | None = None
        self.kept: Prompts | None = None
        self.mark: jax.Array | None = None
        self.latest: tuple | None = None
        self.checksums: dict[str, Checksum] = {}
        self.moved = 0
        self.agreement = agreement_of(mesh)
        source = self.longest.source
        network = None if source is None else source.network
        models = [cfg for cfg in (self.cfg, network) if cfg is not None]
        kernels = [model.run.attention for model in models]
        graphs = Graphs(dispatch.device_of(mesh), kernels, enforce_eager)
        self.executables = Executables(mesh, cfg, graphs)
        self.repeated = frozenset().union(*map(repeated_names, models))
        self.axes = merge_axes([param_axes(self.cfg), {} if source is None else source.axes()])
        self._mover = None if mesh is None else Mover(mesh, self.axes)

    # --- sizes -----------------------------------------------------------------------------------

    @property
    def tree(self):
        return self.plan.tree

    @property
    def steps(self) -> int:
        """Number of steps of the longest strategy."""
        return self.longest.steps

    @property
    def tail(self) -> int:
        """Number of positions before a root whose hidden states the draft source reads."""
        source = self.longest.source
        return source.needs.states if source else 0

    def pages_of(self, positions: int) -> int:
        """The most pages that a sample takes, with copies of shared pages that it rewrites."""
        copied = 1 + pages_for(self.rewritten, self.page_size)
        return pages_for(positions, self.page_size) + copied

    def _pages_by_default(self, full: int, most_bytes: int | None) -> int:
        """The number of pages for rows of `full` pages each, and for sequences that wait.

        There is one more for a copy of a prompt's last page, and page 0. There are no more than
        `most_bytes` have room for, but one sample of full length always fits.
        """
        waiting = min(full, pages_for(WAITING_TOKENS, self.page_size))
        slots = full * self.batch + waiting * (self.slots - self.batch)
        if most_bytes is not None:
            slots = min(slots, (most_bytes - self.slot_bytes) // max(self.page_bytes, 1) - 2)
        return 2 + max(slots, self.pages_of(self.max_len) - 1)

    @property
    def rewritten(self) -> int:
        """Number of positions before the root that the draft source writes when a sample starts."""
        return max(self.tail - 1, 0)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, of target and draft together."""
        source, size = self.longest.source, self.page_size
        return cost(self.cfg, size).page + (source.cost(size).page if source else 0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the target's recurrent states, of all slots and prompts together."""
        return (self.slots + self.prompts) * cost(self.cfg, self.page_size).slot

    @property
    def compilations(self) -> int:
        """Number of programs that were compiled so far."""
        return self.executables.compilations

    def rounds(
        self, strategy: str, rows: int | None = None, features: Features | None = None
    ) -> int:
        """The most rounds of a chunk.

        Args:
          strategy: name of the strategy.
          rows: number of rows; None: those of a large batch.
          features: features that decide which program runs, see `program_of`; None: the program
            that the strategy shares with others.
        """
        shared = self.strategies[strategy]
        run = shared if features is None else self.program_of(strategy, features)
        return self._rounds(run.plan, rows)

    def own_rounds(self, rows: int) -> float:
        """The most rounds of a chunk by `own_plain`; infinite if there is none."""
        return math.inf if self.own_plain is None else self._rounds(self.own_plain.plan, rows)

    def _rounds(self, plan: Plan, rows: int | None) -> int:
        """The most rounds of a chunk by a program of this plan."""
        window = plan.source.needs.window if plan.tree is None and plan.source else 0
        tokens = stretched(self.chunk_tokens, self.stretch, rows or self.stretch, window)
        return max(1, tokens // (plan.steps + 1))

    def most_tokens(self, rows: int) -> int:
        """The most tokens that one row can emit in a chunk of `rows` rows."""
        found = [self.rounds(s, rows) * (plan.steps + 1) for s, plan in self.plans.items()]
        if self.exact_plain:
            found.append(self.own_rounds(rows))
        return max(found)

    def buckets(self, strategy: str, features: Features) -> list[int]:
        """The buckets, ascending, of compiled programs that serve this strategy and features."""
        return self.executables.buckets(self.strategies[strategy].program, features)

    # --- weights and state -----------------------------------------------------------------------

    def set_params(self, params: Params, head: Params | None) -> None:
        """Takes policy parameters into the decode layout and sharding.

        Args:
          params: parameters of the policy, stacked or as `models.transformer.split_layout` returns
            them.
          head: parameters of the draft source, in its own decode layout.

        Raises:
          ValueError: there is no head and the source needs one.
          RuntimeError: the checksum of the parameters changed on the way.
        """
        self.moved = 0
        arrived = self.convert(params) if self.mesh is None else self._move(params, self.convert)
        exact = matrix.FORMATS.find(self.cfg.run.products).exact
        self._check("policy", params, arrived, self.cfg.tie_embeddings, exact)
        if self.longest.source is not None:
            if head is None:
                raise ValueError(
                    "speculation needs a draft head, got none; pass the head's parameters or use "
                    "spec=None"
                )
            self._place_head(head)
        self.params = arrived
        self.set_ids(self.ids)
        self._send_store()

    def set_head(self, head: Params) -> None:
        """Takes parameters of the draft source alone; see `set_params`."""
        self._place_head(head)
        self.set_ids(self.ids)

    def _place_head(self, head: Params) -> None:
        if head is self.head:  # it is placed already
            return
        placed = self._convert_head(self._move(head))
        self._check("draft", head, placed, False)
        self.head = placed

    @property
    def draft(self) -> Params | None:
        """All parameters of the draft source: `head`, `vocabulary` and `history`."""
        entries = {"vocabulary": self.vocabulary, "history": self.history}
        known = {name: value for name, value in entries.items() if value is not None}
        return {**self.head, **known} if known else self.head

    def feed(self, samples: Sequence[FinishedSample]) -> None:
        """Passes ended samples to the draft source, see `Draft.feed`; compiles nothing."""
        self.store = self.longest.source.feed(self.store, samples)
        self._send_store()

    def _send_store(self) -> None:
        if self.store is not None:
            whole = None if self.mesh is None else sharding.replicated(self.mesh)
            # It is a copy, since the draft may change its arrays while a chunk still reads them.
            self.history = jax.device_put(jax.tree.map(np.array, self.store), whole)

    def set_ids(self, ids: np.ndarray | None) -> None:
        """Takes the ids to draft from, ascending; compiles nothing if their number is the same."""
        self.ids = ids
        if ids is not None and self.head is not None and self.params is not None:
            self.vocabulary = self._columns(self.head, self.params, ids)

    @functools.cached_property
    def _columns(self):
        columns = self.longest.source.columns
        if self.mesh is None:
            return jax.jit(columns)
        shapes = jax.eval_shape(columns, self.head, self.params, self.ids)
        shardings = sharding.param_shardings(self.mesh, shapes, self.axes)
        return jax.jit(columns, out_shardings=shardings)

    def _check(
        self, name: str, sent: Params, arrived: Params, tied: bool, exact: bool = True
    ) -> None:
        """Compares checksums, and keeps them; warns of weights that are not finite.

        Args:
          exact: whether `arrived` has the bits of `sent`; if not, there is nothing to compare.
        """
        if not jax.tree.leaves(sent):
            return
        if not exact:
            arrived = sent
        now = require_same(name, sent, arrived, self.cfg.run.compute_dtype, tied, self.repeated)
        if not now.finite:
            log.warning("the %s's weights are not finite: its output means nothing", name)
        self.checksums[name] = now

    @functools.cached_property
    def convert(self):
        """The jitted conversion of policy parameters from the stacked to the decode layout."""
        return jax.jit(functools.partial(to_decode_layout, cfg=self.cfg))

    @functools.cached_property
    def _convert_head(self):
        """The conversion of the draft's parameters to the layout of the kernels that run."""
        source = self.longest.source
        cfg = None if source is None else source.network
        if cfg is None or cfg.run.products == matrix.PLAIN:
            return lambda head: head
        return jax.jit(source.pack)

    def _move(self, params: Params, convert: Callable | None = None) -> Params:
        """Moves parameters to the mesh, see `Mover`."""
        if self.mesh is None:
            return params
        params = self._mover(params, convert)
        self.moved += self._mover.received
        return params

    def share_programs(self, other: Runner) -> None:
        """Takes the compiled programs of a runner of equal settings on the same devices."""
        self.executables, self._mover = other.executables, other._mover
        self.convert, self._convert_head = other.convert, other._convert_head
        self._empty = other._empty

    def hold_shapes(self, params: Params, head: Params | None) -> None:
        """Holds shapes where `set_params` and `reset` put arrays, for programs that are never run.

        `Executables.build` must then return a function that returns its donated inputs and None.

        Args:
          params: as in `set_params`, arrays or their shapes.
          head: as in `set_params`, arrays or their shapes.
        """
        params = jax.eval_shape(self.convert, params)
        state, kept = jax.eval_shape(self._empty)
        shardings = functools.partial(sharding.param_shardings, axes=self.axes)
        self.params = sharding.shapes(params, self.mesh, shardings)
        head = jax.eval_shape(self._convert_head, head)
        self.head = sharding.shapes(head, self.mesh, shardings)
        if self.ids is not None:
            some = jax.eval_shape(self.longest.source.columns, self.head, self.params, self.ids)
            self.vocabulary = sharding.shapes(some, self.mesh, shardings)
        if self.store is not None:
            self.history = sharding.shapes(self.store, self.mesh, shardings)
        self.state = sharding.shapes(state, self.mesh, sharding.state_shardings)
        self.kept = sharding.shapes(kept, self.mesh, sharding.state_shardings)

    @property
    def is_broken(self) -> bool:
        """Whether a program failed after the buffers of the state were donated to it."""
        return any(x.is_deleted() for x in jax.tree.leaves((self.state, self.kept)))

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
            return empty_state(self.longest, sizes), empty_prompts(self.longest, self.prompts)

        if self.mesh is None:
            return jax.jit(make)
        shardings = sharding.state_shardings(self.mesh, jax.eval_shape(make))
        return jax.jit(make, out_shardings=shardings)

    # --- programs --------------------------------------------------------------------------------

    def prefill(self, piece: Piece) -> None:
        """Reads pieces of prompts into pages; one executable per shape."""

        def program(params, head, state, kept, piece):
            model = self.model(params)
            state, kept = prefill(model, head, self.longest, state, kept, piece, self.stride)
            return state, kept, state.length[0]

        inputs = (self.params, self.draft, self.state, self.kept, piece)
        key = ("prefill", piece.tokens.shape)
        self.state, self.kept, self.mark = self._run(key, program, inputs, (2, 3), piece)

    def place(self, new: Admission) -> None:
        """Starts sequences in slots; one executable per number of sequences."""

        def program(state, kept, new):
            state = place(self.longest, state, kept, new)
            return state, state.length[0]

        inputs = (self.state, self.kept, new)
        # Tokens and options are large; hosts compare `words`, which stand for them.
        same = new._replace(tokens=None, options=None)
        self.state, self.mark = self._run(("place", len(new.slots)), program, inputs, (0,), same)

    def empty_scratch(self, rows: int, span: int) -> tuple[Memory, np.ndarray]:
        """Empty pages for `rows` prompts of `span` positions each, and their page table [R X]."""
        each = pages_for(span, self.page_size)
        room = Room(slots=rows, pages=1 + rows * each, page_size=self.page_size)

        def make():
            return empty(self.cfg, room)

        shapes = sharding.shapes(jax.eval_shape(make), self.mesh, sharding.state_shardings)
        scratch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)
        return scratch, 1 + np.arange(rows * each, dtype=np.int32).reshape(rows, each)

    def score(
        self, scratch: Memory, tokens: np.ndarray, start: np.ndarray, table: np.ndarray
    ) -> tuple[Memory, Scores]:
        """Computes log-probabilities of pieces of prompts; one executable per shape."""

        def program(params, scratch, tokens, start, table):
            scratch, scores = score(self.model(params), scratch, tokens, start, table)
            if self.mesh is not None:
                scores = jax.lax.with_sharding_constraint(scores, sharding.replicated(self.mesh))
            return scratch, scores

        inputs = (self.params, scratch, tokens, start, table)
        key = ("score", tokens.shape, table.shape)
        scratch, scores = self._run(key, program, inputs, (1,), inputs[2:])
        self.mark = scores.ranks
        return scratch, scores

    def chunk(
        self,
        strategy: str,
        features: Features,
        row_map: RowMap,
        until: Until,
        run: StrategyProgram | None = None,
    ) -> Packed[Result]:
        """Enqueues a chunk; its result is on the device and may not be computed yet.

        Args:
          strategy: name of the strategy.
          features: features that the running slots ask for. The smallest compiled program that
            serves them runs, see `Executables.covering`; if there is none, one is compiled.
          row_map: the slot of each row, and of `extra_slots` more (see `alone`). No slot is there
            twice, except the empty one. A slot that shall not run has only `NULL_PAGE` as pages.
          until: when the chunk ends.
          run: the program of the strategy that runs; None: the one that `program_of` chooses.
        """
        bucket = len(row_map.slots) - self.extra_slots
        run = run or self.program_of(strategy, features)
        # `own_plain` runs with the features of the shared program that it stands for.
        shared = self.strategies[strategy].program
        features = self.executables.covering(shared, bucket, features)
        inputs = (self.params, self.draft, self.state, row_map, until)
        if run.part is not None:
            inputs = (*inputs, run.part)
        program = functools.partial(self._chunk_program, run.plan, features, bucket)
        key = ("chunk", run.program, bucket, features)
        may_fail = run is self.own_plain
        self.state, result = self._run(key, program, inputs, (2,), inputs[3:], may_fail)
        self.mark = None
        return result

    def program_of(self, strategy: str, features: Features) -> StrategyProgram:
        """The program that chunks of a strategy run, for features.

        It is `own_plain` where that has the bits of the shared program which would run.
        """
        shared = self.strategies[strategy]
        if strategy == OFF and self.exact_plain:
            served = self.executables.covering(shared.program, self.batch, features)
            if served in self.exact_plain:
                return self.own_plain
        return shared

    def _chunk_program(
        self, plan, features, bucket, params, head, state, row_map, until, part=None
    ):
        model, capacity = self.model(params), self._rounds(plan, bucket)
        plan = dataclasses.replace(plan, features=features)
        pin = functools.partial(sharding.pin_slots, self.mesh)
        state, result = run_chunk(
            model, head, plan, state, row_map, bucket, capacity, until, pin, part
        )
        if self.mesh is not None:  # each array by itself, before they are packed into one
            result = jax.lax.with_sharding_constraint(result, sharding.replicated(self.mesh))
        return state, Packed.of(result)

    def alone(self, rows: RowMap) -> RowMap:
        """Pads the row map of the rows of a chunk for one in which no sequence waits."""
        spare, room = self.slots - 1, ((0, self.extra_slots),)
        return RowMap(
            np.pad(rows.slots, room, constant_values=spare),
            np.pad(rows.active, room),
            np.pad(rows.table, (*room, (0, 0)), constant_values=NULL_PAGE),
        )

    @property
    def drafts_from_others(self) -> bool:
        """Whether the draft source searches the tokens of other slots, ended ones included.

        In modes that draw by the round it does not, see `may_search` in ngram.py.
        """
        source = self.longest.source
        return bool(source and source.needs.siblings) and not self.longest.needs_q

    def model(self, params: Params):
        """The target as a module; for use inside a jitted function."""
        return nnx.merge(graphdef(self.cfg, self.cfg.run.decode_layout), params)

    def _run(
        self, key: tuple, program, inputs: tuple, donate: tuple[int, ...], same, may_fail=False
    ):
        """Enqueues a program, see `Executables`.

        Args:
          key: key of the program.
          donate: indices of its donated inputs.
          same: the inputs that must be equal on all hosts.
          may_fail: as in `Executables.get`.
        """
        self.latest = key
        self.agreement.announce(key, same)
        executable = self.executables.get(key, program, inputs, donate, may_fail)
        outputs = executable(*inputs)
        self.agreement.finished(outputs)
        return outputs


class _Layout(NamedTuple):
    """The structure of a packed tree, and the shape and dtype of each of its leaves, in order."""

    structure: jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]


@dataclasses.dataclass(frozen=True)
class Packed(Generic[T]):
    """A tree of arrays packed into one array, as a program returns it to the host.

    Every array that comes from a device costs the host a transfer, some calls of Python and a copy,
    however small it is. A chunk's result is a dozen small arrays; packed, they cost as much as one.

    Attributes:
      words: bits of all leaves, in order, uint32 [n].
      layout: how to unpack them.
    """

    words: jax.Array
    layout: _Layout

    @classmethod
    def of(cls, tree: T) -> Packed[T]:
        """Packs a tree; for use inside a jitted function.

        Raises:
          TypeError: an array is neither of booleans nor of 32-bit numbers.
        """
        leaves, structure = jax.tree.flatten(tree)
        words = jnp.concatenate([_words(x).ravel() for x in leaves])
        shapes, dtypes = tuple(x.shape for x in leaves), tuple(np.dtype(x.dtype) for x in leaves)
        return cls(words, _Layout(structure, shapes, dtypes))

    @property
    def is_ready(self) -> bool:
        """Whether the program is done."""
        return self.words.is_ready()

    def send(self) -> None:
        """Starts the transfer to the host, which begins once the program is done."""
        self.words.copy_to_host_async()

    def open(self) -> T:
        """The tree as numpy arrays, read-only; waits for the transfer."""
        words, leaves, begin = np.asarray(self.words), [], 0
        for shape, dtype in zip(self.layout.shapes, self.layout.dtypes, strict=True):
            size = math.prod(shape)
            part = words[begin : begin + size].reshape(shape)
            leaves.append(part.astype(bool) if dtype.kind == "b" else part.view(dtype))
            begin += size
        return jax.tree.unflatten(self.layout.structure, leaves)


jax.tree_util.register_dataclass(Packed, data_fields=["words"], meta_fields=["layout"])


def _words(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype.itemsize != 4:
        raise TypeError(f"expected an array of booleans or 32-bit numbers, got {x.dtype}")
    return jax.lax.bitcast_convert_type(x, jnp.uint32)
