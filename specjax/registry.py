"""The tables of names: one per kind of thing that can be added, such as families.

A row is `name -> "module:attribute"`, and the module is imported when the name is first used: this
module imports nothing of specjax, and no jax. A user's own `module:attribute` is accepted wherever
a name is, in flags and configurations of the user; names that come out of a checkpoint's files are
looked up with `named` and never imported.

Mixers and mlps have no table, for they have no names that a user gives: a family, or a user's own
`ModelConfig`, makes objects of their classes. Objectives, tasks and rewards are things of `train`,
of which specjax knows nothing: their tables are in `train.registry`.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any


class Registry:
    """The named things of one kind.

    Args:
      kind: name of the kind, for messages: "model family".
      rows: the table, name -> "module:attribute".
      expected: name of what must lie at a user's own path, for messages: "a
        specjax.interfaces.Family".
    """

    def __init__(self, kind: str, rows: Mapping[str, str], expected: str):
        self.kind, self.rows, self.expected = kind, dict(rows), expected

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names that need no path, in the order of the table."""
        return tuple(self.rows)

    def all(self) -> list[Any]:
        """Imports and returns what all names of the table stand for, in its order."""
        return [self.named(name) for name in self.rows]

    def __contains__(self, name: str) -> bool:
        return name in self.rows

    def check(self, name: str) -> None:
        """Refuses a name that is neither in the table nor a path `module:attribute`.

        Imports nothing.

        Args:
          name: the name, as a user gave it.

        Raises:
          ValueError: the name is neither.
        """
        if name not in self.rows and not is_own_path(name, ()):
            raise ValueError(
                f"unknown {self.kind} {name!r}; choose one of {', '.join(self.rows)}, or give your "
                "own as 'package.module:attribute'"
            )

    def named(self, name: str) -> Any:
        """Imports and returns what a name of the table stands for.

        Raises:
          KeyError: the table has no such name.
        """
        return _load(self.rows[name])

    def find(self, name: str) -> Any:
        """Imports and returns what a name of the table, or a user's path, stands for.

        Raises:
          ValueError: the name is neither, or the path leads nowhere.
        """
        self.check(name)
        try:
            return _load(self.rows.get(name, name))
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"cannot load {self.kind} {name!r}: {error}; expected an importable module (check "
                f"the working directory and PYTHONPATH) with {self.expected} of that name"
            ) from error


def is_own_path(name: str, known: Collection[str]) -> bool:
    """Returns whether a name is a user's `module:attribute`: not `tpu:v9` if `tpu:v5e` is known."""
    module, _, attribute = name.partition(":")
    return bool(module and attribute) and module not in {n.partition(":")[0] for n in known}


def check_setting(setting: str, name: str, known: Collection[str]) -> str:
    """Returns the name, if it is a known one or a path `module:attribute`; imports nothing.

    Args:
      setting: setting that the name is given for, for the message.
      name: the name, as a user gave it.
      known: names that are valid.

    Raises:
      ValueError: the name is neither.
    """
    if name not in known and not is_own_path(name, known):
        raise ValueError(
            f"{setting} must be one of {', '.join(known)}, or your own as "
            f"'package.module:attribute'; got {name!r}"
        )
    return name


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


# Families of models by `model_type`.
FAMILIES = Registry(
    "model family",
    {
        "llama": "specjax.models.families.llama:FAMILY",
        "qwen2": "specjax.models.families.qwen2:FAMILY",
        "qwen3": "specjax.models.families.qwen3:FAMILY",
        "mimo": "specjax.models.families.mimo:FAMILY",
        "mistral": "specjax.models.families.mistral:FAMILY",
        "ministral": "specjax.models.families.ministral:FAMILY",
        "gemma2": "specjax.models.families.gemma2:FAMILY",
        "gemma3_text": "specjax.models.families.gemma3:FAMILY",
        "gemma3": "specjax.models.families.gemma3:FAMILY",
        "granite": "specjax.models.families.granite:FAMILY",
        "olmo2": "specjax.models.families.olmo2:FAMILY",
        "olmo3": "specjax.models.families.olmo3:FAMILY",
        "phi3": "specjax.models.families.phi3:FAMILY",
        "smollm3": "specjax.models.families.smollm3:FAMILY",
        "qwen3_moe": "specjax.models.families.qwen3_moe:FAMILY",
        "mixtral": "specjax.models.families.mixtral:FAMILY",
        "glm4_moe": "specjax.models.families.glm4_moe:FAMILY",
        "gpt_oss": "specjax.models.families.gpt_oss:FAMILY",
        "qwen3_next": "specjax.models.families.qwen3_next:FAMILY",
        "qwen3_5_text": "specjax.models.families.qwen3_5:FAMILY",
        "qwen3_5": "specjax.models.families.qwen3_5:FAMILY",
        "qwen3_5_moe_text": "specjax.models.families.qwen3_5:MOE",
        "qwen3_5_moe": "specjax.models.families.qwen3_5:MOE",
    },
    "a specjax.interfaces.Family",
)

# Draft sources, asked in this order whether files are theirs; `model` takes what is left.
DRAFTS = Registry(
    "draft source",
    {
        "dflash": "specjax.drafts.dflash:DFlashSource",
        "eagle3": "specjax.drafts.eagle3:Eagle3Source",
        "mtp": "specjax.drafts.mtp:MTPSource",
        "model": "specjax.drafts.model:ModelSource",
        "ngram": "specjax.drafts.ngram:NgramSource",
    },
    "a class of draft sources, see specjax.interfaces.Draft,",
)

# File formats of checkpoints, asked in this order whether a path is theirs. A path that none of
# them recognises is read as the last one.
READERS = Registry(
    "checkpoint format",
    {
        "gguf": "specjax.weights.gguf:GGUF",
        "pickled": "specjax.weights.pickled:Pickled",
        "safetensors": "specjax.weights.safetensors:Safetensors",
    },
    "a specjax.interfaces.Reader",
)

# Number formats of matrices, in the order in which `auto` tries those that round nothing.
FORMATS = Registry(
    "format of weights",
    {
        "xla": "specjax.weights.matrix:Plain",
        "panels": "specjax.weights.panels:Panels",
        "int8": "specjax.weights.packed:Int8",
        "fp8": "specjax.weights.packed:Fp8",
        "fp8_block": "specjax.weights.packed:Fp8Block",
        "mxfp4": "specjax.weights.packed:Mxfp4",
        "int4": "specjax.weights.packed:Int4",
    },
    "a specjax.interfaces.Weight",
)

# Backends of kernels; `specjax.kernels.names` says what `auto` takes on a platform.
BACKENDS = Registry(
    "kernel backend",
    {
        "reference": "specjax.kernels.xla:BACKEND",
        "cpu": "specjax.kernels.cpu:BACKEND",
        "gpu": "specjax.kernels.gpu:BACKEND",
        "gpu:flash": "specjax.kernels.flash_gpu:BACKEND",
        "triton": "specjax.kernels.triton:BACKEND",
        "tpu:v5e": "specjax.kernels.tpu:V5E",
        "tpu:v5p": "specjax.kernels.tpu:V5P",
        "tpu:v6e": "specjax.kernels.tpu:V6E",
        "library:xla": "specjax.kernels.library:XLA",
        "library:cudnn": "specjax.kernels.library:CUDNN",
    },
    "a specjax.interfaces.Backend",
)
