"""Chunks of rounds of models with random weights, by the engine's own programs.

A `Runner` is built with shapes alone, which is enough to compile for any card; then it is given
weights, and a state in which every slot has the same length. Caches hold random numbers: some chips
multiply zeros faster.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu.program import Place, Program, traced_once
from bench.record import alternate_prepared, figure, median_interval
from bench.round.batch import fill, full_row_map, random_weights
from specjax import ModelConfig, RunConfig, SpecConfig
from specjax.checkpoint.huggingface import read_config
from specjax.decode.chunk import Result, Until
from specjax.decode.options import Features
from specjax.decode.state import prefix_lengths, take_positions, take_slots
from specjax.decode.tree import chain_bits
from specjax.drafts.mtp import init_head_params
from specjax.engine.compiling import NotCompiled
from specjax.engine.runner import Runner
from specjax.interfaces import Where
from specjax.models.families.dense import change_dense, dense_config
from specjax.models.transformer import init_params
from specjax.shipped import find_shipped

OFF = "off"
DEFAULT = MappingProxyType({"": {}})  # one arm: the compiler's default options


def _bfloat16(**sizes) -> ModelConfig:
    return dense_config(**sizes, run=RunConfig(param_dtype="bfloat16", compute_dtype="bfloat16"))


@functools.cache
def shape_of(name: str) -> ModelConfig:
    """Returns a model's shape: `8B`, `1.7B` and `0.6B` are Qwen3's, `135M` is SmolLM2's."""
    if name == "8B":
        cfg = read_config(find_shipped("assets/shapes/Qwen3-8B"))
        return cfg.running(param_dtype="bfloat16", compute_dtype="bfloat16")
    if name == "1.7B":
        return _bfloat16(
            vocab_size=151_936,
            hidden_size=2048,
            intermediate_size=6144,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            rope_theta=1e6,
            max_position=40_960,
        )
    if name == "0.6B":
        cfg = shape_of("1.7B")
        return change_dense(cfg, hidden_size=1024, intermediate_size=3072)
    if name == "135M":
        return _bfloat16(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            model_type="llama",
            qk_norm=False,
            rope_theta=1e5,
            max_position=8192,
        )
    if name == "tiny":
        sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2}
        return dense_config(**sizes, num_heads=2, num_kv_heads=1, head_dim=16)
    raise ValueError(f"expected 8B, 1.7B, 135M or tiny, got {name!r}")


class Size(NamedTuple):
    """The sizes and settings of a chunk.

    Attributes:
      shape: name of a model's shape, see `shape_of`.
      batch: number of slots.
      context: largest number of tokens in a slot.
      layers: number of layers; None: all of the model's.
      strategy: strategy of the rounds.
      rounds: number of rounds in a chunk.
      attention: attention kernel, as in `EngineConfig`.
      options: sampling options of all slots, by the names of `Options`.
      features: features of the chunk's program.
      chunks: number of consecutive chunks that the cache has room for.
      draft_vocab: number of tokens that are drafted from; None: the whole vocabulary.
    """

    shape: str
    batch: int
    context: int
    layers: int | None = None
    strategy: str = OFF
    rounds: int = 24
    attention: str = "auto"
    options: Mapping[str, float] = MappingProxyType({"temperature": 1.0})
    features: Features = Features()
    chunks: int = 1
    draft_vocab: int | None = None


