"""Rows of every task and file format, what the model sees of them, and what is refused."""

import dataclasses
import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import odd_rewards
import pyarrow
import pyarrow.parquet
import pytest

from specjax.command_line import ConfigError, parse_config
from train import data, data_report, draft, draft_data, rl, sft
from train.data import demonstrations, encode_prompt, problems
from train.draft_schema import DraftRunConfig
from train.eval_schema import EvalSection
from train.evaluation import problem_sets
from train.inputs import Prompts, describe_data, read_inputs, require_template
from train.registry import TASKS
from train.schema import DataConfig, RLConfig, SFTConfig
from train.scoring import Score, Scorer
from train.tasks import find_task, recognise
from train.tasks.layout import Example, Layout
from train.trainer import Trainer

USER = [{"role": "user", "content": "How much is 1+2?"}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *USER]
SAYS = {"role": "assistant", "content": "It is $\\boxed{3}$."}

# row -> (task, prompt, answer, demonstration)
ROWS = {
    "gsm8k": (
        {"question": "How much is 1+2?", "answer": "1+2=<<1+2=3>>3\n#### 3"},
        ("gsm8k", "Question: How much is 1+2?\nAnswer:", "3", "1+2=3\n#### 3"),
    ),
    "question with a bare answer": (
        {"question": "Where?", "answer": "Paris", "id": 7},
        ("gsm8k", "Question: Where?\nAnswer:", "Paris", "#### Paris"),
    ),
    "question with an integer": (
        {"question": "How many?", "answer": 12},
        ("gsm8k", "Question: How many?\nAnswer:", "12", "#### 12"),
    ),
    "MATH with both": (
        {"problem": "Solve.", "solution": "So $x=\\boxed{\\frac{1}{2}}$.", "answer": "\\frac12"},
        ("math", "Problem: Solve.\nSolution:", "\\frac12", "So $x=\\boxed{\\frac{1}{2}}$."),
    ),
    "MATH with a solution": (
        {"problem": "Solve.", "level": "Level 5", "solution": "So $\\boxed{2\\sqrt{3}}$."},
        ("math", "Problem: Solve.\nSolution:", "2\\sqrt{3}", "So $\\boxed{2\\sqrt{3}}$."),
    ),
    "problem with a float": (
        {"problem": "Solve.", "answer": 34.0},
        ("math", "Problem: Solve.\nSolution:", "34", None),
    ),
    "Open-R1's mathematics": (
        {"problem": "Solve.", "answer": "5", "messages": [*USER, SAYS], "uuid": "a"},
        ("math", "Problem: Solve.\nSolution:", "5", None),
    ),
    "DAPO": (
        {
            "data_source": "math_dapo", "prompt": SYSTEM, "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4"},
        },
        ("verl", tuple(SYSTEM), "34", None),
    ),
    "verl with text and a list": (
        {"prompt": "How much?", "reward_model": {"ground_truth": ["0.25"]}},
        ("verl", "How much?", "0.25", None),
    ),
    "verl with a list written as JSON": (
        {"prompt": "How much?", "reward_model": {"ground_truth": '["\\\\frac{1}{4}"]'}},
        ("verl", "How much?", "\\frac{1}{4}", None),
    ),
    "several answers": (
        {"question": "Where?", "answer": ["Paris", "#### Lyon", 5.0, "5"]},
        ("gsm8k", "Question: Where?\nAnswer:", ("Paris", "Lyon", "5"), "#### Paris"),
    ),
    "several answers written as JSON": (
        {"problem": "Solve.", "answer": '["1", "\\\\boxed{2}"]'},
        ("math", "Problem: Solve.\nSolution:", ("1", "2"), None),
    ),
    "an interval, and no list": (
        {"problem": "Solve.", "answer": "[1, 2]"},
        ("math", "Problem: Solve.\nSolution:", "[1, 2]", None),
    ),
    "TRL with text": (
        {"prompt": "How much? ", "answer": 2.5, "level": 3},
        ("prompt", "How much? ", "2.5", None),
    ),
    "TRL with messages": (
        {"prompt": USER, "solution": "$\\boxed{3}$", "completion": [SAYS]},
        ("prompt", tuple(USER), "3", SAYS["content"]),
    ),
    "a prompt and nothing to compare with": (
        {"prompt": "Write a poem.", "topic": "rain"},
        ("prompt", "Write a poem.", "", None),
    ),
    "messages": (
        {"messages": [*SYSTEM, SAYS], "source": "x"},
        ("messages", tuple(SYSTEM), "3", SAYS["content"]),
    ),
    "messages with an answer": (
        {"messages": USER, "answer": ["7"]},
        ("messages", tuple(USER), "7", None),
    ),
    "messages in parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "1+"},
                                                    {"type": "text", "text": "2?"}]}, SAYS]},
        ("messages", ({"role": "user", "content": "1+2?"},), "3", SAYS["content"]),
    ),
    "slime with text": (
        {"prompt": "How much is 30+4?", "label": "34"},
        ("slime", "How much is 30+4?", "34", None),
    ),
    "slime with a number": ({"prompt": USER, "label": 34}, ("slime", tuple(USER), "34", None)),
    "slime with a worked label": (
        {"messages": USER, "label": "so\n#### 34", "metadata": None},
        ("slime", tuple(USER), "34", None),
    ),
    "slime with several labels": (
        {"prompt": USER, "label": ["34", "34.0"], "metadata": {}},
        ("slime", tuple(USER), ("34", "34.0"), None),
    ),
    "slime without a label": (
        {"prompt": "Write.", "label": None, "metadata": {"topic": "rain"}},
        ("slime", "Write.", "", None),
    ),
}  # fmt: skip


