"""Several rewards, their forms, their worker processes and time limits."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import slow_rewards
import tiny_run

from train import rl
from train.data.tasks.layout import Problem
from train.rewards.builtin import get_reward
from train.rewards.calls import Failed, RewardCall
from train.rewards.scoring import (
    SampleFacts,
    Score,
    Scorer,
    Scoring,
    unwinnable,
)
from train.rewards.workers import WorkerError
from train.run.files import read_metrics
from train.schema import RewardsSection

pytestmark = pytest.mark.usefixtures("shared_programs")

TALK = ({"role": "user", "content": "?"},)
PROBLEM = Problem(TALK, "7", 0, "rows.jsonl:1", {"level": 3})


def scorer_of(*names, **options) -> Scorer:
    return Scorer(names, options=RewardsSection(**{"workers": 0, **options}))


@pytest.fixture
def in_workers():
    """Makes scorers with worker processes, and closes them."""
    made = []

    def make(*names, **options):
        made.append(scorer_of(*names, **{"workers": 1, **options}))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


# --- built-in rewards ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("B", "B"), ("(b)", "B"), ("b.", "B"), ("The answer is (B).", "B"), ("Answer: B", "B"),
        ("The answer is **B**", "B"), ("so\n#### B", "B"), ("\\boxed{B}", "B"),
        ("\\boxed{\\text{(B)}}", "B"), ("B) Paris", "B"), ("A or C?\nB. Paris", "B"),
        ("The answer is B because C", "B"),
        ("<think>A</think><answer> B </answer>", "B"), ("<answer>B</answer> \\boxed{A}", "B"),
        ("<answer>\\boxed{B}</answer>", "B"), ("<ANSWER>The answer is (B)</ANSWER>", "B"),
        ("Answer: A <answer>none</answer>", None),
        ("The answer is A since 3 > 2", "A"), ("A dog barks.", None), ("I think so", None),
        ("", None), ("The answer is Bern", None), ("The answer is B and C", None),
        ("\\boxed{B, C}", None), ("The answer is B, A is wrong", "B"), ("(s)he", None),
        ("The answer is B and not C", "B"), ("b. Paris", "B"), ("#### B. C or D", "B"),
    ],
)  # fmt: skip
def test_choice_finds_the_letter_of_an_answer(completion, letter):
    reward = get_reward("choice")
    assert reward.extract(completion) == letter
    for gold in ("B", "(B)", "b", "B. Paris", "so\n#### B"):
        assert reward(completion, gold) == float(letter == "B")
    assert reward(completion, ("C", "D")) == 0.0


@pytest.mark.parametrize(
    "gold",
    [
        "A, C", "A and C", "(A)(C)", "B / C", "a, c", "**A** & **C**", r"\text{A}, \text{C}",
        "options A and C", r"\boxed{A, B, C, D}", "E = mc^2", "Paris",
    ],
)  # fmt: skip
def test_a_gold_answer_of_several_letters_or_a_formula_cannot_be_chosen(gold):
    assert unwinnable(Scorer("choice"), Problem("p", gold, 0)) == f"gold answer {gold!r}"
    for letter in "ABCDE":
        assert get_reward("choice")(f"The answer is {letter}", gold) == 0.0


@pytest.mark.parametrize(
    ("completion", "fits"),
    [
        ("<think>3+4\n=7</think>\n7", True), ("3+4=7</think> 7", True),  # the prompt had the tag
        (" <think>x</think><answer>7</answer>", True), ("7", False), ("<think>x</think>  ", False),
        ("<think>x</think>7<think>y</think>8", False), ("<think>x 7", False),
        ("so <think>x</think> 7", False), ("<think></think> 7", False),
    ],
)  # fmt: skip
def test_format_wants_thinking_and_then_an_answer(completion, fits):
    assert scorer_of("format")(completion, PROBLEM) == Score(float(fits))


def test_format_takes_a_pattern_of_ones_own():
    scorer = scorer_of("format", pattern=r"\A#### -?\d+\Z")
    values = [scorer(text, PROBLEM).value for text in ("#### 12", "so #### 12", "#### x")]
    assert values == [1, 0, 0]
    with pytest.raises(ValueError, match="pattern: expected a regular expression"):
        RewardsSection(pattern="(")


# --- several rewards -----------------------------------------------------------------------------


def test_several_rewards_are_added_with_their_weights_and_known_apart():
    scorer = scorer_of("exact", "format", "slow_rewards:right", weights=[1.0, 0.2, -2.0])
    assert scorer.labels == ("exact", "format", "right")
    good = scorer("<think>x</think>#### 7", PROBLEM)
    assert good == Score(1.2, False, (1.0, 1.0, 0.0))
    other = scorer("7", PROBLEM)
    assert other == Score(-2.0, False, (0.0, 0.0, 1.0))
    assert scorer.part_means([good, other]) == {"exact": 0.5, "format": 0.5, "right": 0.5}
    assert scorer.described == "exact + 0.2 format + -2 slow_rewards:right"
    assert list(scorer.checked) == ["exact"], "whose gold answers are checked"


# --- forms ---------------------------------------------------------------------------------------


def scored(scorer, texts, problem=PROBLEM):
    scoring = Scoring(scorer, problem)
    for place, text in enumerate(texts):
        scoring.add(place, text, SampleFacts(place, [5] * len(text), "stop"))
    return [score for _, score in sorted(scoring.scores().items())]


def test_a_reward_sees_every_column_by_name_and_the_sample():
    assert scorer_of("slow_rewards:takes_all")("x", PROBLEM).value == 5.0
    scorer = scorer_of("slow_rewards:counts_tokens")
    scorer.check(PROBLEM)
    assert [score.value for score in scored(scorer, ["ab", "a"])] == [2.0, 101.0]
    assert scorer("", PROBLEM, SampleFacts(0, [1, 2, 3], "length")).value == 1003.0


def test_a_function_written_for_verl_is_called_as_verl_does(in_workers):
    columns = {"data_source": "math_dapo", "ground_truth": "7", "extra_info": {"index": "1"}}
    problem = Problem(TALK, "7", 0, "", columns)
    scorer = in_workers("slow_rewards:compute_score")
    scorer.check(problem)
    assert [s.value for s in scored(scorer, ["7", "8"], problem)] == [1.0, 0.0]
    columns.pop("ground_truth")  # then it is the gold answer
    scorer.check(problem)
    assert [s.value for s in scored(scorer, ["7", "8"], problem)] == [1.0, 0.0]
    with pytest.raises(ValueError, match="asks for data_source, and"):
        scorer.check(PROBLEM)


def test_a_wrapper_gets_what_the_function_behind_it_needs():
    def graded(completion, answer, level=0, **columns):
        return float((completion, answer, level) == ("7", "7", 3))

    def all_by_place(*args, **columns):
        return graded(*args, **columns)

    def one_by_place(text, *rest, **columns):
        return graded(text, *rest, **columns)

    def all_by_name(**columns):
        return graded(**columns)

    row = {"answer": "7", "level": 3, "prompt": "?"}
    for function in (graded, all_by_place, one_by_place, all_by_name):
        assert RewardCall("own", function)(["7"], [row]) == [1.0]


def test_functions_of_batch_form_get_the_names_and_forms_of_trl():
    scorer = scorer_of("slow_rewards:count_ids")
    columns = {"completions": "of the row"}
    problem = Problem("p", "7", 0, "", columns, columns)
    scorer.check(problem)
    assert [s.value for s in scored(scorer, ["a", "bcd"], problem)] == [11.0, 33.0]


def test_a_reward_that_does_not_apply_to_a_row_is_left_out_and_not_failed(caplog):
    scorer = scorer_of("slow_rewards:if_long", "exact", weights=[2.0, 1.0])
    texts = ("x", "xx", "xxxx", "#### 7")
    found = [scorer(text, Problem("p", "7", 0)) for text in texts]
    assert [s.value for s in found] == [0.0, 0.0, 2.0, 3.0]
    assert [s.parts for s in found] == [(None, 0.0), (0.0, 0.0), (1.0, 0.0), (1.0, 1.0)]
    assert not any(s.failed for s in found)
    assert scorer.part_means(found) == {"if_long": pytest.approx(2 / 3), "exact": 0.25}
    assert scorer.part_means(found[:1]) == {"exact": 0.0}
    assert not caplog.text
    alone = scorer_of("slow_rewards:if_long")
    assert [alone(text, PROBLEM) for text in ("x", "xxxx")] == [Score(0.0, True), Score(1.0)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_of_batch_form_gets_the_completions_of_a_group(workers, in_workers):
    scorer = in_workers("slow_rewards:ranks", workers=workers)
    scorer.check(PROBLEM)
    assert scorer.is_batch
    assert [s.value for s in scored(scorer, ["aaa", "a", "aa"])] == [2.0, 0.0, 1.0]


def test_what_batch_form_returns_is_checked_for_each_completion(caplog):
    found = scored(scorer_of("slow_rewards:some_fail"), ["none", "x"])
    assert found == [Score(0.0, True), Score(2.0)]
    assert "returned None" in caplog.text
    assert all(s.failed for s in scored(scorer_of("slow_rewards:too_few"), ["a", "b"]))
    assert "returned 1 values (list)" in caplog.text and "a list of 2 numbers" in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
def test_asynchronous_rewards_of_a_group_run_at_once(workers, in_workers):
    scorer = in_workers("slow_rewards:meets", workers=workers, timeout=60.0)
    assert [s.value for s in scored(scorer, ["8"] * 8)] == [1.0] * 8


def test_an_asynchronous_reward_that_is_late_fails_alone():
    call = RewardCall("own", slow_rewards.waits)
    rows = [{"answer": "7", "prompt": "p"}] * 3
    first, late, last = call(["0", "60", "0.01"], rows, seconds=1.0)
    assert (first, last) == (1.0, 1.0)
    assert isinstance(late, Failed) and late.timed_out


def test_an_asynchronous_reward_shares_a_client_between_calls(in_workers):
    scorer = in_workers("slow_rewards:asks", timeout=60.0)
    for _ in range(3):
        assert scored(scorer, ["0", "1", "2"]) == [Score(0.0), Score(1.0), Score(2.0)]


# --- processes -----------------------------------------------------------------------------------


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_a_reward_that_hangs_is_ended_counted_and_its_process_replaced(in_workers, caplog):
    scorer = in_workers("slow_rewards:hangs", "slow_rewards:pid", timeout=1.0)
    assert scorer("fine", PROBLEM).parts[0] == 1.0
    [first] = scorer._workers.pids()
    found = scored(scorer, ["fine", "hang", "also fine"])
    assert [(s.parts[0], s.failed) for s in found] == [(1, False), (0, True), (1, False)]
    assert all(s.parts[1] > 0 for s in found), "the other reward of that completion counts"
    [second] = scorer._workers.pids()
    assert first != second and not is_running(first) and is_running(second)
    assert "took longer than 1 s per completion for the row rows.jsonl:1" in caplog.text
    said = scorer.metrics()
    assert said["reward/timed_out"] == 1.0 and said["time/reward"] >= 1.0
    assert scorer.metrics()["reward/timed_out"] == 0.0, "figures are of one step"


def test_the_first_call_of_a_reward_in_a_process_may_be_late(in_workers):
    scorer = in_workers("slow_rewards:starts_slowly", "slow_rewards:dies", timeout=0.5)
    assert [s.failed for s in scored(scorer, ["x", "x", "die"])] == [False, False, True]
    assert not scorer("x", PROBLEM).failed, "in the process that replaced the first"


def test_what_a_reward_has_started_ends_with_its_process(in_workers, tmp_path):
    scorer = in_workers("slow_rewards:starts_a_process", timeout=1.0)
    assert scorer("die", Problem("p", str(tmp_path / "pid"), 0)).failed
    started = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not is_running(started), 10)


def test_a_reward_that_ends_its_process_fails_and_the_next_runs(in_workers, capfd, caplog):
    scorer = in_workers("slow_rewards:dies")
    assert [s.failed for s in scored(scorer, ["x", "die", "x"])] == [False, True, False]
    assert "ended its process for the row" in caplog.text and "exit status 7" in caplog.text
    assert "what a reward prints" not in capfd.readouterr().out


def test_a_worker_that_cannot_start_ends_the_run(in_workers, monkeypatch):
    scorer = in_workers("slow_rewards:right")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.endswith("tests")])
    with pytest.raises(WorkerError, match="cannot be started: .*rewards.workers=0"):
        scorer("7", PROBLEM)


PROGRAM = """
import sys
from types import SimpleNamespace

