"""`bench.protocol` and `bench.host`: counts that can be made by hand, and their command lines."""

import json
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import hlo, host, protocol, traffic, workloads
from specjax import LLM, RunConfig, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.drafts.mtp import init_head_params
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params, to_decode_layout
from specjax.tokenizer import load_tokenizer
from train import data

PROGRAM = """HloModule jit_f, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %c = f32[] constant(1)
  ROOT %add = f32[4]{0} add(%p, %p)
}

%small (p: f32[4]) -> f32[4] {
  %p.1 = f32[4]{0} parameter(0)
  %one = f32[4]{0} fusion(%p.1), kind=kLoop, calls=%fused
  ROOT %two = f32[4]{0} fusion(%one), kind=kLoop, calls=%fused
}

%inner_body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p.2 = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%p.2), index=1
  %i = s32[] get-tuple-element(%p.2), index=0
  %y = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %y)
}

%inner_cond (p: (s32[], f32[4])) -> pred[] {
  %p.3 = (s32[], f32[4]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p.4 = (s32[], f32[4]{0}) parameter(0)
  %known = (s32[], f32[4]{0}) while(%p.4), condition=%inner_cond, body=%inner_body, \
backend_config={"known_trip_count":{"n":"3"}}
  %unknown = (s32[], f32[4]{0}) while(%known), condition=%inner_cond, body=%inner_body
  %x.1 = f32[4]{0} get-tuple-element(%unknown), index=1
  %i.1 = s32[] get-tuple-element(%unknown), index=0
  %gemm = (f32[4]{0}, s8[16]{0}) custom-call(%x.1), custom_call_target="__cublas$gemm"
  %x.2 = f32[4]{0} get-tuple-element(%gemm), index=0
  %called = f32[4]{0} call(%x.2), to_apply=%small
  %as_one = f32[4]{0} call(%called), to_apply=%small, \
frontend_attributes={xla_cpu_small_call="true"}
  %either = f32[4]{0} conditional(%i.1, %as_one, %as_one), branch_computations={%fused, %small}
  ROOT %t.1 = (s32[], f32[4]{0}) tuple(%i.1, %either)
}

ENTRY %main (a: (s32[], f32[4])) -> (s32[], f32[4]) {
  %a = (s32[], f32[4]{0}) parameter(0)
  %before = (s32[], f32[4]{0}) while(%a), condition=%inner_cond, body=%inner_body
  ROOT %rounds = (s32[], f32[4]{0}) while(%before), condition=%inner_cond, body=%body
}
"""


# --- kernels -----------------------------------------------------------------------------------


def test_kernels_of_a_round_are_counted_as_one_counts_them_by_hand():
    # Loops 3 + 1, one library call, a call of two fusions, a small call, the larger branch's two.
    assert hlo.round_kernels(PROGRAM) == {"fusion": 3 + 1 + 2 + 2, "custom-call": 1, "call": 1}


def test_a_program_that_was_compiled_here_can_be_counted():
    def program(x, w):
        def body(carry):
            i, x = carry
            return i + 1, jnp.sort(x @ w @ w, axis=-1)

        return jax.lax.while_loop(lambda carry: carry[1].sum() < carry[0], body, (0, x))

    text = jax.jit(program).lower(np.ones((64, 64)), np.ones((64, 64))).compile().as_text()
    counted = hlo.round_kernels(text)
    assert counted["sort"] == 1 and 3 <= counted.total() <= 9  # two products and a sum beside it
    with pytest.raises(ValueError, match="a program without one"):
        hlo.round_kernels(jax.jit(lambda x: x + 1).lower(1.0).compile().as_text())
    with pytest.raises(ValueError, match="as_text"):
        hlo.round_kernels("nothing")


