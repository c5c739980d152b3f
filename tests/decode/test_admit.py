"""A prompt that was read in pieces and started in slots is known as if all of it had been seen."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.config import Strategy
from specjax.decode.admit import Admission, Piece, empty_prompts, place, prefill
from specjax.decode.noise import request_words
from specjax.decode.options import neutral
from specjax.decode.state import (
    RUNNING,
    DecodeState,
    Plan,
    RowMap,
    StateSizes,
    empty_state,
    take_slots,
)
from specjax.decode.tree import build_tree, chain_bits, plain_bits
from specjax.drafts.mtp import MTPHead, MTPSource, init_head_params
from specjax.interfaces import Level, Where
from specjax.models.families.dense import dense_config
from specjax.models.transformer import graphdef, init_params, to_decode_layout

VOCAB, MAX_LEN, PAGE = 24, 32, 8
PROMPTS = [12, 9, 3, 1, 17]  # tokens: all but the last of each are read
PAGES = [[1, 2], [3], [4], [], [5, 6]]
# Slots: prompt, pages, and the page that is copied. The last sample takes the prompt's own pages.
SLOTS = {
    6: (0, [1, 7, 8], (2, 7)),
    0: (0, [1, 2, 9], (0, 0)),
    3: (1, [3, 10], (0, 0)),
    2: (2, [11], (4, 11)),
    5: (3, [12], (0, 0)),
    1: (4, [5, 6, 13], (0, 0)),
}


class Models(NamedTuple):
    """A tiny target and its head, and both as they are trained."""

    plan: Plan
    params: dict
    layout: dict
    head: dict


def models(modules) -> Models:
    cfg = dense_config(VOCAB, 16, 24, 1, 4, 2, 8, max_position=64, mtp_num_layers=modules)

    def scaled(tree):
        return jax.tree.map(lambda x: 10 * x if x.ndim > 1 else x, tree)

    params, head = scaled(init_params(cfg, 0)), scaled(init_head_params(cfg, 1))
    plan = Plan(cfg, build_tree(Strategy.parse("2_1_3")), MTPSource(cfg))
    return Models(plan, params, to_decode_layout(params, cfg), head)


def decoder(plan: Plan, layout):
    return nnx.merge(graphdef(plan.cfg, plan.cfg.run.decode_layout), layout)


def padded(rows, width, fill=0) -> np.ndarray:
    return np.array([[*row, *[fill] * (width - len(row))] for row in rows], np.int32)


def admitted(run: Models, prompts, width) -> DecodeState:
    """Reads the prompts `width` positions at a time and starts the samples in their slots."""
    plan, tail = run.plan, run.plan.source.needs.states
    state = empty_state(plan, StateSizes(7, 14, PAGE, max_len=MAX_LEN, stop_width=2))
    kept = empty_prompts(plan, len(prompts))
    known = padded(prompts, MAX_LEN + width + tail, fill=VOCAB - 1)

    @jax.jit
    def read(layout, head, state, kept, piece):
        return prefill(decoder(plan, layout), head, plan, state, kept, piece)[:2]

    table = padded(PAGES, MAX_LEN // PAGE + 1)
    for start in range(0, max(PROMPTS) - 1, width):
        piece = Piece(
            tokens=known[:, start : start + width + tail],
            start=np.full(len(prompts), start, np.int32),
            length=np.array(PROMPTS, np.int32),
            prompts=np.arange(len(prompts), dtype=np.int32),
            begin=np.arange(len(prompts), dtype=np.int32),
            keep=np.arange(len(prompts), dtype=np.int32),
            table=np.where(np.array(PROMPTS)[:, None] - 1 > start, table, 0),
        )
        state, kept = read(run.layout, run.head, state, kept, piece)
    samples = [prompt for prompt, _, _ in SLOTS.values()]
    lengths = np.array([PROMPTS[prompt] for prompt in samples], np.int32)
    copies = np.array([copy for _, _, copy in SLOTS.values()], np.int32)
    new = Admission(
        slots=np.array(list(SLOTS), np.int32),
        prompts=np.array(samples, np.int32),
        source=copies[:, 0],
        target=copies[:, 1],
        tokens=padded([prompts[prompt] for prompt in samples], MAX_LEN),
        lengths=lengths,
        limit=lengths + 5,
        words=np.stack([request_words(slot, [1], 0) for slot in SLOTS]),
        options=neutral(len(SLOTS), VOCAB, 2, np)._replace(prompt_len=lengths),
    )
    return jax.jit(lambda *x: place(plan, *x))(state, kept, new)


@pytest.mark.parametrize(("modules", "width"), [(2, 4), (1, 16)])
def test_target_and_head_know_a_prompt_as_if_they_had_seen_it_at_once(modules, width):
    """Siblings on one page, on a copy and on the page itself; a prompt that fills its pages."""
    run = models(modules)
    generator = np.random.default_rng(modules)
    prompts = [generator.integers(0, VOCAB, n).tolist() for n in PROMPTS]
    state = admitted(run, prompts, width)
    source, drafted = run.plan.source, generator.integers(0, VOCAB, (len(SLOTS), 1))
    level = Level(
        1, 0, 1, jnp.asarray(drafted), np.zeros(1, int), chain_bits(1), drafted[..., None]
    )

    @jax.jit
    def after(layout, head, state):
        table = padded([pages for _, pages, _ in SLOTS.values()], MAX_LEN // PAGE + 1)
        slots = jnp.array(list(SLOTS))
        rows = RowMap(slots, jnp.ones(len(SLOTS), bool), jnp.asarray(table))
        here = take_slots(state, rows)
        model, root = decoder(run.plan, layout), here.length - 1
        tokens = jnp.take_along_axis(here.tokens, root[:, None], 1)
        where = Where("tree", root[:, None], prefix=root, visible=plain_bits(), table=here.table)
        x = model.decode(tokens, where, here.memory).x
        here = here._replace(draft=source.resume(model, head, here, 2))
        first, work = source.begin(model, head, here, 2, 1)
        second, _ = source.step(model, head, work, level)
        drafts = (proposal.scores[:, 0] for proposal in (first, second))
        return here.finish, model.logits(x)[:, 0], *drafts

    @jax.jit
    def at_once(params, head, tokens):
        model = nnx.merge(graphdef(run.plan.cfg), params)
        module = MTPHead(run.plan.cfg, head)
        positions = jnp.broadcast_to(jnp.arange(MAX_LEN), tokens.shape)
        ones = jnp.ones_like(tokens)
        x, _, [hidden], *_ = model.hidden(tokens, positions, ones, taps=run.plan.taps)
        following = [model.embed_tokens(jnp.roll(tokens, -1 - s, 1)) for s in range(2)]
        steps = module.unroll(hidden, following, positions, ones)
        return model.logits(x), *(states @ model.head_weight() for states in steps)

    finish, target, first, second = after(run.layout, run.head, state)
    assert (finish == RUNNING).all()
    rows = [[*prompts[p], int(d[0])] for (p, _, _), d in zip(SLOTS.values(), drafted, strict=True)]
    wanted = at_once(run.params, run.head, padded(rows, MAX_LEN))
    for i, (prompt, _, _) in enumerate(SLOTS.values()):
        root = PROMPTS[prompt] - 1
        np.testing.assert_allclose(target[i], wanted[0][i, root], atol=1e-4)
        if root:  # nothing precedes the root of a prompt of one token
            np.testing.assert_allclose(first[i], wanted[1][i, root - 1], atol=1e-4)
            np.testing.assert_allclose(second[i], wanted[2][i, root - 1], atol=1e-4)
    assert np.std(target) > 0.5 and np.std(first) > 0.5
