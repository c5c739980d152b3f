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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checked_json import CheckpointError
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.draft_files import (
    FilesAt,
    class_of,
    find_draft,
    load_draft_files,
    save_draft_files,
)
from specjax.checkpoint.format import DRAFT_KEY, named_leaves
from specjax.checkpoint.huggingface import MTP_KEY, config_json, config_of, mtp_json
from specjax.checkpoint.huggingface_names import raise_problems, shape_problems
from specjax.config import ModelConfig, RunConfig
from specjax.config.dtype import resolve_dtype
from specjax.drafts.head_config import rows_of
from specjax.drafts.mtp import HEAD_SWITCHES
from specjax.interfaces import Draft
from specjax.models.rows import fixed_dtypes, param_axes
from specjax.models.transformer import Params, init_params
from specjax.parallel import distributed, sharding
from specjax.program_cache import keep_programs
from specjax.registry import DRAFTS
from specjax.weights import AUTO, open_checkpoint, recognised
from specjax.weights.matrix import PLAIN, Products
from specjax.weights.safetensors import CONFIG

log = logging.getLogger(__name__)

CHECKPOINTS, TOKENIZER = "checkpoints", "tokenizer"  # subdirectories of a run
HUGGING_FACE, RUN = "hf", "run"  # layouts
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

    A head that the config of its policy describes has its switches alone, for what is saved without
    the policy. For another head the metadata are the content of the config.json and the tensors of
    its files, with the values of fixed integers, such as token ids.

    Returns:
      the metadata; None: there is no head.
    """
    if head is None:
        return None
    source = head.source
    if source.in_policy:
        return {name: getattr(source.network, name) for name in HEAD_SWITCHES}
    cls, kind = type(source), _kind_of(source)
    if kind is None:
        return {DRAFT_KEY: {"kind": f"{cls.__module__}:{cls.__qualname__}"}}
    dtype = float_dtype(head.params)
    config, written = source.saved(dtype)
    fixed = {name: head.params[name] for name in source.fixed & head.params.keys()}
    fixed = {name: np.asarray(a) for name, a in fixed.items() if _is_integer(a)}
    values, tensors = written.stored(fixed) if fixed else {}, {}
    for name, row in rows_of(written.rows()):
        shape = list(row.shape[::-1] if row.stored.transpose else row.shape)
        tensors[row.stored.name] = {"shape": shape, "dtype": dtype}
        if name in values:
            array = np.asarray(values[name])
            packed = base64.b64encode(zlib.compress(array.tobytes())).decode()
            tensors[row.stored.name] |= {"dtype": array.dtype.name, "values": packed}
    return {DRAFT_KEY: {"kind": kind, "config": config, "tensors": tensors}}


def _kind_of(source: Draft) -> str | None:
    """Returns the name of a source's class in `DRAFTS`; None: it is a class of the user's own."""
    return next((name for name in DRAFTS.names if DRAFTS.named(name) is type(source)), None)


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


class _DescribedFiles(FilesAt):
    """The files of a head that metadata describe, see `describe_head`."""

    file = property(lambda self: self.path)

    def __init__(self, path: object, about: Mapping[str, Any]):
        self.path, self._about, self.mesh = path, about, None

    def config(self) -> dict[str, Any]:
        return self._about["config"]

    def tensors(self, required: bool = True) -> dict[str, _Described]:
        return {name: _Described.of(entry) for name, entry in self._about["tensors"].items()}


def source_in(path: object, meta: Mapping[str, Any], target: ModelConfig) -> Draft:
    """Makes the source of a checkpoint's head again.

    Args:
      path: path of the checkpoint, for messages.
      meta: metadata of the checkpoint.
      target: config of the policy that the head drafts for; the head gets its dtypes.

    Raises:
      CheckpointError: the metadata are those of a head for another policy, or of a class of the
        user's own, which a checkpoint cannot name.
    """
    kind, about = kind_in(path, meta), meta.get(DRAFT_KEY)
    if about is not None:
        return kind.read(_DescribedFiles(path, about), target)
    switches = vars(config_in(path, meta)) if "config" in meta else meta
    target = target.replace(**{n: switches[n] for n in HEAD_SWITCHES if n in switches})
    return kind.read(None, target)


def kind_in(path: object, meta: Mapping[str, Any]) -> type[Draft]:
    """Returns the class of the head that metadata describe; raises as `source_in`."""
    if not _is_known(meta):
        raise CheckpointError(_unknown(path, meta))
    if DRAFT_KEY in meta:
        return DRAFTS.named(meta[DRAFT_KEY]["kind"])
    return class_in_policy()


def class_in_policy() -> type[Draft]:
    """Returns the class in `DRAFTS` whose weights lie among those of its policy."""
    return next(kind for kind in DRAFTS.all() if kind.in_policy)


def source_of_policy(cfg: ModelConfig) -> Draft | None:
    """Returns what drafts with the head that a policy's config describes; None: it has none."""
    sources = (kind.of_policy(cfg) for kind in DRAFTS.all())
    return next((source for source in sources if source is not None), None)


