"""Loads models for decoding, from checkpoints of training runs and all other layouts.

The metadata of a run's checkpoint has the model's config, as the content of a config.json, and the
path of the tokenizer (`describe`). Orbax takes seconds to import, so it is imported only for its
own checkpoints.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import logging
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checked_json import CheckpointError
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.draft_files import find_draft, load_draft_files, save_draft_files
from specjax.checkpoint.format import DRAFT_KEY, named_leaves, nest
from specjax.checkpoint.huggingface import MTP_KEY, config_json, config_of, mtp_json
from specjax.config import ModelConfig, RunConfig
from specjax.config.dtype import resolve_dtype
from specjax.drafts.mtp import MTPSource
from specjax.interfaces import Draft, Param
from specjax.models.rows import param_axes
from specjax.models.transformer import Params, init_params
from specjax.parallel import distributed, sharding
from specjax.registry import DRAFTS
from specjax.weights import AUTO, open_checkpoint, recognised
from specjax.weights.safetensors import CONFIG

log = logging.getLogger(__name__)

# Keys in the metadata of a head about the model that it drafts for.
HEAD_SWITCHES = ("mtp_num_layers", "mtp_concat", "mtp_target_hidden", "mtp_recycle")
CHECKPOINTS, TOKENIZER = "checkpoints", "tokenizer"  # subdirectories of a run
HUGGING_FACE, RUN, HEAD = "hf", "run", "head"  # layouts
# Files of a head that was saved alone.
_ORBAX = ("specjax_manifest.json", "_CHECKPOINT_METADATA", "_METADATA")
DRAFT = "draft"  # directory of a head of its own, in that of its policy


class Head(NamedTuple):
    """A draft head.

    Attributes:
      source: what drafts with it; it says what the head computes.
      params: its parameters, in the layout in which it is trained.
    """

    source: Draft
    params: Params


@dataclasses.dataclass(frozen=True)
class Model:
    """A model for decoding.

    Attributes:
      cfg: config, with the dtypes of `policy`, or of `head` if there is no policy.
      policy: parameters of the policy; None: absent.
      head: the draft head; None: absent.
      tokenizer: directory of the tokenizer's files, or checkpoint that holds it; None: absent.
      stored: dtype of the checkpoint; None: it was not read.
    """

    cfg: ModelConfig
    policy: Params | None
    head: Head | None
    tokenizer: Path | None
    stored: str | None = None


def describe(
    cfg: ModelConfig, tokenizer: str | Path | None, about_head: Mapping[str, Any] | None
) -> dict:
    """Returns the metadata of a checkpoint, with which it can be read without its run.

    Args:
      cfg: config of the model.
      tokenizer: directory of the tokenizer's files, relative to that of the run; None: no
        tokenizer.
      about_head: what `describe_head` returned of the checkpoint's head; None: it has none.
    """
    with_head = about_head is not None and DRAFT_KEY not in about_head
    config = config_json(cfg, with_head, cfg.run.param_dtype)
    if with_head:
        config[MTP_KEY] = mtp_json(cfg)  # the order in memory
    return {
        "config": config,
        "generation": dict(cfg.generation),
        "tokenizer": None if tokenizer is None else str(tokenizer),
        **(about_head or {}),
    }


def describe_head(head: Head | None) -> dict[str, Any] | None:
    """Returns the metadata of a head, of which `source_in` makes its source again.

    An MTP head is described by the config of its model: for it, these are the switches alone. For
    another head they are the content of the config.json and the tensors of its files, with the
    values of fixed integers, such as token ids, and the settings that are read in place of those
    in config.json, because not every layout has a key for each.

    Returns:
      the metadata; None: there is no head.
    """
    if head is None:
        return None
    source = head.source
    if isinstance(source, MTPSource):
        return {name: getattr(source.cfg, name) for name in HEAD_SWITCHES}
    kind = _kind_of(source)
    if kind is None:
        cls = type(source)
        return {DRAFT_KEY: {"kind": f"{cls.__module__}:{cls.__qualname__}"}}
    dtype = float_dtype(head.params)
    plain, settings = source.expressed()
    layout = layout_to_save(plain, dtype)
    config, written = plain.saved(layout, dtype)
    fixed = {name: head.params[name] for name in source.fixed & head.params.keys()}
    fixed = {name: np.asarray(a) for name, a in fixed.items() if _is_integer(a)}
    values = written.stored(fixed) if fixed else {}
    tensors = {}
    for name, row in _rows(written.rows()):
        shape = list(row.shape[::-1] if row.stored.transpose else row.shape)
        tensors[row.stored.name] = {"shape": shape, "dtype": dtype}
        if name in values:
            array = np.asarray(values[name])
            packed = base64.b64encode(zlib.compress(array.tobytes())).decode()
            tensors[row.stored.name] |= {"dtype": array.dtype.name, "values": packed}
    about = {"kind": kind, "layout": layout, "config": config, "tensors": tensors}
    return {DRAFT_KEY: about | {"settings": dict(settings)}}


def layout_to_save(source: Draft, dtype: str) -> str:
    """The layout of a source's files, or another one if that has no key for one of its settings.

    Raises:
      ValueError: no layout has keys for all settings.
    """
    own, problem = getattr(source, "layout", None), None
    for layout in dict.fromkeys((*([own] if own else []), *source.layouts)):
        try:
            source.saved(layout, dtype)
        except ValueError as error:
            problem = problem or error
        else:
            return layout
    raise problem or ValueError(f"{type(source).__name__} has no layout of files")


def _kind_of(source: Draft) -> str | None:
    """The name of a source's class in `DRAFTS`; None: it is a class of the user's own."""
    return next((name for name in DRAFTS.names if DRAFTS.named(name) is type(source)), None)


def _rows(rows: Mapping[Any, Any]) -> Iterator[tuple[Any, Param]]:
    """Yields the rows of a tree, each with the name of its array."""
    for name, row in rows.items():
        if isinstance(row, Mapping):
            yield from _rows(row)
        else:
            yield name, row


def _is_integer(array: Any) -> bool:
    return not jnp.issubdtype(array.dtype, jnp.floating)


class _Described(NamedTuple):
    """A tensor of which metadata hold shape and dtype, and values if it is small."""

    shape: tuple[int, ...]
    dtype: str
    values: np.ndarray | None

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> _Described:
        shape, values = tuple(entry["shape"]), entry.get("values")
        if values is not None:
            raw = zlib.decompress(base64.b64decode(values))
            values = np.frombuffer(raw, entry["dtype"]).reshape(shape)
        return cls(shape, entry["dtype"], values)

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]


def source_in(path: object, meta: Mapping[str, Any], target: ModelConfig) -> Draft | None:
    """Makes the source of a checkpoint's head again.

    Args:
      path: path of the checkpoint, for messages.
      meta: metadata of the checkpoint.
      target: config of the policy that the head drafts for; the head gets its dtypes.

    Returns:
      the source; None: it is an MTP head, which the config in the metadata describes.

    Raises:
      CheckpointError: the metadata are those of a head for another policy, or of a class of the
        user's own, which a checkpoint cannot name.
    """
    kind, about = kind_in(path, meta), meta.get(DRAFT_KEY)
    if about is None:
        return None
    tensors = {name: _Described.of(entry) for name, entry in about["tensors"].items()}
    return kind.read(path, about["config"], tensors, target, about.get("settings"))


def kind_in(path: object, meta: Mapping[str, Any]) -> type[Draft]:
    """Returns the class of the head that metadata describe; raises as `source_in`."""
    about = meta.get(DRAFT_KEY)
    if about is None:
        return MTPSource
    if not _is_known(meta):
        raise CheckpointError(_unknown(path, meta))
    return DRAFTS.named(about["kind"])


def _is_known(meta: Mapping[str, Any]) -> bool:
    """Whether metadata are of no head, of an MTP head, or of one with a class in `DRAFTS`."""
    about = meta.get(DRAFT_KEY)
    return about is None or about["kind"] in DRAFTS


def _unknown(path: object, meta: Mapping[str, Any]) -> str:
    return (
        f"{path} holds a head of the kind {meta[DRAFT_KEY]['kind']!r}, which this version has not; "
        "if it is a class of your own, name it with its path, as module:attribute:PATH"
    )


def run_as(source: Draft, run: RunConfig) -> Draft:
    """Returns a head's source, computing as `run` says: dtypes, kernels, layout of weights."""
    network = source.network
    return source if network is None else source.with_network(network.replace(run=run))


