"""`python -m train.draft`: trains a draft head for a policy, before RL and for any model.

    prompts -> samples of the policy itself, at the rollout's temperature (train.data.samples)
            -> the tokens that the head drafts from: the most frequent ones
            -> a new head, or one to go on with (train.heads.kinds)
            -> per update: hidden states of the policy for a packed micro-batch, and an update of
               the head on them (train.heads.training)
            -> held-out accept length by decoding with the head, beside that of n-grams
               (train.heads.curve)
            -> the head's files in <out>/head

The policy is never changed. `--resume` continues a run that was killed: samples that were written
are not generated again, and the head is the one of a run that was never stopped.
"""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C from here on
    from specjax import interrupts

    interrupts.begin("train.draft")

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from specjax.checkpoint.weights import (
    Head,
    describe,
    describe_head,
    load_model,
    read_config,
    tokenizer_dir,
)
from specjax.command_line import ConfigError
from specjax.config import SpecConfig
from specjax.config.dtype import about_dtype, resolve_dtype
from specjax.drafts.alignment import align
from specjax.drafts.mtp import MTPSource
from specjax.engine.engine import Engine
from specjax.engine.llm import LEAST
from specjax.engine.request import make_jobs, require_valid
from specjax.engine.settings import EngineConfig
from specjax.hub import portable
from specjax.interfaces import Draft
from specjax.models.transformer import Params, laid_out, rounded
from specjax.parallel import sharding
from specjax.registry import DRAFTS
from specjax.settings import fingerprint, values_of
from specjax.tokenizer import has_chat_template, with_tokenizer_end
from specjax.weights import load_tokenizer
from train.cli import run_program
from train.data import rows
from train.data.checks import (
    describe_data,
    fit_lengths,
    overlong_warnings,
)
from train.data.prompts import Prompts
from train.data.samples import (
    SAMPLES,
    Pair,
    Sampler,
    Texts,
    always_drafted,
    check_samples,
    choose_vocabulary,
    order_of,
    pack_pairs,
    read_samples,
    read_texts,
)
from train.draft_schema import DraftRunConfig
from train.heads import curve as curves
from train.heads.curve import Curve
from train.heads.files import require_same_head
from train.heads.kinds import export_head, head_to_go_on_with, start_head
from train.heads.losses import Sampling
from train.heads.training import (
    DraftTrainer,
    add_sums,
    draft_metrics,
    frozen_policy_parts,
    inner_taps,
)
from train.loss.optim import OptimConfig
from train.loss.packing import padding_share
from train.loss.policy import PolicyTrainer
from train.loss.terms import sft_loss
from train.run import picture
from train.run.files import read_metrics
from train.run.live import sample_bar
from train.run.start import Interrupted, Run, find_policy, require_unused, say, start

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


