"""A comparison of plain decoding by specjax and by a plain jitted JAX sampler.

The sampler is that of `bench.throughput peers`: one program, in which a `lax.while_loop` decodes a
static batch over a contiguous cache.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from bench.gpu.job import Job
from bench.gpu.parts import peers
from bench.gpu.parts.engines import config_of, model_of
from bench.gpu.parts.peers import FULL, SMALL, OwnCalls, Shape
from bench.gpu.program import Place, Program
from bench.record import alternate
from bench.throughput.jax_sampler import JaxSampler, sample_batch
from specjax import ModelConfig
from specjax.models.transformer import init_params, to_decode_layout
from specjax.weights.matrix import precision_of


def _shape(small: bool, shape: str) -> tuple[str, Shape]:
    return ("tiny", SMALL) if small else (shape, FULL)


def measure(job: Job, shape: str = "1.7B") -> None:
    """Measures `jax_tokens_per_sec/..`, `specjax_tokens_per_sec/..` and their ratio."""
    name, lengths = _shape(job.small, shape)
    job.tell(shape=name, lengths=lengths._asdict())
    cfg, policy, _ = model_of(name, None, lengths.longest, job.seed)
    job.each(
        (
            f"specjax_over_jax/batch_{batch}",
            functools.partial(_figures, job, lengths, batch, cfg, policy),
        )
        for batch in lengths.batches
    )


def _figures(job: Job, shape: Shape, batch: int, cfg: ModelConfig, policy) -> dict:
    prompts = peers.prompts_of(shape, batch, cfg.vocab_size, job.seed)
    sampler = JaxSampler(cfg, policy, batch, shape.prompt, shape.output, (), temperature=0.0)
    ours = OwnCalls(cfg, policy, shape, prompts, job.seed)

    def sample(tokens: int) -> None:
        generated = sampler(prompts, [tokens] * batch, job.seed)
        if {len(row) for row in generated} != {tokens}:
            raise ValueError(
                f"expected {tokens} tokens of each sample, the sampler generated "
                f"{sorted({len(row) for row in generated})}: rates would not be comparable"
            )

    jobs = {
        "jax whole": lambda: sample(shape.output),
        "jax first": lambda: sample(1),
        **ours.jobs(),
    }
    for run in jobs.values():
        run()  # compiles
    seconds = alternate(jobs, shape.repeats)
    tokens = batch * (shape.output - 1)
    pairs = zip(seconds["jax whole"], seconds["jax first"], strict=True)
    theirs = [(whole - first) / tokens for whole, first in pairs]
    return peers.figures("jax", theirs, ours.costs(seconds), shape, batch)


def programs(place: Place, small: bool, shape: str = "1.7B") -> list[Program]:
    """Returns the sampler's programs; chunks of the engine are those of other parts."""
    name, lengths = _shape(small, shape)
    cfg = config_of(name, None, lengths.longest).running(scan_layers=False)
    stacked = jax.eval_shape(lambda: init_params(cfg))
    # Beside the sampler's weights there are those it was given, and the engine's.
    beside = 2 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stacked))
    weights = jax.eval_shape(lambda params: to_decode_layout(params, cfg), stacked)

    def lower(batch: int) -> jax.stages.Lowered:
        def integers(*dims: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(dims, jnp.int32)

        rows = integers(batch, lengths.prompt), integers(batch), integers(batch)
        inputs = place.shapes((weights, *rows, jax.eval_shape(lambda: jax.random.key(0))))
        how = {"cfg": cfg, "room": lengths.output, "stop_ids": (), "temperature": 0.0}
        with precision_of(cfg):
            return sample_batch.lower(*inputs, **how)

    return [
        Program(f"batch_{batch}", functools.partial(lower, batch), beside=beside)
        for batch in lengths.batches
    ]
