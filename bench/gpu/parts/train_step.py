"""A training step: seconds of an update, its share of the peak (MFU), and attention's share of it.

Rows are packed with samples of equal length. The policy is float32, computed in bfloat16, its
layers are recomputed in the backward pass, and the optimizer is Adam. Attention by itself is the
forward pass and gradients of as many calls as there are layers.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu.chunks import shape_of
from bench.gpu.job import Job
from bench.gpu.program import Place, Program, build
from bench.record import alternate, figure, median_interval, paired_ratio_interval
from bench.round.batch import random_weights
from specjax.config import ModelConfig
from specjax.kernels import dispatch
from specjax.models.transformer import init_params
from train.flops import UpdateSpeed
from train.loss import count_denominators, sft_loss
from train.optim import OptimConfig
from train.policy import PolicyTrainer


class Sizes(NamedTuple):
    """`layers` None: all of the model's; `sample`: tokens of each sample of a row."""

    layers: int | None = None
    rows: int = 2
    length: int = 4096
    sample: int = 1024
    repeats: int = 5


SMALL = Sizes(2, 2, 32, 8, 2)


def _config(small: bool, sizes: Sizes, shape: str) -> ModelConfig:
    cfg = shape_of("tiny" if small else shape)
    if sizes.layers is not None:
        cfg = cfg.replace(layers=cfg.layers[:1] * sizes.layers)
    return cfg.running(
        param_dtype="float32", compute_dtype="float32" if small else "bfloat16", remat=not small
    )


def _batch(sizes: Sizes, vocabulary: int, seed: int) -> dict[str, np.ndarray]:
    shape = sizes.rows, sizes.length
    places = np.broadcast_to(np.arange(sizes.length), shape)
    return {
        "tokens": np.random.default_rng(seed).integers(vocabulary, size=shape).astype(np.int32),
        "positions": (places % sizes.sample).astype(np.int32),
        "segment_ids": (1 + places // sizes.sample).astype(np.int32),
        "loss_mask": np.ones(shape, np.float32),
    }


def _trainer(place: Place, small: bool, shape: str) -> PolicyTrainer:
    cfg = _config(small, SMALL if small else Sizes(), shape)
    with place.seen():
        return PolicyTrainer(cfg, sft_loss, OptimConfig().build())


def _attention(trainer: PolicyTrainer):
    """Returns a jitted function: attention of one layer, forward and backward."""

    def loss(q, k, v, segments):
        out = dispatch.causal_attention(q, k, v, segments, kernel=trainer.cfg.run.attention)
        return out.astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def _attention_inputs(cfg: ModelConfig, sizes: Sizes) -> tuple:
    mixer, dtype = cfg.layers[0].mixer, cfg.run.compute_dtype
    queries, keys = (
        jax.ShapeDtypeStruct((sizes.rows, heads, sizes.length, mixer.head_dim), dtype)
        for heads in (mixer.num_heads, mixer.num_kv_heads)
    )
    return queries, keys, keys, jax.ShapeDtypeStruct((sizes.rows, sizes.length), np.int32)


def programs(place: Place, small: bool, shape: str = "1.7B") -> list[Program]:
    sizes = SMALL if small else Sizes()
    trainer = _trainer(place, small, shape)
    batch = _batch(sizes, trainer.cfg.vocab_size, 0)
    params = jax.eval_shape(functools.partial(init_params, trainer.cfg))
    gradients = jax.eval_shape(trainer._zeros_program, params)
    held = place.shapes((params, gradients, batch))
    counts = count_denominators([batch])
    moments = 2 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))  # of Adam
    called = place.shapes(_attention_inputs(trainer.cfg, sizes))
    attention = _attention(trainer)
    return [
        Program("update", lambda: trainer.programs["accumulate"].lower(*held, counts), {}, moments),
        Program("attention", lambda: attention.lower(*called)),
    ]


def measure(job: Job, shape: str = "1.7B") -> None:
    """Measures `ms/update`, `mfu`, `tflops`, and `attention_share`."""
    sizes = SMALL if job.small else Sizes()
    job.tell(sizes=sizes._asdict(), shape=shape)
    trainer = _trainer(Place(), job.small, shape)
    job.tell(attention=trainer.cfg.run.attention)
    built = build([p for p in programs(Place(), job.small, shape) if p.name == "attention"])
    job.each(
        [(("mfu", "attention_share"), functools.partial(_figures, job, sizes, trainer, built))]
    )


def _figures(job: Job, sizes: Sizes, trainer: PolicyTrainer, built) -> dict:
    cfg = trainer.cfg
    params = random_weights(functools.partial(init_params, cfg), job.seed)
    held = [params, trainer.init_opt_state(params)]
    del params
    batch = _batch(sizes, cfg.vocab_size, job.seed)
    counts, placed = count_denominators([batch]), trainer.place(batch)

    def update() -> None:
        *held[:], _, sums = trainer.update(*held, [placed], counts, keep=0)
        if not np.isfinite(float(sums["loss"])):
            raise FloatingPointError(f"the loss is {float(sums['loss'])}")

    keys = jax.random.split(jax.random.key(job.seed), 3)
    shapes = _attention_inputs(cfg, sizes)
    arrays = [
        jax.random.normal(key, s.shape, s.dtype) for key, s in zip(keys, shapes, strict=False)
    ]
    arrays.append(placed["segment_ids"])

    def attention() -> None:
        for _ in range(cfg.num_layers):
            found = built["attention"](*arrays)
        jax.block_until_ready(found)

    update(), attention()
    found = alternate({"update": update, "attention": attention}, sizes.repeats)
    value, *ends = median_interval([1e3 * s for s in found["update"]])
    tokens = sizes.rows * sizes.length
    result = {"ms/update": figure(value, f"ms, {tokens} tokens and one step of Adam", ends)}
    lengths = [sizes.sample] * (tokens // sizes.sample)
    speed = UpdateSpeed(cfg, jax.devices()[:1]).metrics(lengths, value / 1e3)
    result["tflops"] = figure(speed.get("perf/tflops/actor"), "TFLOP/s")
    unit = "of the dense peak in bfloat16"
    known = speed.get("perf/mfu/actor")
    result["mfu"] = figure(known, unit if known is not None else "left out: unknown peak")
    share, *ends = paired_ratio_interval(found["attention"], found["update"])
    unit = "of an update: all layers' attention by itself, once forward and backward"
    return result | {"attention_share": figure(share, unit, ends)}
