"""Rows of `train.rl` and `train.sft`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import shutil
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from library_rows import eagle3_files_for
from rows import (
    PLACES,
    Reaches,
    ReadBy,
    Row,
    Stopped,
    called_with,
    outcome,
    reads,
    scratch,
    written,
)

import train.trainer
from specjax import ControlConfig, EngineConfig, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.config import ModelConfig
from specjax.drafts.mtp import MTPSource, init_head_params
from specjax.engine.sources import Drafting, load_source
from specjax.interfaces import Denominators
from specjax.models.transformer import init_params
from specjax.parallel import distributed
from specjax.parallel.context import context_of
from specjax.tokenizer import load_tokenizer, with_tokenizer_end
from train import collect, data, processes, registry, rl, sft
from train.algo import with_objective
from train.evaluation import evaluate, problem_sets
from train.flops import UpdateSpeed
from train.groups import Group, GroupStatus, Response, select
from train.heads import DraftConfig, DraftTrainer
from train.inputs import Prompts, read_inputs
from train.objectives.shared import GroupRelative
from train.packing import Sample, pack
from train.programs import (
    as_computed,
    build_programs,
    drafts,
    make_meshes,
    settle_drafting,
)
from train.schema import RLConfig, SFTConfig
from train.scoring import Scorer
from train.spot import HeadDevices, SpotTraining
from train.tasks.layout import Problem
from train.trainer import Trainer

# --- a run of RL, as far as an effect needs it ----------------------------------------------------


@functools.cache
def policy() -> ModelConfig:
    cfg = hf.read_config(PLACES.policy)
    return with_tokenizer_end(cfg, tokenizer())


def eagle3_files() -> str:
    """The directory of an EAGLE-3 head of the policy."""
    return eagle3_files_for(policy())


@functools.cache
def tokenizer():
    return load_tokenizer(PLACES.policy)


@functools.cache
def templated():
    """A tokenizer with a chat template that takes a variable, and writes the year."""
    found = load_tokenizer(PLACES.policy)
    found.chat_template = (
        "{{ mark }}{{ strftime_now('%Y') }}{% for m in messages %}<{{ m.content }}>{% endfor %}"
    )
    return found


def settled(cfg: RLConfig) -> RLConfig:
    _settle(cfg)
    return cfg


def _settle(cfg: RLConfig) -> Drafting:
    cfg.dtype.settle("float32", "cpu")
    return settle_drafting(cfg, MTPSource)


def built(cfg: RLConfig):
    """The programs of a run; nothing is compiled."""
    drafting = _settle(cfg)
    mesh, places = make_meshes(cfg)
    model, source = as_computed(cfg, policy()), None
    if drafts(cfg) and not drafting.with_head:
        _, source, _ = load_source(model, cfg.rollout.spec(), None, tokenizer(), mesh)
    return build_programs(cfg, model, source, mesh, places)


def engine(cfg: RLConfig):
    return built(cfg).engines[0]


def runner(field: str):
    return lambda cfg: outcome(lambda: reads(field)(engine(cfg).runner))


def trainer(cfg: RLConfig) -> Trainer:
    return Trainer(cfg)


def rollouts(cfg: RLConfig) -> collect.Rollouts:
    prompts = Prompts(tokenizer(), cfg.data, cfg.rollout.max_prompt_tokens)
    order = data.endless(data.problems(cfg.data, "train", prompts.chat), cfg.data.seed)
    names = "exact" if cfg.reward == "auto" else cfg.reward
    return collect.Rollouts(cfg, order, prompts, policy().eos_token_ids, Scorer(names))


def jobs(cfg: RLConfig):
    """The samples of the first group of a step, as the engine gets them."""
    found = rollouts(cfg)
    found._at = 0  # where a step begins to draw
    return found._jobs(0, found._draw(1))


def asked(cfg: RLConfig) -> SamplingParams:
    return jobs(cfg)[0].params


def prompt(cfg: RLConfig):
    return jobs(cfg)[0].prompt


def chosen(cfg: RLConfig):
    """What a step makes of groups of which the second teaches nothing."""
    status = [
        GroupStatus(3, 3), GroupStatus(4, 4, informative=False), GroupStatus(5, 5),
        GroupStatus(6, 6),
    ]  # fmt: skip
    return select(rollouts(cfg).rule, status)


def kept(cfg: RLConfig):
    """Which of some groups, of two samples with two rewards each, teach something."""
    groups = []
    for parts in (((1.0, 0.0), (0.0, 0.0)), ((1.0, 1.0), (1.0, 0.0)), ((1.0, 1.0), (0.0, 1.0))):
        rewards = [sum(part) for part in parts]
        responses = [Response([1], [0.0], finish_reason="stop", parts=part) for part in parts]
        groups.append(Group(0, 1, 1, Problem("", "", 0), [1], responses, rewards))
    rule = rollouts(cfg).rule
    return [group.status(rule.filter).informative for group in groups]


def collected(cfg: RLConfig):
    """How a step's collection begins in step 9, when a group of step 4 and one of 8 are carried."""
    found = rollouts(cfg)
    for step in (4, 8):
        response = Response([1, 2], [0.0, 0.0], weight_versions=[(0, step)])
        found.carried.append(Group(step, step + 1, step, Problem("", "", 0), [1], [response]))
    bound = called_with(collect, "StepRollout", lambda: found.collect(None, 9))
    return bound.arguments["partial"], [g.step for g in bound.arguments["carried"]]


