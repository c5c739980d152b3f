"""Rewards: what counts as the right answer, and what must never break a run."""

import time

import pytest

from train.data.tasks.layout import Problem
from train.registry import REWARDS
from train.rewards import builtin
from train.rewards.answers.equivalence import same_answer
from train.rewards.answers.extract import final_answer, last_line_answer
from train.rewards.answers.quantity import read_quantity, without_thousands
from train.rewards.builtin import EXACT, MATH_VERIFY, NUMBER, get_reward
from train.rewards.scoring import Scorer, unwinnable
from train.schema import RewardsSection


@pytest.mark.parametrize(
    "text,answer",
    [
        ("#### 3 \nignored", "3"),
        ("#### 1 no #### 2", "2"),
        ("####", ""),
        ("the answer is 3", None),
    ],
)
def test_the_answer_is_the_line_after_the_last_mark(text, answer):
    assert last_line_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        # the last box, wherever it stands
        (r"#### Step 1: add\nSo \boxed{42}.", "42"),
        (r"\boxed{1}, no: \boxed{2}. #### 3", "2"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{3} then cut off: \boxed{4", "3"),
        # else after the last mark, when that is no heading
        ("work\n#### 12", "12"),
        ("work\n####\n12\n", "12"),
        ("#### Step 1\nwork\n#### 12", "12"),
        ("#### 12\nwork goes on", None),
        ("work\n#### The answer is $12$.", "12"),
        ("work\n#### **Answer:** 12", "12"),
        ("#### Step 1\nthe answer is 9", "9"),
        # else after "answer is"
        ("The answer is 5. I checked it.", "5"),
        ("The final answer is: $x = 5$, which fits.", "x = 5"),
        (r"the answer is \(2\sqrt{3}\)", r"2\sqrt{3}"),
        ("the answer is 3.5 cm.", "3.5 cm"),
        ("the answer is 1. No, the answer is **2**", "2"),
        ("work\nAnswer: 34", "34"),
        # several formulas, or a formula and more, are all of it
        ("The answer is $3$ or $4$.", "$3$ or $4$"),
        ("The answer is $x=3$ and $y=4$. Done.", "$x=3$ and $y=4$"),
        (r"The answer is \(2\), \(3\) and \(5\).", r"\(2\), \(3\) and \(5\)"),
        ("The answer is $5$ apples.", "$5$ apples"),
        ("The answer is either $1$ or $2$.", "$1$ or $2$"),
        ("The answer is $7$, since $x > 0$.", "7"),
        ("The answer is 8, because 9 is too much.", "8"),
        ("The answer is **$9$**.", "9"),
        ("The answer is \\[\\frac{1. 5}{2}\\]", r"\frac{1. 5}{2}"),
        ("answer is", None),
        ("it is 5", None),
        ("", None),
    ],
)
def test_what_counts_as_the_answer(text, answer):
    assert final_answer(text.replace("\\n", "\n")) == answer


def test_an_answer_that_is_endless_is_none():
    assert final_answer("\\boxed{" + "1+" * 5000 + "1}") is None
    assert final_answer("\\boxed{" * 500_000 + "5" + "}" * 500_000) is None


@pytest.mark.slow
def test_answers_of_any_length_take_time_that_grows_with_it():
    # Patterns that backtrack over runs of spaces or groups of digits would need hours here.
    size = 100_000
    for text in ("answer" + " " * size + "x", "answer " + "*" * size + "x", "answer " * size):
        assert final_answer(text) is None
    assert without_thousands("1" + ",111" * size) == "1" + "111" * size
    assert without_thousands("1" + " 111" * size + "/") == "1" + " 111" * size + "/"
    assert without_thousands("(1,000) 1,000 " * size) == "(1,000) 1000 " * size
    assert read_quantity("5" + " " * size + "x") is None
    for text in ("(" * size, "1" + " " * size + "+"):
        assert not same_answer(text, text)
    assert MATH_VERIFY("\\boxed{5}", "5" + " ." * size) == 0.0
    for text in ("B" + " ," * size, "B" + ")" * size + "x", " " * size + "B"):
        assert builtin.CHOICE(text, "B") == 1.0
    for text in ("\n" * size, "</think>" * size, "<think>" + " " * size, "<" * size):
        assert get_reward("format")(text) == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 42", "#### Final Answer: 42"), ("#### Answer: $5", "The final answer is $5$."),
        ("\\boxed{1/3}", "0.333333"), ("\\boxed{0.0000333333}", "1/30000"),
        ("#### 3 dozen eggs", "36"), ("#### 6.63e-34", r"6.63\times10^{-34}"),
    ],
)  # fmt: skip
def test_number_reads_what_stands_around_and_how_it_is_rounded(text, answer):
    assert NUMBER(text, answer) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 0.000000", "1e-7"), ("#### 0.0000014", "0.000001"), ("#### 0.00001", "0.00002"),
        ("#### 5 liters", "5 gallons"), ("#### 5 dozen", "5"), ("#### 20%", "20 degrees"),
    ],
)  # fmt: skip
def test_number_refuses_other_units_and_numbers_that_round_to_nothing(text, answer):
    assert NUMBER(text, answer) == 0.0


