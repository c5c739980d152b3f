"""Calls of tools and reasoning: in whole answers, in streams, in agents' loops, and malformed."""

import asyncio
import json
import random
import resource

import openai
import pytest
import scripted_policy
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import config, served

from serve.settings import load_llm
from specjax.tool_calls import Call, Delta, named_in, parser_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
    for name in ("add", "multiply")
]
FUNCTIONS = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}


def call(name, **arguments) -> str:
    value = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{value}\n</tool_call>"


# --- the formats ----------------------------------------------------------------------------------

XML = "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>"
CHANNELS = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'
)
F = Call("f", '{"x": 1}')
TWICE = '{"name": "f", "parameters": {"x": 1}}; {"name": "f", "parameters": {"x": 1}}'
F1, Y = call("f", x=1), Call("f", '{"x": "y"}')
READ = {
    "two calls and text": ("hermes", None, f"So \n{F1}\n{F1}\n", Delta("So", "", (F, F))),
    "no last tag": ("hermes", None, F1[:-12], Delta("", "", (F,))),
    "XML": ("qwen3_coder", None, XML.format(1), Delta("", "", (F,))),
    "an unknown key": ("llama3_json", None, '{"name": "Al"}', Delta('{"name": "Al"}')),
    "half a pair": ("hermes", None, call("f", x="\ud800"), Delta(call("f", x="\ud800"))),
    "a header alone": ("openai", None, "<|channel|>final Yes", Delta("Yes")),
    "a header that is cut off": ("openai", None, "<|channel|>analysis", Delta()),
    "no number of JSON": (
        "hermes",
        None,
        call("f", x=float("nan")),
        Delta(call("f", x=float("nan"))),
    ),
    "XML, another type": ("qwen3_coder", None, XML.format("y"), Delta("", "", (Y,))),
    "JSON alone": ("llama3_json", None, f"<|python_tag|>{TWICE}", Delta("", "", (F, F))),
    "channels": ("openai", None, CHANNELS, Delta("", "Hm.", (F,))),
    "final channel": ("openai", None, "<|channel|>final<|message|>Yes <b>.", Delta("Yes <b>.")),
    "reasoning": ("hermes", "qwen3", f"<think>\nHm.</think>\n\n{F1}", Delta("", "Hm.", (F,))),
    "opened by the prompt": (None, "deepseek_r1", "Hm.</think>\n\nYes.", Delta("Yes.", "Hm.")),
    "reasoning without end": (None, "qwen3", "<think>Hm.", Delta("", "Hm.")),
}
OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
TYPED = [{"function": {"name": "f", "parameters": {"properties": {"x": OPTIONAL}}}}]


def parsed(calls, reasoning, pieces) -> Delta:
    parser, delta = parser_of(calls, reasoning, TYPED, ""), Delta()
    for piece in pieces:
        delta += parser.push(piece)
    return delta + parser.finish()


@pytest.mark.parametrize("name", READ)
def test_calls_and_reasoning_are_read_in_pieces_of_any_length(name):
    calls, reasoning, text, expected = READ[name]
    for size in (1, 2, 7, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert parsed(calls, reasoning, pieces) == expected, size


WORDS = [
    *("<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": {"x": 1}}', "<function=f>"),
    *("</function>", "<parameter=x>", "</parameter>", "\n", " ", "{", "}", "[" * 2000, "text", "<"),
    *('"', "<|channel|>", "<|message|>", "analysis", "<|call|>", " to=functions.f", "; ", "null"),
    *("<|python_tag|>", "<think>", "</think>"),
]
FORMATS = st.sampled_from(["hermes", "qwen3_coder", "llama3_json", "openai"])
THINKING = st.sampled_from([None, "qwen3"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=12), st.randoms(), FORMATS, THINKING)
def test_malformed_calls_stay_text_however_they_are_cut(
    words, rng: random.Random, calls, reasoning
):
    text = "".join(words)
    whole = parsed(calls, reasoning, [text])
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(4))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(calls, reasoning, pieces) == whole
    for one in whole.calls:
        assert isinstance(json.loads(one.arguments), dict)
    if calls != "openai" and reasoning is None and not whole.calls:
        assert whole.content == text