def drafted_from(cfg: RLConfig):
    """The ids to draft from after two steps, of which the first emitted more of other tokens."""
    vocabulary = trainer(cfg).vocabulary
    for tokens in ([*range(100, 116)] * 3, [*range(200, 216)] * 2):
        vocabulary.end_step([tokens])
    return vocabulary.ids.tolist()


TINY = {
    "rollout.prompts": 2,
    "rollout.n": 2,
    "rollout.max_tokens": 20,
    "rollout.max_prompt_tokens": 12,
    "rollout.strategy": "1_1_2",
    "packing.row_length": 64,
    "packing.rows": 2,
}


SHAPED = {**TINY, "algo.normalize_std": False}


def loss(cfg: RLConfig):
    """Of the policy, and its gradient, on a batch whose ratios leave the clip."""
    programs = built(cfg)
    samples = [Sample(i, [1, 2], [3, 4, 5][: i + 1], advantage=(-1.0) ** i) for i in range(3)]
    [batch] = pack(samples, 16, 1)
    generator = np.random.default_rng(0)
    shape = batch["tokens"].shape
    batch |= {"fresh_logprobs": np.full(shape, 0.1, np.float32)}
    batch["behaviour_logprobs"] = generator.normal(size=shape).astype(np.float32)
    batch["staleness"] = np.arange(shape[1], dtype=np.int32)[None] % 2
    if cfg.algo.kl_loss_coef:
        batch["ref_logprobs"] = np.full(shape, -0.5, np.float32)
    logprobs = jnp.asarray(generator.normal(size=shape), jnp.float32)

    def value(logprobs):
        counts = Denominators(np.float32(6), np.float32(3))
        return programs.policy.loss(logprobs, jnp.ones(shape), batch, counts)[0]

    return jax.value_and_grad(value)(logprobs)


@dataclasses.dataclass(frozen=True)
class Plain(GroupRelative):
    """An objective that clips nothing."""

    def per_token(self, logprobs, advantages, segments, loss_mask):
        return -logprobs.new * advantages, {}


class Handed:
    """A policy that keeps what its updates are given."""

    def __init__(self):
        self.given = []

    def place(self, batch):
        return dict(batch)

    def logprobs(self, params, batch):
        return np.full_like(batch["advantages"], 0.0 if params is None else -0.5)

    def fetch(self, rows):
        return rows

    def update(self, params, opt_state, batches, counts, keep):
        self.given.append((batches, keep))
        states = [None] * len(batches)
        sums = dict.fromkeys(("tokens", "loss", "policy_loss", "kl_loss", "grad_norm"), 1.0)
        return params, opt_state, states[:keep], sums


def updates(cfg: RLConfig):
    """The batches that the policy is updated with, and how many states the head gets."""
    settled(cfg)
    run = Trainer.__new__(Trainer)
    run.cfg, run.policy, run.params, run.opt_state = cfg, Handed(), None, None
    run.reference, run.draft = "reference", cfg.draft.mode == "online" or None
    run.row_sizes = cfg.row_sizes
    run._speed = UpdateSpeed(policy(), jax.devices())
    groups = []
    for prompt, rewards in (([1, 2], [0.0, 1.0]), ([3], [0.0, 3.0])):
        responses = [
            Response([5] * n, [0.0] * n, weight_versions=[(0, 1)], finish_reason=reason)
            for n, reason in ((8, "stop"), (16, "length"))
        ]
        groups.append(Group(0, 1, 1, None, prompt, responses, rewards))
    _, states = run._update_policy(groups, {}, 1)
    return run.policy.given, len(states)


def referenced(cfg: RLConfig):
    """The reference after two steps."""
    run = Trainer.__new__(Trainer)
    run.cfg, run.reference, found = cfg, {"w": jnp.zeros(1)}, []
    for step in (1, 2):
        run.params = {"w": jnp.full(1, float(step))}
        run._update_reference(step)
        found.append(run.reference)
    return found


def steps_of(optimizer: optax.GradientTransformation):
    """What four updates of a matrix and a norm's scale are."""
    params = {"w": jnp.full((2, 2), 2.0), "norm": jnp.ones(2)}
    state, found = optimizer.init(params), []
    for i in range(4):
        gradient = jax.tree.map(lambda x, i=i: x * (0.1 + 3 * (i % 2)), params)
        step, state = optimizer.update(gradient, state, params)
        found.append(step)
    return found


def optimizer_rows(prefix: str, steps) -> dict:
    """Of an optimizer; `steps` gives its updates for a configuration."""
    return {
        f"{prefix}.{name}": Row(value, steps, {f"{prefix}.{k}": v for k, v in beside.items()})
        for name, value, beside in (
            ("lr", 0.02, {}),
            ("warmup_steps", 3, {}),
            ("decay_steps", 3, {"warmup_steps": 0}),
            ("final_lr_ratio", 0.5, {"warmup_steps": 0, "decay_steps": 3}),
            ("weight_decay", 0.1, {}),
            ("b1", 0.5, {}),
            ("b2", 0.5, {}),
            ("clip_norm", 0.5, {}),
        )
    }


# --- several processes ----------------------------------------------------------------------------


