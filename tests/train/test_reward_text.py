"""The text of a sample that rewards read."""

import pytest
import small_tokenizers
from tokenizers import AddedToken

from specjax import SamplingParams
from specjax.tokenizer import load_tokenizer
from train.rewards.builtin import get_reward
from train.rollout.collect import ResponseText

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]


@pytest.mark.parametrize("kind", small_tokenizers.KINDS)
@pytest.mark.parametrize(
    ("pieces", "sampling", "text"),
    [
        (["<think>", "the", "</think>", "<answer>", "the", "</answer>", "</s>"], {},
         "<think>the</think><answer>the</answer>"),
        (["the", "<think>", "<|im_end|>"], {}, "the<think>"),
        (["<s>", "the", "<|im_end|>", "</s>"], {}, "the"),
        (["the", "z"], {"stop_token_ids": "z"}, "the"),
        (["<think>", "the", "</think>", "the", "x"], {"stop": ["ex"]}, "<think>the</think>th"),
        (["<think>", "the", "</answer>"], {"stop": ["</answer>"]}, "<think>the"),
        (["<think>", "the", "</answer>"],
         {"stop": ["</answer>"], "include_stop_str_in_output": True}, "<think>the</answer>"),
        (["</think>", "the", "x"], {"stop": ["think"]}, "</think>thex"),
    ],
)  # fmt: skip
def test_rewards_read_special_tokens_but_those_that_begin_pad_or_end(
    tmp_path, kind, pieces, sampling, text
):
    tokenizer = load_tokenizer(small_tokenizers.save(tmp_path / "t", kind, pad_token="<|im_end|>"))
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in TAGS], special_tokens=True)
    ids = [token for piece in pieces for token in _ids(tokenizer, piece)]
    if "stop_token_ids" in sampling:
        sampling = {"stop_token_ids": _ids(tokenizer, sampling["stop_token_ids"])}
    read = ResponseText(tokenizer, SamplingParams(**sampling), [tokenizer.eos_token_id])
    assert read(ids).strip() == text
    if "<answer>" in text:
        assert get_reward("format")(read(ids)) == 1.0


def _ids(tokenizer, piece):
    """The tokens of a piece that goes on, without the space before a first word."""
    if piece in (*TAGS, *small_tokenizers.SPECIAL):
        return [tokenizer.convert_tokens_to_ids(piece)]
    return [tokenizer.convert_tokens_to_ids(letter) for letter in piece]
