"""Rows of the library's own classes: what each field of them changes."""

from __future__ import annotations

import dataclasses
import functools
import re
from unittest import mock

import jax
import numpy as np
from pieces import Pieces
from rows import Row, outcome, scratch, written
from shared import CFG, NOTHING, PROMPTS, shared_llm, weights

from specjax import ControlConfig, EngineConfig, SamplingParams, SpecConfig
from specjax.checkpoint.draft_files import save_draft_files
from specjax.config import ModelConfig
from specjax.control import Bandit, Goodput, Observation, make_controller
from specjax.decode.chunk import Until
from specjax.decode.options import Features
from specjax.decode.state import RowMap
from specjax.drafts.eagle3 import Eagle3Source
from specjax.drafts.mtp import init_head_params
from specjax.engine.engine import Engine
from specjax.engine.programs import make_plans
from specjax.engine.request import decoder_of, make_jobs
from specjax.engine.sources import load_source
from specjax.engine.vocabulary import draft_ids
from specjax.interfaces import Device
from specjax.kernels import dispatch
from specjax.models.transformer import init_params
from specjax.weights import matrix

# --- SamplingParams: what a model that is ready to generate makes of them -------------------------


def sampled(params: SamplingParams):
    """Everything that two prompts bring by plain decoding, with text."""
    llm = shared_llm("plain")
    llm.tokenizer = Pieces()
    try:
        outs = llm.generate(PROMPTS[:2], params)
    finally:
        llm.tokenizer = None
    samples = [sample for out in outs for sample in out.samples]
    return [out.prompt_logprobs for out in outs], [
        (s.token_ids, s.text, s.finish_reason, s.logprobs, s.transformed_logprobs, s.top_logprobs)
        for s in samples
    ]


def decoded(params: SamplingParams):
    """What a tokenizer is asked for that has no decoder of the library `tokenizers`."""
    return decoder_of(Pieces(), params).keywords


def drafted(params: SamplingParams):
    """How many tokens were drafted for a request of an engine that speculates."""
    return shared_llm("speculative").generate(PROMPTS[:1], params)[0].samples[0].stats.drafted


def followed_strategy(params: SamplingParams):
    """Whether the engine takes the request, and by which strategy it runs it."""
    llm = shared_llm("speculative")
    return outcome(lambda: llm.generate(PROMPTS[:1], params)[0].samples[0].token_ids)


LONG = {"max_tokens": 24, "ignore_eos": True}


def _first(count: int = 1) -> tuple[int, ...]:
    """The tokens that the first prompt is continued with."""
    return tuple(sampled(NOTHING)[1][0][0][:count])


def _stop() -> tuple[str, ...]:
    return (Pieces().decode(_first(3)[2:]),)


def _stops(row):
    return dataclasses.replace(row, beside={**LONG, **row.beside})


SAMPLING = {
    name: _stops(row)
    for name, row in {
        "temperature": Row(0.5, sampled),
        "seed": Row(1, sampled),
        "n": Row(2, sampled),
        "stop_token_ids": Row(lambda: _first(1), sampled),
        "stop": Row(_stop, sampled),
        "include_stop_str_in_output": Row(True, sampled, {"stop": _stop}),
        "min_tokens": Row(2, sampled, {"stop_token_ids": lambda: _first(1)}),
        "top_k": Row(2, sampled),
        "top_p": Row(0.3, sampled),
        "min_p": Row(0.5, sampled),
        "repetition_penalty": Row(3.0, sampled),
        "presence_penalty": Row(2.0, sampled),
        "frequency_penalty": Row(2.0, sampled),
        "logit_bias": Row(((3, 5.0),), sampled),
        "allowed_token_ids": Row((1, 2, 3), sampled),
        "bad_words": Row(lambda: (_first(1),), sampled),
        "transformed_logprobs": Row(True, sampled, {"top_k": 3}),
        "logprobs": Row(2, sampled),
        "prompt_logprobs": Row(2, sampled),
        "detokenize": Row(False, sampled),
        "skip_special_tokens": Row(False, sampled, {"logit_bias": ((0, 50.0),)}),
        "spaces_between_special_tokens": Row(False, decoded),
        "speculative": Row(False, drafted),
        "strategy": Row("9_1_10", followed_strategy),
    }.items()
} | {
    "max_tokens": Row(5, lambda params: make_jobs([1, 2], params, (7,), None)[0].limit),
    "ignore_eos": Row(True, sampled, {"logit_bias": ((7, 50.0),), "max_tokens": 4}),
}

# --- SpecConfig: the plan, the program of a chunk, the source -------------------------------------


def tree_rows(spec: SpecConfig):
    return {
        name: plan.tree and plan.tree.rows for name, plan in make_plans(CFG, spec, None).items()
    }


def engine_of(spec=None, config=None, control=None, batch=4) -> Engine:
    return Engine(CFG, spec, batch, 64, config=config, control=control)