def lines(rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(rows) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def array(rows) -> bytes:
    return b"\xef\xbb\xbf" + json.dumps(rows, indent=2).encode()


FORMATS = {
    "rows.jsonl": lines,
    "rows.json": array,
    "rows.parquet": parquet,
    "rows.jsonl.gz": lambda rows: gzip.compress(lines(rows)),
    "rows.json.gz": lambda rows: gzip.compress(array(rows)),
    "rows.parquet.gz": lambda rows: gzip.compress(parquet(rows)),
    "without a name for it": lines,
}


def config(path, rows, write=lines, **changes) -> DataConfig:
    """Of a file whose rows are all for training."""
    path.write_bytes(write(rows))
    held = path.with_name("held.jsonl")
    held.write_bytes(lines([{"prompt": "another", "answer": "1"}]))
    return DataConfig(**{"path": str(path), "heldout_path": str(held), **changes})


@pytest.mark.parametrize("name", ROWS)
def test_a_task_is_recognised_by_its_columns(tmp_path, name):
    row, (task, prompt, answer, response) = ROWS[name]
    cfg = config(tmp_path / "rows.jsonl", [row])
    assert data.find_task(cfg).name == task
    (problem,) = problems(cfg, "train")
    assert (problem.prompt, problem.answer, problem.index) == (prompt, answer, 0)
    assert problem.place == f"{tmp_path / 'rows.jsonl'}:1"
    if response is None:
        with pytest.raises(ValueError, match="rows.jsonl:1: .* without a demonstration"):
            demonstrations(cfg, "train")
    else:
        assert demonstrations(cfg, "train")[0] == data.Demonstration(prompt, response)


@pytest.mark.parametrize("file", FORMATS)
@pytest.mark.parametrize("name", ["gsm8k", "DAPO", "TRL with messages"])
def test_every_format_gives_the_same_problems(tmp_path, name, file):
    row, (_, prompt, answer, _) = ROWS[name]
    question = "question" if "question" in row else "prompt"
    other = row | {question: "Another one?"} if isinstance(row[question], str) else row | {
        question: [{"role": "user", "content": "Another one?"}]
    }  # fmt: skip
    found = problems(config(tmp_path / file, [row, other], FORMATS[file]), "train")
    assert [p.answer for p in found] == [answer, answer]
    assert found[0].prompt == prompt and found[1].prompt != prompt


def test_rewards_see_further_columns_of_a_row(tmp_path):
    rows = [ROWS["TRL with text"][0], {"prompt": "b", "answer": "1", "level": 4}]
    found = problems(config(tmp_path / "rows.jsonl", rows), "train")
    assert [p.columns["level"] for p in found] == [3, 4]
    (dapo,) = problems(config(tmp_path / "rows.jsonl", [ROWS["DAPO"][0]]), "train")
    assert dapo.columns["extra_info"] == {"index": "9a9b6eb4"}
    assert dapo.columns["data_source"] == "math_dapo" and dapo.columns["ground_truth"] == "34"


def scored(completion, answer, metadata, level, label):
    assert (answer, label, metadata) == ("34", "34", {"level": 3, "label": "no"})
    return float(level)


def test_rewards_see_metadata_and_what_it_holds_by_name(tmp_path):
    row = {"prompt": USER, "label": "34", "metadata": {"level": 3, "label": "no"}}
    (problem,) = problems(config(tmp_path / "rows.jsonl", [row]), "train")
    scorer = Scorer("test_tasks:scored")
    scorer.check(problem)
    assert scorer("x", problem) == Score(3.0)
    assert Scorer("math_verify")("\\boxed{34}", problem) == Score(1.0)


@pytest.mark.parametrize(
    ("columns", "task"),
    [
        ({"prompt", "label", "metadata"}, "slime"),
        ({"messages", "label"}, "slime"),
        ({"prompt", "label", "answer"}, "prompt"),  # a label of something else
        ({"prompt", "label", "completion"}, "prompt"),  # TRL's judged completions
        ({"prompt", "label", "reward_model"}, "verl"),
        ({"question", "label", "answer"}, "gsm8k"),
        ({"label"}, None),
    ],
)
def test_only_rows_whose_label_is_the_answer_are_slimes(columns, task):
    found = recognise(columns)
    assert (found and found.name) == task


@pytest.mark.parametrize(
    "row",
    [{"instruction": "a", "output": "b"}, {"conversations": []}, {"problem": "a", "topic": "b"},
     {"Question": "a", "Answer": "b"}, {}],
)  # fmt: skip
def test_columns_of_no_task_are_listed_with_the_tasks_that_there_are(tmp_path, row):
    with pytest.raises(ValueError) as error:
        problems(config(tmp_path / "rows.jsonl", [row]), "train")
    message = str(error.value)
    assert "cannot tell what its rows mean" in message and "data.task" in message
    assert all(column in message for column in row)
    known = [find_task(name) for name in TASKS.names]
    assert all(f"{task.name} ({task.columns})" in message for task in known)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gsm8k", {"question": None}, "'question': expected text"),
        ("DAPO", {"prompt": []}, "'prompt': expected a list of"),
        ("DAPO", {"prompt": [*USER, SAYS]}, "ends before the assistant's turn"),
        ("TRL with text", {"prompt": "  "}, "'prompt': expected text"),
        ("TRL with text", {"prompt": 5}, "'prompt': expected a list of"),
        ("slime with text", {"metadata": "x"}, "'metadata': expected a mapping, got 'x'"),
        ("slime with text", {"prompt": [*USER, SAYS]}, "ends before the assistant's turn"),
        ("slime with a worked label", {"messages": [*USER, SAYS]}, "before the assistant's turn"),
        ("slime with a worked label", {"messages": None}, "'messages': expected a list of"),
        ("messages", {"messages": [SAYS]}, "expected a message before the assistant's"),
        ("messages", {"messages": "hello"}, "'messages': expected a list of"),
        ("messages", {"messages": [{"from": "human", "value": "a"}]}, r"'messages\[0\]': expected"),
        ("messages", {"messages": [{"role": "user", "content": None}]}, "content that is text"),
    ],
)
def test_a_row_that_is_not_what_its_columns_say_is_named(tmp_path, name, changes, message):
    row = ROWS[name][0]
    cfg = config(tmp_path / "rows.jsonl", [row, row | changes])
    with pytest.raises(ValueError, match=message) as error:
        problems(cfg, "train")
    assert f"{tmp_path / 'rows.jsonl'}:2: " in str(error.value)
    assert "fix or delete it" in str(error.value) and ", ".join(row) in str(error.value)


