"""`bench.throughput`: its commands on a tiny policy, and what can be computed by hand."""

import json
import shutil
import sys
from fractions import Fraction

import jax
import numpy as np
import pytest

from bench.command import heldout_prompts
from bench.throughput import __main__ as command
from bench.throughput import decode, host, identity, peer_torch, peers, workloads
from bench.throughput.decode import Turns
from bench.throughput.jax_sampler import JaxSampler
from specjax import LLM, SamplingParams, SpecConfig, memory
from specjax.checkpoint import huggingface as hf
from specjax.tokenizer import load_tokenizer
from train import data


def run(what, argv, out, policy=None):
    """Runs a command; returns the value of each figure, and the result file."""
    model = [] if policy is None else ["--model", str(policy)]
    status = command.main([what, *argv.split(), *model, "--out", str(out)])
    result = json.loads(out.read_text())
    return status, {name: f["value"] for name, f in result["figures"].items()}, result


# --- decode, invariant, kernels --------------------------------------------------------------

# The sizes of test_bench_control's engines: their programs are compiled once for both.
TINY = "--batches 2 --repeats 2 --max_tokens 12 --max_prompt_tokens 12 --strategy 1_1_2"


def test_decode_compares_speed_and_finds_the_same_tokens(thin_policy, tmp_path):
    _, found, result = run("decode", TINY, tmp_path / "decode.json", thin_policy)
    at = "float32/batch_2"
    assert found[f"samples_different/{at}/speculative/plain"] == 0
    assert found[f"accept_length/{at}/speculative"] >= 1
    entry = result["figures"][f"ratio/{at}/speculative/plain"]
    low, high = entry["interval"]
    assert 0 < low <= entry["value"] <= high


def test_differences_are_counted_up_to_the_first():
    same, other, short = [1, 2, 3], [1, 9, 9], [1, 2]
    assert decode.differences([same, other, short], [same, same, same]) == (2, 3 + 2 + 3)


def test_turns_divide_by_the_tokens_of_each_call():
    turns = Turns({"one": lambda number: [[0] * number], "other": lambda number: [[0] * 2]})
    turns.measure(2)
    assert turns.tokens == {"one": [2, 3], "other": [2, 2]}  # the first call is not counted
    turns.seconds = {"one": [1.0, 1.0], "other": [1.0, 2.0]}
    assert turns.rate("one")["interval"] == [2, 3]
    assert turns.ratio("one", "other")["value"] == pytest.approx((1 + 3) / 2)


@pytest.mark.slow
def test_in_invariant_mode_nothing_differs(thin_policy, tmp_path):
    argv = "--batches 2 --dtypes bfloat16 --prompts 2 --n 1 --max_tokens 8 --repeats 1"
    argv += " --strategy 1_1_2 --max_prompt_tokens 24"
    _, found, _ = run("invariant", argv, tmp_path / "invariant.json", thin_policy)
    assert found["samples_different/bfloat16/batch_2/invariant/invariant_plain"] == 0
    assert found["tokens_compared/bfloat16/batch_2/speculative/plain"] > 2
    assert found["ratio/bfloat16/batch_2/invariant_plain/plain"] > 0


def test_a_difference_in_invariant_mode_is_a_failure(thin_policy, tmp_path, monkeypatch):
    key = "samples_different/float32/batch_1/invariant/invariant_plain"
    monkeypatch.setattr(decode, "measure", lambda *_: {key: decode.figure(1, "of 2 samples")})
    with pytest.raises(SystemExit, match="1 samples differ in invariant mode"):
        run("invariant", "", tmp_path / "x.json", thin_policy)


@pytest.mark.slow
def test_kernels_are_compared_with_xla_and_their_bits_are_equal(cpu_kernels, tmp_path):
    argv = "--batches 2 --repeats 1 --prompts 2 --max_tokens 8 --strategy 1_1_2"
    _, found, _ = run("kernels", argv, tmp_path / "kernels.json")
    at = "float32/batch_2"
    assert found[f"logprobs_different/{at}/speculative/plain"] == 0
    for what in ("plain/xla_plain", "speculative/xla_speculative", "xla_speculative/xla_plain"):
        assert found[f"ratio/{at}/{what}"] > 0


# --- identity --------------------------------------------------------------------------------


@pytest.fixture
def one_setup(monkeypatch):
    monkeypatch.setattr(identity, "RANDOM_SETUPS", (identity.Setup("2x1", 4, "fair"),))
    monkeypatch.setattr(identity, "MAX_TOKENS", 40)
    monkeypatch.setattr(identity, "LONGEST_PROMPT", 12)