def joined(cfg: RLConfig):
    """What jax is told of the job, or why there is none."""
    calls = []
    with (
        mock.patch.object(jax.distributed, "initialize", lambda **given: calls.append(given)),
        mock.patch.object(distributed.sharding, "offer_cpu_devices", lambda *_: None),
        mock.patch.object(jax.config, "update", lambda *_: None),
        mock.patch.dict("os.environ", {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "a,b"}),
    ):
        return outcome(lambda: distributed.start(cfg.distributed, 2)), calls


# --- data -----------------------------------------------------------------------------------------


def _lines(*rows: dict) -> str:
    return "\n".join(json.dumps(row) for row in rows) + "\n"


def _rows(count: int, **more) -> list[dict]:
    return [
        {"question": f"What is {i} + 1?", "answer": f"{i}+1=<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}
        | more
        for i in range(count)
    ]


GSM8K = written("gsm8k.jsonl", _lines(*_rows(40), *_rows(2)))
HELDOUT = written("heldout.jsonl", _lines(*_rows(3)))
UNWINNABLE = written(
    "none.jsonl",
    _lines(*({"question": f"Is it {i}?", "answer": "no number"} for i in range(9)), *_rows(40)),
)
DAPO = written(
    "both.jsonl", _lines(*({**row, "prompt": "Another: " + row["question"]} for row in _rows(40)))
)


def problems(cfg):
    found = data.problems(cfg.data, "train")
    return len(found), [found[i].prompt for i in range(5)]


def answers(cfg):
    return [problem.answer for problem in data.problems(cfg.data, "train")[:5]]


def heldout(cfg):
    found = data.problems(cfg.data, "heldout")
    return len(found), [found[i].prompt for i in range(min(3, len(found)))]


def order(cfg):
    drawn = data.endless(data.problems(cfg.data, "train"), cfg.data.seed)
    return [drawn[i].prompt for i in range(3)]


def first_prompt(cfg):
    """As text, by a tokenizer that has a chat template."""
    [problem] = [data.problems(cfg.data, "train", data.uses_chat(cfg.data, templated()))[0]]
    return Prompts(templated(), cfg.data).text(problem)


def looked_at(cfg: RLConfig):
    """What becomes of a prompt that is too long."""
    prompts = Prompts(tokenizer(), cfg.data, cfg.rollout.max_prompt_tokens)
    return outcome(lambda: prompts.fit(Problem("1+1=" * 20, "2", 0)))


def unwinnable(cfg: RLConfig):
    """What a run says of a row that cannot be won."""
    return outcome(lambda: read_inputs(cfg, tokenizer(), "policy").notes)


def scored(cfg: RLConfig):
    """How a run scores three completions."""
    scorer = read_inputs(cfg, tokenizer(), "policy").scorer
    texts = ("#### 5", "\\boxed{5}", "#### five")
    return [scorer(text, Problem("", "5", 0)) for text in texts]


def rewarded_in(cfg: RLConfig):
    """Where a run computes rewards, and for how long at most."""
    return read_inputs(cfg, tokenizer(), "policy").scorer.described


def evaluated(cfg: RLConfig):
    """Which held-out problems are sampled, how, and by how many slots."""
    inputs, found = read_inputs(cfg, tokenizer(), "policy"), []
    stand_in = types.SimpleNamespace(generate=lambda jobs, *_: found.extend(jobs) or _stop())
    sets, _ = problem_sets(cfg, inputs, "policy")
    if not sets:
        return None
    outcome(lambda: evaluate(stand_in, sets, (1,), cfg.eval.seed))
    return [(job.prompt, job.params) for job in found]


def _stop():
    raise Stopped


class Numbers:
    """A data set of a `reasoning_gym` that need not be installed."""

    def __init__(self, step: int, seed: int, first: int = 0):
        self.step, self.seed, self.first = step, seed, first

    def __getitem__(self, index: int) -> dict:
        number = self.first + self.seed + self.step * index
        return {"question": f"{number}?", "answer": str(number), "metadata": {}}


@contextlib.contextmanager
def stand_in_for_reasoning_gym():
    """A package of that name with two data sets, `ones` and `twos`."""
    names = {"ones": 1, "twos": 2}
    package, factory = map(types.ModuleType, ("reasoning_gym", "reasoning_gym.factory"))
    package.create_dataset = lambda name, **given: Numbers(names[name], **given)
    factory.DATASETS = names
    modules = {"reasoning_gym": package, "reasoning_gym.factory": factory}
    with mock.patch.dict(sys.modules, modules):
        yield


def generated(cfg):
    """The first problems of a data set of reasoning-gym."""
    with stand_in_for_reasoning_gym():
        return [problem.prompt for problem in data.problems(cfg.data, "train")[:3]]


GYM = {"data.task": "reasoning_gym", "data.dataset": "ones"}
DATA = {
    "data.task": Row("prompt", lambda cfg: outcome(lambda: problems(cfg)), {"data.path": DAPO}),
    "data.path": Row(GSM8K, problems),
    "data.heldout_path": Row(HELDOUT, problems, {"data.path": GSM8K}),
    "data.prompt_key": Row("answer", problems, {"data.path": GSM8K}),
    "data.answer_key": Row("question", answers, {"data.path": GSM8K}),
    "data.seed": Row(7, order),
    "data.prompt_template": Row("Q: {question}", problems, {"data.path": GSM8K}),
    "data.chat": Row("off", first_prompt),
    "data.chat_template_kwargs": Row({"mark": "!"}, first_prompt),
    "data.date": Row("2020-02-03", first_prompt),
    "data.duplicates": Row("drop", problems, {"data.path": GSM8K}),
    "data.train_size": Row(100, problems),
    "data.min_terms": Row(8, problems),
    "data.max_terms": Row(3, problems),
    "data.max_number": Row(9, problems),
}

# --- the head -------------------------------------------------------------------------------------


def pieces(cfg: DraftConfig) -> int:
    """How many updates of the head five micro-batches bring."""
    calls, run = [], DraftTrainer.__new__(DraftTrainer)
    run.draft = cfg
    run.start_update = lambda head, opt, *_: calls.append(1) or (head, opt, {"n": np.ones(1)})
    run.update(None, None, {}, [{}] * 5, [None] * 5)
    return len(calls)


TRACED: dict[str, str] = {}


@functools.cache
def _shapes():
    model = policy()
    params = jax.eval_shape(lambda: init_params(model))
    head = jax.eval_shape(lambda: init_head_params(model))
    [batch] = pack([Sample(0, [1, 2], [3, 4, 5])], 8, 1)
    return model, params, head, batch, jax.ShapeDtypeStruct((1, 8, model.hidden_size), np.float32)


def head_update(draft: DraftConfig) -> str:
    """The program of an update of the head, as traced."""
    found = TRACED.get(repr(draft))
    if found is None:
        found = TRACED[repr(draft)] = _traced(draft)
    return found


def _traced(draft: DraftConfig) -> str:
    model, params, head, batch, states = _shapes()
    run = DraftTrainer(model, draft)
    opt = jax.eval_shape(run.init_opt_state, head)
    batch = {name: batch[name] for name in ("tokens", "positions", "segment_ids", "loss_mask")}
    return str(jax.make_jaxpr(run._update_program)(head, opt, params, batch, states))


def spot(cfg: RLConfig) -> SpotTraining:
    settled(cfg)
    noted = types.SimpleNamespace(draft=lambda *_: None)
    draft = types.SimpleNamespace(start_update=None, mesh=None)
    places = [HeadDevices(draft, device) for device in jax.devices()[:2]]
    return SpotTraining(places, cfg.draft, noted)


def planned(cfg: RLConfig):
    """The steps whose micro-batches the head learns from in step 4."""
    run = spot(cfg)
    batch = {name: np.zeros((2, 64)) for name in ("tokens", "positions", "segment_ids")}
    batch["loss_mask"] = batch["tokens"]
    for step in (1, 2, 3):
        run.store(step, [batch] * 2, [np.zeros((2, 64, 2))] * 2)
    return [e.step for e in run.buffer.plan(4, cfg.draft.spot.updates, cfg.draft.epochs)]


def sent_in_gap(cfg: RLConfig):
    """Whether a replica that has nothing to do is sent an update."""
    run, sent = spot(cfg), []
    run._remaining, run._running, run._place = [types.SimpleNamespace(states=[0])], None, None
    run._start = lambda replica, in_gap: sent.append((replica, in_gap))
    run.use_idle([1])
    return sent


REPLACES = {"algo.dynamic_sampling": True}
SPOT = {
    "rollout.replicas": 2,
    "draft.spot.enabled": True,
    "rollout.draft": "checkpoint",
    "packing.row_length": 64,
    "packing.rows": 2,
    "rollout.max_tokens": 20,
    "rollout.max_prompt_tokens": 12,
}


def draft_of(cfg) -> DraftConfig:
    return cfg.draft


HEAD = {
    "loss": ("ce", head_update, {}),
    "loss_top_k": (4, head_update, {}),
    "unroll_steps": (2, head_update, {}),
    "step_decay": (0.5, head_update, {"unroll_steps": 2}),
    "mtp_loss_scaling_factor": (0.2, lambda draft: steps_of(draft.optimizer()), {}),
    "epochs": (2, pieces, {}),
    "max_microbatches": (3, pieces, {}),
}


def head_rows(arrives, other: dict) -> dict:
    """Of `draft`; `arrives` is the section as the trainer of the head gets it.

    Args:
      other: values in place of those that are the program's defaults.
    """
    found = {}
    for name, (value, effect, beside) in HEAD.items():
        value = other.get(name, value)
        found[f"draft.{name}"] = Row(
            value,
            lambda cfg, effect=effect: effect(arrives(cfg)),
            {f"draft.{key}": v for key, v in beside.items() if key not in other},
        )
    return found | optimizer_rows("draft.optim", lambda cfg: steps_of(arrives(cfg).optimizer()))


def rl_draft(cfg: RLConfig) -> DraftConfig:
    return built(cfg).draft.draft


# --- train.rl -------------------------------------------------------------------------------------


def other_policy() -> str:
    """The policy with another constant of its norms, which its config.json says."""
    path = scratch("other")
    if not path.exists():
        shutil.copytree(PLACES.policy, path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    return str(path)


def rl_spec(cfg: RLConfig) -> SpecConfig:
    return engine(cfg).spec


def rl_control(cfg: RLConfig) -> ControlConfig:
    return engine(cfg).control or ControlConfig(controller="static")


def rl_engine(cfg: RLConfig) -> EngineConfig:
    return engine(cfg).config


def mesh(cfg):
    found, _ = make_meshes(cfg)
    return found and dict(found.shape)


def trained_by(cfg, field: str):
    """How the policy's programs compute: a field of `RunConfig`."""
    return outcome(lambda: getattr(built(cfg).policy.cfg.run, field))


ONE_ROW = {"packing.rows": 1, "packing.row_length": 32}
PARTIAL = {"rollout.partial": True, "rollout.over_sample": 1.5}
ARMS = ["off", "2_1_3"]
FASTRL = {"enable": True, "eagle": {"tune_algorithm": "BEG", "mab_configs": ["2_1_3"]}}


def speculation_rows(section: str, arrives, controller, **other) -> dict:
    """The rows of the speculation settings of a program.

    Args:
      arrives, controller: give the `SpecConfig` and the `ControlConfig` that the engine is made
        with. other: rows in place of those here.
    """
    ngram, tree = {f"{section}.draft": "ngram"}, {f"{section}.strategy": "2_2_4"}
    values = {
        "strategy": ("2_1_3", {}),
        "acceptance": ("block", {}),
        "draft": ("ngram", {}),
        "draft_kind": ("eagle3", {f"{section}.draft": "random"}),
        "draft_overrides": ({"norm_output": True}, {f"{section}.draft": eagle3_files}),
        "draft_vocab": (16, {}),
        "token_map": (written("map.json", "[3, 1, 4]"), {}),
        "ngram_max": (3, ngram),
        "ngram_min": (2, ngram),
        "ngram_siblings": (False, ngram),
        "aligned": (False, {}),
        "tau": (0.5, tree),
        "adaptive_width": (True, tree),
        "spec_verify_tokens": (30, {}),
        "invariant": (True, {}),
        "telemetry": (True, {}),
    }
    rows = {
        f"{section}.{name}": Reaches(value, arrives, SpecConfig, name, beside)
        for name, (value, beside) in values.items()
    }
    own = {f"{section}.{name}": row for name, row in other.items()}
    return rows | control_rows(section, controller) | own


def control_rows(section: str, arrives) -> dict:
    """Of the section of control below `section`; `arrives` gives what the engine is made with."""
    ema, bandit, goodput = (
        {f"{section}.control.controller": name} for name in ("ema", "bandit", "goodput")
    )
    values = {
        "controller": ("bandit", "controller", goodput | {f"{section}.control.strategies": ARMS}),
        "strategies": (ARMS, "strategies", {}),
        "initial": ("7_1_8", "initial", ema),
        "bs_threshold": (4, "bs_threshold", {}),
        "ema_file": (written(f"{section}.json", '{"ema_alpha": 0.5}'), "ema", ema),
        "ema": ({"ema_alpha": 0.5}, "ema", ema),
        "bandit": ({"epsilon": 0.5}, "bandit", bandit),
        "goodput": ({"prior": 0.5}, "goodput", {}),
        "fastrl": (FASTRL, "controller", {}),
    }
    return {
        f"{section}.control.{name}": Reaches(value, arrives, ControlConfig, field, beside)
        for name, (value, field, beside) in values.items()
    }


RL = {
    "model": Row(other_policy, lambda cfg: trainer(cfg).model),
    "revision": Row("main", lambda cfg: outcome(lambda: trainer(cfg).model)),
    "family": Row("nowhere:FAMILY", lambda cfg: outcome(lambda: trainer(cfg).model)),
    "out": ReadBy(lambda: str(scratch("elsewhere")), rl),
    "seed": (
        Row(1, lambda cfg: asked(cfg).seed),
        Row(1, lambda cfg: trainer(cfg).head, {"rollout.draft": "random"}),
    ),
    "steps": ReadBy(2, rl),
    "reward": Row("number", scored),
    "rewards.weights": Row([0.5], scored),
    "rewards.pattern": Row(r"^####", scored, {"reward": ["format", "number"]}),
    "rewards.workers": Row(2, rewarded_in),
    "rewards.timeout": Row(0.5, rewarded_in, {"rewards.workers": 1}),
    "max_failed_rewards": ReadBy(0.7, train.trainer),
    "data.dataset": Row("twos", generated, GYM),
    "data.dataset_args": Row({"first": 3}, generated, GYM),
    **DATA,
    "data.overlong_prompts": Row("truncate", looked_at, {"rollout.max_prompt_tokens": 40}),
    "data.unwinnable": Row("drop", unwinnable, {"data.path": UNWINNABLE}),
    "data.heldout_size": Row(4, heldout),
    "rollout.prompts": Row(2, chosen),
    "rollout.n": Row(4, lambda cfg: len(jobs(cfg))),
    "rollout.over_sample": Row(1.5, chosen, {"rollout.prompts": 4}),
    "rollout.partial": (
        Row(True, collected, {"rollout.over_sample": 1.5}),
        Row(True, loss, {"rollout.over_sample": 1.5, "algo.updates_per_rollout": 2}),
    ),
    "rollout.max_staleness": Row(5, collected, PARTIAL),
    "rollout.draft_vocab_every": Row(0, drafted_from, {"rollout.draft_vocab": 16}),
    "rollout.draft_vocab_decay": Row(0.0, drafted_from, {"rollout.draft_vocab": 16}),
    **{
        f"rollout.{name}": Reaches(value, asked, SamplingParams, name)
        for name, value in {
            "max_tokens": 30,
            "min_tokens": 3,
            "top_k": 5,
            "top_p": 0.5,
            "min_p": 0.1,
            "repetition_penalty": 2.0,
            "presence_penalty": 1.0,
            "frequency_penalty": 1.0,
            "logit_bias": {5: 1.0},
            "stop": ["a"],
        }.items()
    },
    "rollout.temperature": (
        Reaches(0.5, asked, SamplingParams, "temperature"),
        Row(0.5, lambda cfg: (built(cfg).policy.temperature, built(cfg).draft.rollout)),
        Row(0.5, evaluated, {"eval.problems": 3}),
    ),
    "rollout.include_stop_str_in_output": Reaches(
        True, asked, SamplingParams, "include_stop_str_in_output", {"rollout.stop": ["a"]}
    ),
    "rollout.max_prompt_tokens": Row(40, looked_at),
    "rollout.max_batch": Row(4, runner("batch")),
    "rollout.replicas": Row(2, lambda cfg: len(built(cfg).engines)),
    "rollout.tp": Row(2, lambda cfg: engine(cfg).runner.mesh and engine(cfg).runner.mesh.size),
    **{
        f"rollout.{name}": Reaches(value, rl_engine, EngineConfig, name)
        for name, value in {
            "order": "longest_first",
            "page_size": 16,
            "cache_bytes": 2_000_000,
            "chunk_tokens": 8,
            "stretch": 1,
            "prefill_chunk": 32,
            "products": "xla",
            "enforce_eager": True,
        }.items()
    },
    "rollout.dtype": (
        Row("bfloat16", runner("cfg.run.compute_dtype")),
        Row("bfloat16", lambda cfg: built(cfg).eval_engines[0].runner.cfg.run.compute_dtype),
    ),
    "rollout.scan_layers": Row(True, runner("cfg.run.scan_layers")),
    **speculation_rows(
        "rollout",
        rl_spec,
        rl_control,
        draft=Row("random", lambda cfg: trainer(cfg).head),
        draft_kind=Row("eagle3", lambda cfg: str(trainer(cfg).source), {"rollout.draft": "random"}),
        aligned=Reaches(False, rl_spec, SpecConfig, "aligned", {"rollout.top_p": 0.5}),
        exact_mode=(
            Reaches(True, rl_spec, SpecConfig, "exact_mode"),
            Row(True, lambda cfg: [e.runner.tree for e in built(cfg).plain_engines]),
        ),
    ),
    "algo.objective": Row("train_rows:Plain", loss),
    "algo.clip_ratio": Row(0.1, loss, {"algo.updates_per_rollout": 2}),
    "algo.clip_ratio_high": Row(0.1, loss, {"algo.updates_per_rollout": 2}),
    "algo.loss_aggregation": Row("sequence", loss),
    "algo.loss_scale_factor": Row(7, loss, {"algo.loss_aggregation": "constant"}),
    "algo.normalize_over": Row("batch", updates, TINY),
    "algo.clip_ratio_c": Row(1.1, loss, {"algo.updates_per_rollout": 2}),
    "algo.kl_loss_coef": Row(0.1, loss),
    "algo.use_bias_correction_kl": Row(True, loss, {"algo.kl_loss_coef": 0.1}),
    "algo.kl_loss_type": Row("k2", loss, {"algo.kl_loss_coef": 0.1}),
    "algo.preset": Row("dr_grpo", loss),
    "algo.kl_coef": Row(0.1, updates, SHAPED),
    "algo.kl_penalty": Row("k2", updates, SHAPED | {"algo.kl_coef": 0.1}),
    "algo.ref_update_steps": Row(2, referenced, {"algo.kl_coef": 0.1}),
    "algo.overlong_buffer_len": (
        Row(0.5, updates, SHAPED),
        Row(10.0, updates, SHAPED),
    ),
    "algo.overlong_penalty_factor": Row(2.0, updates, SHAPED | {"algo.overlong_buffer_len": 0.5}),
    "algo.mask_truncated": Row(True, updates, TINY),
    "algo.entropy_coeff": (
        Row(0.1, loss),
        Row(0.1, lambda cfg: built(cfg).policy.entropy_gradient),
    ),
    "algo.tis_level": Row("sequence", loss, {"algo.tis": True}),
    "algo.tis": Row(True, loss),
    "algo.tis_cap": Row(1.1, loss, {"algo.tis": True}),
    "algo.normalize_std": Row(False, updates, TINY),
    "algo.advantage_eps": Row(0.5, updates, TINY),
    "algo.std_correction": Row(1, updates, TINY),
    "algo.updates_per_rollout": Row(2, updates, TINY),
    "algo.dynamic_sampling": Row(True, chosen, {"rollout.prompts": 3}),
    "algo.max_num_gen_batches": Row(1, chosen, {"rollout.prompts": 3, **REPLACES}),
    "algo.filter_groups.metric": Row("format", kept, {"reward": ["exact", "format"], **REPLACES}),
    "algo.filter_groups.min": Row(1.0, kept, REPLACES),
    "algo.filter_groups.max": Row(0.5, kept, REPLACES),
    "algo.logprobs": Row(
        "processed",
        lambda cfg: (asked(cfg).transformed_logprobs, built(cfg).policy.transforms),
        {"rollout.top_p": 0.5},
    ),
    **optimizer_rows("optim", lambda cfg: steps_of(built(cfg).policy.optimizer)),
    "draft.mode": Row("frozen", lambda cfg: built(cfg).draft is None),
    **head_rows(rl_draft, {}),
    "draft.max_microbatches": (
        Row(3, lambda cfg: pieces(rl_draft(cfg))),
        Row(1, lambda cfg: updates(cfg)[1], TINY | ONE_ROW),
        Row(1, planned, SPOT | {"draft.spot.updates": 5}),
    ),
    "draft.spot.enabled": ReadBy(
        True, train.trainer, {k: v for k, v in SPOT.items() if "spot" not in k}
    ),
    "draft.spot.gaps": Row(False, sent_in_gap, SPOT),
    "draft.spot.updates": Row(5, planned, SPOT),
    "draft.spot.buffer_tokens": Row(128, planned, {**SPOT, "draft.spot.updates": 5}),
    "packing.row_length": Row(32, updates, TINY | ONE_ROW | {"packing.row_length": 64}),
    "packing.rows": Row(1, updates, TINY),
    "eval.problems": Row(3, evaluated),
    "eval.sets": Row(lambda: {"own": {"path": DAPO()}}, evaluated),
    "eval.every": ReadBy(2, rl),
    "eval.before": ReadBy(False, rl),
    "eval.max_batch": Row(2, lambda cfg: built(cfg).eval_engines[0].batch),
    "eval.seed": Row(5, evaluated, {"eval.problems": 3}),
    "dtype.params": Row("bfloat16", lambda cfg: trainer(cfg).params["norm"].dtype),
    "dtype.compute": Row("bfloat16", lambda cfg: trained_by(cfg, "compute_dtype")),
    "mesh.data": Row(2, mesh),
    "mesh.fsdp": Row(2, mesh),
    "mesh.tp": Row(2, mesh),
    "mesh.cp": Row(2, mesh),
    "mesh.cp_order": Row(
        "contiguous",
        lambda cfg: context_of(cfg.mesh, make_meshes(cfg)[0]).places(8),
        {"mesh.cp": 2},
    ),
    "mesh.cp_attention": Row(
        "all_gather", lambda cfg: built(cfg).policy.context.attention, {"mesh.cp": 2}
    ),
    "mesh.sequence_parallel": Row(
        True, lambda cfg: trained_by(cfg, "sequence_parallel"), {"mesh.tp": 2}
    ),
    "remat": Row(True, lambda cfg: trained_by(cfg, "remat")),
    "remat_policy": Row("full", lambda cfg: trained_by(cfg, "remat_policy"), {"remat": True}),
    "logprob_chunk_size": Row(64, lambda cfg: built(cfg).policy.chunk),
    "attention": (
        Row("tpu", lambda cfg: trained_by(cfg, "attention")),
        Reaches("reference", rl_engine, EngineConfig, "attention"),
    ),
    "deterministic": ReadBy(True, rl),
    "checkpoint.every": ReadBy(2, rl),
    "checkpoint.keep_last": ReadBy(3, rl),
    "checkpoint.export": ReadBy(False, rl),
    "checkpoint.draft_only": ReadBy(True, rl),
    "log.tensorboard": ReadBy(True, rl),
    "log.wandb": ReadBy(True, rl),
    "log.live": ReadBy(False, rl),
    "log.samples": ReadBy(2, rl),
    "distributed.mode": Row("off", joined),
    "distributed.coordinator": Row("host:1", joined),
    "distributed.process_id": Row(1, joined, {"distributed.num_processes": 2}),
    "distributed.num_processes": Row(3, joined),
    "distributed.local_devices": Row(1, joined),
    "distributed.start_timeout": Row(9, joined),
    "distributed.lost_after": ReadBy(9.0, processes),
}

# --- train.sft ------------------------------------------------------------------------------------


def started(cfg: SFTConfig):
    """The model that a run starts with, its weights' seeds, and its tokenizer's size."""
    made = []

    def noted(model, seed):
        made.append((seed, model.run.param_dtype))
        return {"norm": np.zeros(1)}

    shutil.rmtree(scratch("sft"), ignore_errors=True)
    with (
        mock.patch.object(sft, "init_params", noted),
        mock.patch.object(sft, "init_head_params", noted),
    ):
        cfg.dtype.settle("float32", "cpu")
        model, params, head, found = sft.start_model(cfg, None)
    return model, made, len(found), jax.tree.map(np.asarray, (params, head)) if cfg.init else None


def stream(cfg: SFTConfig) -> sft.PackedDemonstrations:
    return sft.PackedDemonstrations(cfg, templated())


def demonstrated(cfg: SFTConfig):
    """The micro-batches of the first update."""
    return outcome(lambda: stream(cfg).next_update())


def sft_programs(cfg: SFTConfig):
    """What a run makes its policy's programs with, and on which mesh; or why it cannot."""
    with (
        mock.patch.object(sft, "start_model", lambda *_: (policy(), {}, {}, None)),
        mock.patch.object(sft, "PackedDemonstrations", lambda *_: None),
    ):
        kept = []
        real = sft.PolicyTrainer

        def noting(*args, **kwargs):
            kept.append(real(*args, **kwargs))
            raise Stopped

        with mock.patch.object(sft, "PolicyTrainer", noting):
            said = outcome(lambda: sft.Run(cfg))
    return kept[0] if kept else said


def _sft_mesh(cfg: SFTConfig):
    found = sft_programs(cfg)
    return found if isinstance(found, str) else found.mesh and dict(found.mesh.shape)


def refused_at_start(cfg: SFTConfig):
    """Whether a run is refused before it begins."""
    with mock.patch.object(sft, "start_model", mock.Mock(side_effect=Stopped)):
        return getattr(outcome(lambda: sft.Run(cfg)), "kind", None)


NEW = {"tokenizer_texts": 50}  # soon trained
SHORT = {"data.max_terms": 3, "packing.row_length": 128, "packing.rows": 1}
GSM8K_ROWS = {"data.path": GSM8K, "packing.row_length": 128, "packing.rows": 1}
SFT = {
    "out": ReadBy(lambda: str(scratch("sft-elsewhere")), sft),
    "init": Row(lambda: str(PLACES.policy), lambda cfg: started(cfg)[0]),
    "revision": Row("main", refused_at_start, {"init": lambda: str(PLACES.policy)}),
    "family": Row("nowhere:FAMILY", refused_at_start, {"init": lambda: str(PLACES.policy)}),
    "seed": Row(1, started, NEW),
    "steps": ReadBy(2, sft),
    "draft_steps": ReadBy(3, sft),
    "vocab_size": Row(272, started, NEW),
    "tokenizer_texts": Row(1, started, NEW),
    "loss_on": Row("all", demonstrated, SHORT),
    "log_every": ReadBy(2, sft),
    "export_dtype": ReadBy("float32", sft),
    **{
        f"model.{name}": Row(value, started, NEW)
        for name, value in {
            "hidden_size": 96,
            "intermediate_size": 64,
            "num_layers": 2,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
            "rope_theta": 500.0,
            "max_position": 512,
            "mtp_num_layers": 2,
            "mtp_concat": "hidden_first",
            "mtp_target_hidden": "pre_norm",
            "mtp_recycle": "pre_norm",
        }.items()
    },
    "dtype.params": Row("bfloat16", started, NEW),
    "dtype.compute": Row("bfloat16", started, NEW),
    **DATA,
    "data.prompt_template": Row("Q: {question}", demonstrated, GSM8K_ROWS),
    "data.strip_calculator": Row(False, demonstrated, GSM8K_ROWS),
    "data.overlong_prompts": Row(
        "drop", lambda cfg: outcome(lambda: demonstrated(cfg)), {"packing.row_length": 32}
    ),
    "data.slip": Row(0.9, demonstrated, SHORT),
    "data.impatience": Row(0.9, demonstrated, SHORT),
    "packing.row_length": Row(64, demonstrated, SHORT),
    "packing.rows": Row(2, demonstrated, SHORT),
    "packing.microbatches": Row(1, demonstrated, SHORT),
    **optimizer_rows("optim", lambda cfg: steps_of(sft_programs(cfg).optimizer)),
    "draft.mode": ReadBy("frozen", sft),
    **head_rows(draft_of, {"unroll_steps": 2, "step_decay": 0.5}),
    "mesh.data": Row(2, _sft_mesh),
    "mesh.fsdp": Row(2, _sft_mesh),
    "mesh.tp": Row(2, _sft_mesh),
    "mesh.cp": Row(2, _sft_mesh),
    "mesh.cp_order": Row(
        "contiguous", lambda cfg: sft_programs(cfg).context.places(8), {"mesh.cp": 2}
    ),
    "mesh.cp_attention": Row(
        "all_gather", lambda cfg: sft_programs(cfg).context.attention, {"mesh.cp": 2}
    ),
    "mesh.sequence_parallel": Row(True, started, NEW | {"mesh.tp": 2}),
    "remat": Row(True, started, NEW),
    "remat_policy": Row("full", started, NEW | {"remat": True}),
    "logprob_chunk_size": Row(64, lambda cfg: sft_programs(cfg).chunk),
    "attention": Row("tpu", lambda cfg: getattr(sft_programs(cfg), "cfg", sft_programs(cfg))),
    "checkpoint.every": ReadBy(2, sft),
    "checkpoint.keep_last": ReadBy(3, sft),
    "log.tensorboard": ReadBy(True, sft),
    "log.wandb": ReadBy(True, sft),
    "log.live": ReadBy(False, sft),
}


BASE = {
    RLConfig: {"model": lambda: str(PLACES.policy), "out": lambda: str(scratch("rl"))},
    SFTConfig: {"out": lambda: str(scratch("sft"))},
}
TRAIN = {RLConfig: RL, SFTConfig: SFT}

# Settings that `algo` has with some objectives only, and the schemas that they are in.
OBJECTIVES = {name: with_objective(RLConfig, name) for name in registry.OBJECTIVES.names}
OF_OBJECTIVES = {
    "algo.importance_sampling_level": Row("sequence", loss, {"algo.tis": True}),
    "algo.group_baseline": Row(True, updates, TINY),
}
BASE |= dict.fromkeys(OBJECTIVES.values(), BASE[RLConfig])
