"""An engine's programs for devices that are here, or that are only described to a compiler.

Models have the shapes of known ones and random weights. A `Runner` is built with shapes alone,
which is enough to compile; then it may be given weights, and a state in which every slot has the
same length. Caches hold random numbers: some chips multiply zeros faster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from bench.record import alternate_prepared, figure, median_interval
from specjax import ModelConfig, RunConfig, SpecConfig
from specjax.checkpoint.huggingface import read_config
from specjax.chips import CARDS, Card
from specjax.config import Strategy
from specjax.decode.chunk import Result, Until
from specjax.decode.noise import request_keys, request_words
from specjax.decode.options import Features
from specjax.decode.state import EMPTY, RUNNING, RowMap, prefix_lengths, take_positions, take_slots
from specjax.decode.tree import chain_bits
from specjax.drafts.mtp import init_head_params
from specjax.engine.pages import NULL_PAGE
from specjax.engine.programs import not_compiled
from specjax.engine.runner import Runner
from specjax.engine.settings import EngineConfig
from specjax.engine.sources import source_of
from specjax.interfaces import Where
from specjax.memory import cost
from specjax.models.families.dense import dense_config
from specjax.models.transformer import Params, init_params, laid_out
from specjax.parallel.sharding import MESH_AXES
from specjax.shipped import find_shipped

OFF = "off"
DEFAULT = MappingProxyType({"": {}})  # one arm: the compiler's default options

# --- shapes of models ----------------------------------------------------------------------------


def change_dense(cfg: ModelConfig, **changes: Any) -> ModelConfig:
    """Returns the config with some arguments of `dense_config` changed.

    Raises:
      ValueError: the layers are not all alike.
    """
    if len(set(cfg.layers)) != 1:
        raise ValueError(f"expected layers that are all alike, got {len(set(cfg.layers))} kinds")
    mixer, mlp = cfg.layers[0].mixer, cfg.layers[0].mlp
    flat = {
        "intermediate_size": mlp.intermediate_size,
        "num_layers": cfg.num_layers,
        "num_heads": mixer.num_heads,
        "num_kv_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "rope_theta": mixer.rope.theta,
        "rope_scaling": mixer.rope.scaling,
        "qkv_bias": mixer.qkv_bias,
        "qk_norm": mixer.qk_norm,
        "window": mixer.window,
        "soft_cap": mixer.soft_cap,
        "o_bias": mixer.o_bias,
    }
    others = {name: getattr(cfg, name) for name in cfg.__dataclass_fields__ if name != "layers"}
    return dense_config(**{**flat, **others, **changes})


_SHAPES = {
    "1.7B": {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_layers": 28,
        "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "rope_theta": 1e6,
        "max_position": 40_960,
    },
    "135M": {
        "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_layers": 30,
        "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "rope_theta": 1e5, "max_position": 8192,
        "model_type": "llama", "qk_norm": False,
    },
}  # fmt: skip


@functools.cache
def shape_of(name: str) -> ModelConfig:
    """Returns a model's shape: `8B`, `1.7B` are Qwen3's, `135M` SmolLM2's, or `gpt-oss-20b`."""
    shipped = {"8B": "Qwen3-8B", "gpt-oss-20b": "gpt-oss-20b"}
    if name in shipped:
        cfg = read_config(find_shipped(f"assets/shapes/{shipped[name]}"))
        return cfg.running(param_dtype="bfloat16", compute_dtype="bfloat16")
    if name == "tiny":
        sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2}
        return dense_config(**sizes, num_heads=2, num_kv_heads=1, head_dim=16)
    run = RunConfig(param_dtype="bfloat16", compute_dtype="bfloat16")
    return dense_config(**_SHAPES[name], run=run)


def config_of(shape: str, layers: int | None, max_len: int) -> ModelConfig:
    """Returns a shape with so many layers (None: its own), a head of one module, and room."""
    cfg = shape_of(shape)
    kept = cfg.layers if layers is None else (cfg.layers * layers)[:layers]
    longest = max(cfg.max_position, max_len)
    return cfg.replace(layers=kept, mtp_num_layers=1, max_position=longest)


