"""The kernels for CPUs against their references, to the last bit where they promise that."""

import functools
import logging
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tpu import expected, random_case
from tiny import prompts_of, tiny_config, tiny_model

from bench.programs import change_dense
from specjax import LLM, SamplingParams, SpecConfig
from specjax.decode.tree import chain_bits
from specjax.engine.settings import EngineConfig
from specjax.kernels import cpu
from specjax.kernels.cpu import native
from specjax.kernels.reference import PANEL_WIDTH
from specjax.weights.panels import Panels

pytestmark = pytest.mark.usefixtures("cpu_kernels")

HERE = Path(__file__).parent
# Heads of 16, and widths that are whole panels: all that the kernels can do, they do.
MODEL = change_dense(tiny_config(layers=2), hidden_size=32, head_dim=16, intermediate_size=48)


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


# --- products -------------------------------------------------------------------------------------

SHAPES = dict(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 45),
    k=st.integers(1, 300),
    count=st.integers(1, 21),
)


def compare_products(seed, rows, k, count):
    rng = np.random.default_rng(seed)
    x, weight = normal(rng, rows, k), normal(rng, k, count * PANEL_WIDTH)
    panels = Panels.pack(weight, table=False)
    assert panels.shape == weight.shape
    np.testing.assert_array_equal(panels.unpack(), weight)
    found = panels.dot(x)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    np.testing.assert_allclose(found, exact, atol=1e-6 * k, rtol=1e-5)


@settings(max_examples=6)
@given(**SHAPES)
def test_products_equal_the_reference(**case):
    compare_products(**case)


@pytest.mark.parametrize("shape", [(192, 304), (640, 192), (7, 16)])  # several threads, and one
def test_a_rows_product_is_the_same_bits_beside_any_others(shape):
    rng = np.random.default_rng(0)
    x = normal(rng, 2, 13, shape[0])
    panels = Panels.pack(normal(rng, *shape), table=False)
    whole = panels.dot(x)
    for rows in range(1, 13):
        np.testing.assert_array_equal(panels.dot(x[:, :rows]), whole[:, :rows])
        np.testing.assert_array_equal(panels.dot(x[1:, -rows:]), whole[1:, -rows:])


# --- attention ------------------------------------------------------------------------------------

CASES = dict(
    seed=st.integers(0, 2**16),
    batch=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    rows=st.integers(1, 40),
    before=st.integers(0, 40),
    size=st.sampled_from([16, 24, 64]),
    stretches=st.integers(1, 3),
    head=st.sampled_from([16, 32, 48, 128]),
)


def compare_attention(seed, batch, kv_heads, group, rows, before, size, stretches, head):
    sizes = batch, kv_heads, group, rows, size, stretches
    case = random_case(seed, *sizes, "float32", before=before, head=head)
    wanted, _ = expected(*case, window=None, sinks=None)
    np.testing.assert_allclose(cpu.tree_attention(*case), wanted, atol=1e-5, rtol=1e-5)


@settings(max_examples=5)
@given(**CASES)
def test_attention_equals_the_reference(**case):
    """What lies in a page past its prefix is NaN here, and is never read."""
    compare_attention(**case)


@pytest.mark.parametrize("prefix", [0, 5, 15, 16, 31])
def test_a_row_is_the_same_bits_whether_its_ancestors_are_drafts_or_cached(prefix):
    rng, length, width = np.random.default_rng(prefix), 9, 32
    q, k, v = (normal(rng, 1, heads, length, width) for heads in (6, 2, 2))
    pages = normal(rng, 2, 1, 2, 64, width)
    at = (0, 0, prefix, 0)
    table = np.zeros((1, 1), np.int32)

    def attend(rows, cached, bits):
        """Tree rows `rows`, of which the earlier `cached` ones are in the pages."""
        held = [jax.lax.dynamic_update_slice(p, x[:, :, :cached], at)
                for p, x in zip(pages, (k, v), strict=True)]  # fmt: skip
        own = (x[:, :, cached:rows] for x in (k, v))
        there = np.array([prefix + cached], np.int32)
        return cpu.tree_attention(q[:, :, cached:rows], *own, *held, there, bits, table)

    whole = attend(length, 0, chain_bits(length))
    for row in range(length):
        alone = attend(row + 1, row, chain_bits(1))
        np.testing.assert_array_equal(alone[:, :, 0], whole[:, :, row])


@settings(max_examples=4)
@given(**CASES)
def test_a_row_of_a_tree_is_the_same_bits_alone(
    seed, batch, kv_heads, group, rows, before, size, stretches, head
):
    """Of trees with branches; alone is one row of one slot, with all keys of its tree."""
    sizes = batch, kv_heads, group, rows, size, stretches
    q, k, v, *pages, prefix, bits, table = random_case(
        seed, *sizes, "float32", before=before, head=head
    )
    whole = cpu.tree_attention(q, k, v, *pages, prefix, bits, table)
    rng = np.random.default_rng(seed)
    slot, row = (slice(at, at + 1) for at in rng.integers((batch, rows)))
    alone = cpu.tree_attention(
        q[slot, :, row], k[slot], v[slot], *pages, prefix[slot], bits[slot, row], table[slot]
    )
    np.testing.assert_array_equal(alone, whole[slot, :, row])


