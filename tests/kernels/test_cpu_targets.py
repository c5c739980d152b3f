"""The kernels for CPUs built for several processors, by several compilers and tunings.

Everything else in `test_cpu*.py` runs on the library that engines use, for this very processor or
for what SPECJAX_CPU_TARGET names.
"""

import platform

import numpy as np
import pytest
import test_cpu
import test_cpu_layers
from cpu_targets import CACHE, TARGETS, built_for
from test_cpu import normal
from test_tpu import random_case

from specjax import shipped
from specjax.decode.tree import chain_bits
from specjax.kernels import cpu
from specjax.kernels.cpu import native
from specjax.weights.panels import Panels, raw

# CI runs these in its step `zen3`.
pytestmark = [pytest.mark.usefixtures("cpu_kernels"), pytest.mark.slow]


@pytest.mark.parametrize("target", TARGETS)
def test_a_row_is_the_same_bits_beside_any_others_for_every_target(target):
    with built_for(target):
        for shape in ((192, 304), (7, 16)):
            test_cpu.test_a_rows_product_is_the_same_bits_beside_any_others(shape)
        for prefix in (5, 16):
            test_cpu.test_a_row_is_the_same_bits_whether_its_ancestors_are_drafts_or_cached(prefix)
        test_cpu.test_a_row_of_a_tree_is_the_same_bits_alone()
        for batch in (1, 3):
            test_cpu_layers.test_a_row_is_the_same_bits_beside_any_others(batch)


@pytest.mark.parametrize("target", TARGETS)
def test_other_processors_compute_the_same_but_for_rounding(target):
    with built_for(target):
        for seed, rows in enumerate((1, 5, 13)):
            test_cpu.compare_products(seed, rows, 70, 9)
            test_cpu.compare_attention(seed, 2, 2, 3, rows, 4, 24, 2, 48)
        test_cpu_layers.compare_layers(0, 2, 5, 3, 2, bias=True, qk_norm=True, by_table=True)


def results(target) -> list:
    """What kernels that are built so compute; the arrays that go in are always the same."""
    rng, found = np.random.default_rng(7), []
    with built_for(target):
        for rows, k, n in ((1, 70, 144), (13, 640, 336)):
            packed = Panels.pack(normal(rng, k, n), table=False)
            found.append(packed.dot(normal(rng, rows, k)))
        for rows in (1, 2, 3, 14):
            case = random_case(rows, 2, 2, 3, rows, 24, 2, "float32", before=4, head=48)
            found.append(cpu.tree_attention(*case))
        found.append(layers_of(rng))
    return [np.asarray(x) for x in found]


def layers_of(rng):
    """One layer with all that a layer can have, for 2 sequences of 5 rows."""
    cfg = test_cpu.MODEL
    mixer, mlp = cfg.layers[0].mixer, cfg.layers[0].mlp
    width, head, hidden = cfg.hidden_size, mixer.head_dim, mlp.intermediate_size
    heads, kv_heads = mixer.num_heads, mixer.num_kv_heads
    qkv = (heads + 2 * kv_heads) * head
    shapes = {
        "qkv_proj": (width, qkv), "o": (heads * head, width),
        "gate_up": (width, 2 * hidden), "down": (hidden, width),
    }  # fmt: skip
    weights = raw({n: Panels.pack(normal(rng, *shape), False) for n, shape in shapes.items()})
    weights |= {
        "input_norm": normal(rng, width), "post_norm": normal(rng, width),
        "qkv_bias": normal(rng, qkv), "qk_norm": normal(rng, heads + kv_heads, head),
    }  # fmt: skip
    x, cos, sin = normal(rng, 2, 5, width), normal(rng, 2, 5, head), normal(rng, 2, 5, head)
    pages = tuple(normal(rng, 2, 2, kv_heads, 32, head))
    out, _ = cpu.layers(cfg, [weights], x, cos, sin, [pages], np.array([9, 32]), chain_bits(5))
    return out


@pytest.mark.parametrize("target", ["znver2", "znver3", "znver4"])
def test_tuning_changes_no_bit(target):
    for ours, theirs in zip(results("x86-64-v3"), results(target), strict=True):
        np.testing.assert_array_equal(theirs, ours)


# --- what the environment asks for ----------------------------------------------------------------


@pytest.fixture
def unloaded(monkeypatch):
    """Nothing is asked for and nothing loaded yet; builds lie beside the others of this file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))
    monkeypatch.delenv(native.TARGET_VARIABLE, raising=False)
    native.load_soon.cache_clear()
    yield monkeypatch
    native.load_soon.cache_clear()


@pytest.fixture
def plain_processor(unloaded, tmp_path):
    """A machine of another processor, which can do little."""

    def start():
        (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu sse sse2 pni ssse3\n")
        unloaded.setattr(shipped, "CPUINFO", tmp_path / "cpuinfo")

    if platform.machine() != "x86_64":
        pytest.skip("the targets are processors of x86")
    return start


def test_what_is_built_for_a_named_target_is_found_on_other_machines(unloaded, plain_processor):
    unloaded.setenv(native.TARGET_VARIABLE, TARGETS["x86-64-v3"])
    unloaded.delenv("CXX", raising=False)
    here, own, tuned = native.build(), native._key(native.NATIVE), native._key([["-mtune=native"]])
    plain_processor()
    unloaded.setattr(native, "is_writable", None)  # the cache may be read only
    assert native._key(native.NATIVE) != own and native._key([["-mtune=native"]]) != tuned
    unloaded.setattr(native, "COMPILERS", ())
    assert native.build() == here
    unloaded.setenv(native.TARGET_VARIABLE, "-march=x86-64-v3 -mtune=no-one-has-built-this")
    with pytest.raises(native.NoKernelError, match="no C.. compiler"):
        native.build()
