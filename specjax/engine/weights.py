"""The weights of policy and draft on an engine's devices."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import jax
import numpy as np

from specjax.config import ModelConfig
from specjax.interfaces import Draft, FinishedSample
from specjax.models.rows import merge_axes, param_axes, repeated_names
from specjax.models.transformer import Params, to_decode_layout
from specjax.parallel import sharding
from specjax.parallel.copies import Checksum, require_same
from specjax.parallel.reshard import Mover
from specjax.weights import matrix

log = logging.getLogger(__name__)


class Weights:
    """The weights of policy and draft, in the layout and sharding in which an engine decodes.

    Args:
      cfg: the model's config, with the kernels that run.
      source: the draft source; None: there is none.
      mesh: mesh over which weights are sharded; None: the default device.
      ids: token ids that are drafted from, ascending; None: all.

    Attributes:
      policy: parameters of the policy; None: they are not set, or were released.
      head: parameters of the draft source, likewise.
      vocabulary: parameters that draft `ids`, see `Draft.columns`; None: there are none.
      history: what the draft source keeps of samples that have ended; None: nothing.
      ids: the token ids that are drafted from, ascending; None: all.
      checksums: checksums of the weights that are held, by `policy` and `draft`.
      axes: logical axes of all arrays by their names.
      repeated: names of arrays that layouts hold different numbers of times.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        source: Draft | None,
        mesh: jax.sharding.Mesh | None,
        ids: np.ndarray | None,
    ):
        self.cfg, self.ids = cfg, ids
        self._source, self._mesh = source, mesh
        self.policy: Params | None = None
        self.head: Params | None = None
        self.vocabulary: Params | None = None
        self.history: Params | None = None
        # On the host; `history` is its copy on the devices.
        self._store = source.store() if source is not None and source.needs.history else None
        self.checksums: dict[str, Checksum] = {}
        self._network = None if source is None else source.network
        models = [cfg] if self._network is None else [cfg, self._network]
        self.repeated = frozenset().union(*map(repeated_names, models))
        self.axes = merge_axes([param_axes(cfg), {} if source is None else source.axes()])
        self._mover = None if mesh is None else Mover(mesh, self.axes)

    @property
    def draft(self) -> Params | None:
        """All parameters of the draft source: `head`, `vocabulary` and `history`."""
        entries = {"vocabulary": self.vocabulary, "history": self.history}
        known = {name: value for name, value in entries.items() if value is not None}
        return {**self.head, **known} if known else self.head

    def set(self, policy: Params, head: Params | None) -> None:
        """Takes weights into the decode layout and sharding.

        Args:
          policy: parameters of the policy, stacked or as `models.transformer.split_layout` returns
            them; packed ones are held as they are, not copied.
          head: parameters of the draft source, in its own decode layout; None keeps the present
            ones.

        Raises:
          ValueError: there is no head and the source needs one.
          RuntimeError: the checksum of the parameters changed on the way.
        """
        convert = self.needed(self.convert, policy)
        if self._mover is not None:
            arrived = self._mover(policy, convert)
        else:
            arrived = jax.device_put(policy) if convert is None else convert(policy)
        comparable = convert is None or matrix.is_exact(self.cfg.run.products)
        self._check("policy", policy, arrived if comparable else policy, self.cfg.tie_embeddings)
        head = self.head if head is None else head
        if self._source is not None:
            if head is None:
                raise ValueError("speculation needs a draft head, got none; use spec=None")
            self._place_head(head)
        self.policy = arrived
        self._take_columns()
        self._send_store()

    def set_head(self, head: Params) -> None:
        """Takes parameters of the draft source alone; see `set`."""
        self._place_head(head)
        self._take_columns()

    def _place_head(self, head: Params) -> None:
        if head is self.head:  # it is placed already
            return
        moved = head if self._mover is None else self._mover(head)
        placed = self._convert_head(moved)
        exact = self._network is None or matrix.is_exact(self._network.run.products)
        self._check("draft", head, placed if exact else head, False)
        self.head = placed

    def _take_columns(self) -> None:
        if self.ids is not None and self.head is not None and self.policy is not None:
            self.vocabulary = self._columns(self.head, self.policy, self.ids)
            if (np.asarray(self.vocabulary["ids"]) >= self.cfg.vocab_size).all():
                raise ValueError("token_map has none of the tokens that the draft head drafts")

    def feed(self, samples: Sequence[FinishedSample]) -> None:
        """Passes ended samples to the draft source, see `Draft.feed`; compiles nothing."""
        self._store = self._source.feed(self._store, samples)
        self._send_store()

    def _send_store(self) -> None:
        if self._store is not None:
            whole = None if self._mesh is None else sharding.replicated(self._mesh)
            # It is a copy, since the draft may change its arrays while a chunk still reads them.
            self.history = jax.device_put(jax.tree.map(np.array, self._store), whole)

    def release(self) -> None:
        """Frees the device memory."""
        self.policy = self.head = self.vocabulary = self.history = None

    def hold_shapes(self, policy: Params, head: Params | None) -> None:
        """Holds shapes where `set` puts arrays, for programs that are never run.

        Args:
          policy, head: as in `set`, arrays or their shapes.
        """

        def placed(make: Callable, *arrays):
            shardings = functools.partial(sharding.param_shardings, axes=self.axes)
            return sharding.shapes(jax.eval_shape(make, *arrays), self._mesh, shardings)

        self.policy, self.head = placed(self.convert, policy), placed(self._convert_head, head)
        if self.ids is not None:
            columns = self._source.columns
            self.vocabulary = placed(columns, self.head, self.policy, self.ids)
        if self._store is not None:
            self.history = placed(lambda store: store, self._store)

    def share_programs(self, other: Weights) -> None:
        """Takes the compiled programs of weights of equal settings on the same devices."""
        self._mover = other._mover
        self.convert, self._convert_head = other.convert, other._convert_head

    @functools.cached_property
    def convert(self) -> Callable[[Params], Params]:
        """The jitted conversion of policy parameters from the stacked to the decode layout."""
        return jax.jit(functools.partial(to_decode_layout, cfg=self.cfg))

    def needed(self, convert: Callable[[Params], Params], policy: Params) -> Callable | None:
        """Returns a conversion; None if the policy is packed already, and would be copied."""
        if matrix.is_exact(self.cfg.run.products):
            return convert
        same = jax.eval_shape(lambda tree: tree, policy) == jax.eval_shape(convert, policy)
        return None if same else convert

    @functools.cached_property
    def _convert_head(self) -> Callable[[Params], Params]:
        """The conversion of the draft's parameters to the layout of the kernels that run."""
        if self._network is None or self._network.run.products == matrix.PLAIN:
            return lambda head: head
        return jax.jit(self._source.pack)

    @functools.cached_property
    def _columns(self) -> Callable:
        columns = self._source.columns
        if self._mesh is None:
            return jax.jit(columns)
        shapes = jax.eval_shape(columns, self.head, self.policy, self.ids)
        shardings = sharding.param_shardings(self._mesh, shapes, self.axes)
        return jax.jit(columns, out_shardings=shardings)

    def _check(self, name: str, sent: Params, arrived: Params, tied: bool) -> None:
        """Compares checksums, and keeps them; warns of weights that are not finite."""
        if not jax.tree.leaves(sent):
            return
        now = require_same(name, sent, arrived, self.cfg.run.compute_dtype, tied, self.repeated)
        if not now.finite:
            log.warning("the %s's weights are not finite: its output means nothing", name)
        self.checksums[name] = now
