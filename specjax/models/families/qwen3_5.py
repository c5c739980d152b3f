"""Qwen3.5 and 3.6, dense and with experts, text alone: what reads images is left out."""

from typing import Any

from specjax.checked_json import Keys
from specjax.models.families.hybrid import HYBRID, HybridFamily, HybridMixtureFamily

_TEXT: dict[str, Any] = {
    **HYBRID,
    "mtp_key": "mtp_num_hidden_layers",
    "renamed": {"model.language_model.": "model."},
    "ignored": ("model.visual.*",),
    "inert": ("mamba_ssm_dtype",),  # the state is always float32
}


class _OneEmbedding:
    """A family whose MTP head has the model's embedding and language-model head."""

    def problems(self, keys: Keys) -> list[str]:
        apart = keys.flag("mtp_use_dedicated_embeddings", False)
        return [*super().problems(keys), *(["mtp_use_dedicated_embeddings true"] if apart else [])]


class Qwen35Family(_OneEmbedding, HybridFamily):
    pass


class Qwen35MoeFamily(_OneEmbedding, HybridMixtureFamily):
    pass


FAMILY = Qwen35Family("qwen3_5_text", "Qwen3_5ForCausalLM", **_TEXT)
MOE = Qwen35MoeFamily("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", **_TEXT)
