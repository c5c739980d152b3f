"""Samples of several turns: tokens, masks, interruptions, lost environments, tools."""

import json
import os

import pytest
import scripted_policy
import tiny_run
from test_resume import CHANGES, assert_same_run, kill_after, program, sampled

from specjax.tokenizer import chat_text
from specjax.weights import load_tokenizer
from train import rl
from train.environments.calls import Request, Turn
from train.environments.pool import Environments
from train.rollout.collect import Rollouts
from train.schema import RewardsSection

pytestmark = pytest.mark.usefixtures("shared_programs")

TALK = {
    "environment": "tiny_environments:Talk", "reward": "auto", "max_turns": 4,
    "rollout.max_tokens": 40, "rollout.page_size": 16,
}  # fmt: skip


@pytest.fixture
def groups(monkeypatch):
    """All groups that are collected."""
    collected, collect = [], Rollouts.collect

    def kept(self, *args):
        found = collect(self, *args)
        collected.extend(found[0])
        return found

    monkeypatch.setattr(Rollouts, "collect", kept)
    return collected


def test_tokens_of_the_environment_are_not_trained_on_and_speculation_changes_none(
    thin_policy, tmp_path, groups
):
    for strategy in ("1_1_2", "off"):
        out = tmp_path / strategy
        rl.main(tiny_run.arguments(thin_policy, out, **TALK, rollout__strategy=strategy))
    assert sampled(tmp_path / "1_1_2") == sampled(tmp_path / "off")
    tokens = [[r.token_ids for r in group.responses] for group in groups]
    assert tokens[: len(tokens) // 2] == tokens[len(tokens) // 2 :]
    responses = [response for group in groups for response in group.responses]
    assert max(len(r.turns) for r in responses) == 4 and any(r.reward > 1 for r in responses)
    for response in responses:
        mask, reward, after = [], 0.0, 0
        for begin, end, gain, messages in response.turns:
            assert set(response.loss_mask[after:begin] if after else []) <= {0}
            mask += [0] * (begin - len(mask)) + [1] * (end - begin)
            reward, after = reward + gain, end
            assert len(messages) == 1
        assert response.loss_mask in (mask, None) and response.reward == reward
        assert all(v == 0.0 for v, m in zip(response.logprobs, mask, strict=True) if not m)
        assert all(v < 0.0 for v, m in zip(response.logprobs, mask, strict=True) if m)


@pytest.mark.slow
def test_a_run_that_was_killed_between_turns_goes_on(thin_policy, tmp_path, monkeypatch):
    """With workers, and samples that the next step continues under other weights."""
    changes = {
        **CHANGES, **TALK, "steps": 5, "rewards.workers": 2,
    }  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")]))
    whole, out = tmp_path / "whole", tmp_path / "run"
    rl.main(tiny_run.arguments(thin_policy, whole, **changes))
    kill_after(program(thin_policy, out, slow=0.02, **changes), out, 2, 0.15)
    rl.main([*tiny_run.arguments(thin_policy, out, **changes), "--resume"])
    assert_same_run(out, whole)


def test_an_environment_that_hangs_costs_its_sample_and_no_other(thin_policy, tmp_path, caplog):
    changes = {
        **TALK, "environment": "tiny_environments:Forgetful", "rewards.workers": 1,
        "rewards.timeout": 0.5, "max_failed_rewards": 1.0, "steps": 1,
    }  # fmt: skip
    rl.main(tiny_run.arguments(thin_policy, tmp_path / "run", **changes))
    assert "took longer than" in caplog.text
    assert "a sample begins again" in caplog.text
    [record] = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert 0 < record["reward/failed_share"] < 1 and record["rollout/turns_mean"] > 1


def test_tools_are_python_functions(tmp_path):
    """The environment describes them, calls them, and tells the policy of errors."""
    environments = Environments("tiny_environments:Adder", RewardsSection(workers=0))
    row = {"prompt": "17 + 25?", "answer": "42"}
    [turn] = environments.ask("a", Request(row)).result()
    [tool] = turn.tools
    assert tool["function"]["parameters"]["required"] == ["a", "b"]

    def answers(text):
        messages = [{"role": "assistant", "content": text}]
        [turn] = environments.ask("a", Request(row, turn_of_prompt, messages)).result()
        assert isinstance(turn, Turn), turn
        return [message["content"] for message in turn.messages], turn.reward, turn.done

    turn_of_prompt = turn.messages
    call = '<tool_call>{"name": "add", "arguments": {"a": 17, "b": 25}}</tool_call>'
    other = '<tool_call>{"name": "multiply", "arguments": {}}</tool_call>'
    assert answers(call + other) == (["42", "error: there is no tool multiply"], 0.0, False)
    [wrong], _, done = answers('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    assert wrong.startswith("error: TypeError") and not done
    assert answers("It is 42.") == ([], 1.0, True)
    assert answers("<tool_call>{</tool_call>") == ([], 0.0, True)


def test_the_text_between_turns_is_that_of_the_chat_template(tmp_path, groups):
    """A scripted policy calls a tool, and reads its answer; ids are never encoded again."""
    texts = {1: '<tool_call>{"name": "add", "arguments": {"a": 17, "b": 25}}</tool_call>'}
    path = scripted_policy.write(tmp_path / "policy", {**texts, 3: "It is 42."})
    changes = {
        **TALK, "environment": "tiny_environments:Adder", "data.chat": "on", "steps": 1,
        "rollout.strategy": "off", "rollout.max_tokens": 250, "rollout.max_prompt_tokens": 400,
        "packing.row_length": 800, "algo.dynamic_sampling": False,
    }  # fmt: skip
    rl.main(tiny_run.arguments(path, tmp_path / "run", **changes))
    tokenizer, problem = load_tokenizer(path), groups[0].problem
    called = [{"role": "assistant", "content": texts[1]}, {"role": "tool", "content": "42"}]
    prompt = chat_text(tokenizer, [*problem.prompt, *called], tools=problem.row["tools"])
    response = groups[0].responses[0]
    ids = [*groups[0].prompt, *response.token_ids]
    whole = prompt.replace("<|im_start|>assistant\n", "<|turn 1|>")
    assert tokenizer.decode(ids) == f"{whole}It is 42.<|im_end|>"
    assert len(response.turns) == 2 and response.text.endswith("It is 42.")
