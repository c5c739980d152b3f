"""What a recomputed layer keeps: `remat_policy` of `RunConfig`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.config import RunConfig
from specjax.models.families.dense import dense_config
from specjax.models.transformer import graphdef, init_params
from specjax.parallel.sharding import rows_sharding

LENGTH = 128  # the smallest block of splash attention


def model(policy: str, scan: bool, remat=True, attention="tests.kernels.interpreted:TPU"):
    return dense_config(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=48,
        run=RunConfig(scan_layers=scan, remat=remat, remat_policy=policy, attention=attention),
    )


def rows():
    tokens = np.random.default_rng(0).integers(1, 64, (1, LENGTH)).astype(np.int32)
    segments = np.repeat([1, 2, 0], [70, 50, 8]).astype(np.int32)[None]
    return tokens, segments


def gradients(cfg, context=None):
    """Returns a function of parameters that gives the gradients of a loss, and its parameters."""
    tokens, segments = rows()
    positions = np.arange(LENGTH, dtype=np.int32)[None]
    given = tokens, positions, segments
    if context is not None:
        given = tuple(
            jax.device_put(context.permute(x), rows_sharding(context.mesh)) for x in given
        )

    def loss(params):
        x = nnx.merge(graphdef(cfg), params).hidden(*given, context).x
        return (jnp.sin(x) * (given[2] > 0)[..., None]).sum()

    return jax.grad(loss), init_params(cfg)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("policy", ["save_attention", "full"])
def test_attention_runs_forward_again_unless_its_output_is_kept(policy, scan):
    program, params = gradients(model(policy, scan))
    lines = jax.jit(program).lower(params).compile().as_text().splitlines()
    of_kernel = [line for line in lines if "splash_mha_fwd" in line]
    again = [line for line in of_kernel if "rematted_computation" in line]
    assert of_kernel and bool(again) == (policy == "full")


def test_gradients_are_the_same_whatever_is_kept():
    found = []
    for remat, policy in ((False, "full"), (True, "full"), (True, "save_attention")):
        program, params = gradients(model(policy, True, remat))
        found.append(jax.jit(program)(params))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(found[0]["layers"]))
    for other in found[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found[0], other
        )
