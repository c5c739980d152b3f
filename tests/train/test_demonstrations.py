"""What of a row is imitated, and as which token ids; ids that the model does not have."""

import datetime
import json
import shutil

import pytest
import small_tokenizers

from specjax.command_line import parse_config
from specjax.tokenizer import load_tokenizer
from train import draft, rl, sft
from train import eval as evaluation
from train.data import __main__ as data_report
from train.schema import SFTConfig

# Writes tools, reasoning and calls as templates of instruct models do.
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
    "{% if m.role == 'assistant' %}<|eos|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKS = {"role": "user", "content": "1+2?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}


def says(content="3", **more):
    return {"role": "assistant", "content": content, **more}


@pytest.fixture
def policy(thin_policy, tmp_path):
    """Copies the thin policy; returns a function that changes its tokenizer's settings."""
    path = shutil.copytree(thin_policy, tmp_path / "policy")

    def change(template=None, **settings):
        file = path / "tokenizer_config.json"
        changed = json.loads(file.read_text()) | settings
        file.write_text(json.dumps(changed | ({"chat_template": template} if template else {})))
        return path

    return change


def rows_in(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def held_beside(rows):
    return rows_in(rows.with_name("held.jsonl"), {"prompt": "another", "completion": "1"})


def refusal(program, path, at, rows):
    """What a program says that ends at start; `at` is the setting that names the rows."""
    argv = [f"init={path}" if program is sft else f"model={path}", f"{at}={rows}"]
    argv.append(f"out={rows.parent / 'run'}")
    if at == "data.path":
        argv.append(f"data.heldout_path={held_beside(rows)}")
    elif at == "data.texts":
        argv.append("eval.problems=0")
    if program is draft:
        argv += ["rollout.max_prompt_tokens=16", "rollout.max_tokens=16"]
    if program is data_report:
        argv = [str(rows), "--model", str(path)]
    with pytest.raises(SystemExit) as ended:
        program.main(argv)
    return str(ended.value)


def imitated(path, rows, *more, tokenizer=None):
    """The text of the first prompt, and of what is imitated after it."""
    argv = [f"init={path}", f"data.path={rows}", f"data.heldout_path={held_beside(rows)}"]
    cfg, _ = parse_config(SFTConfig, [*argv, "packing.row_length=512", "packing.rows=1", *more])
    tokenizer = tokenizer or load_tokenizer(path)
    stream = sft.PackedDemonstrations(cfg, tokenizer)
    batch = stream.next_update()[0]
    first = batch["segment_ids"][0] == 1
    ids, mask = batch["tokens"][0][first], batch["loss_mask"][0][first] > 0
    return ids[~mask].tolist(), ids[mask].tolist(), next(iter(stream.warnings), None)


@pytest.mark.parametrize(
    ("row", "taught"),
    [
        ({"messages": [ASKS, says()]}, "3<|eos|>"),
        ({"messages": [ASKS, says("3<|eos|>")]}, "3<|eos|>"),
        ({"messages": [ASKS, says(reasoning_content="why")]}, "<think>why</think>3<|eos|>"),
        (
            {"messages": [ASKS, says("", tool_calls=[CALL])], "tools": [TOOL]},
            f"<call>{json.dumps(CALL['function'])}</call><|eos|>",
        ),
        (
            {"messages": [ASKS, {**says(), "content": None, "tool_calls": [CALL]}]},
            f"<call>{json.dumps(CALL['function'])}</call><|eos|>",
        ),
        ({"messages": [ASKS, says()], "tools": [json.dumps(TOOL)]}, "3<|eos|>"),
        ({"messages": [ASKS, says("", tool_calls=[CALL]), {"role": "tool", "content": "3"}, says()],
          "tools": json.dumps([TOOL])}, "3<|eos|>"),
        ({"prompt": [ASKS], "completion": [says(reasoning_content="why")]},
         "<think>why</think>3<|eos|>"),
        ({"prompt": "1+2?", "completion": " 3<|eos|>"}, " 3<|eos|>"),
    ],
    ids=["text", "end twice", "reasoning", "calls", "no content", "tools of text", "turns",
         "completion", "string"],
)  # fmt: skip
def test_what_is_imitated_is_what_the_template_writes_after_the_prompt(
    policy, tmp_path, row, taught
):
    path = policy(TEMPLATE)
    prompt, response, warning = imitated(path, rows_in(tmp_path / "rows.jsonl", row))
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(response) == taught and warning is None
    tools = [TOOL] if "tools" in row else None
    prompts = row.get("messages", [ASKS, None])[:-1]
    written = tokenizer.apply_chat_template(
        prompts, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(prompt) == written
    whole = tokenizer.encode(written + taught, add_special_tokens=False)
    assert [*prompt, *response] == whole


@pytest.mark.parametrize(
    ("opening", "content", "taught"),
    [
        ("<think>\n", "<think>\nwhy</think>3", "why</think>3"),
        ("<think>\n", "why</think>3", "why</think>3"),
        ("<think>", "> why</think>3", "> why</think>3"),
    ],
)
def test_reasoning_that_the_prompt_opens_is_not_opened_twice(
    policy, tmp_path, opening, content, taught
):
    """Templates that leave reasoning out of earlier turns open it for the next one."""
    rows = rows_in(tmp_path / "rows.jsonl", {"messages": [ASKS, says(content, weight=1)]})
    path = policy(
        "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
        f"{{% if add_generation_prompt %}}<assistant>{opening}{{% endif %}}"
    )
    prompt, response, warning = imitated(path, rows)
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(prompt) == f"<user>1+2?\n<assistant>{opening}"
    assert tokenizer.decode(response) == f"{taught}<|eos|>" and "weight of 1" in warning


@pytest.mark.parametrize(
    ("program", "row", "named"),
    [
        (sft, {"prompt": "1+2=", "completion": " "}, "the demonstration is empty"),
        (sft, {"messages": [ASKS, says("", tool_calls=[CALL])]}, "nothing of its tool_calls"),
        (sft, {"messages": [ASKS, says()], "tools": [TOOL]}, "a column `tools`"),
        (draft, {"prompt": "1+2=", "completion": " 3", "tools": ["add"]}, "column 'tools'"),
        (draft, {"prompt_token_ids": [3], "token_ids": "4"}, "column 'token_ids'"),
        (rl, {"prompt": [ASKS], "answer": "3", "tools": [TOOL]}, "a column `tools`"),
        (rl, {"messages": [ASKS, says()], "label": "3"}, "set data.task to one of"),
    ],
)
def test_rows_of_which_nothing_would_be_imitated_or_read_are_refused(
    policy, tmp_path, program, row, named
):
    at = "data.texts" if program is draft else "data.path"
    said = refusal(program, policy(PLAIN), at, rows_in(tmp_path / "rows.jsonl", row))
    assert named in said and "rows.jsonl:1" in said


WORDS = "<|extra|>"  # a token of the tokenizer for which the model has no row


@pytest.mark.parametrize(
    ("program", "at", "row"),
    [
        (rl, "data.path", {"prompt": f"1{WORDS}", "answer": "1"}),
        (evaluation, "eval.sets.x.path", {"prompt": f"1{WORDS}", "answer": "1"}),
        (sft, "data.path", {"prompt": "1+2=", "completion": f" {WORDS}3"}),
        (draft, "data.texts", {"text": f"one {WORDS} two"}),
        (draft, "data.texts", {"prompt_token_ids": [3], "token_ids": [5, 272]}),
        (data_report, "data.path", {"prompt": f"1{WORDS}", "answer": "1"}),
    ],
)
def test_ids_that_the_model_does_not_have_are_refused_by_every_program(
    policy, tmp_path, program, at, row
):
    path, rows = policy(), rows_in(tmp_path / "rows.jsonl", row)
    tokenizer = load_tokenizer(path)
    tokenizer.add_tokens([WORDS])
    assert len(tokenizer) == 273, "one more than the model has rows"
    tokenizer.save_pretrained(path)
    said = refusal(program, path, at, rows)
    assert "rows.jsonl:1" in said and f"token id 272 ({WORDS!r})" in said


@pytest.mark.parametrize("kind", small_tokenizers.KINDS)
@pytest.mark.parametrize("asks", ["the cat", "the cat\n", "the cat "])
@pytest.mark.parametrize("answers", ["the end", " the end", "\nthe"])
def test_a_response_has_the_ids_that_it_has_in_the_whole_text(tmp_path, kind, asks, answers):
    """Where no token of the whole text reaches over the boundary; there, the prompt keeps its ids.

    Alone, a tokenizer of SentencePiece's kind begins every text with a space.
    """
    path = small_tokenizers.save(tmp_path / "tokenizer", kind)
    tokenizer = load_tokenizer(path)
    rows = rows_in(tmp_path / "rows.jsonl", {"prompt": asks, "completion": answers})
    more = ("data.prompt_template='{question}'",)
    prompt, response, _ = imitated(path, rows, *more, tokenizer=tokenizer)
    assert prompt == tokenizer.encode(asks)
    assert response[-1] == tokenizer.eos_token_id
    whole = tokenizer.encode(asks + answers)
    if whole[: len(prompt)] == prompt:
        assert response[:-1] == whole[len(prompt) :]
    assert tokenizer.decode([*prompt, *response[:-1]]) == tokenizer.decode(whole)


# --- templates that write the date ---------------------------------------------------------------

DATED = "{{ strftime_now('%d %b %Y') }}\n" + PLAIN


@pytest.mark.slow
def test_a_run_keeps_the_date_of_its_first_start(policy, tmp_path, capsys):
    """On another day it has the same prompts, and so has what evaluates it."""
    path, out = policy(DATED), tmp_path / "run"
    rows = rows_in(tmp_path / "rows.jsonl", {"messages": [ASKS, says()]})
    argv = [f"init={path}", f"data.path={rows}", f"data.heldout_path={held_beside(rows)}"]
    argv += [f"out={out}", "packing.row_length=64", "packing.rows=1", "draft_steps=0"]
    sft.main([*argv, "steps=1", "data.date=2020-02-03"])
    sft.main([*argv, "steps=2", "--resume"])
    assert capsys.readouterr().out.count("which writes the date 2020-02-03") == 2
    with pytest.raises(SystemExit, match="data.date=2020-02-03"):
        sft.main([*argv, "steps=3", "--resume", "data.date=2020-02-04"])
    empty = rows_in(tmp_path / "empty.yaml")
    argv = ["--config", str(empty), f"model={out}", f"eval.sets.x.path={rows}", "eval.sets.x.n=1"]
    argv += ["eval.sets.x.max_tokens=2", "rollout.strategy=off", "rollout.max_batch=1"]
    argv += ["eval.sets.x.reward=format", "eval.max_batch=1", f"out={tmp_path / 'eval'}"]
    evaluation.main(argv)
    assert "which writes the date 2020-02-03" in capsys.readouterr().out


def test_a_template_writes_the_date_that_is_set_and_else_today_s(policy, tmp_path, capsys):
    path = policy(
        DATED + "{% if strftime_now is defined %}{{ '%s' % strftime_now('%j') }}{% endif %}"
    )
    rows = rows_in(tmp_path / "rows.jsonl", {"prompt": "1+2?", "answer": "3"})
    held = f"data.heldout_path={held_beside(rows)}"
    data_report.main([str(rows), "--model", str(path), held, "date=2020-02-03"])
    assert "03 Feb 2020\n<user>1+2?\n<assistant>034" in capsys.readouterr().out
    data_report.main([str(rows), "--model", str(path), held])
    today = datetime.datetime.now(datetime.UTC)
    assert f"{today:%d %b %Y}\n<user>" in capsys.readouterr().out