def float_dtype(params: Params) -> str:
    """Returns the dtype of parameters; arrays of integers have their own."""
    return next(a.dtype.name for a in jax.tree.leaves(params) if not _is_integer(a))


def cast_floats(params: Params, dtype: str) -> Params:
    """Converts parameters to a dtype, but for arrays of integers, such as token ids."""
    return jax.tree.map(lambda a: a if _is_integer(a) else a.astype(dtype), params)


def head_shapes_of(source: Draft) -> Params:
    """Returns the shapes of the parameters of a head; one that cannot be made anew has rows."""
    if type(source).init is not Draft.init:
        return jax.eval_shape(functools.partial(source.init, 0))
    dtype = source.network.run.param_dtype

    def walk(rows: Mapping[Any, Any]) -> Params:
        return {
            name: walk(row)
            if isinstance(row, Mapping)
            else jax.ShapeDtypeStruct(row.shape, "int32" if name == "ids" else dtype)
            for name, row in rows.items()
        }

    return walk(source.rows())


def holds_a_head(path: Path) -> bool:
    """Whether a policy's directory holds a head of its own kind, in `draft`, as `save_model` does.

    Raises:
      CheckpointError: its config.json is damaged.
    """
    return recognised(path) and (path / DRAFT / CONFIG).is_file() and bool(find_draft(path / DRAFT))


