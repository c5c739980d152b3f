"""Settings of the server and of `specjax generate` about the model. They import no jax."""

from __future__ import annotations

from dataclasses import dataclass

from specjax.config.dtype import AUTO, ENGINE_DTYPES
from specjax.settings import REQUIRED, option


@dataclass(frozen=True)
class ModelSettings:
    """Which model is loaded.

    Attributes:
      model: Hugging Face directory or id, a GGUF file, or the directory of a training run (its
        newest checkpoint).
      revision: branch, tag or commit of a Hugging Face id.
      family: your own model family as module:attribute, for checkpoints of its model_type; it
        replaces specjax's family of that model_type.
      chat_template: Jinja template, or a file with one; null: the tokenizer's own.
      generation_config: source of the default sampling options: auto, the model's own
        generation_config.json; none; or a directory with such a file.
    """

    model: str = REQUIRED
    revision: str | None = None
    family: str | None = None
    chat_template: str | None = None
    generation_config: str = "auto"


@dataclass(frozen=True)
class Slots:
    """How many samples run at once, and on which devices: arguments of `LLM`.

    Attributes:
      max_batch: most samples that run at once on each replica.
      max_len: most tokens of a prompt and a sample together; null: the model's limit, or what fits
        into cache_bytes.
      dtype: dtype of weights and arithmetic; auto: the checkpoint's on GPU and TPU, float32 on CPU.
      replicas: number of engines with devices of their own and one queue.
      tp: number of devices of each replica.
      max_stop_tokens: most stop tokens of a request, the model's own included.
    """

    max_batch: int = option(32, least=1)
    max_len: int | None = None
    dtype: str = option(AUTO, choices=ENGINE_DTYPES)
    replicas: int = option(1, least=1)
    tp: int = option(1, least=1)
    max_stop_tokens: int = option(8, least=1)
