"""The exact distribution of the next few tokens, by full forward passes: what samples must follow.

With four allowed tokens and three positions there are 64 outcomes, which need the logits after 21
contexts: the prompt, the prompt and one of them, the prompt and two. Nothing of the decode loop
takes part: no cache, no tree, no draft, no noise. The sampling transforms are those of decoding.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.config import SamplingParams
from specjax.decode import sampling
from specjax.decode.history import context_of, count_tokens, root_rows
from specjax.engine.options_rows import features_of, option_rows
from specjax.engine.request import make_jobs
from specjax.engine.runner import Runner
from specjax.models.transformer import graphdef


class ExactJoint:
    """Probabilities of every sequence of `length` tokens out of `tokens` after a prompt.

    Args:
      runner: its policy is run, in its dtype.
      prompt: token ids. tokens: the only ones that will be allowed. length: of the sequences.
    """

    def __init__(self, runner: Runner, prompt: Sequence[int], tokens: Sequence[int], length: int):
        self.prompt, self.tokens, self.length = list(prompt), list(tokens), length
        self._vocab = runner.cfg.vocab_size
        self._contexts = [
            [*prompt, *path]
            for depth in range(length)
            for path in itertools.product(tokens, repeat=depth)
        ]
        self._logits = full_forward(runner, self._contexts)

    @property
    def outcomes(self) -> int:
        return len(self.tokens) ** self.length

    def probabilities(self, params: SamplingParams) -> np.ndarray:
        """[outcomes] probability of each sequence, in the order of `index`.

        Args:
          params: temperature above 0, allowed_token_ids exactly `tokens`, and no stop tokens.
        """
        conditional = self._conditional(params)
        at = {tuple(c[len(self.prompt) :]): row for row, c in enumerate(self._contexts)}
        joint = np.array(
            [
                np.prod([conditional[at[path[:d]], token] for d, token in enumerate(path)])
                for path in itertools.product(self.tokens, repeat=self.length)
            ]
        )
        return joint / joint.sum()

    def _conditional(self, params: SamplingParams) -> np.ndarray:
        """[contexts V] next-token probabilities in float64 after all transforms."""
        count, width = len(self._contexts), len(self.prompt) + self.length
        job = make_jobs(self.prompt, dataclasses.replace(params, n=1, ignore_eos=True), ())[0]
        features = features_of(job, self._vocab)
        options = option_rows([job] * count, self._vocab, stop_width=1)
        tokens = np.zeros((count, width), np.int32)
        for row, context in enumerate(self._contexts):
            tokens[row, : len(context)] = context
        lengths = np.array([len(c) for c in self._contexts], np.int32)

        @jax.jit
        def transformed(logits, tokens, lengths, options):
            counts = None
            if features.penalties:
                counts = count_tokens(tokens, lengths, options.prompt_len, self._vocab)
            context = context_of(tokens, lengths, features, counts)
            rows = root_rows(count)
            return sampling.transform(logits[:, None], options, features, context, rows)[:, 0]

        scores = np.asarray(transformed(self._logits, tokens, lengths, options), np.float64)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def index(self, samples: np.ndarray) -> np.ndarray:
        """The outcome [N] of each sample [N length], -1 if it holds a token that is not allowed."""
        place = np.full(self._vocab, -1)
        place[self.tokens] = np.arange(len(self.tokens))
        places = place[samples]
        cells = np.ravel_multi_index(
            tuple(np.maximum(places, 0).T), (len(self.tokens),) * self.length
        )
        return np.where((places >= 0).all(1), cells, -1)


def full_forward(runner: Runner, contexts: Sequence[Sequence[int]]) -> np.ndarray:
    """Raw float32 logits [contexts V] of the token after each context."""
    width = max(map(len, contexts))
    tokens = np.zeros((len(contexts), width), np.int32)
    for row, context in enumerate(contexts):
        tokens[row, : len(context)] = context
    lengths = np.array([len(c) for c in contexts], np.int32)
    static = graphdef(runner.cfg, runner.cfg.run.decode_layout)

    @jax.jit
    def run(params, tokens, lengths):
        model = nnx.merge(static, params)
        x = model.prefill(tokens, lengths).x
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
        return model.logits(last)[:, 0]

    return np.asarray(run(runner.params, tokens, lengths), np.float32)


def likeliest(runner: Runner, prompt: Sequence[int], count: int) -> list[int]:
    """The `count` likeliest tokens after a prompt, best first."""
    logits = full_forward(runner, [prompt])[0]
    return np.argsort(-logits, kind="stable")[:count].tolist()