@pytest.mark.slow
def test_as_many_tokens_are_compared_as_asked_and_none_differs(one_setup, tmp_path):
    status, found, result = run("identity", "--tokens 500", tmp_path / "identity.json")
    assert status == 0 and found["differences_unexplained"] == 0
    assert found["tokens_compared"] >= 500
    assert result["settings"]["setups"][0]["accept_length"] > 1.3


@pytest.mark.slow
def test_identity_fails_when_the_wrong_rows_are_committed(one_setup, tmp_path, monkeypatch, capsys):
    def wrong(rows, index):
        return jax.tree.map(lambda x: x[..., : index.shape[1], :], rows)

    monkeypatch.setattr(memory, "take_rows", wrong)
    status, found, _ = run("identity", "--tokens 40", tmp_path / "identity.json")
    assert status == 1 and found["differences_unexplained"] > 0
    assert "NOT explained" in capsys.readouterr().out


def test_identity_refuses_to_compare_nothing():
    with pytest.raises(SystemExit):
        identity.main(["--tokens", "0"])


# --- peers -----------------------------------------------------------------------------------


SUMS = "assets/sums"


@pytest.fixture(scope="module")
def sums():
    """The embedded policy, and three prompts of its task."""
    cfg, params, head = hf.load_checkpoint(SUMS, "float32")
    cfg = cfg.running(compute_dtype="float32")
    prompts = heldout_prompts(load_tokenizer(SUMS), "sums", None, 3, 64, 0)
    return (cfg, params, head), prompts


@pytest.mark.slow
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


@pytest.mark.parametrize(("dtype", "exact"), [("float32", True), ("bfloat16", False)])
def test_the_jax_sampler_multiplies_as_exactly_as_the_engine(sums, dtype, exact):
    cfg, params, _ = sums[0]
    sampler = JaxSampler(cfg.running(compute_dtype=dtype), params, 2, 4, 3, (0,))
    given = np.zeros((2, 4), np.int32), np.zeros(2, np.int32), np.ones(2, np.int32)
    text = jax.jit(sampler.program).lower(sampler.params, *given, jax.random.key(0)).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert products
    assert all(("precision = [HIGHEST, HIGHEST]" in line) == exact for line in products)


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


SMALL = (
    "--repeats 2 --max_tokens 8 --max_prompt_tokens 24 --strategies 1_1_2 --threads 1 "
    "--fewest_samples 2"
)
TAIL = f"{SMALL} --batches --tail_prompts 3 --tail_batch 1 --tail_median 1"


@pytest.mark.slow  # a whole measurement, of half a minute
def test_peers_compares_with_a_jax_sampler_where_there_is_no_torch(
    thin_policy, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match="pip install torch"):
        run("peers", TAIL, tmp_path / "peers.json", thin_policy)
    argv = f"{TAIL} --peers jax_sampler"
    _, found, result = run("peers", argv, tmp_path / "peers.json", thin_policy)
    assert found["best_peer/long_tail"] == "jax_sampler"
    low, high = result["figures"]["specjax_over_best/long_tail"]["interval"]
    assert low <= found["specjax_over_best/long_tail"] <= high
    assert found["specjax_over_best_charged/long_tail"] < found["specjax_over_best/long_tail"]
    assert found["specjax_accept_length/long_tail"] >= 1
    assert found["specjax_block_over_best/long_tail"] > 0


@pytest.mark.slow  # three models of torch; the run above is the command's
@pytest.mark.torch
def test_peers_takes_the_fastest_way_of_transformers_to_draft(thin_policy, tmp_path, monkeypatch):
    monkeypatch.setattr(peer_torch, "LOOKUPS", (2,))
    monkeypatch.setattr(peer_torch, "MTP_DEPTHS", (1,))
    argv = f"{SMALL} --tail_prompts 0 --batches 1 --peers {' '.join(peers.TORCH)}"
    argv += " --acceptance coupled"
    _, found, _ = run("peers", argv, tmp_path / "peers.json", thin_policy)
    assert found["transformers_assisted_choice/batch_1"] in ("prompt lookup 2", "MTP 1")
    assert found["transformers_assisted_tokens_per_sec/batch_1"] > 0
    assert found["best_peer/batch_1"] in peers.TORCH