class Chunk:
    """The engine's program for a full batch, run from the same state again and again.

    Args:
      place: device to compile for.
      size: sizes and settings.
      rule: acceptance rule that replaces the strategy's own, see `Plan.rule`.

    Attributes:
      runner: runner of the chunk; it holds shapes instead of arrays until `load`.
      compiled: compiled programs, by name.
    """

    def __init__(self, place: Place, size: Size, rule: Callable | None = None):
        cfg = shape_of(size.shape)
        layers = cfg.layers if size.layers is None else (cfg.layers[:1] * size.layers)
        self.size = size
        plain = size.strategy == OFF
        spec = None if plain else SpecConfig(size.strategy, draft_vocab=size.draft_vocab)
        self.emits = 1 if spec is None else spec.resolve().steps + 1  # tokens per round, at most
        longest = size.context + size.chunks * size.rounds * self.emits + self.emits + 1
        cfg = cfg.replace(
            layers=layers, mtp_num_layers=1, max_position=max(cfg.max_position, longest)
        )
        tokens = size.rounds * self.emits
        with place.seen():
            self.runner = Runner(
                cfg, spec, size.batch, longest, chunk_tokens=tokens, attention=size.attention
            )
        if rule is not None:
            self.runner.strategies = {
                name: run._replace(plan=dataclasses.replace(run.plan, rule=rule))
                for name, run in self.runner.strategies.items()
            }
        self.cfg, self.name = self.runner.cfg, next(iter(self.runner.plans))
        head = None if spec is None else jax.eval_shape(lambda: init_head_params(cfg))
        self.runner.hold_shapes(jax.eval_shape(lambda: init_params(cfg)), head)
        held = self.runner.params, self.runner.head, self.runner.state
        self.shapes = place.shapes(held)
        if self.runner.vocabulary is not None:
            self.runner.vocabulary = place.shapes(self.runner.vocabulary)
        self.compiled: Mapping[str, jax.stages.Compiled] = {}
        self._kept = None
        self._at, self._place, self._seed = size.context, place, 0

    # --- compiling -------------------------------------------------------------------------------

    def programs(
        self,
        name: str,
        arms: Mapping[str, Mapping] = DEFAULT,
        beside: int = 0,
        as_engine: bool = True,
    ) -> list[Program]:
        """Returns a program for each arm's compiler options; they are traced once.

        Args:
          as_engine: whether an arm's options are added to those that the engine compiles a chunk
            with, such as `ONE_GRAPH`; False: they are all.
        """
        lower = traced_once(self._lower)
        engine = self.runner.executables.graphs.options(("chunk",)) if as_engine else {}
        return [
            Program(f"{name}{arm}", lower, {**engine, **options}, beside)
            for arm, options in arms.items()
        ]

    def _lower(self) -> jax.stages.Lowered:
        """Lowers the chunk's program as the engine does."""
        runner, found = self.runner, []

        def build(key, lower, donate):
            found.append(lower)
            return NotCompiled(donate)

        held = runner.params, runner.head, runner.state
        runner.params, runner.head, runner.state = self.shapes
        runner.executables.build, runner.executables.by_key = build, {}
        try:
            with self._place.seen():
                runner.chunk(self.name, self.size.features, *self._place.shapes(self._inputs()))
                [lower] = found
                return lower()
        finally:
            runner.params, runner.head, runner.state = held
            runner.executables.by_key = {}

    def _inputs(self) -> tuple:
        return self.runner.alone(full_row_map(self.runner)), Until.of(self.size.rounds)

    @property
    def held(self) -> int:
        """Bytes of parameters and state."""
        return _bytes(self.shapes)

    @property
    def weights(self) -> int:
        """Bytes of the policy's parameters."""
        return _bytes(self.shapes[0])

    # --- running ---------------------------------------------------------------------------------

    def load(self, seed: int, like: Chunk | None = None) -> None:
        """Makes random weights, or shares the policy of the chunk `like`, and makes a state."""
        runner, cfg, self._seed = self.runner, self.cfg, seed
        runner.params = runner.head = runner.state = runner.kept = None
        head = None
        if runner.longest.source is not None:
            head = random_weights(functools.partial(init_head_params, cfg), seed + 1)
        if like is None:
            policy = random_weights(functools.partial(init_params, cfg), seed)
            runner.set_params(policy, head)
            del policy  # the runner has its own, in another layout
        else:
            runner.params = like.runner.params
            if head is not None:
                runner.set_head(head)
        self._fill()

    def _fill(self) -> None:
        """Makes the state, and keeps a copy of its small arrays, to start again from."""
        runner = self.runner
        fill(runner, self._at, self.size.options)
        (cache, drafts, noise), rest = _apart(runner.state)
        runner.state = runner.kept = None
        cache, drafts = _drawn(cache, self._seed + 2), _drawn(drafts, self._seed + 3)
        runner.state = _together((cache, drafts, noise), rest)
        self._kept = jax.device_get(rest)

    def at(self, context: int) -> Chunk:
        """Sets the number of tokens in every slot, and returns the chunk."""
        if context > self.size.context:
            raise ValueError(f"expected at most {self.size.context} tokens, got {context}")
        slots = self.runner.slots
        self._at = context
        self._kept = self._kept._replace(length=np.full(slots, context, np.int32))
        return self

    def prepare(self) -> None:
        """Restores the initial state; the content of the caches stays.

        The state is made again if a failed run, out of memory for example, has consumed it.
        """
        state = self.runner.state
        if state is None or any(x.is_deleted() for x in jax.tree.leaves(state)):
            self._fill()
        large, _ = _apart(self.runner.state)
        self.runner.state = None
        rest = jax.device_put(self._kept)
        self.runner.state = jax.block_until_ready(_together(large, rest))

    def run(self, name: str) -> Result:
        """Runs one chunk by a compiled program, and waits for its result.

        Raises:
          ValueError: samples ended before the last round.
        """
        runner = self.runner
        inputs = runner.params, runner.draft, runner.state, *self._inputs()
        runner.state, packed = self.compiled[name](*inputs)
        found = packed.open()
        if int(found.rounds) != self.size.rounds:
            raise ValueError(f"expected {self.size.rounds} rounds, got {int(found.rounds)}")
        return found

    def emitted(self, found: Result) -> np.ndarray:
        """Returns the number of tokens that a run emitted for each slot."""
        return found.length[: self.size.batch] - self._at

    def job(self, name: str) -> tuple[Callable, Callable]:
        """Returns the two functions of an arm for `alternate_prepared`."""
        return self.prepare, functools.partial(self.run, name)


