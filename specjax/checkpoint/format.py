"""The record and the manifest that a specjax checkpoint adds to Orbax's own files.

This file does not import Orbax. `pack`, `match` and `unpack` convert trees of any containers to
nested dicts of arrays with a JSON record of their shapes, and back. `write_manifest` and
`manifest_problem` detect damage by a manifest of file sizes and CRC-32 sums.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from specjax.checked_json import CheckpointError
from specjax.error_text import first_line

PyTree = Any

_MANIFEST = "specjax_manifest.json"
DRAFT_KEY = "draft_source"  # in the metadata of a checkpoint with a head other than MTP
# Computing checksums reads every byte back, seconds per GB in the background; above this size only
# file sizes are recorded.
_CHECKSUM_LIMIT_BYTES = 8 << 30


# --- trees <-> nested dicts of arrays -----------------------------------------------------------


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Returns leaves by "/"-joined path, in the order of `jax.tree.leaves`."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = [
            str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry))))
            for entry in path
        ]
        if any("/" in part or "." in part for part in parts):
            raise ValueError(f"checkpoint keys must hold neither '/' nor '.', got {parts}")
        name = "/".join(parts) or "value"
        if name in named:
            raise ValueError(f"two leaves of the tree have the same path {name!r}")
        named[name] = leaf
    return named


def nest(named: Mapping[str, Any]) -> dict[str, Any]:
    return unflatten_dict(dict(named), sep="/")


def shapes_of(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays of one tree of a record, as nested dicts of shapes."""
    return nest(
        {name: jax.ShapeDtypeStruct(tuple(e["shape"]), e["dtype"]) for name, e in entries.items()}
    )


def pack(trees: Mapping[str, PyTree], meta: Mapping[str, Any]) -> tuple[dict, dict]:
    """Splits `trees` into nested dicts, which Orbax stores, and our JSON record of them."""
    arrays: dict[str, Any] = {}
    record: dict[str, Any] = {"trees": {}, "meta": meta}
    for tree_name, tree in trees.items():
        leaves, entries = {}, {}
        for name, leaf in named_leaves(tree).items():
            if isinstance(leaf, np.ndarray) and jnp.asarray(leaf).dtype == leaf.dtype:
                leaf = jnp.asarray(leaf)
            leaves[name] = leaf
            entries[name] = {"shape": leaf.shape, "dtype": str(leaf.dtype)}
        record["trees"][tree_name] = entries
        if leaves:  # Orbax refuses empty trees; only the record holds them
            arrays[tree_name] = nest(leaves)
    return arrays, record


def match(wanted: Mapping[str, PyTree], saved: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Compares every array with the record; returns the abstract nested dicts for Orbax."""
    abstract: dict[str, Any] = {}
    for tree_name, tree in wanted.items():
        if tree_name not in saved:
            raise CheckpointError(f"{path} holds {sorted(saved)}, not {tree_name!r}")
        structs = {name: _struct(leaf) for name, leaf in named_leaves(tree).items()}
        there = {name: f"{e['dtype']}{list(e['shape'])}" for name, e in saved[tree_name].items()}
        here = {name: f"{struct.dtype}{list(struct.shape)}" for name, struct in structs.items()}
        if differing := [n for n in {**there, **here} if there.get(n) != here.get(n)]:
            facts = "; ".join(
                f"{name} is {there.get(name, 'absent')} in the checkpoint and "
                f"{here.get(name, 'absent')} in the model"
                for name in differing[:5]
            )
            raise CheckpointError(
                f"{path}: {tree_name!r} does not fit the model: {facts}; use the configuration "
                "that it was saved with"
            )
        if structs:
            abstract[tree_name] = nest(structs)
    return abstract


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def unpack(loaded: Mapping[str, Any], wanted: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Returns loaded nested dicts in the containers of `wanted`."""
    trees = {}
    for tree_name, tree in wanted.items():
        named = named_leaves(loaded.get(tree_name, {}))
        leaves = [named[name] for name in named_leaves(tree)]
        trees[tree_name] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    return trees


# --- integrity ----------------------------------------------------------------------------------


def _files(path: Path) -> list[Path]:
    return sorted(f for f in path.rglob("*") if f.is_file() and f.name != _MANIFEST)


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def write_manifest(path: Path) -> None:
    """Writes the manifest after Orbax's commit; a kill in between leaves an intact checkpoint."""
    if jax.process_index() != 0:
        return
    sizes = {str(f.relative_to(path)): f.stat().st_size for f in _files(path)}
    summed = sum(sizes.values()) <= _CHECKSUM_LIMIT_BYTES
    files = {
        name: {"size": size, "crc32": _crc32(path / name) if summed else None}
        for name, size in sizes.items()
    }
    partial = path / (_MANIFEST + ".tmp")
    partial.write_text(json.dumps(files))
    partial.replace(path / _MANIFEST)


def manifest_problem(path: Path) -> str:
    manifest = path / _MANIFEST
    if not manifest.exists():
        return ""
    try:
        files = json.loads(manifest.read_text())
        for name, expected in files.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["size"]:
                return f"{name} has {file.stat().st_size} bytes, expected {expected['size']}"
            if expected["crc32"] not in (None, _crc32(file)):
                return f"{name} has changed since it was written (CRC-32 differs)"
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{_MANIFEST} cannot be used ({first_line(error)})"
    return ""
