"""Rows of verl, also of DAPO-Math-17k: `prompt` and `reward_model`.

`prompt` is a conversation or text, and `reward_model` is {"ground_truth": ..., "style": ...}.
Rewards get further columns such as `data_source`, `ability` and `extra_info`.
"""

from collections.abc import Mapping

from train.data.tasks.layout import Example, Layout, Row, others
from train.data.tasks.prompt import gold_in_rule, read_prompt


def _read(row: Row) -> Example:
    rule = row["reward_model"]
    columns = others(row, "prompt")
    if isinstance(rule, Mapping):
        columns["ground_truth"] = rule.get("ground_truth")
    return Example(read_prompt(row), gold_in_rule(rule), None, columns)


TASK = Layout(
    name="verl",
    columns="prompt, reward_model.ground_truth",
    recognises=lambda columns: {"prompt", "reward_model"} <= set(columns),
    read=_read,
)
