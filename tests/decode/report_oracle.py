"""A plain recomputation, in float64 and slot by slot, of what a chunk reports.

Written as directly as possible and independent of the library's own transforms.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config import Strategy
from specjax.decode import report, sampling
from specjax.decode.accept import Acceptance
from specjax.decode.draft import DraftedTree
from specjax.decode.noise import NoiseRing
from specjax.decode.options import Features, neutral
from specjax.decode.sampling import Rows, context_of, count_tokens
from specjax.decode.state import EMPTY, RUNNING, DecodeState, Plan
from specjax.decode.tree import build_tree
from specjax.models.families.dense import dense_config

V = 12
CFG = dense_config(V, 8, 8, 1, 1, 1, 8)
ALL = Features.all()


def make_plan(tree: str | None = "2x2", features: Features = ALL, mode="coupled", telemetry=True):
    shape = None if tree is None else build_tree(Strategy.parse(tree))
    return Plan(CFG, shape, mode=mode, features=features, telemetry=telemetry)


@dataclasses.dataclass
class Slot:
    """The sampling options and the history of one slot, in plain Python."""

    prompt: list[int]
    output: list[int]
    temperature: float = 1.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    allowed: frozenset = frozenset(range(V))
    bad_word: tuple = ()
    top_k: int = 0
    top_p: float = 1.0
    running: bool = True
    speculate: bool = True

    def log_softmax(self, scores):
        top = scores.max()
        with np.errstate(divide="ignore"):
            return scores - top - np.log(np.exp(scores - top).sum())

    def tempered(self, logits):
        return logits.astype(np.float64) / (self.temperature or 1.0)

    def scores(self, logits, path, penalties=True, filters=True):
        """The transforms, written out; `path` is what was drafted below the root."""
        x, output = logits.astype(np.float64).copy(), self.output + list(path)
        if penalties:
            for v in set(self.prompt + output):
                x[v] = x[v] / self.repetition if x[v] > 0 else x[v] * self.repetition
            for v in output:
                x[v] -= self.frequency
            for v in set(output):
                x[v] -= self.presence
        x[[v for v in range(V) if v not in self.allowed]] = -np.inf
        before = self.bad_word[:-1]
        if self.bad_word and tuple((self.prompt + output)[-len(before) :]) == before:
            x[self.bad_word[-1]] = -np.inf
        if self.temperature > 0:
            x /= self.temperature
            if filters:
                x = self.filtered(x)
        return x

    def filtered(self, x):
        if self.top_k:
            x = np.where(x >= np.sort(x)[-self.top_k], x, -np.inf)
        order = np.argsort(-x, kind="stable")
        p = np.exp(self.log_softmax(x))[order]
        mass_before = np.cumsum(p) - p
        cut = order[mass_before >= self.top_p]
        x[cut] = -np.inf
        return x

    def choose(self, scores, noise):
        return int(np.argmax(scores + noise if self.temperature > 0 else scores))


def random_slot(rng) -> Slot:
    tokens = rng.integers(0, V, 9).tolist()
    return Slot(
        prompt=tokens[:4],
        output=tokens[4:],
        temperature=float(rng.choice([0.0, 0.7, 1.0])),
        repetition=float(rng.choice([1.0, 1.6])),
        presence=float(rng.choice([0.0, 0.8])),
        frequency=float(rng.choice([0.0, 0.9])),
        allowed=frozenset(rng.permutation(V)[: rng.choice([V, 9])].tolist()),
        bad_word=(tokens[-1], int(rng.integers(V))) if rng.random() < 0.5 else (),
        top_k=int(rng.choice([0, 4])),
        top_p=float(rng.choice([0.8, 1.0])),
        running=rng.random() < 0.9,
        speculate=rng.random() < 0.9,
    )


def decode_state(slots) -> DecodeState:
    """As much of a state as a report reads."""
    options = neutral(len(slots), V, 1, np)
    for b, slot in enumerate(slots):
        for name in ("temperature", "repetition", "presence", "frequency", "top_k", "top_p"):
            getattr(options, name)[b] = getattr(slot, name)
        options.allowed[b] = sum(1 << v for v in slot.allowed)
        if slot.bad_word:
            options.bad_words[b, 0, -len(slot.bad_word) :] = slot.bad_word
        options.prompt_len[b] = len(slot.prompt)
        options.speculate[b] = slot.speculate
    tokens = np.zeros((len(slots), 32), np.int32)
    for b, slot in enumerate(slots):
        tokens[b, : len(slot.prompt + slot.output)] = slot.prompt + slot.output
    nothing = dict.fromkeys(DecodeState._fields)
    return DecodeState(
        **{
            **nothing,
            "tokens": jnp.asarray(tokens),
            "length": jnp.array([len(s.prompt + s.output) for s in slots], jnp.int32),
            "finish": jnp.array([RUNNING if s.running else EMPTY for s in slots], jnp.int32),
            "options": jax.tree.map(jnp.asarray, options),
        }
    )


@functools.partial(jax.jit, static_argnums=0)
def transformed(features, state, logits, rows):
    """The context of a round, and what the library makes of the target's logits."""
    counts = count_tokens(state.tokens, state.length, state.options.prompt_len, V)
    context = context_of(state.tokens, state.length, features, counts)
    return context, sampling.transform(logits, state.options, features, context, rows)


