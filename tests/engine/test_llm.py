"""What `LLM` accepts, returns and counts."""

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from shared import CFG, VOCAB, shared_llm, weights
from tiny import prompts_of
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specjax import LLM, EngineConfig, SamplingParams, SpecConfig
from specjax.decode.noise import request_words
from specjax.engine import llm as llm_module

PROMPT = [5, 9, 2]


@pytest.fixture(params=["speculative", "plain"])
def llm(request):
    """Both programs keep the same promises."""
    return shared_llm(request.param)


@pytest.fixture(scope="module")
def spec_llm():
    return shared_llm("speculative")


@pytest.fixture(scope="module")
def plain_llm():
    return shared_llm("plain")


def sample(llm, prompt=PROMPT, **params):
    return llm.generate([prompt], SamplingParams(**{"seed": 0, **params}))[0].samples[0]


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
    monkeypatch.setattr(llm_module, "host_memory", lambda: memory)
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


ONE_KEY = "a dict with one key, {'prompt': text} or {'prompt_token_ids': ids}"


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (None, "got None (NoneType)"),
        ({1, 2}, "got {1, 2} (set)"),
        ([[1], 2.5], "prompt 1"),
        ([True, False], "prompt 0 holds True"),
        (np.array([1.0, 2.0]), "prompt 0 holds 1.0"),
        ({"text": "hi"}, ONE_KEY),
        ({"prompt_token_ids": "ab"}, ONE_KEY),
        (
            [[1], {"prompt": "a", "prompt_token_ids": [1]}],
            "prompt 1: expected text, a list of token ids, or " + ONE_KEY,
        ),
        ([{"role": "user", "content": "hi"}], "use LLM.chat"),
    ],
)
def test_what_is_no_prompt_is_refused_on_one_line(spec_llm, prompts, said):
    with pytest.raises(ValueError) as error:
        spec_llm.generate(prompts, SamplingParams(max_tokens=2))
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"temperature": 0}, "expected SamplingParams"),
        ("greedy", "expected SamplingParams"),
        ([SamplingParams()] * 2, "one for each of 1 prompts"),
    ],
)
def test_what_are_no_sampling_params_is_refused(spec_llm, params, said):
    with pytest.raises(ValueError, match=said):
        spec_llm.generate([[1]], params)


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "hi"}, None, [], [[]]])
def test_what_are_no_messages_is_refused_with_what_messages_are(plain_llm, monkeypatch, messages):
    monkeypatch.setattr(plain_llm, "tokenizer", Chatty())
    with pytest.raises(ValueError, match="messages are a list of {'role': 'user', 'content': text"):
        plain_llm.chat(messages, SamplingParams(max_tokens=1))


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


def test_stats_count_rounds_drafts_and_accepted_tokens(spec_llm, plain_llm):
    outs = spec_llm.generate(prompts_of(7, VOCAB), SamplingParams(seed=0, max_tokens=30, n=2))
    rows, steps = 1 + 4 + 8 + 8, 3
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
    """A tokenizer of letters, whose template writes `b` before a conversation, `z` after it, and
    the options that it is given."""

    chat_template = "a template that reads enable_thinking and mark"

    def apply_chat_template(self, conversation, tokenize, add_generation_prompt, **told):
        assert not tokenize
        said = "".join(m["role"][0] + m["content"] for m in conversation)
        options = "".join(k[0] + "xy"[bool(v)] for k, v in told.items())
        return "b" + said + ("z" if add_generation_prompt else "") + options

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(c) - ord("a") for c in text]

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(ord("a") + i) for i in ids)


def test_chat_makes_a_prompt_of_the_conversation_by_the_tokenizers_template(plain_llm, monkeypatch):
    greeting = [{"role": "user", "content": "hi"}]
    longer = [*greeting, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "ok"}]
    params = SamplingParams(seed=0, max_tokens=4, ignore_eos=True)
    with pytest.raises(ValueError, match="chat template.*tokenizer"):
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
    with pytest.raises(ValueError, match="chat template"):
        plain_llm.chat(greeting)


@pytest.mark.parametrize("spec", [None, SpecConfig(strategy="off"), SpecConfig("disable")])
def test_every_way_to_say_off_is_the_plain_program_and_needs_no_head(spec):
    llm = LLM((CFG, weights()[0], None), spec, max_batch=1, max_len=16)
    assert llm.spec is None and llm.engine.runner.plan.tree is None


def test_new_weights_change_the_output_and_old_ones_bring_it_back_without_a_compilation(llm):
    params = SamplingParams(seed=0, max_tokens=16, temperature=0.7, ignore_eos=True)
    [old] = llm.generate([PROMPT], params)[0].samples
    built = llm.engine.runner.compilations
    llm.update_weights(*weights(4))
    [new] = llm.generate([PROMPT], params)[0].samples
    llm.update_weights(*weights())
    assert old.token_ids != new.token_ids
    assert new.token_ids == oracle.decode(CFG, weights(4)[0], PROMPT, params).tokens
    assert llm.generate([PROMPT], params)[0].samples[0] == old
    assert llm.engine.runner.compilations == built


def test_chat_hands_options_to_the_template(plain_llm, monkeypatch):
    greeting = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=1)
    monkeypatch.setattr(plain_llm, "tokenizer", Chatty())

    def prompt(**options):
        [out] = plain_llm.chat(greeting, params, **options)
        return plain_llm.tokenizer.decode(out.prompt_token_ids, True)

    assert prompt() == "buhiz"
    assert prompt(chat_template_kwargs={"enable_thinking": False, "mark": True}) == "buhizexmy"
    assert prompt(add_generation_prompt=False) == "buhi"
    with pytest.raises(ValueError, match="chat_template_kwargs: tokenize"):
        prompt(chat_template_kwargs={"tokenize": True})
    with pytest.raises(ValueError, match="does not take these messages: TypeError"):
        plain_llm.chat([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], params)


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
