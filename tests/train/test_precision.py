"""float32 is float32 on devices that multiply in less by default: read in what jax lowers.

On CPU nothing depends on it. Every product of a float32 model, in whatever program, must ask for
the highest precision; a new one that does not fails here. Operations may have a form for each
platform, so programs are lowered for GPUs as well, with the attention that runs float32 there.
"""

import collections
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from tiers import slow_but

from specjax import LLM, SamplingParams, SpecConfig
from specjax.command_line import parse_config
from specjax.decode.tree import chain_bits
from specjax.engine.compare import first_difference
from specjax.engine.request import make_jobs
from specjax.engine.settings import EngineConfig
from specjax.kernels import flash_gpu, library, triton
from specjax.models.families.dense import dense_config
from specjax.registry import BACKENDS
from specjax.weights.matrix import precision_of
from tests.kernels import interpreted
from train.plan.programs import Shapes
from train.schema import RLConfig

CFG = dense_config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=16,
)  # fmt: skip
PRODUCT = re.compile(r"stablehlo\.(?:dot_general|convolution|dot)\W.*")
TYPES = re.compile(r"tensor<(?:\d+x)*([a-z]+\d+)>")
# What a run of train.rl has beside the defaults: every kind of program and of attention.
RUNS = {
    "one device": {},
    "everything": {
        "mesh.fsdp": 2, "mesh.tp": 2, "rollout.invariant": True, "rollout.strategy": "2_2_4",
        "algo.kl_loss_coef": 0.1, "algo.updates_per_rollout": 2,
    },
    "rows split over devices": {"mesh.cp": 2},
}  # fmt: skip
PROGRAMS = {"accumulate", "draft", "prefill", "chunk"}


def products(text: str) -> collections.Counter[tuple[str, str]]:
    """Counts products of lowered programs by the factors' dtypes and by their precision."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for product in PRODUCT.findall(text):
        left, right, *_ = TYPES.findall(product)
        precision = re.search(r"precision = \[(\w+), (\w+)\]", product)
        asked = set(precision.groups()) if precision else {"DEFAULT"}
        found["/".join(sorted({left, right})), "/".join(sorted(asked))] += 1
    return found


class ForCuda:
    """A jitted function whose `lower` lowers for NVIDIA GPUs while `done` counts the programs."""

    done: int | None = None

    def __init__(self, jitted):
        self.jitted = jitted

    def __call__(self, *args, **kwargs):
        return self.jitted(*args, **kwargs)

    def lower(self, *args, **kwargs):
        if ForCuda.done is None:  # one that a cache has kept of an earlier test
            return self.jitted.lower(*args, **kwargs)
        ForCuda.done += 1
        return self.jitted.trace(*args, **kwargs).lower(lowering_platforms=("cuda",))

    def __getattr__(self, name):
        return getattr(self.jitted, name)


@pytest.fixture
def for_cuda(monkeypatch):
    """Lowers programs that are jitted within the test for GPUs."""
    jit = jax.jit

    def wrapped(function=None, **named):
        if function is None:
            return lambda function: wrapped(function, **named)
        return ForCuda(jit(function, **named))

    monkeypatch.setattr(jax, "jit", wrapped)
    monkeypatch.setattr(ForCuda, "done", 0)


def lowered(policy: Path, out: Path, **changes) -> dict[str, collections.Counter]:
    """The products of each program of a run of train.rl, by the program's name."""
    asked = {"attention": "reference", "rollout.products": "xla", "steps": 1, **changes}
    cfg, _ = parse_config(RLConfig, tiny_run.arguments(policy, out, **asked))
    shapes = Shapes(cfg, jax.devices()[: cfg.mesh.size])
    moves = "reshard", "convert", "place", "apply"
    every = [program for program in shapes.programs() if program.key[0] not in moves]
    assert {program.key[0] for program in every} >= PROGRAMS
    return {program.name: products(program.lower().as_text()) for program in every}


@pytest.mark.parametrize("name", slow_but(["one device", "everything"], "everything"))
def test_every_product_of_a_float32_run_is_exact(name, tiny_policy, tmp_path):
    for program, found in lowered(tiny_policy, tmp_path, **RUNS[name]).items():
        assert set(found) == {("f32", "HIGHEST")}, f"{program}: {dict(found)}"


