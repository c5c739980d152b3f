"""Which program takes which feature: the table of docs/features.md, computed by the programs.

An entry point is `LLM`, `specjax generate`, the server, and `train.rl` on one device, with
replicas, on a mesh, in several processes. A feature says how each of them is asked for it. A cell
is what the entry point's own code makes of that, up to where it would compile: `yes`, or what it
refuses it with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
from fake_devices import four_and_four
from rows import PLACES, Stopped
from shared import MAX_LEN
from train_rows import policy, tokenizer

from serve import settings
from serve.api import create_app
from serve.cli import generate
from serve.protocol import ChatRequest, CompletionRequest
from serve.settings import ServeConfig, load_llm
from specjax import LLM, ControlConfig, EngineConfig, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.command_line import parse_config
from specjax.config import ModelConfig
from specjax.control.bandit import BanditConfig
from specjax.engine.hosts import Copies
from specjax.engine.sources import load_source
from specjax.tokenizer import load_tokenizer
from train import processes
from train.collect import Rollouts
from train.engines import make_meshes
from train.groups import Seen, decide
from train.programs import (
    Programs,
    as_computed,
    build_programs,
    drafts,
    drafts_with_head,
    settle_drafting,
)
from train.schema import RLConfig

Settings = Sequence[str]


@dataclasses.dataclass(frozen=True)
class Feature:
    """Attributes:
    name: in the table. python: uses a library with it, given a maker of an `LLM`.
    flags: of `specjax generate`. server: settings of the server. body: of a request to it.
    rl: settings of `train.rl`. trained: uses what it builds of them, given the configuration, the
      programs, and what brings weights to replicas of several processes.
    """

    name: str
    python: Callable[[Callable[..., LLM]], Any]
    flags: Settings
    rl: Settings
    server: Settings = ()
    body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trained: Callable[[RLConfig, Programs, Copies | None], Any] | None = None


class NoSuchSetting(Exception):
    """Raised by a feature for an entry point that has no place to ask for it."""


def spec(**given) -> Callable:
    """Asks `LLM` for this way to speculate."""
    return lambda make: make(spec=SpecConfig(**given))


def control(speculation=None, **given) -> Callable:
    def ask(make):
        return make(spec=SpecConfig(**(speculation or {})), control=ControlConfig(**given))

    return ask


def engine(**given) -> Callable:
    return lambda make: make(engine=EngineConfig(**given))


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


def speculates(name: str, value: str, python: Callable, **other: str) -> dict[str, Any]:
    """A key of the section of speculation; `other`: keys beside it."""
    pairs = {**other, name: value}
    flags = [x for k, v in pairs.items() for x in _flag(k, v)]
    return {
        "python": python,
        "flags": flags,
        "rl": [f"rollout.{k}={v}" for k, v in pairs.items()],
        "server": [f"speculation.{k}={v}" for k, v in pairs.items()],
    }


def more(feature: dict[str, Any], rl: Settings) -> dict[str, Any]:
    """With what `train.rl` needs beside it."""
    return {**feature, "rl": [*feature["rl"], *rl]}


def controls(python: Callable, **pairs: str) -> dict[str, Any]:
    """Keys of the section of control."""
    return {
        "python": python,
        "flags": [x for k, v in pairs.items() for x in _flag(k, v)],
        "rl": [f"rollout.control.{k}={v}" for k, v in pairs.items()],
        "server": [f"speculation.control.{k}={v}" for k, v in pairs.items()],
    }


def _flag(key: str, value: str) -> list[str]:
    flag = f"--{key.replace('_', '-')}"
    return [flag] if value == "true" else [flag, value.strip("[]")]


def samples(name: str, value: Any, rl: str | None = None) -> dict[str, Any]:
    """A field of `SamplingParams`."""
    text = rl or str(value)
    return {
        "python": sampled(**{name: value}),
        "flags": [f"--{name.replace('_', '-')}", text],
        "rl": [f"rollout.{name}={text}"],
        "body": {name: value},
    }


def trains(*given: str) -> dict[str, Any]:
    """What only training knows: other entry points are asked for it by its key."""
    names = [setting.partition("=") for setting in given]

    def ask(make):
        keys = {name.rpartition(".")[2] for name, _, _ in names}
        assert not keys & inspect.signature(LLM).parameters.keys(), "LLM has it: ask for it"
        raise NoSuchSetting

    return {
        "python": ask,
        "flags": [x for name, _, v in names for x in _flag(name.rpartition(".")[2], v)],
        "rl": given,
        "server": given,
    }


def new_weights(make: Callable[..., LLM]) -> None:
    llm, (params, head) = make(), weights_of_policy()
    params, version = jax.tree.map(lambda a: 2 * a, params), llm.engine.version
    llm.update_weights(params, head)
    assert llm.params is params and llm.engine.version > version


def new_head(make: Callable[..., LLM]) -> None:
    llm, (_, head) = make(), weights_of_policy()
    head = jax.tree.map(lambda a: 2 * a, head)
    llm.update_head(head)
    assert llm.head is head


def synchronised(cfg: RLConfig, built: Programs, copies: Copies | None) -> None:
    """As each step ends."""
    if copies is None:  # the others lie nowhere
        processes.as_one(built.engines, None).set_params(*weights_of_policy())
    assert copies is None or copies.home.count == 2


def head_trains(cfg: RLConfig, built: Programs, copies: Copies | None) -> None:
    assert cfg.draft.mode == "online" and built.draft is not None


def replaces(cfg: RLConfig, built: Programs, copies: Copies | None) -> None:
    """A group that teaches nothing makes place for another one, and is not selected."""
    prompts = SimpleNamespace(tokenizer=tokenizer())
    rule = Rollouts(cfg, order=(), prompts=prompts, eos_ids=(), scorer=None).rule
    seen = [Seen(2, 2, informative=False), *[Seen(2, 2)] * (rule.in_air - 1)]
    choice = decide(rule, seen)
    assert choice.places == rule.in_air + 1 and not choice.certain
    choice = decide(rule, [*seen, Seen(2, 2)])
    assert choice.certain and 0 not in choice.selected and len(choice.selected) == rule.prompts


def chats(template: str, prompt: str, **variables: Any) -> Callable:
    """Asks `LLM` to chat with this template, up to where it would generate.

    Args:
      prompt: that the template makes. variables: of the template.
    """

    def ask(make):
        known = load_tokenizer(PLACES.policy)
        known.chat_template = template
        llm, messages = make(tokenizer=known), [{"role": "user", "content": "a"}]
        with mock.patch.object(LLM, "_run", side_effect=Stopped) as run:
            with contextlib.suppress(Stopped):
                llm.chat(messages, SamplingParams(max_tokens=4), chat_template_kwargs=variables)
        (job,) = run.call_args.args[0]
        assert job.prompt == known.encode(prompt, add_special_tokens=False), job.prompt

    return ask


FEATURES: dict[str, list[Feature]] = {
    "What a round drafts": [
        Feature("a chain (`4_1_5`)", **speculates("strategy", "4_1_5", spec(strategy="4_1_5"))),
        Feature(
            "a dynamic tree (`2_2_4`)", **speculates("strategy", "2_2_4", spec(strategy="2_2_4"))
        ),
        Feature("a static tree (`2x1`)", **speculates("strategy", "2x1", spec(strategy="2x1"))),
        Feature("nothing (`off`)", **speculates("strategy", "off", spec(strategy="off"))),
        Feature(
            "fewer rows (`spec_verify_tokens`)",
            **speculates(
                "spec_verify_tokens",
                "3",
                spec(strategy="2_2_4", spec_verify_tokens=3),
                strategy="2_2_4",
            ),
        ),
        Feature(
            "adaptive width",
            **speculates(
                "adaptive_width",
                "true",
                spec(strategy="2_2_4", adaptive_width=True),
                strategy="2_2_4",
            ),
        ),
        Feature(
            "`tau` of dynamic trees",
            **speculates("tau", "0.5", spec(strategy="2_2_4", tau=0.5), strategy="2_2_4"),
        ),
        Feature(
            "`aligned=false`",
            **more(speculates("aligned", "false", spec(aligned=False)), rl=["rollout.top_p=0.9"]),
        ),
    ],
    "What accepts": [
        *(
            Feature(f"`{name}`", **speculates("acceptance", name, spec(acceptance=name)))
            for name in ("coupled", "block")
        ),
        Feature(
            "`recursive` (a static tree)",
            **speculates(
                "acceptance",
                "recursive",
                spec(strategy="2x1", acceptance="recursive"),
                strategy="2x1",
            ),
        ),
        Feature(
            "`greedy` (temperature 0)",
            **more(
                speculates("acceptance", "greedy", spec(acceptance="greedy")),
                rl=["rollout.temperature=0"],
            ),
        ),
        Feature("`invariant`", **speculates("invariant", "true", spec(invariant=True))),
        Feature("exact mode", **speculates("exact_mode", "true", spec(exact_mode=True))),
        Feature("telemetry", **speculates("telemetry", "true", spec(telemetry=True))),
    ],
    "What drafts": [
        Feature("the checkpoint's head", **speculates("source", "head", spec(source="head"))),
        Feature("a random head", **speculates("head", "random", spec(head="random"))),
        Feature("n-grams", **speculates("source", "ngram", spec(source="ngram"))),
        Feature(
            "n-grams, longest suffix",
            **speculates("ngram_max", "3", spec(source="ngram", ngram_max=3), source="ngram"),
        ),
        Feature(
            "a part of the vocabulary", **speculates("draft_vocab", "16", spec(draft_vocab=16))
        ),
        Feature(
            "a smaller model",
            **speculates("draft_model", "DIR", spec(draft_model="DIR")),
        ),
    ],
    "Who chooses the strategy": [
        *(
            Feature(f"`{name}`", **controls(control(controller=name), controller=name))
            for name in ("goodput", "static", "ema", "bandit")
        ),
        Feature(
            "its strategies",
            **controls(control(strategies=("off", "4_1_5")), strategies="[off,4_1_5]"),
        ),
        Feature(
            "`bandit` by accept length",
            **controls(
                control(controller="bandit", bandit=BanditConfig(reward="accept_length")),
                controller="bandit",
                bandit="{reward: accept_length}",
            ),
        ),
        Feature(
            "`ema` with a file (`ema_file`)",
            **controls(
                lambda make: control(controller="ema", ema_file=ema_file())(make),
                controller="ema",
                ema_file="EMA",
            ),
        ),
        Feature("`bs_threshold`", **controls(control(bs_threshold=4), bs_threshold="4")),
        Feature(
            "FastRL's section (`fastrl`)",
            **controls(
                lambda make: make(control=ControlConfig.from_fastrl(FASTRL)),
                fastrl="{enable: true, eagle: {tune_algorithm: BEG, mab_configs: [2_1_3]}}",
            ),
        ),
        Feature(
            "with `block` acceptance",
            python=control({"acceptance": "block"}, controller="goodput"),
            flags=["--controller", "goodput", "--acceptance", "block"],
            rl=["rollout.control.controller=goodput", "rollout.acceptance=block"],
            server=["speculation.control.controller=goodput", "speculation.acceptance=block"],
        ),
        Feature(
            "with `invariant`",
            python=control({"invariant": True}, controller="goodput"),
            flags=["--controller", "goodput", "--invariant"],
            rl=["rollout.control.controller=goodput", "rollout.invariant=true"],
            server=["speculation.control.controller=goodput", "speculation.invariant=true"],
        ),
    ],
    "How tokens are sampled": [
        Feature("`temperature`", **samples("temperature", 0.7)),
        Feature("`top_p`", **samples("top_p", 0.9)),
        Feature("`top_k`", **samples("top_k", 20)),
        Feature("`min_p`", **samples("min_p", 0.1)),
        Feature("`repetition_penalty`", **samples("repetition_penalty", 1.1)),
        Feature("`presence_penalty`", **samples("presence_penalty", 0.1)),
        Feature("`frequency_penalty`", **samples("frequency_penalty", 0.1)),
        Feature("`min_tokens`", **samples("min_tokens", 2)),
        Feature(
            "`stop` strings",
            python=sampled(stop="a"),
            flags=["--stop", "a"],
            rl=["rollout.stop=[a]"],
            body={"stop": ["a"]},
        ),
        Feature(
            "`logit_bias`",
            python=sampled(logit_bias={5: 1.0}),
            flags=["--logit-bias", "5:1"],
            rl=["rollout.logit_bias={5: 1}"],
            body={"logit_bias": {"5": 1.0}},
        ),
        Feature(
            "`bad_words`",
            python=sampled(bad_words=["a"]),
            flags=["--bad-words", "a"],
            rl=["rollout.bad_words=[a]"],
            body={"bad_words": ["a"]},
        ),
        Feature(
            "`allowed_token_ids`",
            python=sampled(allowed_token_ids=[5, 6]),
            flags=["--allowed-token-ids", "5,6"],
            rl=["rollout.allowed_token_ids=[5, 6]"],
            body={"allowed_token_ids": [5, 6]},
        ),
        Feature(
            "several samples, which share the prompt's pages",
            python=sampled(n=3),
            flags=["-n", "3"],
            rl=["rollout.n=3"],
            body={"n": 3},
        ),
    ],
    "What is told beside the tokens": [
        Feature(
            "processed log-probabilities",
            python=sampled(transformed_logprobs=True),
            flags=["--transformed-logprobs"],
            rl=["algo.logprobs=processed", "rollout.top_p=0.9"],
            body={"transformed_logprobs": True},
        ),
        Feature(
            "the most likely tokens",
            python=sampled(top_logprobs=2),
            flags=["--top-logprobs", "2"],
            rl=["rollout.top_logprobs=2"],
            body={"logprobs": 2},
        ),
        Feature(
            "log-probabilities of the prompt",
            python=sampled(prompt_logprobs=1),
            flags=["--prompt-logprobs", "1"],
            rl=["rollout.prompt_logprobs=1"],
            body={"prompt_logprobs": 1},
        ),
    ],
    "How prompts are written": [
        Feature(
            "a chat template",
            python=chats("<{{ messages[0].content }}>", "<a>"),
            flags=["--chat", "--chat-template", "{{ messages[0].content }}"],
            rl=["data.chat=on"],
            server=["chat_template={{ messages[0].content }}"],
            body={"messages": [{"role": "user", "content": "a"}]},
        ),
        Feature(
            "options of the template",
            python=chats("{{ a }}", "1", a=1),
            flags=["--chat", "--chat-template", "{{ a }}", "--chat-template-kwargs", '{"a": 1}'],
            rl=["data.chat=on", "data.chat_template_kwargs={a: 1}"],
            server=["chat_template={{ a }}"],
            body={
                "messages": [{"role": "user", "content": "a"}],
                "chat_template_kwargs": {"a": 1},
            },
        ),
        Feature(
            "defaults of generation_config.json",
            python=lambda make: make(generation_config="auto"),
            flags=["--generation-config", "auto"],
            rl=["generation_config=auto"],
            server=["generation_config=auto"],
        ),
    ],
    "Devices and memory": [
        Feature(
            "replicas",
            python=lambda make: make(replicas=2),
            flags=["--replicas", "2"],
            rl=["rollout.replicas=8"],
            server=["engine.replicas=2"],
        ),
        Feature(
            "devices of a replica (`tp`)",
            python=lambda make: make(tp=2),
            flags=["--tp", "2"],
            rl=["rollout.tp=2"],
            server=["engine.tp=2"],
        ),
        Feature(
            "attention by name",
            python=engine(attention="reference"),
            flags=["--attention", "reference"],
            rl=["attention=reference"],
            server=["engine.attention=reference"],
        ),
        Feature(
            "memory of the cache",
            python=engine(cache_bytes=10_000_000),
            flags=["--cache-bytes", "10000000"],
            rl=["rollout.cache_bytes=10000000"],
            server=["engine.cache_bytes=10000000"],
        ),
        Feature(
            "longest first",
            python=engine(order="longest_first"),
            flags=["--order", "longest_first"],
            rl=["rollout.order=longest_first"],
            server=["engine.order=longest_first"],
        ),
        Feature(
            "a dtype of its own",
            python=lambda make: make(dtype="bfloat16"),
            flags=["--dtype", "bfloat16"],
            rl=["rollout.dtype=bfloat16"],
            server=["engine.dtype=bfloat16"],
        ),
    ],
    "Weights that change": [
        Feature(
            "new weights",
            python=new_weights,
            flags=["--update"],
            rl=[],
            server=["route:/update_weights"],
            trained=synchronised,
        ),
        Feature(
            "a head that is trained meanwhile",
            python=new_head,
            flags=["--online"],
            rl=["draft.mode=online"],
            server=["route:/update_weights"],
            trained=head_trains,
        ),
        Feature(
            "a head trained in the gaps of rollouts (spot)",
            **trains("draft.spot.enabled=true", "draft.spot.gaps=false"),
        ),
    ],
    "How a policy is trained": [
        Feature("truncated importance sampling", **trains("algo.tis=true")),
        Feature(
            "the same under a controller",
            **trains("algo.tis=true", "rollout.control.controller=goodput"),
        ),
        Feature(
            "the same under a controller, `invariant`",
            **trains(
                "algo.tis=true", "rollout.control.controller=goodput", "rollout.invariant=true"
            ),
        ),
        Feature(
            "the same with processed log-probabilities",
            **trains("algo.tis=true", "algo.logprobs=processed", "rollout.top_p=0.9"),
        ),
        Feature(
            "dynamic sampling that replaces groups",
            **trains("algo.dynamic_sampling=true"),
            trained=replaces,
        ),
        Feature("over-sampling", **trains("rollout.over_sample=1.5")),
        Feature("partial rollouts", **trains("rollout.partial=true", "rollout.over_sample=1.5")),
        Feature("a penalty on KL to the reference", **trains("algo.kl_loss_coef=0.1")),
    ],
}
FASTRL = {"enable": True, "eagle": {"tune_algorithm": "BEG", "mab_configs": ["2_1_3"]}}


def ema_file() -> str:
    path = PLACES.scratch / "features.json"
    path.write_text('{"candidate_steps": [1, 2]}')
    return str(path)


def _filled(settings: Settings) -> list[str]:
    """With the places of this machine for those that a feature names."""
    places = {"DIR": str(PLACES.policy), "EMA": ema_file()}
    return [re.sub(r"\b(DIR|EMA)\b", lambda m: places[m[0]], text) for text in settings]


# --- the entry points -----------------------------------------------------------------------------


@functools.cache
def _model():
    return (policy(), *weights_of_policy())


@functools.cache
def weights_of_policy():
    _, params, head = hf.load_checkpoint(PLACES.policy, "float32")
    return params, head


def make_llm(model: Any = None, **given) -> LLM:
    """An `LLM` of the policy's weights, which lie in memory already."""
    spec = given.get("spec")
    if getattr(spec, "draft_model", None) == "DIR":
        given["spec"] = dataclasses.replace(spec, draft_model=str(PLACES.policy))
    # Of its own: the server may give it a chat template.
    defaults = {"max_batch": 2, "max_len": MAX_LEN, "tokenizer": load_tokenizer(PLACES.policy)}
    given.pop("revision", None)
    return LLM(_model(), **{**defaults, **given})


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
    routes = [text.removeprefix("route:") for text in given if text.startswith("route:")]
    given = [text for text in given if not text.startswith("route:")]
    cfg, _ = parse_config(ServeConfig, [f"model={PLACES.policy}", *given])
    with mock.patch.object(settings, "LLM", make_llm):
        llm = load_llm(cfg)
    if routes:
        paths = {getattr(route, "path", None) for route in create_app(cfg, llm).routes}
        assert paths.issuperset(routes), f"there is no route {routes}"
    body = dict(feature.body)
    kind = ChatRequest if "messages" in body else CompletionRequest
    asked = kind.model_validate({"prompt": "1+1="} | body if kind is CompletionRequest else body)
    asked.require_supported()
    asked.params(4, asked.top)


