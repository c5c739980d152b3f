"""The EAGLE-3 draft head (Li et al. 2025, arXiv 2503.01840), also of version 3.1.

Row j takes g_j = fc[target states after token j], and e = e(x_{j+1}), and predicts x_{j+2}:

    u = [input_norm(e); hidden_norm(g)]          embedding first, 2 D numbers
    a = r + attention(u)                         r is g, or hidden_norm(g) (`norm_before_residual`)
    y = a + mlp(post_norm(a))                    then further layers, which are ordinary ones
    logits = lm_head(norm(y))                    next g: y, or norm(y) (`norm_output`)

A P-EAGLE head (arXiv 2602.01469) drafts all tokens at once: every row below the root's takes a
learned state in place of the target's, `mask_hidden`, and the embedding of a mask token. So what it
proposes below a token depends on the depth alone.

`Eagle3Config` says what a head computes. `Eagle3Head` is the network; `Eagle3Source` drafts with
it, see `specjax.drafts.head`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.config import ModelConfig, SpecConfig
from specjax.config.model import Layer
from specjax.decode.tree import chain_bits
from specjax.drafts import eagle3_config, vocabulary
from specjax.drafts.eagle3_config import FINAL, Eagle3Config
from specjax.drafts.file_head import FileHead, norm_row, within
from specjax.drafts.head import HeadNetwork, drawn
from specjax.drafts.head_config import HeadFiles, config_json
from specjax.interfaces import Level, Param, Params, Stored, Where
from specjax.models.layers import block, rms_norm
from specjax.models.mixers.attention import Attention
from specjax.models.mlps.dense import Dense
from specjax.models.rope import Rope
from specjax.models.rows import layer_rows
from specjax.models.transformer import embed_tokens
from specjax.parallel.sharding import whole_rows
from specjax.weights.matrix import dot


@dataclasses.dataclass(frozen=True)
class Eagle3Head(HeadNetwork):
    """The network of an EAGLE-3 head, see `HeadNetwork`."""

    cfg: Eagle3Config

    def fused(self, states: Float[Array, "B T taps_width"]) -> Float[Array, "B T D"]:
        """Computes g of the target's states: the norm before `fc`, and `fc`."""
        cfg, eps = self.cfg, self.cfg.network.rms_norm_eps
        states = states.astype(jnp.dtype(cfg.network.run.compute_dtype))
        if cfg.fc_norm == "joined":
            states = rms_norm(states, self.w["input_norm"], eps)
        if cfg.fc_norm == "each":
            parts = jnp.split(states, len(cfg.taps), axis=-1)
            normed = [rms_norm(x, self.w["fc_norm"][i], eps) for i, x in enumerate(parts)]
            states = jnp.concatenate(normed, axis=-1)
        # Devices of `tp` compute columns, which are then gathered: sums are those of one device.
        return whole_rows(dot(states, self.w["fc"])) if "fc" in self.w else states

    def masked(self, shape: tuple[int, ...]) -> Float[Array, "B T D"]:
        """Returns g of rows [B T] below the root's, of a head with a mask token."""
        g = self.fused(self.w["mask_hidden"])
        return jnp.broadcast_to(g, (*shape, g.shape[-1]))

    def entering(self, step: int, hidden: Float[Array, "R S D"]) -> Float[Array, "R S D"]:
        masks = step and self.cfg.mask_token is not None
        return self.masked(hidden.shape[:-1]) if masks else hidden

    def through(self, index: int, hidden, embedded, where: Where, mix: Callable):
        cfg, network, x, rows = self.cfg, self.network, hidden, []
        for number, layer in enumerate(network.layers):
            w, inputs = self.w["layers"][number], None
            if number == 0:
                normed = rms_norm(x, w["hidden_norm"], network.rms_norm_eps)
                x = normed if cfg.norm_before_residual else x
                inputs = rms_norm(embedded, w["input_norm"], network.rms_norm_eps)
                inputs = jnp.concatenate([inputs, normed.astype(embedded.dtype)], axis=-1)
            run = functools.partial(mix, number, layer.mixer)
            x, new, *_ = block(layer, w, x, where, network, run, inputs)
            rows.append(new)
        normed = rms_norm(x, self.w["norm"], network.rms_norm_eps)
        return normed, (normed if cfg.norm_output else x), rows


