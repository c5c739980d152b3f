"""What a plan reads in the text of a chunk: cycles by part, copies, collectives, bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from chunk_text import CHUNK

from train.plan.copies import Copy, copies
from train.plan.cost import Figures
from train.plan.cycles import part_of
from train.plan.hlo import Module
from train.plan.programs import Program
from train.plan.report import cycles_text


@pytest.fixture(scope="module")
def chunk() -> Module:
    return Module(CHUNK)


def test_a_round_is_the_loop_that_computes_logits_and_not_the_one_over_batches(chunk):
    assert chunk.round == "round"
    assert list(chunk.open_loops(chunk.entry)) == ["drawn", "round", "batch"]


def test_cycles_are_added_up_by_part_with_as_many_layers_as_there_are(chunk):
    assert chunk.turn.cycles == {"layers": 2000, "lm_head": 700, "noise": 40, "rest": 5}
    assert chunk.turn.calls == {"all-reduce": 2}
    assert chunk.turn.received == {"all-reduce": 2 * 2 * 2 * 8 * 128 * 3 / 4}
    assert sum(chunk.cost.cycles.values()) - sum(chunk.turn.cycles.values()) == 300 + 60


def test_a_part_with_a_loop_of_unknown_length_is_marked(chunk):
    assert chunk.turn.once == {"noise"}
    text = cycles_text(chunk.turn.cycles, chunk.turn.once)
    assert text == "layers 0.002M, lm_head 0.0007M, noise 4e-05M+, rest 5e-06M"


def test_a_weight_that_a_fusion_only_views_is_read_whole(chunk):
    weights, cache = 2 * 4096 * 1024, 2 * 2 * 64 * 128 * 128
    # Two layers, the logits, and a prefetch of which the chip's own memory is no traffic.
    assert 4 * weights + 2 * cache < chunk.turn.bytes < 4.1 * weights + 2 * cache


def test_copies_are_named_by_the_argument_that_they_copy_and_prefetches_are_none(chunk):
    weights, cache = 2 * 4096 * 1024, 2 * 2 * 64 * 128 * 128
    assert copies(chunk) == [
        Copy("entry", "params['layers']['q']", "weights", "bf16[4096,1024]", 1, weights),
        Copy("round", "state.memory.pages[0].k", "cache", "bf16[2,64,128,128]", 1, cache),
    ]
    assert copies(chunk, least=weights + 1) == []


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("jit(within)/while/body/while/body/layers/while/body/dot_general", "layers"),
        ("jit(within)/while/body/draft/layers/dot_general", "draft"),
        ("jit(within)/while/body/draft/lm_head/dot_general", "lm_head"),
        ("jit(within)/while/body/draft/commit/while", "commit"),
        ("jit(f)/jvp(layers)/checkpoint/dot_general", "layers"),
        ("jit(f)/transpose(jvp(lm_head))/dot_general", "lm_head"),
        ("jit(within)/noise/noise/scatter", "noise"),
        ("jit(within)/while/body/gather", "rest"),
    ],
)
def test_the_innermost_scope_is_the_part_and_layers_of_the_draft_are_drafts(name, part):
    assert part_of(f'f32[] add(%a, %b), metadata={{op_name="{name}" stack_frame_id=1}}') == part
    assert part_of("f32[] add(%a, %b)") == "rest"


# Lines of chunks for v5e: what is read and written in HBM, in numbers of bytes.
ASYNCHRONOUS = {
    "a slice to the chip": (
        "bf16[8192,4096]{1,0:T(8,128)(2,1)}",
        "((bf16[8192,4096]{1,0:T(8,128)(2,1)}), bf16[2048,4096]{1,0:T(8,128)(2,1)S(1)}, "
        "s32[]{:S(2)}) slice-start(%a), slice={[4096:6144], [0:4096]}",
        2 * 2048 * 4096,
    ),
    "a slice in memory": (
        "bf16[8192,4096]{1,0:T(8,128)(2,1)}",
        "((bf16[8192,4096]{1,0:T(8,128)(2,1)}), bf16[2048,4096]{1,0:T(8,128)(2,1)}, "
        "s32[]{:S(2)}) slice-start(%a), slice={[4096:6144], [0:4096]}",
        2 * 2 * 2048 * 4096,
    ),
    "a slice at an index": (
        "bf16[36,1024,256]{2,1,0:T(8,128)(2,1)}",
        "((bf16[36,1024,256]{2,1,0:T(8,128)(2,1)}, s32[], s32[], s32[]), "
        "bf16[1,1024,256]{2,1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}, u32[]{:S(2)}) "
        "dynamic-slice-start(%a, %i, %i, %i), dynamic_slice_sizes={1,1024,256}",
        2 * 1024 * 256,
    ),
    "a copy to the chip": (
        "f32[2048,4096]{1,0:T(8,128)}",
        "(f32[2048,4096]{1,0:T(8,128)S(1)}, f32[2048,4096]{1,0:T(8,128)}, u32[]{:S(2)}) "
        "copy-start(%a)",
        4 * 2048 * 4096,
    ),
    "a copy from the chip": (
        "f32[2048,4096]{1,0:T(8,128)S(1)}",
        "(f32[2048,4096]{1,0:T(8,128)}, f32[2048,4096]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) "
        "copy-start(%a)",
        4 * 2048 * 4096,
    ),
    "an update in place": (
        "bf16[36,64,128]{2,1,0:T(8,128)(2,1)}",
        "((bf16[36,64,128]{2,1,0:T(8,128)(2,1)}, bf16[1,64,128]{2,1,0:T(8,128)(2,1)S(1)}, s32[], "
        "s32[], s32[]), bf16[36,64,128]{2,1,0:T(8,128)(2,1)}, s32[]{:S(2)}) "
        "dynamic-update-slice-start(%a, %u, %i, %i, %i)",
        2 * 64 * 128,
    ),
}


@pytest.mark.parametrize("case", ASYNCHRONOUS)
def test_of_what_runs_asynchronously_the_bytes_that_move_are_counted_once(case):
    given, line, count = ASYNCHRONOUS[case]
    text = f"""HloModule asynchronous

