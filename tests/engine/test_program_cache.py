"""A second process loads the programs of the first one, and traces what has changed."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys
sys.path.insert(0, {here!r})
from shared import CFG, weights
from specjax import LLM, EngineConfig, SamplingParams
from specjax.models.layers import Block
from specjax.program_cache import Lowering

lowered, lower, run = [], Lowering.__call__, Block.run
Lowering.__call__ = lambda self: lowered.append(self) or lower(self)
if {patched}:
    Block.run = lambda *given, **named: run(*given, **named)
config = EngineConfig(attention="reference", products="xla")
llm = LLM((CFG, *weights()), None, 2, 32, engine=config)
[out] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, seed=0))
print(json.dumps([len(lowered), out.samples[0].token_ids]))
"""


def generate(cache: Path, patched: bool = False) -> tuple[int, list[int]]:
    """The number of programs that a process has lowered, and its tokens."""
    script = SCRIPT.format(here=str(Path(__file__).parent), patched=patched)
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | {"XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_traces_nothing_but_what_has_changed(tmp_path):
    first, tokens = generate(tmp_path)
    assert first > 0
    assert generate(tmp_path) == [0, tokens]
    assert generate(tmp_path, patched=True) == [first, tokens]
    files = [x for x in tmp_path.glob("specjax/*-loaded/*")]
    assert len(files) == 2 * first
    for file in files:
        file.write_bytes(file.read_bytes()[:1000])
    assert generate(tmp_path) == [first, tokens]