@dataclasses.dataclass
class Case:
    """A round of every slot: what was drafted, the target's logits, and the noise."""

    slots: list[Slot]
    tree: str
    tokens: np.ndarray  # [B T]
    logits: np.ndarray  # [B T V]
    noise: np.ndarray  # [B E V]
    draft_logprobs: np.ndarray  # [B T]
    cut: int = 9  # tokens of the round that survive stop tokens and limits at most

    @property
    def shape(self):
        return build_tree(Strategy.parse(self.tree)).shape

    def path(self, b, row):
        """Drafted tokens from below the root down to `row`."""
        rows = self.shape.path_rows[row, 1 : self.shape.depth[row] + 1]
        return [int(t) for t in self.tokens[b, rows]]

    def walk(self, b, penalties=True):
        """Rows of the accepted path and the tokens emitted after them."""
        row, rows, emitted = 0, [], []
        while row is not None:
            scores = self.slots[b].scores(self.logits[b, row], self.path(b, row), penalties)
            emitted.append(self.slots[b].choose(scores, self.noise[b, len(rows)]))
            rows.append(row)
            below = [c for c in self.children(b, row) if self.tokens[b, c] == emitted[-1]]
            row = below[0] if below else None
        return rows, emitted

    def children(self, b, row):
        parent = self.shape.parent
        return [c for c in range(1, len(parent)) if parent[c] == row and self.tokens[b, c] >= 0]

    def view(self, plan: Plan) -> report.Round:
        batch, steps = len(self.slots), self.noise.shape[1] - 1
        path = np.zeros((batch, steps + 1), np.int32)
        emitted, count = path.copy(), np.zeros(batch, np.int32)
        for b in range(batch):
            rows, tokens = self.walk(b)
            count[b] = len(rows)
            path[b, : count[b]], emitted[b, : count[b]] = rows, tokens
        # Rows past the end of a walk are garbage, the root's again here.
        padded = [[(self.path(b, r) + [-1] * steps)[:steps] for r in path[b]] for b in range(batch)]
        paths = np.array(padded, np.int32).reshape(batch, steps + 1, steps)
        state = decode_state(self.slots)
        ring = np.zeros_like(self.noise)  # a position's noise lies at `position % E`
        place = (np.asarray(state.length)[:, None] + np.arange(steps + 1)) % (steps + 1)
        ring[np.arange(batch)[:, None], place] = self.noise
        state = state._replace(noise=NoiseRing(jnp.asarray(ring), state.length, state.length))
        running = np.array([s.running for s in self.slots])
        rows = Rows(jnp.arange(steps + 1), jnp.asarray(paths))
        picked = jnp.asarray(np.take_along_axis(self.logits, path[..., None], 1))
        context, scores = transformed(plan.features, state, picked, rows)
        return report.Round(
            state=state,
            context=context,
            draft=DraftedTree(
                jnp.asarray(self.tokens),
                self.shape,
                None,
                None,
                jnp.asarray(self.draft_logprobs),
                None,
            ),
            accepted=Acceptance(jnp.asarray(emitted), jnp.asarray(path), jnp.asarray(count)),
            count=jnp.asarray(np.where(running, np.minimum(count, self.cut), 0)),
            invalid=jnp.zeros(batch, bool),
            logits=picked,
            scores=scores,
            rows=rows,
            records=None,
        )

    def expected(self, b):
        """The record of slot b: None if there is no rejection."""
        slot = self.slots[b]
        rows, emitted = self.walk(b)
        children = self.children(b, rows[-1])
        if not (slot.running and slot.speculate and children):
            return None
        raw, path = self.logits[b, rows[-1]], self.path(b, rows[-1])
        scores = slot.scores(raw, path)
        logp, scaled = slot.log_softmax(scores), np.exp(slot.log_softmax(slot.tempered(raw)))
        drafted, target = int(self.tokens[b, children[0]]), emitted[-1]
        masked = slot.scores(raw, path, filters=False)[drafted] == -np.inf
        without = slot.choose(slot.scores(raw, path, penalties=False), self.noise[b, len(rows) - 1])
        return {
            "emitted": len(rows) <= self.cut,
            "position": len(slot.prompt + slot.output) + len(rows) - 1,
            "depth": len(rows),
            "draft_token": drafted,
            "target_token": target,
            "draft_logprob": self.draft_logprobs[b, children[0]],
            "target_logprob": logp[target],
            "draft_token_target_logprob": logp[drafted],
            "entropy": -(scaled * np.log(scaled)).sum(),
            "top_p_mass": scaled[np.isfinite(scores)].sum(),
            "outside_mask": masked,
            "outside_filter": scores[drafted] == -np.inf and not masked,
            "penalty_changed": without != target,
        }


def random_case(seed, batch=8, tree="2x2") -> Case:
    """Siblings hold distinct tokens; some have no draft; half the rows are what will be chosen."""
    rng = np.random.default_rng(seed)
    shape = build_tree(Strategy.parse(tree)).shape
    rows, steps = len(shape.parent), int(shape.depth.max())
    case = Case(
        [random_slot(rng) for _ in range(batch)],
        tree,
        np.zeros((batch, rows), np.int32),
        rng.normal(0, 2, (batch, rows, V)).astype(np.float32),
        rng.gumbel(size=(batch, steps + 1, V)).astype(np.float32),
        rng.normal(-1, 0.5, (batch, rows)).astype(np.float32),
        cut=int(rng.integers(1, steps + 2)),
    )
    for b, slot in enumerate(case.slots):
        case.tokens[b, 0] = slot.output[-1]
        for row in range(rows):  # parents come before their children
            children = [c for c in range(1, rows) if shape.parent[c] == row]
            tokens = rng.permutation(V)[: len(children)]
            scores = slot.scores(case.logits[b, row], case.path(b, row))
            chosen = slot.choose(scores, case.noise[b, shape.depth[row]])
            if children and rng.random() < 0.5 and chosen not in tokens:
                tokens[rng.integers(len(children))] = chosen
            for child, token in zip(children, tokens, strict=True):
                case.tokens[b, child] = -1 if rng.random() < 0.15 else token
    return case
