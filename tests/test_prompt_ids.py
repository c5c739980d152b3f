"""Texts and conversations become the same token ids by every program, with BOS once."""

import dataclasses

import pytest
import small_tokenizers
from small_tokenizers import BOS, KINDS, WITH_BOS, WITHOUT_BOS

from specjax.tokenizer import chat_ids, has_chat_template, load_tokenizer, prompt_ids
from train.data.prompts import Prompts
from train.data.tasks.layout import Demonstration, Problem
from train.schema import DataConfig

TEXTS = ("the cat", "", " the", "naïve\n", f"the {BOS} cat")
GREETING = [{"role": "user", "content": "the cat"}]
# How a tokenizer comes to add BOS, or not to.
ADDING = {
    "post-processor": ({"prepends": True}, True),
    "post-processor and setting": ({"prepends": True, "add_bos_token": True}, True),
    "setting": ({"add_bos_token": True}, True),
    "nothing": ({}, False),
    "setting that says no": ({"add_bos_token": False}, False),
    "no BOS": ({"bos_token": None}, False),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer by its kind, what adds BOS, and its chat template."""

    def load(kind, adding="nothing", template=None):
        folder = tmp_path_factory.mktemp("tokenizer")
        settings, _ = ADDING[adding]
        return load_tokenizer(small_tokenizers.save(folder, kind, template=template, **settings))

    return load


@pytest.mark.parametrize("adding", ADDING)
@pytest.mark.parametrize("kind", KINDS)
def test_bos_stands_in_front_once_where_the_tokenizer_adds_it(tokenizer, kind, adding):
    made, (_, adds) = tokenizer(kind, adding), ADDING[adding]
    bos = made.convert_tokens_to_ids(BOS)
    for text in TEXTS:
        bare = made.encode(text, add_special_tokens=False)
        assert prompt_ids(made, text) == [bos] * adds + bare
    written = made.encode(BOS + "the cat", add_special_tokens=False)
    assert written.count(bos) == 1 and prompt_ids(made, BOS + "the cat") == written
    assert prompt_ids(made, BOS) == [bos]


@pytest.mark.parametrize("adding", ADDING)
@pytest.mark.parametrize("kind", KINDS)
def test_a_template_writes_bos_and_nobody_else_does(tokenizer, kind, adding):
    for template in (WITH_BOS, WITHOUT_BOS):
        made = tokenizer(kind, adding, template)
        ids = chat_ids(made, GREETING)
        theirs = made.apply_chat_template(GREETING, tokenize=True, add_generation_prompt=True)
        theirs = getattr(theirs, "input_ids", theirs)
        assert ids == list(theirs)
        has = template == WITH_BOS and made.bos_token is not None
        assert ids.count(made.convert_tokens_to_ids(BOS)) == has


@pytest.mark.parametrize("adding", ADDING)
def test_training_reads_what_generation_reads(tokenizer, adding):
    made = tokenizer("sentencepiece", adding)
    prompts = Prompts(made, DataConfig())
    prompt, response, _ = prompts.demonstration(Demonstration("the cat", " the end"))
    assert prompt == prompts.whole(Problem("the cat", "", 0)) == prompt_ids(made, "the cat")
    assert made.bos_token_id not in response and response[-1] == made.eos_token_id


def test_options_reach_the_template_and_only_the_template(tokenizer):
    template = "{{ 'no' if enable_thinking is false else 'yes' }}{{ messages[0].content }}"
    template += "{% if add_generation_prompt %} the{% endif %}"
    made = tokenizer("byte level", template=template)

    def text(**options):
        return made.decode(chat_ids(made, GREETING, **options))

    assert text() == "yesthe cat the"
    assert text(options={"enable_thinking": False}) == "nothe cat the"
    assert text(options={"enable_thinking": True, "mark": 1}, add_generation_prompt=False) == (
        "yesthe cat"
    )
    for name in ("tokenize", "conversation", "chat_template"):
        with pytest.raises(ValueError, match=f"chat_template_kwargs: {name}"):
            chat_ids(made, GREETING, {name: True})


def test_no_template_and_a_template_that_refuses_are_one_line(tokenizer):
    made = tokenizer("byte level")
    assert not has_chat_template(made) and not has_chat_template(None)
    with pytest.raises(ValueError, match="no chat template"):
        chat_ids(made, GREETING)
    for template in ("{{ raise_exception('alternate roles') }}", "{{ messages[3].content.x }}"):
        with pytest.raises(ValueError, match="does not take these messages: [^\n]*$"):
            chat_ids(tokenizer("byte level", template=template), GREETING)


def test_a_tokenizer_without_a_bos_attribute_is_asked_for_nothing():
    @dataclasses.dataclass
    class Words:
        def encode(self, text, add_special_tokens=True):
            return [7] * add_special_tokens + [len(word) for word in text.split()]

    assert prompt_ids(Words(), "the cats") == [7, 3, 4]