def first_layer_rows(layer: Layer, width: int) -> dict[str, Param]:
    """Returns the rows of the first layer, whose queries, keys and values take 2 D numbers."""
    rows = layer_rows(layer, width)
    for name in "qkv":
        rows[name] = dataclasses.replace(rows[name], shape=(2 * width, rows[name].shape[1]))
    return {"hidden_norm": norm_row("hidden_norm", width), **rows}


@dataclasses.dataclass(frozen=True)
class Eagle3Source(FileHead):
    """Drafts with an `Eagle3Head`, whose parameters it takes.

    Attributes:
      cfg: what the head computes.
      layout: layout of its files: `speculators`, or `safeailab`, which is read and not written.
      writes: whether `rows` has the tensor `t2d`, too, which is written and never read.
      tied: whether its files hold an embedding that is its language-model head, too. In memory and
        in files that are written there are two, for training changes one of them.
    """

    cfg: Eagle3Config
    layout: str = dataclasses.field(default="speculators", compare=False)
    writes: bool = dataclasses.field(default=False, compare=False)
    tied: bool = dataclasses.field(default=False, compare=False)

    # --- making one ------------------------------------------------------------------------------

    @classmethod
    def of(cls, target: ModelConfig, spec: SpecConfig | None = None) -> Eagle3Source:
        """Makes a new head for a target, which drafts all of its tokens.

        Raises:
          ValueError: none of the target's layers has attention.
        """
        return cls(new_config(target))

    @classmethod
    def new(
        cls,
        target: ModelConfig,
        ids: Sequence[int] | None = None,
        policy: Params | None = None,
        seed: int = 0,
    ) -> tuple[Eagle3Source, Params]:
        """Makes a new head and its starting parameters, see `Draft.new`.

        Its language-model head and final norm start as copies of the policy's. Its layer is random:
        one that started from the target's last layer learned no faster.

        Args:
          ids: the target's token ids that it drafts, all different, in any order; None: all.
        """
        cfg = new_config(target, None if ids is None else len(ids))
        source = cls(cfg)
        params = source.init(seed)
        if ids is not None:
            params["ids"] = jnp.asarray(np.sort(np.asarray(ids)), jnp.int32)
        if policy is None:
            return source, params
        columns = vocabulary.head_of(policy)
        if ids is not None:
            columns = jnp.take(columns, params["ids"], axis=1)
        columns = columns.astype(jnp.float32) * target.logits.multiplier
        dtype = params["norm"].dtype
        # Copies: a trainer donates the head's arrays, and the policy's must outlive them.
        params["lm_head"] = jnp.array(columns, dtype)
        params["norm"] = jnp.array(policy["norm"] + (1 if target.norm_offset else 0), dtype)
        return source, params

    def init(self, seed: int) -> Params:
        """See `Draft.init`; the draft tokens are the first ones of the vocabulary."""
        rows = dataclasses.replace(self, writes=False).rows()
        tokens = rows.pop("ids", None)
        params = drawn(rows, self.cfg.network, seed)
        if tokens is not None:
            params["ids"] = jnp.arange(*tokens.shape, dtype=jnp.int32)
        return params

    # --- files -----------------------------------------------------------------------------------

    @classmethod
    def is_of(cls, raw: Mapping[str, Any], tensors: Mapping[str, Any]) -> bool:
        """Says whether files are of an EAGLE-3 head, or of another that `read` refuses by name."""
        return eagle3_config.kind_of(raw, tensors) is not None

    @classmethod
    def read_files(
        cls, file: Any, raw: Mapping[str, Any], tensors: Mapping[str, Any], target
    ) -> Eagle3Source:
        eagle3_config.refuse_others(file, raw, tensors)
        head = HeadFiles("EAGLE-3", file, raw, tensors, target)
        cfg = eagle3_config.read(head)
        first = eagle3_config.first_layer(tensors)
        return cls.made_of(
            head,
            cfg,
            eagle3_config.unused(cfg.taps),
            layout="safeailab" if first == "midlayer." else "speculators",
            tied=cfg.own_head and "lm_head.weight" not in tensors,
        )

    def rows(self) -> dict[str, Any]:
        """See `Draft.rows`. `ids` is read from offsets, see `loaded`."""
        cfg, network = self.cfg, self.cfg.network
        d, states = network.hidden_size, len(cfg.taps)
        out: dict[str, Any] = {"norm": norm_row("norm", d), "layers": {}}
        if cfg.taps != FINAL:
            stored = Stored("fc.weight", True)
            out["fc"] = Param((states * cfg.target_width, d), ("embed", "mlp"), stored, matrix=True)
        if cfg.fc_norm == "joined":
            out["input_norm"] = norm_row("input_norm", states * cfg.target_width)
        if cfg.fc_norm == "each":
            norms = {i: norm_row(f"fc_norm.{i}", cfg.target_width) for i in range(states)}
            out["fc_norm"] = norms
        if cfg.mask_token is not None:
            shape = (1, 1, self.taps_width)
            out["mask_hidden"] = Param(shape, (None,) * 3, Stored("mask_hidden"))
        for number, layer in enumerate(network.layers):
            rows = layer_rows(layer, d) if number else first_layer_rows(layer, d)
            is_middle = number == 0 and self.layout == "safeailab"
            out["layers"][number] = within("midlayer." if is_middle else f"layers.{number}.", rows)
        return out | self.own_rows()

    @property
    def aliases(self) -> dict[str, str]:
        return {"lm_head.weight": "embed_tokens.weight"} if self.tied else {}

    def unwritable(self) -> str | None:
        mixer = self.network.layers[0].mixer
        if self.cfg.taps == FINAL:
            return "files in the layout speculators have no key for a head of the final state"
        if mixer.qkv_bias != mixer.o_bias:
            return "the layout speculators has biases in all projections of attention or in none"
        return None

    def saved(self, dtype: str) -> tuple[dict[str, Any], Eagle3Source]:
        cfg, extra = self.cfg, {"eagle_aux_hidden_state_layer_ids": list(self.cfg.taps)}
        if cfg.taps == FINAL:  # in metadata alone, see `unwritable`
            extra = {"use_aux_hidden_state": False}
        if cfg.mask_token is not None:
            extra["mask_token_id"] = cfg.mask_token
        names = ("eagle3", "Eagle3Speculator"), ("peagle", "PEagleSpeculator")
        raw = {
            **config_json(
                *names[cfg.mask_token is not None], 3, cfg.network, cfg.target_vocab, dtype
            ),
            "target_hidden_size": cfg.target_width,
            "norm_before_residual": cfg.norm_before_residual,
            "norm_before_fc": cfg.fc_norm == "joined",
            "fc_norm": cfg.fc_norm == "each",
            "norm_output": cfg.norm_output,
            **extra,
        }
        return raw, Eagle3Source(cfg, writes=True)

    # --- for the user ----------------------------------------------------------------------------

    @property
    def title(self) -> str:
        return "EAGLE-3" if self.cfg.mask_token is None else "P-EAGLE"

    # --- training --------------------------------------------------------------------------------

    def embeddings(self, params: Params, policy: Params, tokens: Sequence) -> list[Array]:
        """See `HeadSource.embeddings`; an own embedding has no gradient."""
        has_own, mask = self.cfg.own_embedding, self.cfg.mask_token
        table = jax.lax.stop_gradient(params["embed"] if has_own else policy["embed"])
        if mask is not None:
            tokens = [tokens[0], *(jnp.full_like(ids, mask) for ids in tokens[1:])]
        return [embed_tokens(table, ids, self._target_sized()) for ids in tokens]

    # --- drafting --------------------------------------------------------------------------------

    def bound(self, params: Params) -> Eagle3Head:
        return Eagle3Head(self.cfg, params)

    def begin(self, model, params, state, steps: int, total: int):
        """See `HeadSource.begin`. A P-EAGLE head also runs the rows of all further steps."""
        proposal, work = super().begin(model, params, state, steps, total)
        if self.cfg.mask_token is None or steps == 1:
            return proposal, work
        head, count = self._head(params), steps - 1
        tokens = jnp.full((len(work.slot), count), self.cfg.mask_token, jnp.int32)
        where = Where(
            "tree",
            work.position[:, None] + 1 + jnp.arange(count),
            prefix=jnp.maximum(work.slot + 1, 0),
            visible=chain_bits(count),
            table=work.table,
        )
        hidden, embedded = head.masked(tokens.shape), self.embedded(model, head, tokens)
        normed, _, _ = self.run_module(head, 0, hidden, embedded, where, work.pages[0])
        return proposal, work._replace(recycled=normed)

    def step(self, model, params, work, level: Level):
        """See `HeadSource.step`. A P-EAGLE head proposes the same in all rows of a level."""
        if self.cfg.mask_token is None:
            return super().step(model, params, work, level)
        normed = work.recycled[:, level.step - 1 : level.step]
        return self.all_rows_alike(model, params, normed, level), work


