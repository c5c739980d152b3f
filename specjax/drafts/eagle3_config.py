"""What an EAGLE-3 head computes (Li et al. 2025, arXiv 2503.01840), and how its files say so.

Five settings change no shape, and give an accept length of 1.0 without an error where they are
wrong: which hidden states of the target the head takes, `norm_before_residual`, `fc_norm`,
`norm_output`, and the backbone.
"""

from __future__ import annotations

import dataclasses

from specjax.config import ModelConfig
from specjax.config.checks import choice
from specjax.spelling import checks_keywords

FC_NORMS = ("none", "joined", "each")


@checks_keywords
@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 head for one target.

    Attributes:
      network: config of the head's layers: its width D, its number of draft tokens C as
        `vocab_size`, `rms_norm_eps`, and layers whose attention has the head's own RoPE. The first
        layer's queries, keys and values take 2 D numbers; the others are ordinary layers. The
        backbone llama or qwen3 is `qk_norm` of the attention, and `model_type`.
      target_width: width of the target's hidden states.
      target_vocab: vocabulary size V of the target.
      taps: the target's hidden states that `fc` takes, see `DraftNeeds.taps`: numbers of layers, or
        `post_norm` alone, which has no `fc`.
      norm_before_residual: whether the first layer's residual is hidden_norm(g) instead of g.
      fc_norm: the norm before `fc`. `none`; `joined`: one over all states side by side; `each`: one
        per state.
      norm_output: whether the state for the next step is norm(y) instead of y.
      own_embedding: whether the head has an embedding [V D]; else it uses the target's, whose width
        must be D.
      own_head: whether the head has a language-model head [D C]; else it uses the target's columns
        of its draft tokens.
      own_ids: whether its files list the draft tokens; else they are all V tokens.
    """

    network: ModelConfig
    target_width: int
    target_vocab: int
    taps: tuple[int | str, ...]
    norm_before_residual: bool = False
    fc_norm: str = "none"
    norm_output: bool = False
    own_embedding: bool = False
    own_head: bool = True
    own_ids: bool = False

    def __post_init__(self):
        choice("fc_norm", self.fc_norm, FC_NORMS)
