"""Checkpoints of training states on disk.

This is the only file that imports Orbax. It uses Orbax's v1 API (in 0.12.8 still
``orbax.checkpoint.experimental.v1``) for sharded parallel writes, an atomic commit per step, and
resharding on load. It adds three things that Orbax 0.12.8 lacks:

* a manifest of file sizes and CRC-32 sums per checkpoint: without it a flipped bit in a data file
  is not noticed, and a lost metadata file silently turns the metadata into ``{}``;
* a record of every array's shape and dtype, so that a mismatch names the array instead of failing
  inside the storage layer, and so that nothing is cast silently;
* errors that name the newest checkpoint that can be used instead.

A tree is stored as a plain nested dict of arrays whatever containers it was made of (optax states
are named tuples); it is rebuilt from the abstract tree that the caller passes to ``restore``.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint.experimental.v1 as ocp

from specjax.checked_json import CheckpointError
from specjax.checkpoint.format import (
    PyTree,
    manifest_problem,
    match,
    pack,
    shapes_of,
    unpack,
    write_manifest,
)
from specjax.error_text import first_line
from specjax.parallel import distributed, sharding

_RECORD = "specjax"  # key of our JSON string in Orbax's custom metadata
_TMP_MARK = ".orbax-checkpoint-tmp"


class Checkpointer:
    """Keeps the last few training states of one run under one directory.

    A step is written to a temporary directory and renamed when complete, so a process killed in
    the middle of a save leaves the earlier checkpoints as they were and the partial one invisible.
    Older steps are deleted only after the new one is committed. Every process of a multi-host run
    must make the same calls in the same order.

    Args:
        directory: holds one sub-directory per step; created when absent.
        keep_last: number of newest steps that are kept, at least 1.
    """

    def __init__(self, directory: str | Path, keep_last: int = 3):
        if keep_last < 1:
            raise ValueError(f"keep_last: expected at least 1, got {keep_last}")
        self.directory = Path(directory).absolute()
        self.keep_last = keep_last
        # Drops Orbax's log of a failed write, which has tracebacks of a dozen threads: the caller
        # gets the error as `CheckpointError`. Adding the same filter twice does nothing.
        logging.getLogger("absl").addFilter(_keep)
        self._manager = self._open()
        self._pending: Future[None] | None = None
        self._cleaned = False
        self._rewound_to: int | None = None

    def save(
        self,
        step: int,
        trees: Mapping[str, PyTree],
        meta: Mapping[str, Any],
        block: bool = False,
    ) -> None:
        """Starts saving one training state; it is committed in the background.

        Arrays are copied before this returns, so they may be donated right after. One save is in
        flight at a time: a second call first waits for the first.

        Args:
            step: at least 0 and newer than every step already saved. After `restore` of an older
                step, the newer ones are removed here.
            trees: name -> pytree of jax arrays.
            meta: anything `json.dumps` takes: data position, controller state, fingerprints.
            block: whether to wait for the commit.

        Raises:
            CheckpointError: the previous save failed (the message names it), or, with `block`,
                this one did. The earlier checkpoints stay loadable.
            TypeError: a leaf is not a jax array, or `meta` is not JSON.
        """
        self.wait()
        self._prepare(step)
        arrays, record = pack(trees, meta)
        arrays, metadata = _writable(arrays), {_RECORD: json.dumps(record)}
        try:
            response = self._manager.save_checkpointables_async(
                step, arrays, custom_metadata=metadata
            )
        except Exception as error:
            failed = self._save_error(step, error)
            self._recover(step)
            raise failed from error

        def finish() -> None:
            try:
                response.result()
                write_manifest(self.directory / str(step))
            except Exception as error:
                raise self._save_error(step, error) from error

        # The program waits for the thread before it exits.
        executor = ThreadPoolExecutor(1, "checkpoint-save")
        self._pending, self._pending_step = executor.submit(finish), step
        executor.shutdown(wait=False)
        if block:
            self.wait()

    def wait(self) -> None:
        """Blocks until no save is in flight; raises `CheckpointError` if the last one failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except CheckpointError:
            self._recover(self._pending_step)
            raise

    def all_steps(self) -> list[int]:
        """Returns the committed steps, oldest first, damaged ones included."""
        return sorted(info.step for info in self._manager.checkpoints)

    def restore(
        self, step: int | None, wanted: Mapping[str, PyTree] | Collection[str]
    ) -> tuple[dict[str, PyTree], dict[str, Any]]:
        """Loads a training state into the structure and the sharding of `wanted`.

        Args:
            step: a committed step, or None for the newest.
            wanted: name -> pytree of `jax.ShapeDtypeStruct` (or arrays). The sharding of a leaf may
                differ from the one it was saved with; without a sharding the leaf goes to the first
                local device. Names may be a subset of those saved. Or names alone, for those of
                these trees that were saved, as nested dicts on the first local device.

        Returns:
            (trees, meta), trees with the structure of `wanted`.

        Raises:
            CheckpointError: there is no such step, it is damaged (the message names the newest
                intact older step), an array is missing or has another shape or dtype, or none of
                the trees of some names was saved.
        """
        self.wait()
        steps = self.all_steps()
        if not steps:
            raise CheckpointError(f"{self.directory} holds no complete checkpoint; start afresh")
        chosen = steps[-1] if step is None else step
        if chosen not in steps:
            raise CheckpointError(f"{self.directory} holds no step {chosen}, only {steps}")
        path = self.directory / str(chosen)
        record, problem = distributed.of_first(lambda: read_record(path), "inspect checkpoint")
        if record is None:
            raise CheckpointError(self._damaged(chosen, problem))
        saved = record["trees"]
        if not isinstance(wanted, Mapping):
            names, wanted = wanted, {n: shapes_of(saved[n]) for n in wanted if n in saved}
            if not wanted:
                raise CheckpointError(
                    f"{path} holds {sorted(saved)}; expected {' or '.join(names)}"
                )
        abstract = match(wanted, saved, path)
        try:
            readable = _readable(abstract)
            loaded = self._manager.load_checkpointables(chosen, readable) if abstract else {}
        except Exception as error:
            raise CheckpointError(self._damaged(chosen, first_line(error))) from error
        trees = unpack(_as_wanted(loaded, abstract), wanted)
        if chosen != steps[-1]:
            self._rewound_to = chosen
        return trees, record["meta"]

    def close(self) -> None:
        """Waits for the save in flight and releases Orbax's threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _open(self) -> ocp.training.Checkpointer:
        return ocp.training.Checkpointer(
            self.directory,
            # The caller decides when to save; Orbax's default policy would skip saves.
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=ocp.training.preservation_policies.LatestN(self.keep_last),
        )

    def _prepare(self, step: int) -> None:
        """Removes steps that a killed or rewound run left; refuses to overwrite other steps."""
        if not self._cleaned:
            # Not at construction: a reader must not delete a save that a run is writing.
            self._remove_partial("*")
            self._cleaned = True
        stale = [saved for saved in self.all_steps() if saved >= step]
        if self._rewound_to is not None:
            stale = [saved for saved in self.all_steps() if saved > self._rewound_to]
            for saved in stale:
                self._manager.delete(saved)
            self._rewound_to, stale = None, [s for s in self.all_steps() if s >= step]
        if stale:
            raise CheckpointError(
                f"{self.directory} already holds step {stale[-1]}, so step {step} cannot be "
                "saved: resume from it, or use another directory"
            )

    def _recover(self, step: int) -> None:
        """Frees the disk space of a failed save and resets the state."""
        self._remove_partial(str(step))
        try:
            self._manager.close()
        except Exception:  # it repeats the error that is already being raised
            pass
        self._manager = self._open()

    def _remove_partial(self, step: str) -> None:
        if jax.process_index() == 0:
            for partial in self.directory.glob(f"{step}{_TMP_MARK}*"):
                shutil.rmtree(partial, ignore_errors=True)

    def _save_error(self, step: int, error: BaseException) -> CheckpointError:
        # Orbax's own list no longer has the step that this save would have replaced.
        names = (path.name for path in self.directory.iterdir())
        kept = sorted(int(name) for name in names if name.isdigit() and name != str(step))
        free = shutil.disk_usage(self.directory).free / 2**20
        return CheckpointError(
            f"saving step {step} under {self.directory} failed: {first_line(error)} "
            f"({free:.0f} MiB free on that disk). Earlier checkpoints are untouched: {kept}"
        )

    def _damaged(self, step: int, problem: str) -> str:
        text = f"checkpoint {self.directory / str(step)} is damaged: {problem}. "
        for older in reversed([saved for saved in self.all_steps() if saved < step]):
            if read_record(self.directory / str(older))[0] is not None:
                text += f"The newest intact older one is step {older}; a conversion reads it with "
                return text + f"--step {older}, and to go on from it use --resume_step {older}"
        return text + "No older checkpoint is intact: start afresh in another directory"


# Orbax 0.12.8 neither writes nor reads arrays without a shard in every process of the job: they are
# first put on a device of each process.


def _writable(arrays: PyTree) -> PyTree:
    def one(array):
        where = sharding.over_all(array.sharding, array.shape)
        return array if where is array.sharding else sharding.put(sharding.fetch(array), where)

    return jax.tree.map(one, arrays) if distributed.is_several() else arrays


def _readable(abstract: PyTree) -> PyTree:
    def one(leaf):
        where = leaf.sharding and sharding.over_all(leaf.sharding, leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return jax.tree.map(one, abstract) if distributed.is_several() else abstract


def _as_wanted(loaded: PyTree, abstract: PyTree) -> PyTree:
    def one(array, wanted):
        if wanted.sharding in (None, array.sharding):
            return array
        return sharding.put(sharding.fetch(array), wanted.sharding)

    return jax.tree.map(one, loaded, abstract) if distributed.is_several() else loaded


def _keep(record: logging.LogRecord) -> bool:
    return record.exc_info is None or "orbax" not in record.pathname


def read_record(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Returns (record, "") of an intact checkpoint, else (None, what is wrong with it)."""
    problem = manifest_problem(path)
    if problem:
        return None, problem
    try:
        return json.loads(ocp.checkpointables_metadata(path).custom_metadata[_RECORD]), ""
    except Exception as error:  # Orbax raises many types
        return None, f"its metadata cannot be read ({first_line(error)})"
