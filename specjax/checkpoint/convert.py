"""Conversion of checkpoints between Hugging Face directories and the Orbax layout of runs.

    Hugging Face                             Orbax
    config.json, model.safetensors,    <->   checkpoints/STEP, tokenizer/     a run
      mtp.safetensors, tokenizer files

A head alone is a file `mtp.safetensors`. One in a directory of its own, such as EAGLE-3, is written
in the layout of speculators, whatever its own.

Weights keep every bit unless another dtype is asked for. The target is written under a hidden name
and renamed when it is complete.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import jax
import safetensors

from specjax.checked_json import CheckpointError
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.draft_files import find_draft, save_draft_files
from specjax.checkpoint.huggingface import copy_tokenizer, dtype_name, replacing
from specjax.checkpoint.store import Checkpointer
from specjax.checkpoint.weights import (
    CHECKPOINTS,
    HUGGING_FACE,
    TOKENIZER,
    Model,
    cast_floats,
    config_in,
    describe,
    describe_head,
    fitted,
    has_tokenizer,
    head_beside,
    layout_of,
    load_model,
    load_weights,
    read_draft,
    save_model,
    tokenizer_in,
)
from specjax.config.dtype import DTYPES
from specjax.drafts.mtp import HEAD_SWITCHES
from specjax.error_text import first_line
from specjax.hub import find_model
from specjax.weights import AUTO, load_tokenizer, mxfp4, open_checkpoint, recognised
from specjax.weights.safetensors import CONFIG, HEAD_FILE, INDEX, WEIGHTS, open_files

SPECULATORS = "speculators"  # the layout in which a head in files of its own is written


@dataclasses.dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
      target: directory that was written.
      layout: `hf` or `orbax`; of a head in files of its own `speculators`.
      parameters: number of parameters of `policy` and `head`.
      dtype: dtype on disk.
      step: step of the run.
      tokenizer: whether the tokenizer's files were copied.
    """

    target: Path
    layout: str
    parameters: dict[str, int]
    dtype: str
    step: int
    tokenizer: bool

    def __str__(self) -> str:
        parts = [f"{name} {count / 1e6:.2f} M" for name, count in self.parameters.items()]
        if self.tokenizer:
            parts.append("tokenizer")
        names = {"hf": "Hugging Face", "orbax": f"Orbax, step {self.step}"}
        name = names.get(self.layout, f"layout {self.layout}")
        return f"{self.target}: {', '.join(parts)} ({self.dtype}, {name})"


