"""Sampling defaults of a checkpoint: the keys of its generation_config.json.

As in vLLM, temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens are defaults,
and do_sample has no effect: a file with `"do_sample": false` and no temperature is sampled at
temperature 1 (transformers would decode greedily; here temperature 0 does).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.checked_json import CheckpointError, read_json
from specjax.config.sampling import SamplingParams

FILE = "generation_config.json"
AUTO, NONE = "auto", ("none", "vllm")  # values of the setting, beside a directory
Generation = tuple[tuple[str, Any], ...]  # keys and values, as `ModelConfig.generation`


# In the order of messages and files.
_KEYS = (
    "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens",
)  # fmt: skip


def sampling_of(file: Path, raw: Mapping[str, Any]) -> Generation:
    """Reads the sampling keys of a generation_config.json; null counts as absent.

    Args:
      file: path of the file, for messages.
      raw: content of the file.

    Raises:
      CheckpointError: a value is out of range.
    """
    found = {key: raw[key] for key in _KEYS if raw.get(key) is not None}
    for key in ("top_k", "max_new_tokens"):
        if isinstance(found.get(key), float) and found[key].is_integer():
            found[key] = int(found[key])
    if not isinstance(found.get("do_sample", True), bool):
        raise CheckpointError(
            f"{file}: do_sample must be true or false, got {found['do_sample']!r}"
        )
    try:
        SamplingParams(**sampling_defaults(tuple(found.items())))
    except (TypeError, ValueError) as error:
        message = str(error).replace("max_tokens", "max_new_tokens")
        raise CheckpointError(f"{file}: {message}") from error
    return tuple(found.items())


def asked_for(setting: str) -> Generation | None:
    """Returns the defaults that the setting `generation_config` asks for; None: the checkpoint's.

    Args:
      setting: `auto` (the checkpoint's own), `none` or `vllm` (nothing), or a directory with a
        generation_config.json.

    Raises:
      CheckpointError: there is no such file, or it cannot be used.
    """
    if setting == AUTO:
        return None
    if setting in NONE:
        return ()
    folder = Path(setting)
    file = folder if folder.name == FILE else folder / FILE
    if not file.is_file():
        raise CheckpointError(
            f"generation_config: expected auto, none, or a directory with {FILE}; there "
            f"is no {file}"
        )
    return sampling_of(file, read_json(file))


def sampling_defaults(generation: Generation) -> dict[str, Any]:
    """Returns the defaults as arguments of `SamplingParams`."""
    names = {"max_new_tokens": "max_tokens"}
    return {names.get(key, key): value for key, value in generation if key != "do_sample"}


def describe_defaults(generation: Generation, where: str) -> str | None:
    """Returns one line that names the sampling defaults; None: there are none.

    Args:
      where: setting that leaves the defaults out, as it is typed.
    """
    taken = {key: value for key, value in generation if key != "do_sample"}
    greedy = ("do_sample", False) in generation
    if not taken and not greedy:
        return None
    values = ", ".join(f"{key}={value}" for key, value in taken.items()) or "none"
    line = f"sampling defaults of {FILE}: {values} ({where} leaves them out)"
    if greedy:
        line += "; do_sample=false is not looked at, as in vLLM: temperature=0 is greedy"
    return line