from train.rewards.builtin import THINKS_FIRST
from train.rewards.scoring import Scorer, Scoring
from train.data.tasks.layout import Problem

if __name__ == "__main__":
    options = SimpleNamespace(weights=None, workers=1, timeout=600.0, pattern=THINKS_FIRST)
    scorer = Scorer("slow_rewards:hangs", options=options)
    assert "jax" not in sys.modules, "a worker, which imports less, must not import it"
    problem = Problem("p", "7", 0)
    scorer("fine", problem)
    print(*scorer._workers.pids(), flush=True)
    scoring = Scoring(scorer, problem)
    scoring.add(0, "hang", None)
    print("hangs", flush=True)
    scoring.scores()
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_no_process_is_left_however_the_program_ends(how, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    tests = Path(slow_rewards.__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}"}
    with subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=environment, start_new_session=True,
    ) as process:  # fmt: skip
        pid = int(process.stdout.readline())
        assert process.stdout.readline() == b"hangs\n"
        time.sleep(0.5)
        process.send_signal(getattr(signal, how))
        process.wait(60)
    assert wait_until(lambda: not is_running(pid)), "the worker hangs on"


REWARDS = {
    "reward": "[slow_rewards:chars, slow_rewards:lengths, slow_rewards:slow_coin]",
    "rewards.weights": "[0.0, 0.5, 1.0]", "eval.problems": 4,
    "draft.mode": "none", "rollout.strategy": "off", "checkpoint.export": "false",
}  # fmt: skip


@pytest.mark.slow
def test_a_run_gives_the_same_rewards_in_workers_and_logs_each(thin_policy, tmp_path):
    for workers in (0, 2):
        more = {**REWARDS, "rewards.workers": workers}
        rl.main(tiny_run.arguments(thin_policy, tmp_path / f"{workers}", **more))
    here, there = (read_metrics(tmp_path / f"{workers}") for workers in (0, 2))
    names = [f"reward/{name}" for name in ("chars", "lengths", "slow_coin")]
    steps = [[r for r in records if r["step"] > 0] for records in (here, there)]
    assert len(steps[0]) == 2
    for one, other in zip(*steps, strict=True):
        for name in ("rollout/tokens_sha", "rollout/reward", "train/loss", *names):
            assert one[name] == other[name], name
        chars, lengths, coin = (one[name] for name in names)
        assert one["rollout/reward"] == pytest.approx(0.5 * lengths + coin)
        assert chars > 0 and one["reward/failed"] == one["reward/timed_out"] == 0
    assert any("eval/reward/slow_coin" in record for record in there)