def convert(
    source: str | Path,
    target: str | Path,
    to: str | None = None,
    what: str | None = None,
    step: int | None = None,
    dtype: str | None = None,
    like: str | Path | None = None,
    revision: str | None = None,
    load_format: str = AUTO,
) -> Converted:
    """Converts a checkpoint to another layout.

    Args:
      source: a Hugging Face directory or id, a GGUF file, the directory of a run or of its
        checkpoints, a draft head's safetensors file, or the directory of a head in files of its
        own, such as EAGLE-3.
      target: the directory to write.
      to: `hf` or `orbax`, or `speculators` for such a head; None: the other one than the source's.
      what: `policy`, `head` or `both`; None: all that the source has.
      step: step of a run; None: the newest.
      dtype: dtype on disk; None: the source's. `mxfp4`, to `hf` alone: see `save_checkpoint`.
      like: a Hugging Face directory or id with the config and the tokenizer, for sources that have
        none. A head in files of its own needs it: the config of its policy.
      revision: branch, tag or commit of a source that is a Hugging Face id.
      load_format: format of the source, see `specjax.weights.open_checkpoint`.

    Raises:
      CheckpointError, UnsupportedModelError: the source cannot be read, the target exists, or the
        disk is full. The target is then unchanged.
    """
    target = Path(target).absolute()
    source, like = find_model(source, revision), None if like is None else find_model(like)
    is_draft = load_format == AUTO and find_draft(source) is not None
    layouts = (SPECULATORS,) if is_draft else ("hf", "orbax")
    if to not in (None, *layouts):
        what_it_is = "a draft head in files of its own" if is_draft else "no such head"
        raise CheckpointError(
            f"{source} holds {what_it_is}, expected --to {' or '.join(layouts)}, got {to}"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists; choose another target, or remove it")
    written, packs = dtype, dtype == mxfp4.METHOD
    dtype = None if packs else dtype and dtype_name(dtype)
    foreign = load_format != AUTO or (recognised(source) and not (source / CONFIG).exists())
    if not foreign:
        model, found = _read(source, what, step, like, dtype)
        if model.policy is None and to == "orbax":
            raise CheckpointError(
                f"a head alone is written as a file of safetensors, got --to {to}"
            )
        is_new = layout_of(source) == HUGGING_FACE and model.policy is not None
        to = to or (SPECULATORS if is_draft else "orbax" if is_new and not packs else "hf")
        return _write(target, to, model, found, written)
    to = to or "hf"
    if what in ("head", "both"):
        raise CheckpointError(f"{source} holds no head, expected {what}")
    with tempfile.TemporaryDirectory() as files:
        model = load_model(source, dtype, step=step, load_format=load_format)
        if model.tokenizer is not None:
            load_tokenizer(source, load_format=load_format).save_pretrained(files)
            model = dataclasses.replace(model, tokenizer=Path(files))
        return _write(target, to, model, 0, written)


def _write(target: Path, to: str, model: Model, found: int, dtype: str | None = None) -> Converted:
    """Writes the parts of a model in a layout; `found` is their step."""
    if dtype == mxfp4.METHOD and (to != "hf" or model.policy is None):
        raise CheckpointError(
            f"dtype {dtype} is that of a policy's experts: use --to hf and a source with a policy"
        )
    if model.tokenizer is not None:
        load_tokenizer(model.tokenizer, required=False)  # raises if it is damaged
    dtype = dtype or model.cfg.run.param_dtype
    trees = {"policy": model.policy, "head": model.head and model.head.params}
    try:
        write = _write_orbax if to == "orbax" else _write_hf
        write(target, model, dtype, found)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"writing {target} failed, and nothing was left there: {first_line(error)}"
        ) from error
    counts = {
        name: sum(x.size for x in jax.tree.leaves(tree))
        for name, tree in trees.items()
        if tree is not None
    }
    copied = model.tokenizer is not None and model.policy is not None
    return Converted(target, to, counts, dtype, found, copied)


# --- in -----------------------------------------------------------------------------------------


def _read(source: Path, what: str | None, step: int | None, like, dtype) -> tuple[Model, int]:
    """Reads the parts that `what` names; returns them and their step."""
    if layout_of(source) == HUGGING_FACE:
        if step is not None:
            raise CheckpointError(f"{source} is no training run and has no step {step}")
        model, step = _read_hf(source, what, like, dtype), 0
    else:
        model, step = _read_orbax(source, what, step, like, dtype)
    for name in ("policy", "head"):
        if what in (name, "both") and getattr(model, name) is None:
            raise CheckpointError(f"{source} holds no {name}, expected {what}")
    return model, step


