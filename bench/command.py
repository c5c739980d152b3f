"""Command lines of `bench`: subcommands, the arguments that all share, prompts, one-line errors."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import difflib
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from specjax.command_line import ArgumentParser
from train import data
from train.schema import check_task

T = TypeVar("T")


def run_subcommand(
    command: str, doc: str, functions: Mapping[str, str], argv: Sequence[str] | None
) -> Any:
    """Runs `python -m bench.<command> NAME ...` by the function that NAME stands for.

    Args:
      doc: text for `--help`.
      functions: "module:function" by NAME, imported when it is used; the function takes the other
        arguments.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    name, rest = (given[0], given[1:]) if given else ("", [])
    if name in ("-h", "--help"):
        print(f"usage: python -m bench.{command} {{{','.join(functions)}}} [ARGUMENTS]\n\n{doc}")
        return None
    if name not in functions:
        close = difflib.get_close_matches(name, functions, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        got = repr(name) if name else "nothing"
        sys.exit(f"bench.{command}: error: expected one of {', '.join(functions)}, got {got}{hint}")
    module, _, function = functions[name].partition(":")
    return getattr(importlib.import_module(module), function)(rest)


def bench_parser(module: str, doc: str, out: str) -> argparse.ArgumentParser:
    """Returns the parser of `python -m bench.<module>`, with the arguments that all benches have.

    Args:
      module: name of the module, followed by the subcommand if there is one.
      doc: the module's docstring.
      out: name of the default result file, without its suffix.
    """
    parser = ArgumentParser(
        prog=f"python -m bench.{module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of problems and samples")
    parser.add_argument("--out", help=f"file or directory; default: bench/results/{out}.json")
    return parser


def task_name(text: str) -> str:
    """Checks the value of `--task`; it is the argument's type for argparse."""
    try:
        check_task(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the policy, and which of its held-out problems are the prompts."""
    add = parser.add_argument
    add("--model", default="assets/sums", help="Hugging Face directory of the policy (and head)")
    add("--task", default="sums", type=task_name, help="where the prompts come from: data.task")
    add("--data", metavar="FILE", help="file of rows, for tasks that are not generated")
    add("--max_prompt_tokens", type=int, default=64, help="longer prompts are passed over")


def add_timing_arguments(parser: argparse.ArgumentParser, batches: Sequence[int]) -> None:
    """Adds the batch sizes, and how often each is measured."""
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=list(batches), help="slots that run at once")
    add("--repeats", type=int, default=7, help="measurements of each, at least 5 for a figure")


@contextlib.contextmanager
def user_errors(module: str) -> Iterator[None]:
    """Ends the program with a message of one line if an argument or a file is wrong."""
    try:
        yield
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        sys.exit(f"bench.{module}: error: {error}")


def own_settings(schema: type[T], cfg: T, **changes: Any) -> T:
    """Copies a configuration with the fields of `schema` only, of which its type is a subclass.

    Args:
      changes: values of fields that differ in the copy.
    """
    values = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(schema)}
    return schema(**copy.deepcopy(values) | changes)


def heldout_prompts(
    tokenizer, task: str, path: str | None, count: int, longest: int, seed: int
) -> list[list[int]]:
    """Returns the token ids of the first `count` held-out problems of at most `longest` tokens.

    Raises:
      ValueError: there are too few problems.
    """
    source = data.problems(data.DataConfig(task=task, path=path, seed=seed), "heldout")
    prompts = []
    for index in range(len(source)):
        prompt = data.encode_prompt(tokenizer, source[index].prompt)
        if len(prompt) <= longest:
            prompts.append(prompt)
        if len(prompts) == count:
            return prompts
    raise ValueError(
        f"expected {count} held-out prompts of at most {longest} tokens, got {len(prompts)}; give "
        "more data, a larger --max_prompt_tokens, or ask for fewer prompts"
    )
