"""Operations of an administrator: weights, sleep, pauses; some have names of SGLang or vLLM."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from serve.engine_thread import EngineThread
from serve.errors import ApiError
from serve.protocol import DiskWeightsRequest, PauseRequest, WeightsRequest
from specjax import LLM, ModelConfig
from specjax.checked_json import CheckpointError
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint import weights
from specjax.engine.sources import differing_setting, load_head, require_same_draft
from specjax.models.transformer import Params, init_params
from specjax.tokenizer import with_tokenizer_end
from specjax.weights.matrix import PLAIN, Matrix, Products, is_exact, unpack

ADMIN_PATHS = (
    "/update_weights", "/sleep", "/wake", "/update_weights_from_disk", "/pause_generation",
    "/continue_generation", "/flush_cache", "/wake_up", "/is_sleeping",
)  # fmt: skip
# What becomes of running samples when new weights come in a pause of each mode.
_RUNNING = {"abort": "recompute", "retract": "recompute", "in_place": "keep"}
# Fields of ModelConfig that may differ between served and new weights: they say how this program
# computes, or hold sampling defaults.
_MAY_DIFFER = ("run", "mtp_num_layers", "generation")
_HEAD_FIELDS = tuple(name for name in weights.HEAD_SWITCHES if name not in _MAY_DIFFER)


class Admin:
    """Runs the operations of an administrator, one at a time."""

    def __init__(self, thread: EngineThread):
        self._thread, self._llm = thread, thread.llm
        self._lock = asyncio.Lock()
        # While asleep: policy and head in host memory, and their shardings.
        self._on_host: tuple[Params, Params, tuple] | None = None

    async def update(self, asked: WeightsRequest) -> dict:
        """Loads new weights while the old ones serve, then replaces these between two chunks.

        Returns:
          the new version, and checksums of the weights on the devices.

        Raises:
          ApiError: the new weights cannot be used; the old ones stay.
        """
        async with self._lock:
            if self._thread.asleep:
                raise ApiError(409, "the server is asleep; POST /wake first")
            began = time.perf_counter()
            try:
                policy, head = await asyncio.to_thread(self._load, asked)
            except (CheckpointError, hf.UnsupportedModelError, OSError, ValueError) as error:
                raise ApiError(400, f"{asked.path} cannot be used: {error}", "path") from error
            return await self._thread.call(lambda: self._swap(asked, policy, head, began))

    def _load(self, asked: WeightsRequest) -> tuple[Params | None, Params | None]:
        """Reads new weights and checks them against those that are served.

        Returns:
          (policy, head); None for a part that stays as it is.
        """
        llm, alone = self._llm, asked.what == "head"
        takes_head = llm.spec is not None and llm.drafting.with_head
        if alone and not takes_head:
            raise ValueError("the server drafts with no head of its own; nothing would use it")
        settled = llm.engine.runner.cfg.run.products
        products = PLAIN if is_exact(settled) else settled
        policy, found = read_weights(
            Path(asked.path), llm.cfg, alone, asked.step, llm.tokenizer, products
        )
        head = None if found is None else found.params
        if alone and head is None:
            raise ValueError("it holds no draft head; expected one")
        if not alone and policy is None:
            raise ValueError("it holds a draft head alone; say what='head'")
        if not takes_head:
            head = None
        dtype = llm.cfg.run.param_dtype
        if head is not None:
            require_same_draft(found.source, llm.source)
            head = weights.fitted_to(llm.head, head, "the draft head")
            head = weights.cast_floats(head, dtype, llm.source.network)
        if alone:
            return None, head
        matrices = jax.tree.leaves(policy, is_leaf=lambda leaf: hasattr(leaf, "dot_t"))
        if not all(map(_is_finite, matrices)):
            raise ValueError("the policy's weights are not finite; it could generate nothing")
        return policy, head

    def _swap(
        self, asked: WeightsRequest, policy: Params | None, head: Params | None, began: float
    ) -> dict:
        llm, running = self._llm, asked.running
        if policy is None:  # the tokens of running samples stay the same
            llm.update_head(head)
        else:
            if running == "finish":
                self._thread.finish_all()
                running = "recompute"
            llm.update_weights(policy, head, running)
        self._thread.dashboard.weights_changed()
        self._thread.metrics.updates.labels(asked.what).inc()
        return {
            **weights_info(llm),
            "what": asked.what,
            "head_updated": head is not None,
            "seconds": time.perf_counter() - began,
        }

    async def update_from_disk(self, asked: DiskWeightsRequest) -> dict:
        """Does what `update` does, with the fields of SGLang.

        Running samples end with the old weights, unless `pause` has stopped them.
        """
        if asked.abort_all_requests:
            await self._thread.call(self._thread.abort_all)
        paused = self._thread.paused
        running = "finish" if paused is None else _RUNNING[paused]
        result = await self.update(WeightsRequest(path=asked.model_path, running=running))
        message = f"version {result['version']} serves"
        return {"success": True, "message": message, "num_paused_requests": 0, **result}

    async def pause(self, asked: PauseRequest) -> dict:
        """Stops all samples until `resume`; new ones wait."""

        def stop() -> None:
            self._thread.pause(asked.mode)
            if asked.mode == "abort":
                self._thread.abort_all()
            if asked.mode == "retract":
                for engine in self._llm.engine.engines:
                    engine.retract()

        await self._thread.call(stop)
        return {"status": "ok", "message": "generation is paused"}

    async def resume(self) -> dict:
        await self._thread.call(self._thread.resume)
        return {"status": "ok", "message": "generation continues"}

    async def flush_cache(self) -> dict:
        """Empties the prefix cache; running samples keep their pages."""

        def forget() -> None:
            for engine in self._llm.engine.engines:
                engine.scheduler.forget_pages()

        await self._thread.call(forget)
        return {"success": True, "message": "the prefix cache is empty"}

    async def sleep(self) -> dict:
        """Lets running samples finish, moves policy and head to host memory, and frees the devices.

        New requests are answered with 503 from then on.
        """
        async with self._lock:
            if not self._thread.asleep:
                await self._thread.call(self._sleep)
            return {"status": "asleep"}

    def _sleep(self) -> None:
        llm = self._llm
        self._thread.finish_all()
        self._thread.asleep = True
        held = llm.params, llm.head
        shardings = jax.tree.map(lambda x: x.sharding, held)
        self._on_host = (*jax.device_get(held), shardings)
        llm.params = llm.head = None
        llm.engine.release()

    @property
    def is_asleep(self) -> bool:
        return self._thread.asleep

    async def wake(self) -> dict:
        """Puts policy and head back on their devices."""
        async with self._lock:
            if self._thread.asleep:
                await self._thread.call(self._wake)
            return {"status": "ok", **weights_info(self._llm)}

    def _wake(self) -> None:
        policy, head, shardings = self._on_host
        policy, head = jax.device_put((policy, head), shardings)
        self._llm.update_weights(policy, head)
        self._on_host = None
        self._thread.asleep = False


def read_weights(
    path: Path,
    cfg: ModelConfig,
    head_alone: bool,
    step: int | None,
    tokenizer=None,
    products: Products = PLAIN,
) -> tuple[Params | None, weights.Head | None]:
    """Reads weights of a model like `cfg`, in any layout that specjax writes.

    Args:
      path: a Hugging Face directory, a training run, or the files of a draft head.
      cfg: the configuration of the served model.
      head_alone: whether to read the draft head only.
      step: step of a training run; None: the newest.
      tokenizer: tokenizer of the served model, whose end-of-sequence token `cfg` includes.
      products: formats of the policy's matrices, which a run's stay arrays for.

    Returns:
      (policy, head); None for a part that is absent or not asked for.

    Raises:
      CheckpointError, UnsupportedModelError, ValueError: the weights do not fit `cfg`.
    """
    if not path.exists():
        raise ValueError("there is no such file or directory on the server")
    if weights.layout_of(path) == weights.HUGGING_FACE:
        if step is not None:
            raise ValueError(f"it is no training run and has no step {step}; leave step out")
        if head_alone:
            return None, load_head(str(path), cfg)[1]
        dtype = cfg.run.param_dtype
        new, policy, params = hf.load_checkpoint(
            path, dtype, mtp_concat=cfg.mtp_concat, products=products
        )
        _require_same(with_tokenizer_end(new, tokenizer), cfg, params is not None)
        if not params:
            return policy, weights.head_beside(path, new)
        return policy, weights.Head(weights.source_of_policy(new), params)
    policy, params, meta = weights.load_weights(path, step, head_alone)
    source = weights.source_in(path, meta, cfg) if params else None
    if "config" in meta:
        new = with_tokenizer_end(weights.config_in(path, meta), tokenizer)
        _require_same(new, cfg, source is not None and source.in_policy)
    if policy is not None:
        shapes = jax.eval_shape(lambda: init_params(cfg))
        policy = weights.fitted_to(shapes, policy, "the policy")
        policy = weights.cast_floats(policy, cfg.run.param_dtype, cfg)
    if params is None:
        return policy, None
    shapes = weights.head_shapes_of(source)
    return policy, weights.Head(source, weights.fitted_to(shapes, params, "the draft head"))


@jax.jit
def _is_finite(matrix: Matrix) -> jax.Array:
    return jnp.isfinite(unpack(matrix)).all()


def weights_info(llm: LLM) -> dict:
    """Version and checksums of the served weights, for /update_weights and /server_info."""
    names = {"policy": "policy", "draft": "head"}
    sums = llm.engine.runner.weights.checksums
    return {
        "version": llm.engine.version,
        "checksums": {names[name]: f"{value:08x}" for name, value in sums.items()},
        "finite": {names[name]: value.finite for name, value in sums.items()},
    }


def _require_same(new: ModelConfig, cfg: ModelConfig, has_head: bool) -> None:
    """Raises ValueError if new weights are of another model than `cfg`."""
    ignored = _MAY_DIFFER if has_head else (*_MAY_DIFFER, *_HEAD_FIELDS)
    names = [name for name in cfg.__dataclass_fields__ if name not in ignored]
    # The server fixed the longest sequence.
    new, cfg = (
        c.for_length(1).replace(eos_token_ids=tuple(sorted(c.eos_token_ids))) for c in (new, cfg)
    )
    if any(getattr(new, name) != getattr(cfg, name) for name in names):
        name, got, served = differing_setting(new, cfg, names)
        raise ValueError(f"its {name} is {got!r}, that of the model served is {served!r}")
