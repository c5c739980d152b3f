"""Several rewards, their forms, their worker processes and time limits."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path

import pytest
import slow_rewards
import tiny_run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_groups import rules, run_steps, worlds

from specjax.command_line import parse_config
from specjax.parallel import distributed
from specjax.schema import keys_of
from train import reward_loop, reward_workers, rl, scoring
from train.collect import Rollouts, group_filter
from train.foreign_names import FOREIGN_NAMES
from train.groups import Group, Response, Rule, Selection, begin_step, end_step
from train.log import read_metrics
from train.reward_calls import Failed, RewardCall
from train.reward_workers import WorkerError
from train.rewards import get_reward
from train.schema import RewardsSection, RLConfig
from train.scoring import (
    SampleFacts,
    Score,
    Scorer,
    check_gold,
    is_hopeless,
    labels_of,
    unwinnable,
    unwinnable_message,
)
from train.tasks.layout import Problem
from train.tasks.prompt import keyed

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
        ("\\boxed{\\text{(B)}}", "B"), ("$\\boxed{\\text{B}}$", "B"), ("B) Paris", "B"),
        ("Option B: it rains.", "B"), ("A or C?\nB. Paris", "B"),
        ("The answer is B because C", "B"),
        ("<think>A</think><answer> B </answer>", "B"), ("<answer>B</answer> \\boxed{A}", "B"),
        ("<answer>\\boxed{B}</answer>", "B"), ("<ANSWER>The answer is (B)</ANSWER>", "B"),
        ("Answer: A <answer>none</answer>", None),
        ("The answer is A since 3 > 2", "A"), ("A dog barks.", None), ("I think so", None),
        ("Because of it", None), ("", None), ("It is 5.", None), ("The answer is Bern", None),
        ("The answer is B and C", None), ("\\boxed{B, C}", None), ("<answer>B or C</answer>", None),
        ("The answer is (B), (C)", None), ("The answer is B, I think", "B"),
        ("The answer is B, A is wrong", "B"), ("The answer is B and not C", "B"),
        ("(b) Paris, or Bern", "B"), ("b. Paris", "B"), ("Option b", "B"), ("(s)he", None),
        ("e.g. this", None), ("The answer is B.\n", "B"), ("#### B. C or D", "B"),
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
        "A, C", "A,B", "A and C", "(A) and (C)", "(A)(C)", "B or C", "B / C", "A; C", "B C", "a, c",
        "**A** & **C**", r"\text{A}, \text{C}", r"\text{A and C}", "options A and C",
        "(a) or (c)", r"\boxed{A, B, C, D}", "E = mc^2", "B, C and D",
    ],
)  # fmt: skip
def test_a_gold_answer_of_several_letters_or_a_formula_cannot_be_chosen(gold):
    assert unwinnable(Scorer("choice"), Problem("p", gold, 0)) is not None
    for letter in "ABCDE":
        assert get_reward("choice")(f"The answer is {letter}", gold) == 0.0


def test_a_gold_answer_that_is_no_letter_cannot_be_chosen():
    scorer = Scorer("choice")
    assert unwinnable(scorer, Problem("p", "C", 0)) is None
    assert unwinnable(scorer, Problem("p", "Paris", 0)) == "gold answer 'Paris'"


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


def test_format_takes_time_that_grows_with_the_completion():
    # A pattern that reads a text again from every place would need hours here.
    size, scorer = 300_000, scorer_of("format")
    for text in ("\n" * size, " " * size + "<think>", "</think>" * size, "<think>" * size,
                 "<think>" + " " * size, "x</think>" + "\n" * size, "<" * size):  # fmt: skip
        assert scorer(text, PROBLEM).value == 0.0
    assert scorer("\n" * size + "<think>x</think>" + "\n" * size + "7", PROBLEM).value == 1.0
    assert scorer("\n" * size + "</think>7", PROBLEM).value == 1.0


def test_format_takes_a_pattern_of_ones_own():
    scorer = scorer_of("format", pattern=r"\A#### -?\d+\Z")
    values = [scorer(text, PROBLEM).value for text in ("#### 12", "so #### 12", "#### x")]
    assert values == [1, 0, 0]
    with pytest.raises(ValueError, match="rewards.pattern: expected a regular expression"):
        RewardsSection(pattern="(")


# --- several rewards -----------------------------------------------------------------------------


def test_a_reward_that_is_called_reward_can_be_the_metric_of_groups():
    both = ["my_module:reward", "format"]
    assert labels_of(both) == ("my_module.reward", "format")
    assert labels_of(both[:1]) == ("reward",)
    argv = [f"reward=[{','.join(both)}]", "algo.filter_groups.metric=my_module.reward"]
    argv.append("algo.dynamic_sampling=true")
    cfg, _ = parse_config(RLConfig, argv)
    scorer = types.SimpleNamespace(labels=labels_of(both))
    assert group_filter(cfg.algo.filter_groups, scorer).part == 0
    cfg.algo.filter_groups.metric = "reward"
    assert group_filter(cfg.algo.filter_groups, scorer).part is None


@pytest.mark.parametrize(
    "order", ["prompt, completion", "answer, completion", "level, *, completion"]
)
def test_a_parameter_named_completion_gets_the_completion_in_any_place(order):
    scope = {}
    exec(f"def reward({order}): return seen.append((completion, {order.split(',')[0]})) or 1.0",
         scope)  # fmt: skip
    seen = scope["seen"] = []
    call = RewardCall("reward", scope["reward"])
    columns = {"prompt": "2+5?", "answer": "7", "level": 3, "completion": "a column"}
    call.check(columns.keys() - {"completion"})
    assert call(["text"], [call.wanted(columns)]) == [1.0]
    assert seen == [("text", columns[order.split(",")[0]])]


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


def test_each_reward_with_a_weight_that_compares_answers_has_its_gold_answers_checked():
    both, paris, one = scorer_of("exact", "number"), Problem("p", "Paris", 0), Problem("p", "1", 0)
    assert unwinnable(both, paris) == "gold answer 'Paris' by number"
    assert unwinnable(both, one) is None and not is_hopeless(both, paris)
    assert unwinnable(both, Problem("p", " ", 0)) == "the row has no answer"
    for weights in ([1.0, 0.0], [1.0, -1.0]):
        assert unwinnable(scorer_of("exact", "number", weights=weights), paris) is None
    only = scorer_of("exact", "number", weights=[0.0, 1.0])
    assert unwinnable(only, paris) == "gold answer 'Paris'" and is_hopeless(only, paris)
    found, checked = check_gold(both, [paris, one])
    said = unwinnable_message(both, found, checked)
    assert (
        "1 of 2" in said and "a quantity (number): problem 0: gold answer 'Paris' by number" in said
    )
    own = scorer_of("slow_rewards:right")
    assert unwinnable(own, paris) is None and not is_hopeless(own, paris)


def test_one_reward_has_its_own_figure_without_its_weight():
    plain, weighted = scorer_of("exact"), scorer_of("exact", weights=[0.5])
    for scorer, value in ((plain, 1.0), (weighted, 0.5)):
        scores = [scorer(text, PROBLEM) for text in ("#### 7", "#### 8")]
        assert [score.value for score in scores] == [value, 0.0]
        assert scorer.part_means(scores) == {"exact": 0.5}


def test_one_of_several_rewards_that_fails_counts_as_nothing(caplog):
    scorer = scorer_of("slow_rewards:raises", "slow_rewards:right")
    assert scorer("7", PROBLEM).value == 2.0
    found = scorer("7", Problem("p", "", 0))
    assert found == Score(0.0, True, (0.0, 0.0)) and scorer.failures == 1
    assert (
        "reward 'slow_rewards:raises' raised ZeroDivisionError at slow_rewards.py:" in caplog.text
    )


def test_rewards_of_one_name_are_told_apart_by_their_modules():
    names = ("slow_rewards:right", "odd_rewards:breaks", "tiny_run:coin", "odd_rewards:coin")
    assert Scorer(names).labels == ("right", "breaks", "tiny_run.coin", "odd_rewards.coin")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["reward=[exact,exact]"], "reward: expected one or several different rewards"),
        (["reward=[]"], "reward: expected one or several different rewards"),
        (["reward=[auto,exact]"], "unknown reward 'auto'"),
        (["reward=[exact,best]"], "unknown reward 'best'"),
        (["reward=[exact,format]", "rewards.weights=[1]"], "rewards.weights: expected 2 numbers"),
        (["reward=exact", "rewards.weights=[1,2]"], "rewards.weights: expected 1 numbers"),
        (["rewards.timeout=0", "rewards.workers=1"], "rewards.timeout: expected seconds above 0"),
        (["rewards.workers=-1"], "rewards.workers: expected at least 0"),
        (["reward=exact", "rewards.timeout=3"], "rewards.timeout=3.0 changes nothing"),
        (["rewards.timeout=3"], "reward=auto needs no processes"),  # the sums, which are generated
        (["reward=exact", "rewards.weights=[0.0]"], "expected a weight other than 0"),
        (["reward=[exact,number]", "rewards.weights=[0,0]"], "expected a weight other than 0"),
        (["reward=number", "rewards.pattern=x"], "rewards.pattern=x changes nothing"),
        (["reward=[a:b]", "data.path=x", "data.unwinnable=drop"], "changes nothing"),
    ],
)
def test_settings_of_rewards_that_make_no_sense_are_refused(settings, said, capsys):
    with pytest.raises(SystemExit):
        parse_config(RLConfig, settings)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["reward=exact", "rewards.timeout=3", "eval.sets={a: {path: x, reward: math_verify}}"],
        ["rewards.timeout=3", "eval.sets={a: {path: x}}"],  # the rows decide
        ["reward=exact", "rewards.pattern=x", "eval.sets={a: {path: x, reward: [exact, format]}}"],
    ],
)
def test_settings_of_rewards_are_read_by_sets_of_evaluation_too(argv, capsys):
    cfg, _ = parse_config(RLConfig, argv)
    assert cfg.eval.sets["a"].path == "x"
    with pytest.raises(SystemExit):
        parse_config(RLConfig, [*argv[:-1], "eval.sets={a: {path: x, reward: exact}}"])
    assert "changes nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("data.train_files=x", "data.path"),
        ("data.drop_duplicates=true", "data.duplicates"),
        ("data.apply_chat_template_kwargs={a: 1}", "data.chat_template_kwargs"),
        ("reward_funcs=x", "reward"), ("reward_weights=[1]", "rewards.weights"),
        ("beta=0.04", "algo.kl_loss_coef"), ("algo.beta=0.04", "algo.kl_loss_coef"),
        ("algo.epsilon=0.2", "algo.clip_ratio"), ("algo.epsilon_high=1", "algo.clip_ratio_high"),
        ("algo.delta=3", "algo.clip_ratio_c"), ("num_generations=8", "rollout.n"),
        ("algorithm.norm_adv_by_std_in_grpo=false", "algo.normalize_std"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "algo.kl_coef"),
        ("algorithm.filter_groups.enable=true", "algo.dynamic_sampling"),
        ("algorithm.filter_groups.metric=acc", "algo.filter_groups.metric"),
        ("algo.filter_groups.max_num_gen_batches=3", "algo.max_num_gen_batches"),
        ("actor_rollout_ref.actor.clip_ratio_low=0.2", "algo.clip_ratio"),
        ("actor_rollout_ref.actor.clip_ratio_high=0.28", "algo.clip_ratio_high"),
        ("actor_rollout_ref.actor.loss_agg_mode=token-mean", "algo.loss_aggregation"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "algo.objective"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "optim.lr"),
        ("actor_rollout_ref.model.path=x", "model"),
        ("actor_rollout_ref.rollout.n=8", "rollout.n"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.len=9", "algo.overlong_buffer_len"),
        ("eps_clip=0.2", "algo.clip_ratio"), ("eps_clip_high=0.28", "algo.clip_ratio_high"),
        ("n_samples_per_prompt=8", "rollout.n"), ("use_tis=true", "algo.tis"),
        ("rollout_batch_size=8", "rollout.prompts"), ("learning_rate=1e-6", "optim.lr"),
        ("data.accuracy_lower_bound=0.2", "algo.filter_groups.min"),
    ],
)  # fmt: skip
def test_names_of_other_frameworks_lead_to_ours(theirs, ours, capsys):
    with pytest.raises(SystemExit):
        parse_config(RLConfig, [theirs])
    assert f"did you mean '{ours}'?" in capsys.readouterr().err


def test_names_of_other_frameworks_lead_to_keys_that_exist():
    keys = {key.name for key in keys_of(RLConfig)}
    assert not keys & FOREIGN_NAMES.keys()
    keys |= {"algo.importance_sampling_level"}  # of gspo
    for theirs, here in FOREIGN_NAMES.items():
        named = re.findall(r"[a-z_]+(?:\.[a-z_]+)+|^[a-z_]+$", here.replace("algo=", ""))
        assert set(named) <= keys, theirs


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ("scale_rewards=batch", "algo.normalize_over=group or batch"),
        ("num_iterations=2", "every sample of a step is trained on once"),
        ("actor_rollout_ref.actor.ppo_epochs=2", "every sample of a step is trained on once"),
        ("algorithm.use_kl_in_reward=true", "set algo.kl_coef, the weight of KL, above 0"),
        ("actor_rollout_ref.actor.use_kl_loss=true", "set algo.kl_loss_coef, the weight of KL"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "algo.updates_per_rollout says how"),
        ("loss_type=dapo", "use algo=grpo, dr_grpo, dapo"),
        ("algorithm.adv_estimator=rloo", "use algo=grpo, dr_grpo, dapo"),
        ("advantage_estimator=gspo", "use algo=grpo, dr_grpo, dapo"),
        ("data.val_files=x", "set eval.sets.NAME.path, or data.heldout_path"),
        ("rollout.val_kwargs.n=8", "set n, temperature, top_k or top_p of eval.sets.NAME"),
        ("eval_max_response_len=100", "set eval.sets.NAME.max_tokens"),
        ("algo.objective=dapo", "It is a preset: use algo=dapo"),
        ("algo.objective=dr_grpo", "It is a preset: use algo=dr_grpo"),
        ("algo.objective=reinforce++", "use algo=reinforce_pp"),
        ("algo=reinforce++", "did you mean reinforce_pp?"),
    ],
)
def test_what_other_frameworks_say_otherwise_is_explained(theirs, said, capsys):
    with pytest.raises(SystemExit):
        parse_config(RLConfig, [theirs])
    assert said in capsys.readouterr().err


# --- forms ---------------------------------------------------------------------------------------


def scored(scorer, texts, problem=PROBLEM):
    scoring = scorer.begin(problem)
    for place, text in enumerate(texts):
        scoring.add(place, text, SampleFacts(place, [5] * len(text), "stop"))
    return [score for _, score in sorted(scoring.scores().items())]


def test_a_reward_sees_every_column_by_name():
    assert scorer_of("slow_rewards:takes_all")("x", PROBLEM).value == 5.0


def test_a_reward_sees_the_sample():
    scorer = scorer_of("slow_rewards:counts_tokens")
    scorer.check(PROBLEM)
    assert [score.value for score in scored(scorer, ["ab", "a"])] == [2.0, 101.0]
    assert scorer("", PROBLEM, SampleFacts(0, [1, 2, 3], "length")).value == 1003.0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_written_for_verl_is_called_as_verl_does(workers, in_workers):
    columns = {"data_source": "math_dapo", "ground_truth": "7", "extra_info": {"index": "1"}}
    problem = Problem(TALK, "7", 0, "", columns)
    scorer = in_workers("slow_rewards:compute_score", workers=workers)
    scorer.check(problem)
    assert [s.value for s in scored(scorer, ["7", "8"], problem)] == [1.0, 0.0]
    columns.pop("ground_truth")  # then it is the gold answer
    scorer.check(problem)
    assert [s.value for s in scored(scorer, ["7", "8"], problem)] == [1.0, 0.0]
    with pytest.raises(ValueError, match="asks for data_source, and"):
        scorer.check(PROBLEM)


@pytest.mark.parametrize("keys", [{}, {"answer_key": "reward_model.ground_truth"}])
def test_a_function_written_for_verl_gets_the_gold_answer_of_named_columns(keys):
    truth = {"ground_truth": "$7$", "style": "rule"}
    row = {"instruction": "?", "data_source": "math_dapo", "reward_model": truth}
    example = keyed("instruction", keys.get("answer_key")).read({**row, "extra_info": {}})
    assert example.answer == "$7$" and example.columns["ground_truth"] == "$7$"
    labelled = {**row, "label": "so #### 7", "ground_truth": "of the row"}
    assert keyed("instruction", "label").read(labelled).columns["ground_truth"] == "of the row"


def test_functions_of_batch_form_get_the_names_and_forms_of_trl():
    scorer = scorer_of("slow_rewards:count_ids")
    columns = {"completions": "of the row"}
    problem = Problem("p", "7", 0, "", columns, columns)
    scorer.check(problem)
    assert [s.value for s in scored(scorer, ["a", "bcd"], problem)] == [11.0, 33.0]
    assert "count_ids': completions);" in scorer.hidden(problem)


def test_a_reward_that_does_not_apply_to_a_row_is_left_out_and_not_failed(caplog):
    scorer = scorer_of("slow_rewards:if_long", "exact", weights=[2.0, 1.0])
    texts = ("x", "xx", "xxxx", "#### 7")
    found = [scorer(text, Problem("p", "7", 0)) for text in texts]
    assert [s.value for s in found] == [0.0, 0.0, 2.0, 3.0]
    assert [s.parts for s in found] == [(None, 0.0), (0.0, 0.0), (1.0, 0.0), (1.0, 1.0)]
    assert not any(s.failed for s in found) and scorer.failures == 0
    assert scorer.part_means(found) == {"if_long": pytest.approx(2 / 3), "exact": 0.25}
    assert scorer.part_means(found[:1]) == {"exact": 0.0}
    assert not caplog.text
    alone = scorer_of("slow_rewards:if_long")
    assert [alone(text, PROBLEM) for text in ("x", "xxxx")] == [Score(0.0, True), Score(1.0)]
    both = scorer_of("slow_rewards:if_long", "odd_rewards:nothing")
    assert both("x", PROBLEM) == Score(0.0, True, (None, None)) and both.failures == 1
    assert both.part_means([both("x", PROBLEM), Score(1.0, False, (1.0, None))]) == {"if_long": 1}
    said = "'slow_rewards:if_long, odd_rewards:nothing' all returned None for the row rows.jsonl:1"
    assert f"{said}: no reward applies" in caplog.text
    assert both("xxxx", PROBLEM) == Score(1.0, False, (1.0, None))


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


def test_batch_form_asks_for_columns_like_any_other():
    with pytest.raises(ValueError, match="asks for level"):
        scorer_of("slow_rewards:ranks").check(Problem("p", "7", 0))


@pytest.mark.parametrize("workers", [0, 1])
def test_asynchronous_rewards_of_a_group_run_at_once(workers, in_workers):
    scorer = in_workers("slow_rewards:waits", workers=workers)
    scored(scorer, ["0"])  # the process has started
    started = time.perf_counter()
    assert [s.value for s in scored(scorer, ["0.5"] * 8)] == [1.0] * 8
    assert time.perf_counter() - started < 3.0, "one after the other would take 4 s"
    both = in_workers("slow_rewards:waits_for_all", workers=workers)
    assert [s.value for s in scored(both, ["a", "b", "c"])] == [3.0] * 3


def test_an_asynchronous_reward_that_raises_before_it_is_awaited_fails_alone():
    class Late:
        async def __call__(self, completion):
            return 1.0

    class Raises(Late):
        def __call__(self, completion):
            if not completion:
                raise KeyError("no text")
            return super().__call__(completion)

    call = RewardCall("own", Raises())
    call.is_async = True
    first, second = call(["", "x"], [{"answer": "7"}] * 2)
    assert isinstance(first, Failed) and first.what.startswith("raised KeyError") and second == 1.0


def test_an_asynchronous_reward_that_cancels_itself_fails():
    async def cancels(completion, answer):
        raise asyncio.CancelledError

    [found] = RewardCall("own", cancels)([""], [{"answer": "7"}])
    assert isinstance(found, Failed) and found.what == "was cancelled"


def test_an_asynchronous_reward_that_is_late_fails_alone():
    call = RewardCall("own", slow_rewards.waits)
    rows = [{"answer": "7", "prompt": "p"}] * 3
    first, late, last = call(["0", "60", "0.01"], rows, seconds=1.0)
    assert (first, last) == (1.0, 1.0)
    assert isinstance(late, Failed) and late.timed_out


@pytest.mark.parametrize("workers", [0, 1])
def test_an_asynchronous_reward_shares_a_client_between_calls(workers, in_workers):
    scorer = in_workers("slow_rewards:asks", workers=workers, timeout=60.0)
    for _ in range(3):
        assert scored(scorer, ["0", "1", "2"]) == [Score(0.0), Score(1.0), Score(2.0)]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_asynchronous_reward_that_ends_the_program_leaves_the_event_loop_running(error):
    async def ends(completion, answer):
        if completion == "end":
            raise error
        return await slow_rewards.asks(completion, answer)

    call, rows = RewardCall("own", ends), [{"answer": "7"}] * 2
    assert call(["1", "2"], rows) == [1.0, 2.0]
    with pytest.raises(error):
        call(["1", "end"], rows)
    assert call(["1", "2"], rows) == [1.0, 2.0]


def test_an_asynchronous_reward_that_is_late_in_a_thread_fails_alone(in_workers, monkeypatch):
    monkeypatch.setattr(reward_workers, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(reward_workers, "_MARGIN", 60.0)
    scorer = in_workers("slow_rewards:waits_in_a_thread", "slow_rewards:pid", timeout=2.0)
    first, late, last = scored(scorer, ["0", "600", "0.01"])
    assert (first.parts[0], late.parts[0], last.parts[0]) == (1.0, 0.0, 1.0)
    assert (first.failed, late.failed, last.failed) == (False, True, False)
    many = scored(scorer, ["600"] * 33)  # more than run at once
    assert all(score.failed for score in many)
    after = scorer("0", PROBLEM)
    assert not after.failed and after.parts[1] == first.parts[1], "in the same process"


@pytest.fixture
def new_loop(monkeypatch):
    """Has this process make an event loop, as if it had run no asynchronous reward before."""
    monkeypatch.setattr(reward_loop, "_loop", None)
    monkeypatch.setattr(slow_rewards, "client", slow_rewards.Client())
    yield
    reward_loop._end()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_asynchronous_reward_may_set_an_alarm(workers, in_workers, new_loop):
    scorer = in_workers("slow_rewards:stops_itself", workers=workers, timeout=60.0)
    assert scored(scorer, ["x", "y"]) == [Score(1.0), Score(1.0)]


def test_an_asynchronous_reward_shares_a_client_between_threads(new_loop):
    call, rows = RewardCall("own", slow_rewards.asks), [{"answer": "7"}] * 3
    found = []

    def ask():
        found.append(call(["0", "1", "2"], rows))

    for _ in range(2):
        ask()
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        ask()
        for thread in threads:
            thread.join(60)
    assert found == [[0.0, 1.0, 2.0]] * 10


def test_asynchronous_rewards_run_below_an_event_loop_of_the_program(new_loop):
    async def program():
        return RewardCall("own", slow_rewards.asks)(["1"], [{"answer": "7"}])

    assert asyncio.run(program()) == [1.0]


def test_a_late_asynchronous_reward_cleans_up_before_the_next_call(
    in_workers, monkeypatch, tmp_path
):
    monkeypatch.setattr(reward_workers, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(reward_workers, "_MARGIN", 60.0)
    scorer = in_workers("slow_rewards:cleans_up", timeout=0.2)
    assert scorer("600", Problem("p", str(tmp_path / "file"), 0)).failed
    assert wait_until((tmp_path / "file").exists)


def test_a_process_with_many_abandoned_threads_is_replaced_and_no_call_fails(
    in_workers, monkeypatch
):
    monkeypatch.setattr(reward_workers, "MOST_ABANDONED", 3)
    scorer = in_workers("slow_rewards:gives_up_a_thread", "slow_rewards:pid", timeout=60.0)
    found = [score for _ in range(3) for score in scored(scorer, ["x", "y"])]
    assert not any(score.failed for score in found)
    pids = [score.parts[1] for score in found]
    assert pids[0] == pids[2] != pids[-1] and scorer._workers.replaced == 1


def test_many_abandoned_threads_of_this_process_are_warned_of_once(monkeypatch, new_loop, caplog):
    monkeypatch.setattr(scoring, "MOST_ABANDONED", 3)
    scorer = scorer_of("slow_rewards:gives_up_a_thread")
    said = []
    for _ in range(3):
        scored(scorer, ["x", "y"])
        said.append(caplog.text.count("that reward 'slow_rewards:gives_up_a_thread' gave up"))
    assert said == [0, 1, 1] and "rewards.workers" in caplog.text


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
    started = time.perf_counter()
    found = scored(scorer, ["fine", "hang", "also fine"])
    assert [(s.parts[0], s.failed) for s in found] == [(1, False), (0, True), (1, False)]
    assert time.perf_counter() - started < 60
    assert all(s.parts[1] > 0 for s in found), "the other reward of that completion counts"
    [second] = scorer._workers.pids()
    assert first != second and not is_running(first) and is_running(second)
    assert "took longer than 1 s per completion for the row rows.jsonl:1" in caplog.text
    said = scorer.metrics()
    assert said["reward/timed_out"] == 1.0 and said["time/reward"] >= 1.0
    assert scorer.metrics()["reward/timed_out"] == 0.0, "figures are of one step"
    scorer.close()
    assert wait_until(lambda: not is_running(second))


@pytest.mark.parametrize("reward", ["starts_slowly", "starts_slowly_async"])
def test_the_first_call_of_a_reward_in_a_process_may_be_late(reward, in_workers):
    scorer = in_workers(f"slow_rewards:{reward}", "slow_rewards:dies", timeout=0.5)
    assert [s.failed for s in scored(scorer, ["x", "x", "die"])] == [False, False, True]
    assert not scorer("x", PROBLEM).failed, "in the process that replaced the first"


def test_a_reward_that_only_hangs_gets_its_extra_time_a_few_times_only():
    firsts = reward_workers.FirstCalls()
    for _ in range(reward_workers._FIRST_TIMES):
        assert firsts.extra(0) == reward_workers._FIRST_SECONDS
        firsts.was_late(0)
    assert firsts.extra(0) == 0.0 and firsts.extra(1) > 0.0
    firsts.returned(0, 2.0)
    firsts.returned(0, 1.0)
    assert firsts.extra(0) == 2.0 * reward_workers._FIRST_FACTOR


@pytest.mark.parametrize("how", ["late", "die"])
def test_what_a_reward_has_started_ends_with_its_process(how, in_workers, monkeypatch, tmp_path):
    monkeypatch.setattr(reward_workers, "_FIRST_SECONDS", 2.0)
    scorer = in_workers("slow_rewards:starts_a_process", timeout=1.0)
    assert scorer(how, Problem("p", str(tmp_path / "pid"), 0)).failed
    started = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not is_running(started), 10)


def test_a_reward_of_ones_own_compares_answers_without_a_further_process(in_workers):
    scorer = in_workers("slow_rewards:compares", timeout=5.0)
    problem = Problem("p", r"\frac{1}{2}+\sqrt{2}", 0)
    assert scorer(r"\boxed{\sqrt{2}+\frac12}", problem) == Score(1.0)


def test_a_reward_that_ends_its_process_fails_and_the_next_runs(in_workers, capfd, caplog):
    scorer = in_workers("slow_rewards:dies")
    assert [s.failed for s in scored(scorer, ["x", "die", "x"])] == [False, True, False]
    assert "ended its process for the row" in caplog.text and "exit status 7" in caplog.text
    assert "what a reward prints" not in capfd.readouterr().out


def test_rewards_run_in_other_processes_at_the_same_time(in_workers):
    scorer = in_workers("slow_rewards:sleeps", "slow_rewards:pid", workers=2)
    scored(scorer, ["0.2", "0.2"])  # both have started
    found = scored(scorer, ["0.5"] * 4)
    pids = {score.parts[1] for score in found}
    assert os.getpid() not in pids and len(scorer._workers.pids()) == 2
    assert scorer.metrics()["time/reward"] > 2.0 > 0.0


def test_nothing_waits_for_a_reward_in_a_worker_until_its_value_is_wanted(in_workers):
    scorer = in_workers("slow_rewards:sleeps")
    scored(scorer, ["0"])  # the process has started
    scorer.metrics()
    scoring = scorer.begin(PROBLEM)
    scoring.add(0, "0.5", None)
    assert scoring.futures(), "it is still computed"
    assert wait_until(lambda: not scoring.futures())
    assert scoring.scores() == {0: Score(1.0)}
    found = scorer.metrics()
    assert found["time/reward"] >= 0.5 and found["time/reward_wait"] < 0.1
    here = scorer_of("slow_rewards:sleeps")
    here("0.2", PROBLEM)
    assert here.metrics()["time/reward_wait"] >= 0.2, "in this process the rollout waits"


def test_answers_are_compared_in_the_worker_without_a_further_process(in_workers):
    scorer = in_workers("math_verify", timeout=60.0)
    problem = Problem("p", r"\frac{1}{2}+\sqrt{2}", 0)
    assert scorer(r"\boxed{\sqrt{2}+\frac12}", problem) == Score(1.0)
    assert scorer(r"\boxed{\sqrt{3}}", problem) == Score(0.0)
    [pid] = scorer._workers.pids()
    assert not Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize(
    ("names", "workers"),
    [
        (["exact"], 0), (["number", "choice", "format"], 0), (["math_verify"], None),
        (["exact", "slow_rewards:right"], None),
    ],
)  # fmt: skip
def test_what_takes_no_time_runs_in_this_process(names, workers):
    scorer = Scorer(names, options=RewardsSection())
    assert scorer.workers == workers if workers == 0 else scorer.workers > 0
    slow = Scorer(["format"], options=RewardsSection(pattern="(a|a)*b"))
    assert slow.workers > 0, "a pattern of one's own may take any time"


def test_a_worker_that_cannot_start_ends_the_run(in_workers, monkeypatch):
    scorer = in_workers("slow_rewards:right")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.endswith("tests")])
    with pytest.raises(WorkerError, match="cannot be started: .*rewards.workers=0"):
        scorer("7", PROBLEM)


PROGRAM = """
import sys
from types import SimpleNamespace