def random_weights(init: Callable[[], Params], seed: int) -> Params:
    """Draws weights of the shapes that `init` makes, on the device and in their own dtype.

    `init` draws all layers of a weight at once, in float32: of an 8B model more than a device
    holds. Here one layer is drawn at a time. Scales are 1, all else is normal with deviation 0.02.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(jax.eval_shape(init))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        _draw(key, leaf.shape, leaf.dtype.name, "norm" in str(path[-1]))
        for key, (path, leaf) in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, drawn)


def _draw(key, shape: tuple[int, ...], dtype: str, scale: bool) -> jax.Array:
    def normal(key, shape):
        return (0.02 * jax.random.normal(key, shape, dtype)).astype(dtype)

    def make(key):
        if scale:
            return jnp.ones(shape, dtype)
        if len(shape) < 3:
            return normal(key, shape)
        return jax.lax.map(lambda key: normal(key, shape[1:]), jax.random.split(key, shape[0]))

    return jax.jit(make)(key)


def random_model(cfg: ModelConfig, seed: int) -> tuple[ModelConfig, Params, Params]:
    """Returns a config, random policy parameters, and a random head."""
    policy = random_weights(functools.partial(init_params, cfg), seed)
    return cfg, policy, random_weights(functools.partial(init_head_params, cfg), seed + 1)


def forward_bytes(cfg: ModelConfig, params: Params, batch: int, rows: int, context: int) -> int:
    """Returns the bytes of a policy forward over batch x rows tokens, `context` cached per sample:
    weights (of the embedding a row per token, of experts those that rows may choose), keys and
    values (of a layer with a window, those within it).

    Args:
      params: parameters, or shapes, in the decode layout.
    """
    embed = tree_bytes(params["embed"])
    weights = tree_bytes(params) - (embed if "lm_head" in params else 0)
    embedded, cached = batch * rows * embed // cfg.vocab_size, 0
    for layer, arrays in zip(cfg.layers, params["layers"].values(), strict=True):
        experts = {name: a for name, a in arrays.items() if name.startswith("experts_")}
        if experts:
            most = batch * rows * layer.mlp.num_experts_per_tok
            weights -= int(tree_bytes(experts) * max(0, 1 - most / layer.mlp.num_experts))
        length = min(context + rows, getattr(layer.mixer, "window", None) or math.inf)
        cached += batch * cost(cfg.replace(layers=(layer,)), length).page
    return weights + embedded + cached


def tree_bytes(tree) -> int:
    """Returns the bytes of all arrays or shapes of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


# --- GPUs ----------------------------------------------------------------------------------------


def short_name(kind: str) -> str:
    """Returns a card's name in file names: `h100`, `h200`, or the kind in plain letters."""
    for name in CARDS:
        if re.search(rf"\b{name}\b", kind, re.IGNORECASE):
            return name
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


class Place:
    """The default device of this process; `card` is the described card, None for a real device."""

    card: Card | None = None

    @property
    def platform(self) -> str:
        return jax.devices()[0].platform

    @property
    def kind(self) -> str:
        return jax.devices()[0].device_kind

    def shapes(self, tree):
        """Returns the shapes of a tree's arrays, on the device."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Within, `jax.devices` returns the place's."""
        yield


class Ahead(Place):
    """A card that is not there. Needs jax's CUDA plugin, and no GPU.

    Raises:
      ValueError: the plugin is not installed.
    """

    platform = kind = ""

    def __init__(self, name: str):
        self.card = CARDS[name]
        self.platform, self.kind = "gpu", self.card.kind
        where = {"topology": "1x1x1", "target_config": self.card.config}
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_compilation_cache", False)  # it cannot read such programs
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        try:
            [self._device] = topologies.get_topology_desc(name, "cuda", **where).devices
        except Exception as error:  # jax raises several types, depending on the missing package
            raise ValueError(
                "it needs XLA's compiler for GPUs, jax-cuda13-plugin[with-cuda] (`make gpu-check "
                "ARGS=--python` makes an environment with it and prints its Python); got "
                f"{type(error).__name__}: {error}"
            ) from None

    def shapes(self, tree):
        here = jax.sharding.SingleDeviceSharding(self._device)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree)

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        device = mock.Mock(platform=self.platform, device_kind=self.kind)
        # Pallas Triton asks the mesh in use, of no axes here, which GPU it lowers for.
        described = jax.sharding.AbstractDevice(self.kind, None, self.platform)
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=described)
        with (
            mock.patch("jax.devices", lambda *_: [device]),
            jax.sharding.use_abstract_mesh(mesh),
        ):
            yield