TARGET = {"target": ["Paris"]}  # as Search-R1 has it
SEVERAL = [["1"], ["2"]]


@pytest.mark.parametrize(
    ("name", "changes", "given", "message"),
    [
        ("gsm8k", {"answer": ["1", None]}, ["1", None], r"'answer': .* got \['1', None\]"),
        ("gsm8k", {"answer": []}, [], r"'answer': expected an answer .* got \[\]"),
        ("gsm8k", {"answer": SEVERAL}, SEVERAL, "'answer': expected an answer"),
        ("gsm8k", {"answer": ["#### 1", "2 ####"]}, ["#### 1", "2 ####"], "after '####'"),
        ("gsm8k", {"answer": None}, None, "'answer': expected an answer .* got None"),
        ("MATH with a solution", {"solution": "It is 5."}, "It is 5.", "in .boxed{} or after '##"),
        ("MATH with a solution", {"solution": TARGET}, TARGET, "'solution': expected an answer"),
        ("DAPO", {"reward_model": {"ground_truth": TARGET}}, TARGET, "model.ground_truth': expec"),
        ("DAPO", {"reward_model": {"ground_truth": ""}}, "", "'reward_model.ground_truth': expec"),
        ("DAPO", {"reward_model": {"style": "rule"}}, None, "'reward_model.ground_truth': expecte"),
        ("DAPO", {"reward_model": "34"}, "34", "'reward_model': expected {'ground_truth'"),
        ("TRL with text", {"answer": True}, True, "'answer': expected an answer .* got True"),
        ("TRL with text", {"answer": TARGET}, TARGET, "'answer': expected an answer"),
        ("TRL with text", {"answer": float("inf")}, float("inf"), "'answer': expected an answer"),
        ("messages", {"solution": TARGET}, TARGET, "'solution': expected an answer"),
        ("slime with text", {"label": TARGET}, TARGET, "'label': expected an answer"),
    ],
)
def test_what_is_no_gold_answer_is_refused_by_rewards_that_compare_answers_alone(
    tmp_path, chatty, name, changes, given, message
):
    row = ROWS[name][0]
    cfg = config(tmp_path / "rows.jsonl", [*[row] * 400, row | changes])

    def read(reward, **more):
        settings = {"data": cfg, "reward": reward, "eval": EvalSection(problems=0), **more}
        return read_inputs(RLConfig(**settings), chatty, "policy")

    inputs = read("odd_rewards:keeps")
    *_, problem = inputs.problems
    assert problem.answer == "" and problem.row == row | changes
    assert Scorer("odd_rewards:keeps", odd_rewards.keeps)("text", problem) == Score(1.0)
    kept = odd_rewards.KEPT.pop()
    assert kept["answer"] == given
    further = problem.row.keys() - {"prompt", "question", "problem", "messages"}
    assert all(kept[column] == problem.row[column] for column in further)
    for reward in ("math_verify", "exact", "number", "choice", ["odd_rewards:keeps", "exact"]):
        with pytest.raises(ValueError, match=message) as error:
            read(reward)
        said = str(error.value)
        assert f"{tmp_path / 'rows.jsonl'}:401: " in said and "data.answer_key=COLUMN" in said
        assert f"reward={', '.join([reward] if isinstance(reward, str) else reward)}" in said
    cfg.unwinnable = "drop"
    assert any("(data.unwinnable=drop)" in note for note in read("math_verify").notes)
    assert Scorer("exact")("text\n#### ", problem) == Score(0.0), "there is nothing to equal"


