"""A sampler as a user of the library's model would write it: a peer of `bench.peers`.

One jitted program: the batch's prompts, padded on the left, are read at once, and a
`lax.while_loop` draws a token per sample until the last one ends. The cache is contiguous and as
long as prompt and response can be, all samples share one cursor into it, and attention reads all of
it under a mask. The layers are the library's, in the layout that it decodes with. It has nothing of
the engine: no chunks, no refilled slots, no speculation, no log-probabilities.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from specjax.config import ModelConfig
from specjax.interfaces import Where
from specjax.models.layers import rms_norm
from specjax.models.transformer import Params, Transformer, angles_of, graphdef, to_decode_layout
from specjax.weights.matrix import precision_of


def attend(q, k_cache, v_cache, mask):
    """Attends with queries [B N T H] to the whole cache [B K S H] under a mask [B T S]."""
    b, n, t, h = q.shape
    grouped = q.reshape(b, k_cache.shape[1], -1, t, h)
    scores = jnp.einsum("bkgth,bksh->bkgts", grouped, k_cache).astype(jnp.float32) * h**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgts,bksh->bkgth", weights.astype(q.dtype), v_cache).reshape(b, n, t, h)


def forward(model: Transformer, cache, tokens: Int[Array, "B T"], start, padding: Int[Array, " B"]):
    """Returns logits [B V] after the last of T tokens at `start` of the cache, and the cache."""
    slots = start + jnp.arange(tokens.shape[1])
    seen = jnp.arange(cache[0][0].shape[2])
    mask = (seen <= slots[:, None]) & (seen >= padding[:, None, None])
    # A row that is padding itself sees slot 0: a softmax over nothing would be NaN.
    mask |= (seen == 0) & (slots[:, None] < padding[:, None, None])
    positions = jnp.maximum(slots - padding[:, None], 0)
    x = model.embed_tokens(tokens)
    written = []
    angles = angles_of(model.cfg.layers, positions)
    where, eps = Where("tree", positions, angles=angles), model.cfg.rms_norm_eps
    for block, (k_cache, v_cache) in zip(model.layers, cache, strict=True):
        w, layer = block.arrays(), block.layer
        q, k, v, _ = layer.mixer.project(w, rms_norm(x, w["input_norm"], eps), where)
        k_cache = jax.lax.dynamic_update_slice(k_cache, k, (0, 0, start, 0))
        v_cache = jax.lax.dynamic_update_slice(v_cache, v, (0, 0, start, 0))
        x += layer.mixer.output(w, attend(q, k_cache, v_cache, mask))
        x += layer.mlp.run(w, rms_norm(x, w["post_norm"], eps), where)[0]
        written.append((k_cache, v_cache))
    return model.logits(x[:, -1]), written


@functools.partial(jax.jit, static_argnames=("cfg", "room", "stop_ids", "temperature"))
def sample_batch(
    params: Params,
    tokens: Int[Array, "B S"],
    padding: Int[Array, " B"],
    limits: Int[Array, " B"],
    key: Array,
    *,
    cfg: ModelConfig,
    room: int,
    stop_ids: tuple[int, ...],
    temperature: float,
) -> tuple[Int[Array, "B R"], Int[Array, " B"]]:
    """Generates until every sample has ended.

    Args:
      params: parameters in the decode layout.
      padding: number of unused places on the left of each prompt.
      limits: largest number of tokens of each sample, up to `room`; 0 for unused rows.
      temperature: sampling temperature; 0 is greedy.

    Returns:
      tokens, and how many of each row were generated; a stop token is the last of its row.
    """
    model = nnx.merge(graphdef(cfg, cfg.run.decode_layout), params)
    batch, width = tokens.shape
    (mixer,) = cfg.mixers("attention")
    shape = (batch, mixer.num_kv_heads, width + room, mixer.head_dim)
    zeros = jnp.zeros(shape, jnp.dtype(cfg.run.compute_dtype))
    logits, cache = forward(model, [(zeros, zeros)] * cfg.num_layers, tokens, 0, padding)

    def step(carry):
        at, logits, cache, out, count, running = carry
        if temperature:
            noise_key = jax.random.fold_in(key, at)
            token = jax.random.categorical(noise_key, logits / temperature).astype(jnp.int32)
        else:
            token = jnp.argmax(logits, -1).astype(jnp.int32)
        count = count + running
        stopped = jnp.isin(token, jnp.array(stop_ids, jnp.int32)) | (count >= limits)
        out = jax.lax.dynamic_update_slice(out, token[:, None], (0, at))
        logits, cache = forward(model, cache, token[:, None], width + at, padding)
        return at + 1, logits, cache, out, count, running & ~stopped

    out, count = jnp.zeros((batch, room), jnp.int32), jnp.zeros(batch, jnp.int32)
    begin = jnp.int32(0), logits, cache, out, count, limits > 0
    *_, out, count, _ = jax.lax.while_loop(lambda carry: carry[-1].any(), step, begin)
    return out, count


class JaxSampler:
    """Generates static batches in the given order, each until its longest sample ends.

    Args:
      batch: samples per batch.
      width: largest number of tokens in a prompt.
      room: largest number of tokens in a response.
      stop_ids: tokens that end a sample.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        batch: int,
        width: int,
        room: int,
        stop_ids: Sequence[int],
        temperature: float = 1.0,
    ):
        cfg = cfg.running(scan_layers=False)
        self.batch, self.width = batch, width
        self.params = jax.jit(to_decode_layout, static_argnums=1)(params, cfg)
        program = functools.partial(
            sample_batch, cfg=cfg, room=room, stop_ids=tuple(stop_ids), temperature=temperature
        )
        # Else a float32 model would be multiplied in TF32 on GPUs, and the engine's exactly.
        self.program = precision_of(cfg)(program)

    def __call__(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], seed: int
    ) -> list[list[int]]:
        """Generates the response to every prompt."""
        outputs = []
        for first in range(0, len(prompts), self.batch):
            here = prompts[first : first + self.batch]
            tokens = np.zeros((self.batch, self.width), np.int32)
            padding = np.full(self.batch, self.width - 1, np.int32)
            wanted = np.zeros(self.batch, np.int32)
            wanted[: len(here)] = limits[first : first + self.batch]
            for row, prompt in enumerate(here):
                tokens[row, self.width - len(prompt) :] = prompt
                padding[row] = self.width - len(prompt)
            key = jax.random.fold_in(jax.random.key(seed), first)
            out, count = jax.device_get(self.program(self.params, tokens, padding, wanted, key))
            outputs += [out[row, : count[row]].tolist() for row in range(len(here))]
        return outputs
