"""What lm-eval 0.4.13 asked a server is asked again, and gives the log-likelihoods of its `hf`
backend, as transformers and torch computed them; see lm_eval_recording.py."""

import json

import pytest
from lm_eval_recording import CLOSE, DOCUMENTS, RECORDING, write_checkpoint
from serving import KEY, Server, config, served

from serve.settings import load_llm

ASKED = json.loads(RECORDING.read_text())
SCORED = [one for one in ASKED if "loglikelihoods" in one]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    cfg = config(write_checkpoint(tmp_path_factory.mktemp("lm_eval") / "model"))
    cfg.served_name, cfg.chat_template, cfg.speculation.strategy = "model", None, "off"
    cfg.engine.max_len = 128
    with served(cfg, load_llm(cfg)) as running:
        yield running


def ask(server: Server, one: dict) -> dict:
    if one["method"] == "GET":
        answer = server.get(one["path"])
    else:
        answer = server.post(one["path"], key=KEY, json=one["json"])
    assert answer.status_code == 200, (one, answer.text)
    return answer.json()


def loglikelihood(choice: dict, context: int) -> tuple[float, bool]:
    """As lm-eval has it: the sum over the continuation, and whether greedy decoding finds it.

    The token that was generated is the last, and no part of the continuation.
    """
    values = choice["logprobs"]["token_logprobs"][context:-1]
    best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][context:-1]]
    return sum(values), values == best


def test_the_recording_is_of_every_choice_of_the_task_in_batches():
    count = sum(len(choices) for _, choices, _ in DOCUMENTS)
    assert sum(len(one["json"]["prompt"]) for one in SCORED) == count
    assert max(len(one["json"]["prompt"]) for one in SCORED) > 1
    options = [
        {k: v for k, v in one["json"].items() if k not in ("prompt", "seed")} for one in SCORED
    ]
    expected = {"model": "model", "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    assert options == [expected] * len(SCORED)
    assert ASKED[0] == {"method": "GET", "path": "/tokenizer_info"}


def test_the_remote_tokenizer_is_the_checkpoints(server: Server):
    tokenizer = server.llm.tokenizer
    for one in ASKED:
        if one["path"] == "/tokenize":
            expected = tokenizer.encode(one["json"]["prompt"], add_special_tokens=False)
            assert ask(server, one)["tokens"] == expected
        elif one["path"] == "/tokenizer_info":
            info = ask(server, one)
            assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")


@pytest.mark.parametrize("index", range(len(SCORED)))
def test_loglikelihoods_are_those_of_transformers(server: Server, index):
    one = SCORED[index]
    choices = sorted(ask(server, one)["choices"], key=lambda choice: choice["index"])
    prompts, contexts, right = (
        one["json"]["prompt"], one["context_lengths"], one["loglikelihoods"],
    )  # fmt: skip
    assert len(choices) == len(prompts) == len(right)
    for choice, prompt, context, (value, greedy) in zip(
        choices, prompts, contexts, right, strict=True
    ):
        assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1
        assert context > 0 and context < len(prompt)
        found, is_greedy = loglikelihood(choice, context)
        assert found == pytest.approx(value, abs=CLOSE)
        assert is_greedy == greedy
