"""`train.plan.windows` reads the windows of sums from texts as the TPU compiler writes them."""

import pytest

from train.plan import windows
from train.plan.hlo import Module

# Of chunks of Qwen3-8B on four chips, with what does not matter left out: rows, matrix, result,
# labels, the bounds of a window in the matrix, and the number of windows.
OFF_8_GATE = ("[8,4096]{1,0}", "[4096,3072]{1,0:T(8,128)(2,1)}", "bf_io->bf", "64,24", "1,1,8")
OFF_8_Q = (
    "[8,4096,1]{1,0,2}", "[8,128,4096]{2,1,0:T(8,128)(2,1)}", "bf0_0oi->b0f", "8,16,16",
    "1,1,1,1,2",
)  # fmt: skip
OFF_8_HEAD = ("[8,4096]{1,0}", "[4096,37984]{1,0:T(8,128)(2,1)}", "bf_io->bf", "256,9", "33,1,2")
TREE_8_HEAD = (
    "[8,5,4096]{2,0,1}", "[4096,37984,1]{0,1,2:T(8,128)(2,1)}", "b0f_io0->b0f", "1,432,4",
    "11,1,1,1,8",
)  # fmt: skip
TREE_64_DOWN = (
    "[64,5,3072]{2,0,1}", "[3072,4096,1]{0,1,2:T(8,128)(2,1)}", "b0f_io0->b0f", "1,256,6",
    "2,1,1,1,4",
)  # fmt: skip


def fusion(name: str, number: int, rows, matrix, labels, bounds, loops) -> tuple[str, str]:
    """The computation of a product, and the operation that calls it."""
    scope = f'metadata={{op_name="jit(within)/while/body/{name}/dot_general"}}'
    result = "1,1,1,1"[: 2 * len(labels.partition("->")[2]) - 1]
    computation = f"""
%fused.{number} (p0: bf16[8], p1: bf16[8]) -> bf16[8] {{
  %p0 = bf16{rows} parameter(0)
  %p1 = bf16{matrix} parameter(1)
  ROOT %c = bf16[{result}] convolution(%p0, %p1), dim_labels={labels}, {scope}
}}"""
    quoted = [",".join(f'"{n}"' for n in text.split(",")) for text in (bounds, loops)]
    call = (
        f"  %f.{number} = bf16[8] fusion(%a, %b), kind=kOutput, calls=%fused.{number}, {scope}, "
        f'backend_config={{"window_config":{{"kernel_window_bounds":[{quoted[0]}],'
        f'"estimated_cycles":"9","iteration_bounds":[{quoted[1]}]}}}}'
    )
    return computation, call


def found(layers: dict, rest: dict, repeats: int = 36) -> windows.Windows:
    """What is read of a program whose round scans over layers."""
    made = [fusion(f"layers/while/body/closed_call/{n}", i, *p) for i, (n, p) in enumerate(layers)]
    outside = [fusion(name, 50 + i, *p) for i, (name, p) in enumerate(rest)]
    trips = f'backend_config={{"known_trip_count":{{"n":"{repeats}"}}}}'
    text = [
        "HloModule chunk",
        *(computation for computation, _ in made + outside),
        "%layers (x: (bf16[8])) -> (bf16[8]) {",
        *(call for _, call in made),
        "}",
        "%round (x: (bf16[8])) -> (bf16[8]) {",
        f"  %w = (bf16[8]) while(%x), condition=%c, body=%layers, {trips}",
        *(call for _, call in outside),
        "}",
        "%c (x: (bf16[8])) -> pred[] {",
        "  ROOT %more = pred[] parameter(0)",
        "}",
        "ENTRY %main (x: (bf16[8])) -> (bf16[8]) {",
        "  %loop = (bf16[8]) while(%x), condition=%c, body=%round",
        "}",
    ]
    return windows.products(Module("\n".join(text)))