def test_held_out_rows_without_a_gold_answer_are_refused_likewise(tmp_path, chatty):
    rows = tmp_path / "rows.jsonl"
    cfg = config(rows, [{"prompt": "a", "answer": 1}])
    held = lines([{"prompt": "another", "answer": TARGET}])
    (tmp_path / "held.jsonl").write_bytes(held)
    read_inputs(RLConfig(data=cfg, reward="odd_rewards:keeps"), chatty, "policy")
    with pytest.raises(ValueError, match="held out: 1 of 1 .*held.jsonl:1: column 'answer'"):
        read_inputs(RLConfig(data=cfg, reward="number"), chatty, "policy")
    cfg = config(rows, [{"prompt": "a", "answer": 1}])
    (tmp_path / "held.jsonl").write_bytes(held)
    sets = {"x": {"path": cfg.heldout_path}}
    run = RLConfig(data=cfg, reward="number", eval=EvalSection(0, sets))
    with pytest.raises(ValueError, match=r"eval.sets.x: .*held.jsonl:1.*eval.sets.x.answer_key="):
        problem_sets(run, read_inputs(run, chatty, "policy"), "policy")


def test_rows_with_other_values_in_the_place_of_an_answer_are_no_duplicates(tmp_path):
    rows = [{"prompt": "a", "answer": {"target": [i % 2]}} for i in range(3)]
    cfg = config(tmp_path / "rows.jsonl", rows)
    assert data.read_table(cfg.path, data.find_task(cfg)).duplicates == 1


TURNS = [SAYS, *USER, SAYS]


@pytest.mark.parametrize(
    ("name", "changes", "answer", "message"),
    [
        ("TRL with messages", {"completion": TURNS}, "3", ":2: column 'completion': expected text"),
        ("TRL with messages", {"completion": 5}, "3", ":2: column 'completion': expected text"),
        ("MATH with both", {"solution": TARGET}, "\\frac12", ":2: column 'solution': expected"),
        ("gsm8k", {"answer": TARGET}, "", ":2: column 'answer': expected"),
        (
            "messages with an answer",
            {"messages": [*USER, SAYS | {"content": None}]},
            "7",
            r":2: column 'messages\[1\]': expected content that is text",
        ),
    ],
)
def test_a_demonstration_that_cannot_be_read_is_refused_where_it_is_imitated(
    tmp_path, name, changes, answer, message
):
    row = ROWS[name][0]
    first = row if name != "messages with an answer" else row | {"messages": [*USER, SAYS]}
    cfg = config(tmp_path / "rows.jsonl", [first, row | changes])
    assert problems(cfg, "train")[1].answer == answer
    with pytest.raises(ValueError, match=message):
        demonstrations(cfg, "train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
            "is a Git LFS pointer.*`git lfs pull`",
        ),
        (gzip.compress(lines([ROWS["gsm8k"][0]]) * 50, mtime=0)[:-20], "gzip file is damaged"),
        (parquet([ROWS["gsm8k"][0]])[:-20], "parquet file is damaged"),
        (b"question,answer\n1+1?,2\n", "rows:1: not JSON"),
        (b'[{"prompt": "a"}, ', "not JSON"),
        (b'[{"prompt": "a"}, 5]', "row 2: expected a JSON object"),
        (b'[{"prompt": "a"} {"prompt": "b"}]', "row 1: not JSON .Expecting ',' or ']'"),
        (b'[{"prompt": "a"}, ]', "row 2: not JSON"),
        (b'[{"prompt": "a"}] []', "more text after the array"),
        (b'[{"prompt": "\xff"}]', "not JSON"),
        (b'"prompt"\n', "rows:1: expected a JSON object"),
        (b"[" * 100_000, "rows: row 1: not JSON .* nested too deeply"),
        (b' [{"prompt": "a"},' + b'{"a":[' * 50_000, "rows: row 2: not JSON .* nested too deeply"),
        (b'{"question":' * 50_000, "rows:1: not JSON .* nested too deeply"),
        (b'{"prompt": "a", "answer": "1"}\n{"a":' + b"[" * 50_000, "rows:2: .* nested too deeply"),
        (b"[]", "the file is empty"),
        (b"", "the file is empty"),
    ],
)
def test_a_file_that_is_none_of_rows_is_one_clear_message(tmp_path, content, message):
    (tmp_path / "rows").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        problems(DataConfig(path=str(tmp_path / "rows")), "train")


