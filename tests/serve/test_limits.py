"""A server without keys and without speculation, with narrow limits; what is refused where, and
what a token costs the host."""

import json

import httpx
import pydantic
import pytest
from serving import BATCH, QUEUE, WIDEST, Server, config, served

from serve.protocol import ChatRequest, CompletionRequest
from serve.settings import WARM_UP, ServeConfig, load_llm
from specjax.command_line import parse_config
from specjax.shipped import find_shipped

PROMPT, TOKENS = 20, 10  # limits
# A template may fail on messages that it was not written for: it divides, looks up, recurses.
TEMPLATE = """{%- macro again() %}{{ again() }}{% endmacro -%}
{%- for m in messages %}{{ m.content }}{% endfor %}{{ mark | default("") }}
{%- if messages[0].content == "divide" %}{{ 1 // 0 }}{% endif %}
{%- if messages[0].content == "recurse" %}{{ again() }}{% endif %}
{%- if messages[0].content == "raise" %}{{ raise_exception("no such thing") }}{% endif %}
{%- if messages[0].content == "index" %}{{ messages["x"].y.z }}{% endif %}
{%- if messages[0].content == "range" %}{{ range(10 ** 9) | list }}{% endif %}"""


@pytest.fixture(scope="module")
def server(thin_policy):
    off = {"strategy": "off"}
    keys = {"api_key": None, "admin_key": None}
    cfg = config(thin_policy, **keys, chat_template=TEMPLATE, speculation=off)
    cfg.limits.prompt_tokens, cfg.limits.max_tokens = PROMPT, TOKENS
    llm = load_llm(cfg)
    llm.generate("1+1=", WIDEST)
    with served(cfg, llm) as running:
        yield running


def post(server: Server, body, path="completions"):
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=120)


def refusal(answer, status=400):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def say(server, content, **options):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 5, **options}
    return post(server, body, "chat/completions")


def test_without_a_key_anyone_may_ask_and_no_one_may_change_anything(server: Server):
    assert post(server, {"prompt": "1+1=", "max_tokens": 3}).status_code == 200
    for path in ("/v1/models", "/server_info", "/metrics"):
        assert httpx.get(server.url + path).status_code == 200
    assert "data-key=no" in httpx.get(server.url).text
    for path in ("/update_weights", "/sleep", "/wake"):
        error = refusal(httpx.post(server.url + path, json={"path": "x"}), 403)
        assert "started without one" in error["message"]


def test_a_server_without_speculation_says_so_and_takes_every_request(server: Server):
    asked = {"prompt": "17+25+8=", "max_tokens": 8, "seed": 5, "ignore_eos": True}
    more = {"return_spec_details": True, "return_token_ids": True}
    choices = [
        post(server, {**asked, **more, "speculative": how}).json()["choices"][0]
        for how in (True, False)
    ]
    assert choices[0] == choices[1] and len(choices[0]["token_ids"]) == 8
    details = choices[0]["spec_details"]
    assert (details["drafted"], details["rounds"], details["plain_rounds"]) == (0, 8, 8)
    assert set(details["origins"]) == {"plain"}
    info = httpx.get(f"{server.url}/server_info").json()
    [state] = info["internal_states"]
    assert info["strategies"] == ["off"] and state["speculative_num_steps"] == 0
    assert state["avg_spec_accept_length"] is None, "no round has drafted"
    assert "specjax:spec_decode_num_drafts_total 0.0" in httpx.get(f"{server.url}/metrics").text


