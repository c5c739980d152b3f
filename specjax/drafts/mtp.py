"""The multi-token-prediction draft head (DeepSeek-V3, arXiv 2412.19437, section 2.2; MiMo).

Row j takes (h_j, e(x_{j+1})): the target's state after token j and the embedding of the token that
followed. It predicts x_{j+2}. Drafting deeper feeds the head its own output in place of h. The head
owns its projection, layer(s) and norms; embedding and language-model head are the policy's, read
only.

Module s predicts at step s; a head with fewer modules than steps repeats its last module. In
training and in decoding alike, a query of step s of the last module sees that module's base rows
up to its own position, and of the later steps only its own rows (EAGLE-3's training-time test).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig
from specjax.kernels import cpu, dispatch, panels
from specjax.memory import Table, with_marked_keys
from specjax.models.layers import INIT_STD, Block, dense, fuse_block, rms_norm
from specjax.models.rope import rope_tables
from specjax.models.transformer import Params, append_rows, layers_by_kernel
from specjax.parallel.context import Context


class MTPModule(nnx.Module):
    """Norms of both inputs, their projection to D, one decoder layer, and a final norm."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        """Its layer is fused where products go by panels, see `to_panels`."""
        self.cfg = cfg
        d, dtype = cfg.hidden_size, jnp.dtype(cfg.param_dtype)
        self.embed_norm = nnx.Param(jnp.ones((d,), dtype))
        self.hidden_norm = nnx.Param(jnp.ones((d,), dtype))
        draw = jax.random.normal(rngs.params(), (2 * d, d), jnp.float32)
        self.proj = nnx.Param((INIT_STD * draw).astype(dtype))
        self.layer = Block(cfg, rngs, fused=cfg.products == "panels")
        self.norm = nnx.Param(jnp.ones((d,), dtype))

    def inputs(self, hidden: Float[Array, "B T D"], embedded: Float[Array, "B T D"]) -> Array:
        """The layer's input; `mtp_concat` says which half of `proj` belongs to which operand."""
        eps = self.cfg.rms_norm_eps
        e = rms_norm(embedded, self.embed_norm[...], eps)
        h = rms_norm(hidden.astype(embedded.dtype), self.hidden_norm[...], eps)
        halves = [e, h] if self.cfg.mtp_concat == "embedding_first" else [h, e]
        return dense(jnp.concatenate(halves, -1), self.proj[...].astype(e.dtype))

    def outputs(self, x: Float[Array, "B T D"]) -> tuple[Array, Array]:
        """(state for the language-model head, state to recycle as h of the next step)."""
        normed = rms_norm(x, self.norm[...], self.cfg.rms_norm_eps)
        return normed, (normed if self.cfg.mtp_recycle == "post_norm" else x)


class MTPHead(nnx.Module):
    """`mtp_num_layers` modules; step s uses module min(s, mtp_num_layers - 1)."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        if cfg.mtp_num_layers < 1:
            raise ValueError(
                f"an MTP head needs mtp_num_layers >= 1, got {cfg.mtp_num_layers}; set it in the "
                "model config"
            )
        self.cfg = cfg
        self.blocks = nnx.List([MTPModule(cfg, rngs) for _ in range(cfg.mtp_num_layers)])

    def module_for(self, step: int) -> tuple[int, MTPModule]:
        index = min(step, len(self.blocks) - 1)
        return index, self.blocks[index]

    def decode(
        self,
        index: int,
        hidden: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        cache: tuple[Array, Array],
        prefix_len: Int[Array, " B"],
        visible_bits: Array,
        scratch: tuple[tuple[Array, Array], int] | None = None,
        table: Table = None,
    ):
        """Module `index` over T rows against its cache, and the scratch rows that came before.

        Args:
          visible_bits: numbers the scratch rows first, then the T rows themselves.
          scratch: buffers of keys and values [B K total H], and how many rows they hold so far.
          table: the pages of each sequence, see `specjax.memory`.

        Returns:
          states for the head [B T D], states to recycle [B T D], keys and values: of the T rows,
          or the buffers with these filled in.
        """
        module = self.blocks[index]
        x = module.inputs(hidden, embedded)
        if cpu.runs_layers(self.cfg):
            buffers, held = (None, 0) if scratch is None else ([scratch[0]], scratch[1])
            arrays = positions, [cache], prefix_len, visible_bits, buffers, held, table
            x, (kv,) = layers_by_kernel(self.cfg, [module.layer], x, *arrays)
            return *module.outputs(x), kv
        cos, sin = rope_tables(self.cfg, positions)
        q, k, v = module.layer.qkv(x, cos, sin)
        kv = k, v = with_marked_keys(k, v)
        if scratch is not None:
            kv, (k, v) = append_rows(*scratch, kv)
        arrays = q, k, v, *cache, prefix_len, visible_bits, table
        attended = dispatch.tree_attention(*arrays, kernel=self.cfg.attention)
        normed, recycled = module.outputs(module.layer.finish(x, attended))
        return normed, recycled, kv

    def unroll(
        self,
        hidden: Float[Array, "R S D"],
        step_embeddings: list[Float[Array, "R S D"]],
        positions: Int[Array, "R S"],
        segment_ids: Int[Array, "R S"],
        context: Context | None = None,
    ) -> list[Float[Array, "R S D"]]:
        """Training forward over `len(step_embeddings)` recursive steps on packed rows.

        Args:
          hidden: the target's states, detached.
          step_embeddings: entry s holds e(x_{t+1+s}) at index t, rolled within segments.
          context: how rows are split over devices; all per-token arrays are in its order.

        Returns:
          per step, states for the language-model head; index t of step s predicts x_{t+2+s}.
        """
        outputs, base, own, kernel = [], None, [], self.cfg.attention
        for step, embedded in enumerate(step_embeddings):
            index, module = self.module_for(step)
            x = module.inputs(hidden, embedded)
            q, k, v = module.layer.qkv(x, *rope_tables(self.cfg, positions + step))
            if step == index:  # the module's first use: its rows are the base rows
                base, own = (k, v), []
                attended = dispatch.causal_attention(q, k, v, segment_ids, context, kernel=kernel)
            else:
                own.append((k, v))
                attended = dispatch.causal_attention_with_own(
                    q, *base, own, segment_ids, context, kernel=kernel
                )
            normed, hidden = module.outputs(module.layer.finish(x, attended))
            outputs.append(normed)
        return outputs


def init_head_params(cfg: ModelConfig, seed: int = 0) -> Params:
    """Random head parameters as a plain nested dict, in the layout of checkpoints."""
    head = MTPHead(cfg.replace(products="xla"), nnx.Rngs(seed))
    return nnx.to_pure_dict(nnx.state(head, nnx.Param))


def to_panels(params: Params, cfg: ModelConfig) -> Params:
    """A head's parameters with its layers fused, and in panels: see `specjax.kernels.panels`."""
    blocks = {
        index: {**module, "layer": fuse_block(module["layer"], cfg)}
        for index, module in params["blocks"].items()
    }
    return panels.pack({**params, "blocks": blocks}, cfg.compute_dtype)


def head_graphdef(cfg: ModelConfig):
    """The static half of a head; merge it with parameters inside a jitted function."""
    return nnx.split(nnx.eval_shape(lambda: MTPHead(cfg, nnx.Rngs(0))))[0]
