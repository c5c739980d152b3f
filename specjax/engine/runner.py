"""The programs over one decode state: prefill, place, run a chunk. No policy decides here.

A chunk's program is made for a strategy, a set of features and a *bucket*, a number of rows. It
takes slots out of the state, runs them as a batch of their own, and puts them back. So the
batch shrinks with what runs, slots keep their places, and strategies may change between chunks.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.config import ModelConfig, SpecConfig, Strategy
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
from specjax.decode.state import DecodeState, RowMap, StateSizes, empty_state
from specjax.engine.agreement import agreement_of
from specjax.engine.checksum import Checksum, require_same
from specjax.engine.compiling import Executables
from specjax.engine.pages import NULL_PAGE, pages_for
from specjax.engine.plans import make_plans, own_name, programs_of
from specjax.engine.settings import stretched
from specjax.engine.sources import page_multiple, with_kernel
from specjax.engine.vocabulary import draft_ids
from specjax.interfaces import Draft, FinishedSample, Memory, Room
from specjax.kernels import dispatch
from specjax.memory import cost, empty
from specjax.models.rows import merge_axes, param_axes, repeated_names
from specjax.models.transformer import Params, graphdef, record_shape, to_decode_layout
from specjax.parallel import sharding
from specjax.parallel.reshard import Mover
from specjax.spelling import SettingError
from specjax.weights import matrix

PAGE_SIZE = 128
EXTRA_SLOTS = 8  # slots beside those of a batch, for sequences that started and wait for a row
FEW = 4  # prompts that one program reads, and sequences that it starts, at small batches too

log = logging.getLogger(__name__)
T = TypeVar("T")


class Runner:
    """The device side of one engine: parameters, state, executables.

    Args:
      cfg: model config; `run.scan_layers` decides the parameter and cache layout of decoding.
      spec: how to speculate; None is plain decoding.
      batch: slots. max_len: prompt and generated tokens of a slot at most.
      stop_width: stop tokens per request at most.
      mesh: shard parameters and state over it; None is the default device.
      source: what drafts; none: as `spec` says, see `source_of`.
      chunk_tokens: tokens per slot that one chunk can emit at most. stretch: of how many times as
        many if few run, see `EngineConfig`.
      strategies: those that chunks can be run with; None: `spec`'s alone.
      page_size: positions per page; None takes 128, 0 gives each sequence one page to itself.
      cache_bytes: for the pages of all caches, see `EngineConfig`.
      stride: pieces of prompts start at multiples of it.
      attention: the kernel, see `specjax.kernels.dispatch.settle`.
      products: by what weights are multiplied, see `specjax.weights.matrix.settle`.

    Attributes:
      cfg: with the kernel that runs.
      plans: what each strategy drafts. plan: `spec`'s own.
      strategies: how chunks of each strategy run. programs: the plans that chunks are compiled
        for, by program; the strategies' own, or in `invariant` mode one for all.
      slots: number of slots of the state; the last one is always empty and fills up buckets.
      extra_slots: number of slots beside the batch's, for sequences that wait for a row.
      mark: is ready when what was enqueued last is done; None if that was a chunk.
      ids: that are drafted from, ascending; None: all. vocabulary: what drafts them, see
        `Draft.columns`. history: what it drafts with of samples that have ended, a copy of `store`.
      takes_samples: whether `feed` is to be called.
      checksums: of the weights held, `policy` and `draft`.
      executables: what was compiled. agreement: of the hosts that the mesh lies over.
      moved: bytes that a device received for the weights, at most, when they were last set.
      table_width: pages of a slot at most, and entries that are always `NULL_PAGE` for a round's
        path past its end: one, unless a path is longer than a page.
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
        stride: int = 1,
        attention: str = "auto",
        products: str = "auto",
        stretch: int = 1,
    ):
        record_shape(cfg)  # refuses records that the report has no room for
        drafts = spec is not None and not spec.is_off
        invariant = drafts and spec.invariant
        settle = functools.partial(dispatch.settle, mesh=mesh, asked=attention, invariant=invariant)
        cfg, source = settle(cfg, whose="attention"), with_kernel(source, settle)
        cfg = matrix.settle(cfg, mesh, products)
        # A draft need not have what the policy has: scanned layers, or another dtype.
        asked = matrix.PLAIN if products == matrix.PLAIN else matrix.AUTO
        settle_products = functools.partial(matrix.settle, mesh=mesh, asked=asked)
        source = with_kernel(source, settle_products, "products")
        self.cfg, self.stride = cfg, stride
        self.chunk_tokens, self.stretch = chunk_tokens, stretch
        self.batch, self.max_len, self.stop_width, self.mesh = batch, max_len, stop_width, mesh
        self.plans = make_plans(cfg, spec, source, strategies)
        self.plan = self.plans[own_name(spec, self.plans)]
        self.strategies = programs_of(self.plans, spec.spec_verify_tokens if drafts else 1)
        self.programs = {run.program: run.plan for run in self.strategies.values()}
        self.longest = max(self.programs.values(), key=lambda plan: plan.steps)
        self.page_size = min(PAGE_SIZE if page_size is None else page_size or max_len, max_len)
        multiple = page_multiple(cfg, source)
        self.page_size = -(-self.page_size // multiple) * multiple
        full = pages_for(max_len, self.page_size)
        self.table_width = full + pages_for(self.longest.steps + 1, self.page_size)
        self.extra_slots = EXTRA_SLOTS
        self.slots, self.prompts = batch + self.extra_slots + 1, max(batch, FEW) + 1
        # Beside what has a slot: a prompt that is read, a copy of its last page, the null page.
        self.pages = 2 + max(full * self.slots, self.pages_of(max_len) - 1)
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
        self.checksums: dict[str, Checksum] = {}
        self.executables = Executables(mesh)
        self.moved = 0
        self.agreement = agreement_of(mesh)
        source = self.longest.source
        network = None if source is None else source.network
        models = [cfg for cfg in (self.cfg, network) if cfg is not None]
        self.repeated = frozenset().union(*map(repeated_names, models))
        self.axes = merge_axes([param_axes(self.cfg), {} if source is None else source.axes()])
        self._mover = None if mesh is None else Mover(mesh, self.axes)
        self._layout = None

    # --- what it is made of ----------------------------------------------------------------------

    @property
    def tree(self):
        return self.plan.tree

    @property
    def steps(self) -> int:
        """Steps of the longest strategy."""
        return self.longest.steps

    @property
    def tail(self) -> int:
        source = self.longest.source
        return source.needs.states if source else 0

    def pages_of(self, positions: int) -> int:
        """Pages that a sample may take: its own, and copies of those that it writes anew."""
        copied = 1 + pages_for(self.rewritten, self.page_size)
        return pages_for(positions, self.page_size) + copied

    @property
    def rewritten(self) -> int:
        """Positions before a root that the draft source writes anew when it starts."""
        return max(self.tail - 1, 0)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, target and draft."""
        source, size = self.longest.source, self.page_size
        return cost(self.cfg, size).page + (source.cost(size).page if source else 0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the target's recurrent states, of all slots and of the prompts that wait."""
        return (self.slots + self.prompts) * cost(self.cfg, self.page_size).slot

    @property
    def compilations(self) -> int:
        """Programs that were built so far."""
        return self.executables.compilations

    def rounds(self, strategy: str, rows: int | None = None) -> int:
        """Rounds of one chunk of so many rows at most; None: many."""
        plan = self.strategies[strategy].plan
        window = plan.source.needs.window if plan.tree is None and plan.source else 0
        tokens = stretched(self.chunk_tokens, self.stretch, rows or self.stretch, window)
        return max(1, tokens // (plan.steps + 1))

    def most_tokens(self, rows: int) -> int:
        """Tokens that one of so many rows can emit in a chunk."""
        return max(self.rounds(s, rows) * (plan.steps + 1) for s, plan in self.plans.items())

    def buckets(self, strategy: str, features: Features) -> list[int]:
        """Sizes of a batch for which a program was compiled that serves this, in order."""
        return self.executables.buckets(self.strategies[strategy].program, features)

    # --- weights and state -----------------------------------------------------------------------

    def set_params(self, params: Params, head: Params | None) -> None:
        """Takes stacked policy parameters into the decode layout and sharding.

        Args:
          head: parameters of the draft source, in its own decode layout.

        Raises:
          ValueError: there is no head and the source needs one. RuntimeError: what arrived is not
            what was sent.
        """
        if self._layout is None:
            self._layout = self._build_layout()
        self.moved = 0
        arrived = self._layout(params)
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
        if head is self.head:  # it is here, and as it should be
            return
        placed = self._convert_head(self._move(head))
        self._check("draft", head, placed, False)
        self.head = placed

    @property
    def draft(self) -> Params | None:
        """Parameters that draft: `head`, and what is set apart from it."""
        entries = {"vocabulary": self.vocabulary, "history": self.history}
        known = {name: value for name, value in entries.items() if value is not None}
        return {**self.head, **known} if known else self.head

    def feed(self, samples: Sequence[FinishedSample]) -> None:
        """Gives the draft samples that have ended, see `Draft.feed`; compiles nothing."""
        self.store = self.longest.source.feed(self.store, samples)
        self._send_store()

    def _send_store(self) -> None:
        if self.store is not None:
            whole = None if self.mesh is None else sharding.replicated(self.mesh)
            # A copy: the draft may change its arrays while a chunk still reads them.
            self.history = jax.device_put(jax.tree.map(np.array, self.store), whole)

    def set_ids(self, ids: np.ndarray | None) -> None:
        """Takes ascending ids to draft from, as many as there are now; compiles nothing then."""
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
        """Compares checksums, and keeps them; weights that are not finite are named loudly."""
        if not jax.tree.leaves(sent):
            return
        if not exact:  # there is nothing to compare: the format has other bits
            arrived = sent
        now = require_same(name, sent, arrived, self.cfg.run.compute_dtype, tied, self.repeated)
        if not now.finite:
            log.warning("the %s's weights are not finite: its output means nothing", name)
        self.checksums[name] = now

    @functools.cached_property
    def convert(self):
        """The jitted change of policy parameters from the stacked to the decode layout."""
        return jax.jit(functools.partial(to_decode_layout, cfg=self.cfg))

    @functools.cached_property
    def _convert_head(self):
        """The change of the draft source's parameters from its decode layout to what runs here."""
        source = self.longest.source
        cfg = None if source is None else source.network
        if cfg is None or cfg.run.products == matrix.PLAIN:
            return lambda head: head
        return jax.jit(source.pack)

    def _build_layout(self):
        if self.mesh is None:
            return self.convert
        # Stacked, each weight has one way to go; unrolled ones are others than those that come.
        return lambda params: self._move(params, self.convert, self.cfg.run.scan_layers)

    def _move(self, params: Params, *convert) -> Params:
        """To the mesh, see `Mover`."""
        if self.mesh is None:
            return params
        params = self._mover(params, *convert)
        self.moved += self._mover.received
        return params

    def hold_shapes(self, params: Params, head: Params | None) -> None:
        """Holds shapes where `set_params` and `reset` put arrays, for programs that are never run:
        `Executables.build` must then make something that gives back the inputs it is donated, and
        None.

        Args:
          params, head: as `set_params` takes them, arrays or their shapes.
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
        """Whether a program failed after it had taken the state's buffers."""
        return any(x.is_deleted() for x in jax.tree.leaves((self.state, self.kept)))

    def reset(self) -> None:
        """An empty state, zeroed."""
        self.state = self.kept = None
        self.state, self.kept = self._empty()

    @functools.cached_property
    def _empty(self):
        """The jitted constructor of the state, kept so that a second call compiles nothing."""
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
        told = new._replace(tokens=None, options=None)  # many, and `words` stand for them
        self.state, self.mark = self._run(("place", len(new.slots)), program, inputs, (0,), told)

    def empty_scratch(self, rows: int, span: int) -> tuple[Memory, np.ndarray]:
        """Pages for so many prompts of `span` positions each, and their table [R X]."""
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
        """How likely the policy finds pieces of prompts; one executable per shape."""

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
    ) -> Packed[Result]:
        """Starts a chunk; what it returns is on the device and may not be there yet.

        Args:
          features: what the running slots ask for; see `Executables.covering` for what runs. If
            no program was compiled that serves them, one is.
          row_map: of different slots, or the empty one: one for each row, and `extra_slots` more,
            see `alone`. Of those that are not to run all pages are `NULL_PAGE`.
        """
        bucket, chosen = len(row_map.slots) - self.extra_slots, self.strategies[strategy]
        features = self.executables.covering(chosen.program, bucket, features)
        inputs = (self.params, self.draft, self.state, row_map, until)
        if chosen.part is not None:
            inputs = (*inputs, chosen.part)
        program = functools.partial(self._chunk_program, strategy, features, bucket)
        key = ("chunk", chosen.program, bucket, features)
        self.state, result = self._run(key, program, inputs, (2,), inputs[3:])
        self.mark = None
        return result

    def _chunk_program(
        self, strategy, features, bucket, params, head, state, row_map, until, part=None
    ):
        plan = dataclasses.replace(self.strategies[strategy].plan, features=features)
        model, capacity = self.model(params), self.rounds(strategy, bucket)
        pin = functools.partial(sharding.pin_slots, self.mesh)
        state, result = run_chunk(
            model, head, plan, state, row_map, bucket, capacity, until, pin, part
        )
        if self.mesh is not None:  # each array on its own: then no layout of them all is needed
            result = jax.lax.with_sharding_constraint(result, sharding.replicated(self.mesh))
        return state, Packed.of(result)

    def alone(self, rows: RowMap) -> RowMap:
        """A row map of those that have the rows of a chunk, where none waits."""
        spare, room = self.slots - 1, ((0, self.extra_slots),)
        return RowMap(
            np.pad(rows.slots, room, constant_values=spare),
            np.pad(rows.active, room),
            np.pad(rows.table, (*room, (0, 0)), constant_values=NULL_PAGE),
        )

    @property
    def drafts_from_others(self) -> bool:
        """Whether the draft source drafts from what other slots hold, though they have
        ended. Not with rules that draw by the round, see `may_search` in ngram.py."""
        source = self.longest.source
        return bool(source and source.needs.siblings) and not self.longest.needs_q

    def model(self, params: Params):
        """The target as a module, inside a jitted function."""
        return nnx.merge(graphdef(self.cfg, self.cfg.run.decode_layout), params)

    def _run(self, key: tuple, program, inputs: tuple, donate: tuple[int, ...], told):
        """Starts a program, see `Executables`; `told`: inputs that all hosts must have alike."""
        self.agreement.announce(key, told)
        outputs = self.executables.get(key, program, inputs, donate)(*inputs)
        self.agreement.finished(outputs)
        return outputs


class _Layout(NamedTuple):
    """The tree that the words hold, and shape and dtype of each of its leaves, in order."""

    structure: jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]


@dataclasses.dataclass(frozen=True)
class Packed(Generic[T]):
    """A tree of arrays in one array, as a program gives it to the host.

    Every array that comes from a device costs the host a transfer, some calls of Python and a copy,
    however small it is. A chunk returns a dozen small ones; in one they cost what one of them did.

    Attributes:
      words: uint32 [n] bits of all leaves, in order.
    """

    words: jax.Array
    layout: _Layout

    @classmethod
    def of(cls, tree: T) -> Packed[T]:
        """Packs, inside a jitted function.

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
        """Starts the way to the host, once the program is done."""
        self.words.copy_to_host_async()

    def open(self) -> T:
        """The tree in numpy, read-only; waits until it is there."""
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
