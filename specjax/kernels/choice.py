"""Which kernel a platform runs, and the line that says so."""

from __future__ import annotations

from typing import NamedTuple

from specjax.config import ModelConfig
from specjax.kernels import cpu, gpu, library, tpu
from specjax.kernels.names import ATTENTION

# As `jax.Device.device_kind` says it.
GENERATIONS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}


CPU_LINE = "specjax's kernel for CPUs; prompts too, training in XLA"
GPU_LINE = "Pallas Mosaic GPU tree attention; prompts and training by cuDNN"


class Choice(NamedTuple):
    """name: see `dispatch`. line: to log. loud: the platform's own kernel is not what runs."""

    name: str
    line: str
    loud: bool = False


def choose(
    platform: str,
    kind: str,
    cfg: ModelConfig,
    asked: str = "auto",
    invariant: bool = False,
    devices: int = 1,
    decoding: bool = True,
) -> Choice:
    """The kernel for a model on a device.

    Args:
      platform, kind: of the device, as jax names them. asked: one of `ATTENTION`.
      invariant: rounds attend by position, which only the reference does.
      devices: of the mesh. decoding: and not training, for which CPUs have no kernel.

    Raises:
      ValueError: what is asked for is unknown, or cannot be used there.
    """
    if asked == "auto":
        choice = _default(platform, kind, cfg, devices, decoding, invariant)
    else:
        choice = _asked(platform, kind, cfg, asked, devices)
    if invariant and choice.name != "reference":
        line = f"{choice.line}; rounds in invariant mode attend by position in XLA, without it"
        choice = choice._replace(line=line, loud=True)
    return choice


def _default(
    platform: str, kind: str, cfg: ModelConfig, devices: int, decoding: bool, invariant: bool
) -> Choice:
    if platform == "tpu":
        reason = _no_tpu_kernel(kind, cfg)
        if reason is None:
            return _tpu(GENERATIONS[kind])
        return Choice("reference", f"no kernel for this TPU: {reason}; running in XLA", True)
    if platform in ("gpu", "cuda", "rocm"):
        choice = _library(platform, cfg)
        if not decoding:
            return choice._replace(loud=choice.name != "library:cudnn")
        reason = gpu.no_kernel(platform, kind, cfg)
        if reason is None:
            return Choice("gpu", GPU_LINE)
        line = f"no kernel for this GPU: {reason}; {choice.line}"
        return choice._replace(line=line, loud=True)
    line = "XLA reference"
    if platform == "cpu":
        if invariant or not decoding:
            return Choice("reference", line)
        reason, loud = _no_cpu_kernel(cfg, devices)
        if reason is None:
            return Choice("cpu", CPU_LINE)
        return Choice("reference", f"{line}: {reason}", loud)
    return Choice("reference", f"no kernel for platform {platform!r}: {line}", True)


def _asked(platform: str, kind: str, cfg: ModelConfig, asked: str, devices: int) -> Choice:
    def refuse(reason: str):
        raise ValueError(
            f"attention {asked!r} cannot be used: {reason}; take another, or 'auto', which runs "
            f"what there is for {kind}"
        )

    family, _, variant = asked.partition(":")
    if asked == "reference":
        return Choice(asked, "XLA reference, as asked for")
    if asked == "cpu":
        reason, _ = _no_cpu_kernel(cfg, devices)
        if platform != "cpu" or reason:
            refuse(reason or f"it is compiled for CPUs, and the device is {platform!r}")
        return Choice(asked, CPU_LINE)
    if asked == "tpu:interpret":
        if platform != "cpu":
            refuse("it interprets the TPU kernel, for tests on CPU")
        return Choice(asked, "the TPU kernel in interpret mode: slow, for tests", True)
    if family == "tpu":
        if platform != "tpu":
            refuse(f"it is compiled for TPUs, and the device is {platform!r}")
        reason = _no_tpu_kernel(kind if not variant else None, cfg)
        if reason or variant and variant not in tpu.TUNING:
            refuse(reason or f"there are block sizes for {', '.join(tpu.TUNING)}")
        return _tpu(variant or GENERATIONS[kind])
    if asked in ("library", "library:xla", "library:cudnn"):
        choice = _library(platform, cfg)
        if variant and choice.name != asked:
            if variant == "cudnn":
                refuse(f"here it would be {choice.name}")
            choice = Choice(asked, "jax.nn.dot_product_attention in XLA")
        return choice
    if asked == "gpu":
        reason = gpu.no_kernel(platform, kind, cfg)
        if reason:
            refuse(reason)
        return Choice(asked, GPU_LINE)
    raise ValueError(f"attention must be one of {', '.join(ATTENTION)}; got {asked!r}")


def _tpu(generation: str) -> Choice:
    line = f"Pallas tree attention for {generation}, splash attention in training"
    return Choice(f"tpu:{generation}", line)


def _no_cpu_kernel(cfg: ModelConfig, devices: int) -> tuple[str | None, bool]:
    """Why the CPU kernel cannot be used, and whether that is worth a warning."""
    reason = cpu.no_kernel(cfg, devices)
    if reason is None:
        reason = _not_of(cpu.WIDTH, cfg)
    if reason is not None:
        return reason, False
    try:
        cpu.load()
    except cpu.NoKernelError as error:
        return str(error), True
    return None, False


def _no_tpu_kernel(kind: str | None, cfg: ModelConfig) -> str | None:
    """Why the TPU kernel cannot be used; `kind` None is not looked at."""
    if kind is not None and kind not in GENERATIONS:
        return f"there are block sizes for {', '.join(tpu.TUNING)}, and this is {kind!r}"
    return _not_of(tpu.LANES, cfg)


def _not_of(width: int, cfg: ModelConfig) -> str | None:
    """The layers whose heads are no multiple of a width, in words."""
    sizes = {mixer.head_dim for mixer in cfg.mixers("attention")}
    if wrong := sorted(size for size in sizes if size % width):
        return f"head_dim must be a multiple of {width}, got {' and '.join(map(str, wrong))}"
    return None


def _library(platform: str, cfg: ModelConfig) -> Choice:
    sizes = sorted({mixer.head_dim for mixer in cfg.mixers("attention")})
    takes = all(library.cudnn_takes(size, cfg.run.compute_dtype) for size in sizes)
    if platform in ("gpu", "cuda") and takes:
        return Choice("library:cudnn", "jax.nn.dot_product_attention by cuDNN")
    line = "jax.nn.dot_product_attention in XLA"
    if platform in ("gpu", "cuda"):
        line += (
            f" (cuDNN has none for {cfg.run.compute_dtype} heads of {', '.join(map(str, sizes))})"
        )
    return Choice("library:xla", line)