@pytest.mark.parametrize(
    ("rows", "place", "column"),
    [
        (b'{"question": "a\\ud800", "answer": "3"}', "rows.jsonl:1", "question"),
        (
            b'{"question": "a", "answer": "3"}\n{"question": "b", "answer": "\\uDFFF3"}',
            ":2",
            "answer",
        ),
        (
            b'[{"prompt": [{"role": "user", "content": "\\udc00"}], "label": "3"}]',
            "row 1",
            "prompt",
        ),
        (b'{"problem": "a", "answer": "3", "tags": {"\\ud83d": 1}}', "rows.jsonl:1", "tags"),
    ],
)
def test_half_of_a_character_is_named_with_its_row_and_column(
    tmp_path, monkeypatch, capsys, thin_policy, rows, place, column
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_bytes(rows)
    with pytest.raises(SystemExit) as error:
        data_report.main(["rows.jsonl", "--model", str(thin_policy)])
    said = capsys.readouterr().err + str(error.value)
    assert f"{place}: column '{column}' holds half of a character" in said
    assert "Traceback" not in said and len(said.strip().splitlines()) == 1


def test_a_character_of_two_surrogates_is_text(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"question": "a \\ud83d\\ude00?", "answer": "3"}\n' * 2)
    assert (
        "\U0001f600" in problems(DataConfig(path=str(tmp_path / "rows.jsonl")), "train")[0].prompt
    )


def test_a_task_may_be_named_and_must_fit_the_rows(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    row = {"question": "a", "answer": "1", "prompt": "b"}
    assert problems(config(path, [row], task="prompt"), "train")[0].prompt == "b"
    with pytest.raises(ValueError, match="rows.jsonl:1: column 'problem': expected text"):
        problems(config(path, [row], task="math"), "train")
    with pytest.raises(ValueError, match="generated and reads no file"):
        config(path, [row], task="sums")
    with pytest.raises(ValueError, match="data.path"):
        problems(DataConfig(task="verl"), "train")
    with pytest.raises(ValueError, match="heldout_path"):
        problems(DataConfig(heldout_path=str(path)), "train")


OWN = Layout(
    name="riddles",
    columns="riddle",
    recognises=lambda columns: "riddle" in columns,
    read=lambda row: Example(row["riddle"], row["word"], None, {"hint": row["hint"]}),
    reward="exact",
    template="Riddle: {question}",
)


def test_a_task_of_ones_own_is_named_by_its_path(tmp_path):
    row = {"riddle": "a", "word": "b", "hint": "c"}
    cfg = config(tmp_path / "rows.jsonl", [row], task="test_tasks:OWN")
    held = tmp_path / "held.jsonl"
    held.write_bytes(lines([row | {"riddle": "d"}]))
    (problem,) = problems(cfg, "train")
    assert (problem.prompt, problem.answer) == ("Riddle: a", "b")
    assert problem.columns == {"hint": "c"} and data.default_reward(cfg) == "exact"
    for task, message in (
        ("test_tasks:", "unknown task"),
        (":x", "unknown task"),
        ("no.module:x", "cannot load"),
        ("test_tasks:ROWS", "is a dict"),
        ("test_tasks:none", "cannot load"),
    ):
        with pytest.raises(ValueError, match=message):
            problems(config(tmp_path / "rows.jsonl", [row], task=task), "train")


@dataclasses.dataclass
class Riddles:
    """A task of one's own that is not hashable, as a dataclass that is not frozen."""

    name: str = "riddles"
    columns: str = "riddle"
    reward: str = "exact"
    template: str = "{question}"

    def recognises(self, columns) -> bool:
        return "riddle" in columns

    def read(self, row) -> Example:
        return Example(row["riddle"], row["word"])


RIDDLES = Riddles()


def test_a_task_need_not_be_hashable(tmp_path):
    cfg = config(tmp_path / "rows.jsonl", [{"riddle": "a", "word": "b"}], task="test_tasks:RIDDLES")
    (tmp_path / "held.jsonl").write_bytes(lines([{"riddle": "d", "word": "e"}]))
    assert [problem.answer for problem in problems(cfg, "train")] == ["b"]
    table = data.read_table(cfg.path, RIDDLES)
    assert data.read_table(cfg.path, RIDDLES) is table, "it is read once"
    assert data.read_table(cfg.path, Riddles()) is not table


def test_each_task_knows_its_own_columns_first():
    for row, (task, *_) in ROWS.values():
        assert recognise(row).name == task
    assert [find_task(name).name for name in TASKS.names] == [*TASKS.names]


def test_duplicates_are_counted_and_dropped_by_choice(tmp_path):
    row, other = ROWS["DAPO"][0], ROWS["DAPO"][0] | {"prompt": USER}
    again = row | {"extra_info": {"index": "2"}}
    for choice, kept in (("keep", 5), ("drop", 2)):
        cfg = config(tmp_path / "rows.parquet", [row, again, other, again, row], parquet)
        cfg.duplicates = choice
        assert len(problems(cfg, "train")) == kept
        assert data.read_table(cfg.path, data.find_task(cfg), choice).duplicates == 3
    with pytest.raises(ValueError, match="data.duplicates must be one of keep, drop"):
        DataConfig(duplicates="count")


def test_rows_with_several_gold_answers_are_counted_at_start(tmp_path):
    rows = [{"prompt": "a", "answer": ["1", "2"]}, {"prompt": "b", "answer": ["3"]}]
    rows += [{"prompt": "a", "answer": ["1", "2"]}, {"prompt": "c", "answer": '["4", "5"]'}]
    cfg = config(tmp_path / "rows.jsonl", rows)
    said = describe_data(cfg, chat=False, model=None)
    assert "4 rows" in said and "1 duplicates kept" in said
    assert "3 with several gold answers, of which any is right" in said
    assert "several gold" not in describe_data(
        config(tmp_path / "one.jsonl", rows[1:2]), False, None
    )


def test_both_splits_of_one_file_share_no_prompt(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": i} for i in range(200)]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    cfg = DataConfig(path=str(tmp_path / "rows.jsonl"))
    train, held = ({p.prompt[0]["content"] for p in problems(cfg, s)} for s in ("train", "heldout"))
    assert len(train) + len(held) == 200 and held and not train & held


# --- the chat template ---------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if think is defined %}{{ think }}{% endif %}"
    "{% endif %}"
)


@pytest.fixture(scope="module")
def plain(tiny_policy):
    from specjax.tokenizer import load_tokenizer

    return load_tokenizer(tiny_policy)


@pytest.fixture(scope="module")
def chat_policy(thin_policy, tmp_path_factory):
    """The tiny policy, its tokenizer with a chat template."""
    path = shutil.copytree(thin_policy, tmp_path_factory.mktemp("chat") / "policy")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def chatty(chat_policy):
    from specjax.tokenizer import load_tokenizer

    return load_tokenizer(chat_policy)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("gsm8k", {}, "<user>How much is 1+2?\n<assistant>"),
        ("TRL with text", {}, "<user>How much? \n<assistant>"),
        ("MATH with both", {"chat": "on"}, "<user>Solve.\n<assistant>"),
        ("MATH with both", {"chat": "off"}, "Problem: Solve.\nSolution:"),
        ("gsm8k", {"prompt_template": "Q: {question}"}, "<user>Q: How much is 1+2?\n<assistant>"),
        ("DAPO", {}, "<system>Be brief.\n<user>How much is 1+2?\n<assistant>"),
        ("DAPO", {"chat": "off"}, "<system>Be brief.\n<user>How much is 1+2?\n<assistant>"),
        ("messages", {"chat_template_kwargs": {"think": "no"}},
         "<system>Be brief.\n<user>How much is 1+2?\n<assistant>no"),
    ],
)  # fmt: skip
def test_prompts_go_through_the_chat_template(tmp_path, chatty, name, changes, expected):
    cfg = config(tmp_path / "rows.jsonl", [ROWS[name][0]], **changes)
    prompts = Prompts(chatty, cfg)
    (problem,) = problems(cfg, "train", prompts.chat)
    assert prompts.text(problem) == expected
    assert chatty.decode(prompts.ids(problem)) == expected
    assert prompts.ids(problem) == chatty.encode(expected, add_special_tokens=False)


