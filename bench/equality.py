"""Are the arms of a comparison the same run? Fingerprints of a step, and why two differ."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from specjax.engine.compare import Difference, first_difference
from specjax.engine.request import make_jobs
from train.collect import Rollout, group_params, tokens_digest
from train.trainer import Trainer

# A step whose tokens differ in more samples than this has a few of them judged, not all.
JUDGED_AT_MOST = 8


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What one step of one arm came to; equal fingerprints, bit-identical steps.

    Attributes:
      tokens: digest of every sampled token id. rewards: of the rewards' bytes.
      parameters: SHA-256 over the bytes of all policy parameters after the update.
    """

    tokens: str
    rewards: str
    parameters: str

    @classmethod
    def of(cls, trainer: Trainer) -> Fingerprint:
        """Of the step that the trainer has just done."""
        rewards = np.ascontiguousarray(trainer.last_rollout.rewards)
        return cls(
            tokens_digest(trainer.last_rollout),
            hashlib.sha256(rewards.tobytes()).hexdigest(),
            parameters_digest(trainer.params),
        )

    def differing(self, other: Fingerprint) -> list[str]:
        """Names of what differs."""
        return [
            field.name
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]


def parameters_digest(params) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of a parameter tree."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(jax.device_get(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def snapshot(params):
    """A host copy that outlives donation (a numpy view of a CPU array would prevent it)."""
    return jax.tree.map(lambda a: np.array(jax.device_get(a), copy=True), params)


class Equality:
    """Compares every arm with the reference, step by step; an arm that differs is out for good.

    Attributes:
      reference: the arm that the others are compared with.
      steps: steps looked at. identical: per arm, steps bit-identical to the reference's.
      ended: per arm that differed, why; no equality is claimed for it from that step on.
      unexplained: of these, the arms whose difference floating point does not explain.
    """

    def __init__(self, reference: str, others: Sequence[str]):
        self.reference, self.steps = reference, 0
        self.identical = dict.fromkeys(others, 0)
        self.ended: dict[str, str] = {}
        self.unexplained: list[str] = []

    def look(
        self,
        step: int,
        trainers: Mapping[str, Trainer],
        prints: Mapping[str, Fingerprint],
        params_before,
    ) -> list[str]:
        """Compares one step.

        Args:
          trainers, prints: of all arms, by name. params_before: see `snapshot`, taken of the
            reference before the step: the policy that sampled it.

        Returns:
          one message per arm that differs for the first time.
        """
        self.steps += 1
        messages = []
        for arm in self.identical:
            if arm in self.ended:
                continue
            differing = prints[self.reference].differing(prints[arm])
            if not differing:
                self.identical[arm] += 1
                continue
            reason = f"{', '.join(differing)} differ from {self.reference}'s"
            explained = False
            if "tokens" in differing:
                found = list(explain(trainers[self.reference], trainers[arm], step, params_before))
                explained = bool(found) and all(d.explained for d in found)
                reason += "; all explained" if explained else "; NOT explained"
                reason += f" by floating point: {'; '.join(map(str, found)) or 'other problems'}"
            else:
                reason += " though the tokens are equal: something besides the policy update moved"
            if not explained:
                self.unexplained.append(arm)
            self.ended[arm] = f"step {step}: {reason}"
            messages.append(f"{arm}: {self.ended[arm]}; no equality is claimed from here on")
        return messages

    @property
    def bit_identical(self) -> int:
        """Steps at which every arm was bit-identical to the reference."""
        return min(self.identical.values(), default=self.steps)

    def verdict(self) -> str:
        """In one line, for people."""
        line = f"steps bit-identical: {self.bit_identical} of {self.steps}"
        return "; ".join([line, *(f"{arm}, {why}" for arm, why in self.ended.items())])


def explain(reference: Trainer, other: Trainer, step: int, params_before) -> Iterator[Difference]:
    """Judges the samples of a step that differ between two trainers, `JUDGED_AT_MOST` of them.

    The other trainer's runner is lent the parameters that sampled the step, and gets its own back.
    """
    cfg, runner = other.cfg, other.engine.runner
    pairs = list(differing_samples(reference.last_rollout, other.last_rollout))
    if not pairs:
        return
    runner.set_params(params_before, other.head)
    for group, index in pairs[:JUDGED_AT_MOST]:
        rollout = other.last_rollout
        sampling = group_params(cfg, step, rollout.problems[group].index)
        eos_ids, tokenizer = other.model.eos_token_ids, other.tokenizer
        job = make_jobs(rollout.prompts[group], sampling, eos_ids, tokenizer)[index]
        yield first_difference(
            runner,
            group,
            index,
            job,
            reference.last_rollout.groups[group][index].token_ids,
            rollout.groups[group][index].token_ids,
        )
    other.sync_weights()


def differing_samples(a: Rollout, b: Rollout) -> Iterator[tuple[int, int]]:
    """(group, sample) of the samples of the same problems whose tokens differ, in order."""
    for group, (x, y) in enumerate(zip(a.groups, b.groups, strict=False)):
        if a.problems[group].index != b.problems[group].index:
            return  # dynamic sampling went on to other problems after an earlier difference
        for index, (s, t) in enumerate(zip(x, y, strict=True)):
            if s.token_ids != t.token_ids:
                yield group, index