def head_beside(path: Path, cfg: ModelConfig, mesh: jax.sharding.Mesh | None = None) -> Head | None:
    """Loads the head that `save_model` wrote to `draft` in the directory of its policy.

    Args:
      path: directory of the policy.
      cfg: config of the policy; the head gets its dtypes.
      mesh: mesh to put the head on.

    Returns:
      the head; None: there is none.

    Raises:
      CheckpointError, UnsupportedModelError: as `load_draft_files`.
    """
    return Head(*load_draft_files(path / DRAFT, cfg, mesh)) if holds_a_head(path) else None


def load_model(
    path: str | Path,
    dtype: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    step: int | None = None,
    load_format: str = AUTO,
) -> Model:
    """Loads a model in any layout that specjax reads.

    Args:
      path: a Hugging Face directory (with the head in its `draft`, if there is one), a GGUF file or
        a directory with one, the directory of a run of `train.rl` or `train.sft`, or the directory
        of its checkpoints.
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
        cfg, policy, params = hf.load_checkpoint(path, dtype, mesh, load_format=load_format)
        place = path if open_checkpoint(path, load_format).has_tokenizer else None
        head = head_beside(path, cfg, mesh)
        head = head if params is None else Head(MTPSource(cfg), params)
        return Model(cfg, policy, head, place, stored)
    if distributed.is_several():
        raise CheckpointError(
            f"{path} is an Orbax checkpoint; a job of several processes reads its model from a "
            f"Hugging Face directory, which `specjax convert {path} DIR` makes of it"
        )
    policy, params, meta = load_weights(path, step)
    if policy is None:
        raise CheckpointError(f"{path} holds a draft head alone; expected a policy")
    cfg, policy, head = fitted(path, config_in(path, meta), policy, params, meta)
    stored = cfg.run.param_dtype
    if dtype is not None:
        dtype = resolve_dtype(dtype, stored, platform)
        cfg = cfg.running(param_dtype=dtype, compute_dtype=dtype)
        policy = cast_floats(policy, dtype)
        head = head and Head(run_as(head.source, cfg.run), cast_floats(head.params, dtype))
    if mesh is not None:
        policy = sharding.put(policy, sharding.param_shardings(mesh, policy, param_axes(cfg)))
        head = head and placed(head, mesh)
    return Model(cfg, policy, head, tokenizer_in(path, meta), stored)


def placed(head: Head, mesh: jax.sharding.Mesh | None) -> Head:
    """Puts a head's parameters on the devices of a mesh."""
    if mesh is None:
        return head
    where = sharding.param_shardings(mesh, head.params, head.source.axes())
    return head._replace(params=sharding.put(head.params, where))


