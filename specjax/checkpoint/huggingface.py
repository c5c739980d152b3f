"""Hugging Face checkpoint directories in and out, without torch.

Loading first checks every tensor's name and shape from the file headers, then builds one parameter
at a time in the target dtype, and reads only the slices that each device holds, layer by layer:
host memory holds at most one layer of a stacked parameter. Saved directories load in transformers.

config.json has two dialects: transformers 5 writes `dtype`, older files have `torch_dtype`. Both
are read and written. The family defines the layers, see `specjax.models.families`. A
config with a feature that the transformer here does not compute is an error: a checkpoint is run as
exactly what it is, or refused.

For the family MiMo, a draft head is in the model's own files under MiMo's names. transformers has
no head for the other families, so theirs is in a file of its own, `mtp.safetensors`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import gc
import itertools
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax.traverse_util import unflatten_dict

from specjax.checked_json import CheckpointError, Keys, UnsupportedModelError, shown
from specjax.checkpoint.format import named_leaves
from specjax.checkpoint.huggingface_names import (
    HEAD_STYLES,
    Leaf,
    Tensor,
    head_leaves,
    is_head_name,
    is_redundant,
    label_of,
    order_of,
    policy_leaves,
    raise_problems,
    shape_problems,
    style_of,
    style_on_export,
    swap_last,
    tensors_of,
    zero_tensors,
)
from specjax.config import ModelConfig, RunConfig
from specjax.config.dtype import DTYPES
from specjax.interfaces import Stored, Weight
from specjax.models.families import common, family_of
from specjax.models.generation_config import sampling_of
from specjax.models.transformer import Params
from specjax.parallel import sharding
from specjax.registry import FORMATS
from specjax.tokenizer import MORE_TEMPLATES, TOKENIZER_FILES
from specjax.weights import AUTO, fp8, load_tokenizer, mxfp4, open_checkpoint
from specjax.weights.matrix import PLAIN, Products, format_of, is_exact, packed
from specjax.weights.safetensors import (
    CONFIG,
    GENERATION,
    HEAD_FILE,
    INDEX,
    WEIGHTS,
    Safetensors,
    open_files,
)

MTP_KEY = "specjax_mtp"
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")
_BLOCK_ROWS = 4096  # rows that are compared at once
_SMALL_BYTES = 4 << 20  # a stack up to this is read whole: compiling would take longer
_PACKED_BYTES = 32 << 20  # the most weights, in float32, that are packed at once
_OUTPUTS = 128  # outputs are packed in multiples of this, because some formats have squares
log = logging.getLogger(__name__)


# --- config.json ---------------------------------------------------------------------------------


def dtype_name(dtype) -> str:
    """Returns the name of a parameter dtype; takes anything that jax accepts as a dtype."""
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return name


def read_config(path: str | Path, load_format: str = AUTO) -> ModelConfig:
    """Reads the `ModelConfig` of a checkpoint, see `specjax.weights.open_checkpoint`.

    Parameter and compute dtype are both the file's `dtype`, or that of its weights if it names
    none. End-of-sequence ids are those of config.json followed by those that only
    generation_config.json lists.

    Raises:
      CheckpointError: a file is absent or damaged, lacks a key, or a key's value is invalid; the
        message names file and key.
      UnsupportedModelError: the family is unknown, or a feature is not implemented.
    """
    return _config_of(open_checkpoint(path, load_format))


def _config_of(reader: Any) -> ModelConfig:
    return config_of(reader.file, reader.config(), reader.generation(), reader.tensors)


def read_stored_config(path: str | Path) -> ModelConfig:
    """Does what `read_config` does, and ties the embeddings as the weights do, if there are any."""
    cfg, reader = read_config(path), open_checkpoint(path)
    try:
        return _as_stored(Path(path), cfg, _named(cfg, reader.tensors()))
    except (CheckpointError, UnsupportedModelError):
        return cfg  # loading raises the error


def config_of(
    file: Path,
    raw: dict[str, Any],
    generation: Mapping[str, Any],
    tensors: Callable[[], Mapping[str, Any]] = dict,
) -> ModelConfig:
    """Makes the `ModelConfig` from the contents of config.json and generation_config.json.

    Args:
      file: path of config.json or its equivalent, for messages.
      raw: content of config.json.
      generation: content of generation_config.json.
      tensors: reads the weights, of which the first says the dtype where the config does not.

    Raises:
      CheckpointError, UnsupportedModelError: see `read_config`.
    """
    family, beside = family_of(raw.get("model_type"), file), file
    if file.name == CONFIG:
        beside = file.with_name(GENERATION)
    if raw["model_type"] != family.model_type:
        raw = _text_config(file, raw)
    keys = Keys(file, raw)
    cfg = family.read(keys)
    dtype = _dtype(keys) or _stored_dtype(tensors) or "float32"
    mtp = _mtp(keys, family.mtp_key, order_of(family) or cfg.mtp_concat)
    common.refuse_unread(keys, family.inert)
    return cfg.replace(
        **_tokens(keys, Keys(beside, generation), cfg.vocab_size),
        **mtp,
        generation=sampling_of(beside, generation),
        run=RunConfig(param_dtype=dtype, compute_dtype=dtype),
    )


def _text_config(file: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a model's text, and what is said of the whole model beside it.

    The text's values are used where both say something, but tokens that end a sequence are those of
    both, as transformers has them in generation_config.json.
    """
    quantized = ("quantization_config", "compression_config")  # of the text, too
    whole = {k: v for k, v in raw.items() if k in quantized or not isinstance(v, dict)}
    classes = Keys(file, whole).texts("architectures")
    if all(name.endswith("ForConditionalGeneration") for name in classes):
        whole.pop("architectures", None)  # classes of the whole model
    text = dict(Keys(file, raw).within("text_config").raw)
    ends = [one.pop("eos_token_id", None) for one in (whole, text)]
    listed = [end if isinstance(end, list) else [end] for end in ends if end is not None]
    text = {name: value for name, value in text.items() if value is not None or name not in whole}
    return {**whole, **text, "eos_token_id": [end for several in listed for end in several]}