class Program(NamedTuple):
    """One program.

    Attributes:
      name: name, unique in its part.
      lower: function that traces the program; programs with the same function are traced once.
      options: compiler options, in addition to the process's flags.
      beside: bytes that are held while the program runs, in addition to the program's own.
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]
    options: Mapping[str, Any] = MappingProxyType({})
    beside: int = 0

    def compile(self) -> jax.stages.Compiled:
        return self.lower().compile(dict(self.options))


# --- chunks of rounds ----------------------------------------------------------------------------


def fill(runner: Runner, context: int, options: Mapping[str, float] | None = None) -> None:
    """Sets the state of a runner so that every slot runs, with `context` tokens.

    No slot ends before the runner's `max_len`. The tokens are random: times do not depend on
    values. No noise has been drawn yet, so that drawing it is timed.

    Args:
      options: sampling options of all slots, by the names of `Options`.
    """
    runner.state = None  # its buffers may be gone
    runner.reset()
    slots, state = runner.slots, runner.state
    words = np.stack([request_words(0, [0], sample) for sample in range(slots)])
    tokens = np.random.default_rng(0).integers(runner.cfg.vocab_size, size=state.tokens.shape)
    wanted = {name: np.full(slots, value, np.float32) for name, value in (options or {}).items()}
    wanted["prompt_len"] = np.full(slots, context // 2, np.int32)
    state = state._replace(
        tokens=tokens.astype(np.int32),
        length=np.full(slots, context, np.int32),
        limit=np.full(slots, runner.max_len, np.int32),
        finish=np.where(np.arange(slots) < runner.batch, RUNNING, EMPTY).astype(np.int32),
        keys=np.asarray(request_keys(words)),
        options=state.options._replace(**wanted),
    )
    runner.state = jax.block_until_ready(jax.device_put(state))


def full_row_map(runner: Runner) -> RowMap:
    """Returns the row map of a full bucket.

    No two slots share a page: a page that all of them read would be read from memory only once.
    """
    count, full = runner.batch, runner.table_width - 1
    table = np.full((count, runner.table_width), NULL_PAGE, np.int32)
    table[:, :full] = (NULL_PAGE + 1 + np.arange(count * full)).reshape(count, full)
    return RowMap(np.arange(count, dtype=np.int32), np.ones(count, bool), table)


def alone(runner: Runner, rows: RowMap) -> RowMap:
    """Pads the row map of the rows of a chunk for one in which no sequence waits."""
    spare, room = runner.slots - 1, ((0, runner.extra_slots),)
    return RowMap(
        np.pad(rows.slots, room, constant_values=spare),
        np.pad(rows.active, room),
        np.pad(rows.table, (*room, (0, 0)), constant_values=NULL_PAGE),
    )


@functools.cache
def token_map(count: int) -> str:
    """Writes a file that lists the first tokens, to draft from; returns its path."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(list(range(count)), file)
    return file.name


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
      draft_vocab: number of tokens that are drafted from; None: the whole vocabulary.
      draft_kind: kind of the head, as in `SpecConfig`.
      products: formats of matrices, as in `EngineConfig`.
    """

    shape: str
    batch: int
    context: int
    layers: int | None = None
    strategy: str = OFF
    rounds: int = 24
    attention: str = "auto"
    options: Mapping[str, float] = MappingProxyType({"temperature": 1.0})
    draft_vocab: int | None = None
    draft_kind: str = "mtp"
    products: str | Mapping[str, str] = "auto"

    @property
    def features(self) -> Features:
        """The features that the chunk's program needs for the options."""
        return Features(
            sampled=self.options["temperature"] > 0,
            penalties=any(name.endswith("_penalty") for name in self.options),
            **{name: name in self.options for name in ("top_k", "top_p", "min_p")},
        )


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
        self.size = size
        some = size.draft_vocab and token_map(size.draft_vocab)
        given = {"draft": "random", "draft_kind": size.draft_kind, "token_map": some}
        spec = None if size.strategy == OFF else SpecConfig(size.strategy, **given)
        emits = 1 if spec is None else spec.resolve().steps + 1  # tokens per round, at most
        tokens = size.rounds * emits
        longest = size.context + tokens + emits + 1
        cfg = config_of(size.shape, size.layers, longest)
        source = spec and source_of(laid_out(cfg, None), spec)
        with place.seen():
            config = EngineConfig(
                chunk_tokens=tokens, stretch=1, attention=size.attention, products=size.products
            )
            self.runner = Runner(cfg, spec, size.batch, longest, source=source, config=config)
        if rule is not None:
            accept_by(rule, self.runner)
        self.cfg, self.name = self.runner.cfg, next(iter(self.runner.plans))
        head = source and jax.eval_shape(lambda: source.init(0))
        self.runner.hold_shapes(jax.eval_shape(lambda: init_params(cfg)), head)
        held = self.runner.weights.policy, self.runner.weights.head, self.runner.state
        self.shapes = place.shapes(held)
        if self.runner.weights.vocabulary is not None:
            self.runner.weights.vocabulary = place.shapes(self.runner.weights.vocabulary)
        self.compiled: Mapping[str, jax.stages.Compiled] = {}
        self._kept = None
        self._at, self._place, self._seed = size.context, place, 0

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
        lower = functools.cache(self._lower)
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
            return not_compiled(donate)

        held = runner.weights.policy, runner.weights.head, runner.state
        runner.weights.policy, runner.weights.head, runner.state = self.shapes
        runner.executables.build, runner.executables.by_key = build, {}
        try:
            with self._place.seen():
                runner.chunk(self.name, self.size.features, *self._place.shapes(self._inputs()))
                [lower] = found
                return lower()
        finally:
            runner.weights.policy, runner.weights.head, runner.state = held
            runner.executables.by_key = {}

    def _inputs(self) -> tuple:
        return alone(self.runner, full_row_map(self.runner)), Until.of(self.size.rounds)

    def load(self, seed: int, like: Chunk | None = None) -> None:
        """Makes random weights, or shares the policy of the chunk `like`, and makes a state."""
        runner, cfg, self._seed = self.runner, self.cfg, seed
        runner.weights.policy = runner.weights.head = runner.state = runner.kept = None
        source = runner.longest.source
        head = source and random_weights(functools.partial(source.init, 0), seed + 1)
        if like is None:
            policy = random_weights(functools.partial(init_params, cfg), seed)
            runner.weights.set(policy, head)
            del policy  # the runner has its own, in another layout
        else:
            runner.weights.policy = like.runner.weights.policy
            if head is not None:
                runner.weights.set_head(head)
        self._fill()

    def _fill(self) -> None:
        """Makes the state, and keeps a copy of its small arrays, to start again from."""
        runner = self.runner
        fill(runner, self._at, self.size.options)
        (cache, drafts), rest = _apart(runner.state)
        runner.state = runner.kept = None
        cache, drafts = _drawn(cache, self._seed + 2), _drawn(drafts, self._seed + 3)
        runner.state = _together((cache, drafts), rest)
        self._kept = jax.device_get(rest)

    def at(self, context: int) -> Chunk:
        """Sets the number of tokens in every slot, up to those of the size; returns the chunk."""
        self._at = context
        self._kept = self._kept._replace(length=np.full(self.runner.slots, context, np.int32))
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
        inputs = runner.weights.policy, runner.weights.draft, runner.state, *self._inputs()
        runner.state, result = self.compiled[name](*inputs)
        result = jax.device_get(result)
        if int(result.rounds) != self.size.rounds:
            raise ValueError(f"expected {self.size.rounds} rounds, got {int(result.rounds)}")
        return result


