"""Fields that ask for nothing, replies as history, and what browsers and load balancers ask."""

import json

import httpx
import openai
import pydantic
import pytest
from serving import ADMIN, KEY, Server, config, served

from serve import protocol
from serve.errors import _explain
from serve.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from serve.settings import load_llm

PROMPT = "17+25+8="
ASKED = {"model": "tiny", "max_tokens": 6, "seed": 4}
TEXT = {**ASKED, "prompt": PROMPT}
CHAT = {**ASKED, "messages": [{"role": "user", "content": PROMPT}]}
PATHS = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT}

# What OpenAI's and vLLM's fields say where nothing is asked for; more than one value of each.
NOTHING = {
    "tools": (None, []), "tool_choice": (None, "none", "auto"), "functions": (None, []),
    "function_call": (None, "none", "auto"), "response_format": (None, {"type": "text"}),
    "audio": (None,), "modalities": (None, ["text"], []), "prediction": (None,),
    "store": (None, False), "metadata": (None, {}, {"run": "7"}), "user": (None, "", "me"),
    "service_tier": (None, "auto", "default"), "parallel_tool_calls": (None, True, False),
    "reasoning_effort": (None,), "verbosity": (None, "medium"), "web_search_options": (None,),
    "safety_identifier": (None, "a"), "prompt_cache_key": (None, "b"),
    "prompt_cache_retention": (None, "in_memory"), "moderation": (None,),
    "logprobs": (None,), "top_logprobs": (None, 0), "logit_bias": (None, {}),
    "n": (None, 1), "best_of": (None, 1), "stop": (None, [], ""), "stream": (None, False),
    "stream_options": (None, {}, {"include_usage": None, "continuous_usage_stats": False}),
    "temperature": (None, 1, 1.0), "top_p": (None, 1), "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0.0), "suffix": (None, ""), "echo": (None, False),
    "use_beam_search": (None, False), "length_penalty": (None, 1, 1.0),
    "early_stopping": (None, False), "top_k": (None, 0), "min_p": (None, 0),
    "repetition_penalty": (None, 1), "stop_token_ids": (None, []), "bad_words": (None, []),
    "allowed_token_ids": (None,), "ignore_eos": (None, False), "min_tokens": (None, 0),
    "include_stop_str_in_output": (None, False), "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True, False), "truncate_prompt_tokens": (None,),
    "prompt_logprobs": (None,), "add_special_tokens": (None,), "guided_json": (None, {}),
    "guided_regex": (None,), "guided_choice": (None,), "guided_grammar": (None,),
    "structured_outputs": (None, {}), "priority": (None, 0), "request_id": (None, "x"),
    "cache_salt": (None,), "add_generation_prompt": (None, True), "documents": (None, []),
    "continue_final_message": (None, False), "chat_template": (None,),
    "chat_template_kwargs": (None, {}), "mm_processor_kwargs": (None, {}),
    "return_tokens_as_token_ids": (None, False), "return_token_ids": (None, False),
    "speculative": (None, True), "return_spec_details": (None, False),
    "kv_transfer_params": (None,), "vllm_xargs": (None, {}), "logits_processors": (None, []),
    "include_reasoning": (None, True),
    "thinking_token_budget": (None, -1), "watermarking": (None, False),
}  # fmt: skip
# What they say where something is asked for that is not done here.
MORE = {
    "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required",
    "functions": [{"name": "f"}], "function_call": {"name": "f"},
    "response_format": {"type": "json_object"}, "audio": {"voice": "ash", "format": "wav"},
    "modalities": ["text", "audio"], "prediction": {"type": "content", "content": "a"},
    "store": True, "service_tier": "flex", "reasoning_effort": "high", "verbosity": "low",
    "web_search_options": {}, "best_of": 2, "use_beam_search": True, "length_penalty": 0.5,
    "skip_special_tokens": False, "truncate_prompt_tokens": 5, "guided_json": {"type": "object"},
    "guided_choice": ["a", "b"], "guided_regex": "a+", "priority": 1, "cache_salt": "s",
    "documents": [{"text": "a"}], "continue_final_message": True, "chat_template": "{{ 1 }}",
    "logits_processors": ["x.Y"], "structured_outputs": {"json": {}}, "early_stopping": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def one_server(thin_policy):
    """Of two settings that differ from the default."""
    cfg = config(thin_policy, allowed_origins=["https://a.example"], allow_credentials=True)
    cfg.allowed_methods, cfg.allowed_headers = ["POST"], ["authorization"]
    with served(cfg, load_llm(cfg)) as running:
        yield running


def refusal(answer, status=400):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def kind_of(path):
    return ChatRequest if "chat" in path else CompletionRequest


@pytest.mark.parametrize("path", PATHS)
def test_a_field_that_asks_for_nothing_is_as_good_as_left_out(path):
    kind, body = kind_of(path), PATHS[path]
    for name, values in NOTHING.items():
        for value in values:
            read = kind.model_validate(body | {name: value})
            read.require_supported()
            assert read.params(6, 0) == kind.model_validate(body).params(6, 0), (name, value)


@pytest.mark.parametrize("path", PATHS)
def test_every_field_may_be_null_and_takes_what_its_table_lists(path):
    kind, body = kind_of(path), PATHS[path]
    for name, field in kind.model_fields.items():
        if not field.is_required():
            assert kind.model_validate(body | {name: None}) == kind.model_validate(
                {key: value for key, value in body.items() if key != name}
            )
    table = protocol.UNSUPPORTED_SAMPLING | (
        protocol.UNSUPPORTED_CHAT if kind is ChatRequest else protocol.UNSUPPORTED_COMPLETION
    )
    for name, entry in table.items():
        for value in entry.accepted:
            kind.model_validate(body | {name: value})
        for more in ("§", 7, True, {"a": 1}, ["§"]):
            if not any(protocol._same(more, value) for value in entry.accepted):
                with pytest.raises(pydantic.ValidationError, match=name):
                    kind.model_validate(body | {name: more})


@pytest.mark.parametrize("path", PATHS)
def test_one_request_may_say_all_of_them(server: Server, path):
    plainly = server.post(path, json=PATHS[path]).json()["choices"]
    for at in range(3):
        said = {name: values[at % len(values)] for name, values in NOTHING.items()}
        answer = server.post(path, json=said | PATHS[path])
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plainly


@pytest.mark.parametrize("name", MORE)
def test_a_field_that_asks_for_more_is_refused_by_name(server: Server, name):
    for path, body in PATHS.items():
        error = refusal(server.post(path, json=body | {name: MORE[name]}))
        assert error["param"] == name and error["message"].startswith(f"{name}: expected null")
        assert "got" in error["message"]


def test_an_option_of_streams_that_is_not_there_is_refused_by_name(server: Server):
    asked = TEXT | {"stream": True, "stream_options": {"include_obfuscation": True}}
    error = refusal(server.post("/v1/completions", json=asked))
    assert "stream_options.include_obfuscation: expected null or false" in error["message"]
    asked["stream_options"] = {"include_obfuscation": False, "include_usage": True}
    assert server.post("/v1/completions", json=asked).status_code == 200


def test_usage_may_come_with_every_piece_of_a_stream(server: Server):
    asked = {**TEXT, "ignore_eos": True, "max_tokens": 20}
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = server.client().completions.create(
        **{k: v for k, v in asked.items() if k != "ignore_eos"}, stream=True,
        stream_options=options, extra_body={"ignore_eos": True},
    )  # fmt: skip
    written = [event.usage.completion_tokens for event in found]
    assert written[-1] == 20 and written == sorted(written) and len(set(written)) > 1


# --- messages -------------------------------------------------------------------------------------

ROLES = ("system", "developer", "user", "assistant", "tool")
ECHOED = {
    "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None,
    "reasoning_content": None, "name": None,
}  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
def test_every_role_takes_text_and_parts_and_what_was_echoed(server: Server, role):
    def answer(message):
        asked = {**ASKED, "messages": [{"role": role, **message}, CHAT["messages"][0]]}
        found = server.post("/v1/chat/completions", json=asked)
        assert found.status_code == 200, found.text
        return found.json()["choices"]

    bare = answer({"content": "1+1="})
    assert bare == answer({"content": [{"type": "text", "text": "1+1="}]})
    assert bare == answer({"content": [{"type": "text", "text": t} for t in ("1+", "1=")]})
    assert bare == answer({"content": "1+1=", **ECHOED})
    assert bare == answer({"content": "1+1=", "tool_calls": [], "annotations": None})
    assert answer({"content": None}) == answer({"content": ""}) == answer({"content": []})


def test_the_client_sends_its_own_replies_back_as_history(server: Server):
    client = server.client()
    first = client.chat.completions.create(**CHAT)
    reply = first.choices[0].message
    history = [
        [*CHAT["messages"], said, {"role": "user", "content": "9+9="}]
        for said in (
            {"role": "assistant", "content": reply.content},
            reply,
            reply.model_dump(),
            reply.to_dict(),
            json.loads(reply.model_dump_json()),
        )
    ]
    answers = [
        client.chat.completions.create(**ASKED, messages=messages).choices[0].message.content
        for messages in history
    ]
    assert len(set(answers)) == 1
    text = client.completions.create(**TEXT).choices[0].text
    assert client.completions.create(**ASKED, prompt=PROMPT + text).usage.prompt_tokens > 8


MISTAKES = {
    "stop": (TEXT | {"stop": 5}, "stop: expected a string or a list, got 5"),
    "prompt": (TEXT | {"prompt": {"a": 1}}, 'prompt: expected a string or a list, got {"a": 1}'),
    "one of several prompts": (TEXT | {"prompt": ["a", 5]}, "prompt.1: expected a string, got 5"),
    "a token": (TEXT | {"prompt": [[5], ["x"]]}, 'prompt.1.0: expected an integer, got "x"'),
    "speculative": (TEXT | {"speculative": 5}, "expected true or false or a string, got 5"),
    "stream_options": (TEXT | {"stream_options": 5}, "stream_options: expected an object, got 5"),
    "a flag": (TEXT | {"ignore_eos": "yes"}, 'ignore_eos: expected true or false, got "yes"'),
    "a picture": (
        CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content.0.type: it should be 'text', got \"image_url\"",
    ),
    "a number for content": (
        CHAT | {"messages": [{"role": "user", "content": 5}]},
        "messages.0.content: expected a string or a list, got 5",
    ),
    "text in a list": (
        CHAT | {"messages": [{"role": "user", "content": ["hi"]}]},
        'messages.0.content.0: expected an object, got "hi"',
    ),
    "a call of a tool": (
        CHAT | {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
        "messages.0.tool_calls: expected null or [], got",
    ),
    "an unknown field": (TEXT | {"temprature": 1}, "temprature: there is no such field here"),
    "an unknown field of a message": (
        CHAT | {"messages": [{"role": "user", "content": "a", "strange": 1}]},
        "messages.0.strange: there is no such field here, got 1",
    ),
    "nothing": ({}, "is required, and missing"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_explain_with_what_is_accepted_and_what_was_got(what):
    body, expected = MISTAKES[what]
    kind = ChatRequest if "messages" in body else CompletionRequest
    with pytest.raises(pydantic.ValidationError) as caught:
        kind.model_validate(body)
    where, message = _explain(caught.value.errors())
    assert expected in f"{'.'.join(where)}: {message}"


# --- headers --------------------------------------------------------------------------------------


def test_the_word_before_a_key_is_written_in_any_case(server: Server):
    for word in ("Bearer", "bearer", "BEARER", "bEaReR "):
        headers = {"Authorization": f"{word} {KEY}"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
    for wrong in (f"Basic {KEY}", "bearer", "bearer other", f"bearer{KEY}"):
        answer = httpx.get(f"{server.url}/v1/models", headers={"Authorization": wrong})
        assert refusal(answer, 401)["code"] == "invalid_api_key"
    asleep = httpx.post(f"{server.url}/wake", headers={"Authorization": f"bearer {ADMIN}"})
    assert asleep.status_code == 200


def preflight(server, origin, method="POST", headers="authorization,content-type"):
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": headers,
    }
    return httpx.options(f"{server.url}/v1/chat/completions", headers=asked)


def test_browsers_may_ask_from_anywhere_by_default(server: Server):
    for origin in ("https://a.example", "http://localhost:3000", "null"):
        answer = preflight(server, origin)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert "POST" in answer.headers["access-control-allow-methods"]
    headers = {"Origin": "https://a.example", "Authorization": f"Bearer {KEY}"}
    answer = httpx.get(f"{server.url}/v1/models", headers=headers)
    assert answer.headers["access-control-allow-origin"] == "*"
    refused = httpx.get(f"{server.url}/v1/models", headers={"Origin": "https://a.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "*"


def test_origins_methods_and_headers_of_browsers_are_settings(one_server: Server):
    fits = preflight(one_server, "https://a.example", headers="authorization")
    assert fits.status_code == 200
    assert fits.headers["access-control-allow-origin"] == "https://a.example"
    assert fits.headers["access-control-allow-credentials"] == "true"
    for other in (
        preflight(one_server, "https://b.example", headers="authorization"),
        preflight(one_server, "https://a.example", "DELETE", "authorization"),
        preflight(one_server, "https://a.example", headers="x-mine"),
    ):
        assert other.status_code == 400 and "Disallowed CORS" in other.text


# --- vLLM's other paths ---------------------------------------------------------------------------


def test_load_balancers_ask_without_a_key(server: Server):
    for path in ("/health", "/ping", "/version"):
        assert httpx.get(server.url + path).status_code == 200
    assert httpx.post(f"{server.url}/ping").json()["status"] == "ok"
    assert httpx.get(f"{server.url}/version").json()["version"]


@pytest.mark.parametrize("text", ["17+25+8=", "", "§ <|eos|> 1"])
def test_tokens_of_a_text_and_back(server: Server, text):
    tokenizer = server.llm.tokenizer
    found = server.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    ids = tokenizer.encode(text)
    assert found["tokens"] == ids and found["count"] == len(ids)
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert found["max_model_len"] == server.llm.max_len
    bare = server.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert bare["tokens"] == tokenizer.encode(text, add_special_tokens=False)
    back = server.post("/detokenize", json={"model": "tiny", "tokens": bare["tokens"]}).json()
    assert back == {"prompt": text}


def test_tokens_of_messages_are_those_of_a_chat(server: Server):
    found = server.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    answer = server.client().chat.completions.create(**CHAT)
    assert found["count"] == answer.usage.prompt_tokens
    assert found["tokens"] == server.llm.tokenizer.encode(f"user: {PROMPT}\n")
    for wrong in ({}, {"prompt": "1", "messages": CHAT["messages"]}):
        assert (
            "either prompt or messages" in refusal(server.post("/tokenize", json=wrong))["message"]
        )
    assert refusal(server.post("/detokenize", json={"tokens": [9999]}))["param"] == "tokens"
    TokenizeRequest.model_validate({"prompt": "1", "tools": [], "chat_template": None})


def test_a_client_learns_the_special_tokens(server: Server):
    found, tokenizer = server.get("/tokenizer_info").json(), server.llm.tokenizer
    assert found["eos_token"] == tokenizer.eos_token and found["bos_token"] == tokenizer.bos_token
    assert found["chat_template"] == tokenizer.chat_template


def test_special_tokens_may_be_left_out(server: Server):
    with pytest.raises(openai.BadRequestError):
        server.client().completions.create(**TEXT, extra_body={"add_special_tokens": "no"})
    bare = server.llm.tokenizer.encode(PROMPT, add_special_tokens=False)
    answer = server.client().completions.create(**TEXT, extra_body={"add_special_tokens": False})
    assert answer.usage.prompt_tokens == len(bare)