@pytest.mark.parametrize("name", slow_but(["everything", "rows split over devices"], "everything"))
def test_every_product_of_a_float32_run_is_exact_on_gpus(name, tiny_policy, tmp_path, for_cuda):
    """XLA multiplies by TF32 there unless the highest precision is asked for."""
    changes = {"attention": "library:xla", **RUNS[name]}
    programs = lowered(tiny_policy, tmp_path, **changes)
    assert ForCuda.done == len(programs)
    for program, found in programs.items():
        assert set(found) == {("f32", "HIGHEST")}, f"{program}: {dict(found)}"


def precisions(jaxpr) -> set[tuple[str, str]]:
    """The dtypes and precisions of all products of a jaxpr, of those inside of kernels too."""
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            dtypes = {str(var.aval.dtype) for var in eqn.invars}
            asked = eqn.params["precision"] or (jax.lax.Precision.DEFAULT,) * 2
            found.add(("/".join(sorted(dtypes)), "/".join({str(each) for each in asked})))
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                found |= precisions(getattr(inner, "jaxpr", inner))
    return found


def _is_jaxpr(x) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def tree_attention_of(attend, dtype: str):
    q, tree, pages = (
        jnp.zeros(s, dtype) for s in ((1, 4, 5, 128), (1, 2, 5, 128), (9, 2, 16, 128))
    )
    given = np.array([20], np.int32), chain_bits(5), np.array([[1, 2, 3, 4]], np.int32)
    return jax.make_jaxpr(attend)(q, tree, tree, pages, pages, *given)


def causal_of(attend, dtype: str):
    """With its gradient, which is traced after the attention itself."""
    q, k = jnp.zeros((1, 4, 128, 128), dtype), jnp.zeros((1, 2, 128, 128), dtype)
    ids = jnp.ones((1, 128), jnp.int32)

    def loss(q, k, v):
        return attend(q, k, v, [], ids).astype(jnp.float32).sum()

    return jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, k)


TREE = BACKENDS.find("tpu:v5e").operations["tree_attention"]
TRITON = functools.partial(triton.tree_attention, tuning=interpreted.TRITON_TUNING, interpret=True)
FLASH = functools.partial(flash_gpu.causal_attention, interpret=True)


@pytest.mark.parametrize(("trace", "attend"), [
    (tree_attention_of, TREE), (causal_of, library.splash_attention), (tree_attention_of, TRITON),
    (causal_of, FLASH),
])  # fmt: skip
def test_kernels_are_exact_in_float32_alone(trace, attend):
    attention = functools.partial(trace, attend)
    with precision_of(CFG):
        assert precisions(attention("float32").jaxpr) == {("float32", "HIGHEST")}
    assert not any("HIGHEST" in asked for _, asked in precisions(attention("bfloat16").jaxpr))


@pytest.fixture
def dumped(tmp_path):
    """A function that returns the products of all programs that were lowered so far."""
    jax.clear_caches()
    folder = tmp_path / "lowered"
    before = jax.config.read("jax_dump_ir_to")
    jax.config.update("jax_dump_ir_to", str(folder))
    yield lambda: {file.name: products(file.read_text()) for file in folder.glob("*.mlir")}
    jax.config.update("jax_dump_ir_to", before)


@pytest.mark.slow
def test_programs_beside_the_engine_are_exact_too(thin_policy, dumped):
    """Those that explain differences, and check distributions."""
    by_xla = EngineConfig(products="xla", attention="reference")
    llm = LLM(str(thin_policy), SpecConfig("1_1_2"), max_batch=1, max_len=32, engine=by_xla)
    runner = llm.engine.runner
    params, prompt = SamplingParams(temperature=0.0, max_tokens=3), [3, 4, 5]
    [job] = make_jobs(prompt, params, ())
    first_difference(runner, job, [9, 5, 1], [9, 6, 2])
    found = {name: counts for name, counts in dumped().items() if counts}
    for program in ("full", "by_rows"):
        assert any(f"jit_{program}" in name or f"jit__{program}" in name for name in found), program
    for name, counts in found.items():
        assert set(counts) == {("f32", "HIGHEST")}, f"{name}: {dict(counts)}"
