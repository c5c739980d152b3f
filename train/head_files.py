"""Loads the draft head that a run starts from, and saves checkpoints of the head alone.

A head-only checkpoint holds neither embedding nor language-model head, which belong to the policy.
It is small, can be written often, and can be used with the same policy elsewhere.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import jax

from specjax.checkpoint.store import PendingSave, save_draft
from specjax.checkpoint.weights import HEAD_SWITCHES, describe
from specjax.command_line import ConfigError
from specjax.config import ModelConfig
from specjax.drafts.mtp import init_head_params, weight_axes
from specjax.engine.sources import head_config, load_head
from specjax.models.transformer import Params
from specjax.parallel import distributed, sharding
from specjax.spelling import SettingError, spelled
from train.rollout_schema import SPELL


def starting_head(
    source: str, model: ModelConfig, head: Params | None, seed: int, mesh: jax.sharding.Mesh | None
) -> tuple[ModelConfig, Params]:
    """The head that a run starts from, and the model config with the switches of that head.

    Args:
      source: `checkpoint` (the head in the policy's checkpoint), `random` (drawn from `seed`), or a
        path or id that `specjax.engine.sources.load_head` reads.
      model: config of the policy.
      head: head in the policy's checkpoint; None without one.
      seed: seed of a random head.
      mesh: mesh of training; None for one device.

    Raises:
      ConfigError: the policy's checkpoint has no head, or the path does not exist.
      CheckpointError: the head at the path is damaged or does not fit the policy.
    """
    if source == "checkpoint":
        if head is None:
            raise ConfigError(
                "the policy's checkpoint has no draft head, and rollout.draft=checkpoint drafts "
                "with it; set rollout.draft=random to start from a random one, rollout.draft=PATH "
                "for one of its own, or leave out rollout.draft: then n-grams draft"
            )
        return model, head
    if source == "random":
        model = model.replace(mtp_num_layers=max(model.mtp_num_layers, 1))
        # jax takes 32 bits of a seed. Seeds that differ in other bits give the same head, which
        # changes no token.
        made = init_head_params(model, seed % (1 << 32))
        if mesh is None:
            return model, made
        where = sharding.param_shardings(mesh, made, weight_axes(model))
        return model, sharding.put(made, where)
    try:
        return load_head(source, model, mesh)
    except SettingError as error:
        raise ConfigError(spelled(error, SPELL)) from error


def head_shapes(source: str, model: ModelConfig) -> tuple[ModelConfig, Params]:
    """`starting_head` with shapes instead of arrays, which reads no weights.

    Raises:
      ConfigError: as in `starting_head`.
    """
    if source == "checkpoint" and not model.mtp_num_layers:
        return starting_head(source, model, None, 0, None)  # raises
    if source not in ("checkpoint", "random"):
        try:
            model = head_config(source, model)
        except SettingError as error:
            raise ConfigError(spelled(error, SPELL)) from error
    model = model.replace(mtp_num_layers=max(model.mtp_num_layers, 1))
    return model, jax.eval_shape(lambda: init_head_params(model))


class HeadCheckpoints:
    """Keeps the last few heads of a run under `<directory>/<step>`, saved in the background."""

    def __init__(self, directory: str | Path, model: ModelConfig, keep_last: int):
        self.directory, self.keep_last = Path(directory), keep_last
        self._meta = {name: getattr(model, name) for name in HEAD_SWITCHES} | describe(model, None)
        self._pending: PendingSave | None = None

    def save(self, step: int, head: Params) -> None:
        """Starts a save; the arrays are copied before this returns.

        Raises:
          CheckpointError: the save cannot start, or the save before it failed.
        """
        self.wait()
        # Partial saves and directories of this or later steps are left from a run that was killed,
        # or resumed from an earlier step.
        self._remove(lambda name: not name.isdigit() or int(name) >= step)
        distributed.gather(None, "head checkpoint")  # removed before any process saves
        self._pending = save_draft(self.directory / str(step), head, {"step": step, **self._meta})

    def wait(self) -> None:
        """Waits for the running save, raises its error if any, and removes the oldest heads."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.wait()
        steps = sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdigit())
        old = {str(step) for step in steps[: -self.keep_last]}
        self._remove(lambda name: name in old)

    def _remove(self, unwanted) -> None:
        if jax.process_index() == 0 and self.directory.is_dir():
            for path in self.directory.iterdir():
                if unwanted(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def __enter__(self) -> HeadCheckpoints:
        return self

    def __exit__(self, *unused: object) -> None:
        self.wait()
