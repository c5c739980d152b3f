"""Which samples of a step are written, and what is written of them."""

import json

import pytest
import small_tokenizers

from specjax.tokenizer import load_tokenizer
from train.data.tasks.layout import Problem
from train.rollout.groups import Group, Response
from train.rollout.samples import SampleLog, token_texts


class Letters:
    """A tokenizer of one letter per token."""

    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(map(chr, ids))


def groups(step=1):
    found = []
    for position in range(6):
        responses = [
            Response(
                token_ids=[97 + position, 97 + place, 60],
                origins="db?",
                finish_reason="stop",
                reward=float(place),
                parts=(float(place), 0.5),
                text=f"text {place}",
                advantage=None if position == 0 else 0.25,
            )
            for place in range(3)
        ]
        answer = ("1", "2") if position == 1 else "1"
        problem = Problem(f"p{position}", answer, position, f"rows.jsonl:{position}")
        at = 10 * step + position
        found.append(Group(at, at + 1, step, problem, [112, 63], responses, [0.0] * 3))
    return found


def log(path, count, resume=None):
    return SampleLog(path, count, 3, Letters(), ["exact", "format"], resume)


def read(path):
    return [json.loads(line) for line in (path / "samples.jsonl").read_text().splitlines()]


def test_a_line_says_everything_of_a_sample(tmp_path):
    with log(tmp_path, count=18) as samples:
        samples.log(1, groups())
        rows = read(tmp_path)  # before close
    assert len(rows) == 18
    row = next(row for row in rows if row["problem"] == 1 and row["sample"] == 2)
    assert row == {
        "step": 1,
        "set": "train",
        "problem": 1,
        "row": "rows.jsonl:1",
        "sample": 2,
        "prompt": "p?",
        "completion": "text 2",
        "token_ids": [98, 99, 60],
        "tokens": ["b", "c", "<"],
        "origins": "db?",
        "reward": 2.0,
        "rewards": {"exact": 2.0, "format": 0.5},
        "reward_failed": False,
        "advantage": 0.25,
        "finish_reason": "stop",
        "answer": ["1", "2"],
        "followed": False,
    }
    assert {row["advantage"] for row in rows if row["problem"] == 0} == {None}


def test_a_resumed_run_writes_no_step_twice_and_follows_the_same_problem(tmp_path):
    with log(tmp_path, count=2) as samples:
        for step in range(1, 5):
            samples.log(step, groups(step))
    whole = (tmp_path / "samples.jsonl").read_bytes()
    (tmp_path / "samples.jsonl").write_bytes(whole[:-20])  # killed in the middle of a line
    with log(tmp_path, count=2, resume=3) as samples:
        for step in (3, 4):
            samples.log(step, groups(step))
    assert (tmp_path / "samples.jsonl").read_bytes() == whole
    with log(tmp_path, count=0, resume=2):
        assert {row["step"] for row in read(tmp_path)} == {1}, "none of a step that is repeated"


@pytest.mark.parametrize("kind", small_tokenizers.KINDS)
def test_the_texts_of_tokens_join_to_the_text_of_the_completion(kind, tmp_path):
    small_tokenizers.save(tmp_path, kind)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("the end: é ." if kind != "metaspace" else "the end.")

    def decode(tokens):
        return tokenizer.decode(tokens, skip_special_tokens=False)

    texts = token_texts(decode, ids)
    assert "".join(texts) == decode(ids) and len(texts) == len(ids)
    if kind == "byte level":
        assert "" in texts, "the first byte of é has no text of its own"
        cut = next(i for i, text in enumerate(texts) if not text) + 1
        assert token_texts(decode, ids[:cut])[-1] == "\ufffd"
    assert token_texts(decode, []) == []
