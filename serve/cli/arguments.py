"""The settings of `specjax generate`. They import no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from serve.model import ModelSettings, Slots
from specjax.command_line import given_in
from specjax.config import SamplingParams
from specjax.control.config import Speculation
from specjax.kernels.names import ATTENTION
from specjax.settings import option

DESCRIPTION = """Generates text with speculative decoding, which changes no token.

Prompts are arguments, or lines of --file: text, or JSON lines (--json-lines, or a file
name that ends in .jsonl) with "prompt" (text or token ids) or "messages" (for the chat template). A
JSON line may set sampling options by their Python names ("max_tokens": 9) and
"chat_template_kwargs"; its "id", any value, is copied to the output. A line with another key ends
the command before anything is generated. A file whose name ends in .json holds an array of such
objects. If a line cannot be used, or the model's logits are NaN, the command says so, generates the
other samples, and exits with 1.

One sample is printed while it is generated, several are printed in the order of their prompts.
--output writes a JSON line per sample when it ends, in the order in which they end ("index" is the
prompt's line minus 1), so that a killed call keeps all finished samples. --resume then generates
the missing samples, which are those of a call without interruption, with the seed that the file
names unless --seed gives one. It refuses a file whose samples
come from other weights (the model is a training run that has gone on), --dtype or --acceptance.

examples:
  specjax generate --model assets/sums "17+25+8=" -n 4 --stats
  specjax generate --model DIR --chat "Why is the sky blue?" --temperature 0
  specjax generate --model DIR --file prompts.jsonl --output samples.jsonl --max-tokens 512
  cat prompts.txt | specjax generate --model DIR --file - --output - | head"""


@dataclass(frozen=True)
class GenerateConfig(ModelSettings, Slots, Speculation, SamplingParams):
    """`specjax generate`.

    Attributes:
      prompts: texts; after -- also those that look like a setting.
      file: prompts, one per line; - is standard input.
      json_lines: read `file` as JSON lines, whatever its name.
      chat: apply the chat template to texts, as user messages.
      chat_template_kwargs: variables of the template, such as {enable_thinking: false}.
      output: file of JSON lines, one per sample; - is standard output.
      resume: add the samples that `output` still lacks.
      force: replace `output`.
      stats: print accept length, tok/s and acceptance per depth.
      quiet: show no progress of samples and of compiling.
      max_tokens: most tokens to generate; if not given the model's default, or 256; null: as many
        as fit.
      seed: seed of the samples; null: one is drawn, and a line says which.
      attention: the attention kernel: auto, the platform's own; or by name, which is refused where
        it cannot run.
    """

    words: ClassVar[tuple[str, ...]] = ("prompts",)
    unread: ClassVar[Mapping[str, str]] = {
        "detokenize": "samples are printed as text; leave it out",
        "prompt_logprobs": "the output has nothing of the prompt; leave it out",
    }
    aliases: ClassVar[Mapping[str, str]] = {
        **Speculation.aliases, "include_stop": "include_stop_str_in_output",
    }  # fmt: skip

    prompts: list[str] = option([])
    file: str | None = None
    json_lines: bool = False
    chat: bool = False
    chat_template_kwargs: dict[str, Any] = option({})
    output: str | None = None
    resume: bool = False
    force: bool = False
    stats: bool = False
    quiet: bool = False
    max_tokens: int | None = None  # the model's defaults may allow more than 256
    attention: str = option("auto", choices=ATTENTION, own_path=True)

    def __post_init__(self):
        Speculation.__post_init__(self)
        SamplingParams.__post_init__(self)

    def sampling(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        """The sampling parameters of the samples.

        Args:
          defaults: values of keys that were not given, by the names of `SamplingParams`.

        Raises:
          ValueError: a value is out of its range, beside the defaults.
        """
        names = given_in(self) & SamplingParams.__dataclass_fields__.keys()
        return SamplingParams(**{**defaults, **{name: getattr(self, name) for name in names}})
