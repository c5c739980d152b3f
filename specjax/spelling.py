"""Names of settings in messages, as the user of each program types them.

A user sets a draft source as `SpecConfig(draft='ngram')`, `speculation.draft=ngram` or
`--draft ngram`. The text of a `SettingError` is therefore made by a function of `spell`, which
names a setting; the program that shows the error gives its own `spell`::

    raise SettingError(lambda spell: f"the head is missing; use {spell('draft', 'ngram')}")

    except ValueError as error:
        print(spelled(error, dotted({"draft": "speculation"})))
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

# (name) or (name, value) -> the setting as the user types it
Spell = Callable[..., str]

# Keyword arguments by the call that takes them; all others are `SpecConfig`'s.
_CALLS = {
    "LLM": (
        "spec", "control", "max_batch", "max_len", "dtype", "mesh", "tokenizer", "max_stop_tokens",
        "replicas", "tp", "generation_config", "family",
    ),
    "EngineConfig": (
        "page_size", "cache_bytes", "chunk_tokens", "stretch", "prefill_chunk", "order", "products",
        "attention", "enforce_eager",
    ),
    "ControlConfig": ("controller", "strategies", "initial", "bs_threshold"),
    "SamplingParams": ("max_tokens", "temperature", "stop_token_ids"),
}  # fmt: skip


class SettingError(ValueError):
    """A setting is wrong, or contradicts another one.

    Args:
      write: function of `spell` that returns the message. `str(error)` spells settings as in
        Python.
    """

    def __init__(self, write: Callable[[Spell], str]):
        super().__init__(write(python))
        self.write = write


def spelled(error: BaseException, spell: Spell) -> str:
    """The message of an error, with its settings spelled by `spell`."""
    return error.write(spell) if isinstance(error, SettingError) else str(error)


def python(name: str, *value: Any) -> str:
    """Names settings as in Python: `SpecConfig(draft='ngram')`; without a value the bare name."""
    if not value:
        return name
    call = next((call for call, names in _CALLS.items() if name in names), "SpecConfig")
    return f"{call}({name}={'...' if value[0] is ... else repr(value[0])})"


def dotted(sections: Mapping[str, str], other_names: Mapping[str, str] | None = None) -> Spell:
    """Names settings as `section.name=value`.

    Args:
      sections: the section of each setting; "" and settings that are not listed are top-level keys.
      other_names: names of settings that differ from the library's, by the library's name.
    """

    def spell(name: str, *value: Any) -> str:
        section = sections.get(name, "")
        last = (other_names or {}).get(name, name)
        key = f"{section}.{last}" if section else last
        return f"{key}={_text(value[0])}" if value else key

    return spell


def flags(name: str, *value: Any) -> str:
    """Names settings as `--name value`, booleans as `--name` or `--no-name`."""
    flag = "--" + name.replace("_", "-")
    if value and isinstance(value[0], bool):
        return flag if value[0] else f"--no{flag[1:]}"
    return f"{flag} {_text(value[0], none='none')}" if value else flag


def _text(value: Any, none: str = "null") -> str:
    """A value as the user types it."""
    if value is ...:
        return "..."
    if value is None:
        return none
    return str(value).lower() if isinstance(value, bool) else str(value)


# Names of parameters in vLLM, transformers and others -> names in specjax.
_FOREIGN_NAMES = {
    "top_logprobs": "logprobs",
    "max_new_tokens": "max_tokens",
    "max_model_len": "max_len",
    "max_num_seqs": "max_batch",
    "tensor_parallel_size": "tp",
    "data_parallel_size": "replicas",
    "block_size": "page_size",
    "max_num_batched_tokens": "prefill_chunk",
    "prompt_lookup_max": "ngram_max",
    "prompt_lookup_min": "ngram_min",
    "speculative_config": "spec",
    "source": "draft",  # three names of earlier versions
    "head": "draft",
    "draft_model": "draft",
    "speculative_model": "draft",
    "speculative_draft_model": "draft",
    "speculative_draft_model_path": "draft",
}
# Values of settings of earlier versions -> values of the setting that replaces them.
_FOREIGN_VALUES = {"source": {"head": "checkpoint", "model": "DIR"}}


def foreign(name: str, *value: Any) -> tuple[str, Any] | None:
    """Translates a setting of an earlier version, or of vLLM, SGLang or transformers.

    Args:
      name: name of the setting.
      value: its value; nothing: it is not known.

    Returns:
      the name of the setting here, and its value, `PATH` if it is not known; None: there is no
      such setting.
    """
    known = _FOREIGN_NAMES.get(name)
    if known is None:
        return None
    [given] = value or ("PATH",)
    text = str(given)
    return known, _FOREIGN_VALUES.get(name, {}).get(text, given)


# Parameters of the classes whose keywords are checked, by the class's name.
_PARAMETERS: dict[str, list[str]] = {}


def checks_keywords(cls: type) -> type:
    """Decorates a class: its constructor suggests a parameter for an unknown keyword.

    The suggestion may be a parameter of another decorated class.
    """
    construct = cls.__init__
    known = [name for name in inspect.signature(construct).parameters if name != "self"]
    _PARAMETERS[cls.__name__] = known

    @functools.wraps(construct)
    def checked(self, *args, **keywords):
        for name in keywords:
            if name not in known:
                if _FOREIGN_NAMES.get(name) == "draft":
                    raise TypeError(_about_draft(cls.__name__, name, keywords[name]))
                close = [_FOREIGN_NAMES[name]] if _FOREIGN_NAMES.get(name) in known else []
                close = close or difflib.get_close_matches(name, known, 1, 0.7)
                hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
                others = [cls for cls, names in _PARAMETERS.items() if name in names]
                if others:
                    has = f"{' and '.join(sorted(others))} {'have' if others[1:] else 'has'} it"
                    hint = f"{hint} {has}" if close else has
                raise TypeError(f"{cls.__name__} has no parameter {name}; {hint}")
        construct(self, *args, **keywords)

    cls.__init__ = checked
    return cls


def _about_draft(cls: str, name: str, value: Any) -> str:
    """The message about a keyword that other versions or programs name what drafts by."""
    setting = python(*foreign(name, value))
    there = setting if cls == "SpecConfig" else f"{cls}(spec={setting})"
    return f"{cls} has no parameter {name}; use {there}"