def test_without_a_template_text_stays_text_and_conversations_are_refused(tmp_path, plain):
    cfg = config(tmp_path / "rows.jsonl", [ROWS["gsm8k"][0]])
    prompts = Prompts(plain, cfg)
    (problem,) = problems(cfg, "train", prompts.chat)
    assert prompts.text(problem) == "Question: How much is 1+2?\nAnswer:"
    assert prompts.ids(problem) == encode_prompt(plain, problem.prompt)
    cfg = config(tmp_path / "rows.jsonl", [ROWS["DAPO"][0]])
    (problem,) = problems(cfg, "train")
    with pytest.raises(ValueError, match="rows.jsonl:1: .* need a chat template"):
        Prompts(plain, cfg).ids(problem)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chat": "on"}, "data.chat=on: the model's tokenizer has no chat template"),
        ({"chat_template_kwargs": {"a": 1}}, "data.chat_template_kwargs: the model's tokenizer"),
    ],
)
def test_settings_of_a_template_that_there_is_not_are_refused(plain, changes, message):
    with pytest.raises(ValueError, match=message):
        Prompts(plain, DataConfig(**changes))


@pytest.mark.parametrize("name", ["chat_template", "add_generation_prompt", "tokenize"])
def test_a_setting_of_transformers_is_no_argument_of_the_template(chatty, name):
    message = f"data.chat_template_kwargs: {name} is an argument of transformers"
    with pytest.raises(ValueError, match=message):
        Prompts(chatty, DataConfig(chat_template_kwargs={"think": "no", name: "{{ 1 }}"}))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"think": "no", "thinks": "no"}, "thinks changes nothing: .* did you mean 'think'?"),
        ({"enable": False}, r"enable changes nothing: .* \(it reads think\); leave it out"),
    ],
)
def test_an_argument_that_the_template_does_not_read_is_refused(
    tmp_path, chatty, chat_policy, monkeypatch, caplog, given, said
):
    cfg = config(tmp_path / "rows.jsonl", [ROWS["DAPO"][0]], chat_template_kwargs=given)
    for program in (rl, sft):
        more = "model=" if program is rl else "init="
        argv = [f"data.{key}={getattr(cfg, key)}" for key in ("path", "heldout_path")]
        argv += [f"{more}{chat_policy}", f"out={tmp_path / 'run'}"]
        with pytest.raises(SystemExit, match=f"data.chat_template_kwargs: {said}"):
            program.main([*argv, f"data.chat_template_kwargs={json.dumps(given)}"])
    cfg.chat_template_kwargs = {"think": "no"}
    sets = EvalSection(0, {"x": {"path": cfg.path, "chat_template_kwargs": given}})
    run = RLConfig(data=cfg, reward="number", eval=sets)
    with pytest.raises(ConfigError, match=rf"eval\.sets\.x\.chat_template_kwargs: {said}"):
        problem_sets(run, read_inputs(run, chatty, "policy"), "policy")
    monkeypatch.setattr(chatty, "chat_template", "{% unknown %}")
    Prompts(chatty, DataConfig(chat_template_kwargs=given))
    assert f"not known whether the chat template reads {', '.join(given)}" in caplog.text