def test_scores_far_apart_underflow_to_nothing_and_nan_stays_nan():
    case = list(random_case(0, 1, 1, 1, 2, 16, 1, "float32", [16], head=16))
    case[6] = chain_bits(2)
    found = cpu.tree_attention(case[0] * 1e4, *case[1:])
    assert np.isfinite(found).all()
    page = case[7][0, 0]
    keys, values = (np.concatenate([case[i + 3][page, 0], case[i + 1][0, 0]]) for i in (0, 1))
    scores = keys @ np.asarray(case[0][0, 0]).T
    scores[17, 0] = -np.inf  # the second row of the tree, to the first
    np.testing.assert_allclose(found[0, 0], values[scores.argmax(0)], atol=1e-6)
    assert np.isnan(cpu.tree_attention(case[0] * np.nan, *case[1:])).all()


# --- what is chosen -------------------------------------------------------------------------------


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """A machine on which nothing was built yet, and nothing can be."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.load_soon.cache_clear()
    yield
    native.load_soon.cache_clear()


def llm_of(spec="2_1_3", **engine):
    spec = spec and SpecConfig(spec)
    config = EngineConfig(page_size=16, prefill_chunk=16, **engine)
    return LLM(tiny_model(MODEL), spec, max_batch=2, max_len=64, engine=config)


PROMPTS = prompts_of(3, 64, seed=2, longest=12)
ASKED = SamplingParams(max_tokens=24, temperature=0.9, seed=3, n=2, ignore_eos=True)


def samples_of(llm):
    return [sample for output in llm.generate(PROMPTS, ASKED) for sample in output.samples]


@functools.cache
def without_kernels():
    """An engine that runs none of them, and what it generates."""
    llm = llm_of(None, attention="reference", products="xla")
    return llm, [s.token_ids for s in samples_of(llm)]


def wanted():
    return without_kernels()[1]


def test_engines_on_cpu_run_the_kernels_unless_told_otherwise(caplog):
    caplog.set_level(logging.INFO)
    llm = llm_of()
    assert [s.token_ids for s in samples_of(llm)] == wanted()
    runner = llm.engine.runner
    run = runner.cfg.run
    assert (run.attention, run.products) == ("cpu", "panels")
    assert "attention: specjax's kernel" in caplog.text and "products: panels" in caplog.text
    assert {leaf.ndim for leaf in jax.tree.leaves(runner.weights.head)} == {1, 2, 3}, (
        "the head as well"
    )
    texts = {key[0]: text for key, text in programs(llm).items()}
    assert all(name in texts["chunk"] for name in (native.PANELS, native.LAYERS))
    assert native.LAYERS in texts["prefill"] and native.COMMIT in texts["chunk"]
    assert not any("specjax_" in text for text in programs(without_kernels()[0]).values())


def programs(llm) -> dict:
    return {key: p.as_text() for key, p in llm.engine.runner.executables.by_key.items()}


def test_log_probabilities_are_the_same_bits_with_and_without_speculation():
    """Not close, equal, at this batch size: between the kernels XLA may round otherwise at others
    (`bench.decode kernels`)."""
    plain, drafted = samples_of(llm_of(None)), samples_of(llm_of("2_1_3"))
    tree = samples_of(llm_of("3_2_6"))
    for a, b, c in zip(plain, drafted, tree, strict=True):
        assert a.logprobs == b.logprobs == c.logprobs
    assert sum(s.stats.accepted for s in drafted) > 0


def test_without_a_compiler_xla_runs_and_a_warning_says_so(no_compiler, caplog):
    llm = llm_of()
    run = llm.engine.runner.cfg.run
    assert (run.attention, run.products) == ("reference", "xla")
    loud = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("products: XLA's" in m and "CXX=no-such-compiler" in m for m in loud)
    assert any("attention: XLA reference" in m and "install one" in m for m in loud)
    assert [s.token_ids for s in samples_of(llm)] == wanted()


@pytest.mark.parametrize("asked", [{"attention": "cpu"}, {"products": "panels"}])
def test_a_kernel_that_is_asked_for_and_cannot_be_had_is_an_error(asked, no_compiler):
    with pytest.raises(ValueError, match="no C.. compiler"):
        llm_of(**asked)


# --- building -------------------------------------------------------------------------------------


def test_threads_share_stages_without_races(tmp_path):
    """Under a thread sanitizer where there is one; a plain pool stands in for XLA's."""
    program, compiler = tmp_path / "stages", native._compilers()[0]
    command = [
        compiler, *native.FLAGS[:1], "-O1", "-pthread", f"-I{HERE / 'stand_in'}",
        f"-I{native.SOURCE.parent}", str(HERE / "stages.cc"), "-o", str(program),
    ]  # fmt: skip
    watched = [*command, "-fsanitize=thread"], [program, "1", "0"]  # some kernels refuse to run it
    if any(subprocess.run(part, capture_output=True).returncode for part in watched):
        subprocess.run(command, check=True)
    for threads in (2, 3, 5):
        done = subprocess.run(
            [program, str(threads), "150"], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0 and done.stdout.endswith(", helped, 0 wrong\n"), done
