"""One decoder-only transformer, whose layers are those that `ModelConfig` names.

Three ways through the same layers: `hidden` (training on packed rows), `prefill` (prompts, keys and
values out) and `decode` (tree rows against a read-only memory, new keys and values out). Memory is
never written inside the layer loop: new rows leave as scratch and `specjax.memory` commits them.

Parameters come in two layouts. `stacked` keeps one array per weight for all layers, for training,
checkpoints and scanned decoding. `unrolled` keeps one array per weight and layer, for decoding:
slicing a stacked weight inside a decode loop would copy it every step. There `RunConfig.fused` says
whether the projections that share an input are fused, and the head untied, for one device; a mesh
splits the projections one by one. Matrices may be in a format of their own, see
`specjax.weights.matrix`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig
from specjax.config.model import ATTENTION_RESIDUALS, Layer, LogitForm
from specjax.config.stacks import part_of, segments, stacks, tree_of
from specjax.interfaces import Forward, Memory, Params, Scratch, Where
from specjax.kernels import dispatch
from specjax.memory import KVCache, append_rows
from specjax.models.layers import Block, as_stored, draw, rms_norm
from specjax.models.rows import fixed_dtypes, fuse, fused_rows, layer_rows, top_rows
from specjax.parallel import sharding
from specjax.parallel.context import Context, pin_rows, split_over_tp, whole_over_tp
from specjax.parallel.stored import Stored
from specjax.weights.matrix import (
    Matrix,
    cast,
    dot,
    is_array,
    is_exact,
    pack,
    require_matches,
    rows,
    transposed,
    unpack,
)
from specjax.weights.panels import raw

# Hidden states that a draft asks for: a number of layers that have run (0: the embeddings), or
# `pre_norm` and `post_norm`, before and after the final norm.
Taps = tuple[int | str, ...]


class Transformer(nnx.Module):
    """Embedding, layers, final norm, and a language-model head that may be the embedding."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, layout: str = "stacked"):
        self.cfg = cfg
        rows = top_rows(cfg)

        def array(name):
            return draw(rows[name], rngs, cfg.run.param_dtype)

        self.embed = array("embed")
        if layout == "stacked":
            self.layers = stacked_blocks(cfg, rngs)
        else:
            fused = cfg.run.fused
            self.layers = nnx.List([Block(layer, cfg, rngs, fused=fused) for layer in cfg.layers])
        self.norm = array("norm")
        # The fused layout unties: a CPU would transpose the embedding at every draft step.
        self.tied = cfg.tie_embeddings and (layout == "stacked" or not cfg.run.fused)
        if not self.tied:
            self.lm_head = array("lm_head")

    # --- three ways through the layers -------------------------------------------------------

    def hidden(
        self,
        tokens: Int[Array, "B S"],
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"],
        context: Context | None = None,
        taps: Taps = (),
        given: Int[Array, "B S M ..."] | None = None,
    ) -> Forward:
        """Computes states of packed rows, causal within segments (0 pads), without scratch.

        Args:
          context: how rows are split over devices; all per-token arrays are in its order.
          taps: hidden states that are returned as well.
          given: records of an earlier pass, to be used again, see `Mlp.run`.
        """
        where = Where("train", positions, segments=segment_ids, context=context)
        found = self._forward(tokens, where, taps=taps, keep=False, given=given)
        if self.cfg.run.sequence_parallel:
            x, *taps = map(whole_over_tp, (found.x, *found.taps))
            found = found._replace(x=x, taps=tuple(taps))
        pinned = (pin_rows(x, context) for x in found.taps)
        return found._replace(x=pin_rows(found.x, context), taps=tuple(pinned))

    def prefill(
        self, tokens: Int[Array, "B S"], lengths: Int[Array, " B"], taps: Taps = ()
    ) -> Forward:
        """Computes states of whole prompts, and scratch of the S positions."""
        index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        segment_ids = (index < lengths[:, None]).astype(jnp.int32)
        return self._forward(tokens, Where("train", index, segments=segment_ids), taps=taps)

    def decode(
        self,
        tokens: Int[Array, "B T"],
        where: Where,
        memory: Memory,
        scratch: tuple[Scratch, ...] | None = None,
        taps: Taps = (),
    ) -> Forward:
        """Computes states and scratch of T rows of a tree, or of a piece of a prompt.

        Args:
          where: positions of the rows, and which rows each of them sees.
          memory: memory of the model, read only; `specjax.memory.commit` writes accepted rows.
          scratch: buffers [.. B K total H] whose first `where.held` rows hold earlier rows. They
            are returned with the new rows filled in. None: there are no earlier rows.
          taps: hidden states that are returned as well.
        """
        return self._forward(tokens, where, memory, scratch, taps)

    # --- between tokens, states and logits -----------------------------------------------------

    def embed_tokens(self, tokens: Int[Array, "..."], scaled: bool = True) -> Float[Array, "... D"]:
        """Looks up embeddings; not `scaled`, they are as the table has them."""
        cfg = self.cfg if scaled else self.cfg.replace(embedding_multiplier=1.0)
        return embed_tokens(self.embed.get_value(), tokens, cfg)

    def final_norm(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return rms_norm(x, self.norm[...], self.cfg.rms_norm_eps, self.cfg.norm_offset)

    def logits(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Computes float32 logits of states before the final norm."""
        normed, name = self.final_norm(x), "embed" if self.tied else "lm_head"
        head = getattr(self, name).get_value()
        if isinstance(self.layers, nnx.List):  # training has no loop over rounds
            normed, head = as_stored(normed, head, top_rows(self.cfg)[name].axes)
        return lm_logits(normed, transposed(head) if self.tied else head, self.cfg.logits)

    def head_weight(self) -> Matrix:
        return transposed(self.embed.get_value()) if self.tied else self.lm_head.get_value()

    # --- the layer loop --------------------------------------------------------------------------

    def _forward(
        self,
        tokens,
        where: Where,
        memory=None,
        scratch=None,
        taps: Taps = (),
        keep=True,
        given=None,
    ) -> Forward:
        cfg, x, records, figures = self.cfg, self.embed_tokens(tokens), None, {}
        if cfg.run.sequence_parallel and where.form == "train":
            x = split_over_tp(x)
        wanted = sorted({self._boundary(tap) for tap in taps})
        if where.form == "tree" and dispatch.runs_layers(cfg):
            x, scratch, found = self._by_kernel(x, where, memory, scratch, wanted)
        else:
            angles = angles_of(cfg.layers, where.positions)
            where = where.replace(kernel=cfg.run.attention, angles=angles)
            x, scratch, found, records, figures = run_layers(
                self.layers, cfg, x, where, memory, scratch, wanted, keep, given
            )
        by_tap = dict(zip(wanted, found, strict=True))
        states = (
            self.final_norm(x) if tap == "post_norm" else by_tap[self._boundary(tap)]
            for tap in taps
        )
        return Forward(x, scratch, tuple(states), records, figures)

    def _boundary(self, tap: int | str) -> int:
        """Returns the number of layers that have run where a tap is taken."""
        last = self.cfg.num_layers
        if tap in ("pre_norm", "post_norm"):
            return last
        if not isinstance(tap, int) or not 0 <= tap <= last:
            raise ValueError(
                f"a tap must be a number of layers from 0 to {last}, 'pre_norm' or 'post_norm', "
                f"got {tap!r}; correct what the draft asks for"
            )
        return tap

    @jax.named_scope("layers")
    def _by_kernel(self, x, where: Where, memory, scratch, wanted: Sequence[int]):
        """Does what `run_layers` does, by one operation, or by one between every two taps."""
        found, rows, first = [], [], 0
        for end in (*wanted, self.cfg.num_layers):
            if end > first:
                x, new = layers_by_kernel(
                    self.cfg,
                    [block.arrays() for block in list(self.layers)[first:end]],
                    x,
                    where.positions,
                    memory.pages[first:end],
                    where.prefix,
                    where.visible,
                    scratch and [layer.pages for layer in scratch[first:end]],
                    where.held,
                    where.table,
                )
                rows += [Scratch(KVCache(*pair), None) for pair in new]
            first = end
            found.append(x)
        return x, tuple(rows), found[: len(wanted)]


@jax.named_scope("layers")
def run_layers(
    layers,
    cfg: ModelConfig,
    x: Float[Array, "B T D"],
    where: Where,
    memory: Memory | None,
    scratch: tuple[Scratch, ...] | None,
    wanted: Sequence[int],
    keep: bool,
    given: Int[Array, "B T M ..."] | None = None,
) -> tuple[Array, tuple[Scratch, ...] | None, list[Array], Array | None, dict[str, Array]]:
    """Runs all layers, scanned over the repeating patterns or unrolled; see the module text.

    Args:
      wanted: numbers of layers after which states are taken, ascending.
      keep: whether the scratch is needed.
      given: records to use again; None: layers record anew.

    Returns:
      states, scratch, the states that are wanted, records, and figures.
    """
    recording, of_layer = recording_layers(cfg), {}
    if given is not None:
        of_layer = {number: given[:, :, i] for i, number in enumerate(recording)}
    if isinstance(layers, nnx.List):
        blocks = [nnx.split(block) for block in layers]
        return _run_unrolled(blocks, cfg, x, where, memory, scratch, wanted, keep, of_layer)
    split = [(stack, *nnx.split(part_of(layers, stack))) for stack in stacks(cfg.layers)]
    if not cfg.run.scan_layers:
        by_number = {
            number: (graph, jax.tree.map(lambda a, row=row: a[row], state))
            for stack, graph, state in split
            for row, number in enumerate(stack.numbers)
        }
        blocks = [by_number[number] for number in range(cfg.num_layers)]
        return _run_unrolled(blocks, cfg, x, where, memory, scratch, wanted, keep, of_layer)
    found, rows, records, figures, first, at = [], [], {}, [], 0, 0
    for pattern, repeats in segments(cfg.layers):
        here = slice(at, at + len(pattern))
        parts = [part[1:] for part in split[here]]
        of_segment = memory and Memory(memory.pages[here], memory.slots[here])
        beside = scratch and scratch[here]
        end = first + len(pattern) * repeats
        taken = [tap for tap in wanted if first <= tap < end]
        numbers = [part[0].numbers for part in split[here]]
        stacked = [
            jnp.stack([of_layer[i] for i in of]) if of[0] in of_layer else None for of in numbers
        ]
        x, new, states, facts, more = _run_scanned(
            parts, cfg, x, where, of_segment, beside, [tap - first for tap in taken], keep, repeats,
            stacked,
        )  # fmt: skip
        for of, fact in zip(numbers, facts, strict=True):
            records |= {} if fact is None else dict(zip(of, fact, strict=True))
        found, rows, first, at = found + states, rows + new, end, at + len(pattern)
        figures += more
    found += [x] * wanted.count(first)
    return x, tuple(rows) if keep else None, found, _side_by_side(records), _means(figures)


def _side_by_side(records: Mapping[int, Array]) -> Int[Array, "B T M ..."] | None:
    """Joins the records of layers, by their numbers, in one array."""
    return jnp.stack([records[i] for i in sorted(records)], axis=2) if records else None


def _means(figures: Sequence[Mapping[str, Array] | None]) -> dict[str, Array]:
    """Returns the mean of each figure over the layers that have it, each of one or of several."""
    by_name: dict[str, list[Array]] = {}
    for name, value in (item for one in figures if one for item in one.items()):
        by_name.setdefault(name, []).append(value.reshape(-1))
    return {name: jnp.concatenate(values).mean() for name, values in by_name.items()}


def record_form(cfg: ModelConfig) -> jax.ShapeDtypeStruct | None:
    """Returns the shape [M ..] and dtype of the records of one row; None: no layer records any."""
    layers = recording_layers(cfg)
    if not layers:
        return None
    first = next(iter(layers.values()))
    return jax.ShapeDtypeStruct((len(layers), *first.shape), first.dtype)


def no_records(form: jax.ShapeDtypeStruct, *lead: int) -> np.ndarray:
    """Returns records [.. M ..] of rows of which nothing is known, see `Mlp.run`."""
    return np.full((*lead, *form.shape), np.array(-1).astype(form.dtype))


@functools.lru_cache(maxsize=64)
def recording_layers(cfg: ModelConfig) -> dict[int, jax.ShapeDtypeStruct]:
    """Returns the number of each layer whose mlp records anything, and the form of its records.

    The form [..] is that of the record of one row.

    Raises:
      ValueError: the forms differ, or a record does not consist of integers.
    """
    x = jax.ShapeDtypeStruct((1, 1, cfg.hidden_size), jnp.dtype(cfg.run.compute_dtype))
    where = Where("train", np.zeros((1, 1), np.int32), segments=np.ones((1, 1), np.int32))

    def record(mlp):
        rows = mlp.params(cfg.hidden_size)
        w = {name: jax.ShapeDtypeStruct(row.shape, x.dtype) for name, row in rows.items()}
        return jax.eval_shape(lambda w, x: mlp.run(w, x, where)[1], w, x)

    kinds = {mlp: record(mlp) for mlp in dict.fromkeys(layer.mlp for layer in cfg.layers)}
    found = {i: kinds[layer.mlp] for i, layer in enumerate(cfg.layers)}
    found = {i: fact for i, fact in found.items() if fact is not None}
    forms = {(fact.dtype.name, fact.shape[2:]) for fact in found.values()}
    if len(forms) > 1 or not all(jnp.issubdtype(dtype, jnp.integer) for dtype, _ in forms):
        raise ValueError(
            f"expected integer records of one dtype and shape from all mlps, got {sorted(forms)}"
        )
    return {i: jax.ShapeDtypeStruct(f.shape[2:], f.dtype) for i, f in found.items()}


def _run_unrolled(blocks, cfg, x, where: Where, memory, scratch, wanted, keep, given):
    """Runs one layer after the other.

    Args:
      given: records of layers to use again, by the layers' numbers.
    """

    def _run_block(graph, state, x, memory, scratch, given):
        x, new, *rest = nnx.merge(graph, state).run(x, where, memory, scratch, given)
        return x, new if keep else None, *rest

    run = _recomputed(cfg, _run_block, static_argnums=0)
    if isinstance(x, jax.core.Tracer):  # layers that are alike are traced and lowered once
        run = jax.jit(run, static_argnums=0)
    rows, found, records, figures = [], [], {}, []
    for i, (graph, state) in enumerate(blocks):
        found += [x] * wanted.count(i)
        of_layer = memory and Memory(memory.pages[i], memory.slots[i])
        x, new, record, more = run(graph, state, x, of_layer, scratch and scratch[i], given.get(i))
        rows.append(new)
        records |= {} if record is None else {i: record}
        figures.append(more)
    found += [x] * wanted.count(len(rows))
    return x, tuple(rows) if keep else None, found, _side_by_side(records), _means(figures)


def _run_scanned(blocks, cfg, x, where: Where, memory, scratch, wanted, keep, repeats: int, given):
    """Runs `lax.scan` over the repeats of one segment, see `specjax.config.stacks`.

    Args:
      wanted: numbers of layers after which states are taken, counted from the segment's first.
      given: for each layer of the pattern the records of its repeats [repeats B T ..], or None.

    Returns:
      the results of `run_layers`, with records and figures laid out as `given`.
    """
    graphs, states = zip(*blocks, strict=True)
    pages, slots = (None, None) if memory is None else memory
    # Pages are read in place, by tables that point into those of all repeats: a scan would
    # first copy each layer's out. Slots, which have the sequences in front, it could not divide.
    by_table = where.table is not None and pages is not None
    whole = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), pages) if by_table else None
    inside, first = [tap for tap in wanted if tap], [x] * wanted.count(0)

    def body(carry, inputs):
        x, found = carry
        index, states, pages, scratch, given = inputs
        rows, records, figures = [], [], []
        for i, (graph, state) in enumerate(zip(graphs, states, strict=True)):
            number = index * len(graphs) + i
            found = [
                jnp.where(number == tap, x, old) for tap, old in zip(inside, found, strict=True)
            ]
            here, of_layer = where, None
            if memory is not None:
                mine = jax.tree.map(
                    lambda a: jax.lax.dynamic_index_in_dim(a, index, 1, keepdims=False), slots[i]
                )
                of_layer = Memory(whole[i] if by_table else pages[i], mine)
                if by_table and (leaves := jax.tree.leaves(memory.pages[i])):
                    here = where.replace(table=where.table + index * leaves[0].shape[1])
            block = nnx.merge(graph, state)
            x, new, record, more = block.run(x, here, of_layer, scratch and scratch[i], given[i])
            rows.append(new)
            records.append(record)
            figures.append(more)
        return (x, found), (rows if keep else [], records, figures)

    body = _recomputed(cfg, body)
    start = x, [jnp.zeros_like(x) for _ in inside]
    inputs = jnp.arange(repeats), states, None if by_table else pages, scratch, given
    (x, found), (rows, records, figures) = jax.lax.scan(body, start, inputs)
    return x, rows, [*first, *found], records, figures


def _recomputed(cfg: ModelConfig, layer, static_argnums=()):
    """Wraps a function that runs a layer as `remat` and `remat_policy` of `RunConfig` say."""
    if not cfg.run.remat:
        return layer
    policy = None
    if cfg.run.remat_policy == "save_attention":
        policy = jax.checkpoint_policies.save_only_these_names(ATTENTION_RESIDUALS)
    return jax.checkpoint(layer, policy=policy, static_argnums=static_argnums)


def layers_by_kernel(
    cfg: ModelConfig, weights, x, positions, pages, prefix_len, visible_bits, buffers, held, table
) -> tuple[Array, list[tuple[Array, Array]]]:
    """Runs layers over tree rows by `dispatch.layers`, where `dispatch.runs_layers` allows it.

    Args:
      weights: arrays of each layer by their names.
      pages: keys and values of each layer in pages.
      buffers: keys and values of earlier tree rows of each layer; the first `held` rows are filled.
        None: there are no earlier rows.

    Returns:
      states, and each layer's keys and values: those of the rows, or the buffers with these filled
      in.
    """
    before = held and [tuple(buffer[:, :, :held] for buffer in pair) for pair in buffers]
    weights, angles = list(map(raw, weights)), cfg.layers[0].mixer.angles(positions)
    x, rows = dispatch.layers(
        cfg, weights, x, *angles, pages, prefix_len, visible_bits, before or None, table
    )
    if buffers is not None:
        filled = zip(buffers, rows, strict=True)
        rows = [append_rows(pair, held, new)[0] for pair, new in filled]
    return x, rows


def embed_tokens(embed: Matrix, tokens: Int[Array, "..."], cfg: ModelConfig) -> Array:
    """Looks up embeddings in the compute dtype, and multiplies them by the model's factor.

    Ids are clamped, for `take` else fills NaN. Where the ambient mesh splits the embedding over the
    devices that split packed rows, as in training, the embeddings change devices, and not the
    matrix.
    """
    safe, dtype = jnp.clip(tokens, 0, cfg.vocab_size - 1), jnp.dtype(cfg.run.compute_dtype)
    mesh = jax.sharding.get_abstract_mesh()
    splits = not mesh.empty and sharding.divides_rows(mesh, safe.shape)
    if is_array(embed) and splits and sharding.is_gathered(mesh, _TABLE, embed.shape):
        x = _embed_split(Stored(mesh, _TABLE, embed.shape, embed.dtype), dtype, embed, safe)
    else:
        x = rows(embed, safe).astype(dtype)
    factor = cfg.embedding_multiplier
    return x if factor == 1.0 else x * jnp.asarray(factor, dtype)


_TABLE = ("vocab", "embed")  # logical axes of the embedding


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _embed_split(table: Stored, dtype, embed, tokens):
    """Looks up tokens [R S] in an embedding that devices hold columns of.

    Each device looks up its columns for the tokens of all devices that hold others, and sends each
    of them its tokens' part: one token's embedding per token in place of the whole matrix.
    """
    columns = table.split("embed")

    def local(embed, tokens):
        own = tokens.reshape(-1) - table.first("vocab")
        own = jax.lax.all_gather(own, columns, tiled=True)
        here = (own >= 0) & (own < len(embed))
        x = jnp.take(embed, jnp.where(here, own, 0), axis=0).astype(dtype)
        x = jnp.where(here[:, None], x, 0)
        x = jax.lax.all_to_all(x, columns, split_axis=0, concat_axis=1, tiled=True)
        return jax.lax.psum(x.reshape(*tokens.shape, -1), table.split("vocab"))

    of_rows = sharding.rows_sharding(table.mesh).spec
    return table.on_devices(local, (table.spec, of_rows), of_rows)(embed, tokens)


def _embed_split_bwd(table: Stored, dtype, tokens, d_x):
    """Adds up the gradient of each row of the embedding, in the embedding's own dtype."""
    del dtype
    columns = table.split("embed")
    rest = tuple(axis for axis in sharding.row_axes(table.mesh) if axis not in columns)

    def local(tokens, d_x):
        count = table.size("vocab")
        own = tokens.reshape(-1) - table.first("vocab")
        own = jnp.where(own < 0, count, own)  # negative ids would count from the end
        own = jax.lax.all_gather(own, columns, tiled=True)
        d_x = d_x.reshape(-1, d_x.shape[-1])
        d_x = jax.lax.all_to_all(d_x, columns, split_axis=1, concat_axis=0, tiled=True)
        d_embed = jnp.zeros((count, d_x.shape[-1]), table.dtype)
        d_embed = d_embed.at[own].add(d_x.astype(table.dtype), mode="drop")
        return jax.lax.psum(d_embed, rest)

    of_rows = sharding.rows_sharding(table.mesh).spec
    return table.on_devices(local, (of_rows, of_rows), table.spec)(tokens, d_x), None


_embed_split.defvjp(
    lambda table, dtype, embed, tokens: (_embed_split(table, dtype, embed, tokens), tokens),
    _embed_split_bwd,
)


@jax.named_scope("lm_head")
def lm_logits(
    normed: Float[Array, "... D"], head: Matrix, form: LogitForm
) -> Float[Array, "... V"]:
    """Computes float32 logits of normed states, by a head [D V]; see `dot`."""
    out = dot(normed, head, jnp.float32)
    out = out if form.multiplier == 1.0 else out * form.multiplier
    return out if form.soft_cap is None else form.soft_cap * jnp.tanh(out / form.soft_cap)


def products_gradient(
    form: LogitForm, logits: Float[Array, "... V"], gradient: Float[Array, "... V"]
) -> Float[Array, "... V"]:
    """Returns the gradient of the products of `lm_logits` from that of its logits."""
    if form.soft_cap is not None:
        gradient = gradient * (1 - (logits / form.soft_cap) ** 2)
    return gradient if form.multiplier == 1.0 else gradient * form.multiplier


# --- parameters ----------------------------------------------------------------------------------


def stacked_blocks(cfg: ModelConfig, rngs: nnx.Rngs) -> Block | nnx.Dict:
    """Makes all layers in the layout of training and checkpoints, see `specjax.config.stacks`."""

    def one(stack) -> Block:
        return Block(stack.layer, cfg, rngs, stack=len(stack.numbers))

    made = tree_of(cfg.layers, one)
    return made if isinstance(made, Block) else nnx.Dict(made)


def angles_of(layers: Iterable[Layer], positions: Int[Array, "B T"]) -> tuple[tuple[Any, Any], ...]:
    """Computes the angles of the layers' rotary embeddings, as pairs for `Where.angles`."""
    mixers = {layer.mixer.rotation: layer.mixer for layer in layers if layer.mixer.rotation}
    return tuple((rotation, mixer.angles(positions)) for rotation, mixer in mixers.items())


def init_params(cfg: ModelConfig, seed: int = 0) -> Params:
    """Makes random stacked parameters as a plain nested dict."""
    return nnx.to_pure_dict(nnx.state(Transformer(cfg, nnx.Rngs(seed)), nnx.Param))


def graphdef(cfg: ModelConfig, layout: str = "stacked"):
    """Returns the static half of a model, which `nnx.merge` joins with parameters inside a jit."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(cfg, nnx.Rngs(0), layout)))[0]


def laid_out(cfg: ModelConfig, mesh: jax.sharding.Mesh | None) -> ModelConfig:
    """Returns the config with the layout of decoding weights on a mesh.

    Fused weights cannot be split.
    """
    return cfg.running(fused=mesh is None or mesh.size == 1)


def to_decode_layout(params: Params, cfg: ModelConfig) -> Params:
    """Converts parameters to the dtype and layout that decoding with `cfg` takes.

    Args:
      params: parameters, stacked or as `split_layout` returns them.
    """
    if is_exact(cfg.run.products):
        return to_format(_laid_out(params, cfg), cfg)
    # What is packed is not cast: it would be rounded twice, and held in full.
    params = to_format(_unrolled_or_stacked(params, cfg), cfg)
    return cast(params, cfg.run.compute_dtype, fixed_dtypes(cfg))


def _laid_out(params: Params, cfg: ModelConfig) -> Params:
    # Cast layer by layer: XLA would hold stacks that are cast, of which layers are slices, in full.
    params = _unrolled_or_stacked(params, cfg)
    return cast(params, cfg.run.compute_dtype, fixed_dtypes(cfg))


def _unrolled_or_stacked(params: Params, cfg: ModelConfig) -> Params:
    if 0 not in params.get("layers", ()):
        return params if cfg.run.scan_layers else unroll_layers(params, cfg)
    return stack_layers(params, cfg) if cfg.run.scan_layers else params


@functools.cache
def split_layout(cfg: ModelConfig, ways: int) -> Callable[[Params], Params]:
    """Returns the part of `to_decode_layout` that is done before weights change devices.

    It takes weights that are split over any devices.

    Args:
      ways: number of devices that decoding splits the weights over; with one, weights are fused
        where they arrive.
    """
    if not is_exact(cfg.run.products):  # packed weights are less to move
        return jax.jit(functools.partial(to_decode_layout, cfg=cfg))
    cfg = cfg.running(fused=False, scan_layers=cfg.run.scan_layers or ways == 1)
    return jax.jit(functools.partial(_laid_out, cfg=cfg))


def to_format(params: Params, cfg: ModelConfig) -> Params:
    """Converts matrices in decode layout to `cfg.run.products`, see `specjax.weights.matrix`."""
    of, width = top_rows(cfg), cfg.hidden_size
    if "lm_head" not in params:
        del of["lm_head"]
    rows = [layer_rows(layer, width) for layer in cfg.layers]
    if cfg.run.fused and not cfg.run.scan_layers:
        rows = [*map(fused_rows, rows)]
    require_matches(cfg.run.products, {**of, "layers": dict(enumerate(rows))})
    if cfg.run.scan_layers and "layers" in params:

        def stacked(stack) -> Params:
            rows = layer_rows(stack.layer, width)
            prefixes = [f"layers.{number}." for number in stack.numbers]
            return pack(part_of(params["layers"], stack), rows, cfg, prefixes)

        layers = {"layers": tree_of(cfg.layers, stacked)}
        return pack({k: v for k, v in params.items() if k != "layers"}, of, cfg) | layers
    of["layers"] = dict(enumerate(rows))
    return pack(params, of, cfg)


@functools.partial(jax.jit, static_argnums=1)
def rounded(params: Params, cfg: ModelConfig) -> Params:
    """Returns stacked parameters with the weights that formats of `cfg.run.products` keep.

    What is computed with them is, up to rounding of sums, what decoding with packed weights
    computes.
    """
    dtype = cfg.run.param_dtype
    cfg = cfg.running(fused=False, scan_layers=False, compute_dtype=dtype)
    params = to_decode_layout(params, cfg)
    params = jax.tree.map(unpack, params, is_leaf=lambda leaf: hasattr(leaf, "unpack"))
    return stack_layers(cast(params, dtype, fixed_dtypes(cfg)), cfg)


def stack_layers(params: Params, cfg: ModelConfig) -> Params:
    """Converts parameters from the `unrolled` layout, not fused, to the stacked one."""

    def stacked(stack) -> Params:
        return jax.tree.map(lambda *a: jnp.stack(a), *(params["layers"][n] for n in stack.numbers))

    return {**params, "layers": tree_of(cfg.layers, stacked)}


def unroll_layers(params: Params, cfg: ModelConfig) -> Params:
    """Converts stacked parameters to the `unrolled` layout; if `fused`, the head is untied.

    If not `fused`, parameters may be left out.
    """
    if "layers" not in params:
        return params
    layers = {}
    for stack in stacks(cfg.layers):
        if stack.key is not None and stack.key not in params["layers"]:
            continue
        part = part_of(params["layers"], stack)
        if cfg.run.fused:
            part = fuse(part, layer_rows(stack.layer, cfg.hidden_size))
        for row, number in enumerate(stack.numbers):
            layers[number] = jax.tree.map(lambda a, row=row: a[row], part)
    params = {**params, "layers": dict(sorted(layers.items()))}
    if cfg.tie_embeddings and cfg.run.fused:
        params["lm_head"] = params["embed"].T
    return params