# --- a new head -----------------------------------------------------------------------------------


def new_config(target: ModelConfig, columns: int | None = None) -> Eagle3Config:
    """Returns the config of a new head: one layer like the target's last one with attention.

    It has no window and no biases, takes the states {2, L // 2, L - 3} (as far as they are
    different boundaries from 1 to L), and has a language-model head of its own.

    Args:
      columns: number of draft tokens, which its parameters then list; None: all.

    Raises:
      ValueError: none of the target's layers has attention.
    """
    count, mixers = target.num_layers, [layer.mixer for layer in target.layers]
    attention = [mixer for mixer in mixers if isinstance(mixer, Attention)]
    if not attention:
        raise ValueError(
            "a new EAGLE-3 head has attention like the target's, and none of the target's layers "
            f"has any, got {', '.join(sorted({mixer.kind for mixer in mixers}))}"
        )
    # Files of heads have no interleaved or partial rotation. A head has no window: where the target
    # has several rotary embeddings, it takes that of the layers without one.
    whole = [m for m in attention if m.rope.share == 1 and not m.rope.interleaved]
    ropes = [m.rope for m in whole if m.window is None] or [m.rope for m in whole]
    last, dense = attention[-1], [x.mlp for x in target.layers if isinstance(x.mlp, Dense)]
    mixer = Attention(
        last.num_heads,
        last.num_kv_heads,
        last.head_dim,
        ropes[-1] if ropes else Rope(last.rope.theta),
        qk_norm=last.qk_norm,
        norm_eps=target.rms_norm_eps,
    )
    # Where all of the target's layers have experts there is no width to take over.
    inner = dense[-1].intermediate_size if dense else 4 * target.hidden_size
    network = ModelConfig(
        vocab_size=target.vocab_size if columns is None else columns,
        hidden_size=target.hidden_size,
        layers=(Layer(mixer, Dense(inner)),),
        model_type="qwen3" if mixer.qk_norm else "llama",
        rms_norm_eps=target.rms_norm_eps,
        tie_embeddings=False,
        max_position=target.max_position,
        run=target.run,
    )
    taps = {min(max(tap, 1), count) for tap in (2, count // 2, count - 3)}
    return Eagle3Config(
        network=network,
        target_width=target.hidden_size,
        target_vocab=target.vocab_size,
        taps=tuple(sorted(taps)),
        own_ids=columns is not None,
    )
