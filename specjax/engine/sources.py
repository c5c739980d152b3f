"""Which draft source a configuration means, and its parameters."""

from __future__ import annotations

import jax

from specjax.config import ModelConfig, SpecConfig
from specjax.draft.mtp import init_head_params
from specjax.draft.mtp_source import MTPSource
from specjax.draft.source import DraftSource
from specjax.models.transformer import Params


def source_of(cfg: ModelConfig, spec: SpecConfig) -> DraftSource:
    """The source that `spec` names, where it follows from the model's config alone.

    Raises:
      ValueError: a standalone model, which must be loaded first.
    """
    if spec.source == "head":
        return MTPSource(cfg)
    if spec.source == "ngram":
        from specjax.draft.ngram import NgramSource

        return NgramSource(
            vocab=cfg.vocab_size,
            longest=spec.ngram_max,
            shortest=spec.ngram_min,
            siblings=spec.ngram_siblings,
        )
    raise ValueError(
        f"the draft model {spec.draft_model!r} has weights of its own; load it with "
        "specjax.draft.model_source.load_draft_model and give the engine its source, or use LLM"
    )


def load_source(
    cfg: ModelConfig,
    spec: SpecConfig,
    head: Params | None,
    tokenizer,
    mesh: jax.sharding.Mesh | None,
) -> tuple[ModelConfig, DraftSource, Params]:
    """The source that `spec` names with its parameters, and the config that goes with it.

    Args:
      head: the checkpoint's MTP head, if it has one. tokenizer: the target's, if there is one; a
        draft model must share it.

    Raises:
      ValueError: the checkpoint's head is asked for and there is none; see also
        `load_draft_model`.
    """
    if spec.source == "model":
        from specjax.draft.model_source import load_draft_model

        source, params = load_draft_model(spec.draft_model, cfg, tokenizer, cfg.compute_dtype, mesh)
        return cfg, source, params
    if spec.source == "ngram":
        return cfg, source_of(cfg, spec), {}  # nothing is learned
    if spec.head == "random":
        # A checkpoint without a head still gets one of one module.
        cfg = cfg.replace(mtp_num_layers=max(cfg.mtp_num_layers, 1))
        head = init_head_params(cfg, spec.head_seed)
    elif head is None:
        raise ValueError(
            "the checkpoint has no draft head, but SpecConfig(head='checkpoint') asks for its own; "
            "use spec=None, SpecConfig(head='random') and train it online, or a source that needs "
            "no head: SpecConfig(source='ngram') or SpecConfig(draft_model=...)"
        )
    return cfg, source_of(cfg, spec), head
