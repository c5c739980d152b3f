"""Generated sums, GSM8K files, their order and their tokenizer."""

import json
import re

import pytest

from train.data.rows import demonstrations, endless, problems
from train.data.tasks.layout import Demonstration, split_of
from train.data.tasks.sums import CONNECTIVES
from train.data.tokenizer import train_bpe_tokenizer
from train.rewards.builtin import EXACT
from train.schema import DataConfig

STEP = re.compile(r" ([a-z]+) (\d+)\+(\d+)=(\d+);")


def question_terms(prompt):
    assert re.fullmatch(r"\d+(\+\d+)+=", prompt)
    return [int(term) for term in prompt[:-1].split("+")]


def test_answers_of_generated_problems_are_right():
    for i, problem in enumerate(problems(DataConfig(), "train")[:300]):
        terms = question_terms(problem.prompt)
        assert problem.answer == str(sum(terms)) and problem.index == i
        assert 2 <= len(terms) <= 12 and all(1 <= term <= 99 for term in terms)


def test_splits_are_disjoint_and_decided_by_the_text():
    cfg = DataConfig()
    heldout = {p.prompt for p in problems(cfg, "heldout")}
    train = {p.prompt for p in problems(cfg, "train")[:3000]}
    assert len(problems(cfg, "heldout")) == 512 and not heldout & train
    assert all(split_of(prompt) == "heldout" for prompt in heldout)


def test_problems_and_demonstrations_are_functions_of_seed_and_index():
    one, other = demonstrations(DataConfig(), "train"), demonstrations(DataConfig(), "train")
    backwards = [other[i] for i in reversed(range(50))]
    assert one[:50] == backwards[::-1]
    assert one[:50] != demonstrations(DataConfig(seed=1), "train")[:50]
    assert [d.prompt for d in one[:50]] == [p.prompt for p in problems(DataConfig(), "train")[:50]]
    assert one[0] == one[-len(one)]
    with pytest.raises(IndexError):
        one[len(one)]


def test_a_reliable_patient_demonstrator_is_always_right():
    cfg = DataConfig(slip=0.0, impatience=0.0)
    pairs = zip(demonstrations(cfg, "train")[:200], problems(cfg, "train")[:200], strict=True)
    for demonstration, problem in pairs:
        terms = question_terms(problem.prompt)
        steps = STEP.findall(demonstration.response)
        assert EXACT(demonstration.response, problem.answer) == 1.0
        assert [int(b) for _, _, b, _ in steps] == terms[1:]
        assert all(int(a) + int(b) == int(c) for _, a, b, c in steps)
        assert all(f" {word}" in CONNECTIVES for word, *_ in steps)


def write_lines(path, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return str(path)


def record(i, answer="1+1 = <<1+1=2>>2\n#### 2"):
    return {"question": f"How much is question {i}?", "answer": answer}


def test_gsm8k_lines_become_problems_and_demonstrations(tmp_path):
    path = write_lines(tmp_path / "train.jsonl", record(0), "", record(1, "x\n#### 1,000"))
    held = write_lines(tmp_path / "test.jsonl", record(2))
    cfg = DataConfig(task="gsm8k", path=path, heldout_path=held)
    assert [p.answer for p in problems(cfg, "train")] == ["2", "1,000"]
    assert demonstrations(cfg, "train")[0] == Demonstration(
        "Question: How much is question 0?\nAnswer:", "1+1 = 2\n#### 2"
    )
    assert [p.prompt for p in problems(cfg, "heldout")] == [
        "Question: How much is question 2?\nAnswer:"
    ]


def test_gsm8k_questions_never_lie_in_both_splits(tmp_path, caplog):
    one = write_lines(tmp_path / "one.jsonl", *(record(i) for i in range(200)))
    cfg = DataConfig(task="gsm8k", path=one)
    train, held = ({p.prompt for p in problems(cfg, split)} for split in ("train", "heldout"))
    assert len(train) + len(held) == 200 and held and not train & held
    two = write_lines(tmp_path / "two.jsonl", record(3))
    overlapping = DataConfig(task="gsm8k", path=one, heldout_path=two)
    assert len(problems(overlapping, "train")) == 199
    assert "left out 1 questions" in caplog.text


def test_the_endless_order_resumes_from_one_integer():
    source = problems(DataConfig(train_size=20), "train")
    order = [endless(source, seed=7)[i] for i in range(60)]
    resumed = endless(source, seed=7)
    assert [resumed[i] for i in range(35, 60)] == order[35:]
    passes = [[p.index for p in order[i : i + 20]] for i in (0, 20, 40)]
    assert all(sorted(one) == list(range(20)) for one in passes)
    assert passes[0] != passes[1] != passes[2]
    assert [endless(source, seed=8)[i] for i in range(20)] != order[:20]
    with pytest.raises(ValueError, match="empty"):
        endless([], seed=0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = demonstrations(DataConfig(), "train")[:300]
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [text for d in made for text in (d.prompt, d.response)]
    train_bpe_tokenizer([*texts, "naïve → 日本"], 320, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_the_saved_tokenizer_loads_and_round_trips(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    for text in (" so 4+17=21; #### 60", "naïve  日本\n🙂 x", "Question: a\nAnswer:"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