@pytest.mark.parametrize(
    ("program", "schema", "given"),
    [(Trainer, RLConfig, "model=m"), (sft.Run, SFTConfig, "steps=3"),
     (draft.Run, DraftRunConfig, "model=m")],
)  # fmt: skip
def test_a_run_goes_on_without_an_argument_that_the_template_does_not_read(
    tmp_path, chatty, program, schema, given
):
    cfg, _ = parse_config(schema, [given, "data.path=rows.jsonl", KWARGS])
    run = SimpleNamespace(cfg=cfg, tokenizer=chatty, stream=SimpleNamespace(tokenizer=chatty))
    run.fingerprint = lambda: program.fingerprint(run)

    def resume(**options) -> None:
        """Goes on with a checkpoint that has settings alone."""
        saved = json.loads(json.dumps(run.fingerprint()))
        saved["data"]["chat_template_kwargs"] = options
        checkpoints = SimpleNamespace(restore=lambda step, trees: ({}, {"settings": saved}))
        try:
            program.restore(run, checkpoints, None)
        except (AttributeError, KeyError):  # what is read after the settings
            pass
        if program is draft.Run:
            draft_data.check_samples(cfg, tmp_path, False, chatty)
            file = tmp_path / draft_data.SAMPLES / draft_data.SETTINGS
            sampled = json.loads(file.read_text())
            sampled["data"]["chat_template_kwargs"] = options
            file.write_text(json.dumps(sampled))
            draft_data.check_samples(cfg, tmp_path, True, chatty)

    resume(think="no", thinks="no")
    for options in ({"thinks": "no"}, {"think": "yes", "thinks": "no"}):
        with pytest.raises(ConfigError, match="made with other settings of data"):
            resume(**options)


@pytest.mark.parametrize(
    "template",
    [
        "{% if a is not defined %}{% set a = true %}{% endif %}{{ a }}",
        "{% set a = a | default(true) %}{% generation %}{{ a }}{% endgeneration %}",
        "{% for m in messages %}{% if a and loop.last %}{% break %}{% endif %}{% endfor %}",
        "{% macro f(x) %}{{ x ~ a }}{% endmacro %}{{ f(raise_exception) }}",
    ],
)
def test_a_variable_is_found_wherever_the_template_reads_it(chatty, monkeypatch, template):
    monkeypatch.setattr(chatty, "chat_template", template)
    Prompts(chatty, DataConfig(chat_template_kwargs={"a": False}))
    with pytest.raises(ValueError, match="b changes nothing"):
        Prompts(chatty, DataConfig(chat_template_kwargs={"b": False}))


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{{ [].pop() }}", "{{ messages[3].x.y }}"])
def test_whatever_a_template_raises_is_one_line_with_the_row(
    tmp_path, chatty, monkeypatch, template
):
    monkeypatch.setattr(chatty, "chat_template", template)
    cfg = config(tmp_path / "rows.jsonl", [ROWS["DAPO"][0]])
    message = (
        r"^the row \S*rows.jsonl:1: the chat template does not take these messages: \w+: [^\n]*$"
    )
    with pytest.raises(ValueError, match=message):
        Prompts(chatty, cfg).ids(problems(cfg, "train")[0])


def test_a_conversation_that_the_template_refuses_is_named(tmp_path, chatty):
    row = {"messages": [*USER, {"role": "tool", "content": "x"}], "answer": "1"}
    cfg = config(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ValueError, match="rows.jsonl:1: the chat template does not .*no tools"):
        Prompts(chatty, cfg).ids(problems(cfg, "train")[0])


def test_a_template_for_text_is_refused_where_prompts_are_conversations(tmp_path):
    cfg = config(tmp_path / "rows.jsonl", [ROWS["DAPO"][0]], prompt_template="Q: {question}")
    with pytest.raises(ValueError, match="data.prompt_template is for prompts that are text"):
        problems(cfg, "train")


@pytest.mark.parametrize("name", ["messages", "gsm8k", "TRL with messages"])
def test_demonstrations_are_packed_with_the_same_prompts(tmp_path, chat_policy, chatty, name):
    cfg = config(tmp_path / "rows.jsonl", [ROWS[name][0]])
    argv = [f"data.{key}={getattr(cfg, key)}" for key in ("path", "heldout_path")]
    argv += [f"init={chat_policy}", "packing.row_length=128", "packing.rows=1"]
    stream = sft.PackedDemonstrations(parse_config(SFTConfig, argv)[0], chatty)
    batch = stream.next_update()[0]
    (problem,) = problems(cfg, "train", True)
    ids = Prompts(chatty, cfg).ids(problem)
    assert batch["tokens"][0, : len(ids)].tolist() == ids
    taught = batch["tokens"][0][(batch["loss_mask"][0] > 0) & (batch["segment_ids"][0] == 1)]
    said = demonstrations(cfg, "train", True)[0].response + chatty.eos_token
    assert chatty.decode(taught) == said


def run_arguments(cfg, chat_policy, out, *more: str) -> list[str]:
    """Of a run whose settings are refused before it computes anything."""
    given = [f"data.{key}={getattr(cfg, key)}" for key in ("path", "heldout_path")]
    return [*given, f"model={chat_policy}", f"out={out}", *more]


KWARGS, OFF = "data.chat_template_kwargs={think: no}", "data.chat=off"


@pytest.mark.parametrize("name", ["gsm8k", "MATH with both"])
@pytest.mark.parametrize("program", [rl, sft])
def test_arguments_of_a_template_are_refused_where_prompts_stay_text(
    tmp_path, chat_policy, program, name, capsys
):
    cfg = config(tmp_path / "rows.jsonl", [ROWS[name][0]])
    argv = run_arguments(cfg, chat_policy, tmp_path / "run", KWARGS, OFF)
    with pytest.raises(SystemExit) as ended:
        program.main(argv)
    said = f"{ended.value} {capsys.readouterr().err}"
    assert "data.chat_template_kwargs={think: 'no'} changes nothing: the prompts of" in said


