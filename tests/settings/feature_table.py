"""Which program takes which feature: the table of docs/features.md, computed by the programs.

An entry point is `LLM`, `specjax generate`, the server, or `train.rl`; the latter on one device,
with replicas, and on a mesh. A `Feature` says how each of them is asked for it. A cell of the table
is what the entry point's own code does with that, up to where it would compile: `yes`, or the
reason why it refuses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from rows import PLACES, Stopped
from shared import MAX_LEN

from serve import settings
from serve.cli import generate
from serve.protocol import ChatRequest, CompletionRequest
from serve.settings import ServeConfig, load_llm
from specjax import LLM, ControlConfig, EngineConfig, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.command_line import parse_config
from specjax.config import ModelConfig
from specjax.drafts.mtp import MTPSource
from specjax.engine.sources import load_source, new_source
from specjax.tokenizer import load_tokenizer, with_tokenizer_end
from train.programs import as_computed, build_programs, drafts, make_meshes, settle_drafting
from train.schema import RLConfig

Settings = Sequence[str]


@dataclasses.dataclass(frozen=True)
class Feature:
    """How each entry point is asked for a feature.

    Attributes:
      name: the feature's name in the table.
      python: function that uses the feature, given a function that makes an `LLM`.
      flags: flags of `specjax generate`.
      rl: settings of `train.rl`.
      server: settings of the server.
      body: body of a request to the server.
    """

    name: str
    python: Callable[[Callable[..., LLM]], Any]
    flags: Settings
    rl: Settings
    server: Settings = ()
    body: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class NoSuchSetting(Exception):
    """Raised by a feature for an entry point that has no setting for it."""


# --- features by the settings that ask for them ---------------------------------------------------


def speculation(name: str, rl: Settings = (), **keys: Any) -> Feature:
    """A feature by the fields of `SpecConfig`; `rl`: further settings that `train.rl` needs."""
    return Feature(
        name,
        lambda make: make(spec=SpecConfig(**keys)),
        _flags(keys),
        [*_settings("rollout.", keys), *rl],
        _settings("speculation.", keys),
    )


def control(name: str, spec: Mapping[str, Any] | None = None, **keys: Any) -> Feature:
    """A feature by the settings of a controller; `spec`: fields of `SpecConfig` beside them."""
    spec = dict(spec or {})

    def python(make: Callable[..., LLM]) -> LLM:
        if "fastrl" in keys:
            return make(control=ControlConfig.from_fastrl(keys["fastrl"]))
        given = {**keys, **({"ema_file": ema_file()} if "ema_file" in keys else {})}
        return make(spec=SpecConfig(**spec), control=ControlConfig.from_dict(given))

    return Feature(
        name,
        python,
        [*_flags(keys), *_flags(spec)],
        [*_settings("rollout.control.", keys), *_settings("rollout.", spec)],
        [*_settings("speculation.control.", keys), *_settings("speculation.", spec)],
    )


def sampling(field: str, value: Any, name: str = "", text: str = "", **other: Any) -> Feature:
    """A feature by a field of `SamplingParams`.

    Args:
      text: the value as a flag takes it.
      other: `flags`, `rl` or `body`, where they differ.
    """
    feature = Feature(
        name or f"`{field}`",
        sampled(**{field: value}),
        [_flag_name(field), text or str(value)],
        _settings("rollout.", {field: value}),
        body={field: value},
    )
    return dataclasses.replace(feature, **other)


def engine(name: str, field: str, value: Any, **other: Any) -> Feature:
    """A feature by an argument of `LLM` or a field of `EngineConfig`."""
    pair = {field: value}
    alone = field in inspect.signature(LLM).parameters
    feature = Feature(
        name,
        lambda make: make(**pair) if alone else make(engine=EngineConfig(**pair)),
        _flags(pair),
        _settings("rollout.", pair),
        _settings("engine.", pair),
    )
    return dataclasses.replace(feature, **other)


def training(name: str, *given: str) -> Feature:
    """A feature that training alone has; other entry points are asked for it by its key."""
    pairs = {key.rpartition(".")[2]: value for key, _, value in (s.partition("=") for s in given)}

    def ask(make):
        assert not pairs.keys() & inspect.signature(LLM).parameters.keys(), "LLM has it: ask for it"
        raise NoSuchSetting

    flags = [x for key, value in pairs.items() for x in (_flag_name(key), value)]
    return Feature(name, ask, flags, given, given)


def sampled(**given) -> Callable:
    """Asks `LLM` to sample like this."""

    def ask(make):
        if given.keys() - {field.name for field in dataclasses.fields(SamplingParams)}:
            raise NoSuchSetting
        llm = make()
        _, jobs = llm._jobs(*llm._normalise([[1, 2]], SamplingParams(max_tokens=4, **given)))
        for job in jobs:
            llm.engine.check(job)

    return ask


def _flag_name(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _flags(keys: Mapping[str, Any]) -> list[str]:
    found = []
    for key, value in keys.items():
        if isinstance(value, bool):
            found.append(_flag_name(key if value else f"no_{key}"))
        elif isinstance(value, list):
            found += [_flag_name(key), ",".join(value)]
        else:
            found += [_flag_name(key), json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def _settings(section: str, keys: Mapping[str, Any]) -> list[str]:
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in keys.items()}
    return [f"{section}{key}={text}" for key, text in texts.items()]


def chat(name: str, template: str, prompt: str, **variables: Any) -> Feature:
    """A chat template; `prompt`: what it makes of one message, `a`, with these variables."""

    def python(make):
        known = load_tokenizer(PLACES.policy)
        known.chat_template = template
        llm = make(tokenizer=known)
        with mock.patch.object(LLM, "_run", side_effect=Stopped) as run:
            with contextlib.suppress(Stopped):
                params = SamplingParams(seed=0, max_tokens=4)
                llm.chat(messages, params, chat_template_kwargs=variables)
        (job,) = run.call_args.args[0]
        assert job.prompt == known.encode(prompt, add_special_tokens=False), job.prompt

    messages = [{"role": "user", "content": "a"}]
    kwargs = {"chat_template_kwargs": variables} if variables else {}
    return Feature(
        name,
        python,
        ["--chat", "--chat-template", template, *_flags(kwargs)],
        ["data.chat=on", *_settings("data.", kwargs)],
        [f"chat_template={template}"],
        {"messages": messages, **kwargs},
    )


# --- the features ---------------------------------------------------------------------------------

TREE = {"strategy": "2_2_4"}
FASTRL = {"enable": True, "eagle": {"tune_algorithm": "BEG", "mab_configs": ["2_1_3"]}}
TIS = ("algo.tis=true",)
CONTROLLED = (*TIS, "rollout.control.controller=goodput")
NUMBERS = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "min_tokens": 2,
}  # fmt: skip
FEATURES: dict[str, list[Feature]] = {
    "Strategies": [
        speculation("a chain (`4_1_5`)", strategy="4_1_5"),
        speculation("a dynamic tree (`2_2_4`)", **TREE),
        speculation("a static tree (`2x1`)", strategy="2x1"),
        speculation("`off`", strategy="off"),
        speculation("`spec_verify_tokens`", **TREE, spec_verify_tokens=3),
        speculation("`adaptive_width`", **TREE, adaptive_width=True),
        speculation("`tau`", **TREE, tau=0.5),
        speculation("`aligned=false`", rl=["rollout.top_p=0.9"], aligned=False),
    ],
    "Acceptance": [
        speculation("`coupled`", acceptance="coupled"),
        speculation("`block`", acceptance="block"),
        speculation("`recursive` (a static tree)", strategy="2x1", acceptance="recursive"),
        speculation("`greedy` (temperature 0)", ["rollout.temperature=0"], acceptance="greedy"),
        speculation("`invariant`", invariant=True),
        speculation("`telemetry`", telemetry=True),
        speculation("`exact_mode`", exact_mode=True),
    ],
    "Draft sources": [
        speculation("the checkpoint's head", draft="checkpoint"),
        speculation("a random head", draft="random"),
        speculation("a random EAGLE-3 head", draft="random", draft_kind="eagle3"),
        speculation("n-grams", draft="ngram"),
        speculation("`ngram_max`", draft="ngram", ngram_max=3),
        speculation("a part of the vocabulary", draft_vocab=16),
        speculation("a smaller model", draft="DIR"),
    ],
    "Controllers": [
        *(control(f"`{name}`", controller=name) for name in ("goodput", "static", "ema", "bandit")),
        control("`strategies`", strategies=["off", "4_1_5"]),
        control("`bandit.reward`", controller="bandit", bandit={"reward": "accept_length"}),
        control("`ema_file`", controller="ema", ema_file="EMA"),
        control("`bs_threshold`", bs_threshold=4),
        control("FastRL's section (`fastrl`)", fastrl=FASTRL),
        control("`goodput` with `invariant`", {"invariant": True}, controller="goodput"),
        control("`goodput` with `block`", {"acceptance": "block"}, controller="goodput"),
    ],
    "Sampling": [
        *itertools.starmap(sampling, NUMBERS.items()),
        sampling("stop", ["a"], text="a"),
        sampling("logit_bias", {5: 1.0}, text="5:1", body={"logit_bias": {"5": 1.0}}),
        sampling("n", 3, "several samples of a prompt", flags=["-n", "3"]),
        sampling("bad_words", ["a"], text="a"),
        sampling("allowed_token_ids", [5, 6], text="5,6"),
    ],
    "Log-probabilities": [
        sampling("transformed_logprobs", True, "processed",
                 rl=["algo.logprobs=processed", "rollout.top_p=0.9"]),
        sampling("logprobs", 2, "of the most likely tokens"),
        sampling("prompt_logprobs", 1, "of the prompt"),
    ],
    "Prompts": [
        chat("a chat template", "<{{ messages[0].content }}>", "<a>"),
        chat("variables of the template", "{{ a }}", "1", a=1),
        engine("defaults of generation_config.json", "generation_config", "auto",
               rl=["generation_config=auto"], server=["generation_config=auto"]),
    ],
    "Devices and memory": [
        engine("`replicas`", "replicas", 2, rl=["rollout.replicas=8"]),
        engine("devices of a replica (`tp`)", "tp", 2),
        engine("`attention`", "attention", "reference", rl=["attention=reference"]),
        engine("`dtype`", "dtype", "bfloat16"),
        engine("`cache_bytes`", "cache_bytes", 10_000_000),
        engine("`enforce_eager`", "enforce_eager", True),
        engine("longest first (`order`)", "order", "longest_first"),
    ],
    "Training": [
        training("training the head (`draft.mode`)", "draft.mode=online"),
        training("training it in gaps", "draft.spot.enabled=true", "draft.spot.gaps=false"),
        training("truncated importance sampling (TIS)", *TIS),
        training("TIS with a controller", *CONTROLLED),
        training("TIS with a controller and `invariant`", *CONTROLLED, "rollout.invariant=true"),
        training("TIS of processed log-probabilities",
                 *TIS, "algo.logprobs=processed", "rollout.top_p=0.9"),
        training("dynamic sampling", "algo.dynamic_sampling=true"),
        training("bounds on a group's mean reward (`algo.filter_groups`)",
                 "algo.dynamic_sampling=true", "algo.filter_groups.min=0.2"),
        training("over-sampling", "rollout.over_sample=1.5"),
        training("partial rollouts", "rollout.partial=true", "rollout.over_sample=1.5"),
        training("named sets of evaluation (`eval.sets`)",
                 "eval.sets={a: {path: a.jsonl, n: 2, temperature: 1}}"),
        training("a penalty on KL to the reference", "algo.kl_loss_coef=0.1"),
        training("equal bits from every process on a GPU (`deterministic`)", "deterministic=true"),
        training("samples of each step (`log.samples`)", "log.samples=8"),
    ],
}  # fmt: skip


def ema_file() -> str:
    path = PLACES.scratch / "features.json"
    path.write_text('{"candidate_steps": [1, 2]}')
    return str(path)


def _filled(settings: Settings) -> list[str]:
    """The settings with paths of this machine for the names `DIR` and `EMA`."""
    paths = {"DIR": str(headless()), "EMA": ema_file()}
    return [re.sub(r"\b(DIR|EMA)\b", lambda m: paths[m[0]], text) for text in settings]


# --- the entry points -----------------------------------------------------------------------------


@functools.cache
def policy() -> ModelConfig:
    return with_tokenizer_end(hf.read_config(PLACES.policy), load_tokenizer(PLACES.policy))


@functools.cache
def headless() -> Path:
    """The directory of the policy's model without its head."""
    cfg, params, _ = hf.load_checkpoint(PLACES.policy, "float32")
    path = PLACES.scratch / "headless"
    hf.save_checkpoint(path, cfg.replace(mtp_num_layers=0), params, None, PLACES.policy)
    return path