@functools.cache
def chunk(spec: SpecConfig, features: Features = Features()):  # noqa: B008
    """The program of a chunk of two rows, as traced."""
    return chunk_of(engine_of(spec), features)


def chunk_of(engine: Engine, features: Features) -> str:
    runner = engine.runner
    cfg = runner.cfg
    runner.hold_shapes(
        jax.eval_shape(lambda: init_params(cfg)), jax.eval_shape(lambda: init_head_params(cfg))
    )
    table = np.zeros((2, runner.table_width), np.int32)
    rows = runner.alone(RowMap(np.arange(2, dtype=np.int32), np.ones(2, bool), table))
    plan = runner.program_of(next(iter(runner.plans)), features).plan
    program = functools.partial(runner._chunk_program, plan, features, 2)
    inputs = runner.weights.policy, runner.weights.draft, runner.state, rows, Until.of(4)
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(program)(*inputs)))


def source(spec: SpecConfig):
    """What drafts, and its weights."""
    _, found, params = load_source(CFG, spec, weights()[1], None, None)
    return type(found).__name__, params


def what_drafts(spec: SpecConfig):
    """What the files of a head are read as."""
    return load_source(CFG, spec, None, None, None)[1].described()


def eagle3_files_for(cfg: ModelConfig) -> str:
    """The directory of a new EAGLE-3 head for a policy."""
    path = scratch(f"eagle3-{cfg.vocab_size}")
    if not path.exists():
        save_draft_files(path, *Eagle3Source.new(cfg), "float32")
    return str(path)


def compared(spec: SpecConfig):
    """What a call of an engine in this mode says of plain decoding."""
    llm = shared_llm("speculative")
    own, plain = llm.spec, llm._plain
    llm.spec = dataclasses.replace(own, exact_mode=spec.exact_mode)
    llm._plain = shared_llm("plain").engine
    try:
        llm.generate(PROMPTS[:1], dataclasses.replace(NOTHING, max_tokens=3))
        return llm.differences
    finally:
        llm.spec, llm._plain = own, plain


def _telemetry(spec: SpecConfig):
    return engine_of(spec).telemetry is None


CHAIN = {"strategy": "1_1_2"}
NGRAM = {**CHAIN, "draft": "ngram"}
SPEC = {
    "strategy": Row("2_1_3", tree_rows),
    "acceptance": Row("block", chunk, CHAIN),
    "draft": Row("ngram", source),
    "draft_kind": Row("eagle3", source, {"draft": "random"}),
    "draft_overrides": Row(
        {"norm_before_residual": True}, what_drafts, {"draft": lambda: eagle3_files_for(CFG)}
    ),
    "head_seed": Row(1, source, {"draft": "random"}),
    "draft_vocab": Row(16, chunk, CHAIN),
    "token_map": Row(written("map.json", "[3, 1, 4]"), lambda spec: draft_ids(CFG, spec)),
    "ngram_max": Row(3, chunk, NGRAM),
    "ngram_min": Row(2, chunk, NGRAM),
    "ngram_siblings": Row(False, chunk, NGRAM),
    "aligned": Row(False, lambda spec: chunk(spec, Features(top_k=True)), CHAIN),
    "tau": Row(0.5, chunk, {"strategy": "2_2_4"}),
    "adaptive_width": Row(True, chunk, {"strategy": "2_2_4"}),
    "spec_verify_tokens": Row(8, tree_rows, {"strategy": "4_4_16"}),
    "invariant": Row(True, chunk, CHAIN),
    "exact_mode": Row(True, compared),
    "telemetry": Row(True, _telemetry),
}

# --- EngineConfig: the engine that is set up ------------------------------------------------------


def runner_of(config: EngineConfig):
    return engine_of(SpecConfig("1_1_2"), config).runner


def rounds(config: EngineConfig):
    """Rounds of a chunk, of one row and of many."""
    runner = runner_of(config)
    return [runner.rounds("1_1_2", count) for count in (1, 4, 64)]


def first_to_start(config: EngineConfig):
    """Which of two prompts is read first, where the second has had long samples."""
    engine = engine_of(None, config)
    for prompt, length in (((1, 2, 3), 4), ((4, 5, 6), 40)):
        [job] = make_jobs(list(prompt), SamplingParams(seed=0, max_tokens=8), (7,), None)
        engine.lengths.add(job.prompt_hash, length)
        engine.add(job)
    return engine.scheduler._next_key()


def reached(config: EngineConfig):
    """For which batches a strategy is compiled that the controller has for one sample alone."""
    control = ControlConfig(strategies=("off", "1_1_2"), bs_threshold=1)
    programs = engine_of(SpecConfig("1_1_2"), config, control).programs()
    return [bucket for name, bucket in programs.chunks if name == "1_1_2"]


