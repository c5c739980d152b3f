"""`bench.round`: counts that can be made by hand, the parts of a round, and the command."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.round import __main__ as command
from bench.round import batch, counts, parts
from specjax import RunConfig, SpecConfig
from specjax.decode.chunk import Until
from specjax.decode.options import Features
from specjax.drafts.mtp import init_head_params
from specjax.engine.pages import NULL_PAGE
from specjax.engine.runner import Runner
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params, to_decode_layout

SMALL = dense_config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mtp_num_layers=1,
)
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


# --- kernels -------------------------------------------------------------------------------


def test_kernels_of_a_round_are_counted_as_one_counts_them_by_hand():
    # Loops 3 + 1, one library call, a call of two fusions, a small call, the larger branch's two.
    assert counts.round_kernels(PROGRAM) == {"fusion": 3 + 1 + 2 + 2, "custom-call": 1, "call": 1}


def test_a_program_that_was_compiled_here_can_be_counted():
    def program(x, w):
        def body(carry):
            i, x = carry
            return i + 1, jnp.sort(x @ w @ w, axis=-1)

        return jax.lax.while_loop(lambda carry: carry[1].sum() < carry[0], body, (0, x))

    text = jax.jit(program).lower(np.ones((64, 64)), np.ones((64, 64))).compile().as_text()
    counted = counts.round_kernels(text)
    assert counted["sort"] == 1 and 3 <= counted.total() <= 9  # two products and a sum beside it
    with pytest.raises(ValueError, match="a program without one"):
        counts.round_kernels(jax.jit(lambda x: x + 1).lower(1.0).compile().as_text())
    with pytest.raises(ValueError, match="as_text"):
        counts.round_kernels("nothing")


# --- bytes -----------------------------------------------------------------------------------


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
    assert counts.forward_bytes(cfg, params, batch=3, rows=5, context=50) == forward
    module = 4 * (layer + 2 * 8 + 2 * 16 * 16 + 3 * 16)
    drafted = module + 2 * (100 * 16 + 3 * 16 + 3 * 51 * kept)
    assert counts.round_bytes(cfg, params, head, 4, 5, 3, 50) == forward + 4 * drafted
    plain = counts.forward_bytes(cfg, params, 3, 1, 50)
    assert counts.round_bytes(cfg, params, None, 0, 1, 3, 50) == plain


# --- parts -----------------------------------------------------------------------------------


def test_a_full_batch_runs_every_slot_in_pages_of_its_own_and_can_be_filled_again():
    runner = Runner(SMALL.replace(max_position=48), None, 3, 48, chunk_tokens=4, page_size=16)
    runner.set_params(init_params(runner.cfg, 0), None)
    rows = batch.full_row_map(runner)
    table = rows.table
    pages = table[:, :3].ravel().tolist()
    assert len(set(pages)) == 9 and min(pages) > NULL_PAGE and max(pages) < runner.pages
    assert (table[:, 3] == NULL_PAGE).all()
    found = []
    for _ in range(2):
        batch.fill(runner, 20, {"temperature": 0.5})
        result = runner.chunk("off", Features(), runner.alone(rows), Until.of(4)).open()
        assert result.rounds == 4 and result.length[:3].tolist() == [24] * 3
        found.append(result.tokens[:3])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_the_parts_in_order_do_what_a_round_does(backend, monkeypatch):
    """With `gpu` noise is handed from part to part, though a CPU computes all of them."""
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    # The sizes of the run below, whose programs these are.
    cfg = SMALL.replace(max_position=76)
    runner = Runner(cfg, SpecConfig("2x1"), 2, cfg.max_position)
    runner.set_params(init_params(cfg, 0), init_head_params(cfg, 1))
    wanted = command.FEATURES["temperature"]
    made = parts.Parts(runner, *wanted, context=12, emitted=2)
    assert made.draws_ahead == (backend == "gpu")
    _, ahead = made.programs["noise"]()
    assert (ahead is None) == (backend == "cpu")
    by_parts, whole = made.programs["commit"](), made.programs["round"]()
    assert (by_parts.length > 12).all()
    for name in ("tokens", "length", "finish"):
        np.testing.assert_array_equal(getattr(by_parts, name), getattr(whole, name))


@pytest.mark.slow  # a whole bench, of half a minute
def test_bench_round_reports_shares_and_that_noise_is_drawn_once(
    thin_policy, tmp_path, monkeypatch
):
    monkeypatch.setitem(command.SHAPES, "small", SMALL)
    out = tmp_path / "round.json"
    argv = "--shapes small --strategies 2x1 --features temperature --repeats 1 --window 0".split()
    argv += "--batch 2 --context 12 --emitted 2 --max_tokens 6".split()
    argv += ["--model", str(thin_policy), "--out", str(out)]
    command.main(argv)
    result = json.loads(out.read_text())["figures"]
    shares = [result[f"share/small/2x1/temperature/{part}"]["value"] for part in parts.PARTS]
    assert sum(shares) == pytest.approx(1)
    assert result["noise_rows_drawn_twice/policy/2x1"]["value"] == 0
    assert result["noise_rows_per_token/policy/2x1"]["value"] >= 1


def test_shares_are_of_the_sum_and_noise_is_left_out_where_it_says_so():
    ms = {"noise": 10, "draft": 20, "verify": 60, "transform": 2, "accept": 5, "commit": 3}
    times = {name: (float(value), float(value)) for name, value in ms.items()}
    result = command.part_figures("x", times | {"round": (80.0, 90.0)})
    assert result["share/x/verify"]["value"] == pytest.approx(0.6)
    assert result["share_without_noise/x/accept_and_commit"]["value"] == pytest.approx(8 / 90)
    assert result["sum_of_parts/x"]["value"] == pytest.approx(1.25)
