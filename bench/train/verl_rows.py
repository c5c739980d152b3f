"""`python -m bench.train verl_rows FILE OUT`: GSM8K's rows in the layout of verl.

Each row gets the columns that verl's own preparation of GSM8K writes: `data_source`, `prompt` (one
message of the user, with this project's wording), `ability`, `reward_model` and `extra_info`. With
`--text` the prompt is text, for models without a chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.command import user_errors
from specjax.command_line import ArgumentParser
from train.tasks import gsm8k
from train.tasks.files import read_rows

SOURCE = "openai/gsm8k"


def verl_row(row: Mapping[str, str], split: str, index: int, text: bool = False) -> dict:
    """Converts a row.

    Args:
      row: has `question` and `answer`.
      split: name of the split, such as `train`.
      index: number of the row in its split.
      text: whether the prompt is text, in place of a message.
    """
    example = gsm8k.TASK.read(row)
    prompt = gsm8k.TASK.template.format(**row)
    return {
        "data_source": SOURCE,
        "prompt": prompt if text else [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": example.answer},
        "extra_info": {"split": split, "index": index, **row},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m bench.train verl_rows", description=__doc__)
    parser.add_argument("file", help="JSON lines of GSM8K, with question and answer")
    parser.add_argument("out", help="JSON lines that are written")
    parser.add_argument("--text", action="store_true", help="write prompts as text")
    given = parser.parse_args(argv)
    with user_errors("train verl_rows"):
        split = Path(given.file).stem
        rows = [
            verl_row(row, split, index, given.text)
            for index, (_, row) in enumerate(read_rows(given.file))
        ]
        Path(given.out).write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    print(f"{len(rows)} rows: {given.out}")
