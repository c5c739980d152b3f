"""Layers that are alike are traced once."""

import jax
import numpy as np
from tiny import tiny_config

from bench.programs import alone
from specjax.config import SpecConfig
from specjax.decode.chunk import Until
from specjax.decode.options import Features
from specjax.decode.state import RowMap
from specjax.drafts.mtp import init_head_params
from specjax.engine.programs import not_compiled
from specjax.engine.runner import Runner
from specjax.engine.settings import EngineConfig
from specjax.models.layers import Block
from specjax.models.transformer import init_params


def traced_layers(layers: int, monkeypatch) -> int:
    """How often a layer's code runs while a chunk of a model with so many layers is traced."""
    cfg = tiny_config(64)
    cfg = cfg.replace(layers=cfg.layers[:1] * layers)
    config = EngineConfig(attention="reference", products="xla")
    runner = Runner(cfg, SpecConfig("2_1_3"), 2, 64, config=config)
    runner.hold_shapes(
        jax.eval_shape(lambda: init_params(cfg)), jax.eval_shape(lambda: init_head_params(cfg))
    )
    counted, run = [], Block.run

    def build(key, lower, donate):
        with monkeypatch.context() as patch:
            patch.setattr(Block, "run", lambda *given: counted.append(given[0]) or run(*given))
            lower()
        return not_compiled(donate)

    runner.executables.build = build
    table = np.zeros((2, runner.table_width), np.int32)
    rows = RowMap(np.arange(2, dtype=np.int32), np.ones(2, bool), table)
    runner.chunk("2_1_3", Features(), alone(runner, rows), Until.of(2))
    return len(counted)


def test_layers_that_are_alike_are_traced_once_however_many_there_are(monkeypatch):
    assert traced_layers(2, monkeypatch) == traced_layers(7, monkeypatch) <= 8