def _read_hf(source: Path, what: str | None, like, dtype: str | None) -> Model:
    is_draft = find_draft(source) is not None
    alone = is_draft or not recognised(source)
    files = (WEIGHTS, INDEX)
    if alone and not is_draft and source.is_dir() and any((source / f).exists() for f in files):
        hf.read_config(source)  # raises the error: this file is no head
    if alone and what in ("policy", "both"):
        raise CheckpointError(f"{source} holds no policy, expected {what}")
    if alone and like is None:
        raise CheckpointError(
            f"{source} holds only a draft head; expected --like DIR, the Hugging Face directory "
            "of its policy"
        )
    cfg = hf.read_config(like if alone else source)
    if dtype is None:  # config.json may name another one
        names = _dtypes_of(source)
        dtype = _only(source, names & set(DTYPES) if is_draft else names)
    cfg = cfg.running(param_dtype=dtype, compute_dtype=dtype)
    if alone or what == "head":
        beside = None if alone or cfg.mtp_num_layers else head_beside(source, cfg)
        if beside is not None:
            return Model(cfg, None, beside, None)
        if not alone and not cfg.mtp_num_layers:
            raise CheckpointError(f"{source} holds no head, expected one")
        head = read_draft(source, cfg)
        return Model(head.source.target(cfg), None, head, None)
    model = load_model(source, dtype)
    return dataclasses.replace(model, head=None) if what == "policy" else model


def _dtypes_of(source: Path) -> set[str]:
    """Returns the dtypes of the tensors in the files."""
    if recognised(source):
        return {tensor.dtype for tensor in open_checkpoint(source).tensors().values()}
    files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
    return {tensor.dtype for file in files for tensor in open_files([file])[0].values()}


def _only(source: Path, names: set[str]) -> str:
    """Returns the only one of some dtypes; raises CheckpointError if there are several."""
    if len(names) != 1 or not names <= set(DTYPES):
        raise CheckpointError(
            f"{source} has tensors of {', '.join(sorted(names)) or 'no dtype'}; expected one of "
            f"{', '.join(DTYPES)}: choose it with --dtype"
        )
    return min(names)


def _read_orbax(
    source: Path, what: str | None, step: int | None, like, dtype: str | None
) -> tuple[Model, int]:
    policy, head, meta = load_weights(source, step, head_alone=what == "head")
    head = None if what == "policy" else head
    if policy is None and head is None:
        raise CheckpointError(f"{source} holds no {what}")
    if dtype is None:
        _only(source, {leaf.dtype.name for leaf in jax.tree.leaves((policy, head))})
    if like is None:
        cfg = config_in(source, meta)
    else:  # with the head's settings from the metadata
        cfg = hf.read_config(like).replace(**{n: meta[n] for n in HEAD_SWITCHES if n in meta})
    cfg, policy, head = fitted(source, cfg, policy, head, meta)
    place = None
    if like is not None and has_tokenizer(Path(like)):
        place = Path(like)
    elif policy is not None:
        place = tokenizer_in(source, meta)
    return Model(cfg, policy, head, place), int(meta.get("step", 0))


# --- out ----------------------------------------------------------------------------------------


def _write_hf(target: Path, model: Model, dtype: str, step: int) -> None:
    if model.policy is None and not model.head.source.in_policy:
        try:
            save_draft_files(target, *model.head, dtype)
        except ValueError as error:
            raise CheckpointError(f"the head cannot be written as {target}: {error}") from error
        return
    if model.policy is None:
        with replacing(target) as partial:
            hf.save_head(partial / HEAD_FILE, model.cfg, model.head.params, dtype)
        return
    save_model(target, model.cfg, model.policy, model.head, model.tokenizer, dtype)


def _write_orbax(target: Path, model: Model, dtype: str, step: int) -> None:
    cfg = model.cfg.running(param_dtype=dtype)
    policy = cast_floats(model.policy, dtype, model.cfg)
    head = model.head and cast_floats(model.head.params, dtype, model.head.source.network)
    place = None if model.tokenizer is None else TOKENIZER
    about = describe_head(model.head and model.head._replace(params=head))
    meta = {"step": step, **describe(cfg, place, about)}
    with replacing(target) as partial:
        trees = {"policy": policy} | ({} if head is None else {"draft": head})
        with Checkpointer(partial / CHECKPOINTS) as checkpoints:
            checkpoints.save(step, trees, meta, block=True)
        if place is not None:
            (partial / place).mkdir()
            copy_tokenizer(model.tokenizer, partial / place)