from train.rewards import THINKS_FIRST
from train.scoring import Scorer
from train.tasks.layout import Problem

if __name__ == "__main__":
    options = SimpleNamespace(weights=None, workers=1, timeout=600.0, pattern=THINKS_FIRST)
    scorer = Scorer("slow_rewards:hangs", options=options)
    assert "jax" not in sys.modules, "a worker, which imports less, must not import it"
    problem = Problem("p", "7", 0)
    scorer("fine", problem)
    print(*scorer._workers.pids(), flush=True)
    if sys.argv[1] == "end":
        sys.exit(0)
    scoring = scorer.begin(problem)
    scoring.add(0, "hang", None)
    print("hangs", flush=True)
    scoring.scores()
"""


@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL", "SIGTERM", "end"])
def test_no_process_is_left_however_the_program_ends(how, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    tests = Path(slow_rewards.__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}"}
    with subprocess.Popen(
        [sys.executable, program, how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=environment, start_new_session=True,
    ) as process:  # fmt: skip
        pid = int(process.stdout.readline())
        if how != "end":
            assert process.stdout.readline() == b"hangs\n"
            time.sleep(0.5)
            process.send_signal(getattr(signal, how))
        process.wait(60)
    assert wait_until(lambda: not is_running(pid)), "the worker hangs on"


IN_THIS_PROCESS = """
import asyncio
import sys
import threading

