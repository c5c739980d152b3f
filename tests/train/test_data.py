"""Generated sums, GSM8K files, their order and their tokenizer."""

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from train.data import (
    DataConfig,
    Demonstration,
    demonstrations,
    encode_demonstration,
    encode_prompt,
    endless,
    problems,
    read_table,
    split_of,
    train_bpe_tokenizer,
)
from train.rewards import exact, number
from train.tasks import gsm8k
from train.tasks.sums import CONNECTIVES

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
STEP = re.compile(r" ([a-z]+) (\d+)\+(\d+)=(\d+);")


def question_terms(prompt):
    assert re.fullmatch(r"\d+(\+\d+)+=", prompt)
    return [int(term) for term in prompt[:-1].split("+")]


def test_answers_of_generated_problems_are_right():
    for i, problem in enumerate(problems(DataConfig(), "train")[:300]):
        terms = question_terms(problem.prompt)
        assert problem.answer == str(sum(terms)) and problem.index == i
        assert 2 <= len(terms) <= 12 and all(1 <= term <= 99 for term in terms)


def test_the_number_of_terms_is_mostly_small_with_a_long_tail():
    counts = [len(question_terms(p.prompt)) for p in problems(DataConfig(), "train")[:2000]]
    assert 4.5 < sum(counts) / len(counts) < 5.5
    assert set(counts) == set(range(2, 13))


def test_splits_are_disjoint_and_decided_by_the_text():
    cfg = DataConfig()
    heldout = {p.prompt for p in problems(cfg, "heldout")}
    train = {p.prompt for p in problems(cfg, "train")[:3000]}
    assert len(problems(cfg, "heldout")) == 512 and not heldout & train
    assert all(split_of(prompt) == "heldout" for prompt in heldout)
    with pytest.raises(ValueError, match="train, heldout"):
        problems(cfg, "test")


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
        assert exact(demonstration.response, problem.answer) == 1.0
        assert [int(b) for _, _, b, _ in steps] == terms[1:]
        assert all(int(a) + int(b) == int(c) for _, a, b, c in steps)
        assert all(f" {word}" in CONNECTIVES for word, *_ in steps)


def test_slips_are_plausible_and_carried_on_honestly():
    cfg = DataConfig(slip=0.5, impatience=0.0)
    wrong = 0
    for demonstration in demonstrations(cfg, "train")[:300]:
        total = question_terms(demonstration.prompt)[0]
        for _, a, b, c in STEP.findall(demonstration.response):
            assert int(a) == total
            total = int(c)
            assert total - int(a) - int(b) in (-10, -1, 0, 1, 10) and total > 0
            wrong += total != int(a) + int(b)
        assert demonstration.response.endswith(f" #### {total}")
    assert wrong > 300


def test_an_impatient_demonstrator_guesses_without_working():
    cfg = DataConfig(impatience=1.0)
    pairs = list(zip(demonstrations(cfg, "train")[:200], problems(cfg, "train")[:200], strict=True))
    assert all(re.fullmatch(r" #### [1-9]\d*", d.response) for d, _ in pairs)
    assert 0.0 < sum(exact(d.response, p.answer) for d, p in pairs) / 200 < 0.3


def test_the_default_demonstrator_leaves_something_to_learn():
    pairs = zip(
        demonstrations(DataConfig(), "train")[:1000],
        problems(DataConfig(), "train")[:1000],
        strict=True,
    )
    assert 0.4 < sum(exact(d.response, p.answer) for d, p in pairs) / 1000 < 0.7


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


