"""The report of `python -m train.data PATH --model MODEL`.

It shows rows as the model will see them, their lengths, duplicates, and gold answers for which the
reward cannot give 1.
"""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C from here on
    from specjax import interrupts

    interrupts.begin("train.data")

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from specjax.checkpoint.weights import read_config, tokenizer_dir
from specjax.command_line import parse_config
from specjax.config import ModelConfig
from specjax.hub import find_model
from specjax.schema import describe
from specjax.tokenizer import decode
from specjax.weights import load_tokenizer
from train.data.checks import FILE_ROWS, GENERATED_ROWS, describe_data
from train.data.prompts import Prompts
from train.data.rows import default_reward, find_task, problems, read_table
from train.rewards.scoring import Scorer, check_gold, described_gold, evenly, row_name, shown_gold
from train.rollout_schema import RolloutSection
from train.run.start import USER_ERRORS
from train.schema import GENERATED, DataConfig

QUANTILES = {0: "shortest", 0.1: "10%", 0.5: "median", 0.9: "90%", 0.99: "99%", 1: "longest"}


def report(
    cfg: DataConfig,
    tokenizer,
    reward: str = "auto",
    rows: int = 10,
    check: int = 2000,
    longest: int | None = None,
    target: ModelConfig | None = None,
) -> Iterator[str]:
    """Yields the lines of the report.

    Args:
      cfg: settings of the data.
      tokenizer: tokenizer of the model.
      reward: name of the reward; `auto` for the one that suits the rows.
      rows: number of rows to show.
      check: number of gold answers to check.
      longest: number of tokens beyond which prompts are counted as too long; None for no count.
      target: config of the model, which must have all tokens of the prompts; None: not checked.

    Raises:
      ValueError: as in a run with these settings.
      FileNotFoundError: as in a run with these settings.
    """
    prompts = Prompts(tokenizer, cfg, model=target)
    scorer = Scorer(default_reward(cfg) if reward == "auto" else reward.split(","))
    training = problems(cfg, "train", prompts.chat)
    yield describe_data(prompts, None, scorer.name)
    if cfg.task in GENERATED:
        yield f"{len(training)} are for training, and {cfg.heldout_size} are held out"
    elif not cfg.heldout_path:
        yield (
            f"{len(training)} of these are for training; the others are held out (set "
            "data.heldout_path to hold out a file of its own)"
        )
    scorer.check(training[0])
    for problem in training[: min(rows, len(training))]:
        ids = prompts.whole(problem)
        yield f"\n--- {row_name(problem)}: {len(ids)} tokens, {shown_gold(problem)}"
        yield decode(tokenizer, ids, skip_special_tokens=False)
    most = GENERATED_ROWS if cfg.task in GENERATED else FILE_ROWS
    sizes = [len(prompts.whole(training[i])) for i in evenly(training, most)]
    lengths = [
        f"{name} {int(np.quantile(sizes, q, method='nearest'))}" for q, name in QUANTILES.items()
    ]
    yield f"\nprompt length in tokens: {', '.join(lengths)} (of {len(sizes)} rows)"
    if longest is not None:
        yield f"longer than {longest} tokens: {sum(size > longest for size in sizes)}"
    if cfg.task not in GENERATED:
        count = read_table(cfg.path, find_task(cfg), cfg.duplicates).duplicates
        done = "dropped" if cfg.duplicates == "drop" else "kept, data.duplicates=drop drops them"
        yield (
            "duplicates (prompt and answer of an earlier row): "
            f"{f'{count} ({done})' if count else 'none'}"
        )
    if not scorer.checked:
        yield f"gold answers: reward={scorer.name} has no answer reward, so they are not checked"
        return
    lost, checked = check_gold(scorer, training, check)
    part = "" if checked == len(training) else f" checked, of {len(training)}"
    yield (
        f"gold answers that reward={scorer.name} cannot win (it reads {described_gold(scorer)}): "
        f"{len(lost)} of {checked}{part}"
    )
    for row, reason in lost:
        yield f"  {row_name(row)}: {reason}"


def _paths_and_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments into paths, and settings: `key=value`, or `--key` and its value."""
    paths, settings, rest = [], [], [*arguments]
    while rest:
        argument = rest.pop(0)
        if argument.startswith("--"):
            settings.append(argument.replace("--data.", "--", 1))
            if "=" not in argument and rest:
                settings.append(rest.pop(0))
        elif _SETTING.match(argument) and not os.path.exists(argument):
            settings.append(argument.removeprefix("data."))
        else:
            paths.append(argument)
    return paths, settings


_SETTING = re.compile(r"[\w.-]+=")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line of the report.

    Raises:
      SystemExit: the user made a mistake; status 1 or 2, with one message.
    """
    parser = argparse.ArgumentParser(
        prog="python -m train.data",
        usage="%(prog)s PATH ... --model MODEL [flags] [key=value ...]",
        description="Shows rows of data as a model will see them, and their problems.",
        epilog="PATH is a file of rows, a pattern, a directory, or a folder of "
        "datasets.save_to_disk.\nSettings of the section `data` of train.rl: "
        f"{describe(DataConfig)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        required=True,
        help="model whose tokenizer reads them: its directory, a run's, or a Hugging Face id",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hugging Face id")
    parser.add_argument(
        "--reward",
        default="auto",
        help="as in train.rl, several with commas between them (default: %(default)s)",
    )
    parser.add_argument("--rows", type=int, default=10, help="shown (default: %(default)s)")
    parser.add_argument(
        "--check", type=int, default=2000, help="gold answers checked (default: %(default)s)"
    )
    parser.add_argument(
        "--max-prompt-tokens",
        type=int,
        default=RolloutSection.max_prompt_tokens,
        metavar="N",
        help="prompts that are longer are counted (default: %(default)s, as in train.rl)",
    )
    flags, rest = parser.parse_known_args(argv)
    paths, settings = _paths_and_settings(rest)
    cfg, _ = parse_config(DataConfig, settings, "train.data")
    if paths and cfg.path is not None:
        parser.error(f"path={cfg.named} and {', '.join(paths)}: name the rows once")
    if not paths and cfg.path is None and cfg.task not in GENERATED:
        parser.error("expected a path of rows (PATH), or a task that is generated")
    if paths:
        cfg = dataclasses.replace(cfg, path=paths[0] if len(paths) == 1 else paths)
    try:
        model = find_model(flags.model, flags.revision, weights=False)
        tokenizer = load_tokenizer(tokenizer_dir(model))
        most, target = flags.max_prompt_tokens, read_config(model)
        lines = report(cfg, tokenizer, flags.reward, flags.rows, flags.check, most, target)
        for line in lines:
            print(line, flush=True)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, *USER_ERRORS) as error:
        raise SystemExit(f"python -m train.data: error: {error}") from error


if __name__ == "__main__":
    interrupts.run(main)
