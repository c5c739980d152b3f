"""Logits in blocks have the values and gradients of all logits at once, also split over devices."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from specjax.config import SamplingParams
from specjax.models.families.dense import dense_config
from specjax.models.transformer import embed_tokens, init_params
from specjax.parallel import sharding
from specjax.parallel.context import context_of
from specjax.parallel.sharding import MeshConfig, make_mesh
from train import logits
from train.algo import algo
from train.heads import DraftConfig, frozen_policy_parts, head_loss, head_of
from train.logits import LOGITS, Cut, Head
from train.logprobs import Transforms, processed_state_logprobs, state_logprobs
from train.loss import count_denominators, rl_loss, sft_loss
from train.optim import OptimConfig
from train.packing import Sample, pack
from train.policy import PolicyTrainer
from train.registry import OBJECTIVES

ROWS, LENGTH, VOCAB, WIDTH = 4, 32, 40, 16
UNEVEN = np.float32(1.2539)  # a weight that bfloat16 does not have: it has 1.25 and 1.2578
needs_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
MESHES = {
    "none": {},
    "data-tp": {"data": 2, "tp": 2},
    "fsdp-tp": {"fsdp": 4, "tp": 2},
    "fsdp-cp-tp": {"fsdp": 2, "cp": 2, "tp": 2},
    "contiguous": {"data": 2, "cp": 4, "cp_order": "contiguous"},
}
LAYOUTS = [pytest.param(MESHES[name], id=name, marks=needs_devices) for name in MESHES]


def layouts(*often):
    """All layouts; those that are not named are slow."""
    return [
        pytest.param(
            MESHES[name],
            id=name,
            marks=[needs_devices, *([] if name in often else [pytest.mark.slow])],
        )
        for name in MESHES
    ]


AXES = {"embed": ("vocab", "embed"), "lm_head": ("embed", "vocab")}


def config(tied):
    return dense_config(
        VOCAB, WIDTH, 24, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8,
        tie_embeddings=tied, mtp_num_layers=1,
    )  # fmt: skip


@functools.cache
def packed():
    """Rows of several samples, with all that a loss reads."""
    rng = np.random.default_rng(0)
    samples = [
        Sample(
            i,
            rng.integers(0, VOCAB, 3).tolist(),
            rng.integers(0, VOCAB, n := int(rng.integers(4, 12))).tolist(),
            behaviour_logprobs=(-rng.random(n) * 3).tolist(),
            advantage=float(rng.normal()),
        )
        for i in range(9)
    ]
    [batch] = pack(samples, LENGTH, ROWS, 1)
    for name in ("old_logprobs", "ref_logprobs"):
        noise = rng.normal(0, 0.3, (ROWS, LENGTH)).astype("f4")
        batch[name] = (batch["behaviour_logprobs"] + noise) * batch["loss_mask"]
    assert batch["segment_ids"].max() > 1
    return batch


@functools.cache
def arrays():
    rng = np.random.default_rng(1)
    normed = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype("f4")
    return normed, rng.normal(size=(WIDTH, VOCAB)).astype("f4")


def placed(axes):
    """(mesh, context, function that moves rows to the mesh) of mesh axes."""
    layout = MeshConfig(**axes)
    mesh = make_mesh(layout)
    context = context_of(layout, mesh)

    def rows(tree):
        if mesh is None:
            return jax.device_put(tree)
        if context is not None:
            tree = jax.tree.map(context.permute, tree)
        return jax.device_put(tree, sharding.rows_sharding(mesh))

    return mesh, context, rows


def weights(mesh, tree):
    return (
        tree if mesh is None else jax.device_put(tree, sharding.param_shardings(mesh, tree, AXES))
    )


def restored(context, rows):
    return np.asarray(rows) if context is None else context.restore(np.asarray(rows))


@pytest.mark.parametrize("axes", LAYOUTS)
@pytest.mark.parametrize(("name", "chunk"), [("lm_head", 5), ("embed", 13)])
def test_scores_in_blocks_of_the_vocabulary_and_their_gradients(axes, name, chunk):
    mesh, context, rows = placed(axes)
    normed, matrix = arrays()
    matrix = matrix.T if name == "embed" else matrix

    def scored(given, matrix, batch, mesh, context, chunk):
        head = Head.of(mesh, AXES[name], matrix, (ROWS, LENGTH), chunk)
        assert head.is_whole == (chunk is None)

        def loss(normed, matrix):
            found = state_logprobs(
                head, normed, matrix, batch["tokens"], batch["segment_ids"], 0.7, context
            )
            return jnp.sum(jnp.cos(found[0]) * batch["loss_mask"]) + found[1].sum(), found

        return jax.grad(loss, (0, 1), has_aux=True)(given, matrix)

    run = jax.jit(scored, static_argnums=(3, 4, 5))
    (d_normed, d_matrix), found = run(normed, matrix, packed(), None, None, None)
    given = rows((normed, packed()))
    in_blocks = run(given[0], weights(mesh, {name: matrix})[name], given[1], mesh, context, chunk)
    (d_normed_b, d_matrix_b), found_b = in_blocks
    for a, b in zip((d_normed, *found), (d_normed_b, *found_b), strict=True):
        np.testing.assert_allclose(a, restored(context, b), rtol=2e-5, atol=4e-5)
    np.testing.assert_allclose(d_matrix, d_matrix_b, rtol=2e-5, atol=4e-5)
    if mesh is not None:
        stored = weights(mesh, {name: matrix})[name].sharding
        assert d_matrix_b.sharding.is_equivalent_to(stored, 2)


def test_a_block_of_the_vocabulary_is_never_larger_than_asked_for():
    normed, matrix = arrays()
    head = Head.of(None, AXES["lm_head"], matrix, (ROWS, LENGTH), 13)
    program = jax.jit(
        jax.grad(lambda *a: state_logprobs(head, *a, *2 * [packed()["segment_ids"]])[0].sum())
    )
    sizes = [
        np.prod(aval.shape)
        for aval in _values(jax.make_jaxpr(program)(normed, matrix).jaxpr)
        if aval.shape[-1:] != (WIDTH,)
    ]
    assert max(sizes) <= max(13 * VOCAB, WIDTH * VOCAB) < ROWS * LENGTH * VOCAB


def _values(jaxpr):
    """The shapes of all intermediate values of a program."""
    for equation in jaxpr.eqns:
        yield from (v.aval for v in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from _values(getattr(inner, "jaxpr", inner))


CASES = {
    "filters": {"temperature": 0.7, "top_k": 6, "top_p": 0.8, "logit_bias": {2: 1.5}},
    "penalties": {"presence_penalty": 0.3, "repetition_penalty": 1.4, "min_p": 0.05},
}


@pytest.mark.parametrize("axes", layouts("none", "fsdp-cp-tp"))
@pytest.mark.parametrize(("case", "chunk"), [("filters", 9), ("penalties", 3)])
def test_scores_after_all_transforms_in_blocks_of_tokens(axes, case, chunk):
    if case == "penalties" and "cp" in axes:
        pytest.skip("such a run is refused")
    mesh, context, rows = placed(axes)
    normed, matrix = arrays()
    transforms = Transforms.of(SamplingParams(**CASES[case], max_tokens=9), (3, 4), VOCAB)

    def scored(given, matrix, batch, mesh, context, chunk):
        head = Head.of(mesh, AXES["lm_head"], matrix, (ROWS, LENGTH), chunk)

        def loss(normed, matrix):
            found = processed_state_logprobs(head, normed, matrix, batch, transforms, context)
            return jnp.sum(jnp.cos(found[0]) * batch["loss_mask"]), found

        return jax.grad(loss, (0, 1), has_aux=True)(given, matrix)

    run = jax.jit(scored, static_argnums=(3, 4, 5))
    (d_normed, d_matrix), found = run(normed, matrix, packed(), None, None, None)
    given = rows((normed, packed()))
    matrix = weights(mesh, {"lm_head": matrix})["lm_head"]
    (d_normed_b, d_matrix_b), found_b = run(given[0], matrix, given[1], mesh, context, chunk)
    for a, b in zip((d_normed, *found), (d_normed_b, *found_b), strict=True):
        np.testing.assert_allclose(a, restored(context, b), rtol=2e-5, atol=4e-5)
    np.testing.assert_allclose(d_matrix, d_matrix_b, rtol=2e-5, atol=4e-5)


@pytest.mark.parametrize("axes", [*LAYOUTS[:1], *LAYOUTS[2:4]])
@pytest.mark.parametrize(
    ("loss", "chunk"), [("ce", 11), pytest.param("kl", 5, marks=pytest.mark.slow), ("tv_e2e", 9)]
)
def test_losses_of_the_head_over_several_steps_in_blocks_of_tokens(axes, loss, chunk):
    cfg, settings = config(tied=False), DraftConfig(loss=loss, unroll_steps=3, step_decay=0.8)
    mesh, context, rows = placed(axes)
    policy = frozen_policy_parts(init_params(cfg, 0))
    policy["lm_head"] = 20 * policy["lm_head"]
    head, (states, _) = head_of(cfg).init(1), arrays()

    def run(given, policy, batch, mesh, context, chunk):
        def value(head):
            more = context, None, mesh, chunk
            with sharding.ambient(mesh):
                return head_loss(cfg, settings, 0.9, head, policy, batch, given, *more)

        return jax.value_and_grad(value, has_aux=True)(head)

    run = jax.jit(run, static_argnums=(3, 4, 5))
    whole = run(states, policy, packed(), None, None, None)
    given = rows((states, packed()))
    blocks = run(given[0], weights(mesh, policy), given[1], mesh, context, chunk)
    for a, b in zip(*map(jax.tree.leaves, (whole, blocks)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def assert_equal_but_for_rounding(found, wanted, summed=2**-10):
    """Asserts that arrays differ by roundings to bfloat16, and by no common factor.

    Args:
      summed: largest difference relative to the largest number: of sums of rounded numbers.
    """
    found, wanted = np.asarray(found, "f8"), np.asarray(wanted, "f8")
    np.testing.assert_allclose(found, wanted, rtol=2**-6, atol=summed * np.abs(wanted).max())
    factor = np.sum(found * wanted) / np.sum(wanted * wanted)
    np.testing.assert_allclose(factor, 1, atol=1e-3)


def lost_in_bfloat16(number):
    """The share of a number that rounding it to bfloat16 changes."""
    return np.abs(np.asarray(jnp.asarray(number, "bfloat16"), "f8") / number - 1)


def gradients_of_scores(scores, chunk):
    """The program of the gradients of bfloat16 states and of the matrix, and its inputs."""
    normed, matrix = arrays()
    batch = packed()
    transforms = Transforms.of(SamplingParams(**CASES["filters"], max_tokens=9), (3, 4), VOCAB)
    head = Head.of(None, AXES["lm_head"], matrix, (ROWS, LENGTH), chunk)

    def loss(normed, matrix):
        if scores == "processed":
            found, *_ = processed_state_logprobs(head, normed, matrix, batch, transforms)
        else:
            found, _ = state_logprobs(
                head, normed, matrix, batch["tokens"], batch["segment_ids"], 0.7
            )
        return UNEVEN * jnp.sum(found * batch["loss_mask"])

    return jax.jit(jax.grad(loss, (0, 1))), (jnp.bfloat16(normed), matrix)


@pytest.mark.parametrize("scores", ["temperature", "processed"])
@pytest.mark.parametrize("form", ["everywhere", "of GPUs"])
def test_gradients_of_scores_of_bfloat16_states_are_the_same_in_blocks(scores, form, monkeypatch):
    program, given = gradients_of_scores(scores, None)
    whole = program(*given)
    if form == "of GPUs":
        rounded = logits._rounded
        monkeypatch.setattr(
            logits, "_gradient", lambda a, b, *dims: rounded((*dims, ((), ()))[:2], a, b)
        )
    program, given = gradients_of_scores(scores, 5)
    d_normed, d_matrix = blocks = program(*given)
    assert (d_normed.dtype, d_matrix.dtype) == (jnp.bfloat16, jnp.float32)
    for found, wanted in zip(blocks, whole, strict=True):
        assert_equal_but_for_rounding(found, wanted, 2**-7 if form == "of GPUs" else 2**-10)


@pytest.mark.parametrize("scores", ["temperature", "processed"])
def test_gpus_multiply_gradients_of_logits_in_bfloat16(scores):
    program, given = gradients_of_scores(scores, 5)

    def products(platform):
        text = program.trace(*given).lower(lowering_platforms=(platform,)).as_text()
        lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        types = [re.findall(r"tensor<[\dx]*x(\w+)>", line.split(" : ")[-1]) for line in lines]
        return {tuple(found) for found in types}

    assert products("cuda") == {("bf16", "bf16", "f32")}
    assert {"f32"} in [set(found) for found in products("cpu")]


def gradients_of_outputs(settings, batch, chunk, weight):
    """The gradients of a weighted loss for the states that a head returns, in bfloat16; sums."""
    cfg, rng = config(tied=False), np.random.default_rng(3)
    source = SimpleNamespace(
        needs=SimpleNamespace(taps=("post_norm",)),
        unroll=lambda outputs, *_: outputs,
        head=lambda outputs: None,
    )
    states, *outputs = (
        jnp.bfloat16(rng.normal(size=(ROWS, LENGTH, WIDTH)))
        for _ in range(1 + settings.unroll_steps)
    )
    policy = frozen_policy_parts(init_params(cfg, 0))
    policy["lm_head"] = 20 * policy["lm_head"]

    def loss(outputs):
        value, sums = head_loss(
            cfg, settings, 0.9, outputs, policy, batch, states, source=source, chunk=chunk
        )
        return weight * value, sums

    return jax.jit(jax.grad(loss, has_aux=True))(outputs)


@pytest.mark.parametrize("loss", ["ce", "kl", "tv_e2e"])
def test_gradients_of_the_head_s_bfloat16_states_are_the_same_in_blocks(loss):
    settings = DraftConfig(loss=loss, unroll_steps=3, step_decay=0.8)
    _, sums = gradients_of_outputs(settings, packed(), 5, 1.0)
    factors = 0.8 ** np.arange(3) / (1 + 0.8 + 0.64) / np.asarray(sums["mtp_tokens"])
    weight = UNEVEN / factors[0]
    assert lost_in_bfloat16(weight * factors[0]) > 3e-3
    blocks, _ = gradients_of_outputs(settings, packed(), 5, weight)
    whole, _ = gradients_of_outputs(settings, packed(), None, weight)
    for found, wanted in zip(blocks, whole, strict=True):
        assert found.dtype == jnp.bfloat16
        assert_equal_but_for_rounding(found, wanted)


def test_a_weight_of_the_head_s_loss_is_not_rounded_to_bfloat16():
    inside = np.broadcast_to(np.arange(LENGTH) < 18, (ROWS, LENGTH)).astype("i4")
    batch = packed() | {"segment_ids": inside, "loss_mask": inside.astype("f4")}
    [one], sums = gradients_of_outputs(DraftConfig(), batch, 5, 1.0)
    assert sums["mtp_tokens"].tolist() == [64]  # by which a gradient is divided exactly
    [weighted], _ = gradients_of_outputs(DraftConfig(), batch, 5, UNEVEN)
    np.testing.assert_array_equal(weighted, (one.astype("f4") * UNEVEN).astype("bfloat16"))
    assert np.any(np.asarray(weighted != one))


@pytest.mark.parametrize("axes", LAYOUTS[1:4])
def test_blocks_join_to_what_was_cut_and_windows_go_on_in_the_row(axes):
    mesh, context, rows = placed(axes)
    normed, matrix = arrays()
    head = Head.of(mesh, AXES["lm_head"], matrix, (ROWS, LENGTH), 13)
    cut = Cut.of(head, (ROWS, LENGTH), context)
    assert cut.blocks > 1 and cut.blocks * cut.size != cut.piece
    x = np.arange(1, ROWS * LENGTH + 1).reshape(ROWS, LENGTH)
    later = [np.pad(x, ((0, 0), (0, k)))[:, k:] for k in (1, 2)]
    here, *later = rows((x, *later))
    np.testing.assert_array_equal(cut.joined(cut.cut(here)), here)
    windows = np.asarray(cut.windows(here, later))
    for k, want in enumerate(later, 1):
        np.testing.assert_array_equal(cut.joined(windows[:, :, k : k + cut.size]), want)


@pytest.mark.parametrize("objective", [*OBJECTIVES.names, "sft"])
def test_gradients_of_every_objective_are_the_same_in_blocks(objective):
    cfg, batch = config(tied=objective == "sft"), packed()
    loss = sft_loss if objective == "sft" else rl_loss(algo(objective, kl_loss_coef=0.1, tis=True))
    params = init_params(cfg, 0)
    params["embed"] = 5 * params["embed"]
    found = []
    for chunk in (None, 7):
        trainer = PolicyTrainer(cfg, loss, OptimConfig().build(), temperature=0.8, chunk=chunk)
        zeros = jax.tree.map(jnp.zeros_like, params)
        run = trainer.programs["accumulate"]
        found.append(run(params, zeros, trainer.place(batch), count_denominators([batch])))
    whole, blocks = found
    assert all(np.any(np.asarray(a)) for a in jax.tree.leaves(whole[0]))
    for a, b in zip(*map(jax.tree.leaves, (whole, blocks)), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize(
    ("axes", "tied"),
    [
        pytest.param(MESHES["fsdp-cp-tp"], False, marks=needs_devices),
        pytest.param(MESHES["fsdp-tp"], True, marks=needs_devices),
    ],
)
def test_a_micro_batch_on_a_mesh_has_the_gradients_of_one_device(axes, tied):
    cfg, batch = config(tied), packed()
    mesh, context, _ = placed(axes)
    params = init_params(cfg, 0)
    loss, denominators = rl_loss(algo()), count_denominators([batch])

    def gradients(mesh, context, chunk):
        trainer = PolicyTrainer(
            cfg, loss, OptimConfig().build(), mesh, context=context, chunk=chunk
        )
        here, zeros = params, jax.tree.map(jnp.zeros_like, params)
        if mesh is not None:
            where = sharding.param_shardings(mesh, params, trainer.axes)
            here, zeros = jax.device_put((params, zeros), (where, where))
        run = trainer.programs["accumulate"]
        found, _, sums = run(here, zeros, trainer.place(batch), denominators)
        return found, sums

    one = gradients(None, None, None)
    for chunk in (None, 5):
        split = gradients(mesh, context, chunk)
        for a, b in zip(*map(jax.tree.leaves, (one, split)), strict=True):
            np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("axes", LAYOUTS[1:4])
def test_embeddings_of_a_matrix_that_is_split_have_its_bits_and_its_gradient(axes):
    """In bfloat16: the row of a cast is the cast of a row; the gradient is summed in float32."""
    mesh, _, rows = placed({name: size for name, size in axes.items() if name != "cp"})
    cfg = config(tied=False).running(compute_dtype="bfloat16")
    rng = np.random.default_rng(2)
    embed = rng.normal(size=(VOCAB, WIDTH)).astype("f4")
    tokens = np.where(
        rng.random((ROWS, LENGTH)) < 0.8, 3, rng.integers(-2, VOCAB + 2, (ROWS, LENGTH))
    )
    weight = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype("f4")

    def run(embed, tokens, weight, mesh):
        def value(embed):
            with sharding.ambient(mesh):
                x = embed_tokens(embed, tokens, cfg)
            return jnp.sum(x * weight.astype(x.dtype), dtype=jnp.float32), x

        return jax.grad(value, has_aux=True)(embed)

    run = jax.jit(run, static_argnums=3)
    d_embed, x = run(embed, tokens, weight, None)
    there, (tokens, weight) = weights(mesh, {"embed": embed})["embed"], rows((tokens, weight))
    d_split, x_split = run(there, tokens, weight, mesh)
    np.testing.assert_array_equal(x, x_split)
    np.testing.assert_allclose(d_embed, d_split, rtol=1e-5, atol=1e-5)


@needs_devices
@pytest.mark.parametrize("axes, exchanged", [
    (dict(tp=4), False), (dict(data=2, tp=2), False),
    (dict(fsdp=2, tp=2), True), (dict(cp=2), True),
])  # fmt: skip
def test_embeddings_change_devices_where_several_hold_columns(axes, exchanged):
    """A mesh of an engine has `tp` alone: there nothing is sent but the sum over the vocabulary."""
    mesh, cfg = make_mesh(MeshConfig(**axes)), config(tied=False)
    tokens, embed = jnp.zeros((4, 8), jnp.int32), jnp.zeros((VOCAB, WIDTH))
    program = jax.jit(sharding.traced_on(mesh, lambda *given: embed_tokens(*given, cfg)))
    text = program.lower(*weights(mesh, {"embed": embed}).values(), tokens).as_text()
    assert sharding.is_gathered(mesh, ("vocab", "embed"), embed.shape) == exchanged
    assert ("all_to_all" in text) == ("all_gather" in text) == exchanged


@pytest.mark.parametrize(
    "tokens,vocab,split", [(4096, 512, 1), (3200, 151936, 4), (25600, 151936, 4)]
)
def test_blocks_by_default_are_bounded(tokens, vocab, split):
    """Few logits are one block; others are at most `LOGITS`, or 512 ids of each token."""
    matrix = jax.ShapeDtypeStruct((8, vocab // split), jnp.float32)
    head = Head.of(None, AXES["lm_head"], matrix, (1, tokens), None)
    assert head.is_whole == (vocab == 512)
    assert head.block_ids * tokens <= max(LOGITS, 512 * tokens)
    assert head.is_whole or head.block_ids % 128 == 0


@pytest.mark.parametrize("platform, chunk, settled", [
    ("gpu", None, 883), ("gpu", 64, 64), ("cpu", None, None), ("tpu", None, None),
])  # fmt: skip
def test_gpus_hold_more_logits_by_default(platform, chunk, settled, monkeypatch):
    device = SimpleNamespace(platform=platform, device_kind="any")
    monkeypatch.setattr(jax, "devices", lambda *_: [device])
    assert logits.settled_chunk(chunk, None, 151_936) == settled
