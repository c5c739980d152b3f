"""The loss of every objective in plain numpy, in float64."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Scored:
    """The numbers of one sample's response, float64, an array for each token."""

    new: np.ndarray
    old: np.ndarray
    behaviour: np.ndarray
    ref: np.ndarray
    entropy: np.ndarray
    mask: np.ndarray
    advantage: np.ndarray


def _clipped(ratio, s, cfg):
    low, high = 1 - cfg.clip_ratio, 1 + cfg.clip_ratio_high
    value = -np.minimum(ratio * s.advantage, np.clip(ratio, low, high) * s.advantage)
    if cfg.clip_ratio_c is not None:
        bounded = np.minimum(value, -cfg.clip_ratio_c * s.advantage)
        value = np.where(s.advantage < 0, bounded, value)
    return value


def _by_token(s, fixed, cfg):
    return _clipped(np.exp(s.new - s.old), s, cfg)


def _by_sequence(s, fixed, cfg):
    def mean(x):
        return (x * s.mask).sum() / s.mask.sum()

    return _clipped(np.exp(mean(fixed - s.old)) * np.exp(s.new - fixed), s, cfg)


def _weighed(s, fixed, cfg):
    ratio = np.exp(fixed - s.old)
    weight = np.clip(ratio, 1 - cfg.clip_ratio, 1 + cfg.clip_ratio_high)
    return -weight * s.advantage * s.new


_PER_TOKEN = {
    "grpo": _by_token,
    "gspo": _by_sequence,
    "cispo": _weighed,
    "rloo": _by_token,
    "reinforce_pp": _by_token,
}


def loss_of(samples, cfg, fixed, masked=0):
    """The loss of one update.

    Args:
      samples: the samples that are trained on.
      cfg: the section `algo`, with a `loss_scale_factor` if the loss is divided by it.
      fixed: for each sample the log-probabilities `new` in the parts that have no gradient.
      masked: number of samples of the update that are left out of `samples` as truncated.
    """
    tokens, count = sum(s.mask.sum() for s in samples), len(samples) + masked
    total = 0.0
    for s, kept in zip(samples, fixed, strict=True):
        value = _PER_TOKEN[cfg.objective](s, kept, cfg)
        if cfg.tis:
            off = s.old - s.behaviour
            if cfg.tis_level == "sequence":
                off = np.full_like(off, (off * s.mask).sum())
            value = value * np.minimum(np.exp(off), cfg.tis_cap)
        d = s.new - s.ref
        kl = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) + d - 1}[cfg.kl_loss_type]
        value = value + cfg.kl_loss_coef * kl - cfg.entropy_coeff * s.entropy
        divisor = {
            "token": tokens,
            "sequence": s.mask.sum() * count,
            "constant": (cfg.loss_scale_factor or 0) * count,
        }[cfg.loss_aggregation]
        total += (value * s.mask).sum() / divisor
    return total


def differences(samples, cfg, masked=0, step=1e-6):
    """The gradient of that loss in each sample's tokens, by central differences."""
    fixed, found = [s.new.copy() for s in samples], []
    for s in samples:
        gradient = np.zeros_like(s.new)
        for t in range(len(s.new)):
            ends = []
            for sign in (1, -1):
                s.new[t] += sign * step
                ends.append(loss_of(samples, cfg, fixed, masked))
                s.new[t] -= sign * step
            gradient[t] = (ends[0] - ends[1]) / (2 * step)
        found.append(gradient)
    return found
