"""Flags of commands that are no settings of a schema: both spellings, and suggestions."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable
from typing import NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, which takes `--max_batch` for `--max-batch` and the other way round, and says
    which flag an unknown one is close to."""

    def parse_known_args(self, args=None, namespace=None):
        return super().parse_known_args(self._as_known(args), namespace)

    def parse_known_intermixed_args(self, args=None, namespace=None):
        return super().parse_known_intermixed_args(self._as_known(args), namespace)

    def _as_known(self, args: Iterable[str] | None) -> list[str]:
        known = {underscored(option): option for option in self._option_string_actions}
        args = sys.argv[1:] if args is None else args
        return [_as_known(str(argument), known) for argument in args]

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w.-]+)", message)
        if unknown:
            message += nearest_flag(unknown[1], self._option_string_actions)
        super().error(message)


def underscored(option: str) -> str:
    """A flag or key with underscores within its words."""
    dashes = len(option) - len(option.lstrip("-"))
    return option[:dashes] + option[dashes:].replace("-", "_")


def nearest_flag(option: str, known: Iterable[str]) -> str:
    """A suggestion, where one of the flags is close."""
    flags = {underscored(flag): flag for flag in known if flag.startswith("--")}
    close = difflib.get_close_matches(underscored(option), flags, n=1, cutoff=0.7)
    return f"; did you mean {flags[close[0]]!r}?" if close else ""


def _as_known(argument: str, known: dict[str, str]) -> str:
    name, equals, value = argument.partition("=")
    if not name.startswith("--"):
        return argument
    return known.get(underscored(name), name) + equals + value
