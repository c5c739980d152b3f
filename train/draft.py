"""`python -m train.draft`: trains a draft head for a policy, before RL and for any model.

    prompts -> samples of the policy itself, at the rollout's temperature (train.draft_data)
            -> the tokens that the head drafts from: the most frequent ones
            -> a new head, or one to go on with (train.draft_kinds)
            -> per update: hidden states of the policy for a packed micro-batch (train.draft_states)
               and an update of the head on them (train.heads)
            -> held-out accept length by decoding with the head, beside that of n-grams
               (train.draft_curve)
            -> the head's files in <out>/head

The policy is never changed. `--resume` continues a run that was killed: samples that were written
are not generated again, and the head is the one of a run that was never stopped.
"""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C from here on
    from specjax import interrupts

    interrupts.begin("train.draft")

import contextlib
import hashlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from specjax.checkpoint.store import Checkpointer
from specjax.checkpoint.weights import (
    Head,
    describe,
    describe_head,
    load_model,
    read_config,
    tokenizer_dir,
)
from specjax.command_line import ConfigError, fingerprint, require_same_settings
from specjax.config import SpecConfig
from specjax.config.dtype import about_dtype, resolve_dtype
from specjax.drafts.mtp import MTPSource
from specjax.engine.engine import LEAST, Engine
from specjax.engine.request import Totals, make_jobs, require_valid
from specjax.engine.settings import EngineConfig
from specjax.hub import ModelNotFoundError, find_model, portable
from specjax.interfaces import Draft
from specjax.models.transformer import Params, laid_out
from specjax.parallel import sharding
from specjax.registry import DRAFTS
from specjax.spelling import spelled
from specjax.tokenizer import has_chat_template, with_tokenizer_end
from specjax.weights import load_tokenizer
from train import data, draft_curve
from train.cli import (
    CHECKPOINTS,
    Interrupted,
    can_resume,
    interruptible,
    require_finite,
    run_program,
    settle_date,
)
from train.describe import describe_run, settings_of
from train.draft_curve import Curve
from train.draft_data import (
    SAMPLES,
    Pair,
    Sampler,
    Texts,
    Vocabulary,
    always_drafted,
    check_samples,
    choose_vocabulary,
    order_of,
    pack_pairs,
    read_samples,
    read_texts,
    shown_paths,
    takes_prompts,
)
from train.draft_kinds import export_head, head_to_go_on_with, start_head
from train.draft_losses import Sampling
from train.draft_schema import SPELL, DraftRunConfig
from train.draft_states import States, weights_digest
from train.head_files import require_same_head
from train.heads import DraftTrainer, add_sums, draft_metrics, frozen_policy_parts, inner_taps
from train.inputs import (
    DropWarning,
    Prompts,
    describe_data,
    fit_lengths,
    require_template,
)
from train.log import MetricsLogger, read_metrics
from train.loss import sft_loss
from train.optim import OptimConfig
from train.packing import padding_share
from train.policy import PolicyTrainer, own_family

HEAD = "head"  # directory of the exported head
# A new head has learnt if its acceptance at depth 1 rose by so much, and if its held-out accept
# length is at least so long.
RISE, LENGTH = 0.02, LEAST

CONSOLE = (
    ("train/mtp_loss", "loss", "{:.4f}"),
    ("train/mtp_overlap_depth_1", "accepted 1", "{:.3f}"),
    ("train/mtp_overlap_depth_2", "2", "{:.3f}"),
    ("train/mtp_overlap_depth_4", "4", "{:.3f}"),
    ("train/accept_estimate", "accept length, estimated", "{:.2f}"),
    ("eval/accept_length", "held out", "{:.3f}"),
    ("eval/accept_length_greedy", "greedy", "{:.3f}"),
    ("train/tokens_per_sec", "tok/s", "{:.0f}"),
    ("time/left", "left", "{:.0f}s"),
)


