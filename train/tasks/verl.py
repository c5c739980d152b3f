"""Rows of verl, also of DAPO-Math-17k: `prompt` and `reward_model`.

`prompt` is a conversation or text, and `reward_model` is {"ground_truth": ..., "style": ...}.
Rewards get further columns such as `data_source`, `ability` and `extra_info`.
"""

from collections.abc import Mapping

from train.tasks.layout import Example, Layout, Row, RowError, gold_of, others, shown
from train.tasks.prompt import read_prompt


def _read(row: Row) -> Example:
    rule = row["reward_model"]
    if not isinstance(rule, Mapping) or rule.get("ground_truth") is None:
        raise RowError(
            f"column 'reward_model': expected {{'ground_truth': ...}}, got {shown(rule)}"
        )
    gold = gold_of(rule["ground_truth"], "reward_model.ground_truth")
    columns = {**others(row, "prompt"), "ground_truth": rule["ground_truth"]}
    return Example(read_prompt(row), gold, None, columns)


TASK = Layout(
    name="verl",
    columns="prompt, reward_model.ground_truth",
    recognises=lambda columns: {"prompt", "reward_model"} <= set(columns),
    read=_read,
)
