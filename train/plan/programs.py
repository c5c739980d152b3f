"""The programs that a run of `train.rl` compiles, to be lowered from shapes.

`train.programs` builds the same trainers and engines as for a run, and the engine runs the same
start-up, but programs are collected instead of being compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checked_json import CheckpointError
from specjax.checkpoint.weights import read_config, read_head
from specjax.command_line import ConfigError
from specjax.decode.options import Features
from specjax.drafts.model import ModelSource
from specjax.engine.engine import Engine
from specjax.engine.programs import not_compiled
from specjax.engine.sources import Drafting, load_head, source_of, trains
from specjax.engine.start_up import start
from specjax.hub import find_model
from specjax.interfaces import Axes, Denominators, Draft
from specjax.models.rows import param_axes
from specjax.models.transformer import (
    Params,
    init_params,
    laid_out,
    record_form,
    split_layout,
    to_decode_layout,
)
from specjax.parallel import sharding
from specjax.parallel.reshard import Mover, Reshard
from specjax.parallel.sharding import device_bytes
from specjax.settings import named_in
from specjax.shipped import find_shipped
from train.heads.files import head_shapes
from train.heads.training import FIELDS, frozen_policy_parts
from train.loss.packing import empty_batch
from train.programs import (
    Mesh,
    Programs,
    as_computed,
    as_rolled_out,
    build_programs,
    chunk_features,
    make_meshes,
    scores_to_add,
    settle_drafting,
    settle_length,
)
from train.rollout_schema import SECTIONS
from train.run.start import add_own_family
from train.schema import RLConfig

SHAPES = "assets/shapes"  # config.json of models, without their weights
WEIGHTS, CACHE, STATE, EVALUATION = "parameters to roll out", "cache", "decode state", "evaluation"
EXACT, HEAD_STATES = "exact mode", "states for the head"
# Kinds of memory that engines have released while a part runs, see `Engine.release`.
GONE = {
    "train": (WEIGHTS, CACHE, STATE, EVALUATION, EXACT),
    "roll out": (EVALUATION, EXACT),
    "evaluate": (CACHE, STATE, EXACT),
    EXACT: (WEIGHTS, CACHE, STATE, EVALUATION),
}


@dataclasses.dataclass
class Program:
    """One program of a run, and its bytes per device.

    Attributes:
      name: name in the table.
      part: `train`, `roll out` or `evaluate`.
      key: the runner's key, or a word.
      lower: function that traces it.
      inputs: shapes of the inputs that stay, which `Shapes.resident` counts.
      passing: shapes of the inputs that do not stay.
      results: shapes of the results, for which no compiler is asked; None: unknown.
      extra: bytes allocated only while it runs: inputs that do not stay, results that are not
        written over inputs, temporaries.
      temporaries: bytes of temporaries, included in `extra`.
      failed: why the compiler refused the program.
      needs: bytes that the program needs by the compiler's message, inputs included; None: the
        message has none, or those of temporaries only.
    """

    name: str
    part: str
    key: tuple
    lower: Callable[[], jax.stages.Lowered]
    inputs: Any
    passing: Any = None
    results: Any = None
    extra: float = 0.0
    temporaries: float = 0.0
    failed: str | None = None
    needs: float | None = None


class Shapes:
    """The trainers and engines of a run of `train.rl`, with shapes in place of arrays.

    Args:
      cfg: the run's configuration.
      devices: devices to plan for.
      for_replica: devices to compile every replica's programs for; None: each replica's own.
      platform: platform to plan for; None: that of `devices`.

    Attributes:
      mesh, places: meshes of `make_meshes` over `devices`; with `for_replica`, every replica's
        place is on these.
      target: mesh over `devices` that weights are moved to.
      model: config of the policy.
      fitted: result of `settle_length` for the run.
      built: programs of the model.
      params, opt, draft_opt: shapes with shardings.
      head: shapes with shardings of a head's or a draft model's weights; None: no weights.
    """

    def __init__(
        self,
        cfg: RLConfig,
        devices: sharding.Devices,
        for_replica: sharding.Devices = None,
        platform: str | None = None,
    ):
        self.cfg = cfg
        add_own_family(cfg.family)
        try:
            self.mesh, self.places = make_meshes(cfg, devices)
            several = len(self.places) > 1
            self.target = sharding.joined_mesh(self.places) if several else self.places[0]
            if for_replica is not None and cfg.rollout.own_devices:
                places = sharding.replica_meshes(1, cfg.rollout.tp, for_replica)
                self.places = places * cfg.rollout.replicas
        except ValueError as error:
            raise ConfigError(str(error)) from error
        path = self._find("model", cfg.model, cfg.revision)
        model, self.read_from = read_config(path), str(path)
        cfg.dtype.settle(model.run.param_dtype, platform or sharding.platform_of(self.mesh))
        model = model.running(param_dtype=cfg.dtype.params)
        self.fitted = settle_length(cfg, model)
        own = read_head(self.read_from, model)
        drafting = settle_drafting(cfg, own and type(own), model, self._find_draft)
        self.source, self.head = None, None
        if drafting.spec is not None and trains(drafting.kind):
            try:
                model, (self.source, head) = head_shapes(drafting.spec, model, own)
            except ValueError as error:
                raise ConfigError(named_in(SECTIONS, error)) from error
            self.head = self._placed(head, self.source.axes())
        self.model = as_computed(cfg, model)
        self.params = self._like_params(lambda: init_params(self.model))
        if drafting.spec is not None and self.source is None:
            self.source, self.head = self._source(drafting)
        self.built: Programs = build_programs(cfg, self.model, self.source, self.mesh, self.places)
        others = (*self.built.plain_engines[:1], *self.built.eval_engines[:1])
        for engine in (self.engine, *others):
            engine.runner.hold_shapes(self.params, None if engine.spec is None else self.head)
            if platform is not None:  # `devices` may stand for others
                engine.size_for(platform)
        self.opt = self._like_params(self.built.policy.init_opt_state, self.params)
        self.draft_opt = None
        if self.built.draft is not None:
            made = jax.eval_shape(self.built.draft.init_opt_state, self.head)
            self.draft_opt = self._placed(made, self.source.axes())

    def _find_draft(self, name: str) -> Path:
        return self._find("rollout.draft", name, None)

    def _find(self, key: str, name: str, revision: str | None) -> Path:
        """Returns the path of what a key of the run names, whose weights may be absent."""
        path = find_shipped(name)
        shapes = find_shipped(f"{SHAPES}/{path.name}")
        if path.exists() or shapes.exists():
            return path if path.exists() else shapes
        try:
            return find_model(name, revision, weights=False)
        except CheckpointError as error:
            raise ConfigError(
                f"{key}: no directory {name}, and no shapes of that name in {SHAPES}; {error}"
            ) from error

    def _like_params(self, make: Callable, *inputs):
        """Returns the shapes of `make`'s result, with the shardings of parameters."""
        return self._placed(jax.eval_shape(make, *inputs), param_axes(self.model))

    def _placed(self, tree, axes: Axes, mesh: Mesh = None):
        """Returns shapes with the shardings of weights with these axes."""
        place = functools.partial(sharding.param_shardings, axes=axes)
        return sharding.shapes(tree, self.mesh if mesh is None else mesh, place)

    def _source(self, drafting: Drafting) -> tuple[Draft, Params | None]:
        """Returns what drafts and is not trained, and its weights; see `load_source`."""
        spec = self.cfg.rollout.spec()
        model = as_rolled_out(self.cfg, self.model)
        if spec.draft_path is None:
            return source_of(model, spec), None
        if drafting.kind is not ModelSource:
            path = str(self._find_draft(spec.draft_path))
            source, head = load_head(path, model, weights=False)[1]
            return source, self._placed(head, source.axes())
        dtype = model.run.compute_dtype
        cfg = read_config(self._find_draft(spec.draft_path))
        cfg = cfg.running(param_dtype=dtype, compute_dtype=dtype)
        source = ModelSource(laid_out(cfg, self.mesh), model.vocab_size)
        made = self._like_params(lambda: to_decode_layout(init_params(cfg), source.cfg))
        return source, made

    # --- programs --------------------------------------------------------------------------------

    def programs(self) -> Iterator[Program]:
        """Yields all programs of the run."""
        yield from self.training()
        yield from self.handing_over()
        features = chunk_features(self.cfg, self.model)
        yield from engine_programs(self.engine, "roll out", features)
        for engine in self.built.plain_engines[:1]:
            yield from engine_programs(engine, EXACT, features)
        for engine in self.built.eval_engines[:1]:
            own = chunk_features(self.cfg, self.model, evaluating=True)
            same = engine.program_settings == self.engine.program_settings
            if not (same and features.covers(own)):  # else evaluation runs the programs of rollouts
                yield from engine_programs(engine, "evaluate", own)

    @property
    def engine(self) -> Engine:
        """The engine of the first replica; all replicas are equal."""
        return self.built.engines[0]

    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of a micro-batch for the policy's update, of the most rows."""
        cfg = self.cfg
        facts = record_form(self.model)
        host = empty_batch(max(cfg.row_sizes), cfg.packing.row_length, facts)
        scores = scores_to_add(cfg) + ["ref_logprobs"] * bool(cfg.algo.kl_loss_coef)
        host |= {name: host["old_logprobs"] for name in scores}
        return {name: self._rows(array) for name, array in host.items()}

    def states(self) -> jax.ShapeDtypeStruct:
        """Returns the shape of the policy's states of a micro-batch."""
        rows, length = max(self.cfg.row_sizes), self.cfg.packing.row_length
        return self._rows(self.built.policy.states_shape(rows, length))

    def _rows(self, array) -> jax.ShapeDtypeStruct:
        return sharding.shapes(array, self.mesh, lambda mesh, _: sharding.rows_sharding(mesh))

    def gradients(self) -> Params:
        return self._like_params(self.built.policy.programs["zeros"], self.params)

    def training(self) -> Iterator[Program]:
        """Yields the policy's micro-batch and optimizer step, scoring, and the head's update."""
        programs, batch, gradients = self.built.policy.programs, self.batch(), self.gradients()
        ones = Denominators(np.float32(1), np.float32(1))

        def program(title: str, key: str, stay: tuple, *passing) -> Program:
            lower = functools.partial(programs[key].lower, *stay, *passing)
            return Program(f"policy, {title}", "train", (key,), lower, stay, passing)

        yield program("a micro-batch", "accumulate", (self.params,), gradients, batch, ones)
        yield program("optimizer", "apply", (self.params, self.opt), gradients)
        if scores_to_add(self.cfg) or self.cfg.rollout.partial or self.cfg.algo.needs_reference:
            yield program("scoring", "score", (self.params,), batch)
        if self.built.draft is not None:
            yield self._head_update()

    def _head_update(self) -> Program:
        """Returns the head's update from one micro-batch; on a replica's devices it has copies."""
        parts, batch = frozen_policy_parts(self.params), self.batch()
        weights = self.head, self.draft_opt, parts
        rows = {name: batch[name] for name in FIELDS}, self.states()
        trainer = self.built.draft
        inputs, passing = (weights, rows[1]), rows[0]
        if self.built.replica_drafts:
            trainer = self.built.replica_drafts[0]
            weights = self._placed(weights, trainer.axes, trainer.mesh)
            rows = sharding.shapes(rows, trainer.mesh, _all_rows)
            inputs, passing = None, (weights, rows)
        lower = functools.partial(trainer.programs["update"].lower, *weights, *rows)
        return Program("draft, a micro-batch", "train", ("draft",), lower, inputs, passing)

    def handing_over(self) -> Iterator[Program]:
        """Yields the programs that move weights from the trainer to the engines, see `Mover`."""
        runner = self.engine.runner
        moves = mover = None
        if self.target is not None and self.mesh is not None:  # else weights are copied
            mover = Mover(self.target, runner.weights.axes)
        if mover and not mover.holds(self.params):
            convert = runner.weights.convert
            if len(self.places) > 1:
                convert = split_layout(runner.cfg, self.target.shape["tp"])
            moves = mover.program(self.params, convert)
        if moves is not None:
            yield _resharding("policy", self.params, moves)
        else:
            lower = functools.partial(runner.weights.convert.lower, self.params)
            title, made = "weights to the engine", runner.weights.policy
            yield Program(title, "train", ("convert",), lower, self.params, results=made)
        if mover and self.head is not None and not mover.holds(self.head):
            moves = mover.program(self.head)
            if moves is not None:
                yield _resharding("draft", self.head, moves)

    @property
    def microbatches(self) -> int:
        """Returns the number of micro-batches of a step with responses of the largest length."""
        roll, packing = self.cfg.rollout, self.cfg.packing
        each = packing.row_length // (roll.max_prompt_tokens + roll.max_tokens)
        return math.ceil(roll.prompts * roll.n / (each * max(self.cfg.row_sizes)))

    def resident(self) -> dict[str, float]:
        """Returns the bytes on a device by kind; `GONE` says when a kind is released."""
        reference = device_bytes(self.params) * self.cfg.algo.needs_reference
        found = {
            "policy parameters": device_bytes(self.params),
            "policy optimizer": device_bytes(self.opt),
            "reference policy": reference,
            "draft": device_bytes(self.head),
            "draft optimizer": device_bytes(self.draft_opt),
            **self._held_by(self.engine),
        }
        if self.built.draft is not None:
            kept = min(self.cfg.draft.max_microbatches or self.microbatches, self.microbatches)
            found[HEAD_STATES] = kept * device_bytes(self.states())
        for engine in self.built.eval_engines[:1]:
            found[EVALUATION] = sum(self._held_by(engine).values())
        for engine in self.built.plain_engines[:1]:
            found[EXACT] = sum(self._held_by(engine).values())
        return {kind: size for kind, size in found.items() if size}

    def _held_by(self, engine: Engine) -> dict[str, float]:
        runner, model = engine.runner, engine.runner.cfg
        pages, state = caches(runner.state)
        # Where nothing is cast, fused or moved the engine's arrays are the trainer's.
        same = model.run.scan_layers and model.run.param_dtype == model.run.compute_dtype
        shared = same and runner.mesh is self.mesh
        return {
            WEIGHTS: 0.0 if shared else device_bytes((runner.weights.policy, runner.weights.head)),
            CACHE: device_bytes(pages),
            STATE: device_bytes((state, runner.kept)),
        }


