"""The peers of `bench.peers`: that they generate what they should, and are counted alike."""

import json
import shutil
import statistics
import sys

import pytest

from bench import peer_torch, peers
from bench.command import heldout_prompts
from bench.jax_sampler import JaxSampler
from specjax import LLM, SamplingParams
from specjax.checkpoint import huggingface as hf
from specjax.tokenizer import load_tokenizer

SUMS = "assets/sums"


@pytest.fixture(scope="module")
def sums():
    """The embedded policy, and three prompts of its task."""
    cfg, params, head = hf.load_checkpoint(SUMS, "float32")
    cfg = cfg.running(compute_dtype="float32")
    prompts = heldout_prompts(load_tokenizer(SUMS), "sums", None, 3, 64, 0)
    return (cfg, params, head), prompts


# --- the plain jitted sampler ------------------------------------------------------------------


def test_the_jax_sampler_generates_the_greedy_tokens_of_llm_whatever_the_batch(sums):
    (cfg, params, _), prompts = sums
    limits = [48, 5, 48]
    asked = [SamplingParams(temperature=0.0, max_tokens=n) for n in limits]
    llm = LLM((cfg, params, None), None, max_batch=1, max_len=128, scan_layers=True)
    wanted = [out.samples[0].token_ids for out in llm.generate(prompts, asked)]
    assert len(wanted[1]) == 5 and wanted[0][-1] in cfg.eos_token_ids
    width = max(map(len, prompts)) + 3  # also on the left of the longest there is padding
    sampler = JaxSampler(cfg, params, 2, width, max(limits), cfg.eos_token_ids, 0.0)
    assert sampler(prompts, limits, seed=0) == wanted


def test_the_jax_sampler_draws_from_the_seed(thin_policy):
    cfg, params, _ = hf.load_checkpoint(thin_policy, "float32")
    sampler = JaxSampler(cfg, params, 4, 64, 12, (), 1.0)
    first, again, other = (sampler([[5, 6, 7]] * 4, [12] * 4, seed) for seed in (1, 1, 2))
    assert first == again and first != other
    assert [len(tokens) for tokens in first] == [12] * 4
    assert len({tuple(tokens) for tokens in first}) > 1  # the rows of a batch differ too


# --- transformers ------------------------------------------------------------------------------


@pytest.mark.torch
def test_transformers_drafts_with_the_head_that_lies_with_the_policy(sums, tmp_path):
    prompts = sums[1][:1]
    assert peer_torch.mtp_directory(SUMS, tmp_path / "mtp", 2) is None
    peer = peer_torch.TorchPeer(tmp_path / "mtp", 1, 1, options={"use_mtp": True})
    passes = []
    peer.policy.model.register_forward_hook(lambda *_: passes.append(1))
    tokens = sum(len(peer(prompts, [48], seed)[0]) for seed in range(3))
    assert tokens > 1.5 * len(passes)  # a head of garbage would emit one token per pass


@pytest.mark.torch
def test_rows_of_a_static_batch_are_cut_at_their_own_end(sums):
    peer = peer_torch.TorchPeer(SUMS, 2, 1)
    prompts = sums[1]
    found = peer(prompts, [60, 4, 60], 0)
    assert len(found) == 3 and len(found[1]) == 4
    assert found[0][-1] in peer.stops and not peer.stops & set(found[0][:-1])
    endless = peer_torch.TorchPeer(SUMS, 3, 1, ignore_eos=True)
    assert [len(tokens) for tokens in endless(prompts, [60, 4, 9], 0)] == [60, 4, 9]


