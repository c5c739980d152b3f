"""Rows of every task and file format, what the model sees of them, and what is refused."""

import gzip
import json
import shutil

import odd_rewards
import pyarrow
import pyarrow.parquet
import pytest

from specjax.tokenizer import load_tokenizer
from train.data import __main__ as data_report
from train.data import rows as data
from train.data.checks import read_inputs
from train.data.prompts import Prompts
from train.data.rows import demonstrations, problems
from train.data.tasks import find_task
from train.data.tasks.layout import Demonstration, Example, Layout
from train.eval_schema import EvalSection
from train.registry import TASKS
from train.rewards.scoring import Score, Scorer
from train.schema import DataConfig, RLConfig

USER = [{"role": "user", "content": "How much is 1+2?"}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *USER]
SAYS = {"role": "assistant", "content": "It is $\\boxed{3}$."}

# row -> (task, prompt, answer, demonstration)
ROWS = {
    "gsm8k": (
        {"question": "How much is 1+2?", "answer": "1+2=<<1+2=3>>3\n#### 3"},
        ("gsm8k", "Question: How much is 1+2?\nAnswer:", "3", "1+2=3\n#### 3"),
    ),
    "MATH with both": (
        {"problem": "Solve.", "solution": "So $x=\\boxed{\\frac{1}{2}}$.", "answer": "\\frac12"},
        ("math", "Problem: Solve.\nSolution:", "\\frac12", "So $x=\\boxed{\\frac{1}{2}}$."),
    ),
    "MATH with a solution": (
        {"problem": "Solve.", "level": "Level 5", "solution": "So $\\boxed{2\\sqrt{3}}$."},
        ("math", "Problem: Solve.\nSolution:", "2\\sqrt{3}", "So $\\boxed{2\\sqrt{3}}$."),
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
    "several answers": (
        {"question": "Where?", "answer": ["Paris", "#### Lyon", 5.0, "5"]},
        ("gsm8k", "Question: Where?\nAnswer:", ("Paris", "Lyon", "5"), "#### Paris"),
    ),
    "several answers written as JSON": (
        {"problem": "Solve.", "answer": '["1", "\\\\boxed{2}"]'},
        ("math", "Problem: Solve.\nSolution:", ("1", "2"), None),
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
        assert demonstrations(cfg, "train")[0] == Demonstration(prompt, response)


@pytest.mark.parametrize("file", FORMATS)
def test_every_format_gives_the_same_problems(tmp_path, file):
    row, (_, prompt, answer, _) = ROWS["DAPO"]
    other = row | {"prompt": [{"role": "user", "content": "Another one?"}]}
    found = problems(config(tmp_path / file, [row, other], FORMATS[file]), "train")
    assert [p.answer for p in found] == [answer, answer]
    assert found[0].prompt == prompt and found[1].prompt != prompt


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


def test_columns_of_no_task_are_listed_with_the_tasks_that_there_are(tmp_path):
    row = {"problem": "a", "topic": "b"}
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
        ("slime with text", {"metadata": "x"}, "'metadata': expected a mapping, got 'x'"),
        ("messages", {"messages": [SAYS]}, "expected a message before the assistant's"),
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


@pytest.mark.parametrize(
    ("name", "changes", "given", "message"),
    [
        ("gsm8k", {"answer": ["1", None]}, ["1", None], r"'answer': .* got \['1', None\]"),
        ("gsm8k", {"answer": ["#### 1", "2 ####"]}, ["#### 1", "2 ####"], "after '####'"),
        ("MATH with a solution", {"solution": "It is 5."}, "It is 5.", "in .boxed{} or after '##"),
        ("DAPO", {"reward_model": {"ground_truth": TARGET}}, TARGET, "model.ground_truth': expec"),
        ("DAPO", {"reward_model": "34"}, "34", "'reward_model': expected {'ground_truth'"),
        ("TRL with text", {"answer": float("inf")}, float("inf"), "'answer': expected an answer"),
        ("slime with text", {"label": TARGET}, TARGET, "'label': expected an answer"),
    ],
)
def test_what_is_no_gold_answer_is_refused_by_rewards_that_compare_answers_alone(
    tmp_path, chatty, name, changes, given, message
):
    row = ROWS[name][0]
    cfg = config(tmp_path / "rows.jsonl", [*[row] * 400, row | changes])

    def read(reward):
        settings = {"data": cfg, "reward": reward, "eval": EvalSection(problems=0)}
        return read_inputs(RLConfig(**settings), chatty, "policy")

    *_, problem = read("odd_rewards:keeps").problems
    assert problem.answer == "" and problem.row == row | changes
    assert Scorer("odd_rewards:keeps", odd_rewards.keeps)("text", problem) == Score(1.0)
    assert odd_rewards.KEPT.pop()["answer"] == given
    with pytest.raises(ValueError, match=message) as error:
        read("math_verify")
    assert f"{tmp_path / 'rows.jsonl'}:401: " in str(error.value)
    cfg.unwinnable = "keep"
    assert any("(data.unwinnable=keep)" in note for note in read("math_verify").notes)


TURNS = [SAYS, *USER, SAYS]


@pytest.mark.parametrize(
    ("name", "changes", "answer", "message"),
    [
        ("TRL with messages", {"completion": TURNS}, "3", ":2: column 'completion': expected text"),
        ("MATH with both", {"solution": TARGET}, "\\frac12", ":2: column 'solution': expected"),
        ("gsm8k", {"answer": TARGET}, "", ":2: column 'answer': expected"),
    ],
)
def test_a_demonstration_that_cannot_be_read_is_refused_where_it_is_imitated(
    tmp_path, name, changes, answer, message
):
    row = ROWS[name][0]
    cfg = config(tmp_path / "rows.jsonl", [row, row | changes])
    assert problems(cfg, "train")[1].answer == answer
    with pytest.raises(ValueError, match=message):
        demonstrations(cfg, "train")


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
        (":x", "unknown task"),
        ("test_tasks:ROWS", "is a dict"),
        ("test_tasks:none", "cannot load"),
    ):
        with pytest.raises(ValueError, match=message):
            problems(config(tmp_path / "rows.jsonl", [row], task=task), "train")


def test_duplicates_are_counted_and_dropped_by_choice(tmp_path):
    row, other = ROWS["DAPO"][0], ROWS["DAPO"][0] | {"prompt": USER}
    again = row | {"extra_info": {"index": "2"}}
    for choice, kept in (("keep", 5), ("drop", 2)):
        cfg = config(tmp_path / "rows.parquet", [row, again, other, again, row], parquet)
        cfg.duplicates = choice
        assert len(problems(cfg, "train")) == kept
        assert data.read_table(cfg.path, data.find_task(cfg), choice).duplicates == 3


# --- the chat template ---------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if think is defined %}{{ think }}{% endif %}"
    "{% endif %}"
)


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
    assert chatty.decode(prompts.whole(problem)) == expected
    assert prompts.whole(problem) == chatty.encode(expected, add_special_tokens=False)


def test_whatever_a_template_raises_is_one_line_with_the_row(tmp_path, chatty, monkeypatch):
    monkeypatch.setattr(chatty, "chat_template", "{{ messages[3].x.y }}")
    cfg = config(tmp_path / "rows.jsonl", [ROWS["DAPO"][0]])
    message = (
        r"^the row \S*rows.jsonl:1: the chat template does not take these messages: \w+: [^\n]*$"
    )
    with pytest.raises(ValueError, match=message):
        Prompts(chatty, cfg).whole(problems(cfg, "train")[0])


# --- python -m train.data ------------------------------------------------------------------------


def test_the_report_shows_rows_as_the_model_sees_them(tmp_path, capsys, chat_policy):
    rows = [{"problem": f"How much is {i}+{i}?", "answer": 2 * i} for i in range(60)]
    rows += [rows[3], rows[3] | {"answer": "\\frac{1}{"}]
    path = tmp_path / "rows.parquet"
    path.write_bytes(parquet([r | {"answer": str(r["answer"])} for r in rows]))
    data_report.main([str(path), "--model", str(chat_policy), "--max-prompt-tokens", "5"])
    said = capsys.readouterr().out
    assert said.startswith(f"data: {path}, 62 rows read as math (problem, answer or solution), 1 ")
    assert "one message of the user, through the chat template; reward math_verify" in said
    assert said.count("\n--- the row ") == 10
    assert "<user>How much is 2+2?\n<assistant>\n" in said and "gold answer '4'" in said
    assert "prompt length in tokens: shortest " in said and "median " in said
    assert "reward=math_verify cannot win: 1 of" in said
    assert f"  the row {path}: row 62: gold answer '\\\\frac{{1}}{{'" in said
    assert "longer than 5 tokens: " in said