@pytest.mark.parametrize(
    ("name", "typed", "filed"),
    [
        ("messages", [KWARGS, OFF], ""),  # conversations go through the template all the same
        ("gsm8k", [KWARGS], ""),
        ("gsm8k", [OFF], "data: {chat_template_kwargs: {think: no}}"),  # files are shared by runs
    ],
)
def test_arguments_of_a_template_that_is_applied_are_taken(
    tmp_path, chat_policy, chatty, name, typed, filed
):
    cfg = config(tmp_path / "rows.jsonl", [ROWS[name][0]])
    (tmp_path / "c.yaml").write_text(filed)
    more = [*typed, "--config", str(tmp_path / "c.yaml")]
    argv = run_arguments(cfg, chat_policy, tmp_path / "run", *more)
    require_template(parse_config(RLConfig, argv)[0], problems(cfg, "train", True)[0].prompt)
    sft.PackedDemonstrations(parse_config(SFTConfig, argv)[0], chatty)


@pytest.mark.parametrize("name", ["MATH with both", "messages"])
def test_annotations_are_kept_of_rows_that_may_have_them_only(tmp_path, chat_policy, chatty, name):
    keep = "data.strip_calculator=false"
    for row, refused in ((name, True), ("gsm8k", False)):
        cfg = config(tmp_path / "rows.jsonl", [ROWS[row][0]])
        argv = run_arguments(cfg, chat_policy, tmp_path / "run", keep)
        cfg = parse_config(SFTConfig, argv)[0]
        if not refused:
            sft.PackedDemonstrations(cfg, chatty)
            continue
        with pytest.raises(ConfigError, match="strip_calculator=false changes nothing: such ann"):
            sft.PackedDemonstrations(cfg, chatty)


# --- python -m train.data ------------------------------------------------------------------------


def show(capsys, *argv) -> str:
    data_report.main([str(a) for a in argv])
    return capsys.readouterr().out


def test_the_report_is_a_program_that_may_be_cut_short(tmp_path, chat_policy):
    (tmp_path / "rows.jsonl").write_bytes(lines([{"prompt": "a" * 4000, "answer": 1}] * 60))
    command = [sys.executable, "-m", "train.data", tmp_path / "rows.jsonl", "--model", chat_policy]
    with subprocess.Popen(
        [*command, "--rows=60"],
        cwd=Path(data.__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert b"60 rows read as prompt" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0 and process.stderr.read() == b""


def test_the_report_shows_rows_as_the_model_sees_them(tmp_path, capsys, chat_policy, thin_policy):
    rows = [{"problem": f"How much is {i}+{i}?", "answer": 2 * i} for i in range(60)]
    rows += [rows[3], rows[3] | {"answer": "\\frac{1}{"}]
    path = tmp_path / "rows.parquet"
    path.write_bytes(parquet([r | {"answer": str(r["answer"])} for r in rows]))
    said = show(capsys, path, "--model", chat_policy, "--max-prompt-tokens", 5)
    assert said.startswith(f"data: {path}, 62 rows read as math (problem, answer or solution), 1 ")
    assert "one message of the user, through the chat template; reward math_verify" in said
    assert said.count("\n--- the row ") == 10
    assert "<user>How much is 2+2?\n<assistant>\n" in said and "gold answer '4'" in said
    assert "prompt length in tokens: shortest " in said and "median " in said
    assert "duplicates (prompt and answer of an earlier row): 1 " in said
    assert "reward=math_verify cannot win (it reads formulas that parse, and words): 1 of" in said
    assert f"  the row {path}: row 62: gold answer '\\\\frac{{1}}{{'" in said
    assert "longer than 5 tokens: " in said
    said = show(capsys, path, "--model", thin_policy, "--rows", 2, "data.duplicates=drop",
                "prompt_template='Q {question}'", "--reward", "number")  # fmt: skip
    assert said.count("\n--- the row ") == 2 and "Q How much is 0+0?\n" in said
    assert "1 duplicates dropped" in said and "plain text; reward number" in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no.jsonl"], "no.jsonl: no such file"),
        (["rows.jsonl", "task=gsm"], "data.task: unknown task 'gsm'; choose one of verl"),
        (["rows.jsonl", "task=math"], "column 'problem': expected text"),
        (["rows.jsonl", "tusk=math"], "unknown key 'tusk'"),
        (["rows.jsonl", "--reward", "best"], "unknown reward 'best'"),
        (["rows.jsonl", "--model", "nowhere"], "nowhere does not exist; expected a checkpoint"),
        (["rows.jsonl", "--model", "."], "has no tokenizer.json"),
        (["rows.jsonl", "--revision", "v1"], "revision 'v1' belongs to a Hugging Face id"),
        (["rows.jsonl", "chat=on"], "has no chat template"),
    ],
)
def test_a_mistake_in_the_report_s_arguments_is_one_message(
    tmp_path, monkeypatch, capsys, thin_policy, argv, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_bytes(lines([ROWS["gsm8k"][0]] * 40))
    with pytest.raises(SystemExit) as error:
        data_report.main([argv[0], "--model", str(thin_policy), *argv[1:]])
    said = capsys.readouterr().err + str(error.value)
    assert message in said and "Traceback" not in said