@functools.cache
def weights_of_policy():
    _, params, head = hf.load_checkpoint(PLACES.policy, "float32")
    return params, head


def make_llm(model: Any = None, **given) -> LLM:
    """An `LLM` of the policy's weights, which lie in memory already."""
    spec = given.get("spec")
    if getattr(spec, "draft", None) == "DIR":
        given["spec"] = dataclasses.replace(spec, draft=str(headless()))
    # A new tokenizer each time, for the server may give it a chat template.
    defaults = {"max_batch": 2, "max_len": MAX_LEN, "tokenizer": load_tokenizer(PLACES.policy)}
    given.pop("revision", None)
    return LLM((policy(), *weights_of_policy()), **{**defaults, **given})


def python(feature: Feature) -> None:
    feature.python(make_llm)


def command(feature: Feature) -> None:
    """`specjax generate`, up to where it would generate."""
    argv = ["--model", str(PLACES.policy), *_filled(feature.flags), "1+1="]
    with (
        mock.patch.object(settings, "LLM", make_llm),
        mock.patch.object(generate, "_run", mock.Mock(side_effect=Stopped)),
    ):
        with contextlib.suppress(Stopped):
            status = generate.run(argv)
            raise AssertionError(f"generate ended with {status} before it generated")


def server(feature: Feature) -> None:
    """The server, up to where it would compile, and a request to it."""
    given = _filled(feature.server)
    cfg, _ = parse_config(ServeConfig, [f"model={PLACES.policy}", *given])
    with mock.patch.object(settings, "LLM", make_llm):
        load_llm(cfg)
    body = dict(feature.body)
    kind = ChatRequest if "messages" in body else CompletionRequest
    asked = kind.model_validate({"prompt": "1+1="} | body if kind is CompletionRequest else body)
    asked.require_supported()
    asked.params(4, asked.top)