@pytest.mark.torch
def test_a_head_that_transformers_cannot_take_is_refused_with_the_reason(thin_policy, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(thin_policy, other)
    config = json.loads((other / "config.json").read_text())
    config["specjax_mtp"]["recycle"] = "pre_norm"
    (other / "config.json").write_text(json.dumps(config))
    reason = peer_torch.mtp_directory(other, tmp_path / "mtp", 1)
    assert reason is not None and "'recycle': 'pre_norm'" in reason
    (other / peer_torch.HEAD_FILE).unlink()
    assert "has no mtp.safetensors" in peer_torch.mtp_directory(other, tmp_path / "mtp", 1)
    assert not (tmp_path / "mtp").exists()


# --- the bench ---------------------------------------------------------------------------------


def test_budgets_have_a_long_tail_and_are_the_same_for_the_same_seed():
    found = peers.budgets(256, 10, 0)
    assert found == peers.budgets(256, 10, 0) != peers.budgets(256, 10, 1)
    assert abs(statistics.median(found) - 10) <= 1
    assert max(found) == 10 * peers.LONGEST and 2 <= sum(n == max(found) for n in found) <= 4


SMALL = """--repeats 2 --max_tokens 8 --max_prompt_tokens 24 --strategies 1_1_2 --threads 1
--fewest_samples 2""".split()
TAIL = "--batches --tail_prompts 3 --tail_batch 1 --tail_median 1".split()


@pytest.mark.slow  # a whole bench, of half a minute
def test_bench_peers_compares_with_a_jax_sampler_where_there_is_no_torch(
    thin_policy, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "torch", None)
    out = tmp_path / "peers.json"
    argv = [*SMALL, *TAIL, "--model", str(thin_policy), "--out", str(out)]
    with pytest.raises(SystemExit, match="pip install torch"):
        peers.main(argv)
    peers.main([*argv, "--peers", "jax_sampler"])
    result = json.loads(out.read_text())
    found = result["figures"]
    assert found["best_peer/long_tail"]["value"] == "jax_sampler"
    ratio, (low, high) = (found["specjax_over_best/long_tail"][k] for k in ("value", "interval"))
    assert low <= ratio <= high
    assert found["specjax_over_best_charged/long_tail"]["value"] < ratio
    assert found["specjax_accept_length/long_tail"]["value"] >= 1
    assert found["specjax_block_over_best/long_tail"]["value"] > 0
    # All have done the same work: seconds x rate is the number of tokens.
    for name in ("jax_sampler", "specjax_plain"):
        seconds = found[f"{name}_seconds/long_tail"]["interval"]
        rates = found[f"{name}_tokens_per_sec/long_tail"]["interval"]
        assert seconds[0] * rates[1] == pytest.approx(sum(result["settings"]["budgets"]))


@pytest.mark.slow  # three models of torch; the run above is the command's
@pytest.mark.torch
def test_bench_peers_takes_the_fastest_way_of_transformers_to_draft(
    thin_policy, tmp_path, monkeypatch
):
    monkeypatch.setattr(peer_torch, "LOOKUPS", (2,))
    monkeypatch.setattr(peer_torch, "MTP_DEPTHS", (1,))
    out = tmp_path / "peers.json"
    argv = [*SMALL, "--tail_prompts", "0", "--batches", "1", "--peers", *peers.TORCH]
    argv += ["--acceptance", "coupled"]
    peers.main([*argv, "--model", str(thin_policy), "--out", str(out)])
    found = json.loads(out.read_text())["figures"]
    assert found["transformers_assisted_choice/batch_1"]["value"] in ("prompt lookup 2", "MTP 1")
    assert found["transformers_assisted_tokens_per_sec/batch_1"]["value"] > 0
    assert found["best_peer/batch_1"]["value"] in peers.TORCH


def test_assisted_generation_is_not_offered_for_more_than_one_sample(thin_policy):
    args = peers.parse(["--model", str(thin_policy)])
    work = peers.Work("batch_2", [[5], [6]], [4, 4], 2, False)
    assert peers.build("transformers_assisted", (None, None, None), args, work) is None


def test_peers_that_generate_different_numbers_of_tokens_are_not_compared_by_seconds():
    work = peers.Work("long_tail", [[1]], [5], 1, True)
    arm = peers.Arm(lambda seed: [[0] * 4])
    arm()
    with pytest.raises(ValueError, match=r"expected 5 in every call"):
        peers.figures_of(work, {"jax_sampler": arm}, {"jax_sampler": [1.0]})