def trainer(*more: str, several: bool = False) -> Callable[[Feature], None]:
    """`train.rl`, up to where it would compile."""

    def entry(feature: Feature) -> None:
        own = _filled(feature.rl)
        named = {setting.partition("=")[0] for setting in own}
        argv = [f"model={PLACES.policy}", "rollout.max_batch=2", "eval.problems=0"]
        argv += [setting for setting in more if setting.partition("=")[0] not in named]
        if several and "rollout.tp=2" in own:  # as many devices, in fewer replicas
            own = [*own, "rollout.replicas=4"]
        cfg, _ = parse_config(RLConfig, [*argv, *own])
        cfg.dtype.settle("float32", "cpu")
        settle_drafting(cfg, has_head=True)
        model = as_computed(cfg, policy())
        # No weights can lie on devices of the stand-in for two processes.
        source = _source(cfg, model, None) if several else None
        with four_and_four() if several else contextlib.nullcontext():
            mesh, places = make_meshes(cfg)
            copies = processes.copies_for(cfg, mesh, places)
            if several:  # half of the replicas are this process's, and the others come after
                assert copies.before == 0 and 2 * len(copies.own) == len(places), copies.own
            places = (copies.own if copies else places)[:2]
            source = source or _source(cfg, model, mesh)
            built = build_programs(cfg, model, source, mesh, places)
            if feature.trained is not None:
                feature.trained(cfg, built, copies)

    return entry


