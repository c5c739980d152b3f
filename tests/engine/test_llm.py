"""What `LLM` accepts, returns and counts, and that it compiles once."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from shared import compilations_of
from tiny import apt, prompts_of, tiny_config, tiny_model
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specjax import LLM, EngineConfig, SamplingParams, SpecConfig
from specjax.decode.noise import request_words
from specjax.engine import cache_budget
from specjax.models.transformer import graphdef

VOCAB, MAX_LEN, BATCH, EOS = 64, 64, 3, 7
PROMPT = [5, 9, 2]
CFG = tiny_config(VOCAB, eos_token_ids=(EOS,))


@functools.cache
def weights(seed=3):
    """Policy and head; seed 3 is the model of most tests, any other one a stranger to it."""
    _, params, head = tiny_model(CFG, seed)
    return params, apt(head, CFG) if seed == 3 else head


def make_llm(spec, **kwargs):
    return LLM((CFG, *weights()), spec, **{"max_batch": BATCH, "max_len": MAX_LEN, **kwargs})


@pytest.fixture(scope="module")
def spec_llm():
    return make_llm(SpecConfig(strategy="4x2"))


@pytest.fixture(scope="module")
def plain_llm():
    return make_llm(None)


@pytest.fixture(params=["speculative", "plain"])
def llm(request):
    """Both programs keep the same promises."""
    name = "spec_llm" if request.param == "speculative" else "plain_llm"
    return request.getfixturevalue(name)


def sample(llm, prompt=PROMPT, **params):
    return llm.generate([prompt], SamplingParams(**{"seed": 0, **params}))[0].samples[0]


# --- memory ---------------------------------------------------------------------------------------


PAGE = 2 * 2 * 8 * 4 * 128  # bytes of keys and values: two heads of 8 float32 numbers


@pytest.mark.parametrize(
    ("pages_of_memory", "cache_bytes", "max_len", "pages"),
    [
        (10_000, None, 16384, 2 + 4 * 128 + 9 * 16),
        (200, None, 16384, 200),
        (10_000, 40 * PAGE, 36 * 128, 40),
        (0, None, 2048, 2 + 16),
    ],
    ids=["ample", "fewer slots at full length", "by a setting", "little"],
)
def test_length_and_pages_follow_model_and_memory(
    monkeypatch, pages_of_memory, cache_bytes, max_len, pages
):
    memory = 16 * jax.local_device_count() * pages_of_memory * PAGE
    monkeypatch.setattr(cache_budget, "host_memory", lambda: memory)
    engine = EngineConfig(cache_bytes=cache_bytes)
    llm = LLM((CFG.replace(max_position=16384), weights()[0], None), None, 4, engine=engine)
    assert (llm.max_len, llm.engine.scheduler.pool.count) == (max_len, pages)
    assert any("cache_bytes" in note for note in llm.notes) == (max_len < 16384)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "params", "said"),
    [
        ([], {}, ["no prompts", "at least one"]),
        ([[]], {}, ["prompt 0", "empty"]),
        ([[1], []], {}, ["prompt 1", "empty"]),
        ([list(range(60))], {"max_tokens": 5}, ["60 tokens", "max_tokens is 5", "max_len 64"]),
        ([[1, VOCAB]], {}, ["token id 64", "0 <= id < 64"]),
        ([[-1]], {}, ["token id -1", "0 <= id < 64"]),
        (["hello"], {}, ["no tokenizer", "token ids"]),
        ([[1]], {"stop_token_ids": range(8, 16)}, ["9 stop tokens", "at most 8"]),
    ],
    ids=["none", "empty", "second", "long", "big id", "negative id", "text", "stops"],
)
def test_bad_input_is_one_clear_error_before_any_work(spec_llm, monkeypatch, prompts, params, said):
    monkeypatch.setattr(spec_llm, "_run", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError) as error:
        spec_llm.generate(prompts, SamplingParams(**{"max_tokens": 5, **params}))
    for words in said:
        assert words in str(error.value)


FORMS = "expected text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
ONE_KEY = "expected a dict with one key, {'prompt': text} or {'prompt_token_ids': ids}"


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (None, [FORMS, "got None (NoneType)"]),
        (b"hi", [FORMS, "got b'hi' (bytes)"]),
        ({1, 2}, [FORMS, "got {1, 2} (set)"]),
        (7, [FORMS, "got 7 (int)"]),
        (2.5, [FORMS, "got 2.5 (float)"]),
        ([[1], None], ["prompt 1: " + FORMS, "got None"]),
        ([[1], frozenset({1})], ["prompt 1: " + FORMS, "(frozenset)"]),
        (["a", bytearray(b"x")], ["prompt 1: " + FORMS, "(bytearray)"]),
        ([True, False], ["prompt 0 holds True", "token ids, which are integers"]),
        ([[1], [2, False]], ["prompt 1 holds False"]),
        ({"prompt_token_ids": [True]}, ["prompt 0 holds True"]),
        (np.array([1.0, 2.0]), ["prompt 0 holds 1.0"]),
        ([1, [2]], ["prompt 0 holds [2]"]),
        ({"text": "hi"}, ["the prompt: " + ONE_KEY, "got {'text': 'hi'} (dict)"]),
        ({"prompt": 3}, [ONE_KEY]),
        ({"prompt_token_ids": "ab"}, [ONE_KEY]),
        ({}, [ONE_KEY]),
        ([[1], {"prompt": "a", "prompt_token_ids": [1]}], ["prompt 1: " + ONE_KEY]),
        ([{"role": "user", "content": "hi"}], ["prompt 0: " + ONE_KEY, "use LLM.chat"]),
    ],
)
@pytest.mark.parametrize("door", ["generate", "compare_with_plain"])
def test_what_is_no_prompt_is_refused_on_one_line(spec_llm, monkeypatch, door, prompts, said):
    monkeypatch.setattr(spec_llm, "_run", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError) as error:
        getattr(spec_llm, door)(prompts, SamplingParams(max_tokens=2))
    assert all(words in str(error.value) for words in said), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("params", [{"temperature": 0}, 3, "greedy", [{"n": 2}], b"x"])
def test_what_are_no_sampling_params_is_refused(spec_llm, params):
    with pytest.raises(ValueError, match=r"params: expected SamplingParams.*write SamplingParams"):
        spec_llm.generate([[1]], params)


@pytest.mark.parametrize(
    "messages",
    ["hi", {"role": "user", "content": "hi"}, [{"role": "user"}], [{"content": "hi"}], None, [],
     [["hi"]], [[]], [{"role": "user", "content": 3}], [{"role": "user", "content": None}], 5],
)  # fmt: skip
def test_what_are_no_messages_is_refused_with_what_messages_are(plain_llm, monkeypatch, messages):
    monkeypatch.setattr(plain_llm, "tokenizer", Chatty())
    with pytest.raises(ValueError) as error:
        plain_llm.chat(messages, SamplingParams(max_tokens=1))
    said = str(error.value)
    assert said.startswith("messages are a list of {'role': 'user', 'content': text}")
    assert "got " in said and "\n" not in said


def test_prompts_are_taken_in_vllms_forms_and_params_by_vllms_name(plain_llm):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    forms = [
        [5, 9], (5, 9), np.array([5, 9]), jnp.array([5, 9]), {"prompt_token_ids": [5, 9]},
        {"prompt_token_ids": np.array([5, 9])},
    ]  # fmt: skip
    outs = [plain_llm.generate(form, sampling_params=params) for form in forms]
    outs += [[out] for out in plain_llm.generate(forms, params)]
    assert all(len(out) == 1 and out[0].prompt_token_ids == [5, 9] for out in outs)
    assert len({tuple(out[0].samples[0].token_ids) for out in outs}) == 1
    assert plain_llm.compare_with_plain({"prompt_token_ids": [5, 9]}, params) == []
    with pytest.raises(ValueError, match="two names of one argument"):
        plain_llm.generate([5], params, sampling_params=params)


def test_the_number_of_params_must_be_one_or_that_of_the_prompts(spec_llm):
    with pytest.raises(ValueError, match="got 2 SamplingParams for 3 prompts"):
        spec_llm.generate([[1], [2], [3]], [SamplingParams()] * 2)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"temperature": -0.1}, "temperature must be .* got -0.1"),
        ({"temperature": float("nan")}, "temperature must be .* got nan"),
        ({"temperature": float("inf")}, "temperature must be .* got inf"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"n": 0}, "n must be at least 1, got 0"),
    ],
)
def test_sampling_params_refuse_what_cannot_be_sampled(params, said):
    with pytest.raises(ValueError, match=said):
        SamplingParams(**params)


def test_a_batch_of_no_slots_is_refused():
    with pytest.raises(ValueError, match="max_batch must be at least 1, got 0"):
        make_llm(None, max_batch=0)


# --- where a sample ends --------------------------------------------------------------------------


def test_max_tokens_is_met_exactly_wherever_in_a_path_it_falls(llm):
    full = sample(llm, max_tokens=24, ignore_eos=True).token_ids
    assert len(full) == 24
    cut = [SamplingParams(seed=0, max_tokens=n, ignore_eos=True) for n in range(1, 13)]
    for n, out in enumerate((llm.generate([PROMPT], p)[0] for p in cut), start=1):
        assert out.samples[0].token_ids == full[:n]
        assert out.samples[0].finish_reason == "length"


def test_a_sample_ends_with_its_stop_token_wherever_in_a_path_it_falls(llm):
    full = sample(llm, max_tokens=24, ignore_eos=True).token_ids
    firsts = list(dict.fromkeys(full))  # the first occurrence of each token
    stops = [
        SamplingParams(seed=0, max_tokens=24, stop_token_ids=(t,), ignore_eos=True) for t in firsts
    ]
    for token, params in zip(firsts, stops, strict=True):
        got = llm.generate([PROMPT], params)[0].samples[0]
        assert got.token_ids == full[: full.index(token) + 1]
        assert got.finish_reason == "stop"
        assert len(got.logprobs) == len(got.token_ids)


def test_the_models_eos_ends_a_sample_unless_it_is_ignored(llm):
    ended = llm.generate(prompts_of(12, VOCAB), SamplingParams(seed=0, max_tokens=40))
    ignored = llm.generate(
        prompts_of(12, VOCAB), SamplingParams(seed=0, max_tokens=40, ignore_eos=True)
    )
    stopped = 0
    for a, b in zip(ended, ignored, strict=True):
        a, b = a.samples[0], b.samples[0]
        assert len(b.token_ids) == 40 and b.finish_reason == "length"
        if EOS in b.token_ids:
            stopped += 1
            assert a.token_ids == b.token_ids[: b.token_ids.index(EOS) + 1]
            assert a.finish_reason == "stop"
        else:
            assert a.token_ids == b.token_ids
    assert stopped >= 2


# --- seeds ----------------------------------------------------------------------------------------


def test_a_request_gives_the_same_tokens_alone_and_in_a_crowd(llm):
    crowd = prompts_of(10, VOCAB, seed=1)
    params = [SamplingParams(max_tokens=10 + i, seed=i, n=1 + i % 2) for i in range(10)]
    together = llm.generate(crowd, params)
    assert [len(out.samples) for out in together] == [p.n for p in params]
    for i in (0, 5, 9):
        alone = llm.generate([crowd[i]], params[i])[0]
        assert alone.prompt_token_ids == together[i].prompt_token_ids == crowd[i]
        tokens = [s.token_ids for s in together[i].samples]
        assert [s.token_ids for s in alone.samples] == tokens


def test_seeds_and_samples_have_noise_of_their_own_and_greedy_has_none(llm):
    def tokens(**params):
        usual = {"seed": 0, "max_tokens": 12, "ignore_eos": True}
        out = llm.generate([PROMPT], SamplingParams(**{**usual, **params}))
        return [tuple(s.token_ids) for s in out[0].samples]

    assert tokens(seed=1, n=3) == tokens(seed=1, n=3)
    assert tokens(seed=1, n=4)[:3] == tokens(seed=1, n=3)
    assert len({*tokens(seed=1, n=4), *tokens(seed=2, n=4)}) == 8
    assert len(set(tokens(seed=1, n=3, temperature=0.0))) == 1
    assert tokens(seed=1, temperature=0.0) == tokens(seed=2, temperature=0.0)


# --- what comes out -------------------------------------------------------------------------------


def independent_logprobs(params, prompt, tokens, temperature):
    """Log-softmax of one full forward pass over prompt and tokens, in float64."""
    sequence = np.zeros((1, MAX_LEN), np.int32)
    sequence[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]
    logits = full_forward(params, sequence)[0, len(prompt) - 1 :][: len(tokens)]
    scores = np.asarray(logits, np.float64) / (temperature or 1.0)
    scores -= scores.max(-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    return scores[np.arange(len(tokens)), tokens]


@jax.jit
def full_forward(params, tokens):
    model = nnx.merge(graphdef(CFG), params)
    positions = jnp.arange(MAX_LEN)[None]
    return model.logits(model.hidden(tokens, positions, jnp.ones_like(positions)).x)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_the_targets_by_an_independent_forward_pass(llm, temperature):
    params = SamplingParams(seed=0, max_tokens=20, temperature=temperature, n=2)
    for out in llm.generate(prompts_of(4, VOCAB), params):
        for s in out.samples:
            expected = independent_logprobs(
                weights()[0], out.prompt_token_ids, s.token_ids, temperature
            )
            np.testing.assert_allclose(s.logprobs, expected, atol=2e-4)


def test_stats_count_rounds_drafts_and_accepted_tokens(spec_llm, plain_llm):
    outs = spec_llm.generate(prompts_of(7, VOCAB), SamplingParams(seed=0, max_tokens=30, n=2))
    rows, steps = 1 + 4 + 8, 2
    samples = [s for out in outs for s in out.samples]
    for s in samples:
        stats, tokens = s.stats, len(s.token_ids)
        assert len(stats.histogram) == steps + 2
        assert sum(stats.histogram) == stats.rounds >= tokens / (steps + 1)
        assert sum(n * count for n, count in enumerate(stats.histogram)) == tokens
        assert stats.drafted == stats.rounds * (rows - 1)
        assert stats.accepted == tokens - stats.rounds
        assert stats.accept_length == pytest.approx(tokens / stats.rounds)
    totals = spec_llm.totals
    assert totals.tokens == sum(len(s.token_ids) for s in samples)
    assert totals.longest == max(len(s.token_ids) for s in samples)
    assert totals.rounds == sum(s.stats.rounds for s in samples)
    assert totals.accepted == sum(s.stats.accepted for s in samples)
    assert totals.accept_length == pytest.approx(totals.tokens / totals.rounds)
    assert totals.accept_rate == pytest.approx((totals.accept_length - 1) / steps)
    depths = totals.per_depth()
    assert sum(depths) == pytest.approx(totals.accept_length - 1)
    assert all(a >= b for a, b in itertools.pairwise(depths)) and depths[-1] > 0

    plain = sample(plain_llm, max_tokens=9, ignore_eos=True).stats
    assert (plain.rounds, plain.drafted, plain.accepted, plain.accept_length) == (9, 0, 0, 1.0)


def test_outputs_come_in_the_order_of_the_prompts_however_long_each_takes(llm):
    prompts = prompts_of(11, VOCAB, seed=5)
    params = [
        SamplingParams(seed=0, max_tokens=1 + (7 * i) % 20, ignore_eos=True) for i in range(11)
    ]
    outs = llm.generate(prompts, params)
    assert [o.prompt_token_ids for o in outs] == prompts
    assert [len(o.samples[0].token_ids) for o in outs] == [p.max_tokens for p in params]


def test_one_prompt_may_be_given_bare_and_text_is_encoded_and_decoded(plain_llm, monkeypatch):
    tokenizer = SimpleNamespace(
        encode=lambda text: [ord(c) - ord("a") for c in text],
        decode=lambda ids, skip_special_tokens: "".join(chr(ord("a") + i) for i in ids),
    )
    params = SamplingParams(seed=0, max_tokens=5, ignore_eos=True)
    by_ids = plain_llm.generate([2, 0, 1], params)[0]
    assert by_ids.samples[0].text is None
    monkeypatch.setattr(plain_llm, "tokenizer", tokenizer)
    by_text = plain_llm.generate("cab", params)[0]
    assert plain_llm.generate({"prompt": "cab"}, params)[0].prompt_token_ids == [2, 0, 1]
    assert by_text.prompt_token_ids == [2, 0, 1]
    assert by_text.samples[0].token_ids == by_ids.samples[0].token_ids
    assert by_text.samples[0].text == tokenizer.decode(by_ids.samples[0].token_ids, True)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        plain_llm.generate(["a", ""], params)


class Chatty:
    """A tokenizer of letters whose template writes `b` before a conversation and `z` after it."""

    chat_template = "a template"

    def apply_chat_template(self, conversation, tokenize, add_generation_prompt):
        assert not tokenize
        said = "".join(m["role"][0] + m["content"] for m in conversation)
        return "b" + said + ("z" if add_generation_prompt else "")

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(c) - ord("a") for c in text]

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(ord("a") + i) for i in ids)


def test_chat_makes_a_prompt_of_the_conversation_by_the_tokenizers_template(plain_llm, monkeypatch):
    greeting = [{"role": "user", "content": "hi"}]
    longer = [*greeting, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "ok"}]
    params = SamplingParams(seed=0, max_tokens=4, ignore_eos=True)
    with pytest.raises(ValueError, match="chat template.*no tokenizer.*generate"):
        plain_llm.chat(greeting)
    monkeypatch.setattr(plain_llm, "tokenizer", Chatty())
    [single] = plain_llm.chat(greeting, params)
    both = plain_llm.chat([greeting, longer], params)
    spelled = [[ord(c) - ord("a") for c in text] for text in ("buhiz", "buhiayouokz")]
    assert [out.prompt_token_ids for out in both] == spelled
    # Tokens, not logprobs: another size of the batch is another program, with other last bits.
    assert single.samples[0].token_ids == both[0].samples[0].token_ids
    alone = plain_llm.generate([spelled[1]], params)[0]
    assert both[1].samples[0].token_ids == alone.samples[0].token_ids
    monkeypatch.setattr(Chatty, "chat_template", None)
    with pytest.raises(ValueError, match="chat template.*a tokenizer without one"):
        plain_llm.chat(greeting)


def test_the_progress_bar_shows_speed_and_accept_length(spec_llm, capsys):
    spec_llm.generate(prompts_of(5, VOCAB), SamplingParams(max_tokens=8), progress=True)
    shown = capsys.readouterr().err
    assert "5/5" in shown
    assert "tok/s" in shown and "accept length" in shown


@pytest.mark.parametrize("spec", [None, SpecConfig(strategy="off"), SpecConfig("disable")])
def test_every_way_to_say_off_is_the_plain_program_and_needs_no_head(spec):
    llm = LLM((CFG, weights()[0], None), spec, max_batch=1, max_len=16)
    assert llm.spec is None and llm.engine.runner.tree is None


# --- compile once ---------------------------------------------------------------------------------


@pytest.mark.slow  # in `make test`: test_engine, test_features and test_control
def test_nothing_compiles_after_warm_up_whatever_is_asked_for():
    how = EngineConfig(prefill_chunk=16)
    llm = make_llm(SpecConfig(strategy="1_1_2"), max_batch=2, max_len=40, engine=how)
    llm.engine.warm_up()
    built = llm.engine.runner.compilations

    def work():
        for count in (1, 3, 7):
            params = SamplingParams(temperature=count / 7, max_tokens=3 + count, n=2, seed=count)
            llm.generate(prompts_of(count, VOCAB, seed=count, longest=30), params)
        llm.update_weights(*weights(4))
        llm.generate(prompts_of(4, VOCAB), SamplingParams(max_tokens=9, temperature=0.0))

    assert compilations_of(work) == 0
    assert llm.engine.runner.compilations == built
    assert compilations_of(lambda: jax.jit(lambda x: x * 3)(1.0).block_until_ready()) > 0


def test_new_weights_change_the_output_and_old_ones_bring_it_back_without_a_compilation(llm):
    params = SamplingParams(seed=0, max_tokens=16, temperature=0.7, ignore_eos=True)
    old = sample(llm, max_tokens=16, temperature=0.7, ignore_eos=True)
    built = llm.engine.runner.compilations
    llm.update_weights(*weights(4))
    new = llm.generate([PROMPT], params)[0].samples[0]
    expected = independent_logprobs(weights(4)[0], PROMPT, new.token_ids, 0.7)
    llm.update_weights(*weights())
    assert new.token_ids != old.token_ids
    np.testing.assert_allclose(new.logprobs, expected, atol=2e-4)
    assert llm.generate([PROMPT], params)[0].samples[0] == old
    assert llm.engine.runner.compilations == built


def test_a_new_head_alone_changes_the_rounds_and_not_the_tokens(spec_llm):
    params = SamplingParams(seed=0, max_tokens=40, ignore_eos=True)
    prompts = prompts_of(6, VOCAB)
    good, good_rounds = spec_llm.generate(prompts, params), spec_llm.totals.rounds
    spec_llm.update_weights(weights()[0], weights(4)[1])
    poor, poor_rounds = spec_llm.generate(prompts, params), spec_llm.totals.rounds
    spec_llm.update_weights(*weights())
    assert [o.samples[0].token_ids for o in poor] == [o.samples[0].token_ids for o in good]
    assert poor_rounds > good_rounds


class Thinking(Chatty):
    """Its template writes what it is told to think."""

    def apply_chat_template(self, conversation, tokenize, add_generation_prompt, **told):
        said = super().apply_chat_template(conversation, tokenize, add_generation_prompt)
        return said + "".join(k[0] + "xy"[bool(v)] for k, v in told.items())


def test_chat_hands_options_to_the_template(plain_llm, monkeypatch):
    greeting = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=1)
    monkeypatch.setattr(plain_llm, "tokenizer", Thinking())

    def prompt(**options):
        [out] = plain_llm.chat(greeting, params, **options)
        return plain_llm.tokenizer.decode(out.prompt_token_ids, True)

    assert prompt() == "buhiz"
    assert prompt(chat_template_kwargs={"enable_thinking": False, "mark": True}) == "buhizexmy"
    assert prompt(add_generation_prompt=False) == "buhi"
    with pytest.raises(ValueError, match="tokenize is an argument of transformers"):
        prompt(chat_template_kwargs={"tokenize": True})
    with pytest.raises(ValueError, match="does not take these messages: TypeError"):
        plain_llm.chat([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], params)


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1, 10**30, np.float32(3), True, "7", 2.0])
def test_a_seed_that_has_no_64_bits_is_refused(seed):
    with pytest.raises(ValueError, match="seed must be an integer"):
        SamplingParams(seed=seed)


def test_seeds_of_64_bits_are_words_of_their_own():
    seeds = [0, 1, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 62)]
    words = {tuple(request_words(SamplingParams(seed=seed).seed, [1], 0)) for seed in seeds}
    assert len(words) == len(seeds)
    for kind in (np.int64, np.uint64):
        assert SamplingParams(seed=kind(5)).seed == 5
    assert request_words(np.uint64(7), [1], 0).tolist() == request_words(7, [1], 0).tolist()


def test_no_space_is_lost_where_a_tokenizer_asks_to_clean_up(plain_llm, monkeypatch):
    """transformers would remove those before punctuation, and a stop string would not be found."""
    pieces = [f" {mark}" for mark in ".?!,'"] + [f" {chr(97 + i)}" for i in range(VOCAB - 5)]
    made = Tokenizer(models.WordLevel(dict(zip(pieces, range(VOCAB), strict=True)), pieces[0]))
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=True)
    assert tokenizer.decode([5, 0]) == " a."
    monkeypatch.setattr(plain_llm, "tokenizer", tokenizer)
    params = SamplingParams(max_tokens=16, ignore_eos=True, allowed_token_ids=[0, 1, 5], seed=0)
    [whole] = plain_llm.generate([2, 0, 1], params)[0].samples
    spelled = "".join(pieces[token] for token in whole.token_ids)
    assert whole.text == spelled and " ." in spelled
    [cut] = plain_llm.generate([2, 0, 1], dataclasses.replace(params, stop=[" ."]))[0].samples
    assert (cut.text, cut.finish_reason) == (spelled[: spelled.index(" .")], "stop")