def _tokens(keys: Keys, generation: Keys, vocabulary: int) -> dict[str, Any]:
    def ids(name: str) -> list[int]:
        several = name == "eos_token_id"
        return sum((x.token_ids(name, vocabulary, several) for x in (keys, generation)), [])

    return {
        "eos_token_ids": tuple(dict.fromkeys(ids("eos_token_id"))),
        "bos_token_id": next(iter(ids("bos_token_id")), None),
        "pad_token_id": next(iter(ids("pad_token_id")), None),
    }


def _mtp(keys: Keys, count_key: str, concat: str) -> dict[str, Any]:
    own = keys.within(MTP_KEY)
    states = ("post_norm", "pre_norm")
    return {
        "mtp_num_layers": keys.integer(count_key, None, least=0, most=common.MOST_LAYERS) or 0,
        "mtp_concat": own.text("concat", concat, ("embedding_first", "hidden_first")),
        "mtp_target_hidden": own.text("target_hidden", "post_norm", states),
        "mtp_recycle": own.text("recycle", "post_norm", states),
    }


def _dtype(keys: Keys) -> str | None:
    """Returns the dtype in config.json, in either dialect."""
    for name in ("dtype", "torch_dtype"):
        asked = keys.text(name, None)
        if asked is not None:
            asked = asked.removeprefix("torch.")
            if asked not in DTYPES:
                raise UnsupportedModelError(
                    f"{keys.file}: {name} {shown(asked)} is not supported; expected one of "
                    f"{', '.join(DTYPES)}"
                )
            return asked
    return None


def _stored_dtype(tensors: Callable[[], Mapping[str, Any]]) -> str | None:
    """Returns the dtype of the first floating-point weight, as transformers infers it."""
    try:
        found = sorted(tensors().items())
    except (CheckpointError, UnsupportedModelError):
        return None  # reading the weights raises the error
    return next((tensor.dtype for _, tensor in found if tensor.dtype in DTYPES), None)