@pytest.mark.parametrize(
    "parameters",
    [{"properties": ["x"]}, {"properties": {"x": True}}, {"properties": {"x": {"type": 5}}}],
)
def test_odd_schemas_of_tools_leave_values_text(parameters):
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    delta = parser_of("qwen3_coder", None, tools, "").push(XML.format(1))
    assert delta.calls == (Call("f", '{"x": "1"}'),)


def test_the_chat_template_says_which_format_it_is():
    assert named_in(scripted_policy.TEMPLATE) == "hermes" and named_in("{{ messages }}") is None


# --- a loop against a server ----------------------------------------------------------------------

TURNS = {
    1: f"I add twice.\n{call('add', a=17, b=25)}\n{call('add', a=1, b=3)}",
    4: call("multiply", a=42, b=4),
    6: "The product is 168.",
    8: call("add", a=168, b=9),
    10: "It is 177 now.",
}
QUESTIONS = ["What is (17 + 25) times (1 + 3)?", "And 9 more?"]


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """A server whose policy makes the calls of `TURNS`."""
    path = scripted_policy.write(tmp_path_factory.mktemp("scripted") / "policy", TURNS)
    engine = {"max_len": 2048, "prefill_chunk": 128}
    cfg = config(path, chat_template=None, engine=engine, speculation={"strategy": "off"})
    cfg.limits.queue = 256
    with served(cfg, load_llm(cfg)) as server:
        yield server