def kernel(config: EngineConfig):
    """The kernel that the engine settles on, or why it cannot have the one that is asked for."""
    return outcome(lambda: runner_of(config).cfg.run.attention)


def products(config: EngineConfig):
    return outcome(lambda: runner_of(config).cfg.run.products)


def other_products() -> str:
    """What `auto` is not, on this machine."""
    auto = matrix.settle(CFG, None, "auto").run.products
    return "xla" if auto == "panels" else "panels"


def other_kernel() -> str:
    """What `auto` is not, on this machine."""
    return "reference" if dispatch.settle(CFG, None).run.attention != "reference" else "tpu"


def graphs_of_a_gpu(config: EngineConfig):
    """What an engine of a GPU says of CUDA graphs."""
    gpu = Device("gpu", "NVIDIA H100 80GB HBM3")
    with mock.patch.object(dispatch, "device_of", lambda mesh: gpu):
        return engine_of(None, config).start_lines()


ENGINE = {
    "chunk_tokens": Row(8, rounds),
    "stretch": Row(1, rounds),
    "page_size": Row(16, lambda config: runner_of(config).page_size),
    "cache_bytes": Row(100_000, lambda config: runner_of(config).pages),
    "prefill_chunk": Row(32, lambda config: engine_of(None, config).piece_widths),
    "order": Row("longest_first", first_to_start),
    "follow_ups": Row(True, lambda config: engine_of(None, config).config.follow_ups),
    "named_strategies": Row(False, reached),
    "attention": Row(other_kernel, kernel),
    "products": Row(other_products, products),
    "enforce_eager": Row(True, graphs_of_a_gpu),
}

# --- ControlConfig: what a controller chooses -----------------------------------------------------

SECONDS = {"off": 1.0, "1_1_2": 1.25, "2_1_3": 1.4, "3_1_4": 1.6, "4_1_5": 1.8, "7_1_8": 2.4}
RATES = (0.99, 0.1, 0.8, 0.6)  # of acceptance; each holds for a while


def driven(config: ControlConfig):
    """What its controller does in 120 chunks of batches that come and go: choices, how long each
    is, and the scores that they are made by."""
    controller, trace = make_controller(config), []
    inner = getattr(controller, "inner", controller)
    generator = np.random.default_rng(0)
    for chunk_number in range(120):
        batch = (1, 3, 8, 24)[chunk_number // 8 % 4]
        name = controller.select(batch)
        steps = 0 if name == "off" else int(name.split("_")[0])
        kept = generator.random((6, batch, 7)) < RATES[chunk_number // 30]
        accepted = np.minimum(np.cumprod(kept, axis=-1).sum(-1), steps)
        seconds = 6e-3 * SECONDS[name] * (1 + 0.01 * generator.random() ** 4)
        scores = None
        if isinstance(inner, Bandit):
            scores = inner.scores(inner.group(batch))
        elif isinstance(inner, Goodput):
            scores = inner.scores(batch)
        trace.append((name, controller.rounds_hint, scores))
        controller.observe(Observation(batch, name, accepted, seconds))
        if chunk_number == 60:
            controller.weights_changed()
    return trace


EMA_FILE = written("ema.json", '{"candidate_steps": [1, 2, 4]}')
EMA, BANDIT = {"controller": "ema"}, {"controller": "bandit"}
CONTROL = {
    "controller": Row("bandit", driven),
    "strategies": Row(("off", "2_1_3"), driven),
    "initial": Row("7_1_8", driven, EMA),
    "bs_threshold": Row(4, driven),
    "ema_file": Row(EMA_FILE, driven, EMA),
    "ema.candidate_steps": Row((1, 4), driven, EMA),
    "ema.ema_alpha": Row(0.9, driven, EMA),
    "ema.warmup_batches": Row(200, driven, EMA),
    "ema.update_interval": Row(40, driven, EMA),
    "ema.down_hysteresis": Row(1.0, driven, EMA),
    "ema.up_hysteresis": Row(-1.0, driven, EMA),
    "bandit.thresholds": Row((1,), driven, BANDIT),
    "bandit.epsilon": Row(0.5, driven, BANDIT),
    "bandit.window": Row(1, driven, BANDIT),
    "bandit.reward": Row("accept_length", driven, BANDIT),
    "bandit.score": Row("mean", driven, BANDIT),
    "bandit.seed": Row(1, driven, BANDIT),
    "goodput.hysteresis": Row(0.5, driven),
    "goodput.probe_fraction": Row(0.5, driven),
    "goodput.probe_slot_rounds": Row(200, driven),
    "goodput.half_life": Row(10.0, driven),
    "goodput.prior": Row(0.1, driven),
}

LIBRARY = {
    SamplingParams: SAMPLING,
    SpecConfig: SPEC,
    EngineConfig: ENGINE,
    ControlConfig: CONTROL,
}