class HeadTrainer:
    """The policy, the head with its optimizer, and the position in the data.

    Args:
      cfg: settings of the run.

    Attributes:
      done_steps: number of updates so far.
      total: number of updates of the run.
      tokens: number of tokens that the loss has seen, each as often as it was trained on.
      padding_share: share of the positions of all micro-batches that hold no token.
      notes: lines to print at start.
      curve: held-out accept lengths.
    """

    work = "update"
    restart = "init={run}"

    def __init__(self, cfg: DraftRunConfig):
        self.cfg, self.out = cfg, Path(cfg.out)
        self.done_steps = self.tokens = 0
        self.notes: list[str] = []
        self.named = find_policy(cfg)
        try:
            self._read_inputs()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        dtype = resolve_dtype(cfg.dtype, self.stored, sharding.platform_of(None))
        dtype = "bfloat16" if dtype == "float16" else dtype  # whose gradients would vanish
        loaded = load_model(cfg.model, dtype)
        self.params = loaded.policy
        model = loaded.cfg.replace(mtp_num_layers=0).running(compute_dtype=dtype, remat=False)
        longest = cfg.rollout.longest
        if cfg.data.texts is not None:
            longest = max(longest, cfg.packing.row_length)
        model, self.longest = model.for_length(longest), longest
        self.model = with_tokenizer_end(model, self.tokenizer)
        if cfg.rounds:
            self._full = self.params if cfg.align else None
            try:
                self.params = rounded(self.params, self.model.running(products=cfg.products))
            except ValueError as error:
                raise ConfigError(f"products: {error}") from error
        # What is wrong with them is said before the policy answers prompts.
        always_drafted(cfg, self.model.vocab_size, self.model.eos_token_ids)
        self._given_head = head_to_go_on_with(cfg, self.model)
        self.notes.append(about_dtype(cfg.dtype, dtype, self.stored))

    def _read_inputs(self) -> None:
        """Reads config, tokenizer and data, and checks them before anything is computed."""
        cfg = self.cfg
        target = read_config(cfg.model)
        self.stored = target.run.param_dtype
        if line := fit_lengths(cfg, self.named, target.max_position):
            self.notes.append(line)
        self.tokenizer = load_tokenizer(tokenizer_dir(cfg.model).absolute())
        self.prompts = Prompts(self.tokenizer, cfg.data, cfg.rollout.max_prompt_tokens, target)
        self.texts: Texts | None = None
        self.problems = self.heldout = ()
        if cfg.data.texts is not None:
            self.texts = read_texts(cfg, self.prompts)
            self.notes += self.texts.notes
        if cfg.data.texts is None or cfg.data.path is not None:
            self._read_problems()

    def _read_problems(self) -> None:
        cfg, warnings = self.cfg, []
        if cfg.data.texts is None:
            self.problems = rows.problems(cfg.data, "train", self.prompts.chat)
            warnings += overlong_warnings(self.prompts, self.problems)
        self.notes.append(describe_data(self.prompts, self.named))
        if cfg.eval.problems:
            try:
                heldout = rows.problems(cfg.data, "heldout", self.prompts.chat)
                self.heldout = heldout[: cfg.eval.problems]
                warnings += overlong_warnings(self.prompts, self.heldout, "held-out prompts")
            except rows.EmptySplitError as error:
                warnings.append(f"nothing is evaluated: {error}")
        plain = cfg.data.chat == "auto" and cfg.data.path is not None
        if plain and not has_chat_template(self.tokenizer):
            warnings.append(
                "the model's tokenizer has no chat template, so the questions are continued as "
                "plain text: a head that is trained so drafts for such prompts. data.chat=off says "
                "that this is meant"
            )
        self.notes += [f"WARNING: {text}" for text in warnings]

    # --- data ----------------------------------------------------------------------------------

    def collect(self) -> list[Pair]:
        """Returns the samples to train on; those that the run's directory lacks are generated.

        Raises:
          Interrupted: by Ctrl-C; blocks of samples that are complete are kept.
        """
        cfg = self.cfg
        if self.texts is not None:
            return self.texts.train
        order = rows.endless(self.problems, cfg.data.seed)
        sampler = Sampler(cfg, self.out, order, self.prompts)
        blocks, done = len(sampler.sizes), sampler.done
        if done:
            say(f"samples: {done} of {blocks} blocks are there already")
        if done < blocks:
            say(
                f"samples: {cfg.rollout.prompts} prompts x {cfg.rollout.n}, at temperature "
                f"{cfg.rollout.temperature:g}; compiling first"
            )
            engine = self.engine(None, None, cfg.rollout.max_batch)
            engine.set_params(self.params)
            with sample_bar(cfg.rollout.prompts * cfg.rollout.n) as show:
                try:
                    sampler.run(engine, self.model.eos_token_ids, show)
                except KeyboardInterrupt:
                    raise Interrupted(
                        f"interrupted while the policy answered prompts; {sampler.done} of "
                        f"{blocks} blocks of samples are in {self.out / SAMPLES}; go on with "
                        "--resume"
                    ) from None
            engine.release()
        if sampler.dropped:
            say(f"samples: {sampler.dropped} prompts were dropped (data.overlong_prompts)")
        return read_samples(self.out)

    def begin(self, pairs: Sequence[Pair]) -> None:
        """Makes the vocabulary, the head and the programs, and packs what is trained on.

        Raises:
          ConfigError: settings do not fit the policy, or nothing can be trained on.
        """
        cfg, model = self.cfg, self.model
        self.batches = pack_pairs(cfg, pairs)
        if all(len(pair.tokens) < 2 for pair in pairs):
            raise ConfigError(
                f"all {len(pairs)} samples have a single token, and the head predicts the second "
                "one and those after it: is the prompt what the policy expects? See `python -m "
                "train.data`"
            )
        self.padding_share = padding_share(self.batches)
        self.total = cfg.epochs * len(self.batches) if cfg.steps is None else cfg.steps
        ids, covered = choose_vocabulary(cfg, pairs, model.vocab_size, model.eos_token_ids)
        say(
            f"training: {len(pairs)} samples with {sum(len(p.tokens) for p in pairs)} tokens in "
            f"{len(self.batches)} micro-batches of {len(self.batches[0]['tokens'])} x "
            f"{cfg.packing.row_length}; {self.total} updates"
        )
        if ids is not None:
            say(
                f"draft vocabulary: {len(ids)} of {model.vocab_size} tokens, which are "
                f"{covered:.2%} of the tokens trained on (draft_vocab)"
            )
        # Updates give the memory of the head's arrays away: no second name keeps them.
        given, self._given_head = self._given_head, None
        source, self.head = given or start_head(cfg, model, self.params, ids)
        del given
        if cfg.align:
            source, self.head = self._aligned(source)
        self.source = source.for_length(self.longest)
        size = sum(a.size for a in jax.tree.leaves(self.head))
        begins = "a new one" if cfg.init is None else f"from init={cfg.init}"
        say(f"head: {cfg.kind}, {begins}, {size / 1e6:.2f} M parameters")
        if line := self.source.described():
            say(line)
        common = {"attention": cfg.attention, "chunk": cfg.logprob_chunk_size}
        taps, never = inner_taps(self.source), OptimConfig().build(())
        self.policy = PolicyTrainer(model, sft_loss, never, taps=taps, **common)
        sampling = Sampling.of(cfg.rollout.sampling_params())
        self.trainer = DraftTrainer(model, cfg.draft, sampling, source=self.source, **common)
        self.opt_state = self.trainer.init_opt_state(self.head)
        self.frozen = frozen_policy_parts(self.params)
        self._room = cfg.cache_bytes if cfg.states == "cache" else 0
        self._states: dict[int, np.ndarray] = {}  # those that are kept, by micro-batch
        self._begin_evaluation()

    def _aligned(self, source: Draft) -> tuple[Draft, Params]:
        """Aligns the head with the rounded weights of the policy, on all samples."""
        cfg, full = self.cfg, self._full
        self._full = None  # its memory
        how = cfg.align, cfg.rollout.temperature, cfg.draft.unroll_steps
        try:
            found = align(source, self.head, self.model, full, self.params, self.batches, *how)
        except ValueError as error:
            raise ConfigError(f"align: {error}") from error
        say(f"head: aligned with the rounded weights by {', '.join(cfg.align)}")
        return found

    # --- updates -------------------------------------------------------------------------------

    def update(self) -> tuple[dict[str, jax.Array], int]:
        """Makes one update; returns its metric sums, on the device, and its tokens."""
        count = len(self.batches)
        epoch, place = divmod(self.done_steps, count)
        number = int(order_of(self.cfg, count, epoch)[place])
        host = self.batches[number]
        batch = self.policy.place(host)
        states = self._states_of(number, batch)
        self.head, self.opt_state, sums = self.trainer.start_update(
            self.head, self.opt_state, self.frozen, batch, states
        )
        self.done_steps += 1
        self.tokens += int(host["loss_mask"].sum())
        return sums, int((host["segment_ids"] > 0).sum())

    def _states_of(self, number: int, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the policy's states of a micro-batch, which are the same in every pass."""
        if number in self._states:
            return jax.device_put(self._states[number])
        states = self.policy.states(self.params, batch)
        if states.nbytes <= self._room:
            self._states[number] = np.asarray(states)
            self._room -= states.nbytes
        return states

    # --- evaluation ----------------------------------------------------------------------------

    def engine(self, spec: SpecConfig | None, source: Draft | None, batch: int) -> Engine:
        """Makes an engine of the policy.

        Raises:
          ConfigError: settings do not fit the policy.
        """
        roll = self.cfg.rollout
        # The engine packs the rounded weights again, to the same but for last bits of scales.
        products = (spec and self.cfg.eval.policy_products) or self.cfg.products
        config = EngineConfig(attention=self.cfg.attention, products=products, stand_in=False)
        try:
            engine = Engine(
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
            raise ConfigError(str(error)) from error
        return engine

    def _begin_evaluation(self) -> None:
        """Makes the engine that decodes with the head, and the prompts it decodes."""
        cfg = self.cfg
        if self.texts is not None and self.texts.heldout:
            heldout = self.texts.heldout[: cfg.eval.problems]
            most = cfg.rollout.max_prompt_tokens
            self.asked = [(i, [*pair.prompt][-most:]) for i, pair in enumerate(heldout)]
        else:
            fitting = ((problem, self.prompts.fit(problem)[0]) for problem in self.heldout)
            self.asked = [(problem.index, ids) for problem, ids in fitting if ids is not None]
        self.evaluator: Engine | None = None
        if cfg.eval.problems and not self.asked:
            say("WARNING: nothing is evaluated: there is no held-out prompt")
        if cfg.eval.problems and self.asked:
            network = self.source.network
            drafts = self.source
            if network is not None:  # in the layout of decoding weights
                drafts = drafts.with_network(laid_out(network, None))
            self.evaluator = self._measuring(drafts)
        self.curve = Curve(
            {
                "model": Path(self.named).name,
                "kind": cfg.kind,
                "loss": cfg.draft.loss,
                "products": values_of(cfg)["products"],
                "strategy": cfg.eval.strategy,
                "seed": cfg.eval.seed,
                "temperature": cfg.rollout.temperature,
                "prompts": len(self.asked),
                "draft_vocab": cfg.draft_vocab,
            }
        )

    def _measuring(self, source: Draft) -> Engine:
        spec, most = SpecConfig(strategy=self.cfg.eval.strategy), self.cfg.eval.max_batch
        return self.engine(spec, source, min(most, len(self.asked)))

    def evaluates(self) -> bool:
        """Returns whether the head is evaluated at the current step, and was not yet."""
        every, step = self.cfg.eval.every, self.done_steps
        due = step in (0, self.total) or (every and step % every == 0)
        known = any(point["step"] == step for point in self.curve.points)
        return bool(self.evaluator is not None and due and not known)

    def evaluate(self) -> dict[str, float]:
        """Measures the accept length of the head, at the first call that of n-grams as well.

        Adds a point to the curve and writes it.
        """
        started = time.perf_counter()
        if not self.curve.ngram:
            spec = SpecConfig(strategy=self.cfg.eval.strategy)
            ngrams = self._measuring(DRAFTS.find("ngram").of(self.model, spec))
            self.curve.ngram = dict(self._accept_lengths(ngrams, {}))
        lengths = dict(self._accept_lengths(self.evaluator, self.head))
        self.curve.points.append(
            {"step": self.done_steps, "tokens": self.tokens, "accept_length": lengths}
        )
        self.curve.write(self.out)
        first, *greedy = lengths.values()
        metrics = {"eval/accept_length": first, "eval/ngram": next(iter(self.curve.ngram.values()))}
        if greedy:
            metrics["eval/accept_length_greedy"] = greedy[0]
        return metrics | {"time/eval": time.perf_counter() - started}

    def _accept_lengths(self, engine: Engine, head: Params) -> Iterator[tuple[str, float]]:
        """Yields the accept length of all held-out prompts by temperature, written as text."""
        cfg = self.cfg
        engine.set_params(self.params, head)
        for temperature in dict.fromkeys([cfg.rollout.temperature, 0.0]):
            jobs = []
            for index, ids in self.asked:
                greedy = temperature == 0
                params = cfg.rollout.sampling_params(cfg.eval.seed + index, greedy=greedy)
                jobs += make_jobs(ids, params, self.model.eos_token_ids, request=len(jobs))
            samples, totals = engine.generate(jobs)
            require_valid(samples, lambda index: f"held-out prompt {index}")
            yield f"{temperature:g}", float(totals.accept_length)
        engine.release()

    # --- state -----------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        """Returns the settings that change the head; a resumed run must have the same."""
        cfg = self.cfg
        ignored = ("out", "steps", "epochs", "states", "cache_bytes", "eval", "log")
        ignored += "save_every", "keep_last", "log_every", "export", "export_dtype", "attention"
        settings = fingerprint(cfg, (*ignored, "logprob_chunk_size"))
        settings["model"] = portable(settings["model"])
        if not cfg.rounds:
            settings.pop("products")
        # The points of one curve are comparable, and held-out texts are not trained on.
        names = "problems", "strategy", "seed", "policy_products"
        settings["eval"] = {name: getattr(cfg.eval, name) for name in names}
        return settings

    def trees(self, meta: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the arrays of a checkpoint, by name."""
        return {"draft": self.head, "draft_opt": self.opt_state}

    def meta(self) -> dict[str, Any]:
        """Returns what else a checkpoint has, by which the head is loaded elsewhere, too."""
        return {"tokens": self.tokens, "curve": self.curve.state(), **self._about}

    @property
    def _about(self) -> dict[str, Any]:
        model = self.source.cfg if isinstance(self.source, MTPSource) else self.model
        about = describe_head(Head(self.source, self.head))
        return describe(model, tokenizer_dir(self.cfg.model).absolute(), about)

    def check(self, meta: Mapping[str, Any]) -> None:
        """Raises ConfigError if the checkpoint has another head, or is past the last update."""
        require_same_head(meta, self._about, self.model)
        if meta["step"] > self.total:
            raise ConfigError(
                f"the checkpoint is at update {meta['step']}, expected at most {self.total}; raise "
                "steps or epochs, or take an earlier one with --resume_step"
            )

    def load(self, trees: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Takes the content of a checkpoint."""
        self.head, self.opt_state = trees["draft"], trees["draft_opt"]
        self.tokens = meta["tokens"]
        self.curve.load_state(meta["curve"])


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
    if not resume:
        require_unused(Path(cfg.out), SAMPLES)
    with start("train.draft", cfg, resume, resume_step) as run:
        trainer = HeadTrainer(cfg)
        for line in trainer.notes:
            say(line)
        trainer.notes = []
        if trainer.texts is None:
            check_samples(cfg, run.out, resume, trainer.tokenizer)
        trainer.begin(trainer.collect())
        run.restore(trainer, cfg.keep_last)
        run.begin(cfg.model, trainer.total, CONSOLE)
        _updates(run, trainer)
    if warning := not_learnt(cfg, read_metrics(run.out), trainer.curve):
        bar = "!" * 100
        say(f"{bar}\nWARNING: {warning}\n{bar}")
    if trainer.curve.points:
        lengths, ngrams = trainer.curve.points[-1]["accept_length"], trainer.curve.ngram
        for temperature in lengths:
            say(
                f"held-out accept length at temperature {temperature}: {lengths[temperature]:.3f}, "
                f"n-grams {ngrams[temperature]:.3f} ({cfg.eval.strategy}, {len(trainer.asked)} "
                "prompts)"
            )
        say(f"curve: {run.out / curves.FILE}, {picture.draw(run.out)}")
    if cfg.export == "none":
        return run.out
    return export_head(cfg, trainer.source, trainer.head, run.out / HEAD)


def _updates(run: Run, trainer: HeadTrainer) -> None:
    """Makes the remaining updates, and evaluates, logs and saves in between.

    The sums of updates stay on the device until they are logged, so that no update waits.
    """
    cfg, first = trainer.cfg, trainer.done_steps
    waiting: list[dict[str, jax.Array]] = []
    positions, began = 0, time.perf_counter()
    since = began
    with tqdm(
        total=run.last, initial=first, unit="update", dynamic_ncols=True, leave=False, disable=None
    ) as bar:
        while True:
            step, metrics = trainer.done_steps, {}
            saves = not run.goes_on() or bool(
                cfg.save_every and step and step % cfg.save_every == 0
            )
            if waiting and (step % cfg.log_every == 0 or saves or run.signal):
                metrics = _metrics(run, waiting)
                now = time.perf_counter()
                metrics["train/tokens_per_sec"] = positions / max(now - since, 1e-9)
                metrics["train/tokens"] = trainer.tokens
                metrics["train/padding_share"] = trainer.padding_share
                metrics["time/left"] = (run.last - step) * (now - began) / (step - first)
                waiting, positions, since = [], 0, now
            if trainer.evaluates():
                metrics |= trainer.evaluate()
                began += metrics["time/eval"]
                since += metrics["time/eval"]
            if metrics:
                bar.clear()
                run.log.log(step, metrics)
            run.end_step(saves)
            if not run.goes_on():
                return
            sums, size = trainer.update()
            waiting.append(sums)
            positions += size
            bar.update()


def _metrics(run: Run, waiting: Sequence[Mapping[str, jax.Array]]) -> dict[str, float]:
    """Computes the metrics of the latest updates, which must be finite."""
    total: dict | None = None
    for sums in map(sharding.fetch, waiting):
        run.require_finite(draft_metrics(sums))
        total = add_sums(total, sums)
    metrics = draft_metrics(total)
    # The acceptance of step k is estimated where all earlier tokens are those of the text, and a
    # chain as deep as the head is unrolled ends at the first token that is rejected.
    overlaps = [value for name, value in metrics.items() if "_overlap_depth_" in name]
    return metrics | {"train/accept_estimate": 1.0 + float(np.cumprod(overlaps).sum())}


def not_learnt(cfg: DraftRunConfig, records: Sequence[dict], curve: Curve) -> str | None:
    """Writes the warning that the head has not learnt; None if it has.

    Args:
      cfg: settings of the run.
      records: metrics of the run in order.
      curve: held-out accept lengths.
    """
    reasons = []
    seen = [r["train/mtp_overlap_depth_1"] for r in records if "train/mtp_overlap_depth_1" in r]
    if cfg.init is None and len(seen) > 1:
        tenth = -(-len(seen) // 10)
        first, last = np.mean(seen[:tenth]), np.mean(seen[-tenth:])
        if last < first + RISE:
            reasons.append(
                f"the acceptance of its first token went from {first:.3f} to {last:.3f} in "
                f"training, a rise of less than {RISE}"
            )
    if curve.points:
        length = next(iter(curve.points[-1]["accept_length"].values()))
        if not length >= LENGTH:
            reasons.append(f"its held-out accept length is {length:.3f}, less than {LENGTH}")
    if not reasons:
        return None
    return (
        f"THE HEAD HAS NOT LEARNT: {'; '.join(reasons)}. Drafting with it would only cost time. "
        "Train for longer (epochs), on more samples (rollout.prompts), or with another "
        "draft.optim.lr"
    )


def main(argv: list[str] | None = None) -> None:
    description = "Train a draft head for a policy, before RL and for any model."
    path = run_program(DraftRunConfig, argv, "train.draft", description, train)
    print(f"head: {path}")


if __name__ == "__main__":
    interrupts.run(main)