def test_prompts_and_samples_have_the_lengths_that_were_set(server: Server):
    fits = post(server, {"prompt": [5] * PROMPT, "max_tokens": TOKENS, "ignore_eos": True})
    assert fits.json()["usage"] == {
        "prompt_tokens": PROMPT, "completion_tokens": TOKENS, "total_tokens": PROMPT + TOKENS,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    error = refusal(post(server, {"prompt": [5] * (PROMPT + 1), "max_tokens": 2}))
    assert error["code"] == "context_length_exceeded"
    assert f"has {PROMPT + 1} tokens, and this server takes {PROMPT}" in error["message"]
    error = refusal(post(server, {"prompt": [5], "max_tokens": TOKENS + 1}))
    assert error["param"] == "max_tokens" and f"takes {TOKENS}" in error["message"]
    error = refusal(say(server, "1+1=", max_tokens=None, max_completion_tokens=TOKENS + 1))
    assert error["param"] == "max_tokens"
    whole = say(server, "1+1=", max_tokens=None, ignore_eos=True).json()
    assert whole["usage"]["completion_tokens"] == TOKENS, "without max_tokens it takes what it may"


def test_options_of_the_template_are_handed_to_it(server: Server):
    plain = say(server, "1+1=", seed=1).json()
    marked = say(server, "1+1=", seed=1, chat_template_kwargs={"mark": "2="}).json()
    written = say(server, "1+1=2=", seed=1).json()
    assert marked["usage"] == written["usage"] != plain["usage"]
    assert marked["choices"] == written["choices"]
    unread = say(server, "1+1=", seed=1, chat_template_kwargs={"mark": "2=", "unread": 1}).json()
    assert unread["choices"] == marked["choices"], "as in vLLM"
    error = refusal(say(server, "1", chat_template_kwargs={"tokenize": True}))
    assert error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("content", ["divide", "recurse", "raise", "index", "range"])
def test_whatever_a_template_makes_of_messages_it_cannot_take_is_a_400(server: Server, content):
    error = refusal(say(server, content))
    assert error["param"] == "messages" and "chat template" in error["message"]
    assert say(server, "1+1=").status_code == 200


def test_the_queue_is_full_before_any_prompt_is_read(server: Server, monkeypatch):
    tokenizer, read = server.llm.tokenizer, []
    encode = type(tokenizer).encode
    monkeypatch.setattr(
        type(tokenizer),
        "encode",
        lambda self, text, **o: read.append(text) or encode(self, text, **o),
    )
    full = {"prompt": [[5]] * 3, "n": 8, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    assert 24 < BATCH + QUEUE < 24 + 6
    with server.slowly():
        with httpx.stream("POST", f"{server.url}/v1/completions", json=full, timeout=120) as stream:
            assert stream.status_code == 200
            answer = post(server, {"prompt": "1+1=", "n": 6})
            assert refusal(answer, 429)["code"] == "rate_limit_exceeded" and not read
            assert answer.headers["retry-after"]
    server.settles(lambda m: m["num_requests_running"] == 0)
    assert post(server, {"prompt": "1+1=", "max_tokens": 2}).status_code == 200 and read


MANY = 1000
NAMES = {f"a{i}": 1 for i in range(MANY)}
PARTS = [{"role": "user", "content": [{}] * MANY}]
BAD = {
    "prompts": ("completions", {"prompt": [None] * MANY}, "prompt"),
    "tokens": ("completions", {"prompt": [5] + ["5"] * MANY}, "prompt"),
    "lists of tokens": ("completions", {"prompt": [[-1]] * MANY}, "prompt"),
    "stop": ("completions", {"prompt": "1", "stop": [""] * MANY}, "stop"),
    "stop_token_ids": ("completions", {"prompt": "1", "stop_token_ids": [-1] * MANY}, None),
    "bad_words": ("completions", {"prompt": "1", "bad_words": [1] * MANY}, None),
    "allowed_token_ids": ("completions", {"prompt": "1", "allowed_token_ids": [-1] * MANY}, None),
    "logit_bias": ("completions", {"prompt": "1", "logit_bias": NAMES}, None),
    "metadata": ("completions", {"prompt": "1", "metadata": NAMES}, None),
    "unknown": ("completions", {"prompt": "1", **NAMES}, "a0"),
    "messages": ("chat/completions", {"messages": [{}] * MANY}, "messages"),
    "parts": ("chat/completions", {"messages": PARTS}, "messages"),
    "keys": ("chat/completions", {"messages": [NAMES]}, "messages"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_of_a_thousand_mistakes_one_is_looked_at(server: Server, what):
    """A body may hold half a million, and listing them all would block other requests."""
    path, body, param = BAD[what]
    assert refusal(post(server, body, path))["param"] == (param or what)
    kind = ChatRequest if path.startswith("chat") else CompletionRequest
    with pytest.raises(pydantic.ValidationError) as caught:
        kind.model_validate(json.loads(json.dumps(body)))
    assert caught.value.error_count() < 10


# --- what a token costs the host ------------------------------------------------------------------


def test_the_settings_of_make_serve_can_be_used():
    cfg, _ = parse_config(ServeConfig, ["--config", "configs/serve.yaml"], "serve")
    assert find_shipped(cfg.model).is_dir() and cfg.name == "sums"
    assert (cfg.host, cfg.api_key, cfg.admin_key) == ("127.0.0.1", None, None)
    strategies = cfg.speculation.control_config().strategies
    assert {strategy.name for strategy in strategies} == {"off", "2_1_3", "4_1_5"}
    assert not cfg.speculation.spec().is_off and cfg.engine.warm_up in WARM_UP