def config_json(cfg: ModelConfig, with_head: bool, dtype: str) -> dict[str, Any]:
    """Returns the content of config.json for `cfg`, in both dialects.

    Raises:
      UnsupportedModelError: the family cannot express the config (for example Qwen2 without
        biases).
    """
    family = family_of(cfg.model_type)
    out = {
        "architectures": [family.architecture],
        "model_type": cfg.model_type,
        **family.write(cfg),
        **_ids_json(cfg),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if with_head:
        out[family.mtp_key] = cfg.mtp_num_layers
        concat = order_of(family) or cfg.mtp_concat
        out[MTP_KEY] = {**mtp_json(cfg), "concat": concat}  # the order on disk
    return out


def mtp_json(cfg: ModelConfig) -> dict[str, str]:
    """Returns the head's settings that no public config format has a key for."""
    return {
        "concat": cfg.mtp_concat,
        "target_hidden": cfg.mtp_target_hidden,
        "recycle": cfg.mtp_recycle,
    }


def generation_json(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the content of generation_config.json: special token ids and sampling defaults."""
    return {k: v for k, v in _ids_json(cfg).items() if v is not None} | dict(cfg.generation)


def _ids_json(cfg: ModelConfig) -> dict[str, Any]:
    eos = list(cfg.eos_token_ids)
    return {
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": cfg.pad_token_id,
    }


# --- checking -----------------------------------------------------------------------------------


def check_weights(
    source: Path,
    weights: Mapping[str, Any],
    leaves: list[Leaf],
    zeros: Mapping[str, tuple[int, ...]],
    extra: Iterable[str],
    integers: Collection[str] = (),
) -> None:
    """Raises `CheckpointWeightError` with one line per weight that does not fit.

    Args:
      source: path of the checkpoint, for the message.
      weights: tensors of the files.
      leaves: parameters that they must hold.
      zeros: shapes of tensors that must be zero, by name.
      extra: names that are refused unless a parameter or `zeros` has them.
      integers: names of tensors that may hold integers.
    """
    expected = {name: tensor.shape for name, tensor in tensors_of(leaves).items()}
    expected |= {name: shape for name, shape in zeros.items() if name in weights}
    problems = shape_problems(expected, weights, extra)
    for name in expected:
        if name not in weights:
            continue
        dtype = str(weights[name].dtype)
        if dtype not in _FLOATS and not (name in integers and dtype in _INTEGERS):
            problems.append(f"wrong dtype: {name}, expected one of {_FLOATS}, got {dtype}")
        elif name in zeros and np.any(weights[name][:]):
            problems.append(f"not supported: {name} is not zero")
    raise_problems(source, problems)


# --- placing ------------------------------------------------------------------------------------


def place_weights(
    weights: Mapping[str, Any],
    leaves: list[Leaf],
    dtype: str,
    mesh,
    products: Products = PLAIN,
) -> Params:
    """Builds the parameter tree, one array and one layer at a time, in its sharding.

    Args:
      weights: tensors of the files.
      leaves: the parameters.
      dtype: dtype of the parameters; those that the files hold as integers are int32.
      mesh: mesh to put them on; None: the default device.
      products: formats of matrices, which are packed one by one.
    """

    def built(leaf: Leaf) -> Any:
        kind, is_matrix = _kept(weights, leaf, jnp.dtype(dtype)), leaf.row.matrix or leaf.row.table
        name = format_of(products, _dotted(leaf)) if is_matrix else PLAIN
        if FORMATS.find(name).exact:
            return _placed(weights, leaf, kind, mesh)
        return _placed_packed(weights, leaf, mesh, name)

    return unflatten_dict({leaf.path: built(leaf) for leaf in leaves})


def _dotted(leaf: Leaf) -> str:
    return ".".join(map(str, leaf.path))


def _products_of(weights: Mapping[str, Any], leaves: list[Leaf]) -> Products:
    """Returns the formats of the matrices of files, where some are packed; else `PLAIN`."""
    kinds: dict[str, dict[str, str]] = {}  # by the pattern of layers, and the path
    for leaf in leaves:
        if leaf.row.matrix or leaf.row.table:
            *inside, name = leaf.path
            pattern = f"layers.*.{name}" if inside else name
            kinds.setdefault(pattern, {})[_dotted(leaf)] = _format_in(weights, leaf)
    pairs: list[tuple[str, str]] = []
    for pattern, of_paths in kinds.items():
        alike = len({*of_paths.values()}) == 1
        pairs += [(pattern, *{*of_paths.values()})] if alike else of_paths.items()
    return tuple(pair for pair in pairs if pair[1] != PLAIN) or PLAIN


def _format_in(weights: Mapping[str, Any], leaf: Leaf) -> str:
    """Returns the format in which the files hold a parameter, if it is kept exactly."""
    tensors = [weights[stored.name] for stored in leaf.pieces.values()]
    kinds = {getattr(tensor, "products", PLAIN) for tensor in tensors}
    kind = kinds.pop() if len(kinds) == 1 else PLAIN
    if kind == mxfp4.Stack.products:  # of which packing halves the inputs
        return kind if leaf.shape[-2] % (2 * mxfp4.BLOCK) == 0 else PLAIN
    if kind == PLAIN:
        return kind
    whole = all(s.transpose and s.part is None for s in leaf.pieces.values()) and not leaf.swap
    made = FORMATS.find(kind)  # of which new weights are made, too
    block = [made.outputs, made.of_group or leaf.shape[-2]]
    return kind if whole and all(tensor.block == block for tensor in tensors) else PLAIN


def _placed_packed(weights: Mapping[str, Any], leaf: Leaf, mesh, name: str) -> Any:
    """Packs one parameter; on one device a few outputs at a time, so that little is held in full.

    fp8 matrices of files keep their values and scales. The weights of MXFP4 matrices stay the same.
    """
    # In the run's dtype weights would be rounded twice.
    kind, dtype = (name, leaf.row.table, len(leaf.shape) > 2), np.dtype(np.float32)
    if name == _format_in(weights, leaf) != mxfp4.Stack.products:
        return _as_published(weights, leaf, mesh, FORMATS.find(name))
    if mesh is not None:
        pack = _packing(mesh, leaf.axes, leaf.shape, dtype, kind)
        return pack(_placed(weights, leaf, dtype, mesh))
    shape = leaf.shape
    axis = 1 if len(shape) == 2 and not leaf.row.table else 0  # experts, rows of a table, outputs
    count = _PACKED_BYTES // (math.prod(shape) // shape[axis] * dtype.itemsize)
    count = max(count, 1) if len(shape) > 2 else max(count // _OUTPUTS, 1) * _OUTPUTS
    parts = []
    for first in range(0, shape[axis], count):
        index = [slice(None)] * len(shape)
        index[axis] = slice(first, min(first + count, shape[axis]))
        piece = _read(weights, leaf, dtype, tuple(index))
        parts.append(jax.device_get(_PACK(piece, *kind)))
    return jax.device_put(jax.tree.map(lambda *several: np.concatenate(several, axis), *parts))


_PACK = jax.jit(packed, static_argnums=(1, 2, 3))


@functools.cache  # layers have equal matrices, which are compiled for once
def _packing(mesh, axes: tuple, shape: tuple[int, ...], dtype: np.dtype, kind: tuple) -> Callable:
    """Returns the jitted packing of matrices that a mesh splits."""

    def pack(array: jax.Array) -> Any:
        return packed(array, *kind)

    weight = jax.eval_shape(pack, jax.ShapeDtypeStruct(shape, dtype))
    return jax.jit(pack, out_shardings=sharding.weight_shardings(mesh, weight, axes))


def _as_published(weights: Mapping[str, Any], leaf: Leaf, mesh, kind: Any) -> Weight:
    """Builds one parameter, a `kind`, of the values and scales of files."""
    tensors = {stored.name: weights[stored.name] for stored in leaf.pieces.values()}
    *stack, inputs, outputs = leaf.shape
    counts = *stack, -(-inputs // (kind.of_group or inputs)), -(-outputs // kind.outputs)

    def part(name: str, shape: tuple[int, ...], axes: tuple, dtype: str) -> jax.Array:
        row = dataclasses.replace(leaf.row, shape=shape, axes=axes)
        arrays = {key: getattr(tensor, name) for key, tensor in tensors.items()}
        return _placed(arrays, leaf._replace(row=row), jnp.dtype(dtype), mesh)

    def joined(values: jax.Array, scales: jax.Array) -> Weight:
        scales = jnp.repeat(scales, kind.outputs, axis=-1)[..., :outputs]
        weight = kind(values, scales, kind.of_group, leaf.row.table)
        return weight.aligned() if stack else weight

    shapes = jax.ShapeDtypeStruct(leaf.shape, fp8.DTYPE), jax.ShapeDtypeStruct(counts, "float32")
    weight, axes, targets = jax.eval_shape(joined, *shapes), leaf.axes, None
    if mesh is not None:
        axes = sharding.common_axes(mesh, weight, weight.part_axes(axes)).values
        targets = sharding.weight_shardings(mesh, weight, leaf.axes)
    values = part("values", leaf.shape, axes, fp8.DTYPE)
    scales = part("scales", counts, (None,) * len(counts), "float32")
    return jax.jit(joined, out_shardings=targets)(values, scales)


def _placed(weights: Mapping[str, Any], leaf: Leaf, dtype: np.dtype, mesh) -> jax.Array:
    """Builds one parameter; a large stack is made on the devices, and filled layer by layer."""
    target = None
    if mesh is not None:
        target = jax.NamedSharding(mesh, sharding.spec_for(mesh, leaf.axes, leaf.shape))
    if leaf.layers is not None and math.prod(leaf.shape) * dtype.itemsize > _SMALL_BYTES:
        empty = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=target)
        update = jax.lax.dynamic_update_index_in_dim
        write = jax.jit(update, static_argnums=3, donate_argnums=0, out_shardings=target)
        stack = empty(leaf.shape, dtype)
        for number in range(leaf.layers):
            stack = write(stack, _placed(weights, leaf.layer(number), dtype, mesh), number, 0)
            jax.block_until_ready(stack)
            gc.collect(0)  # until then jax keeps the layer that it has copied
        return stack
    if target is None:
        return jax.device_put(_read(weights, leaf, dtype, (slice(None),) * len(leaf.shape)))
    pieces = {}  # devices that hold the same slice share one read

    def fill(index):
        key = tuple(s.indices(n) for s, n in zip(index, leaf.shape, strict=True))
        if key not in pieces:
            pieces[key] = _read(weights, leaf, dtype, index)
        return pieces[key]

    return jax.make_array_from_callback(leaf.shape, target, fill, dtype=dtype)


def _kept(weights: Mapping[str, Any], leaf: Leaf, dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which a parameter is kept."""
    if leaf.row.dtype is not None:
        return jnp.dtype(leaf.row.dtype)
    names = {stored.name for stored in leaf.pieces.values()}
    integers = any(weights[name].dtype in _INTEGERS for name in names)
    return np.dtype(np.int32) if integers else dtype


def _read(
    weights: Mapping[str, Any], leaf: Leaf, dtype: np.dtype, index: tuple[slice, ...]
) -> np.ndarray:
    """Reads one slice of a parameter; `index` is in the parameter's own axes."""
    index = tuple(slice(*s.indices(n)) for s, n in zip(index, leaf.shape, strict=True))
    out = np.empty([s.stop - s.start for s in index], dtype)
    which, inside = index[: leaf.lead], index[leaf.lead :]
    for at in np.ndindex(out.shape[: leaf.lead]):
        stored = leaf.pieces[tuple(s.start + i for s, i in zip(which, at, strict=True))]
        if leaf.swap:  # a slice may have parts of both halves: read all, then slice
            whole = _read_piece(weights, stored, tuple(slice(0, n) for n in leaf.row.shape))
            out[at] = np.roll(whole, whole.shape[0] // 2, axis=0)[inside]
        else:
            out[at] = _read_piece(weights, stored, inside)
    return out


def _read_piece(weights: Mapping[str, Any], stored: Stored, index: tuple[slice, ...]) -> np.ndarray:
    """Reads one slice of a piece of a parameter; `index` is in the piece's own axes."""
    index, every = list(swap_last(index, stored)), [slice(None)] * len(index)
    if (part := stored.part) is not None:
        rows = part.indices[index[part.axis]]
        # Formats read what is contiguous: the rows between are read and dropped.
        first, end = (rows[0], rows[-1] + 1) if len(rows) else (0, 0)
        index[part.axis] = slice(int(first), int(end))
        every[part.axis] = slice(None) if len(rows) == end - first else rows - first
    piece = weights[stored.name][tuple(index)][tuple(every)]
    return piece.swapaxes(-1, -2) if stored.transpose else piece


def _named(cfg: ModelConfig, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors of a file by the family's names, without those that it ignores."""
    family = family_of(cfg.model_type)

    def renamed(name: str) -> str:
        begins = next((begin for begin in family.renamed if name.startswith(begin)), "")
        return family.renamed.get(begins, "") + name.removeprefix(begins)

    ignored = set(_ignored(cfg, tensors))
    named = {renamed(name): tensor for name, tensor in tensors.items() if name not in ignored}
    rows = (place for layer in {*cfg.layers} for place in family.stored(cfg, layer).values())
    whole = tuple(place.name for place in rows if isinstance(place, Stored))
    return dict(
        part
        for item in named.items()
        for part in ([item] if item[0].endswith(whole) else _experts(*item))
    )


class _Expert(NamedTuple):
    """A matrix of one expert in a tensor [E rows columns]."""

    stack: Any
    number: int
    first: int  # row of the tensor
    shape: tuple[int, int]

    @property
    def dtype(self) -> Any:
        return self.stack.dtype

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        start, stop, _ = index[0].indices(self.shape[0])
        rows = slice(self.first + start, self.first + stop)
        return self.stack[slice(self.number, self.number + 1), rows, index[1]][0]


def _experts(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """Yields the matrices of each expert of a tensor that holds those of all, or the tensor."""
    layer, _, kind = name.rpartition(".experts.")
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
    if not layer or names is None or len(tensor.shape) != 3:
        yield name, tensor
        return
    count, rows, columns = tensor.shape
    size = rows // len(names)
    for number, (place, part) in itertools.product(range(count), enumerate(names)):
        matrix = _Expert(tensor, number, place * size, (size, columns))
        yield f"{layer}.experts.{number}.{part}.weight", matrix


def _ignored(cfg: ModelConfig, names: Iterable[str]) -> list[str]:
    """Returns the names of the tensors that the family leaves out."""
    patterns = family_of(cfg.model_type).ignored
    return [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]


# --- tied embeddings ----------------------------------------------------------------------------


def _as_stored(path: Path, cfg: ModelConfig, weights: dict[str, Any]) -> ModelConfig:
    """Returns the config with `tie_embeddings` as in the weights, by the rule of transformers.

    transformers writes GLM's config with an MTP head whose weights it has not read: there is none.
    Qwen3-Next's config does not say that the weights hold one.
    If a file holds both an embedding and a language-model head that differ, both are used although
    config.json ties them; if it holds only the head, that is also the embedding.
    """
    family = family_of(cfg.model_type)
    heads = any(is_head_name(cfg, style, name) for style in HEAD_STYLES for name in weights)
    if cfg.mtp_num_layers and weights and not heads:
        log.warning("%s: config.json names an MTP head, and the weights hold none", path)
        cfg = cfg.replace(mtp_num_layers=0)
    elif heads and not cfg.mtp_num_layers and family.head_style == "qwen3_next":
        cfg = cfg.replace(mtp_num_layers=1)
    stored = family.stored(cfg, None)
    places = stored["embed"], stored["lm_head"]
    if not all(isinstance(place, Stored) and place.part is None for place in places):
        return cfg
    embed, head = (place.name for place in places)
    if not cfg.tie_embeddings or head not in weights:
        return cfg
    if embed not in weights:
        weights[embed] = weights.pop(head)
        return cfg
    if _equal(weights[embed], weights[head]):
        return cfg
    log.warning(
        "%s: tie_word_embeddings is true, but %s and %s differ: each is used as stored; set "
        "tie_word_embeddings to false in config.json to silence this warning",
        path, embed, head,
    )  # fmt: skip
    return cfg.replace(tie_embeddings=False)


def _equal(one: Any, other: Any) -> bool:
    """Returns whether two tensors have the same shape, dtype and bits, by blocks of rows."""
    if tuple(one.shape) != tuple(other.shape) or one.dtype != other.dtype:
        return False
    rows = one.shape[0]
    blocks = (slice(i, min(i + _BLOCK_ROWS, rows)) for i in range(0, rows, _BLOCK_ROWS))
    return all(one[block].tobytes() == other[block].tobytes() for block in blocks)


# --- loading ------------------------------------------------------------------------------------


def load_checkpoint(
    path: str | Path,
    param_dtype: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    mtp_concat: str | None = None,
    load_format: str = AUTO,
    products: Products = PLAIN,
) -> tuple[ModelConfig, Params, Params | None]:
    """Reads a local checkpoint.

    Args:
      param_dtype: dtype of the parameters, and of the config's arithmetic; the file's by default.
      mesh: mesh to put the parameters on, see `specjax.parallel.sharding`; None: default device.
      mtp_concat: order of the head's input in memory; the checkpoint's by default.
      load_format: see `specjax.weights.open_checkpoint`.
      products: formats of the policy's matrices, see `specjax.weights.matrix`; `auto`: those of the
        files, which are then those of the config.

    If config.json ties the embedding and the language-model head but the file has two that differ,
    both are used, as in transformers, with a warning, and the config is changed.

    Returns:
      config, parameters, head parameters or None (`num_nextn_predict_layers` absent or 0). Layers
      are stacked; if matrices are packed, each has its own entry, as in decoding.

    Raises:
      CheckpointError: there is no config.json, or a file is missing or damaged.
      CheckpointWeightError: names every weight that is missing, unexpected or wrongly shaped.
      UnsupportedModelError: see `read_config`.
    """
    reader = open_checkpoint(path, load_format)
    cfg = _config_of(reader)
    if param_dtype is not None:
        dtype = dtype_name(param_dtype)
        cfg = cfg.running(param_dtype=dtype, compute_dtype=dtype)
    if mtp_concat is not None:
        cfg = cfg.replace(mtp_concat=mtp_concat)
    tensors = reader.tensors()
    if names := _ignored(cfg, tensors):
        first = ", ".join(names[:3])
        log.warning("%s: %d tensors are left out: %s ...", path, len(names), first)
    weights = _named(cfg, tensors)
    cfg = _as_stored(Path(path), cfg, weights)
    policy, head, style = policy_leaves(cfg), [], None
    if cfg.mtp_num_layers:
        style = style_of(cfg, weights)
        head = head_leaves(cfg, style)
    extra = [name for name in weights if not is_redundant(cfg, name)]
    check_weights(Path(path), weights, policy + head, zero_tensors(cfg, style), extra)
    if products == AUTO:
        products = _products_of(weights, policy_leaves(cfg, unrolled=True))
        cfg = cfg if products == PLAIN else cfg.running(products=products)
    if is_exact(products):
        kinds = {getattr(tensor, "products", PLAIN) for tensor in tensors.values()} - {PLAIN}
        for kind in kinds:
            dtype = cfg.run.param_dtype
            log.warning(
                "%s: %s weights become %s; activations are not quantised", path, kind, dtype
            )
    else:
        policy = policy_leaves(cfg, unrolled=True)
    params = place_weights(weights, policy, cfg.run.param_dtype, mesh, products)
    return cfg, params, (place_weights(weights, head, cfg.run.param_dtype, mesh) if head else None)


def load_head(path: str | Path, cfg: ModelConfig, mesh: jax.sharding.Mesh | None = None) -> Params:
    """Reads only the draft head, from a file of `save_head` or from a checkpoint directory.

    The head is converted to `cfg.mtp_concat` order and `cfg.run.param_dtype`.

    Raises:
      CheckpointError: a file is missing or damaged, or the head was trained with other settings.
      CheckpointWeightError: names every weight that is missing, unexpected or wrongly shaped.
    """
    path = Path(path)
    file = path
    if path.is_dir() and (path / HEAD_FILE).exists():
        file = path / HEAD_FILE
    weights, metadata = (Safetensors(path).tensors(), {}) if file.is_dir() else open_files([file])
    style = style_of(cfg, weights)
    if not file.is_dir():
        _check_switches(file, cfg, metadata)
    leaves = head_leaves(cfg, style)
    extra = [
        name
        for name in weights
        if not is_redundant(cfg, name) and (not file.is_dir() or is_head_name(cfg, style, name))
    ]
    zeros = {n: s for n, s in zero_tensors(cfg, style).items() if is_head_name(cfg, style, n)}
    check_weights(file, weights, leaves, zeros, extra)
    return place_weights(weights, leaves, cfg.run.param_dtype, mesh)


def _check_switches(file: Path, cfg: ModelConfig, metadata: dict[str, str]) -> None:
    """Compares the head's settings: a wrong one changes no shape, and lowers acceptance."""
    wanted = mtp_json(cfg)
    try:
        saved = Keys(file, {MTP_KEY: json.loads(metadata.get(MTP_KEY, "{}"))}).within(MTP_KEY).raw
    except ValueError as error:
        raise CheckpointError(f"{file}: its metadata {MTP_KEY} is damaged ({error})") from error
    for key in ("target_hidden", "recycle"):
        if saved.get(key, wanted[key]) != wanted[key]:
            raise CheckpointError(
                f"{file}: the head was trained with {key} {saved[key]!r}, the config says "
                f"{wanted[key]!r}; set mtp_{key}={saved[key]}"
            )


# --- saving --------------------------------------------------------------------------------------


class Written(NamedTuple):
    """A tensor to write, whose bytes are made only when its file is written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


def save_checkpoint(
    path: str | Path,
    cfg: ModelConfig,
    params: Params,
    head: Params | None = None,
    tokenizer_dir: str | Path | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Writes a directory that `load_checkpoint` and transformers load.

    It is written beside `path` and renamed when complete; a checkpoint at `path` is replaced.

    Args:
      path: directory to write.
      cfg: config of the model.
      params: stacked policy parameters.
      head: parameters of the draft head; None: there is no head.
      tokenizer_dir: a directory whose tokenizer files and chat template are copied, or another
        checkpoint that holds a tokenizer.
      dtype: dtype on disk, the parameters' own by default. `mxfp4`: experts are rounded to MXFP4,
        and the rest is bfloat16, as gpt-oss is published.
      max_shard_bytes: largest size of a weight file, and of the host memory that is needed.

    Raises:
      CheckpointWeightError: names the parameters that do not fit `cfg`.
      CheckpointError: `path` exists and is no checkpoint, or there are no tokenizer files.
      UnsupportedModelError: `cfg.model_type` cannot express the config, or its experts not MXFP4.
    """
    path, packs = Path(path).absolute(), dtype == mxfp4.METHOD
    dtype = "bfloat16" if packs else dtype_name(dtype or params["embed"].dtype)
    config = config_json(cfg, head is not None, dtype)
    require_replaceable(path)
    style = style_on_export(cfg) if head is not None else None
    body = named_weights(policy_leaves(cfg), params, dtype)
    if packs:
        config["quantization_config"] = mxfp4.CONFIG
        body = _packed(cfg, body, named_weights(policy_leaves(cfg), params, "float32"))
    own_file = family_of(cfg.model_type).head_style is None
    if head is not None and not own_file:
        body += named_weights(head_leaves(cfg, style), head, dtype)
    body += _zeros(cfg, None if own_file else style, dtype)
    with replacing(path) as partial:
        write_json(partial / "config.json", config)
        write_json(partial / "generation_config.json", generation_json(cfg))
        write_weights(partial, body, max_shard_bytes)
        if head is not None and own_file:
            save_head(partial / HEAD_FILE, cfg, head, dtype)
        if tokenizer_dir is not None:
            copy_tokenizer(Path(tokenizer_dir), partial)


def save_head(path: str | Path, cfg: ModelConfig, head: Params, dtype: str | None = None) -> None:
    """Writes only a draft head, without embedding and language-model head, to one file.

    The names are MiMo's for hidden-first heads and DeepSeek's for embedding-first ones.

    Raises:
      CheckpointWeightError: names the parameters that do not fit `cfg`.
    """
    path, style = Path(path).absolute(), style_on_export(cfg)
    dtype = dtype_name(dtype or head["blocks"][0]["proj"].dtype)
    tensors = named_weights(head_leaves(cfg, style), head, dtype)
    tensors += [t for t in _zeros(cfg, style, dtype) if is_head_name(cfg, style, t.name)]
    switches = {**mtp_json(cfg), "concat": HEAD_STYLES[style].concat}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    data = {t.name: t.read() for t in tensors}
    metadata = {"format": "pt", MTP_KEY: json.dumps(switches)}
    safetensors.numpy.save_file(data, partial, metadata=metadata)
    partial.replace(path)


def named_weights(leaves: list[Leaf], params: Params, dtype: str) -> list[Written]:
    """Checks the shapes of parameters; returns the tensors to write, integers in their own dtype.

    Raises:
      CheckpointWeightError: names the parameters that do not fit the leaves.
    """
    got = named_leaves(params)
    problems = shape_problems({label_of(leaf): leaf.shape for leaf in leaves}, got, got)
    raise_problems("the parameter tree", problems)
    out = []
    for name, tensor in tensors_of(leaves).items():
        leaf = tensor.holds[0][0]
        own = jnp.dtype(got[label_of(leaf)].dtype)
        kind = jnp.dtype(leaf.row.dtype or dtype) if jnp.issubdtype(own, jnp.floating) else own
        out.append(Written(name, tensor.shape, kind, _reader(tensor, got, kind)))
    return out


def _reader(tensor: Tensor, arrays: Mapping[str, Any], dtype: np.dtype):
    def read() -> np.ndarray:
        out = np.empty(tensor.shape, dtype)
        for leaf, at, stored in tensor.holds:
            array = arrays[label_of(leaf)]
            piece = np.asarray(array[at] if at else array)
            if leaf.swap:
                piece = np.roll(piece, piece.shape[0] // 2, axis=0)
            where = [slice(None)] * out.ndim
            if (part := stored.part) is not None:
                where[part.axis] = part.indices
            out[tuple(where)] = piece.swapaxes(-1, -2) if stored.transpose else piece
        return out

    return read


def _packed(cfg: ModelConfig, tensors: list[Written], exact: list[Written]) -> list[Written]:
    """Returns the tensors to write, with those of experts in MXFP4, which are rounded once."""
    out = []
    for tensor, wide in zip(tensors, exact, strict=True):
        parts = mxfp4.packed(tensor.name, tensor.shape)
        for place, (name, shape) in enumerate(parts.items()):

            def read(wide: Written = wide, place: int = place) -> np.ndarray:
                return mxfp4.pack_blocks(wide.read().swapaxes(-1, -2))[place]

            out.append(Written(name, shape, np.dtype(np.uint8), read))
        out += [] if parts else [tensor]
    if len(out) == len(tensors):
        raise UnsupportedModelError(
            f"dtype {mxfp4.METHOD} is that of experts of gpt_oss, got model_type {cfg.model_type!r}"
        )
    return out


def _zeros(cfg: ModelConfig, style: str | None, dtype: str) -> list[Written]:
    kind = jnp.dtype(dtype)
    return [
        Written(name, shape, kind, lambda shape=shape: np.zeros(shape, kind))
        for name, shape in zero_tensors(cfg, style).items()
    ]


def write_weights(folder: Path, tensors: list[Written], limit: int = 4 << 30) -> None:
    """Writes one file, or several of at most `limit` bytes (or one tensor) and an index."""
    shards, size, total = [[]], 0, 0
    for tensor in tensors:
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size, total = size + nbytes, total + nbytes
    count, weight_map = len(shards), {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        data = {t.name: t.read() for t in shard}
        safetensors.numpy.save_file(data, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(data, file)
    if count > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a directory to fill; it replaces `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        partial.rename(path)
    except BaseException:
        _remove_for_good(partial)
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove_for_good(path: Path) -> None:
    """Removes a directory repeatedly, because threads of a failed save may still write to it."""
    for wait in (0.05, 0.1, 0.2, 0.4, 0.8):
        shutil.rmtree(path, ignore_errors=True)
        time.sleep(wait)
        if not path.exists():
            return


def require_replaceable(path: Path) -> None:
    """Raises `CheckpointError` if a path holds something other than a checkpoint."""
    is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if not is_free and not (path / CONFIG).exists():
        raise CheckpointError(f"{path} exists and is no checkpoint; choose another path")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies tokenizer files and chat templates, or writes the tokenizer of another format.

    Raises:
      CheckpointError: the source has no tokenizer.
    """
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        tokenizer = load_tokenizer(source, required=False)
        if tokenizer is None:
            raise CheckpointError(f"{source} holds no tokenizer; expected one of {TOKENIZER_FILES}")
        tokenizer.save_pretrained(target)
    for name in found:
        shutil.copyfile(source / name, target / name)
    if found and (source / MORE_TEMPLATES).is_dir():
        shutil.copytree(source / MORE_TEMPLATES, target / MORE_TEMPLATES, dirs_exist_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file with its keys in order."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