def _bytes(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _apart(state) -> tuple[tuple, object]:
    """Splits a state into its large buffers and the rest."""
    draft, noise = state.draft, state.noise
    large = (
        state.memory.pages,
        None if draft is None else draft.pages,
        None if noise is None else noise.rows,
    )
    rest = state._replace(
        memory=state.memory._replace(pages=None),
        draft=None if draft is None else draft._replace(pages=None),
        noise=None if noise is None else noise._replace(rows=None),
    )
    return large, rest


def _together(large: tuple, rest):
    cache, drafts, rows = large
    return rest._replace(
        memory=rest.memory._replace(pages=cache),
        draft=None if rest.draft is None else rest.draft._replace(pages=drafts),
        noise=None if rest.noise is None else rest.noise._replace(rows=rows),
    )


def _drawn(cache, seed: int):
    """Replaces a cache's zeros by random numbers.

    Its arrays are replaced one by one, because some caches take half of a card's memory.
    """
    leaves, tree = jax.tree.flatten(cache)
    drawn = []
    for key, leaf in zip(jax.random.split(jax.random.key(seed), len(leaves)), leaves, strict=True):
        shape, dtype = leaf.shape, leaf.dtype
        leaf.delete()
        drawn.append(random_pages(key, shape, dtype))
    return jax.tree.unflatten(tree, drawn)


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_pages(key, shape: tuple[int, ...], dtype):
    """Makes random numbers: 64 pages of them, repeated."""
    few = min(64, shape[0])
    block = jax.random.normal(key, (few, *shape[1:]), jnp.float32).astype(dtype)
    return jnp.tile(block, (-(-shape[0] // few), *[1] * (len(shape) - 1)))[: shape[0]]


def milliseconds_per_round(
    arms: Mapping[str, tuple[Chunk, str]], repeats: int
) -> dict[str, list[float]]:
    """Measures arms, (chunk, name of program), in turns; returns milliseconds per round."""
    jobs = {arm: chunk.job(name) for arm, (chunk, name) in arms.items()}
    seconds = alternate_prepared(jobs, repeats)
    return {arm: [1e3 * s / arms[arm][0].size.rounds for s in seconds[arm]] for arm in arms}


def figures_by_layers(
    found: Mapping[int, Sequence[float]], at: str, layers: tuple[int, int], total: int, unit: str
) -> tuple[list[float], dict[str, dict]]:
    """Makes the figures of models with layers[0] and layers[1] layers, and of the whole model.

    Args:
      found: number of layers -> milliseconds in each turn.
      at: last part of the figures' names.
      layers: numbers of layers that were measured, the larger one first.
      total: number of layers of the whole model.
      unit: unit of the figures, such as `ms per round`.

    Returns:
      the milliseconds of the whole model in each turn, and the figures `ms/<layers>_layers/<at>`.
    """
    more, less = layers
    whole = whole_model(found[more], found[less], layers, total)
    from_both = f"{unit} of {total} layers, from those of {more} and {less}"
    rows = [(n, found[n], unit) for n in layers] + [(total, whole, from_both)]
    result = {}
    for count, values, what in rows:
        value, *ends = median_interval(values)
        result[f"ms/{count}_layers/{at}"] = figure(value, what, ends)
    return whole, result


def policy_pass(runner: Runner, rows: int) -> Callable:
    """Returns a function that runs the policy over the last `rows` rows of every slot, with logits.

    Its arguments are parameters, state, and the slots with their page tables.
    """

    def program(params, state, slots):
        here = take_slots(state._replace(noise=None, draft=None), slots)
        root, model = here.length - 1, runner.model(params)
        where = Where(
            "tree",
            root[:, None] + jnp.arange(rows),
            prefix=prefix_lengths(here),
            visible=chain_bits(rows),
            table=here.table,
        )
        tokens = take_positions(here.tokens, root - rows + 1, rows)
        found = model.decode(tokens, where, here.memory)
        return model.logits(found.x), found.scratch

    return program


def whole_model(
    many: Sequence[float], few: Sequence[float], layers: tuple[int, int], total: int
) -> list[float]:
    """Extrapolates times of a model with `total` layers from layers[0] and layers[1] layers.

    One layer takes their difference, divided by the difference in layers.
    """
    more, less = layers
    each = [(a - b) / (more - less) for a, b in zip(many, few, strict=True)]
    return [b + (total - less) * e for b, e in zip(few, each, strict=True)]