ENTRY %main (a: bf16[1], i: s32[], u: bf16[1,64,128]) -> bf16[1] {{
  %a = {given} parameter(0)
  %i = s32[] parameter(1)
  %u = bf16[1,64,128]{{2,1,0:T(8,128)(2,1)S(1)}} parameter(2)
  %s = {line}
  ROOT %d = {given} {line.partition("-start(")[0].rpartition(" ")[2]}-done(%s)
}}
"""
    assert Module(text).cost.bytes == count


def test_of_an_array_that_a_fusion_updates_in_place_only_the_update_is_counted():
    """As rows are written to the cache."""
    text = """HloModule scattered

%add (l: bf16[], m: bf16[]) -> bf16[] {
  %l = bf16[] parameter(0)
  ROOT %m = bf16[] parameter(1)
}

%written (kv: bf16[1600,2,128,128], at: s32[8,2], rows: bf16[8,2,128]) -> bf16[1600,2,128,128] {
  %kv = bf16[1600,2,128,128]{3,2,1,0} parameter(0)
  %at = s32[8,2]{1,0} parameter(1)
  %rows = bf16[8,2,128]{2,1,0} parameter(2)
  ROOT %s = bf16[1600,2,128,128]{3,2,1,0} scatter(%kv, %at, %rows), to_apply=%add
}

ENTRY %main (kv: bf16[1600,2,128,128], at: s32[8,2], rows: bf16[8,2,128]) -> bf16[1600,2,128,128] {
  %kv = bf16[1600,2,128,128]{3,2,1,0} parameter(0)
  %at = s32[8,2]{1,0} parameter(1)
  %rows = bf16[8,2,128]{2,1,0} parameter(2)
  ROOT %f = bf16[1600,2,128,128]{3,2,1,0} fusion(%kv, %at, %rows), kind=kCustom, calls=%written
}
"""
    update = 2 * 8 * 2 * 128
    # It is read, and its place in the array read and written.
    assert Module(text).cost.bytes == 3 * update + 4 * 8 * 2
    # The compiler estimates nothing of it.
    assert Module(text).cost.unknown == {"scatter": 1} and not Module(text).cost.cycles


def test_an_asynchronous_call_counts_what_it_calls():
    text = """HloModule wrapped

%copied (p: f32[64,128]) -> f32[64,128] {
  %p = f32[64,128]{1,0} parameter(0)
  ROOT %c = f32[64,128]{0,1} copy(%p), backend_config={"window_config":{"estimated_cycles":"9"}}
}

ENTRY %main (a: f32[64,128]) -> f32[64,128] {
  %a = f32[64,128]{1,0} parameter(0)
  %s = ((f32[64,128]{1,0}), f32[64,128]{0,1}, s32[]) async-start(%a), calls=%copied
  ROOT %d = f32[64,128]{0,1} async-done(%s)
}
"""
    cost = Module(text).cost
    assert cost.bytes == 2 * 4 * 64 * 128 and cost.cycles == {"rest": 9}


def test_scopes_are_found_in_what_xla_makes_for_the_cpu_too():
    """Without estimates of cycles, but with the names that tell a round from other loops."""

    def program(x, w):
        def batch(state):
            def body(x):
                with jax.named_scope("layers"):
                    x = jnp.tanh(x @ w)
                with jax.named_scope("lm_head"):
                    return x + (x @ w).sum()

            return jax.lax.while_loop(lambda x: x.sum() < 100, body, state * 2)

        return jax.lax.while_loop(lambda x: x.sum() < 100, batch, x @ w @ w)

    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))
    module = Module(jax.jit(program).lower(x, w).compile().as_text())
    assert module.turn.flops == 2 * 2 * 8 * 16 * 16 and module.turn.cycles == {}
    inner, outer = module.open_loops(module.entry)
    assert module.round == inner != outer


def test_figures_are_read_back_as_they_were_written(chunk):
    found = Figures("chunk off x 8", "roll out", ("chunk", "off", 8, None), {"cache": 1.0})
    found.cost, found.outside, found.copies = chunk.turn, 360.0, copies(chunk)
    program = Program(found.name, found.part, found.key, lambda: None, {})
    again = Figures.read(program, found.as_json())
    assert dataclasses.replace(again.cost, chains={}) == dataclasses.replace(found.cost, chains={})
    assert (again.outside, again.copies) == (found.outside, found.copies)