def accept_by(rule: Callable, runner: Runner) -> None:
    """Replaces the acceptance rule of all strategies that draft."""
    for name, run in runner.strategies.items():
        if run.plan.tree is not None:
            plan = dataclasses.replace(run.plan, rule=rule)
            runner.strategies = runner.strategies | {name: run._replace(plan=plan)}


def _apart(state) -> tuple[tuple, Any]:
    """Splits a state into its large buffers and the rest."""
    large = state.memory.pages, None if state.draft is None else state.draft.pages
    return large, _together((None, None), state)


def _together(large: tuple, rest):
    cache, drafts = large
    return rest._replace(
        memory=rest.memory._replace(pages=cache),
        draft=None if rest.draft is None else rest.draft._replace(pages=drafts),
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
    jobs = {
        arm: (chunk.prepare, functools.partial(chunk.run, name))
        for arm, (chunk, name) in arms.items()
    }
    seconds = alternate_prepared(jobs, repeats)
    return {arm: [1e3 * s / arms[arm][0].size.rounds for s in seconds[arm]] for arm in arms}


def policy_pass(runner: Runner, rows: int) -> Callable:
    """Returns a function that runs the policy over the last `rows` rows of every slot, with logits.

    Its arguments are parameters, state, and the slots with their page tables.
    """

    def program(params, state, slots):
        here = take_slots(state._replace(draft=None), slots)
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
    """Extrapolates figures of a model with `total` layers from layers[0] and layers[1] layers.

    One layer takes their difference, divided by the difference in layers.
    """
    more, less = layers
    each = [(a - b) / (more - less) for a, b in zip(many, few, strict=True)]
    return [b + (total - less) * e for b, e in zip(few, each, strict=True)]


def figures_by_layers(
    found: Mapping[int, Sequence[float]], at: str, layers: tuple[int, int], total: int, unit: str
) -> tuple[list[float], dict[str, dict]]:
    """Makes the figures `ms/<layers>_layers/<at>` of two models, and of the whole model.

    Args:
      found: number of layers -> milliseconds in each turn.
      layers: numbers of layers that were measured, the larger one first.
      total: number of layers of the whole model.

    Returns:
      the milliseconds of the whole model in each turn, and the figures.
    """
    whole, result = whole_model(*(found[n] for n in layers), layers, total), {}
    from_both = f"{unit} of {total} layers, from those of {layers[0]} and {layers[1]}"
    for count, values, what in [(n, found[n], unit) for n in layers] + [(total, whole, from_both)]:
        value, *ends = median_interval(values)
        result[f"ms/{count}_layers/{at}"] = figure(value, what, ends)
    return whole, result


# --- TPUs ----------------------------------------------------------------------------------------

WIDE = config_of("8B", 4, 0)
# More pages than any weight has numbers per layer: a copy of them is not taken for one of a weight.
BATCH, PAGES, MAX_LEN = 64, 1600, 1024


def tpu_devices(topology: str) -> Sequence[jax.Device]:
    """Returns the devices of a topology, which need not be there.

    Raises:
      ModuleNotFoundError: the TPU compiler is not installed.
    """
    # The compiler asks for the host's metadata, and refuses a second process, unless it is told.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            "the TPU compiler is not installed in this environment; `make tpu-check` makes one "
            "that has it, whose Python is .venv-plan/bin/python"
        )
    return topologies.get_topology_desc(topology_name=topology, platform="tpu").devices


