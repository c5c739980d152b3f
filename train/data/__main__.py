"""The report of `python -m train.data PATH --model MODEL`.

It shows rows as the model will see them, their lengths, duplicates, and gold answers for which the
reward cannot give 1.
"""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C from here on
    from specjax import interrupts

    interrupts.begin("train.data")

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from specjax.checkpoint.weights import read_config, tokenizer_dir
from specjax.command_line import parse_config
from specjax.config import ModelConfig
from specjax.hub import find_model
from specjax.settings import REQUIRED, option
from specjax.tokenizer import decode
from specjax.weights import load_tokenizer
from train.data.checks import FILE_ROWS, GENERATED_ROWS, describe_data
from train.data.prompts import Prompts
from train.data.rows import default_reward, problems
from train.rewards.scoring import Scorer, check_gold, evenly, row_name, shown_gold
from train.rollout_schema import RolloutSection
from train.run.start import USER_ERRORS
from train.schema import GENERATED, DataConfig, RewardsSection

QUANTILES = {0: "shortest", 0.1: "10%", 0.5: "median", 0.9: "90%", 0.99: "99%", 1: "longest"}


def report(cfg: ReportConfig, tokenizer, target: ModelConfig | None = None) -> Iterator[str]:
    """Yields the lines of the report.

    Args:
      cfg: settings of the report.
      tokenizer: tokenizer of the model.
      target: config of the model, which must have all tokens of the prompts; None: not checked.

    Raises:
      ValueError: as in a run with these settings.
      FileNotFoundError: as in a run with these settings.
    """
    prompts = Prompts(tokenizer, cfg, model=target)
    reward = default_reward(cfg) if cfg.reward == ["auto"] else cfg.reward
    scorer = Scorer(reward, options=RewardsSection())
    training = problems(cfg, "train", prompts.chat)
    yield describe_data(prompts, None, scorer.name)
    held = cfg.heldout_size if cfg.task in GENERATED else cfg.heldout_path or "the others"
    yield f"{len(training)} are for training; held out: {held}"
    scorer.check(training[0])
    for problem in training[: min(cfg.rows, len(training))]:
        ids = prompts.whole(problem)
        yield f"\n--- {row_name(problem)}: {len(ids)} tokens, {shown_gold(problem)}"
        yield decode(tokenizer, ids, skip_special_tokens=False)
    most = GENERATED_ROWS if cfg.task in GENERATED else FILE_ROWS
    sizes = [len(prompts.whole(training[i])) for i in evenly(training, most)]
    lengths = [
        f"{name} {int(np.quantile(sizes, q, method='nearest'))}" for q, name in QUANTILES.items()
    ]
    yield f"\nprompt length in tokens: {', '.join(lengths)} (of {len(sizes)} rows)"
    longest = cfg.max_prompt_tokens
    yield f"longer than {longest} tokens: {sum(size > longest for size in sizes)}"
    if not scorer.checked:
        yield f"gold answers: reward={scorer.name} has no answer reward, so they are not checked"
        return
    lost, checked = check_gold(scorer, training, cfg.check)
    part = "" if checked == len(training) else f" checked, of {len(training)}"
    yield f"gold answers that reward={scorer.name} cannot win: {len(lost)} of {checked}{part}"
    for row, reason in lost:
        yield f"  {row_name(row)}: {reason}"


@dataclasses.dataclass
class ReportConfig(DataConfig):
    """`python -m train.data`: shows rows of data as a model will see them, and their problems.

    The keys of `data` stand here without the name of the section, or with it.

    Attributes:
      model: model whose tokenizer reads them: its directory, a run's, or a Hugging Face id.
      revision: branch, tag or commit of a Hugging Face id.
      reward: as in train.rl.
      rows: rows that are shown.
      check: gold answers that are checked.
      max_prompt_tokens: prompts that are longer are counted.
    """

    words: ClassVar[tuple[str, ...]] = ("path",)
    aliases: ClassVar[Mapping[str, str]] = {
        f"data.{field.name}": field.name for field in dataclasses.fields(DataConfig)
    }

    model: str = REQUIRED
    revision: str | None = None
    reward: list[str] = option(["auto"])
    rows: int = 10
    check: int = 2000
    max_prompt_tokens: int = RolloutSection.max_prompt_tokens


def _rows(cfg: ReportConfig) -> None:
    if cfg.path is None and cfg.task not in GENERATED:
        raise ValueError("expected a path of rows (PATH), or a task that is generated")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line of the report.

    Raises:
      SystemExit: the user made a mistake; status 1 or 2, with one message.
    """
    cfg, _ = parse_config(ReportConfig, argv, "train.data", __doc__.splitlines()[0], require=_rows)
    try:
        model = find_model(cfg.model, cfg.revision, weights=False)
        tokenizer = load_tokenizer(tokenizer_dir(model))
        for line in report(cfg, tokenizer, read_config(model)):
            print(line, flush=True)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, *USER_ERRORS) as error:
        raise SystemExit(f"python -m train.data: error: {error}") from error


if __name__ == "__main__":
    interrupts.run(main)