def _source(cfg: RLConfig, model: ModelConfig, mesh: jax.sharding.Mesh | None):
    """What drafts in the place of the head, if anything does."""
    if not drafts(cfg) or drafts_with_head(cfg):
        return None
    return load_source(model, cfg.rollout.spec(), None, tokenizer(), mesh)[1]


MESH = ("mesh.data=2", "mesh.fsdp=4", "packing.rows=8")
ENTRIES: dict[str, Callable[[Feature], None]] = {
    "`LLM`": python,
    "`specjax generate`": command,
    "server": server,
    "`train.rl`, one device": trainer(),
    "replicas": trainer("rollout.replicas=2"),
    "a mesh": trainer(*MESH),
    "several processes": trainer(*MESH, "rollout.replicas=8", several=True),
}

# --- the table ------------------------------------------------------------------------------------

UNKNOWN = re.compile(
    r"unknown key|unknown option|unrecognized arguments|Extra inputs|not permitted"
    r"|unknown argument"
)
NONE = "no such setting"


def cell(entry: Callable[[Feature], None], feature: Feature) -> str:
    """`yes`, or why not."""
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


HEAD = """# Which program takes which feature

Made by `make features`; a test compares it with what the programs say. Each cell is what the
program itself makes of the feature, asked for by its own keyword, flag, key or request: `yes`, a
number of one of the refusals below, or that it has no such setting. A `yes` means that the program
accepts the settings and builds what they ask for, up to compiling; what then comes out is for other
tests.

The columns are Python (`LLM`), `specjax generate`, the server, and `train.rl` on one device, with
`rollout.replicas=2`, on a mesh (`mesh.data=2 mesh.fsdp=4`), and in the first of two processes (the
same mesh, `rollout.replicas=8`). The model has a draft head, and a tokenizer without a chat
template.
"""


def table() -> str:
    """The document."""
    reasons: dict[str, int] = {}
    lines = [HEAD, f"| | {' | '.join(ENTRIES)} |", f"|---|{'---|' * len(ENTRIES)}"]
    for group, features in FEATURES.items():
        lines.append(f"| **{group}** |{' |' * len(ENTRIES)}")
        for feature in features:
            cells = []
            for entry in ENTRIES.values():
                said = cell(entry, feature)
                if said not in ("yes", NONE):
                    said = f"no ({reasons.setdefault(said, len(reasons) + 1)})"
                cells.append(said)
            lines.append(f"| {feature.name} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {text}" for text, number in reasons.items())]
    return "\n".join(lines) + "\n"
