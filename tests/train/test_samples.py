"""Which samples of a step are written, and what is written of them."""

import json
from types import SimpleNamespace

import pytest
import small_tokenizers

from specjax.engine.request import SampleOutput, SpecStats
from specjax.engine.sequence import origins_of
from specjax.tokenizer import load_tokenizer
from train.groups import Group, Response
from train.samples import SampleLog, choose, token_texts
from train.scoring import Score
from train.tasks.layout import Problem


class Letters:
    """A tokenizer of one letter per token."""

    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(map(chr, ids))


def groups(step=1, count=6, size=3, problems=None):
    found = []
    for position in range(count):
        index = position if problems is None else problems[position]
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
            for place in range(size)
        ]
        answer = ("1", "2") if index == 1 else "1"
        problem = Problem(f"p{index}", answer, index, f"rows.jsonl:{index}")
        at = 10 * step + position
        found.append(Group(at, at + 1, step, problem, [112, 63], responses, [0.0] * size))
    return found


def log(path, count=4, resume=None, seed=3):
    return SampleLog(path, count, seed, Letters(), ["exact", "format"], resume)


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


def test_numbers_that_are_not_finite_are_null(tmp_path):
    [group] = groups(count=1, size=1)
    response = group.responses[0]
    response.reward, response.parts = float("nan"), (float("inf"), 0.5)
    response.advantage = float("nan")
    with log(tmp_path) as samples:
        samples.log(1, [group])
    [row] = read(tmp_path)
    assert (row["reward"], row["advantage"]) == (None, None)
    assert row["rewards"] == {"exact": None, "format": 0.5}


def test_the_choice_depends_on_seed_and_step_and_takes_as_many_prompts_as_there_are():
    many = groups(count=9)
    first = choose(many, 4, 3, 1)
    named = [(group.problem.index, place) for group, place in first]
    assert len({index for index, _ in named}) == 4
    assert named == [(g.problem.index, p) for g, p in choose(many[::-1], 4, 3, 1)]
    others = [choose(many, 4, seed, step) for seed, step in ((3, 2), (4, 1))]
    assert all([(g.problem.index, p) for g, p in other] != named for other in others)
    assert len(choose(many, 100, 3, 1)) == 27
    assert len({(g.position, p) for g, p in choose(many, 20, 3, 1)}) == 20


def test_the_first_problem_is_followed_whenever_it_is_drawn_again(tmp_path):
    with log(tmp_path, count=1) as samples:
        for step in range(1, 5):
            again = range(5, 11) if step == 3 else range(6)
            samples.log(step, groups(step, problems=[*again]))
    rows = read(tmp_path)
    followed = [(row["step"], row["problem"], row["sample"]) for row in rows if row["followed"]]
    assert followed == [(1, 0, 0), (2, 0, 0), (4, 0, 0)]
    assert {row["step"] for row in rows if not row["followed"]} == {1, 2, 3, 4}


def test_the_first_problems_of_an_evaluation_are_written_every_time(tmp_path):
    nothing = SpecStats(rounds=0, drafted=0, accepted=0, histogram=())
    sample = SampleOutput([97, 98], None, [0.0] * 2, "stop", nothing, origins="db")
    judged = [
        SimpleNamespace(
            problem=Problem(f"p{index}", "1", index),
            scores=[Score(1.0, False, (0.5,)), Score(0.0)],
            texts=["text", "other"],
            samples=[sample, sample],
        )
        for index in range(3)
    ]
    sets = [
        SimpleNamespace(
            asked=SimpleNamespace(name=name),
            prompts=SimpleNamespace(ids=lambda problem: [112, 48 + problem.index]),
            scorer=SimpleNamespace(labels=["number"]),
        )
        for name in ("aime", None)
    ]
    with log(tmp_path, count=2) as samples:
        for step in (0, 5):
            samples.log_evaluation(step, sets, {"aime": judged, None: judged[:1]})
    rows = read(tmp_path)
    assert [(row["step"], row["set"], row["problem"]) for row in rows] == [
        (0, "aime", 0), (0, "aime", 1), (0, "heldout", 0),
        (5, "aime", 0), (5, "aime", 1), (5, "heldout", 0),
    ]  # fmt: skip
    assert all(row["followed"] and row["sample"] == 0 for row in rows)
    assert rows[1]["prompt"] == "p1" and rows[1]["tokens"] == ["a", "b"]
    assert rows[1]["origins"] == "db" and rows[1]["rewards"] == {"number": 0.5}
    assert rows[1]["finish_reason"] == "stop" and rows[1]["advantage"] is None


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


def test_a_resumed_run_goes_on_without_damaged_samples_and_says_so(tmp_path, capsys):
    (tmp_path / "samples.jsonl").write_text(f"{{\n{json.dumps({'step': 1})}\n")
    with log(tmp_path, count=2, resume=3) as samples:
        samples.log(3, groups(3))
    assert {row["step"] for row in read(tmp_path)} == {3}
    said = capsys.readouterr().err
    assert "samples.jsonl, line 1: not JSON" in said and "moved to samples.1.jsonl" in said


def test_a_new_run_moves_samples_of_an_earlier_one_aside_and_none_writes_no_file(tmp_path):
    for step in (1, 2):
        with log(tmp_path) as samples:
            samples.log(step, groups(step))
    assert {row["step"] for row in read(tmp_path)} == {2}
    assert (tmp_path / "samples.1.jsonl").exists()
    with log(tmp_path, count=0):
        pass
    assert (tmp_path / "samples.2.jsonl").exists() and not (tmp_path / "samples.jsonl").exists()
    with log(tmp_path / "none", count=0) as samples:
        samples.log(1, groups())
    assert not (tmp_path / "none").exists()


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


def test_origins_are_those_of_the_rounds_of_a_chunk():
    assert origins_of([3, 1, 2], 4) == "ddb" + "b" + "db"
    assert origins_of([1, 1], 0) == "pp"


def test_a_carried_response_keeps_its_origins_and_is_cut_with_them(tmp_path):
    nothing = SpecStats(rounds=0, drafted=0, accepted=0, histogram=())
    response = Response()
    response.update(
        SampleOutput([5, 6, 7], None, [0.0] * 3, "abort", nothing, origins="pdb"), False
    )
    response.end_step(1, 2)
    assert (response.token_ids, response.origins) == ([5, 6], "pd")
    group = Group(0, 1, 1, SimpleNamespace(index=0), [1], [response])
    saved = json.loads(json.dumps(group.to_json()))
    assert Group.from_json(saved, None, [1]).responses[0].origins == "pd"
    del saved["responses"][0]["origins"]  # as an older version wrote it
    old = Group.from_json(saved, Problem("p", "1", 0), [1])
    with log(tmp_path) as samples:
        samples.log(1, [old])
    assert read(tmp_path)[0]["origins"] == "??" and read(tmp_path)[0]["rewards"] == {}