OFF = found(
    [("q", OFF_8_Q), ("gate", OFF_8_GATE), ("cond/branch_0_fun", OFF_8_GATE)],
    [("lm_head", OFF_8_HEAD), ("draft/lm_head", TREE_8_HEAD), ("draft/layers/q", OFF_8_Q)],
)
TREE = found(
    [("q", OFF_8_Q), ("gate", OFF_8_GATE), ("down", TREE_64_DOWN)], [("lm_head", TREE_8_HEAD)]
)


def test_windows_are_those_of_the_contracted_dimension_in_any_layout():
    """Where there is no scope, as with a mixer of the user's own, the shape is the name."""
    assert OFF == {
        "q": {"2x2048": 36}, "gate": {"8x512": 36}, "4096x3072": {"8x512": 36},
        "lm_head": {"2x2048": 1},
    }  # fmt: skip
    assert TREE["down"] == {"4x768": 36} and TREE["lm_head"] == {"8x512": 1}


def test_one_window_is_the_whole_dimension_and_a_wrong_size_is_not_made_up():
    whole = (*OFF_8_GATE[:3], "512,12", "2,1,1")
    odd = (*OFF_8_GATE[:3], "99,24", "1,1,8")
    assert found([("up", whole), ("gate", odd)], [("lm_head", OFF_8_HEAD)], 4) == {
        "up": {"1x4096": 4}, "gate": {"8x?": 4}, "lm_head": {"2x2048": 1},
    }  # fmt: skip


def test_a_fusion_of_two_products_has_the_windows_of_the_last():
    inner, _ = fusion("layers/up", 1, *OFF_8_GATE)
    outer, call = fusion("layers/down", 2, *OFF_8_GATE)
    outer = outer.replace(
        "  ROOT", "  %u = bf16[8] fusion(%p0), kind=kOutput, calls=%fused.1\n  ROOT"
    )
    entry = "ENTRY %main (x: bf16[8]) -> bf16[8] {"
    text = "\n".join(["HloModule two", inner, outer, entry, call, "}"])
    assert windows.products(Module(text)) == {"up": {windows.INSIDE: 1}, "down": {"8x512": 1}}


def test_a_product_that_became_a_sum_is_named_as_one():
    scope = 'metadata={op_name="jit(within)/while/body/lm_head/dot_general"}'
    text = f"""
HloModule one
%fused (p0: bf16[4096,3072]) -> bf16[3072] {{
  %p0 = bf16[4096,3072]{{1,0}} parameter(0)
  ROOT %r = bf16[3072] reduce(%p0, %zero), dimensions={{0}}, to_apply=%add, {scope}
}}
ENTRY %main (x: bf16[4096,3072]) -> bf16[3072] {{
  ROOT %f = bf16[3072] fusion(%x), kind=kLoop, calls=%fused, backend_config={{"window_config":{{}}}}
}}"""
    assert windows.products(Module(text)) == {"lm_head": {windows.SUM: 1}}
    assert windows.products(Module(text.replace("window_config", "other"))) == {}


def test_what_differs_between_chunks_is_said_by_product():
    said = list(windows.lines({"off x 8": OFF, "off x 64": OFF}, "bfloat16"))
    assert len(said) == 1
    assert said[0].startswith("bfloat16: 4 of 4 products sum in the same windows in all of off x 8")
    assert "no proof" in said[0]
    both = {"off x 8": {**OFF, "down": {"6x512": 36}}, "4_1_5 x 8": TREE}
    both["off x 8"].pop("4096x3072")
    first, *apart = windows.lines(both, "bfloat16")
    assert first.startswith("bfloat16: 2 of 4 products")
    assert apart == [
        "    lm_head: 2x2048 in off x 8; 8x512 in 4_1_5 x 8",
        "    down: 6x512 in off x 8; 4x768 in 4_1_5 x 8",
    ]


@pytest.mark.parametrize("chunks", [{}, {"off x 8": OFF}, {"off x 8": {}, "4_1_5 x 8": TREE}])
def test_nothing_is_said_where_there_is_nothing_to_compare(chunks):
    assert list(windows.lines(chunks, "bfloat16")) == []