def test_exact_wants_every_character():
    assert EXACT(" plus 30+30=60; #### 60", "60") == 1.0
    assert EXACT("#### 60", "30+30 is #### 60") == 1.0
    for wrong in ("60", "#### 60.", "#### 060", "#### 60 apples", "#### 61", "####", ""):
        assert EXACT(wrong, "60") == 0.0


@pytest.mark.parametrize(
    "text,answer",
    [
        ("#### 1,234,567", "1234567"), ("#### $5.50.", "5.5"), ("#### -$3", "-3"),
        ("#### 40%", "40"), ("#### 7.", "7"), ("#### .50", "0.5"), ("#### +072", "72"),
    ],
)  # fmt: skip
def test_number_ignores_how_a_number_is_written(text, answer):
    assert NUMBER(text, answer) == 1.0
    assert MATH_VERIFY(text, answer) == 1.0


@pytest.mark.parametrize(
    "text", ["#### 1 2", "#### 13", "#### twelve", "#### 1,2", "12", "#### nan", "#### --12", ""]
)
def test_number_refuses_what_is_not_that_number(text):
    assert NUMBER(text, "12") == 0.0


def test_math_verify_sees_equivalence_and_boxed_answers():
    assert MATH_VERIFY(r"#### \frac{1}{2}", "0.5") == 1.0
    assert MATH_VERIFY("#### 1/2", "1/3") == 0.0
    assert MATH_VERIFY(r"so it is \boxed{72}", "#### 72") == 1.0
    assert MATH_VERIFY(r"so it is \boxed{71}", "#### 72") == 0.0


@pytest.mark.parametrize(
    "text", ["", "####", "#### ((((", "\\boxed{", "$$$", "\x00\ud800", "words"]
)
def test_math_verify_gives_zero_for_what_it_cannot_parse(text):
    assert MATH_VERIFY(text, "3") == 0.0


def test_math_verify_gives_up_in_time_and_works_afterwards():
    options = RewardsSection(workers=1, timeout=2.0)
    scorer, start = Scorer("math_verify", options=options), time.monotonic()
    try:
        late = scorer("#### 9^{9^{9^9}}", Problem("p", "3", 0))
        assert late.failed and time.monotonic() - start < 60, "it would take hours"
        assert unwinnable(scorer, Problem("p", "9^{9^{9^9}}", 0)) is None, "it is not known"
        assert scorer("#### 2x/4", Problem("p", "x/2", 0)).value == 1.0
    finally:
        scorer.close()


def test_rewards_are_found_by_name_or_dotted_path(tmp_path, monkeypatch):
    assert {"choice", "format", "reasoning_gym"} < set(REWARDS.names)
    known = [get_reward(name) for name in ("exact", "number", "math_verify")]
    assert known == [EXACT, NUMBER, MATH_VERIFY]
    assert all(reward("#### 3", "3") == 1.0 for reward in known)
    (tmp_path / "own_reward_module.py").write_text(
        "def length(response_text, answer):\n    return float(len(response_text))\nnot_one = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert get_reward("own_reward_module:length")("abc", "") == 3.0
    for bad, message in [
        ("exakt", "choose one of exact, number, math_verify"),
        ("own_reward_module:missing", "cannot load"),
        ("own_reward_module:not_one", "is a int"),
    ]:
        with pytest.raises(ValueError, match=message):
            get_reward(bad)
