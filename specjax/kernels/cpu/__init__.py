"""Kernels for CPUs, in C++: what is multiplied, attended to and written in a round.

`layers.cc` runs whole layers, `panels.cc` multiplies by weights, `attention.cc` attends,
`commit.cc` writes keys and values to their pages. `native.py` builds them and hands them to XLA,
`calls.py` makes the calls.

All compute a row in one order, whatever stands beside it: in a batch of any size, in a tree of any
shape, as a draft that is verified or as the next token of plain decoding it gets the same bits from
them. XLA, which computes what lies between, does not promise as much. The bits depend neither on
the compiler nor on its tuning, only on the width of the target's vectors and on whether it has
fused multiply-add (`common.h`).
"""

from __future__ import annotations

from specjax.config import ModelConfig
from specjax.interfaces import Device
from specjax.kernels.backend import Kernels, Unsuited, head_sizes
from specjax.kernels.cpu import calls, native
from specjax.kernels.reference import PANEL_WIDTH


def _refuses(operation: str, device: Device | None, cfg: ModelConfig) -> str | None:
    if device is not None and device.platform != "cpu":
        return Unsuited(f"it is compiled for CPUs, and the device is {device.platform!r}")
    if device is not None and device.count > 1:
        return Unsuited(f"it runs on one device, and the mesh has {device.count}")
    if cfg.run.compute_dtype != "float32":
        return Unsuited(f"it computes in float32, and decoding in {cfg.run.compute_dtype}")
    heads = () if operation == "product" else head_sizes(cfg)
    if odd := [size for size in heads if size % PANEL_WIDTH]:
        return Unsuited(f"head_dim must be a multiple of {PANEL_WIDTH}, got {odd[0]}")
    if operation == "layers" and (reason := _refuses_layers(cfg)):
        return reason
    try:
        native.load()
    except native.NoKernelError as error:
        return str(error)
    return None


def _refuses_layers(cfg: ModelConfig) -> str | None:
    if cfg.run.products != "panels":
        return Unsuited("layers are run with their weights in panels")
    if len(set(cfg.layers)) != 1:
        return Unsuited("it runs layers that are all alike")
    mixer, mlp = cfg.layers[0].mixer, cfg.layers[0].mlp
    if mixer.qk_norm and mixer.norm_eps != cfg.rms_norm_eps:
        return Unsuited(
            f"it has one epsilon for all norms, got {mixer.norm_eps} for queries and keys and "
            f"{cfg.rms_norm_eps}"
        )
    if mixer.window is not None:
        return Unsuited(f"its attention sees all positions, got a window of {mixer.window}")
    widths = {"hidden_size": cfg.hidden_size, "intermediate_size": mlp.intermediate_size}
    for name, width in widths.items():
        if width % PANEL_WIDTH:
            return Unsuited(f"{name} must be a multiple of {PANEL_WIDTH}, got {width}")
    return None


BACKEND = Kernels(
    operations={
        "tree_attention": calls.tree_attention,
        "commit": calls.commit,
        "product": calls.product,
        "layers": calls.layers,
    },
    refuses=_refuses,
    line="specjax's kernel for CPUs; prompts too, training in XLA",
    environment=(native.TARGET_VARIABLE, native.FLAGS_VARIABLE),
    prompts_alone=False,
    by_device=False,
)