def test_gsm8k_calculator_and_template_are_options(tmp_path):
    path = write_lines(tmp_path / "train.jsonl", record(0))
    held = write_lines(tmp_path / "test.jsonl", record(1))
    cfg = DataConfig(
        task="gsm8k",
        path=path,
        heldout_path=held,
        strip_calculator=False,
        prompt_template="Q {question} {{}} A",
    )
    assert demonstrations(cfg, "train") == [
        Demonstration("Q How much is question 0? {} A", "1+1 = <<1+1=2>>2\n#### 2")
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


@pytest.mark.parametrize(
    "line,message",
    [
        ("{not json", "not JSON"),
        ('{"question": " ", "answer": "3"}', "column 'question': expected text that is not empty"),
        ("[1, 2]", "expected a JSON object"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path, line, message):
    path = write_lines(tmp_path / "bad.jsonl", record(0), line)
    with pytest.raises(ValueError, match=message) as error:
        read_table(path, gsm8k.TASK)
    assert f"{path}:2" in str(error.value) and "fix or delete" in str(error.value)


def test_missing_and_empty_files_are_clear_errors(tmp_path):
    with pytest.raises(ValueError, match="data.path"):
        problems(DataConfig(task="gsm8k"), "train")
    with pytest.raises(FileNotFoundError, match="no such file"):
        problems(DataConfig(task="gsm8k", path=str(tmp_path / "none.jsonl")), "train")
    with pytest.raises(ValueError, match="empty"):
        read_table(write_lines(tmp_path / "empty.jsonl", ""), gsm8k.TASK)
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xff", "answer": "#### 1"}\n')
    with pytest.raises(ValueError, match="latin.jsonl:1"):
        read_table(tmp_path / "latin.jsonl", gsm8k.TASK)


@pytest.mark.skipif(not (GSM8K / "train.jsonl").exists(), reason="GSM8K is not beside the checkout")
def test_the_real_gsm8k_reads_whole_and_its_demonstrations_earn_the_reward():
    cfg = DataConfig(
        task="gsm8k",
        path=str(GSM8K / "train.jsonl"),
        heldout_path=str(GSM8K / "test.jsonl"),
        heldout_size=2000,
    )
    train, held = problems(cfg, "train"), problems(cfg, "heldout")
    assert (len(train), len(held)) == (7473, 1319)
    for demonstration, problem in zip(demonstrations(cfg, "train"), train, strict=True):
        assert "<<" not in demonstration.response
        assert number(demonstration.response, problem.answer) == 1.0


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


def test_digits_stand_alone_and_connectives_are_single_tokens(tokenizer):
    ids = tokenizer.encode(" now 127+98=225; #### 225")
    pieces = [tokenizer.decode([i]) for i in ids]
    assert [p for p in pieces if any(c.isdigit() for c in p)] == list("12798225225")
    for word in (*CONNECTIVES, " ####"):
        assert len(tokenizer.encode(word)) == 1


def test_prompt_and_response_are_encoded_apart_with_the_stop_token_last(tokenizer):
    prompt, response, _ = encode_demonstration(tokenizer, Demonstration("1+2=", " #### 3"))
    assert prompt == encode_prompt(tokenizer, "1+2=")
    assert response[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(prompt + response[:-1]) == "1+2= #### 3"


def test_training_a_tokenizer_twice_gives_the_same_file(tmp_path):
    texts = [d.response for d in demonstrations(DataConfig(), "train")[:200]]
    for name in ("a", "b"):
        train_bpe_tokenizer(texts, 300, tmp_path / name)
    one, two = ((tmp_path / n / "tokenizer.json").read_bytes() for n in ("a", "b"))
    assert one == two
    with pytest.raises(ValueError, match="at least 258"):
        train_bpe_tokenizer(texts, 100, tmp_path / "c")


def test_config_merges_with_omegaconf_and_refuses_nonsense():
    schema = OmegaConf.structured(DataConfig)
    merged = OmegaConf.merge(schema, OmegaConf.from_dotlist(["task=gsm8k", "path=x.jsonl"]))
    assert OmegaConf.to_object(merged) == DataConfig(task="gsm8k", path="x.jsonl")
    for bad in (
        {"task": "chess"},
        {"slip": 1.5},
        {"min_terms": 1},
        {"prompt_template": "no field"},
        {"prompt_template": "{question} {other}"},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            DataConfig(**bad)
