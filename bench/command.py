"""Command lines of `bench`: the arguments that all share, prompts, one-line errors."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence

from train.data import rows
from train.data.prompts import Prompts
from train.schema import DataConfig


def bench_parser(module: str, doc: str, out: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of `python -m bench.<module>`.

    Args:
      module: name of the module, followed by the subcommand if there is one.
      doc: the module's docstring.
      out: name of the default result file, without its suffix; None: it writes none.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if out is not None:
        parser.add_argument("--seed", type=int, default=0, help="seed of problems and samples")
        parser.add_argument("--out", help=f"file or directory; default: bench/results/{out}.json")
    return parser


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the policy, and which of its held-out problems are the prompts."""
    add = parser.add_argument
    add("--model", default="assets/sums", help="Hugging Face directory of the policy (and head)")
    add("--task", default="sums", help="where the prompts come from: data.task")
    add("--data", metavar="FILE", help="file of rows, for tasks that are not generated")
    add("--max_prompt_tokens", type=int, default=64, help="longer prompts are passed over")


@contextlib.contextmanager
def user_errors(module: str) -> Iterator[None]:
    """Ends the program with a message of one line if an argument or a file is wrong."""
    try:
        yield
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        sys.exit(f"bench.{module}: error: {error}")


def heldout_prompts(
    tokenizer, args: argparse.Namespace, count: int, **problems
) -> Sequence[list[int]]:
    """Returns the token ids of the first held-out problems of at most `--max_prompt_tokens`.

    Args:
      problems: further settings of the task.

    Raises:
      ValueError: there are too few problems.
    """
    given = DataConfig(task=args.task, path=args.data, seed=args.seed, chat="off", **problems)
    encoder, prompts = Prompts(tokenizer, given), []
    for problem in rows.problems(given, "heldout"):
        prompt = encoder.whole(problem)
        if len(prompt) <= args.max_prompt_tokens:
            prompts.append(prompt)
        if len(prompts) == count:
            return prompts
    raise ValueError(
        f"expected {count} held-out prompts of at most {args.max_prompt_tokens} tokens, got "
        f"{len(prompts)}; give more data, a larger --max_prompt_tokens, or ask for fewer prompts"
    )