# --- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scan", [False, True])
def test_bytes_of_a_round_are_what_one_computes_by_hand(scan):
    cfg = dense_config(
        vocab_size=100,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mtp_num_layers=1,
        tie_embeddings=True,
        run=RunConfig(compute_dtype="bfloat16", scan_layers=scan),
    )
    params = to_decode_layout(init_params(cfg), cfg)
    head = init_head_params(cfg)  # float32
    attention = 16 * (4 + 2 + 2) * 8 + 4 * 8 * 16
    layer = attention + 3 * 16 * 32 + 2 * 16  # and two norms
    scales = 2 * layer + 16 + 100 * 16  # final norm, language-model head
    assert cfg.layers[0].mixer.qk_norm
    # One scale per head where projections are fused, else one for all.
    scales += 2 * 8 * ((4 + 2) if not scan else 2)
    kept = 2 * 2 * 8  # keys and values of a position in one layer
    forward = 2 * (scales + 3 * 5 * 16 + 3 * (50 + 5) * 2 * kept)
    assert traffic.forward_bytes(cfg, params, batch=3, rows=5, context=50) == forward
    module = 4 * (layer + 2 * 8 + 2 * 16 * 16 + 3 * 16)
    drafted = module + 2 * (100 * 16 + 3 * 16 + 3 * 51 * kept)
    assert traffic.round_bytes(cfg, params, head, 4, 5, 3, 50) == forward + 4 * drafted
    plain = traffic.forward_bytes(cfg, params, 3, 1, 50)
    assert traffic.round_bytes(cfg, params, None, 0, 1, 3, 50) == plain


def test_a_copy_touches_its_array_twice():
    copy, touched = traffic.copy_of(1 << 12)
    copy()
    assert touched == 2 << 12


# --- the protocol ------------------------------------------------------------------------------


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


@pytest.mark.slow  # a whole bench, of half a minute
def test_bench_protocol_writes_all_figures_of_a_workload(thin_policy, tmp_path):
    out = tmp_path / "protocol.json"
    argv = "--workloads sampled --scale 1/64 --repeats 2 --strategy 1_1_2 --window 0.001".split()
    argv += ["--copy_bytes", "4096", "--model", str(thin_policy), "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        fewer = workloads.WORKLOADS["sampled"]._replace(concurrency=(2,))
        patch.setitem(workloads.WORKLOADS, "sampled", fewer)
        protocol.main(argv)
    result = json.loads(out.read_text())
    found = {name.split("/")[0]: entry["value"] for name, entry in result["figures"].items()}
    assert result["settings"]["scale"] == "1/64"
    assert 1 <= found["accept_length"] <= 2 and 0.5 <= found["forwards_per_token"] <= 1
    assert found["spec_kernels_per_round"] > found["plain_kernels_per_round"] > 10
    assert found["plain_bandwidth_share"] > 0 and found["spec_bandwidth_share"] > 0
    assert found["plain_tokens_per_sec_call"] > 0
    assert found["draft_share"] is None or 0 <= found["draft_share"] <= 1


# --- the host ----------------------------------------------------------------------------------


def test_a_replay_runs_the_programs_of_generate_and_ends_where_it_did(thin_policy):
    cfg, params, head = hf.load_checkpoint(thin_policy, "float32")
    model = cfg.running(compute_dtype="float32"), params, head
    llm = LLM(model, SpecConfig("2_1_3"), max_batch=1, max_len=32)  # as in the run below
    device = host.Device(llm)
    device.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=9, ignore_eos=True))
    assert {call[0].__name__ for call in device.calls} == {"prefill", "place", "chunk"}
    wanted = jax.device_get(llm.engine.runner.state.tokens), device.last.open().length
    compiled = llm.engine.runner.compilations
    device.replay()
    again = jax.device_get(llm.engine.runner.state.tokens), device.last.open().length
    jax.tree.map(np.testing.assert_array_equal, wanted, again)
    assert llm.engine.runner.compilations == compiled
    assert 0 < device.waited and 0 < device.enqueuing


def test_bench_host_writes_shares_and_a_profile_of_the_host(thin_policy, tmp_path):
    out = tmp_path / "host.json"
    argv = "--arms speculative --samples_per_slot 2 --max_tokens 8 --repeats 2".split()
    argv += ["--max_prompt_tokens", "24", "--strategy", "2_1_3"]
    host.main([*argv, "--model", str(thin_policy), "--out", str(out)])
    found = json.loads(out.read_text())["figures"]
    low, high = found["host_share/speculative/batch_1"]["interval"]
    assert low <= found["host_share/speculative/batch_1"]["value"] <= high < 1
    assert 0 <= found["host_busy/speculative/batch_1"]["value"] <= 1
    profile = out.with_suffix(".txt").read_text()
    assert "--- speculative, batch 1 ---" in profile and "loop.py" in profile
