"""Builds the jitted programs of a run, and settles settings that depend on the checkpoint.

`Trainer` runs these programs on arrays; `train.plan` compiles them for shapes to learn how much
memory and time they need. Nothing here holds a weight.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from specjax.checkpoint.weights import run_as
from specjax.command_line import ConfigError, require_effect
from specjax.config import ModelConfig, SpecConfig
from specjax.config.dtype import AUTO
from specjax.control import ControlConfig
from specjax.decode.options import Features
from specjax.drafts.head import HeadSource
from specjax.engine.engine import Engine
from specjax.engine.request import Limits, check_job, features_of, make_jobs
from specjax.engine.sources import Drafting, settle_draft, trains
from specjax.interfaces import Draft
from specjax.models.rows import matrix_names
from specjax.models.transformer import laid_out, record_form
from specjax.parallel import distributed, sharding
from specjax.parallel.context import context_of
from specjax.settings import named_in
from train.data.checks import fit_lengths
from train.eval_schema import asked_sets
from train.heads.losses import Sampling
from train.heads.training import DraftTrainer, head_of, inner_taps
from train.loss.logprobs import Transforms
from train.loss.policy import PolicyTrainer
from train.loss.terms import rl_loss
from train.rollout.draws import group_params
from train.rollout_schema import SECTIONS
from train.schema import RLConfig, as_run

Mesh = jax.sharding.Mesh | None  # None is one device, the first


def make_meshes(cfg: RLConfig, devices: sharding.Devices = None) -> tuple[Mesh, list[Mesh]]:
    """Makes the mesh of training, and the mesh of each rollout replica.

    A rollout without devices of its own uses those of training: its slots are split over all axes
    but `tp`, and weights over `tp` alone, so that no step has to gather them. In a job of several
    processes each replica has devices of its own, and one device that trains is a mesh, too.

    Args:
      cfg: settings of the run.
      devices: devices to use, see `sharding.make_mesh`.

    Raises:
      ValueError: there are too few devices.
    """
    roll = cfg.rollout
    if devices is None:
        sharding.offer_cpu_devices(max(cfg.mesh.size, cfg.rollout_devices))
    mesh, several = sharding.make_mesh(cfg.mesh, devices), distributed.is_several()
    if several and mesh is None:
        mesh = sharding.replica_meshes(1)[0]
    if not roll.own_devices and not several:
        return mesh, [None if mesh is None else sharding.rollout_mesh(mesh)]
    # A replica must not straddle processes, and `rollout_mesh` keeps neighbours together only where
    # tp grows.
    near = mesh if not several or roll.tp % cfg.mesh.tp == 0 else None
    return mesh, sharding.replica_meshes(roll.replicas, roll.tp, devices, near)


def build_engines(
    cfg: RLConfig,
    model: ModelConfig,
    speculate: bool,
    source: Draft | None,
    meshes: Sequence[Mesh],
) -> tuple[list[Engine], list[Engine], list[Engine]]:
    """Builds the engines of rollouts, of exact mode and of evaluation.

    Args:
      cfg: settings of the run.
      model: config of the policy.
      speculate: whether rollouts speculate.
      source: what drafts; None: the model's own head.
      meshes: meshes of this process's replicas. A process without replicas gets engines on its
        first device, which never run and only check requests.

    Returns:
      (an engine per mesh; one per mesh that decodes plainly, if exact mode needs them; one per mesh
      that evaluates, if the run does).

    Raises:
      ValueError: the settings do not fit together.
    """
    roll, meshes = cfg.rollout, meshes or [None]
    exact = speculate and roll.exact_mode
    if exact and distributed.is_several() and roll.tp > jax.local_device_count():
        raise ValueError(
            f"rollout.exact_mode needs replicas of one process each, and rollout.tp={roll.tp} is "
            f"more than its {jax.local_device_count()} devices; lower it, or leave out exact_mode"
        )
    plain = SpecConfig("off", invariant=roll.invariant)
    sizes = roll.max_batch, roll.max_prompt_tokens, roll.max_tokens
    spec, control = (roll.spec(), roll.control_config()) if speculate else (plain, None)
    engines = _engines(cfg, model, meshes, sizes, spec, source, control)
    plain_engines = []
    if exact and not roll.invariant:  # in that mode one program has to decode both ways
        plain_engines = _engines(cfg, model, meshes, sizes, plain)
    evaluating = evaluation_engines(cfg, model, source, meshes) if cfg.eval.any else []
    return engines, plain_engines, evaluating


def evaluation_engines(
    cfg: RLConfig, model: ModelConfig, source: Draft | None, meshes: Sequence[Mesh]
) -> list[Engine]:
    """Builds an engine on each mesh that evaluates and speculates as rollouts do.

    They decode plainly if the tokens of speculation would depend on the draft
    (`rollout.acceptance=block` and `recursive`), so that policies are compared on equal noise, or
    if the acceptance mode does not take the temperature of a set. Their sizes are those of rollouts
    where these are enough, so that programs can be shared.

    Raises:
      ValueError: the settings do not fit together.
    """
    roll, sets = cfg.rollout, asked_sets(cfg.eval, cfg.rollout)
    greedy = all(entry.sampling.temperature == 0 for entry in sets)
    speculate = roll.acceptance == "coupled" or (roll.acceptance == "greedy" and greedy)
    spec, control = SpecConfig("off", invariant=roll.invariant), None
    if speculate and drafts(cfg):
        spec, control = roll.spec(), roll.control_config()
    prompt = max(roll.max_prompt_tokens, *(entry.max_prompt_tokens for entry in sets))
    longest = max(roll.max_prompt_tokens + roll.max_tokens, *(entry.longest for entry in sets))
    sizes = cfg.eval.max_batch or roll.max_batch, prompt, longest - prompt
    return _engines(cfg, model, meshes, sizes, spec, source, control)


def _engines(
    cfg: RLConfig,
    model: ModelConfig,
    meshes: Sequence[Mesh],
    sizes: tuple[int, int, int],
    spec: SpecConfig,
    source: Draft | None = None,
    control: ControlConfig | None = None,
) -> list[Engine]:
    """Builds an engine on each mesh.

    Args:
      cfg: settings of the run.
      model: config of the policy.
      meshes: the meshes.
      sizes: of each engine: slots, the most prompt tokens, the most tokens beyond these.
      spec: how they speculate.
      source: what drafts; None: the model's own head.
      control: how strategies are chosen.
    """
    slots, prompt, response = sizes
    decoder = model.running(
        scan_layers=cfg.rollout.scan_layers, remat=False, sequence_parallel=False
    )
    config = cfg.rollout.engine_config()
    config = dataclasses.replace(config, attention=cfg.attention)
    if cfg.environment is not None:  # the next turn begins with all that was read
        config = dataclasses.replace(config, enable_prefix_caching=True, follow_ups=True)

    def engine(mesh: Mesh) -> Engine:
        drafts_with = source
        if not spec.is_off and (source is None or trains(source)):
            laid = laid_out(decoder, mesh)
            drafts_with = head_of(laid) if source is None else run_as(source, laid.run)
        drafts_with = drafts_with and drafts_with.for_length(longest_of(cfg))
        return Engine(
            decoder,
            spec,
            slots,
            prompt + response,
            control=control,
            # One width, one set of executables; a next turn has few tokens to read.
            prompt_widths=[prompt] if cfg.environment is None else None,
            config=config,
            mesh=mesh,
            stop_width=max(1, len(model.eos_token_ids)),
            source=drafts_with,
        )

    return [engine(mesh) for mesh in meshes]


@dataclasses.dataclass
class Programs:
    """The jitted parts of a run.

    Attributes:
      policy: update and scoring of the policy.
      draft: update of the head; None if it is not trained.
      replica_drafts: update of the head on the devices of each replica of this process, for spot
        training; empty if it runs on the devices of `draft`.
      engines: engines that roll out.
      plain_engines: engine for each of these that decodes plainly, for exact mode; empty if there
        is none, or if the engines decode plainly themselves.
      eval_engines: engines that evaluate, on the devices of each replica of this process; empty if
        the run does not evaluate.
    """

    policy: PolicyTrainer
    draft: DraftTrainer | None
    replica_drafts: list[DraftTrainer]
    engines: list[Engine]
    plain_engines: list[Engine]
    eval_engines: list[Engine]


def drafts(cfg: RLConfig) -> bool:
    """Returns whether rollouts speculate."""
    return cfg.draft.mode != "none" and not cfg.rollout.spec().is_off


def settle_drafting(
    cfg: RLConfig,
    head: type[Draft] | None,
    target: ModelConfig | None = None,
    find: Callable[[str], Path] | None = None,
) -> Drafting:
    """Settles draft source, controller and training of the head, once the checkpoint is known.

    Args:
      cfg: settings of the run, in which `auto` values are replaced.
      head: class of the draft head in the checkpoint; None: it has none.
      target, find: see `settle_draft`.

    Raises:
      ConfigError: `draft.mode` requires a head that does not exist, or settings have no effect.
    """
    roll, mode = cfg.rollout, cfg.draft.mode
    if not drafts(cfg):
        if roll.draft == "auto":  # a checkpoint's settings need a value
            draft = "ngram" if head is None else "checkpoint"
            cfg.rollout = dataclasses.replace(roll, draft=draft)
        return Drafting(None, None)
    given = roll.control_config()
    try:
        # Its choices follow the clock, and with TIS they would reach the weights of the policy.
        may_stop = roll.invariant or not cfg.algo.tis
        drafting = settle_draft(roll.spec(), given, head, may_stop, target, find)
    except (ValueError, OSError) as error:
        raise ConfigError(named_in(SECTIONS, error)) from error
    if drafting.by_default and mode != "auto":
        raise ConfigError(
            f"draft.mode={mode} is about the draft head, and the policy's checkpoint has no draft "
            "head; set rollout.draft=random to start from a random one, rollout.draft=PATH for one "
            "of its own, or leave out draft.mode: then n-grams draft"
        )
    cfg.rollout = dataclasses.replace(
        roll,
        draft=drafting.spec.draft,
        control=roll.control if drafting.control is given else drafting.control,
        # Else tokens would depend on the batch.
        ngram_siblings=roll.ngram_siblings
        and not (drafting.by_default and roll.acceptance != "coupled"),
    )
    if mode == "auto":
        with_head = trains(drafting.kind)
        cfg.draft.mode = "online" if with_head and cfg.draft.moves else "frozen"
    require_effect(cfg)
    online, spot = cfg.draft.mode == "online", cfg.draft.spot.enabled
    if (online or spot) and not trains(drafting.kind):
        raise ConfigError(
            f"{'draft.mode=online' if online else 'draft.spot.enabled=true'} trains a draft head, "
            f"and rollout.draft={roll.draft} ({drafting.kind.__name__}) is none that can be "
            "trained; leave it out, or set rollout.draft=random for a new head"
        )
    return drafting


def describe_drafting(cfg: RLConfig, drafting: Drafting) -> str:
    """Writes the line for the user about what `settle_drafting` settled."""
    if drafting.spec is None:
        return f"draft: none, because of draft.mode={cfg.draft.mode} and {cfg.rollout.plain_by}"
    if not issubclass(drafting.kind, HeadSource) and not trains(drafting.kind):
        return drafting.described()
    steps = f", draft.unroll_steps={cfg.draft.unroll_steps}" * (cfg.draft.mode == "online")
    return f"{drafting.described()} (draft.mode={cfg.draft.mode}{steps})"


def chunk_features(cfg: RLConfig, model: ModelConfig, evaluating: bool = False) -> Features:
    """Returns the sampling features that chunks of a rollout, or an evaluation, are compiled with.

    All samples of a rollout have the same ones, and those of an evaluation no further ones, so no
    further programs are compiled.

    Raises:
      ConfigError: a setting does not fit the model.
    """
    longest = cfg.rollout.max_prompt_tokens + cfg.rollout.max_tokens
    cases = [("rollout", longest, group_params(cfg, 0, 0))]
    if evaluating:
        sets = asked_sets(cfg.eval, cfg.rollout)
        cases = [(entry.key, entry.longest, entry.params()) for entry in sets]
    features = []
    for where, longest, params in cases:
        # Stop strings are searched for on the host.
        [job] = make_jobs([0], dataclasses.replace(params, n=1, stop=()), model.eos_token_ids)
        try:
            check_job(where, job, Limits(model, longest, len(job.stop_ids), None))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        features.append(features_of(job, model.vocab_size))
    return functools.reduce(operator.or_, features)


def transforms(cfg: RLConfig, model: ModelConfig) -> Transforms | None:
    """Returns the transforms with which training scores tokens; None for the temperature alone."""
    if cfg.algo.logprobs != "processed":
        return None
    return Transforms.of(cfg.rollout.sampling_params(), model.eos_token_ids, model.vocab_size)


def trains_in_replicas(cfg: RLConfig, mesh: Mesh) -> bool:
    """Returns whether spot training runs on the devices of replicas.

    It does if each replica is in one process and has devices of its own, or if the run has a single
    device.
    """
    if not cfg.draft.spot.enabled:
        return False
    if distributed.is_several():
        return cfg.rollout.tp <= jax.local_device_count()
    return cfg.rollout.own_devices or mesh is None


def on_policy(cfg: RLConfig) -> bool:
    """Returns whether a rollout has a single update, so that the policy is its own old policy."""
    return cfg.algo.updates_per_rollout == 1


def scores_to_add(cfg: RLConfig) -> list[str]:
    """Names the log-probabilities that a micro-batch gets before the update."""
    old = "fresh_logprobs" if cfg.rollout.partial else "old_logprobs"
    return [] if on_policy(cfg) else [old]


def settle_length(cfg: RLConfig, model: ModelConfig) -> str | None:
    """Fits the default lengths of prompts and responses to the model, see `fit_lengths`.

    Returns:
      A line for the user; None if nothing had to be changed.

    Raises:
      ConfigError: the user set lengths that the model has too few positions for.
    """
    line = fit_lengths(cfg, cfg.model, model.max_position)
    for entry in asked_sets(cfg.eval, cfg.rollout):
        if entry.longest > model.max_position:
            raise ConfigError(
                f"{entry.key}: max_prompt_tokens={entry.max_prompt_tokens} + max_tokens="
                f"{entry.sampling.max_tokens} must be at most {model.max_position}, the longest "
                f"sequence of {cfg.model}"
            )
    return line


def as_computed(cfg: RLConfig, model: ModelConfig) -> ModelConfig:
    """Returns a checkpoint's model config as the run computes: dtype, and longest sequence."""
    return model.running(**as_run(cfg)).for_length(longest_of(cfg))