def trainer(*more: str) -> Callable[[Feature], None]:
    """`train.rl`, up to where it would compile."""

    def entry(feature: Feature) -> None:
        own = _filled(feature.rl)
        named = {setting.partition("=")[0] for setting in own}
        argv = [f"model={PLACES.policy}", "rollout.max_batch=2", "eval.problems=0"]
        argv += [setting for setting in more if setting.partition("=")[0] not in named]
        cfg, _ = parse_config(RLConfig, [*argv, *own])
        cfg.dtype.settle("float32", "cpu")
        drafting = settle_drafting(cfg, MTPSource)
        model = as_computed(cfg, policy())
        mesh, places = make_meshes(cfg)
        source = None
        if cfg.rollout.draft == "random":
            source = new_source(model, cfg.rollout.spec())[1]
        elif drafts(cfg) and not drafting.with_head:
            tokenizer = load_tokenizer(PLACES.policy)
            source = load_source(model, cfg.rollout.spec(), None, tokenizer, mesh)[1]
        build_programs(cfg, model, source, mesh, places[:2])

    return entry


MESH = ("mesh.data=2", "mesh.fsdp=4", "packing.rows=8")
ENTRIES: dict[str, Callable[[Feature], None]] = {
    "`LLM`": python,
    "`specjax generate`": command,
    "`specjax serve`": server,
}
TRAINED: dict[str, Callable[[Feature], None]] = {
    "one device": trainer(),
    "replicas": trainer("rollout.replicas=2"),
    "a mesh": trainer(*MESH),
}

