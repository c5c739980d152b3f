"""The batch API: `LLM(path).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from pathlib import Path

import jax
from tqdm import tqdm

from specjax.config import ModelConfig, SamplingParams, SpecConfig
from specjax.draft.mtp import init_head_params
from specjax.engine.compare import Difference, first_difference
from specjax.engine.engine import Engine
from specjax.engine.request import Job, RequestOutput, SampleOutput, Totals, make_jobs
from specjax.engine.tokenizer import load_tokenizer
from specjax.models import hf
from specjax.models.transformer import Params

Prompt = str | Sequence[int]
STOP_WIDTH = 8


class LLM:
    """A policy with its draft head, ready to generate.

    Args:
      model: a Hugging Face directory, or (ModelConfig, params, head params or None).
      spec: how to speculate; None is plain decoding.
      max_batch: samples that run at once; more are queued.
      max_len: prompt and generated tokens of a sample at most; None takes the model's limit,
        2,048 at most.
      dtype: of parameters and arithmetic (`"float32"`, `"bfloat16"`).
      mesh: shard over it; see `specjax.sharding.make_mesh`.
      tokenizer: overrides the one in the directory; without one, prompts are token ids.
      scan_layers: scan over the layers instead of unrolling them: compiles faster, decodes slower
        on CPU. None: as the config says, which for a directory is unrolled.

    Raises:
      ValueError: speculation is asked for and the checkpoint has no draft head.
    """

    def __init__(
        self,
        model: str | Path | tuple[ModelConfig, Params, Params | None],
        spec: SpecConfig | None = None,
        max_batch: int = 32,
        max_len: int | None = None,
        dtype: str = "float32",
        mesh: jax.sharding.Mesh | None = None,
        tokenizer=None,
        scan_layers: bool | None = None,
    ):
        if isinstance(model, (str, Path)):
            cfg, params, head = hf.load_checkpoint(model, dtype, mesh)
            cfg = cfg.replace(compute_dtype=dtype)
            tokenizer = tokenizer or load_tokenizer(model, required=False)
        else:
            cfg, params, head = model
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        self.spec = None if spec is None or spec.is_off else spec
        cfg, head = _with_head(cfg, head, self.spec)
        # Fused weights, as unrolled layers have them, cannot be split over a mesh.
        scan = cfg.scan_layers if scan_layers is None else scan_layers
        cfg = cfg.replace(scan_layers=scan or mesh is not None)
        self.cfg, self.tokenizer, self.mesh = cfg, tokenizer, mesh
        self.max_batch = max_batch
        self.max_len = min(max_len or 2048, cfg.max_position)
        self.params, self.head = params, head
        self.engine = self._engine(self.spec)
        self.totals: Totals | None = None

    def _engine(self, spec: SpecConfig | None) -> Engine:
        engine = Engine(
            self.cfg, spec, self.max_batch, self.max_len, stop_width=STOP_WIDTH, mesh=self.mesh
        )
        engine.set_params(self.params, self.head if spec else None)
        return engine

    def update_weights(self, params: Params, head: Params | None = None) -> None:
        """Swaps the policy and, if given, the head; nothing is compiled again."""
        self.params = params
        self.head = self.head if head is None else head
        self.engine.set_params(self.params, self.head if self.spec else None)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generates `params.n` samples for each prompt.

        Args:
          prompts: strings (encoded as the tokenizer does, its special tokens included), or lists
            of token ids; one prompt may be given bare.
          params: one for all, or one per prompt.
          progress: show a bar with tok/s and accept length.

        Returns:
          one `RequestOutput` per prompt, in order.

        Raises:
          ValueError: empty or over-long prompt, ids out of range, no tokenizer for a string, as
            many params as neither one nor the prompts. Nothing has run by then.
        """
        prompts, params = self._normalise(prompts, params)
        pairs = enumerate(zip(prompts, params, strict=True))
        ids = [self._token_ids(i, prompt, sampling) for i, (prompt, sampling) in pairs]
        jobs: list[Job] = []
        for prompt, sampling in zip(ids, params, strict=True):
            jobs += make_jobs(prompt, sampling, self.cfg.eos_token_ids)
        samples, self.totals = self._run(jobs, progress)
        return self._group(ids, params, samples)

    def compare_with_plain(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Difference]:
        """Generates with and without speculation and explains every sample that differs.

        Returns:
          one `Difference` per differing sample, none when all tokens are equal. In `block` mode
          differences are expected: that rule is equal in distribution, not token by token.
        """
        prompts, params = self._normalise(prompts, params)
        spec_outs = self.generate(prompts, params)
        plain = LLM(
            (self.cfg, self.params, None),
            None,
            self.max_batch,
            self.max_len,
            mesh=self.mesh,
        )
        ids = [out.prompt_token_ids for out in spec_outs]
        plain_outs = plain.generate(ids, params)
        found = []
        for request, (a, b, sp) in enumerate(zip(plain_outs, spec_outs, params, strict=True)):
            for index, (x, y) in enumerate(zip(a.samples, b.samples, strict=True)):
                if x.token_ids != y.token_ids:
                    job = make_jobs(ids[request], sp, self.cfg.eos_token_ids)[index]
                    found.append(
                        first_difference(
                            self.engine.runner, request, index, job, x.token_ids, y.token_ids
                        )
                    )
        return found

    # --- input and output ------------------------------------------------------------------------

    def _normalise(self, prompts, params):
        if isinstance(prompts, str) or (
            len(prompts) > 0 and all(isinstance(t, numbers.Integral) for t in prompts)
        ):
            prompts = [prompts]
        prompts = list(prompts)
        if not prompts:
            raise ValueError("no prompts were given; expected at least one")
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"got {len(params)} SamplingParams for {len(prompts)} prompts; give one for all, "
                "or one for each"
            )
        return prompts, list(params)

    def _token_ids(self, index: int, prompt: Prompt, params: SamplingParams) -> list[int]:
        where = f"prompt {index}"
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    f"{where} is a string but the checkpoint has no tokenizer; pass token ids, or "
                    "LLM(..., tokenizer=...)"
                )
            prompt = self.tokenizer.encode(prompt)
        wrong = [t for t in prompt if not isinstance(t, numbers.Integral)]
        if wrong:
            raise ValueError(f"{where} holds {wrong[0]!r}; expected token ids, which are integers")
        ids = [int(t) for t in prompt]
        if not ids:
            raise ValueError(f"{where} is empty; expected at least one token")
        bad = [t for t in ids if not 0 <= t < self.cfg.vocab_size]
        if bad:
            raise ValueError(
                f"{where} holds token id {bad[0]}; expected 0 <= id < {self.cfg.vocab_size}"
            )
        if len(ids) + params.max_tokens > self.max_len:
            raise ValueError(
                f"{where} has {len(ids)} tokens and max_tokens is {params.max_tokens}, together "
                f"more than max_len {self.max_len}; shorten one, or raise max_len (the model's own "
                f"limit is {self.cfg.max_position})"
            )
        stops = len(params.stop_token_ids) + len(self.cfg.eos_token_ids)
        if stops > STOP_WIDTH:
            raise ValueError(
                f"{where} has {stops} stop tokens, the model's own included; at most {STOP_WIDTH}"
            )
        return ids

    def _run(self, jobs: list[Job], progress: bool) -> tuple[list[SampleOutput], Totals]:
        if not progress:
            return self.engine.generate(jobs)
        with tqdm(total=len(jobs), unit="sample", dynamic_ncols=True) as bar:

            def show(finished: int, totals: Totals) -> None:
                bar.update(finished - bar.n)
                rate = totals.tokens / max(totals.seconds, 1e-9)
                bar.set_postfix_str(f"{rate:.0f} tok/s, accept length {totals.accept_length:.2f}")

            return self.engine.generate(jobs, show)

    def _group(self, ids, params, samples) -> list[RequestOutput]:
        outputs, at = [], 0
        for prompt, sampling in zip(ids, params, strict=True):
            mine = samples[at : at + sampling.n]
            at += sampling.n
            if self.tokenizer is not None:
                mine = [
                    dataclasses.replace(
                        s, text=self.tokenizer.decode(s.token_ids, skip_special_tokens=True)
                    )
                    for s in mine
                ]
            outputs.append(RequestOutput(prompt, mine))
        return outputs


def _with_head(cfg: ModelConfig, head: Params | None, spec: SpecConfig | None):
    """The config and head that `spec` needs; a random head gets at least one module."""
    if spec is None:
        return cfg, head
    if spec.head == "random":
        cfg = cfg.replace(mtp_num_layers=max(cfg.mtp_num_layers, 1))
        return cfg, init_head_params(cfg, spec.head_seed)
    if head is None:
        raise ValueError(
            "the checkpoint has no draft head, but SpecConfig(head='checkpoint') asks for its own; "
            "use spec=None, or SpecConfig(head='random') and train it online"
        )
    return cfg, head