def longest_of(cfg: RLConfig) -> int:
    """Returns the number of tokens of the longest sequence that a run may generate."""
    sets = asked_sets(cfg.eval, cfg.rollout)
    return max(
        cfg.rollout.max_prompt_tokens + cfg.rollout.max_tokens, *(x.longest for x in sets), 1
    )


def as_rolled_out(cfg: RLConfig, model: ModelConfig) -> ModelConfig:
    """Returns a config of `as_computed` with the dtype of rollouts, for engines and sources."""
    dtype = cfg.rollout.dtype
    return model if dtype == AUTO else model.running(compute_dtype=dtype)


def build_programs(
    cfg: RLConfig, model: ModelConfig, source: Draft | None, mesh: Mesh, meshes: Sequence
) -> Programs:
    """Makes the jitted functions of a run, and compiles none of them.

    Args:
      cfg: settings of the run.
      model: config of the policy, see `as_computed`.
      source: what drafts; None: the model's own head.
      mesh: mesh of training, see `make_meshes`.
      meshes: meshes of this process's replicas.

    Raises:
      ConfigError: the settings do not fit together.
    """
    if cfg.algo.router_aux_loss_coef and record_form(model) is None:
        raise ConfigError(
            "algo.router_aux_loss_coef: expected a mixture of experts, got a dense policy; set 0"
        )
    roll, speculate = cfg.rollout, drafts(cfg)
    loss = rl_loss(cfg.algo, on_policy(cfg), stale=roll.partial)
    context, kernel = context_of(cfg.mesh, mesh), cfg.attention
    chunk_features(cfg, model)
    if cfg.eval.any:
        chunk_features(cfg, model, evaluating=True)
    trained_online = speculate and cfg.draft.mode == "online"
    trained = None
    if trained_online:
        trained = run_as(source or head_of(model), model.run).for_length(longest_of(cfg))
    policy = PolicyTrainer(
        model,
        loss,
        cfg.optim.build(matrix_names(model)),
        mesh,
        roll.temperature,
        context,
        attention=kernel,
        transforms=transforms(cfg, model),
        taps=inner_taps(trained) if trained_online else (),
        chunk=cfg.logprob_chunk_size,
        entropy_gradient=cfg.algo.entropy_coeff > 0,
        router_aux_loss_coef=cfg.algo.router_aux_loss_coef,
    )
    draft, replica_drafts = None, []
    if trained_online:
        train_head = functools.partial(
            DraftTrainer,
            model,
            cfg.draft,
            Sampling.of(roll.sampling_params(), roll.aligned),
            attention=kernel,
            source=trained,
            chunk=cfg.logprob_chunk_size,
        )
        draft = train_head(mesh, context)
        if trains_in_replicas(cfg, mesh):
            alone = draft if mesh is None else None
            for on in meshes:
                if roll.tp > 1:
                    replica_drafts.append(train_head(on))
                else:  # one program, which jax compiles for each device that it runs on
                    alone = alone or train_head()
                    replica_drafts.append(alone)
    decoded = as_rolled_out(cfg, model)
    try:
        engines = build_engines(cfg, decoded, speculate, source, meshes)
    except ValueError as error:
        raise ConfigError(named_in(SECTIONS, error)) from error
    return Programs(policy, draft, replica_drafts, *engines)
