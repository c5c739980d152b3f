"""One decoder-only transformer, whose layers are those that `ModelConfig` names.

Three ways through the same layers: `hidden` (training on packed rows), `prefill` (prompts, keys and
values out) and `decode` (tree rows against a read-only cache, new keys and values out). The cache
is never written inside the layer loop: new rows leave as outputs and `specjax.memory` commits them.

Parameters come in two layouts. `stacked` keeps one array per weight for all layers, for training,
sharding and checkpoints. `unrolled` keeps one array per weight and layer, with the projections that
share an input fused, for small decode models: slicing a stacked weight inside a decode loop would
copy it every step. Unrolled weights may lie in panels, see `specjax.kernels.panels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig
from specjax.interfaces import Param, Params
from specjax.kernels import dispatch, panels
from specjax.memory import KVCache, Table, with_marked_keys
from specjax.models.layers import Block, draw, fuse, layer_rows, rms_norm
from specjax.models.stacks import part_of, stacks, tree_of
from specjax.parallel.context import Context, pin_rows


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
            self.layers = nnx.List([Block(layer, cfg, rngs, fused=True) for layer in cfg.layers])
        self.norm = array("norm")
        # The unrolled layout unties: decoding would transpose the embedding at every draft step.
        self.tied = cfg.tie_embeddings and layout == "stacked"
        if not self.tied:
            self.lm_head = array("lm_head")

    # --- three ways through the layers -------------------------------------------------------

    def hidden(
        self,
        tokens: Int[Array, "B S"],
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"],
        context: Context | None = None,
    ) -> Float[Array, "B S D"]:
        """States before the final norm, causal within segments (0 pads).

        Args:
          context: how rows are split over devices; all per-token arrays are in its order.
        """
        x, _ = self._forward(
            tokens,
            positions,
            lambda q, k, v, _: (self._causal(q, k, v, segment_ids, context), None),
            keep_kv=False,
        )
        return pin_rows(x, context)

    def prefill(
        self, tokens: Int[Array, "B S"], lengths: Int[Array, " B"]
    ) -> tuple[Float[Array, "B S D"], KVCache]:
        """States before the final norm, and every layer's keys and values for the S positions."""
        index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        segment_ids = (index < lengths[:, None]).astype(jnp.int32)
        return self._forward(
            tokens,
            index,
            lambda q, k, v, _: (self._causal(q, k, v, segment_ids), (k, v)),
        )

    def decode(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache,
        prefix_len: Int[Array, " B"],
        visible_bits: Array,
        by_position: tuple[Array, Array] | None = None,
        scratch: tuple[KVCache, int] | None = None,
        table: Table = None,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """States before the final norm for T tree rows, and their keys and values as scratch.

        Args:
          visible_bits: numbers the scratch rows first, then the T rows themselves.
          by_position: (path_rows, depth) of the tree: attend as `tree_attention_by_position`.
          scratch: buffers of earlier tree rows [.. B K total H], and how many they hold so far.
          table: the pages of each sequence, see `specjax.memory`.

        Returns:
          states, and keys and values: of the T rows, or the buffers with these filled in.
        """

        if by_position is None and dispatch.runs_layers(self.cfg):
            buffers, held = (None, 0) if scratch is None else scratch
            pairs = None if buffers is None else list(zip(*buffers, strict=True))
            pages, x = list(zip(*cache, strict=True)), self.embed_tokens(tokens)
            arrays = positions, pages, prefix_len, visible_bits, pairs, held, table
            x, rows = layers_by_kernel(self.cfg, self.layers, x, *arrays)
            return x, _collect(rows)
        paged = table is not None and not isinstance(cache.k, tuple)
        if paged:  # The pages are read where they lie: a scan would first copy each layer's out.
            of_all = [pages.reshape(-1, *pages.shape[2:]) for pages in cache]
            first = jnp.arange(len(cache.k)) * cache.k.shape[1]
            cache = KVCache(first, first)

        def attend(q, k, v, layer_cache):
            k, v = with_marked_keys(k, v)
            kv, table_here = (k, v), table
            if scratch is not None:
                (k_cache, k_earlier), (v_cache, v_earlier) = layer_cache
                layer_cache = k_cache, v_cache
                kv, (k, v) = append_rows((k_earlier, v_earlier), scratch[1], kv)
            if paged:
                table_here, layer_cache = table + layer_cache[0], of_all
            if by_position is not None:
                return dispatch.tree_attention_by_position(
                    q, k, v, *layer_cache, prefix_len, *by_position, table_here
                ), kv
            arrays = q, k, v, *layer_cache, prefix_len, visible_bits, table_here
            return dispatch.tree_attention(*arrays, kernel=self.cfg.run.attention), kv

        beside = cache if scratch is None else _beside(cache, scratch[0])
        return self._forward(tokens, positions, attend, beside)

    def _causal(self, q, k, v, segment_ids, context: Context | None = None) -> Array:
        kernel = self.cfg.run.attention
        return dispatch.causal_attention(q, k, v, segment_ids, context, kernel=kernel)

    # --- between tokens, states and logits -----------------------------------------------------

    def embed_tokens(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        return embed_tokens(self.embed[...], tokens, self.cfg)

    def draft_hidden(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """The state that the draft head is given for a row."""
        return x if self.cfg.mtp_target_hidden == "pre_norm" else self.final_norm(x)

    def final_norm(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return rms_norm(x, self.norm[...], self.cfg.rms_norm_eps)

    def logits(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Float32 logits of states before the final norm."""
        return lm_logits(self.final_norm(x), self.head_weight())

    def head_weight(self) -> Float[Array, "D V"]:
        return self.embed[...].T if self.tied else self.lm_head[...]

    # --- the layer loop --------------------------------------------------------------------------

    def _forward(self, tokens, positions, attend: Callable, cache=None, keep_kv=True):
        x = self.embed_tokens(tokens)
        cos, sin = rope_angles(self.cfg, positions)

        def layer(block, x, layer_cache):
            attended, kv = attend(*block.qkv(x, cos, sin), layer_cache)
            return block.finish(x, attended), kv

        return run_layers(self.layers, self.cfg, layer, x, cache, keep_kv)


def run_layers(layers, cfg: ModelConfig, layer: Callable, x, cache: KVCache | None, keep_kv: bool):
    """Runs `layer(block, x, (k, v))` over all layers; scanned or unrolled, see the module text."""
    if not isinstance(layers, Block):
        run = functools.partial(_run_block, layer)
        if isinstance(x, jax.core.Tracer):  # layers that are alike are traced and lowered once
            run = jax.jit(run, static_argnums=0)
        rows = []
        for i, block in enumerate(layers):
            x, new = run(*nnx.split(block), x, None if cache is None else cache.layer(i))
            rows.append(new)
        return x, _collect(rows) if keep_kv else None

    graphdef, state = nnx.split(layers)

    def body(x, inputs):
        layer_state, layer_cache = inputs
        return layer(nnx.merge(graphdef, layer_state), x, layer_cache)

    if cfg.run.remat:
        body = jax.checkpoint(body)
    if cfg.run.scan_layers:
        stacked = None if cache is None else (cache.k, cache.v)
        x, new = jax.lax.scan(body, x, (state, stacked))
        return x, KVCache(*new) if keep_kv else None
    rows = []
    for i in range(cfg.num_layers):
        here = jax.tree.map(lambda a, i=i: a[i], state)
        x, new = body(x, (here, None if cache is None else cache.layer(i)))
        rows.append(new)
    return x, _collect(rows) if keep_kv else None


def _run_block(layer: Callable, graphdef, state, x, layer_cache):
    return layer(nnx.merge(graphdef, state), x, layer_cache)


def layers_by_kernel(
    cfg: ModelConfig, blocks, x, positions, pages, prefix_len, visible_bits, buffers, held, table
) -> tuple[Array, list[tuple[Array, Array]]]:
    """Layers over tree rows by `dispatch.layers`, where `dispatch.runs_layers`.

    Args:
      pages: keys and values of each layer. buffers: of earlier tree rows, likewise, of which they
        hold `held` so far; None: there are none.

    Returns:
      states, and each layer's keys and values: of the rows, or the buffers with these filled in.
    """
    before = held and [tuple(buffer[:, :, :held] for buffer in pair) for pair in buffers]
    weights, angles = [block.arrays() for block in blocks], rope_angles(cfg, positions)
    x, rows = dispatch.layers(
        cfg, weights, x, *angles, pages, prefix_len, visible_bits, before or None, table
    )
    if buffers is not None:
        filled = zip(buffers, rows, strict=True)
        rows = [append_rows(pair, held, new)[0] for pair, new in filled]
    return x, rows


def _collect(rows: list) -> KVCache:
    return KVCache(tuple(k for k, _ in rows), tuple(v for _, v in rows))


def _beside(cache: KVCache, scratch: KVCache) -> KVCache:
    """One cache whose layers are pairs (cached, scratch), in either layout."""
    if isinstance(cache.k, tuple):
        pairs = (tuple(zip(*both, strict=True)) for both in zip(cache, scratch, strict=True))
        return KVCache(*pairs)
    return KVCache(*zip(cache, scratch, strict=True))


def append_rows(buffers: tuple[Array, Array], held: int, rows: tuple[Array, Array]):
    """Fills rows [B K R H] into preallocated buffers behind the `held` rows they hold.

    Returns:
      the buffers, and the part of them that holds rows: [B K held + R H].
    """
    filled = [
        jax.lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), held, axis=2)
        for buffer, new in zip(buffers, rows, strict=True)
    ]
    end = held + rows[0].shape[2]
    return tuple(filled), tuple(buffer[:, :, :end] for buffer in filled)


def embed_tokens(embed: Float[Array, "V D"], tokens: Int[Array, "..."], cfg: ModelConfig) -> Array:
    """Embeddings in the compute dtype; ids are clamped, for an out-of-range `take` fills NaN."""
    safe = jnp.clip(tokens, 0, cfg.vocab_size - 1)
    return jnp.take(embed, safe, axis=0).astype(jnp.dtype(cfg.run.compute_dtype))


def lm_logits(normed: Float[Array, "... D"], head: Float[Array, "..."]) -> Float[Array, "... V"]:
    """Float32 logits of normed states, by a head [D V] or one in panels."""
    if head.ndim == 3:
        return dispatch.product(normed, head)
    return jnp.matmul(normed, head.astype(normed.dtype), preferred_element_type=jnp.float32)


# --- parameters ----------------------------------------------------------------------------------


def top_rows(cfg: ModelConfig) -> dict[str, Param]:
    """The rows of the arrays outside the layers, the head's too where it is tied."""
    v, d = cfg.vocab_size, cfg.hidden_size
    return {
        "embed": Param((v, d), ("vocab", "embed"), ("model.embed_tokens.weight",)),
        "norm": Param((d,), (None,), ("model.norm.weight",), init=None),
        "lm_head": Param(
            (d, v), ("embed", "vocab"), ("lm_head.weight",), transpose=True, matrix=True
        ),
    }


def stacked_blocks(cfg: ModelConfig, rngs: nnx.Rngs) -> Block | nnx.Dict:
    """All layers as training and checkpoints have them, see `specjax.models.stacks`."""

    def one(stack) -> Block:
        return Block(stack.layer, cfg, rngs, stack=len(stack.numbers))

    made = tree_of(cfg.layers, one)
    return made if isinstance(made, Block) else nnx.Dict(made)


def rope_angles(cfg: ModelConfig, positions: Int[Array, "B T"]) -> tuple[Array, Array]:
    """Cosines and sines of the positions, which all layers share.

    Raises:
      NotImplementedError: the layers have several.
    """
    found = {(mixer.rope, mixer.head_dim) for mixer in cfg.mixers("attention")}
    if len(found) != 1:
        raise NotImplementedError(f"expected layers with one RoPE, got {sorted(map(str, found))}")
    return cfg.layers[0].mixer.angles(positions)


def init_params(cfg: ModelConfig, seed: int = 0) -> Params:
    """Random stacked parameters as a plain nested dict."""
    return nnx.to_pure_dict(nnx.state(Transformer(cfg, nnx.Rngs(seed)), nnx.Param))


def graphdef(cfg: ModelConfig, layout: str = "stacked"):
    """The static half of a model; `nnx.merge(graphdef(cfg), params)` gives the module in a jit."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(cfg, nnx.Rngs(0), layout)))[0]


def to_decode_layout(params: Params, cfg: ModelConfig) -> Params:
    """Stacked parameters in the dtype and layout that decoding with `cfg` takes."""
    params = jax.tree.map(lambda a: a.astype(jnp.dtype(cfg.run.compute_dtype)), params)
    if cfg.run.scan_layers:
        return params
    params = unroll_layers(params, cfg)
    return panels.pack(params) if cfg.run.products == "panels" else params


def unroll_layers(params: Params, cfg: ModelConfig) -> Params:
    """Stacked parameters to the `unrolled` layout: projections fused, the head never tied."""
    layers = {}
    for stack in stacks(cfg.layers):
        fused = fuse(part_of(params["layers"], stack), layer_rows(stack.layer, cfg.hidden_size))
        for row, number in enumerate(stack.numbers):
            layers[number] = jax.tree.map(lambda a, row=row: a[row], fused)
    head = params["embed"].T if cfg.tie_embeddings else params["lm_head"]
    return {**params, "layers": dict(sorted(layers.items())), "lm_head": head}