def history(count: int) -> list[dict]:
    """The first messages of the conversation, which the policy answers by `TURNS[count]`."""
    answers = iter(["42", "4", "168", "177"])
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    for text in TURNS.values():
        delta = parser_of("hermes", None, (), "").push(text)
        calls = [
            {"id": f"call_{i}", "type": "function", "function": one._asdict()}
            for i, one in enumerate(delta.calls)
        ]
        messages.append({"role": "assistant", "content": delta.content, "tool_calls": calls})
        for one in calls:
            answer = {"role": "tool", "tool_call_id": one["id"], "content": next(answers)}
            messages.append(answer)
        if not calls:
            messages.append({"role": "user", "content": QUESTIONS[1]})
    return messages[:count]


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_many_clients_with_tools_lose_nothing_and_leave_nothing_behind(agent, count):
    """64 at once; one in ten leaves in the middle, one in twenty sends what cannot be served."""
    client, gate = agent.client(openai.AsyncOpenAI), asyncio.Semaphore(64)
    asked = {"model": "tiny", "tools": TOOLS, "temperature": 0, "max_tokens": 100}

    async def one(number: int) -> str:
        rng = random.Random(number)
        turn, kind = rng.choice([*TURNS]), rng.random()
        async with gate:
            if kind < 0.05:
                wrong = rng.choice([{"tool_choice": "required"}, {"tools": [{}]}, {"n": -1}])
                with pytest.raises(openai.BadRequestError):
                    await client.chat.completions.create(messages=history(turn), **asked | wrong)
                return "refused"
            stream = kind < 0.5
            answer = await client.chat.completions.create(
                messages=history(turn), stream=stream, **asked
            )
            if not stream:
                message = answer.choices[0].message.model_dump(exclude_none=True)
            else:
                chunks = []
                async for chunk in answer:
                    chunks.append(chunk)
                    if kind < 0.15:
                        await answer.close()
                        return "left"
                message, _ = streamed(chunks)
        expected = parser_of("hermes", None, (), "").push(TURNS[turn])
        made = [Call(**c["function"]) for c in message.get("tool_calls", ())]
        assert ((message.get("content") or ""), tuple(made)) == (expected.content, expected.calls)
        return "right"

    async def crowd(numbers):
        return await asyncio.gather(*map(one, numbers))

    async def crowds():
        outcomes = await crowd(range(count // 2))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        outcomes += await crowd(range(count // 2, count))
        return outcomes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    outcomes, grown = asyncio.run(crowds())
    assert {"right", "left", "refused"} == {*outcomes} and len(outcomes) == count
    assert grown < 20_000, f"the process grew by {grown} kB"
    agent.settles(lambda m: m["num_requests_running"] == m["kv_cache_pages_used"] == 0)
    pool = agent.llm.engine.scheduler.pool
    assert pool.free == pool.count - 1 and agent.app.state.thread.outstanding == 0


def streamed(chunks) -> tuple[dict, str]:
    """The message that chunks amount to, and the reason of its end."""
    message, calls, reason = {"role": "assistant", "content": ""}, {}, None
    for chunk in chunks:
        [choice] = chunk.choices
        message["content"] += choice.delta.content or ""
        for piece in choice.delta.tool_calls or []:
            entry = calls.setdefault(
                piece.index, {"type": "function", "function": {"arguments": ""}}
            )
            if piece.id:
                entry["id"], entry["function"]["name"] = piece.id, piece.function.name
            entry["function"]["arguments"] += piece.function.arguments or ""
        reason = choice.finish_reason or reason
    return message | ({"tool_calls": list(calls.values())} if calls else {}), reason


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_tools_over_five_turns(agent, stream):
    client, messages, replies = agent.client(), [], []
    asked = {"model": "tiny", "tools": TOOLS, "temperature": 0, "stream": stream, "max_tokens": 100}
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            answer = client.chat.completions.create(messages=messages, **asked)
            if stream:
                message, reason = streamed(answer)
            else:
                [choice] = answer.choices
                message, reason = choice.message.model_dump(exclude_none=True), choice.finish_reason
            messages.append(message)
            replies.append((message.get("content"), reason))
            for one in message.get("tool_calls", ()):
                arguments = json.loads(one["function"]["arguments"])
                value = str(FUNCTIONS[one["function"]["name"]](**arguments))
                messages.append({"role": "tool", "tool_call_id": one["id"], "content": value})
            if reason != "tool_calls":
                break
    texts = [content or "" for content, _ in replies]
    assert texts == ["I add twice.", "", "The product is 168.", "", "It is 177 now."]
    assert [reason for _, reason in replies] == ["tool_calls", "tool_calls", "stop"] + [
        "tool_calls",
        "stop",
    ]
    assert [len(m["tool_calls"]) for m in messages if m.get("tool_calls")] == [2, 1, 1]
    assert [m["content"] for m in messages if m["role"] == "tool"] == ["42", "4", "168", "177"]
    assert agent.metrics()["prefix_cache_hits_total"] > 500


def test_one_call_at_most_and_none_where_the_request_says_so(agent):
    client, messages = agent.client(), [{"role": "user", "content": "Hi"}]
    asked = {"model": "tiny", "messages": messages, "tools": TOOLS, "temperature": 0}
    [choice] = client.chat.completions.create(**asked, parallel_tool_calls=False).choices
    assert len(choice.message.tool_calls) == 1
    [choice] = client.chat.completions.create(**asked, tool_choice="none").choices
    assert choice.message.tool_calls is None and choice.message.content == TURNS[1]
    for wrong in ("required", {"type": "function", "function": {"name": "add"}}):
        with pytest.raises(openai.BadRequestError, match="constrained decoding"):
            client.chat.completions.create(**asked, tool_choice=wrong)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_framework_runs_its_own_loop(agent, stream):
    agents = pytest.importorskip("agents", reason="the openai-agents package is not installed")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    @agents.function_tool
    def multiply(a: int, b: int) -> int:
        """Multiplies two numbers."""
        return a * b

    model = agents.OpenAIChatCompletionsModel("tiny", agent.client(openai.AsyncOpenAI))
    how = agents.ModelSettings(temperature=0, max_tokens=100)
    one = agents.Agent(name="one", model=model, tools=[add, multiply], model_settings=how)

    async def conversation():
        said, history = [], []
        for question in QUESTIONS:
            history.append({"role": "user", "content": question})
            if stream:
                result = agents.Runner.run_streamed(one, history)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(one, history)
            said.append(result.final_output)
            history = result.to_input_list()
        return said

    assert asyncio.run(conversation()) == ["The product is 168.", "It is 177 now."]