def save_model(
    path: str | Path,
    cfg: ModelConfig,
    policy: Params,
    head: Head | None,
    tokenizer: str | Path | None,
    dtype: str | None = None,
) -> bool:
    """Writes a policy in the layout of Hugging Face, with an MTP head among its weights.

    A head of another kind has a directory of its own in it, `draft`. The head of a class of the
    user's own is not written, for no layout is known for it, and neither is one with a setting for
    which no layout has a key.

    Args:
      path: directory to write, see `specjax.checkpoint.huggingface.save_checkpoint`.
      cfg: config of the policy.
      policy: its parameters.
      head: its head; None: it has none.
      tokenizer: directory of the tokenizer's files; None: there are none.
      dtype: dtype on disk; None: that of `cfg`.

    Returns:
      whether the head is written, too; true if there is none.

    Raises:
      CheckpointError: as `save_checkpoint` and `save_draft_files`.
    """
    is_mtp = head is not None and isinstance(head.source, MTPSource)
    hf.save_checkpoint(path, cfg, policy, head.params if is_mtp else None, tokenizer, dtype)
    if head is None or is_mtp:
        return True
    if _kind_of(head.source) is None:
        return False
    dtype = dtype or cfg.run.param_dtype
    try:
        layout = layout_to_save(head.source, dtype)
    except ValueError:
        return False
    save_draft_files(Path(path) / DRAFT, *head, layout, dtype)
    return True


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


def read_head(path: str | Path, cfg: ModelConfig) -> Draft | None:
    """Reads what drafts with the head in a policy's checkpoint, without its weights.

    Args:
      path: a path as for `read_config`.
      cfg: config that `read_config` returned, with the dtypes that the head gets.

    Returns:
      the source; None: `load_model` finds no head there.

    Raises:
      CheckpointError: as `source_in`.
    """
    path = Path(path)
    if layout_of(path) == RUN:
        record = _newest(path)
        if DRAFT not in record["trees"] or not _is_known(record["meta"]):
            return None
        source = source_in(path, record["meta"], cfg)
        if source is not None:
            return source
    elif not cfg.mtp_num_layers and holds_a_head(path):
        reader = open_checkpoint(path / DRAFT)
        kind = find_draft(path / DRAFT)
        return kind.read(path / DRAFT / CONFIG, reader.config(), reader.tensors(), cfg)
    return MTPSource(cfg) if cfg.mtp_num_layers else None


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


def metadata_of(path: Path) -> dict[str, Any]:
    """Returns the metadata of a run's newest checkpoint, or of a head that was saved alone.

    Raises:
      CheckpointError: there is none, or it is damaged.
    """
    from specjax.checkpoint.store import read_record

    if layout_of(path) == RUN:
        return _newest(path)["meta"]
    require_saved_head(path)
    record, problem = read_record(path.absolute())
    if record is None:
        raise CheckpointError(f"draft head {path} is damaged or not a checkpoint: {problem}")
    return record["meta"]


def require_saved_head(path: Path) -> None:
    """Raises `CheckpointError` for a directory that neither Orbax nor Hugging Face wrote."""
    if not any((path / name).exists() for name in _ORBAX):
        raise CheckpointError(
            f"{path} holds no head and no model: there is none of {CONFIG}, *.safetensors, "
            f"{CHECKPOINTS}/ and {_ORBAX[0]}; name the directory of a head or a model, and fetch "
            f"{CONFIG} beside weights such as pytorch_model.bin"
        )


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
    where: object,
    cfg: ModelConfig,
    policy: Params | None,
    head: Params | None,
    meta: Mapping[str, Any],
) -> tuple[ModelConfig, Params | None, Head | None]:
    """Converts a checkpoint's weights to the model's containers, and sets the config's dtypes.

    Args:
      where: path of the checkpoint, for messages.
      cfg: config of the policy.
      policy, head: parameters as `load_weights` returns them; None: absent.
      meta: metadata of the checkpoint.

    Raises:
      CheckpointError: names or shapes are not those of `cfg`, or there is no policy and the head
        is of a class of the user's own. Beside a policy such a head is left out, with a warning.
    """
    dtype = float_dtype(head if policy is None else policy)
    cfg, found = cfg.running(param_dtype=dtype, compute_dtype=dtype), None
    if head is not None and policy is not None and not _is_known(meta):
        log.warning("%s; only the policy is loaded", _unknown(where, meta))
    elif head is not None:
        source = source_in(where, meta, cfg)
        if source is None:
            cfg = cfg.replace(mtp_num_layers=len(head["blocks"]))
            source = MTPSource(cfg)
        params = fitted_to(head_shapes_of(source), head, f"{where}: the draft head")
        found = Head(source, params)
    if policy is not None:
        like = jax.eval_shape(lambda: init_params(cfg))
        policy = fitted_to(like, policy, f"{where}: the policy")
    return cfg, policy, found


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