from train.reward_calls import RewardCall

async def waits(completion):
    print("waits", flush=True)
    try:
        if completion == "in a thread":
            await asyncio.to_thread(threading.Event().wait)
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        raise

if __name__ == "__main__":
    call, rows = RewardCall("own", waits), [{"answer": "7"}] * 2
    print("begins", flush=True)
    limit = 0.2 if sys.argv[1] == "end" else None
    found = call(["in a thread", "here"], rows, limit)
    print(sum(outcome.timed_out for outcome in found), flush=True)
"""


@pytest.mark.parametrize("how", ["SIGINT", "end"])
def test_a_program_ends_although_an_asynchronous_reward_waits(how, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(IN_THIS_PROCESS))
    environment = {**os.environ, "PYTHONPATH": str(Path(slow_rewards.__file__).parent.parent)}
    with subprocess.Popen(
        [sys.executable, program, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment, text=True,
    ) as process:  # fmt: skip
        try:
            assert [process.stdout.readline() for _ in range(3)] == ["begins\n"] + ["waits\n"] * 2
            if how == "SIGINT":
                process.send_signal(signal.SIGINT)
            said, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert said.splitlines() == ["cancelled"] * 2 + ["2"] * (how == "end")
    assert errors.strip().splitlines()[-1:] == ["KeyboardInterrupt"] * (how == "SIGINT")
    assert "destroyed" not in errors and "never retrieved" not in errors


# --- rollouts ------------------------------------------------------------------------------------


@given(worlds(), rules(), st.booleans(), st.integers(1, 3), st.integers(1, 9), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_when_rewards_become_known_changes_nothing_that_is_selected_or_carried(
    world, rule, partial, seed, slots, late
):
    expected, _ = run_steps(world, rule, partial, 0, 50)
    assert run_steps(world, rule, partial, seed, slots, late=late)[0] == expected


@pytest.mark.parametrize("reward", ["slow_rewards:ranks", "slow_rewards:right"])
@pytest.mark.parametrize("early", [True, False])
def test_a_group_that_is_cut_is_scored_as_a_whole_however_fast_it_was_sampled(reward, early):
    prompts = types.SimpleNamespace(tokenizer=None)
    rollouts = Rollouts(RLConfig(model="x", out="y"), [], prompts, (), scorer_of(reward))
    rollouts._text = lambda tokens: "7" * len(tokens)
    rule, chosen = Rule(1, 1, False), Selection(2, 1, [], True)
    responses = [Response([5] * n, [0.0] * n, finish_reason="stop", emitted=n) for n in (1, 2, 9)]
    group = Group(0, 1, 1, PROBLEM, [1], responses)
    if early:  # the last sample ended before the budget fell to 2 tokens
        group.rewards = rollouts._score(group)
    else:
        last = group.responses[2]
        last.finish_reason, last.emitted = None, 3
        del last.token_ids[2:], last.logprobs[2:]
    rollouts._scoring = {}
    ended = end_step(rule, [group], chosen, 1, True, rollouts._scorer.is_batch)
    [group], _ = begin_step(ended.carried, 2, 9)
    assert len(group.responses[2].token_ids) == 2
    group.responses[2].token_ids, group.responses[2].finish_reason = [5] * 9, "stop"
    batch = reward == "slow_rewards:ranks"
    assert rollouts._score(group) == ([0.0, 1.0, 2.0] if batch else [1.0, 0.0, 0.0])


@pytest.mark.parametrize("reward", ["slow_rewards:ranks", "slow_rewards:right"])
def test_of_several_processes_one_computes_a_reward_for_all(reward, monkeypatch):
    prompts = types.SimpleNamespace(tokenizer=None)
    rollouts = Rollouts(RLConfig(model="x", out="y"), [], prompts, (), scorer_of(reward))
    rollouts._text, rollouts._problems = lambda tokens: "7" * len(tokens), {0: PROBLEM}
    responses = [Response(token_ids=[5] * n, finish_reason="stop") for n in (3, 1, 2)]
    group, asked = Group(0, 1, 1, PROBLEM, [1], responses), []
    monkeypatch.setattr(distributed, "is_several", lambda: True)
    monkeypatch.setattr(distributed, "of_first", lambda make, at: asked.append(at) or make())
    for place, response in enumerate(responses):
        job = types.SimpleNamespace(request=0, sample=place)
        begun = rollouts.score_sample(job, response)  # where the sample's engine is
        if begun is not None:
            assert begun.done(), "it needs no worker"
            response.reward, response.failed, response.parts = begun.result()
        rollouts._begin_score(group, place)
    assert not rollouts._scoring or not rollouts._scoring[0].futures()
    batch = reward == "slow_rewards:ranks"
    assert rollouts._score(group) == ([2.0, 0.0, 1.0] if batch else [0.0, 1.0, 0.0])
    assert asked == ["rewards"] * batch, "all of a group at once, or each with its sample"
    rollouts._score(group)
    assert len(asked) == batch, "once"


def test_no_process_waits_for_a_reward_while_samples_run(in_workers, monkeypatch):
    scorer = in_workers("slow_rewards:sleeps")
    scorer("0", PROBLEM)  # the process has started
    scorer.metrics()
    begun = scorer.begin_one("0.5", PROBLEM)
    begun.wait(0.05)
    assert not begun.done()
    assert wait_until(begun.done) and begun.result() == Score(1.0)
    prompts = types.SimpleNamespace(tokenizer=None)
    batch = in_workers("slow_rewards:sleeps_for_all")
    rollouts = Rollouts(RLConfig(model="x", out="y"), [], prompts, (), batch)
    rollouts._text = lambda tokens: "7" * len(tokens)
    responses = [Response(token_ids=[5] * n, finish_reason="stop") for n in (3, 1)]
    group = Group(0, 1, 1, PROBLEM, [1], responses)
    monkeypatch.setattr(distributed, "is_several", lambda: True)
    told = []
    monkeypatch.setattr(distributed, "of_first", lambda make, at: told.append(make()) or told[-1])
    assert rollouts._score(group) is None and told == [None]
    rollouts._wait_for_score([group])
    assert rollouts._score(group) == [2.0, 2.0] and len(told) == 2
    figures = {"time/reward": 1.0, "time/reward_wait": 2.0, "reward/timed_out": 1.0}
    monkeypatch.setattr(distributed, "gather", lambda own, place: [own, figures, figures])
    found = rollouts._reward_figures()
    assert found["reward/timed_out"] == 2.0 and found["time/reward"] > 2.0
    assert found["time/reward_wait"] == 2.0


@pytest.fixture(scope="module")
def programs():
    with tiny_run.shared_programs():
        yield


PLAIN = {"draft.mode": "none", "rollout.strategy": "off", "checkpoint.export": "false"}


def run(model, out, **changes):
    rl.main(tiny_run.arguments(model, out, **PLAIN, **changes))
    return read_metrics(out)


REWARDS = {
    "reward": "[slow_rewards:chars, slow_rewards:lengths, slow_rewards:slow_coin]",
    "rewards.weights": "[0.0, 0.5, 1.0]",
    "eval.problems": 4,
}


def test_a_run_gives_the_same_rewards_in_workers_and_logs_each(programs, thin_policy, tmp_path):
    here = run(thin_policy, tmp_path / "here", **REWARDS)
    there = run(thin_policy, tmp_path / "there", **REWARDS | {"rewards.workers": 2})
    names = [f"reward/{name}" for name in ("chars", "lengths", "slow_coin")]
    steps = [[r for r in records if r["step"] > 0] for records in (here, there)]
    assert len(steps[0]) == 2
    for one, other in zip(*steps, strict=True):
        for name in ("rollout/tokens_sha", "rollout/reward", "train/loss", *names):
            assert one[name] == other[name], name
        chars, lengths, coin = (one[name] for name in names)
        assert one["rollout/reward"] == pytest.approx(0.5 * lengths + coin)
        assert chars > 0 and one["reward/failed"] == one["reward/timed_out"] == 0
        assert one["time/reward"] > 0 and other["time/reward"] > 0
    assert any("eval/reward/slow_coin" in record for record in there)


def test_a_run_goes_on_when_a_reward_hangs(programs, thin_policy, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(reward_workers, "_FIRST_SECONDS", 0.0)
    changes = {"reward": "slow_rewards:sometimes_hangs", "rewards.workers": 1, "steps": 1}
    changes |= {"rewards.timeout": 0.5, "max_failed_rewards": 1.0, "rollout.n": 2}
    (step,) = (r for r in run(thin_policy, tmp_path / "run", **changes) if r["step"] > 0)
    assert 0 < step["reward/timed_out"] == step["reward/failed"] < 8
    assert "took longer than 0.5 s per completion" in caplog.text


def test_a_run_is_not_resumed_with_other_weights_of_rewards(
    programs, thin_policy, tmp_path, capsys
):
    changes = {**REWARDS, "steps": 1, "eval.problems": 0}
    run(thin_policy, tmp_path / "run", **changes)
    more = {**PLAIN, **changes, "steps": 2}
    argv = [*tiny_run.arguments(thin_policy, tmp_path / "run", **more), "--resume"]
    with pytest.raises(SystemExit) as ended:
        rl.main([*argv, "rewards.weights=[1.0, 0.5, 1.0]"])
    assert "other settings of rewards" in f"{ended.value}{capsys.readouterr().err}"
    rl.main([*argv, "rewards.workers=1", "rewards.timeout=60.0"])
    assert read_metrics(tmp_path / "run")[-1]["step"] == 2
