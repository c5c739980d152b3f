"""Draft sources as configurations name them, and through `LLM`: they change no token."""

import functools

import jax
import numpy as np
import pytest
from tiny import prompts_of, tiny_config, tiny_model

from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.draft_files import FilesAt
from specjax.drafts.model import ModelSource, check_vocabulary
from specjax.models.transformer import to_decode_layout
from specjax.parallel import sharding
from specjax.tokenizer import load_tokenizer

VOCAB, STEPS = 48, 2
CFG, PARAMS, HEAD = tiny_model(tiny_config(VOCAB), seed=3)
SMALL = 32
DRAFT = tiny_config(SMALL, mtp=0, layers=2)


def read_model(path, target, **given):
    files = FilesAt(path, **given)
    source = ModelSource.read(files, target)
    return source, source.load(files)


def test_vocabularies_are_compared_by_what_ids_mean():
    padded = DRAFT.replace(vocab_size=48)
    ids = {f"t{i}": i for i in range(SMALL)}
    check_vocabulary(DRAFT, DRAFT, None, None)
    check_vocabulary(padded, DRAFT, ids, ids)
    check_vocabulary(padded, DRAFT, ids | {"<extra>": SMALL}, ids)
    with pytest.raises(ValueError, match="vocabulary of 48, the target of 32"):
        check_vocabulary(padded, DRAFT, ids, None)
    swapped = ids | {"t3": 4, "t4": 3}
    with pytest.raises(ValueError, match="differs from the target's in 2 ids: id 3 is 't4'"):
        check_vocabulary(DRAFT, DRAFT, swapped, ids)


def test_a_directory_becomes_a_source_whose_vocabulary_was_checked(tmp_path):
    cfg = tiny_config(SMALL, mtp=1)
    _, params, head = tiny_model(cfg)
    hf.save_checkpoint(tmp_path / "draft", cfg, params, head)
    source, layout = read_model(tmp_path / "draft", DRAFT)
    assert source.vocab == SMALL and source.cfg.num_layers == cfg.num_layers
    jax.tree.map(np.testing.assert_array_equal, layout, to_decode_layout(params, cfg))
    with pytest.raises(ValueError, match="vocabulary of 32, the target of 64"):
        read_model(tmp_path / "draft", tiny_config(64))


def test_a_draft_model_is_split_over_the_targets_mesh(tmp_path):
    """Layer by layer, and not fused, because fused weights cannot be split."""
    cfg, params, _ = tiny_model(tiny_config(SMALL))
    hf.save_checkpoint(tmp_path / "draft", cfg, params)
    mesh = sharding.make_mesh(sharding.MeshConfig(tp=2))
    source, layout = read_model(tmp_path / "draft", DRAFT, mesh=mesh)
    assert not source.cfg.run.scan_layers
    q = layout["layers"][0]["q"]
    assert q.sharding.mesh == mesh and q.addressable_shards[0].data.shape[-1] * 2 == q.shape[-1]


def test_tokenizers_of_both_directories_are_compared(tiny_policy):
    cfg, tokenizer = hf.read_config(tiny_policy), load_tokenizer(tiny_policy)
    assert read_model(tiny_policy, cfg, tokenizer=tokenizer)[0].vocab == cfg.vocab_size

    class Shuffled:
        def get_vocab(self):
            ids = tokenizer.get_vocab()
            first, second = sorted(ids, key=ids.get)[:2]
            return ids | {first: ids[second], second: ids[first]}

    with pytest.raises(ValueError, match="differs from the target's in 2 ids"):
        read_model(tiny_policy, cfg, tokenizer=Shuffled())


# --- through LLM ----------------------------------------------------------------------------------


def llm(spec, batch=4):
    return LLM((CFG.replace(mtp_num_layers=0), PARAMS, None), spec, max_batch=batch, max_len=64)


@functools.cache
def plain_llm():
    return warmed(llm(None))


@functools.cache
def plain(temperature, penalty=0.0):
    return tokens_of(plain_llm().generate(prompts_of(6, VOCAB), sampling(temperature, penalty)))


def warmed(built):
    """One program for all that is asked for here: the first request asks for it."""
    built.generate(prompts_of(6, VOCAB), sampling(0.9, penalty=2.0))
    return built


def sampling(temperature, penalty=0.0):
    most = 12 * (STEPS + 1)
    return SamplingParams(
        seed=0, temperature=temperature, frequency_penalty=penalty, max_tokens=most, n=2
    )


def tokens_of(outputs):
    return [sample.token_ids for out in outputs for sample in out.samples]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("draft") / "model"
    hf.save_checkpoint(path, CFG.replace(mtp_num_layers=0), PARAMS, None)  # a model, not its head
    return path


@pytest.fixture(scope="module")
def by_itself(directory):
    """By strategy: the target drafts for itself."""
    return functools.cache(
        lambda strategy: warmed(llm(SpecConfig(strategy=strategy, draft=directory)))
    )


CHAIN = f"{STEPS}_1_{STEPS + 1}"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [CHAIN, "2x2"])
def test_a_draft_model_that_is_the_target_is_always_accepted(by_itself, strategy):
    """Greedy and sampled, since both draw with the same noise: so its cache is right everywhere.

    Under penalties drafts are penalised along their branch, as the target's tokens are.
    """
    both = by_itself(strategy)
    for temperature, penalty in ((0.0, 0.0), (0.9, 0.0), (0.0, 2.0)):
        outputs = both.generate(prompts_of(6, VOCAB), sampling(temperature, penalty))
        assert tokens_of(outputs) == plain(temperature, penalty)
        assert both.totals.accept_length == STEPS + 1
    assert plain(0.0, 2.0) != plain(0.0)
