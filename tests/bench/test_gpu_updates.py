"""What `bench.gpu.ahead updates` counts, by the compiler of this machine."""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from bench.gpu.ahead import updates
from bench.gpu.ahead.table import TOOL, updates_table
from bench.gpu.program import Place
from bench.markdown import programs_of, put

ROOT = Path(__file__).resolve().parents[2]
LAYERS, LENGTH, VOCAB = 2, 48, 128  # 48 is no width of the model


def named(*options: str) -> updates.Name:
    name = updates.name_of("135M:1x48:" + ",".join((*options, "float32")))
    return name._replace(shape="tiny")


@functools.cache
def traced(*options: str):
    return updates.traced_of(Place(), named(*options), LAYERS)


def test_a_name_has_a_shape_rows_and_options():
    name = updates.name_of("8B:2x4224:remat=full,attention=library:cudnn")
    assert name[1:] == ("8B", 2, 4224, {"remat": "full", "attention": "library:cudnn"})
    assert name.tokens == 8448
    for wrong in ("8B", "9B:1x4", "8B:4", "8B:1x4:remat=all", "8B:1x4:fast", "8B:1x4:chunk=x"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected"):
            updates.name_of(wrong)


@pytest.mark.parametrize("remat, forward", [(None, 1), ("full", 2), ("save_attention", 1)])
def test_attention_runs_forward_once_per_layer_unless_it_is_recomputed(remat, forward):
    options = ["attention=gpu:flash-interpret"] + ([f"remat={remat}"] if remat else [])
    work = updates.work_of(traced(*options).jaxpr.jaxpr)
    assert work.kernels == {
        "flash_gpu_forward": forward * LAYERS,
        "flash_gpu_keys": LAYERS,
        "flash_gpu_queries": LAYERS,
    }


def test_the_table_in_the_docs_is_made_of_the_file_that_is_committed():
    file = ROOT / "bench/results/gpu/ahead/updates_h100.json"
    result = json.loads(file.read_text(encoding="utf-8"))
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    assert put(page, "updates", updates_table([result]), TOOL) == page
    programs = programs_of(result)
    assert programs.keys() <= set(updates.PAGE)
    for name, values in programs.items():
        assert values["sources"] and not values["pairs"] and not values["logits"], name
    assert all(updates.name_of(text).text == text for text in updates.PAGE)
    assert all((ROOT / path).exists() for path in updates.SOURCES)
    with pytest.raises(ValueError, match="expected one file of updates, got 2"):
        updates_table([result, result])


def test_operations_are_those_of_products_in_loops_too():
    def program(x):
        return jax.lax.scan(lambda x, _: (x @ x, None), x, length=3)[0] @ x[:, :2]

    work = updates.work_of(jax.make_jaxpr(program)(jnp.zeros((4, 4))).jaxpr)
    assert work.operations == 3 * 2 * 4**3 + 2 * 4 * 4 * 2

    def either(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x @ x @ x, x)

    work = updates.work_of(jax.make_jaxpr(either)(jnp.zeros((4, 4))).jaxpr)
    assert work.operations == 2 * 2 * 4**3, "of branches the larger one"


def test_masks_and_logits_of_all_tokens_are_found_where_they_are():
    def found(*options):
        one = traced(*options)
        work = updates.work_of(one.jaxpr.jaxpr)
        made = updates.figures_of(named(*options), VOCAB, one.lower().compile(), work)
        assert made["temporaries"]["value"] > 0
        return bool(made["pairs"]["value"]), bool(made["logits"]["value"])

    assert found("attention=library:xla") == (True, True)
    assert found("attention=gpu:flash-interpret", "chunk=16") == (False, False)