# --- the table ------------------------------------------------------------------------------------

UNKNOWN = re.compile(
    r"unknown key|unknown option|unrecognized arguments|Extra inputs|not permitted"
    r"|unknown argument"
)
NONE = "–"


def cell(entry: Callable[[Feature], None], feature: Feature) -> str:
    """`yes`, a dash where there is no such setting, or the reason of a refusal."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            entry(feature)
    except NoSuchSetting:
        return NONE
    except (AssertionError, NameError, LookupError, TypeError, AttributeError):  # a mistake here
        raise
    except (Exception, SystemExit) as error:
        text = said.getvalue() if isinstance(error, SystemExit) else str(error)
        return NONE if UNKNOWN.search(text) else shortened(text)
    return "yes"


def shortened(text: str) -> str:
    """A refusal in a line, without the name of the program and where help is."""
    text = re.sub(r"^.*?error: ", "", text.strip(), count=1, flags=re.S)
    text = re.sub(r"\s*Try \S.*--help.*", "", text, flags=re.S)
    text = text.replace(str(PLACES.policy), "DIR").replace(str(PLACES.scratch), "")
    return " ".join(text.split()).replace("|", "\\|")


def cells(feature: Feature) -> tuple[str, ...]:
    """What each entry point does with a feature; those of `train.rl` must agree."""
    found = [cell(entry, feature) for entry in ENTRIES.values()]
    trained = {where: cell(entry, feature) for where, entry in TRAINED.items()}
    if len(set(trained.values())) == 1:
        return (*found, trained.popitem()[1])
    return (*found, "; ".join(f"{where}: {said}" for where, said in trained.items()))


HEAD = """# Which program takes which feature

`make features` writes this table, and a test compares it with the programs. Each program is asked
for each feature by its own argument, flag, key or request. `yes`: it accepts the settings and
builds what they ask for, up to compiling. `–`: it has no such setting. A number: it refuses, for
the reason below the table.

`train.rl` does the same on one device, with `rollout.replicas=2`, and on a mesh (`mesh.data=2
mesh.fsdp=4`). The model has a draft head, and a tokenizer without a chat template.
"""


def table() -> str:
    """The document: one row for all features of a group that have the same cells."""
    columns = ("", "", *ENTRIES, "`train.rl`")
    lines = [HEAD, f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    reasons: dict[str, int] = {}
    for group, features in FEATURES.items():
        for found, alike in itertools.groupby(features, cells):
            said = [
                text
                if text in ("yes", NONE)
                else f"no ({reasons.setdefault(text, len(reasons) + 1)})"
                for text in found
            ]
            names = ", ".join(feature.name for feature in alike)
            lines.append(f"| {group and f'**{group}**'} | {names} | {' | '.join(said)} |")
            group = ""
    lines += ["", *(f"{number}. {text}" for text, number in reasons.items())]
    return "\n".join(lines) + "\n"
