"""Fields that ask for nothing, replies as history, and what browsers and load balancers ask."""

import json

import pytest
from serving import Server

from serve import protocol
from serve.protocol import ChatRequest, CompletionRequest, TokenizeRequest

PROMPT = "17+25+8="
ASKED = {"model": "tiny", "max_tokens": 6, "seed": 4}
TEXT = {**ASKED, "prompt": PROMPT}
CHAT = {**ASKED, "messages": [{"role": "user", "content": PROMPT}]}
PATHS = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT}

# Values of the fields that are implemented by which nothing is asked for.
DEFAULTS = {
    "metadata": ({}, {"run": "7"}), "user": ("", "me"), "parallel_tool_calls": (True, False),
    "safety_identifier": ("a",), "prompt_cache_key": ("b",), "request_id": ("x",),
    "logit_bias": ({},), "n": (1,), "best_of": (1,), "stop": ([], ""), "stream": (False,),
    "stream_options": ({}, {"include_usage": None, "continuous_usage_stats": False}),
    "temperature": (1, 1.0), "top_p": (1,), "top_k": (0,), "min_p": (0,),
    "presence_penalty": (0,), "frequency_penalty": (0.0,), "repetition_penalty": (1,),
    "stop_token_ids": ([],), "bad_words": ([],), "ignore_eos": (False,), "min_tokens": (0,),
    "include_stop_str_in_output": (False,), "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,), "speculative": (True,), "return_spec_details": (False,),
}  # fmt: skip
# Values that ask for what is not implemented.
MORE = {
    "best_of": 2, "response_format": {"type": "json_object"}, "truncate_prompt_tokens": 5,
}  # fmt: skip


def refusal(answer, status=400):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def kind_of(path):
    return ChatRequest if "chat" in path else CompletionRequest


def unsupported(kind):
    only = protocol.UNSUPPORTED_CHAT if kind is ChatRequest else protocol.UNSUPPORTED_COMPLETION
    return protocol.UNSUPPORTED_SAMPLING | only


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_one_request_may_say_all_of_them(server: Server, path):
    plainly = server.post(path, json=PATHS[path]).json()["choices"]
    accepted = {name: entry.accepted for name, entry in unsupported(kind_of(path)).items()}
    values = {name: (None, *found) for name, found in (accepted | DEFAULTS).items()}
    for at in range(3):
        said = {name: found[at % len(found)] for name, found in values.items()}
        answer = server.post(path, json=said | PATHS[path])
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plainly


@pytest.mark.parametrize("name", MORE)
def test_a_field_that_asks_for_more_is_refused_by_name(server: Server, name):
    for path, body in PATHS.items():
        error = refusal(server.post(path, json=body | {name: MORE[name]}))
        assert error["param"] == name and error["message"].startswith(f"{name}: expected null")
        assert "got" in error["message"]


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


# --- headers --------------------------------------------------------------------------------------


# --- vLLM's other paths ---------------------------------------------------------------------------


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


def test_tools_are_described_and_a_last_message_is_continued(server: Server):
    tokenizer, tools = server.llm.tokenizer, [{"type": "function", "function": {"name": "f"}}]
    told = {"tools": tools, "tool_choice": "none"}
    begun = {"continue_final_message": True, "add_generation_prompt": False}
    for asked, text in [(told, f"tool: f\nuser: {PROMPT}\n"), (begun, f"user: {PROMPT}")]:
        body = {**CHAT, **asked, "return_token_ids": True}
        ids = tokenizer.encode(text)
        answer = server.post("/v1/chat/completions", json=body).json()
        assert answer.get("choices", [answer])[0].get("prompt_token_ids") == ids, answer
        counted = {name: value for name, value in asked.items() if name != "tool_choice"}
        body = {"messages": CHAT["messages"], **counted}
        assert server.post("/tokenize", json=body).json()["tokens"] == ids
    for wrong, name in [
        ({"tools": tools}, "tools"),
        ({"tools": tools, "tool_choice": "auto"}, "tools"),
        ({**told, "tool_choice": "required"}, "tool_choice"),
        ({"continue_final_message": True}, "continue_final_message"),
    ]:
        answer = server.post("/v1/chat/completions", json={**CHAT, **wrong})
        assert refusal(answer)["param"] == name
