"""Loads models for decoding, from checkpoints of training runs and all other layouts.

The metadata of a run's checkpoint has the model's config, as the content of a config.json, and the
path of the tokenizer (`describe`). Orbax takes seconds to import, so it is imported only for its
own checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from specjax.checked_json import CheckpointError
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.format import named_leaves, nest
from specjax.checkpoint.huggingface import MTP_KEY, config_json, config_of, mtp_json
from specjax.config import ModelConfig
from specjax.config.dtype import resolve_dtype
from specjax.drafts.mtp import init_head_params, weight_axes
from specjax.models.transformer import Params, init_params
from specjax.parallel import distributed, sharding
from specjax.weights import AUTO, open_checkpoint, recognised
from specjax.weights.safetensors import CONFIG

# Keys in the metadata of a head about the model that it drafts for.
HEAD_SWITCHES = ("mtp_num_layers", "mtp_concat", "mtp_target_hidden", "mtp_recycle")
CHECKPOINTS, TOKENIZER = "checkpoints", "tokenizer"  # subdirectories of a run
HUGGING_FACE, RUN, HEAD = "hf", "run", "head"  # layouts


@dataclasses.dataclass(frozen=True)
class Model:
    """A model for decoding.

    Attributes:
      cfg: config, with the dtypes of `policy`, or of `head` if there is no policy.
      policy, head: parameters; None: absent.
      tokenizer: directory of the tokenizer's files, or checkpoint that holds it; None: absent.
      stored: dtype of the checkpoint; None: it was not read.
    """

    cfg: ModelConfig
    policy: Params | None
    head: Params | None
    tokenizer: Path | None
    stored: str | None = None


def describe(cfg: ModelConfig, tokenizer: str | Path | None, with_head: bool = True) -> dict:
    """Returns the metadata of a checkpoint, with which it can be read without its run.

    Args:
      cfg: config of the model.
      tokenizer: directory of the tokenizer's files, relative to that of the run; None: no
        tokenizer.
      with_head: whether the checkpoint holds a draft head, in the order of `cfg.mtp_concat`.
    """
    config = config_json(cfg, with_head, cfg.run.param_dtype)
    if with_head:
        config[MTP_KEY] = mtp_json(cfg)  # the order in memory
    return {
        "config": config,
        "generation": dict(cfg.generation),
        "tokenizer": None if tokenizer is None else str(tokenizer),
    }


def load_model(
    path: str | Path,
    dtype: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    step: int | None = None,
    load_format: str = AUTO,
) -> Model:
    """Loads a model in any layout that specjax reads.

    Args:
      path: a Hugging Face directory, a GGUF file or a directory with one, the directory of a run
        of `train.rl` or `train.sft`, or the directory of its checkpoints.
      dtype: dtype of the parameters; that of the files by default. `auto`: see `resolve_dtype`.
      mesh: mesh to put the parameters on, see `specjax.parallel.sharding`.
      step: step of a run; None: the newest.
      load_format: see `specjax.weights.open_checkpoint`; `auto` also loads runs.

    Raises:
      CheckpointError, UnsupportedModelError: the checkpoint cannot be read, or has no config.
    """
    path = Path(path)
    if load_format == AUTO:
        _require_checkpoint(path)
    platform = sharding.platform_of(mesh)
    if load_format != AUTO or layout_of(path) != RUN:
        if step is not None:
            raise CheckpointError(f"{path} is no training run and has no step {step}")
        stored = hf.read_config(path, load_format).run.param_dtype
        dtype = dtype and resolve_dtype(dtype, stored, platform)
        cfg, policy, head = hf.load_checkpoint(path, dtype, mesh, load_format=load_format)
        place = path if open_checkpoint(path, load_format).has_tokenizer else None
        return Model(cfg, policy, head, place, stored)
    if distributed.is_several():
        raise CheckpointError(
            f"{path} is an Orbax checkpoint; a job of several processes reads its model from a "
            f"Hugging Face directory, which `specjax convert {path} DIR` makes of it"
        )
    policy, head, meta = load_weights(path, step)
    if policy is None:
        raise CheckpointError(f"{path} holds a draft head alone; expected a policy")
    cfg, policy, head = fitted(path, config_in(path, meta), policy, head)
    stored = cfg.run.param_dtype
    if dtype is not None:
        dtype = resolve_dtype(dtype, stored, platform)
        policy, head = jax.tree.map(lambda x: x.astype(dtype), (policy, head))
        cfg = cfg.running(param_dtype=dtype, compute_dtype=dtype)
    if mesh is not None:
        trees = policy, head
        policy, head = sharding.put(trees, sharding.param_shardings(mesh, trees, weight_axes(cfg)))
    return Model(cfg, policy, head, tokenizer_in(path, meta), stored)


def load_weights(
    path: str | Path, step: int | None = None, head_alone: bool = False
) -> tuple[Params | None, Params | None, dict[str, Any]]:
    """Reads the policy and the draft head of a training run, or the head alone.

    Args:
      path: the directory of a run, or of its checkpoints (`<out>/checkpoints`), or of a head
        (`save_draft`).
      step: step of the run; None: the newest.
      head_alone: whether to read the head only; the policy is then None.

    Returns:
      (policy, head, meta), in the dtypes they were saved with; None: absent.

    Raises:
      CheckpointError: the checkpoint is absent, damaged, or holds no weights.
    """
    from specjax.checkpoint.store import Checkpointer, load_draft

    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory; expected an Orbax checkpoint")
    if layout_of(path) != RUN:
        if step is not None:
            raise CheckpointError(f"{path} holds no checkpoints of a run, and so no step {step}")
        head, meta = load_draft(path)
        return None, head, meta
    path = _checkpoints(path)
    with Checkpointer(path) as checkpoints:
        chosen, record = _chosen(path, checkpoints.all_steps(), step)
        saved = record["trees"]
        names = ("draft",) if head_alone else ("policy", "draft")
        wanted = {name: _shapes(saved[name]) for name in names if name in saved}
        if not wanted:
            raise CheckpointError(
                f"{path / str(chosen)} holds {sorted(saved)}; expected {' or '.join(names)}"
            )
        trees, meta = checkpoints.restore(chosen, wanted)
    return trees.get("policy"), trees.get("draft"), meta


def _chosen(path: Path, steps: list[int], step: int | None) -> tuple[int, dict[str, Any]]:
    """Chooses the step to read; returns it and the record of its checkpoint."""
    from specjax.checkpoint.store import read_record

    if not steps:
        raise CheckpointError(f"{path} holds no complete checkpoint")
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise CheckpointError(f"{path} holds no step {chosen}, only {steps}")
    record, problem = read_record(path / str(chosen))
    if record is None:
        raise CheckpointError(f"checkpoint {path / str(chosen)} cannot be read: {problem}")
    return chosen, record


def layout_of(path: Path) -> str:
    """Returns the layout of a checkpoint.

    Returns:
      `RUN`: the directory of a run, or of its checkpoints. `HEAD`: a directory of `save_draft`.
      `HUGGING_FACE`: a format of `specjax.weights`, other safetensors files, or nothing.
    """
    if not path.is_dir() or recognised(path):
        return HUGGING_FACE
    if (path / CHECKPOINTS).is_dir() or any(child.name.isdigit() for child in path.iterdir()):
        return RUN
    return HUGGING_FACE if any(path.glob("*.safetensors*")) else HEAD


def read_config(path: str | Path) -> ModelConfig:
    """Reads the config of a model without its weights.

    Args:
      path: a path as for `load_model`; for a run, the newest checkpoint is read.

    Raises:
      CheckpointError, UnsupportedModelError: in the cases of `load_model`.
    """
    path = Path(path)
    _require_checkpoint(path)
    if layout_of(path) != RUN:
        return hf.read_config(path)
    return config_in(path, _newest(path)["meta"])


def tokenizer_dir(path: str | Path) -> Path:
    """Returns the directory of the tokenizer of a model that `load_model` can load.

    Raises:
      CheckpointError: there is no tokenizer.
    """
    path = Path(path)
    if layout_of(path) != RUN:
        return path
    found = tokenizer_in(path, _newest(path)["meta"])
    if found is None:
        raise CheckpointError(f"{path} has no tokenizer; copy its files to {path / TOKENIZER}")
    return found


def _newest(path: Path) -> dict[str, Any]:
    """Returns the record of the newest checkpoint of a run."""
    inside = _checkpoints(path)
    steps = sorted(int(child.name) for child in inside.iterdir() if child.name.isdigit())
    return _chosen(inside, steps, None)[1]


def config_in(path: Path, meta: Mapping[str, Any]) -> ModelConfig:
    """Returns the config in the metadata of the checkpoint at `path`.

    Raises:
      CheckpointError: there is no config, as in checkpoints of older versions.
    """
    if "config" not in meta:
        raise CheckpointError(
            f"{path} has no config of its model; name a Hugging Face directory of that model "
            "(specjax convert --like DIR makes one)"
        )
    return config_of(path / CONFIG, meta["config"], meta.get("generation", {}))


def tokenizer_in(path: Path, meta: Mapping[str, Any]) -> Path | None:
    """Returns the directory of the tokenizer of the checkpoint at `path`.

    Raises:
      CheckpointError: the tokenizer was moved or deleted after the checkpoint was written.
    """
    if "tokenizer" in meta and meta["tokenizer"] is None:
        return None
    run = _checkpoints(path).absolute().parent
    places = [run / meta.get("tokenizer", TOKENIZER), run / TOKENIZER, run / "hf"]
    found = next((place for place in places if has_tokenizer(place)), None)
    if found is None:
        raise CheckpointError(
            f"{path}: no tokenizer in {', '.join(dict.fromkeys(map(str, places)))}; copy its "
            "files to one of these"
        )
    return found


def has_tokenizer(path: Path) -> bool:
    return open_checkpoint(path).has_tokenizer


def _require_checkpoint(path: Path) -> None:
    """Raises `CheckpointError` for a path that cannot hold a policy."""
    if not path.is_dir() and not recognised(path):
        raise CheckpointError(
            f"{path} is no directory; expected a checkpoint directory or a GGUF file"
        )


def fitted(
    where: object, cfg: ModelConfig, policy: Params | None, head: Params | None
) -> tuple[ModelConfig, Params | None, Params | None]:
    """Converts a checkpoint's weights to the model's containers, and sets the config's dtypes.

    Raises:
      CheckpointError: names or shapes are not those of `cfg`.
    """
    if head is not None:
        cfg = cfg.replace(mtp_num_layers=len(head["blocks"]))
        like = jax.eval_shape(lambda: init_head_params(cfg))
        head = fitted_to(like, head, f"{where}: the draft head")
    if policy is not None:
        like = jax.eval_shape(lambda: init_params(cfg))
        policy = fitted_to(like, policy, f"{where}: the policy")
    dtype = jax.tree.leaves(head if policy is None else policy)[0].dtype.name
    return cfg.running(param_dtype=dtype, compute_dtype=dtype), policy, head


def fitted_to(like: Params, tree: Params, what: str) -> Params:
    """Converts a tree to the containers of another one.

    Args:
      like: the tree with the containers.
      tree: the tree with the arrays.
      what: name of the tree in the error.

    Raises:
      CheckpointError: the trees have different names or shapes.
    """
    there, wanted = named_leaves(tree), named_leaves(like)
    for name in sorted(there.keys() | wanted.keys()):
        got, expected = (
            list(leaves[name].shape) if name in leaves else "nothing" for leaves in (there, wanted)
        )
        if got != expected:
            raise CheckpointError(
                f"{what} is of another model: {name} is {got}, expected {expected}"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [there[name] for name in wanted])


def _checkpoints(path: Path) -> Path:
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path


def _shapes(entries: Mapping[str, Any]) -> Params:
    return nest(
        {name: jax.ShapeDtypeStruct(tuple(e["shape"]), e["dtype"]) for name, e in entries.items()}
    )