class Stop:
    """Ends a run between two updates: the first Ctrl-C or SIGTERM is noted, a second one raises."""

    def __init__(self) -> None:
        self.asked: str | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within it signals are noted, unless the process ignores them."""
        names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
        before = {}

        def note(number: int, frame: object) -> None:
            if self.asked is not None:
                raise KeyboardInterrupt
            self.asked = names[number]
            print(f"\n{self.asked}: ending after this update", file=sys.stderr, flush=True)

        if threading.current_thread() is threading.main_thread():
            for number in names:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self, *unused: Any) -> None:
        """Raises KeyboardInterrupt once a signal was noted."""
        if self.asked is not None:
            raise KeyboardInterrupt


class Run:
    """The policy, the head with its optimizer, and the position in the data.

    Args:
      cfg: settings of the run.
      stop: what ends it early.

    Attributes:
      step: number of updates so far.
      about: metadata of a checkpoint, by which its head is loaded elsewhere.
      tokens: number of tokens that the loss has seen, each as often as it was trained on.
      padding_share: share of the positions of all micro-batches that hold no token.
      notes: lines to print at start.
      given_head: the head at `init`, until `begin` takes it; None: a new one is made.
    """

    def __init__(self, cfg: DraftRunConfig, stop: Stop):
        self.cfg, self.stop, self.out = cfg, stop, Path(cfg.out)
        self.step = self.tokens = 0
        self.notes: list[str] = []
        own_family(cfg.family)
        self.named = cfg.model
        try:
            # From here on it is a path. The path of an id names one commit, as --resume needs.
            cfg.model, cfg.revision = str(find_model(cfg.model, cfg.revision)), None
        except ModelNotFoundError as error:
            raise ConfigError(
                f"model: expected a checkpoint directory, got {cfg.model!r}: {error}"
            ) from error
        try:
            self._read_inputs()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        dtype = resolve_dtype(cfg.dtype, self.stored, sharding.platform_of(None))
        dtype = "bfloat16" if dtype == "float16" else dtype  # whose gradients would vanish
        found = load_model(cfg.model, dtype)
        self.params = found.policy
        model = found.cfg.replace(mtp_num_layers=0).running(compute_dtype=dtype, remat=False)
        self.model = with_tokenizer_end(model, self.tokenizer)
        # What is wrong with them is said before the policy answers prompts.
        always_drafted(cfg, self.model.vocab_size, self.model.eos_token_ids)
        self.given_head = head_to_go_on_with(cfg, self.model)
        setting = f"dtype={self.stored}"
        self.notes.append(f"{about_dtype(cfg.dtype, dtype, self.stored, setting)}")

    def _read_inputs(self) -> None:
        """Reads config, tokenizer and data, and checks them before anything is computed."""
        cfg = self.cfg
        target = read_config(cfg.model)
        self.stored = target.run.param_dtype
        if line := fit_lengths(cfg, self.named, target.max_position):
            self.notes.append(line)
        self.tokenizer = load_tokenizer(tokenizer_dir(cfg.model).absolute())
        longest = cfg.rollout.max_prompt_tokens
        self.prompts = Prompts(self.tokenizer, cfg.data, longest, target)
        self.texts: Texts | None = None
        self.problems = self.heldout = ()
        if cfg.data.texts is not None:
            self.texts = read_texts(cfg, self.prompts)
            self.notes += describe_texts(cfg, self.texts)
        if cfg.data.texts is None or cfg.data.path is not None:
            self._read_problems()

    def _read_problems(self) -> None:
        cfg = self.cfg
        if cfg.data.texts is None:
            self.problems = data.problems(cfg.data, "train", self.prompts.chat)
            require_template(cfg, self.problems[0].prompt)
        self.notes.append(
            describe_data(cfg.data, self.prompts.chat, self.named, date=self.prompts.date)
        )
        if cfg.eval.problems:
            try:
                heldout = data.problems(cfg.data, "heldout", self.prompts.chat)
                self.heldout = heldout[: cfg.eval.problems]
            except data.EmptySplitError as error:
                self.notes.append(f"WARNING: nothing is evaluated: {error}")
        for rows, what in ((self.problems, "prompts"), (self.heldout, "held-out prompts")):
            if rows and (over := self.prompts.overlong_warning(rows, what)):
                self.notes.append(f"WARNING: {over}")
        if warning := template_warning(cfg, self.tokenizer, (*self.problems[:1], *self.heldout)):
            self.notes.append(f"WARNING: {warning}")

    # --- what is trained on --------------------------------------------------------------------

    def collect(self) -> list[Pair]:
        """The samples to train on; those that the run's directory lacks are generated.

        Raises:
          Interrupted: by Ctrl-C; blocks of samples that are complete are kept.
        """
        cfg = self.cfg
        if self.texts is not None:
            return self.texts.train
        order = data.endless(self.problems, cfg.data.seed)
        sampler = Sampler(cfg, self.out, order, self.prompts)
        blocks, done = len(sampler.sizes), sampler.done
        if done:
            print(f"samples: {done} of {blocks} blocks are there already", flush=True)
        if done < blocks:
            started = time.perf_counter()
            print(
                f"samples: {cfg.rollout.prompts} prompts x {cfg.rollout.n}, at temperature "
                f"{cfg.rollout.temperature:g}; compiling first",
                flush=True,
            )
            engine = self._engine(None, None, cfg.rollout.max_batch)
            engine.set_params(self.params)
            total = cfg.rollout.prompts * cfg.rollout.n
            with tqdm(total=total, unit="sample", dynamic_ncols=True, disable=None) as bar:

                def show(ended: int, totals: Totals) -> None:
                    bar.update(ended - bar.n)
                    bar.set_postfix_str(f"{totals.tokens / max(totals.seconds, 1e-9):.0f} tok/s")
                    self.stop.check()

                try:
                    sampler.run(engine, self.model.eos_token_ids, show)
                except KeyboardInterrupt:
                    raise Interrupted(
                        f"interrupted while the policy answered prompts; {sampler.done} of "
                        f"{blocks} blocks of samples are in {self.out / SAMPLES}; go on with "
                        "--resume"
                    ) from None
            engine.release()
            print(f"samples: generated in {time.perf_counter() - started:.0f} s", flush=True)
        if sampler.dropped:
            print(f"samples: {sampler.dropped} prompts were dropped (data.overlong_prompts)")
        for warning in DropWarning(cfg.data).check(sampler.dropped, sampler.drawn):
            print(f"WARNING: {warning}")
        return read_samples(self.out)

    def begin(self, pairs: Sequence[Pair]) -> None:
        """Makes the vocabulary, the head and the programs, and packs what is trained on.

        Raises:
          ConfigError: settings do not fit the policy, or nothing can be trained on.
        """
        cfg = self.cfg
        self.batches = pack_pairs(cfg, pairs)
        targets = sum(max(len(pair.tokens) - 1, 0) for pair in pairs)
        if not targets:
            raise ConfigError(
                f"all {len(pairs)} samples have a single token, and the head predicts the second "
                "one and those after it: is the prompt what the policy expects? See `python -m "
                "train.data`"
            )
        self.padding_share = padding_share(self.batches)
        self.total = cfg.epochs * len(self.batches) if cfg.steps is None else cfg.steps
        tokens = sum(len(pair.tokens) for pair in pairs)
        self.vocabulary: Vocabulary = choose_vocabulary(
            cfg, pairs, self.model.vocab_size, self.model.eos_token_ids
        )
        print(
            f"training: {len(pairs)} samples with {tokens} tokens in {len(self.batches)} "
            f"micro-batches of {len(self.batches[0]['tokens'])} x {cfg.packing.row_length}; "
            f"{self.total} updates"
        )
        if self.vocabulary.ids is not None:
            print(
                f"draft vocabulary: {len(self.vocabulary.ids)} of {self.model.vocab_size} tokens, "
                f"which are {self.vocabulary.covered:.2%} of the tokens trained on (draft_vocab)"
            )
        if self.given_head is None:
            self.given_head = start_head(cfg, self.model, self.params, self.vocabulary.ids)
        # Updates give the memory of the head's arrays away: no second name keeps them.
        (self.source, self.head), self.given_head = self.given_head, None
        own = sum(a.size for a in jax.tree.leaves(self.head))
        start = "a new one" if cfg.init is None else f"from init={cfg.init}"
        print(f"head: {cfg.kind}, {start}, {own / 1e6:.2f} M parameters")
        if line := self.source.described():
            print(line)
        described = self.source.cfg if isinstance(self.source, MTPSource) else self.model
        about = describe_head(Head(self.source, self.head))
        self.about = describe(described, tokenizer_dir(cfg.model).absolute(), about)
        common = {"attention": cfg.attention, "chunk": cfg.logprob_chunk_size}
        self.policy = PolicyTrainer(
            self.model, sft_loss, OptimConfig().build(), taps=inner_taps(self.source), **common
        )
        sampling = Sampling.of(cfg.rollout.sampling_params())
        self.trainer = DraftTrainer(self.model, cfg.draft, sampling, source=self.source, **common)
        self.opt_state = self.trainer.init_opt_state(self.head)
        self.frozen = frozen_policy_parts(self.params)
        most = cfg.cache_bytes if cfg.states == "cache" else 0
        self.states = States(
            lambda batch: self.policy.states(self.params, batch),
            most if self.total > len(self.batches) else 0,
            cfg.cache_dir,
            self._key(pairs) if cfg.cache_dir is not None else "",
        )
        self._begin_evaluation()

    def _key(self, pairs: Sequence[Pair]) -> str:
        """A digest of all that the states of a micro-batch depend on."""
        cfg, found = self.cfg, hashlib.blake2b(digest_size=16)
        packing = (cfg.packing.rows, cfg.packing.row_length, cfg.seed)
        run = self.policy.cfg.run
        found.update(repr((portable(cfg.model), packing, run, self.policy.taps)).encode())
        found.update(weights_digest(self.params).encode())
        for pair in pairs:
            sizes = len(pair.prompt), len(pair.tokens)
            found.update(np.asarray([*sizes, *pair.prompt, *pair.tokens], "<i4").tobytes())
        return found.hexdigest()

    # --- updates -------------------------------------------------------------------------------

    def update(self) -> tuple[dict[str, jax.Array], int]:
        """Makes one update; returns its metric sums, on the device, and its tokens."""
        count = len(self.batches)
        epoch, at = divmod(self.step, count)
        number = int(order_of(self.cfg, count, epoch)[at])
        host = self.batches[number]
        batch = self.policy.place(host)
        states = self.states(number, batch)
        self.head, self.opt_state, sums = self.trainer.start_update(
            self.head, self.opt_state, self.frozen, batch, states
        )
        self.step += 1
        self.tokens += int(host["loss_mask"].sum())
        return sums, int((host["segment_ids"] > 0).sum())

    # --- evaluation ----------------------------------------------------------------------------

    def _engine(self, spec: SpecConfig | None, source: Draft | None, batch: int) -> Engine:
        roll = self.cfg.rollout
        config = EngineConfig(attention=self.cfg.attention, named_strategies=False)
        try:
            return Engine(
                self.model.running(scan_layers=roll.scan_layers),
                spec,
                batch,
                roll.longest,
                stop_width=max(1, len(self.model.eos_token_ids)),
                prompt_widths=[roll.max_prompt_tokens],
                source=source,
                config=config,
            )
        except ValueError as error:
            raise ConfigError(spelled(error, SPELL)) from error

    def _begin_evaluation(self) -> None:
        """Makes the engine that decodes with the head, and the prompts it decodes."""
        cfg = self.cfg
        if self.texts is not None and self.texts.heldout:
            pairs = self.texts.heldout[: cfg.eval.problems]
            self.asked = [(i, [*p.prompt][-cfg.rollout.max_prompt_tokens :])
                          for i, p in enumerate(pairs)]  # fmt: skip
        else:
            fitting = ((problem, self.prompts.fit(problem)[0]) for problem in self.heldout)
            self.asked = [(problem.index, ids) for problem, ids in fitting if ids is not None]
        self.evaluator: Engine | None = None
        if cfg.eval.problems and not self.asked:
            print("WARNING: nothing is evaluated: there is no held-out prompt", flush=True)
        if cfg.eval.problems and self.asked:
            self.evaluator = self._measuring(drafting_copy(self.source))
        self.curve = Curve(
            {
                "model": Path(self.named).name,
                "kind": cfg.kind,
                "loss": cfg.draft.loss,
                "strategy": cfg.eval.strategy,
                "seed": cfg.eval.seed,
                "temperature": cfg.rollout.temperature,
                "prompts": len(self.asked),
                "draft_vocab": cfg.draft_vocab,
            }
        )

    def _measuring(self, source: Draft) -> Engine:
        spec = SpecConfig(strategy=self.cfg.eval.strategy)
        engine = self._engine(spec, source, min(self.cfg.eval.max_batch, len(self.asked)))
        engine.alarm = None  # a new head gains nothing yet; `not_learnt` speaks at the end
        return engine

    @property
    def temperatures(self) -> list[float]:
        """The rollout's temperature, and 0."""
        return list(dict.fromkeys([self.cfg.rollout.temperature, 0.0]))

    def evaluates(self) -> bool:
        """Whether the head is evaluated at the current step, and was not yet."""
        every, step = self.cfg.eval.every, self.step
        due = step in (0, self.total) or (every and step % every == 0)
        return bool(self.evaluator is not None and due and self.curve.at(step) is None)

    def evaluate(self) -> dict[str, float]:
        """Measures the accept length of the head, at the first call that of n-grams as well.

        Adds a point to the curve and writes it.
        """
        started = time.perf_counter()
        if not self.curve.ngram:
            spec = SpecConfig(strategy=self.cfg.eval.strategy)
            ngrams = self._measuring(DRAFTS.find("ngram").of(self.model, spec))
            self.curve.ngram = self._accept_lengths(ngrams, {})
        found = self._accept_lengths(self.evaluator, self.head)
        point = {"step": self.step, "tokens": self.tokens, "accept_length": found}
        self.curve.points.append(point)
        self.curve.write(self.out)
        first, *greedy = found.values()
        metrics = {"eval/accept_length": first, "eval/ngram": next(iter(self.curve.ngram.values()))}
        if greedy:
            metrics["eval/accept_length_greedy"] = greedy[0]
        return metrics | {"time/eval": time.perf_counter() - started}

    def _accept_lengths(self, engine: Engine, head: Params) -> dict[str, float]:
        """The accept length of all held-out prompts by temperature, written as text."""
        cfg, found = self.cfg, {}
        engine.set_params(self.params, head)
        for temperature in self.temperatures:
            jobs = []
            for index, ids in self.asked:
                greedy = temperature == 0
                params = cfg.rollout.sampling_params(cfg.eval.seed + index, greedy=greedy)
                jobs += make_jobs(ids, params, self.model.eos_token_ids, request=len(jobs))
            samples, totals = engine.generate(jobs, self.stop.check)
            require_valid(samples, lambda index: f"held-out prompt {index}")
            found[f"{temperature:g}"] = float(totals.accept_length)
        engine.release()
        return found

    # --- state -----------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        """The settings that change the head; a resumed run must have the same."""
        ignored = ("out", "steps", "epochs", "states", "cache_bytes", "cache_dir", "eval", "log")
        ignored += "save_every", "keep_last", "log_every", "export", "export_dtype", "attention"
        ignored += ("logprob_chunk_size",)
        settings = fingerprint(self.cfg, ignored)
        settings["model"] = portable(settings["model"])
        if takes_prompts(self.cfg):  # else what is evaluated decides nothing of what is trained on
            settings["eval"] = {"problems": self.cfg.eval.problems > 0}
        return settings

    def trees(self) -> dict[str, Any]:
        """The arrays of a checkpoint, by name."""
        return {"draft": self.head, "draft_opt": self.opt_state}

    def save(self, checkpoints: Checkpointer, block: bool = False) -> None:
        """Starts saving the state; `block` waits until it is on disk."""
        meta = {
            "step": self.step,
            "tokens": self.tokens,
            "curve": self.curve.state(),
            "settings": self.fingerprint(),
        }
        checkpoints.save(self.step, self.trees(), self.about | meta, block)

    def restore(self, checkpoints: Checkpointer, step: int | None) -> None:
        """Restores a checkpoint; later updates are those of a run that was never stopped.

        Raises:
          ConfigError: the checkpoint was made with other settings, or is past the last update, or
            its curve was measured with others.
          CheckpointError: the checkpoint cannot be read.
        """
        _, meta = checkpoints.restore(step, {})
        saved = data.saved_settings(meta.get("settings", {}), self.cfg.data, self.tokenizer)
        require_same_settings(saved, self.fingerprint(), type(self.cfg))
        require_same_head(meta, self.about, self.model)
        if meta["step"] > self.total:
            raise ConfigError(
                f"the checkpoint is at update {meta['step']}, expected at most {self.total}; raise "
                "steps or epochs, or take an earlier one with --resume_step"
            )
        self.curve.load_state(meta["curve"], grows=self.evaluator is not None)
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self.trees())
        trees, _ = checkpoints.restore(meta["step"], abstract)
        self.head, self.opt_state = trees["draft"], trees["draft_opt"]
        self.step, self.tokens = meta["step"], meta["tokens"]