def mesh_over(devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """Returns a mesh with all devices on the axis `tp`."""
    return jax.sharding.Mesh(np.array(devices).reshape(*[1] * (len(MESH_AXES) - 1), -1), MESH_AXES)


def runner_of(
    mesh: jax.sharding.Mesh,
    model: ModelConfig,
    batch: int,
    strategies: Sequence[str],
    pages: int | None = None,
) -> Runner:
    """Makes the device side of an engine that holds shapes.

    Args:
      strategies: strategies that chunks can run; the last one is the engine's own.
      pages: number of pages of the cache; None: enough for all slots.
    """
    model = laid_out(model, mesh)
    parsed = [Strategy.parse(strategy) for strategy in strategies]
    spec = SpecConfig(strategies[-1])
    make = functools.partial(Runner, model, spec, batch, MAX_LEN, mesh=mesh, strategies=parsed)
    config = EngineConfig(stretch=1)
    runner = make(config=config)
    if pages is not None:
        config = dataclasses.replace(config, cache_bytes=pages * runner.page_bytes)
        runner = make(config=config)
    runner.executables.build = lambda key, lower, donate: lower()
    runner.hold_shapes(
        jax.eval_shape(lambda: init_params(model)), jax.eval_shape(lambda: init_head_params(model))
    )
    return runner


def wide_runner(mesh: jax.sharding.Mesh, strategy: str, model: ModelConfig = WIDE) -> Runner:
    """Makes the device side of an engine with 64 slots, for `off` and a strategy."""
    own = strategy if strategy != OFF else "4_1_5"
    return runner_of(mesh, model, BATCH, (OFF, own), PAGES)


def lowered_chunk(
    runner: Runner, strategy: str, bucket: int, features: Features | None = None
) -> jax.stages.Lowered:
    """Lowers a whole chunk of rounds, as the engine compiles it.

    Args:
      runner: as `runner_of` makes it.
      bucket: number of rows.
      features: sampling options of the program; None: those of a temperature.
    """
    features = features or Features(sampled=True)
    table = np.zeros((bucket, runner.table_width), np.int32)
    rows = RowMap(np.arange(bucket, dtype=np.int32), np.ones(bucket, bool), table)
    weights = runner.weights
    inputs = (weights.policy, weights.head, runner.state, alone(runner, rows), Until.of(4))
    plan = runner.strategies[strategy].plan
    program = functools.partial(runner._chunk_program, plan, features, bucket)
    return runner.executables.get(("chunk", strategy, bucket, features), program, inputs, (2,))