def test_peers_that_generate_different_numbers_of_tokens_are_not_compared():
    work = peers.Work("long_tail", [[1]], [5], 1, True)
    arm = peers.Arm(lambda seed: [[0] * 4])
    turns = Turns({"jax_sampler": arm.generate})
    turns.measure(1)
    with pytest.raises(ValueError, match=r"expected 5 in every call"):
        peers.figures_of(work, {"jax_sampler": arm}, turns)


# --- workloads -------------------------------------------------------------------------------


def test_one_factor_scales_all_lengths_of_the_four_workloads():
    full = workloads.points(list(workloads.WORKLOADS), Fraction(1))
    found = {p.name: (p.prompt, p.output) for p in full}
    assert found["greedy/concurrency_8"] == found["sampled/concurrency_1"] == (2048, 128)
    assert found["long/concurrency_1"] == (16_384, 256) and len(found) == 8
    eighth = workloads.points(list(workloads.WORKLOADS), Fraction(1, 8))
    for whole, small in zip(full, eighth, strict=True):
        assert (small.prompt * 8, small.output * 8) == (whole.prompt, whole.output)


def test_prompts_have_their_length_and_end_with_a_problem_of_their_own(thin_policy):
    tokenizer = load_tokenizer(thin_policy)
    source = data.demonstrations(data.DataConfig(heldout_size=8), "heldout")
    found = workloads.long_prompts(source, tokenizer, 300, 4)
    assert [len(prompt) for prompt in found] == [300] * 4
    ends = [tokenizer.decode(prompt)[-3:] for prompt in found]
    assert all(end.endswith("=") for end in ends)
    assert len({tuple(prompt[-12:]) for prompt in found}) == 4
    assert found[0].count(tokenizer.eos_token_id) > 2  # several worked problems come before


@pytest.mark.slow  # a whole measurement, of half a minute
def test_workloads_writes_all_figures(thin_policy, tmp_path, monkeypatch):
    fewer = workloads.WORKLOADS["sampled"]._replace(concurrency=(2,))
    monkeypatch.setitem(workloads.WORKLOADS, "sampled", fewer)
    argv = "--workloads sampled --scale 1/64 --repeats 2 --strategy 1_1_2 --window 0.001"
    argv += " --copy_bytes 4096"
    _, found, result = run("workloads", argv, tmp_path / "workloads.json", thin_policy)
    found = {name.split("/")[0]: value for name, value in found.items()}
    assert result["settings"]["scale"] == "1/64"
    assert 1 <= found["accept_length"] <= 2 and 0.5 <= found["forwards_per_token"] <= 1
    assert found["spec_kernels_per_round"] > found["plain_kernels_per_round"] > 10
    assert found["plain_bandwidth_share"] > 0 and found["spec_bandwidth_share"] > 0
    assert found["plain_tokens_per_sec_call"] > 0
    assert found["draft_share"] is None or 0 <= found["draft_share"] <= 1


# --- host ------------------------------------------------------------------------------------


def test_a_replay_runs_the_programs_of_generate_and_ends_where_it_did(thin_policy):
    cfg, params, head = hf.load_checkpoint(thin_policy, "float32")
    model = cfg.running(compute_dtype="float32"), params, head
    llm = LLM(model, SpecConfig("2_1_3"), max_batch=1, max_len=32)  # as in the run below
    device = host.Device(llm)
    device.generate([[5, 6, 7], [8, 9]], SamplingParams(seed=0, max_tokens=9, ignore_eos=True))
    assert {call[0].__name__ for call in device.calls} == {"prefill", "place", "chunk"}
    wanted = jax.device_get(llm.engine.runner.state.tokens), device.last.open().length
    compiled = llm.engine.runner.compilations
    device.replay()
    again = jax.device_get(llm.engine.runner.state.tokens), device.last.open().length
    jax.tree.map(np.testing.assert_array_equal, wanted, again)
    assert llm.engine.runner.compilations == compiled
    assert 0 < device.waited and 0 < device.enqueuing


def test_host_writes_shares_and_a_profile(thin_policy, tmp_path):
    out = tmp_path / "host.json"
    argv = "--arms speculative --samples_per_slot 2 --max_tokens 8 --repeats 2"
    argv += " --max_prompt_tokens 24 --strategy 2_1_3"
    _, found, result = run("host", argv, out, thin_policy)
    low, high = result["figures"]["host_share/speculative/batch_1"]["interval"]
    assert low <= found["host_share/speculative/batch_1"] <= high < 1
    assert 0 <= found["host_busy/speculative/batch_1"] <= 1
    profile = out.with_suffix(".txt").read_text()
    assert "--- speculative, batch 1 ---" in profile and "engine.py" in profile
