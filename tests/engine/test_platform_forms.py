"""What a TPU or GPU computes in another way than a CPU gives the same tokens, run on a CPU."""

import contextlib
import functools

import jax
import numpy as np
import pytest
from engines import engine_of, jobs_of, plain
from shared import CFG

from specjax import SamplingParams
from specjax.engine.engine import Engine


@contextlib.contextmanager
def forms_of(platform: str):
    """Yields the names of a platform's functions that programs are traced with from here on.

    A name is missing where a trace that was made before is used again.
    """
    names = set()

    def of_platform(*arguments, default=None, **platforms):
        form = platforms.get(platform, default)
        names.add(getattr(form, "func", form).__name__)
        return form(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "platform_dependent", of_platform)
        yield names


def jobs(**options):
    """A greedy sequence and three sampled ones."""
    rng, found = np.random.default_rng(3), []
    for temperature in (0.0, 0.7, 1.0, 1.0):
        how = SamplingParams(
            temperature=temperature, max_tokens=24, seed=7, ignore_eos=True, **options
        )
        found += jobs_of(rng.integers(0, 60, 11).tolist(), how, request=len(found))
    return found


def tokens_of(engine: Engine, jobs) -> list[list[int]]:
    return [sample.token_ids for sample in engine.generate(jobs)[0]]


# TPUs multiply by arrays; `auto` would give a CPU's weights a form of their own.
made = functools.partial(engine_of, page_size=16, products="xla")
filtered = functools.partial(jobs, top_p=0.9, top_k=40)
# Of a TPU: layers, layouts, choices and thresholds, and noise.
EVERYWHERE = {"optimization_barrier", "fixed", "argmax_of_keys"}
THRESHOLDS = {"digits_side_by_side"}
NOISE = {"one_by_one"}


@pytest.mark.parametrize("spec, alone, scan, expected", [
    pytest.param(None, True, False, {"_padded", "pinned"}, marks=pytest.mark.slow),
    pytest.param("3_1_4", True, False, {"_padded", "pinned"} | NOISE, marks=pytest.mark.slow),
    pytest.param("3_2_6", False, False, {"pinned", "selected"} | NOISE, marks=pytest.mark.slow),
    ("2x2", False, True, {"selected"} | NOISE),
])  # fmt: skip
def test_the_forms_of_a_tpu_give_the_tokens_of_a_cpu(spec, alone, scan, expected):
    """Of plain decoding, a chain, a dynamic tree and a static one; over pages that rows cross; by
    one row for one of four slots as well; in layers that are unrolled or scanned."""
    wanted = tokens_of(plain(), filtered())
    engine = made(spec, cfg=CFG.running(scan_layers=scan))
    with forms_of("tpu") as forms:
        if alone:
            assert tokens_of(engine, filtered()[3:]) == wanted[3:]
        assert tokens_of(engine, filtered()) == wanted
    programs = {key[2] for key in engine.runner.executables.by_key if key[0] == "chunk"}
    assert programs == ({1, 4} if alone else {4})
    assert forms >= EVERYWHERE | THRESHOLDS | expected


@pytest.mark.parametrize("spec, expected", [
    (None, set()),
    pytest.param("3_1_4", {"at_once"}, marks=pytest.mark.slow),
    pytest.param("3_2_6", {"at_once", "gathered"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_forms_of_a_gpu_give_the_tokens_of_a_cpu(spec, expected):
    """Of plain decoding, a chain and a dynamic tree."""
    wanted = tokens_of(plain(), filtered())
    engine = made(spec)
    with forms_of("cuda") as forms:
        assert tokens_of(engine, filtered()) == wanted
    assert forms >= {"digits_by_one_reduction"} | expected
