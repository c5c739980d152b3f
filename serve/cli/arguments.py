"""Arguments of `specjax generate`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from specjax.command_line import ArgumentParser
from specjax.config import SamplingParams
from specjax.config.dtype import AUTO, ENGINE_DTYPES
from specjax.schema import Key, ValueProblem, check, read
from specjax.speculation import add_flags

EPILOG = """Prompts are arguments, or lines of --file: text, or JSON lines (--json-lines, or a file
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

_BIASES = Key("logit_bias", dict[int, float], {}, "", None, False)
# Flag, field of SamplingParams, type, help.
_SAMPLING = (
    ("--temperature", "temperature", float, "0 is greedy"),
    ("--max-tokens", "max_tokens", str, "most tokens to generate; none: as many as fit"),
    ("-n", "n", int, "samples of each prompt"),
    ("--seed", "seed", str, "seed of the samples; none: one is drawn, and a line says which"),
    ("--top-p", "top_p", float, "keep the fewest most likely tokens with this total probability"),
    ("--top-k", "top_k", int, "keep the N most likely tokens; 0: all"),
    ("--min-p", "min_p", float, "keep tokens at least X times as likely as the most likely one"),
    ("--repetition-penalty", "repetition_penalty", float, "divides logits of tokens in the text"),
    ("--presence-penalty", "presence_penalty", float, "subtracted from logits of generated tokens"),
    ("--frequency-penalty", "frequency_penalty", float, "subtracted once per occurrence"),
    ("--min-tokens", "min_tokens", int, "tokens before which a sample cannot end"),
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `specjax generate`; it is built without importing jax."""
    parser = ArgumentParser(
        prog="specjax generate",
        description="Generates text with speculative decoding, which changes no token.",
        usage="%(prog)s --model DIR [options] (PROMPT ... | --file FILE)",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text")
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="Hugging Face directory or id, a GGUF file, or the directory of a training run (its "
        "newest checkpoint)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hugging Face id")
    parser.add_argument(
        "--family",
        metavar="MODULE:ATTRIBUTE",
        help="your own model family, for checkpoints of its model_type; it replaces specjax's "
        "family of that model_type",
    )
    _add_input(parser.add_argument_group("input and output"))
    _add_sampling(parser.add_argument_group("sampling"))
    add_flags(parser.add_argument_group("speculation"))
    _add_engine(parser.add_argument_group("engine"))
    return parser


def _add_input(group) -> None:
    add = group.add_argument
    add("--file", metavar="FILE", help="prompts, one per line; - is standard input")
    add("--json-lines", action="store_true", help="read --file as JSON lines, whatever its name")
    add("--chat", action="store_true", help="apply the chat template to texts, as user messages")
    add(
        "--chat-template",
        metavar="T",
        help="Jinja template, or a file with one; default: the model's",
    )
    add(
        "--chat-template-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help="""variables of the template, such as '{"enable_thinking": false}'""",
    )
    add("--output", metavar="FILE", help="JSON lines, one per sample; - is standard output")
    add("--resume", action="store_true", help="add the samples that --output still lacks")
    add("--force", action="store_true", help="replace --output")
    add("--stats", action="store_true", help="print accept length, tok/s and acceptance per depth")
    add(
        "--compare",
        action="store_true",
        help="generate twice more, with and without speculation, and report whether every token is "
        "equal (exit status 1 if not)",
    )
    add("--quiet", action="store_true", help="show no progress of samples and of compiling")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"""expected a JSON object such as '{{"enable_thinking": false}}', got {text!r}"""
        )
    return value


def _add_sampling(group) -> None:
    defaults = SamplingParams()
    for flag, field, kind, doc in _SAMPLING:
        metavar = "N" if kind is int or field in ("max_tokens", "seed") else "X"
        default = getattr(defaults, field)
        group.add_argument(
            flag, dest=field, type=kind, metavar=metavar, help=f"{doc} (default: {default})"
        )
    add = group.add_argument
    add(
        "--generation-config",
        metavar="DIR",
        default="auto",
        help="directory of the generation_config.json with the defaults of the options above; "
        "auto: the model's; none: the defaults above (default: auto)",
    )
    add("--stop", action="append", metavar="TEXT", help="end a sample before this text; repeatable")
    add("--include-stop", action="store_true", help="keep the text of --stop in the sample")
    add("--stop-token-ids", metavar="IDS", help="tokens that end a sample and are kept: 5,17")
    add("--ignore-eos", action="store_true", help="do not stop at the model's own stop tokens")
    add(
        "--bad-words",
        action="append",
        metavar="TEXT",
        help="text that is never generated; repeatable",
    )
    add("--allowed-token-ids", metavar="IDS", help="the only tokens that can be generated: 5,17")
    add(
        "--logit-bias",
        metavar="ID:X,..",
        help="""numbers added to logits: 5:-100,17:2.5 or '{"5": -100}'""",
    )


def _add_engine(group) -> None:
    add = group.add_argument
    add("--max-batch", type=int, default=32, help="most samples that run at once (default: 32)")
    add("--max-len", type=int, help="most tokens of prompt and sample (default: the model's limit)")
    add(
        "--dtype",
        default=AUTO,
        choices=ENGINE_DTYPES,
        help="dtype of weights and arithmetic (default: auto, the checkpoint's on GPU and TPU, "
        "float32 on CPU)",
    )
    add("--replicas", type=int, default=1, help="engines with devices of their own (default: 1)")
    add("--tp", type=int, default=1, help="devices of each replica (default: 1)")
    add(
        "--max-stop-tokens",
        type=int,
        default=8,
        help="most stop tokens of a prompt, the model's own included (default: 8)",
    )


def sampling_params(
    args: argparse.Namespace, defaults: Mapping[str, Any] = MappingProxyType({})
) -> SamplingParams:
    """The sampling parameters of the command line.

    Args:
      args: the parsed command line.
      defaults: values of options that were not given, by the names of `SamplingParams`.

    Raises:
      ValueError: an option is out of its range.
    """
    asked = {field: getattr(args, field) for _, field, _, _ in _SAMPLING}
    asked = {field: value for field, value in asked.items() if value is not None}
    for field in ("max_tokens", "seed"):
        if field in asked:
            asked[field] = _integer_or_none(field, asked[field])
    if args.stop_token_ids is not None:
        asked["stop_token_ids"] = _ids("--stop-token-ids", args.stop_token_ids)
    if args.allowed_token_ids is not None:
        asked["allowed_token_ids"] = _ids("--allowed-token-ids", args.allowed_token_ids)
    if args.logit_bias is not None:
        asked["logit_bias"] = _biases(args.logit_bias)
    return SamplingParams(
        **{**defaults, **asked},
        stop=tuple(args.stop or ()),
        include_stop_str_in_output=args.include_stop,
        ignore_eos=args.ignore_eos,
        bad_words=tuple(args.bad_words or ()),
    )


def _integer_or_none(field: str, text: str) -> int | None:
    if text.lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        flag = "--" + field.replace("_", "-")
        raise ValueError(f"{flag}: expected an integer or none, got {text!r}") from None


def _ids(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(token) for token in text.replace(",", " ").split())
    except ValueError:
        raise ValueError(f"{flag}: expected token ids such as 5,17, got {text!r}") from None


def _biases(text: str) -> tuple[tuple[int, float], ...]:
    if text.lstrip().startswith("{"):
        try:
            return tuple(check(_BIASES, read(text, _BIASES)).items())
        except ValueProblem as error:
            raise ValueError(f"--logit-bias: {error}") from error
    try:
        pairs = [pair.split(":") for pair in text.replace(",", " ").split()]
        return tuple((int(token), float(value)) for token, value in pairs)
    except ValueError:
        raise ValueError(
            f"--logit-bias: expected pairs such as 5:-100,17:2.5, or an object such as "
            f'{{"5": -100}}, got {text!r}'
        ) from None
