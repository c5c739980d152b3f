"""The trainer of `train.rl`: runs one RL step; a run saves and restores its state."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint.weights import (
    Head,
    describe,
    describe_head,
    load_model,
    read_config,
    tokenizer_dir,
)
from specjax.command_line import ConfigError
from specjax.config import ModelConfig
from specjax.config.dtype import AUTO
from specjax.decode.options import Features
from specjax.engine.programs import OnProgram
from specjax.engine.sources import Drafting, head_class, load_source, trains
from specjax.engine.start_up import StartUp
from specjax.hub import portable
from specjax.interfaces import Denominators
from specjax.models.transformer import Params, record_form
from specjax.parallel import distributed, sharding
from specjax.settings import fingerprint, named_in
from specjax.tokenizer import with_tokenizer_end
from specjax.weights import load_tokenizer
from train.data import rows
from train.data.checks import held_out, read_inputs
from train.heads.files import require_same_head, starting_head
from train.heads.training import FIELDS, DraftTrainer, draft_metrics, frozen_policy_parts
from train.loss.flops import UpdateSpeed
from train.loss.packing import (
    PackedBatch,
    Sample,
    empty_batch,
    pack,
    padding_share,
    routed_anew,
)
from train.loss.terms import count_denominators, finalize_metrics, k1
from train.programs import (
    as_computed,
    as_rolled_out,
    build_programs,
    chunk_features,
    describe_drafting,
    drafts,
    make_meshes,
    scores_to_add,
    settle_drafting,
    settle_length,
    trains_in_replicas,
)
from train.rewards.scoring import RewardsFailedError
from train.rollout.advantages import score_new_tokens, training_samples
from train.rollout.collect import Rollouts
from train.rollout.evaluation import evaluate
from train.rollout.exact import ExactMode
from train.rollout.groups import Group
from train.rollout.replicas import (
    control_metrics,
    copies_for,
    gather_replicas,
    join_engines,
    write_telemetry,
)
from train.rollout.sets import problem_sets
from train.rollout.spot import HeadDevices, ReplayBuffer, SpotTraining
from train.rollout.turns import Turns
from train.rollout_schema import SECTIONS
from train.run.start import find_policy
from train.schema import RLConfig


class Trainer:
    """Policy, head, optimizers, engine and data position of a run; `step()` makes one RL step.

    Attributes:
      on_program: callback of `warm_up`, see `Engine.warm_up`.
      exact: comparison of rollouts with plain decoding; None unless `rollout.exact_mode` is on.
      last_rollout: complete groups of the last step.
      last_evaluation: the first problems of each evaluation set with their samples of the last
        evaluation, by the set's name, `log.samples` of each; scored in the first process.
      notes: lines to print at start.
      done_steps: number of steps that are done.
      row_sizes: numbers of rows that a micro-batch may have, which a resumed run that
        trains a head keeps.
    """

    restart = "model={run}"

    def __init__(self, cfg: RLConfig):
        self.cfg, self.done_steps, self.row_sizes = cfg, 0, cfg.row_sizes
        self.on_program: OnProgram | None = None
        self._work = "rollout"
        self._start_up: StartUp | None = None
        self._update: Future | None = None  # of the update that a thread compiles
        self.last_rollout: list[Group] = []
        self.last_evaluation: dict[str | None, list[Group]] = {}
        self._read_inputs()
        loaded = load_model(cfg.model, cfg.dtype.params, self.mesh)
        self.dtype_line = cfg.dtype.settle(loaded.stored, sharding.platform_of(self.mesh))
        if cfg.rollout.dtype not in (AUTO, cfg.dtype.compute):
            self.dtype_line += f"; rollouts and evaluation in {cfg.rollout.dtype} (rollout.dtype)"
        model, self.params, head = loaded.cfg, loaded.policy, loaded.head
        model = with_tokenizer_end(model, self.tokenizer)
        drafting = settle_drafting(cfg, head_class(head), model)
        self.drafting = describe_drafting(cfg, drafting)
        self.source, self.head, self.source_params = None, None, None
        if drafting.spec is not None:
            model = self._load_draft(drafting, model, head)
        self.model = as_computed(cfg, model)
        self.about_head = None
        if self.head is not None:
            self.about_head = describe_head(Head(self.source, self.head))
        eos_ids = self.model.eos_token_ids
        self.turns = [
            Turns(self.environments, self.prompts, eos_ids, cfg.max_turns, name)
            for name in ("train", "heldout")
            if self.environments is not None
        ] or [None, None]
        self.rollouts = Rollouts(cfg, self.order, self.prompts, eos_ids, self.scorer, self.turns[0])
        self._build_programs()
        self.notes += self.drafting, self._compiling_line()

    def _read_inputs(self) -> None:
        """Reads model config, tokenizer and data, and checks them before anything is computed."""
        cfg = self.cfg
        named = find_policy(cfg)
        try:
            self.mesh, self.replica_meshes = make_meshes(cfg)
            self.copies = copies_for(self.replica_meshes)
            self.replica_meshes = self.copies.own if self.copies else self.replica_meshes
            target = read_config(cfg.model)
            fitted = settle_length(cfg, target)
            self.tokenizer_dir = tokenizer_dir(cfg.model).absolute()
            self.tokenizer = load_tokenizer(self.tokenizer_dir)
            inputs = read_inputs(cfg, self.tokenizer, named, target)
            self.eval_sets, about_sets = problem_sets(cfg, inputs, named)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.prompts, self.scorer = inputs.prompts, inputs.scorer
        self.environments = inputs.environments
        if self.environments is not None and distributed.is_several():
            raise ConfigError(
                f"environment={cfg.environment} needs a job of one process, got "
                f"{jax.process_count()}: its objects live in one; use rollout.replicas instead"
            )
        self.notes = [*([fitted] if fitted else []), *inputs.notes, *about_sets]
        self.order = rows.endless(inputs.problems, cfg.data.seed)

    def _load_draft(self, drafting: Drafting, model: ModelConfig, head: Head | None) -> ModelConfig:
        """Loads what drafts; returns the model's config with the switches of an MTP head.

        Raises:
          ConfigError: there is no such draft.
          CheckpointError: its files are damaged, or do not fit the policy.
        """
        spec = dataclasses.replace(drafting.spec, head_seed=self.cfg.seed)
        try:
            if trains(drafting.kind):
                model, (self.source, self.head) = starting_head(
                    spec, model, head, self.mesh, self.params
                )
            else:
                decoder = as_rolled_out(self.cfg, as_computed(self.cfg, model))
                loaded = load_source(decoder, spec, head, self.tokenizer, self.mesh)
                _, self.source, self.source_params = loaded
        except (ValueError, OSError) as error:
            raise ConfigError(named_in(SECTIONS, error)) from error
        if line := self.source.described():
            self.notes.append(f"draft: {line}")
        return model

    def _build_programs(self) -> None:
        """Makes jitted programs and engines, and gives the engines their weights."""
        cfg = self.cfg
        built = build_programs(cfg, self.model, self.source, self.mesh, self.replica_meshes)
        self.policy, self.draft = built.policy, built.draft
        devices = jax.devices()[:1] if self.mesh is None else [*self.mesh.devices.flat]
        self._speed = UpdateSpeed(self.model, devices)
        self.notes += self._speed.notes
        self.engines = built.engines if self.replica_meshes else []  # this process's replicas
        self._any_engine = built.engines[0]  # for settings; it may never run
        self.opt_state = self.policy.init_opt_state(self.params)
        self.reference = None
        if cfg.algo.needs_reference:
            self.reference = jax.tree.map(jnp.copy, self.params)
        self.draft_opt = self.draft.init_opt_state(self.head) if self.draft else None
        self.engine = join_engines(built.engines, self.copies, self.rollouts.rewards.judge)
        self.exact, self._plain_engines = None, built.plain_engines if self.replica_meshes else []
        if cfg.rollout.exact_mode and drafts(cfg):
            plain = built.plain_engines and join_engines(built.plain_engines, self.copies)
            self.exact = ExactMode(self.engine, plain or None, self.sync_weights)
        self.eval_engine, self._shares_programs = None, False
        if built.eval_engines:  # which take the programs of rollouts where they can
            pairs = zip(built.eval_engines, built.engines, strict=True)
            self._shares_programs = all([engine.share_programs(roll) for engine, roll in pairs])
            self.eval_engine = join_engines(built.eval_engines, self.copies)
        self._build_spot(built.replica_drafts)
        try:
            self.sync_weights()
        except ValueError as error:  # a matrix does not fit its format
            raise ConfigError(named_in(SECTIONS, error)) from error

    def _build_spot(self, replica_drafts: Sequence[DraftTrainer]) -> None:
        """Makes spot training of the head, if it is used."""
        cfg, self.spot = self.cfg, None
        if self.draft is None or not cfg.draft.spot.enabled:
            return
        inside = trains_in_replicas(cfg, self.mesh)
        if not inside:
            places = [HeadDevices(self.draft, trains=True)]
        else:
            first = [m.devices.flat[0] if m else jax.devices()[0] for m in self.replica_meshes]
            places = [*map(HeadDevices, replica_drafts, first)]
        apart, context = inside and self.copies is not None, self.policy.context
        self.spot = SpotTraining(places, cfg.draft, apart, context)
        if self.copies is not None and self.spot.in_rollouts:
            self.engine.idle_work = self.spot  # which `Hosts` calls between its exchanges
        elif self.copies is None and len(self.engines) > 1:  # called often while replicas run
            self.engine.on_poll = lambda: self.spot.use_idle(self.engine.idle_replicas)

    def sync_weights(self) -> None:
        """Gives the weights of policy and draft to the engine; only the first call compiles."""
        self.engine.set_params(self.params, self._draft_params)

    @property
    def _draft_params(self) -> Params | None:
        """The weights of what drafts; None: it has none."""
        return self.source_params if self.head is None else self.head

    @property
    def work(self) -> str:
        """The part of the step that is in progress; another thread may ask for it."""
        return self.rollouts.progress() if self._work == "rollout" else self._work

    def start_lines(self) -> list[str]:
        """Returns the lines about rollouts at start."""
        *lines, kernel = self._any_engine.start_lines()
        return [*lines, f"{kernel} for rollouts, {self.policy.cfg.run.attention} for training"]

    def _compiling_line(self) -> str:
        """Writes the line before `warm_up`."""
        engines = [*self.engines, *self._plain_engines]
        count = sum(len(engine.programs(self._features)) for engine in engines)
        several = len(self._any_engine.runner.programs) > 1
        fewer = ", fewer in rollout.control.strategies" if several else ""
        return (
            f"rollouts: compiling {count} programs, most of them while samples are generated; to "
            f"compile less: rollout.strategy=off{fewer}, or a smaller rollout.max_batch"
        )

    @property
    def _features(self) -> tuple[Features]:
        """The sampling features that chunks of rollouts are compiled with."""
        return (chunk_features(self.cfg, self.model),)

    def warm_up(self) -> StartUp:
        """Compiles programs with which a rollout begins, and has the others compiled meanwhile.

        A further call compiles nothing, and returns the same.
        """
        if self._start_up is not None:
            return self._start_up
        self._start_up = self.engine.warm_up(self._features, self.on_program, background=True)
        self.engine.release(weights=False)
        if self.exact is not None:
            self.exact.warm_up(self.params, self._features, self.on_program)
        if self.eval_engine is not None:
            self._warm_up_evaluation()
        length = self.cfg.packing.row_length
        records = record_form(self.model)
        if self.cfg.rollout.partial or records is not None:
            for count in self.row_sizes:
                batch = empty_batch(count, length, records)
                self.policy.logprobs(self.params, self.policy.place(batch))
        if self.spot is not None:
            states = [self.policy.states_shape(count, length) for count in self.row_sizes]
            self.spot.warm_up(self.head, self.draft_opt, self.params, states)
        if not distributed.is_several():
            self._compile_updates()
        return self._start_up

    def _compile_updates(self) -> None:
        """Has a thread compile the updates of policy and head while samples are generated.

        jax then finds the programs when the functions are called.
        """
        cfg, policy, head = self.cfg, self.policy, None
        batch = empty_batch(max(self.row_sizes), cfg.packing.row_length, record_form(self.model))
        scores = scores_to_add(cfg) + ["ref_logprobs"] * bool(cfg.algo.kl_loss_coef)
        batch |= {name: batch["old_logprobs"] for name in scores}
        if self.draft is not None and self.spot is None:
            head = self.head, self.draft_opt, frozen_policy_parts(self.params)
        inputs = self.params, self.opt_state, policy.place(batch), head
        inputs = sharding.without_data(inputs, self.mesh)
        states = policy.states_shape(*batch["tokens"].shape)
        programs = policy.programs | (self.draft.programs if head else {})
        compiler = self._any_engine.runner.executables.background
        compile_update = functools.partial(_compile_update, programs, states, *inputs)
        self._update = compiler.submit(compile_update)

    def _warm_up_evaluation(self) -> None:
        """Compiles the programs of evaluation that rollouts do not have."""
        features, (known,) = chunk_features(self.cfg, self.model, evaluating=True), self._features
        if self._shares_programs and known.covers(features):
            for engine in self.eval_engine.engines:
                engine.warm_rows = engine.batch
            return
        self._give_evaluation()
        if self.eval_engine.may_compile_behind:
            self.eval_engine.compile_behind((features,))
        else:
            self.eval_engine.warm_up((features,), self.on_program)
        self.eval_engine.release()

    def _give_evaluation(self) -> None:
        """Gives the weights of policy and draft to the engine that evaluates."""
        head = self._draft_params if self.eval_engine.spec else None
        self.eval_engine.set_params(self.params, head)

    # --- one step ----------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """Makes one RL step; returns its metrics.

        Raises:
          RewardsFailedError: a larger share of the step's rewards failed than
            `max_failed_rewards`. Policy, head and controllers are restored, and the step can be
            repeated.
        """
        step = self.done_steps + 1
        before = self._snapshot()
        # 1. Rollout: groups of scored samples. Spot training trains the head meanwhile.
        groups, metrics = self._roll_out(step)
        if metrics["reward/failed_share"] > self.cfg.max_failed_rewards:
            self._undo_rollout(before)
            raise RewardsFailedError(
                f"{metrics['reward/failed_share']:.0%} of the rewards of step {step} failed, more "
                f"than max_failed_rewards={self.cfg.max_failed_rewards:g} allows; the log above "
                f"names rows and values of reward={self.scorer.name}"
            )
        out = Path(self.cfg.out)
        write_telemetry(self.engines, self.engine.telemetry, out / "telemetry.jsonl")
        # 2. Advantages, packed micro-batches, and the update(s) of the policy.
        self._work, started = "policy update", time.perf_counter()
        self._score_carried()
        batches, states = self._update_policy(groups, metrics, step) if groups else ([], [])
        jax.block_until_ready(self.params)
        metrics["time/train"] = time.perf_counter() - started
        # 3. The update of the draft head, on the states that the policy update returned.
        if self.spot is not None:
            self.spot.store(step, batches, states)
        elif self.draft is not None:
            self._work, started = "draft update", time.perf_counter()
            if batches:  # else every group was dropped
                metrics |= self._update_draft(batches, states)
            metrics["time/draft"] = time.perf_counter() - started
        # 4. Both sets of weights, to the engines.
        started = time.perf_counter()
        self.sync_weights()
        jax.block_until_ready([engine.runner.weights.policy for engine in self.engines])
        metrics["time/sync"] = time.perf_counter() - started
        self.done_steps = step
        return metrics

    def _roll_out(self, step: int) -> tuple[list[Group], dict]:
        """Runs a rollout, and spot training meanwhile; returns groups to train on and metrics."""
        self._work = "rollout"
        if self.spot is not None:
            self.spot.begin(step, self.head, self.draft_opt, self.params)
        started = time.perf_counter()
        before = {engine: engine.preemptions for engine in self.engines}
        self.last_rollout, groups, metrics = self.rollouts.collect(self.engine, step)
        metrics["time/rollout"] = time.perf_counter() - started
        preempted = gather_replicas(self.engines, lambda e: e.preemptions - before[e])
        metrics["rollout/preemptions"] = float(sum(preempted))
        if self.engine.spec is not None:
            metrics |= control_metrics(self.engines)
        if self.exact is not None:
            metrics |= self.exact.compare(self.params, self.rollouts.begun())
        self.engine.release()  # frees memory for training; `sync_weights` brings new weights
        if self.spot is not None:
            started = time.perf_counter()
            self.head, self.draft_opt, sums = self.spot.finish()
            metrics["time/draft"] = time.perf_counter() - started
            metrics |= self.spot.metrics() | (draft_metrics(sums) if sums else {})
        return groups, metrics

    def _snapshot(self) -> tuple:
        """Returns what a rollout changes: its state, controllers, the head and its optimizer.

        Spot training leaves its input arrays valid.
        """
        controllers = [copy.deepcopy(engine.controller.state()) for engine in self.engines]
        return self.rollouts.state(), controllers, self.head, self.draft_opt

    def _undo_rollout(self, before: tuple) -> None:
        """Restores the state before the rollout, and drops the rollout's records."""
        rollouts, controllers, self.head, self.draft_opt = before
        self.rollouts.load_state(rollouts)
        for engine, state in zip(self.engines, controllers, strict=True):
            engine.controller.load_state(state)
        if self.engine.telemetry is not None:
            self.engine.telemetry.clear()
        self.sync_weights()  # the rollout released them at its end

    def _score_carried(self) -> None:
        """Scores the new tokens of carried groups with the weights that sampled them."""
        score_new_tokens(
            self.rollouts.carried,
            lambda batch: self._fetched_logprobs(self.params, self._placed(batch)),
            self.cfg.packing.row_length,
            self.row_sizes,
        )

    def _fetched_logprobs(self, params: Params, placed: dict) -> np.ndarray:
        return self.policy.fetch(self.policy.logprobs(params, placed))

    def _update_policy(self, groups: list[Group], metrics: dict, step: int):
        """Packs the groups and runs the policy's updates.

        Returns:
          (micro-batches to train the head on, their states).
        """
        cfg = self.cfg
        stale = step if cfg.rollout.partial else None
        samples, shaped = training_samples(
            cfg.algo, groups, cfg.rollout.max_tokens, stale, self._kl_to_reference
        )
        metrics |= shaped
        responses = [response for group in groups for response in group.responses]
        for sample in samples:
            responses[sample.sample_id].advantage = float(np.mean(sample.advantage))
        metrics["train/microbatches"] = 0.0
        if not samples:  # all were truncated, and masked
            return [], []
        updates, denominators = [], []
        for shard in np.array_split(np.arange(len(responses)), cfg.algo.updates_per_rollout):
            places = set(shard.tolist())
            if kept := [sample for sample in samples if sample.sample_id in places]:
                updates.append(pack(kept, cfg.packing.row_length, self.row_sizes))
                # Samples that are masked as truncated count, as in TRL.
                denominators.append(count_denominators(updates[-1], len(shard)))
        metrics["train/padding_share"] = padding_share(b for batches in updates for b in batches)
        if "records" in updates[0][0]:
            metrics |= self._replay_difference(updates[0][0])
        updates = [[self._scored(batch) for batch in batches] for batches in updates]
        jax.block_until_ready(updates)
        if self._update is not None:  # or this thread would compile the same
            self._any_engine.runner.executables.background.run(self._update)
            wait([self._update])
            self._update = None
        for_head, states_of_head, total, started = [], [], {}, time.perf_counter()
        most = max(len(batch["tokens"]) for batches in updates for batch in batches)
        for batches, counts in zip(updates, denominators, strict=True):
            # The head has an update of the same rate for each micro-batch, and those of fewer rows
            # than the largest of the step would be noisy.
            keep = 0
            if self.draft is not None:
                keep = sum(len(batch["tokens"]) == most for batch in batches)  # the first ones
                if limit := cfg.draft.max_microbatches:
                    keep = min(keep, max(limit - len(for_head), 0))
            self.params, self.opt_state, states, sums = self.policy.update(
                self.params, self.opt_state, batches, counts, keep
            )
            for_head += batches[: len(states)]
            states_of_head += states
            norm = float(sums.pop("grad_norm"))
            total = {k: total.get(k, 0.0) + v for k, v in sums.items()}
            metrics["train/grad_norm"] = max(norm, metrics.get("train/grad_norm", 0.0))
        jax.block_until_ready(self.params)
        lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
        metrics |= self._speed.metrics(lengths, time.perf_counter() - started)
        final = finalize_metrics({k: float(v) for k, v in total.items()})
        for name in {"loss", "policy_loss", "kl_loss", "entropy_loss"} & final.keys():
            final[name] /= len(updates)
        metrics |= {f"train/{name}": value for name, value in final.items()}
        metrics["train/microbatches"] = float(sum(map(len, updates)))
        return for_head, states_of_head

    def _kl_to_reference(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Estimates KL(policy || reference) by `k1` at each response token."""
        of_samples = [None] * len(samples)
        for batch in pack(samples, self.cfg.packing.row_length, self.row_sizes):
            placed, ids = self._placed(batch), batch["sample_ids"]
            kl = self._fetched_logprobs(self.params, placed)
            kl = k1(kl, self._fetched_logprobs(self.reference, routed_anew(placed)))
            for i in np.unique(ids[ids >= 0]).tolist():
                generated = batch["positions"] >= len(samples[i].prompt_ids)
                of_samples[i] = kl[(ids == i) & generated]
        return of_samples

    def _placed(self, batch: PackedBatch) -> dict:
        """Moves a micro-batch to the devices, with the records that the policy is trained with."""
        placed = self.policy.place(batch)
        return placed if self.cfg.algo.routing_replay else routed_anew(placed)

    def _scored(self, batch: PackedBatch) -> dict:
        """Moves a micro-batch to the devices, and adds old and reference log-probabilities."""
        placed = self._placed(batch)
        for name in scores_to_add(self.cfg):
            placed[name] = self.policy.logprobs(self.params, placed)
        if self.cfg.algo.kl_loss_coef:
            placed["ref_logprobs"] = self.policy.logprobs(self.reference, routed_anew(placed))
        return placed

    def _replay_difference(self, batch: dict) -> dict[str, float]:
        """Measures on one micro-batch how far trainer and rollout are apart, routed otherwise."""
        fresh = (batch["loss_mask"] > 0) & (batch["staleness"] == 0)
        placed, name = self.policy.place(batch), "with"
        if self.cfg.algo.routing_replay:
            placed, name = routed_anew(placed), "without"
        off = self._fetched_logprobs(self.params, placed) - batch["behaviour_logprobs"]
        mean = float(np.abs(off)[fresh].mean()) if fresh.any() else 0.0
        return {f"train/train_rollout_logprob_abs_diff_{name}_replay": mean}

    def _update_draft(self, batches: list, states: list) -> dict[str, float]:
        """Trains the head on the states of the old policy; returns the metrics of its update.

        The head will draft with the new matrices, so they are in the target of the loss
        (docs/training.md).
        """
        self.head, self.draft_opt, sums = self.draft.update(
            self.head, self.draft_opt, self.params, batches, states
        )
        return draft_metrics(sums)

    # --- evaluation, checkpoints -------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Computes metrics of evaluation on all sets, with the same seeds every time."""
        self._work = "evaluation"
        self._give_evaluation()
        if self._shares_programs:  # it begins with what rollouts know, and keeps what it learns
            for engine, rollouts in zip(self.eval_engine.engines, self.engines, strict=True):
                engine.controller.load_state(copy.deepcopy(rollouts.controller.state()))
        eos_ids, most = self.model.eos_token_ids, self.cfg.log.samples
        evaluated = evaluate(
            self.eval_engine, self.eval_sets, eos_ids, self.cfg.eval.seed, turns=self.turns[1]
        )
        self.last_evaluation = {name: sets[:most] for name, sets in evaluated.groups.items()}
        self.eval_engine.release()
        if self.eval_engine.telemetry is not None:
            self.eval_engine.telemetry.clear()  # it is about rollouts
        return evaluated.metrics

    def trees(self, meta: Mapping[str, Any] | None = None) -> dict:
        """Returns the arrays that a checkpoint holds, by name."""
        trees = {
            "policy": self.params,
            "policy_opt": self.opt_state,
            "draft": self.head,
            "draft_opt": self.draft_opt,
            "reference": self.reference,
        }
        trees = {name: tree for name, tree in trees.items() if tree is not None}
        if meta is not None and meta["replay"] is not None and meta["replay"]["steps"]:
            trees["replay"] = ReplayBuffer.abstract(meta["replay"], self.mesh)
        elif meta is None and self.spot is not None and self.spot.buffer.entries:
            trees["replay"] = self.spot.buffer.tree()
        return trees

    def fingerprint(self) -> dict:
        """Returns the settings that change the result; a resumed run must have the same."""
        cfg = self.cfg
        ignored = ("out", "steps", "log", "checkpoint", "eval", "max_failed_rewards", "mesh")
        ignored += "distributed", "attention", "remat", "remat_policy", "logprob_chunk_size"
        settings = fingerprint(cfg, ignored)
        settings["model"] = portable(settings["model"])
        settings["algo"].pop("preset")  # the values that it sets are there
        held = held_out(cfg)  # else what is evaluated decides nothing of what is trained on
        sets = {"dataset": cfg.data.dataset, "problems": held} if held else {}
        settings["eval"] = {"sets": sets}
        for name in cfg.rollout.may_change:
            settings["rollout"].pop(name)
        if cfg.rollout.invariant and "replicas" in cfg.rollout.may_change:
            settings["rollout"]["replicas"] = "any"  # number, with devices of their own
        for name in ("workers", "timeout"):
            settings["rewards"].pop(name)  # they decide where rewards run, and when they fail
        settings["draft"]["spot"].pop("gaps")  # changes only when the head is trained
        if cfg.draft.mode in ("none", "frozen"):  # no step of it is trained
            settings["draft"].pop("unroll_steps")
        return settings

    def meta(self) -> dict[str, Any]:
        """Returns what else a checkpoint has; all processes of a job call it together."""
        controllers = gather_replicas(self.engines, lambda e: e.controller.state())
        return {
            "seed": self.cfg.seed,
            "rollouts": self.rollouts.state(),
            "controllers": controllers,
            "replay": None if self.spot is None else self.spot.buffer.state(),
            "row_sizes": [*self.row_sizes],
            **describe(self.model, self.tokenizer_dir, self.about_head),
        }

    def check(self, meta: Mapping[str, Any]) -> None:
        """Takes the sizes of a checkpoint's micro-batches.

        Raises:
          ConfigError: the run would go on with another head or sizes of micro-batches.
        """
        require_same_head(meta, self.about_head, self.model)
        if self.draft is not None:  # which has an update for each; else they decide last bits alone
            sizes, devices = meta["row_sizes"], self.cfg.mesh.row_devices
            if any(size % devices for size in sizes):
                raise ConfigError(
                    "the run trains its draft head on micro-batches of "
                    f"{', '.join(map(str, sizes))} rows, and mesh.data * mesh.fsdp = {devices} "
                    f"does not divide them; resume with a divisor of {math.gcd(*sizes)}"
                )
            self.row_sizes = tuple(sizes)

    def load(self, trees: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Takes the content of a checkpoint, and compiles, so that measured costs are new."""
        self.params, self.opt_state = trees["policy"], trees["policy_opt"]
        self.head, self.draft_opt = trees.get("draft"), trees.get("draft_opt")
        self.reference = trees.get("reference")
        if self.spot is not None:
            self.spot.buffer.load(meta["replay"], trees.get("replay", {}))
        self.rollouts.load_state(meta["rollouts"])
        self.engine.release()  # frees the initial weights
        self.sync_weights()
        states = meta["controllers"]
        first = self.copies.before if self.copies else 0
        for replica, engine in enumerate(self.engines, first):  # there may be more replicas now
            engine.controller.load_state(states[replica] if replica < len(states) else states[0])
        self.warm_up()


def _compile_update(programs: Mapping, states, params, opt_state, batch, head) -> None:
    gradients = jax.tree.map(lambda p: p.update(dtype=np.dtype(np.float32)), params)
    counts = Denominators(np.float32(1), np.float32(1))
    programs["zeros"].lower(params).compile()
    programs["accumulate"].lower(params, gradients, batch, counts).compile()
    programs["apply"].lower(params, opt_state, gradients).compile()
    if head is not None:
        states = states.update(sharding=batch["tokens"].sharding)
        rows = {name: batch[name] for name in FIELDS}
        programs["update"].lower(*head, rows, states).compile()