def _all_rows(mesh: jax.sharding.Mesh, tree):
    return jax.tree.map(lambda _: sharding.rows_sharding(mesh), tree)


def _resharding(whose: str, weights: Params, moves: Reshard) -> Program:
    # The engine has released the old weights.
    title, key = f"resharding, {whose}", ("reshard", whose)
    return Program(title, "train", key, moves.lower, weights, results=moves.made)


def engine_programs(engine: Engine, part: str, features: Features) -> Iterator[Program]:
    """Yields prefill, placement and chunks, as the engine's start-up compiles them."""
    runner, found = engine.runner, []

    def build(key, lower, donate):
        found.append((key, lower))
        return not_compiled(donate)

    runner.executables.build = build
    for program in engine.programs((features,)):
        start(runner, program)
        while found:
            key, lower = found.pop(0)
            inputs, kind = (runner.state, runner.kept), key[0]
            if kind != "place":
                inputs = (*inputs, runner.weights.policy, runner.weights.head)
            sizes = key[1] if kind == "prefill" else key[1:3]
            title = f"{kind} {' x '.join(map(str, sizes))}"
            name = title if part == "roll out" else f"{part}: {title}"
            yield Program(name, part, key, lower, inputs)


def caches(state) -> tuple[Any, Any]:
    """Splits a decode state into its pages and the rest."""
    draft = state.draft and state.draft._replace(pages=None)
    pages = (state.memory.pages, state.draft and state.draft.pages)
    return pages, state._replace(memory=state.memory._replace(pages=None), draft=draft)


def mesh_text(mesh: Mesh) -> str:
    """Returns the axes of a mesh that are larger than one, as text."""
    if mesh is None:
        return "one device"
    axes = [f"{name} {size}" for name, size in mesh.shape.items() if size > 1]
    return " x ".join(axes) or "one device"