def _is_known(meta: Mapping[str, Any]) -> bool:
    """Returns whether metadata are of a head with a class in `DRAFTS`, or of none."""
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


def cast_floats(params: Params, dtype: str, cfg: ModelConfig | None = None) -> Params:
    """Converts parameters to a dtype, but for arrays of integers, such as token ids.

    Args:
      cfg: config of the model, some of whose arrays may always have another dtype.
    """
    fixed = {} if cfg is None else fixed_dtypes(cfg)

    def one(path: tuple, array: Any) -> Any:
        kind = fixed.get(getattr(path[-1], "key", None), dtype)
        return array if _is_integer(array) else array.astype(kind)

    return jax.tree_util.tree_map_with_path(one, params)


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
    """Returns whether a policy's directory holds a head in `draft`, as `save_model` writes it.

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


# --- what drafts, apart from its policy -----------------------------------------------------------


def head_dir(path: Path, target: ModelConfig | None) -> Path:
    """Returns the directory of the head in that of a policy, if it has one, else the path itself.

    A policy of another width than the target's is a model, which drafts without its head.
    """
    if layout_of(path) != HUGGING_FACE or not path.is_dir() or not holds_a_head(path):
        return path
    fits = target is None or hf.read_config(path).hidden_size == target.hidden_size
    return path / DRAFT if fits else path


def kind_of(path: Path, target: ModelConfig | None = None) -> type[Draft]:
    """Returns the class that drafts from files, which the files decide.

    Args:
      path: a file or directory.
      target: config of the policy that it drafts for; None: unknown.

    Raises:
      CheckpointError, UnsupportedModelError: the files are those of no draft.
    """
    path = head_dir(path, target)
    if layout_of(path) != HUGGING_FACE:
        return kind_in(path, _newest(path)["meta"])
    return class_of(FilesAt(path), target)


def read_draft(
    path: Path,
    target: ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
    tokenizer: Any = None,
    weights: bool = True,
) -> Head:
    """Reads what drafts from a path.

    Args:
      path: a file or directory of a draft or a model, or the directory of a training run, of which
        the newest checkpoint is read.
      target: config of the policy; weights are in its `run.param_dtype`, those of a model in its
        `run.compute_dtype`.
      mesh: mesh to place weights on.
      tokenizer: tokenizer of the policy, which a model must share; None: there is none.
      weights: whether to read weights; else there are shapes in their place.

    Raises:
      CheckpointError: the file is damaged, holds no head, or does not fit the policy.
    """
    path = head_dir(path, target)
    if layout_of(path) == HUGGING_FACE:
        files = FilesAt(path, mesh, tokenizer)
        source = class_of(files, target).read(files, target)
        return Head(source, source.load(files) if weights else head_shapes_of(source))
    source = source_in(path, _newest(path)["meta"], target)
    wanted = head_shapes_of(source)
    if not weights:
        return Head(source, wanted)
    _, params, _ = load_weights(path, head_alone=True)
    if params is None:
        raise CheckpointError(f"{path} holds no draft head; expected one")
    params = fitted_to(wanted, params, f"the draft head in {path}")
    return placed(Head(source, cast_floats(params, target.run.param_dtype, source.network)), mesh)


# --- models ---------------------------------------------------------------------------------------


def load_model(
    path: str | Path,
    dtype: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    step: int | None = None,
    load_format: str = AUTO,
    products: Products = PLAIN,
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
      products: see `specjax.checkpoint.huggingface.load_checkpoint`; a run's weights stay arrays.

    Raises:
      CheckpointError, UnsupportedModelError: the checkpoint cannot be read, or has no config.
    """
    keep_programs()
    path = Path(path)
    if load_format == AUTO:
        _require_checkpoint(path)
    platform = sharding.platform_of(mesh)
    if load_format != AUTO or layout_of(path) != RUN:
        if step is not None:
            raise CheckpointError(f"{path} is no training run and has no step {step}")
        stored = hf.read_config(path, load_format).run.param_dtype
        dtype = dtype and resolve_dtype(dtype, stored, platform)
        cfg, policy, params = hf.load_checkpoint(
            path, dtype, mesh, load_format=load_format, products=products
        )
        place = path if open_checkpoint(path, load_format).has_tokenizer else None
        head = head_beside(path, cfg, mesh)
        head = head if params is None else Head(source_of_policy(cfg), params)
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
        policy = cast_floats(policy, dtype, cfg)
        params = head and cast_floats(head.params, dtype, head.source.network)
        head = head and Head(run_as(head.source, cfg.run), params)
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
    """Writes a policy in the layout of Hugging Face, with a head that its config describes.

    A head of another kind has a directory of its own in it, `draft`. The head of a class of the
    user's own is not written, for no layout is known for it, and neither is one with a setting for
    which there is no key.

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
    inside = head.params if head is not None and head.source.in_policy else None
    hf.save_checkpoint(path, cfg, policy, inside, tokenizer, dtype)
    if head is None or inside is not None:
        return True
    if _kind_of(head.source) is None or head.source.unwritable():
        return False
    save_draft_files(Path(path) / DRAFT, *head, dtype or cfg.run.param_dtype)
    return True


def load_weights(
    path: str | Path, step: int | None = None, head_alone: bool = False
) -> tuple[Params | None, Params | None, dict[str, Any]]:
    """Reads the policy and the draft head of a training run, or the head alone.

    Args:
      path: the directory of a run, or of its checkpoints (`<out>/checkpoints`).
      step: step of the run; None: the newest.
      head_alone: whether to read the head only; the policy is then None.

    Returns:
      (policy, head, meta), in the dtypes they were saved with; None: absent.

    Raises:
      CheckpointError: the checkpoint is absent, damaged, or holds no weights.
    """
    from specjax.checkpoint.store import Checkpointer

    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory; expected an Orbax checkpoint")
    with Checkpointer(_checkpoints(path)) as checkpoints:
        names = ("draft",) if head_alone else ("policy", "draft")
        trees, meta = checkpoints.restore(step, names)
    return trees.get("policy"), trees.get("draft"), meta


def layout_of(path: Path) -> str:
    """Returns the layout of a checkpoint.

    Returns:
      `RUN`: the directory of a run, or of its checkpoints.
      `HUGGING_FACE`: a format of `specjax.weights`, other safetensors files, or nothing.
    """
    if not path.is_dir() or recognised(path):
        return HUGGING_FACE
    if (path / CHECKPOINTS).is_dir() or any(child.name.isdigit() for child in path.iterdir()):
        return RUN
    return HUGGING_FACE


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
        if DRAFT in record["trees"] and _is_known(record["meta"]):
            return source_in(path, record["meta"], cfg)
        return None
    own = source_of_policy(cfg)
    return own or (
        read_draft(path / DRAFT, cfg, weights=False).source if holds_a_head(path) else None
    )


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
    from specjax.checkpoint.store import read_record

    inside = _checkpoints(path)
    steps = [int(child.name) for child in inside.iterdir() if child.name.isdigit()]
    if not steps:
        raise CheckpointError(f"{inside} holds no complete checkpoint")
    newest = inside.absolute() / str(max(steps))
    record, problem = read_record(newest)
    if record is None:
        raise CheckpointError(f"checkpoint {newest} cannot be read: {problem}")
    return record


def config_in(path: Path, meta: Mapping[str, Any]) -> ModelConfig:
    """Returns the config in the metadata of the checkpoint at `path`.

    Raises:
      CheckpointError: there is no config.
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
    cfg, loaded = cfg.running(param_dtype=dtype, compute_dtype=dtype), None
    if head is not None and policy is not None and not _is_known(meta):
        log.warning("%s; only the policy is loaded", _unknown(where, meta))
    elif head is not None:
        source = source_in(where, meta, cfg)
        cfg = source.target(cfg)
        params = fitted_to(head_shapes_of(source), head, f"{where}: the draft head")
        loaded = Head(source, params)
    if policy is not None:
        like = jax.eval_shape(lambda: init_params(cfg))
        policy = fitted_to(like, policy, f"{where}: the policy")
    return cfg, policy, loaded


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
    shapes = {name: leaf.shape for name, leaf in wanted.items()}
    raise_problems(what, shape_problems(shapes, there, there))
    return jax.tree.unflatten(jax.tree.structure(like), [there[name] for name in wanted])


def _checkpoints(path: Path) -> Path:
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