def drafting_copy(source: Draft) -> Draft:
    """The source with the layout of decoding weights."""
    network = source.network
    return source if network is None else source.with_network(laid_out(network, None))


def describe_texts(cfg: DraftRunConfig, texts: Texts) -> list[str]:
    """The lines at start about given texts."""
    lines = [f"data: {shown_paths(cfg.data.texts)}, {len(texts.train)} texts to train on"]
    if texts.heldout:
        lines[0] += f", {len(texts.heldout)} held out"
    if texts.cut:
        lines.append(
            f"{texts.cut} texts have more tokens than {texts.limit} and are cut into pieces"
        )
    if texts.passed_over:
        lines.append(
            f"WARNING: {texts.passed_over} demonstrations have more tokens than {texts.limit} and "
            f"are left out; {texts.limit.remedy} to train on them"
        )
    return lines + ([f"WARNING: {texts.dropped}"] if texts.dropped else [])


def template_warning(cfg: DraftRunConfig, tokenizer, problems: Sequence) -> str | None:
    """The warning that questions of a file stay plain text, if the tokenizer has no template."""
    asked = cfg.data.chat == "auto" and cfg.data.path is not None
    if not asked or has_chat_template(tokenizer) or not problems:
        return None
    if not isinstance(problems[0].prompt, str):
        return None  # which is an error when the prompt is encoded
    return (
        "the model's tokenizer has no chat template, so the questions are continued as plain text: "
        "a head that is trained so drafts for such prompts. If the model is used with a template, "
        "give it the tokenizer files that have it; data.chat=off says that plain text is meant"
    )


def accept_estimate(metrics: dict[str, float]) -> float:
    """The accept length of a chain as deep as the head is unrolled, from acceptance per step.

    The acceptance of step k is estimated where all earlier tokens are those of the text; a chain
    ends at the first token that is rejected: 1 + a1 + a1 a2 + ...
    """
    length = share = 1.0
    depth = 1
    while (overlap := metrics.get(f"train/mtp_overlap_depth_{depth}")) is not None:
        share *= overlap
        length += share
        depth += 1
    return length


def not_learnt(cfg: DraftRunConfig, records: Sequence[dict], curve: Curve) -> str | None:
    """The warning that the head has not learnt; None if it has.

    Args:
      cfg: settings of the run.
      records: metrics of the run in order.
      curve: held-out accept lengths.
    """
    said = []
    seen = [r["train/mtp_overlap_depth_1"] for r in records if "train/mtp_overlap_depth_1" in r]
    if cfg.init is None and len(seen) > 1:
        tenth = -(-len(seen) // 10)
        first, last = np.mean(seen[:tenth]), np.mean(seen[-tenth:])
        if last < first + RISE:
            said.append(
                f"the acceptance of its first token went from {first:.3f} to {last:.3f} in "
                f"training, a rise of less than {RISE}"
            )
    if curve.points:
        length = next(iter(curve.points[-1]["accept_length"].values()))
        if not length >= LENGTH:
            said.append(f"its held-out accept length is {length:.3f}, less than {LENGTH}")
    if not said:
        return None
    return (
        f"THE HEAD HAS NOT LEARNT: {'; '.join(said)}. Drafting with it would only cost time. Train "
        "for longer (epochs), on more samples (rollout.prompts), or with another draft.optim.lr"
    )


def train(cfg: DraftRunConfig, resume: bool = False, resume_step: int | None = None) -> Path:
    """Trains a head, and returns the directory of its files, or of the run if it exports none.

    Args:
      cfg: settings of the run.
      resume: whether to continue the run in `cfg.out`.
      resume_step: step of the checkpoint to continue from; None for the newest.

    Raises:
      ConfigError: `cfg.out` holds a run without `resume`, or holds none with it; or settings, data
        and model do not fit together.
    """
    out = Path(cfg.out)
    directory = out / CHECKPOINTS
    if not resume and (any(directory.glob("*")) or any((out / SAMPLES).glob("*.jsonl"))):
        raise ConfigError(
            f"{out} holds samples or checkpoints of an earlier run; set out= to another, or use "
            "--resume"
        )
    restores = resume and can_resume(out, resume_step, print)
    settle_date(cfg, out if resume else None)
    stop = Stop()
    run = Run(cfg, stop)
    for line in run.notes:
        print(line, flush=True)
    if run.texts is None:
        check_samples(cfg, out, resume, run.tokenizer)
    with stop.listening(), Checkpointer(directory, cfg.keep_last) as checkpoints:
        pairs = run.collect()
        with interruptible(out) as progress:
            run.begin(pairs)
            if restores:
                run.restore(checkpoints, resume_step)
                print(f"resumed at update {run.step}", flush=True)
            progress.steps = lambda: (run.step, run.total)
            first = run.step + 1 if restores else None
            describe_run(out, cfg, "train.draft", cfg.model, run.step + 1, restores)
            with MetricsLogger(
                out,
                cfg.log.tensorboard,
                cfg.log.wandb,
                first,
                console_fields=CONSOLE,
                live=cfg.log.live,
                settings=settings_of(cfg),
                steps=run.total,
            ) as log:
                _updates(run, log, checkpoints)
    if warning := not_learnt(cfg, read_metrics(out), run.curve):
        bar = "!" * 100
        print(f"{bar}\nWARNING: {warning}. {run.source.suspects()}\n{bar}", flush=True)
    if run.curve.points:
        ours, theirs = run.curve.points[-1]["accept_length"], run.curve.ngram
        for temperature in ours:
            print(
                f"held-out accept length at temperature {temperature}: {ours[temperature]:.3f}, "
                f"n-grams {theirs[temperature]:.3f} ({cfg.eval.strategy}, {len(run.asked)} prompts)"
            )
        print(f"curve: {out / draft_curve.FILE}, {out / draft_curve.PICTURE}")
    if cfg.export == "none":
        return out
    return export_head(cfg, run.source, run.head, out / HEAD)


def _updates(run: Run, log: MetricsLogger, checkpoints: Checkpointer) -> None:
    """Makes the remaining updates, and evaluates, logs and saves in between."""
    cfg, first = run.cfg, run.step
    waiting: list[dict[str, jax.Array]] = []
    positions, began, since = 0, time.perf_counter(), time.perf_counter()
    evaluating = 0.0
    bar = tqdm(
        total=run.total, initial=first, unit="update", dynamic_ncols=True, leave=False, disable=None
    )
    try:
        while True:
            metrics: dict[str, float] = {}
            last = run.step == run.total
            saves = last or (cfg.save_every and run.step and run.step % cfg.save_every == 0)
            if waiting and (run.step % cfg.log_every == 0 or saves):
                sums: dict | None = None
                for step, one in enumerate(waiting, run.step - len(waiting) + 1):
                    one = sharding.fetch(one)
                    require_finite(step, draft_metrics(one), log, checkpoints, "init={run}")
                    sums = add_sums(sums, one)
                metrics = draft_metrics(sums)
                now = time.perf_counter()
                metrics["train/accept_estimate"] = accept_estimate(metrics)
                metrics["train/tokens_per_sec"] = positions / max(now - since, 1e-9)
                metrics["train/tokens"] = run.tokens
                metrics["train/padding_share"] = run.padding_share
                rate = (run.step - first) / max(now - began - evaluating, 1e-9)
                metrics["time/left"] = (run.total - run.step) / rate
                waiting, positions = [], 0
                bar.set_postfix_str(
                    f"loss {metrics['train/mtp_loss']:.3f}, accept length, estimated "
                    f"{metrics['train/accept_estimate']:.2f}, "
                    f"{metrics['train/tokens_per_sec']:.0f} tok/s"
                )
                since = time.perf_counter()
            if run.evaluates():
                started = time.perf_counter()
                metrics |= run.evaluate()
                evaluating += time.perf_counter() - started
                since += time.perf_counter() - started
            if metrics:
                bar.clear()
                log.log(run.step, metrics)
            if saves:
                _save(run, checkpoints, block=last)
            if last:
                return
            run.stop.check()
            sums, size = run.update()
            waiting.append(sums)
            positions += size
            bar.update()
    except KeyboardInterrupt:
        if run.step:
            _save(run, checkpoints, block=True)
        raise
    finally:
        bar.close()
        checkpoints.wait()


def _save(run: Run, checkpoints: Checkpointer, block: bool) -> None:
    """Saves the current step unless it is saved already."""
    checkpoints.wait()
    if run.step not in checkpoints.all_steps():
        run.save(checkpoints, block)


def main(argv: list[str] | None = None) -> None:
    description = "Train a draft head for a policy, before RL and for any model."
    path = run_program(DraftRunConfig, argv, "train.draft", description, train)
    print(f"head: {path}")


if __name__ == "__main__":
    interrupts.run(main)
