"""The settings of an engine, and the sizes and strategies that follow from them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from specjax.config import SpecConfig, Strategy
from specjax.config.checks import choice
from specjax.control import ControlConfig
from specjax.kernels.names import ATTENTION, GPUS, check_attention
from specjax.settings import option
from specjax.weights.matrix import check_products

ORDERS = ("fifo", "longest_first")
PREFILL_TOKENS = 512  # approximate tokens of one prefill, over all its rows


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How an engine uses its device; no setting changes a token, except by rounding.

    Attributes:
      chunk_tokens: tokens per slot that one chunk can emit. The host reads them after each chunk.
      stretch: factor by which a chunk is longer when few slots run, because the host's time per
        chunk does not shrink with them: n running slots emit up to
        chunk_tokens * max(1, stretch // n) tokens each. Samples with stop strings are not
        stretched. Use 1 for streams that should come smoothly, or where samples are often aborted.
      page_size: positions per cache page, rounded up to what the attention kernel can read (a
        multiple of 16, and of 64 for GPUs); 0 gives each sequence one page of full length.
      cache_bytes: largest size of recurrent states and of the pages of all caches, in bytes. None
        takes the pages that all slots at full length need, and for each of nine more samples, which
        wait for a row, up to 2,048 positions; in an `LLM` no more than
        `specjax.engine.llm.page_budget` says, if one sample of full length fits into that. Where
        pages run out, samples are preempted.
      enable_prefix_caching: whether full pages that samples leave are kept, as long as no other
        sample needs them, and serve prompts that begin with the same tokens. A change of weights
        empties them. Prompts are then read in other pieces, which changes tokens by rounding alone,
        and in `invariant` mode not at all.
      prefill_chunk: number of prompt tokens that are read at a time, best a multiple of the page
        size: pieces are written by the largest number of rows that divides both.
      order: `fifo`, or `longest_first`: prompts whose earlier samples were longest start first.
      attention: name of the attention kernel, one of `specjax.kernels.names.ATTENTION` or your own
        as `module:attribute`; `auto` is the platform's own, see `specjax.kernels.dispatch`.
      products: number format of matrices, such as `int8` or `mxfp4`, or a map from patterns of
        their paths to formats, see `specjax.weights.matrix`. `auto` is that of the checkpoint's
        files, or for plain ones specjax's own on CPU and XLA's elsewhere; a class of your own
        is `module:attribute`. Formats that round weights change the policy, and so its tokens.
      stand_in: whether another program that is ready runs while the right one is compiled, which
        changes tokens by rounding alone, see `Engine._waits`.
      enforce_eager: whether GPUs run without CUDA graphs. By default each chunk is one, where a
        comparison at the start finds the same results as without, see `specjax.engine.programs`.
      follow_ups: whether the caller answers a finished sample with another one at once, as the next
        turn of a conversation. Chunks then end early when slots become free, as they do while
        requests wait.
    """

    chunk_tokens: int = 32
    stretch: int = 8
    page_size: int | None = None
    cache_bytes: int | None = None
    enable_prefix_caching: bool = False
    prefill_chunk: int = PREFILL_TOKENS
    order: str = option("fifo", choices=ORDERS)
    follow_ups: bool = option(False, internal=True)
    attention: str = option("auto", choices=ATTENTION, own_path=True)
    products: Any = option("auto", kind=str | dict[str, str])
    stand_in: bool = True
    enforce_eager: bool = False

    def __post_init__(self):
        choice("order", self.order, ORDERS)
        object.__setattr__(self, "products", check_products(self.products))
        check_attention(self.attention)
        for name, least in (("chunk_tokens", 1), ("stretch", 1), ("prefill_chunk", 16)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.page_size is not None and self.page_size < 0:
            raise ValueError(
                f"page_size must be positive, or 0 for one page per sequence; got {self.page_size}"
            )


def powers(most: int, base: int, first: int = 1) -> list[int]:
    """The sizes first, first * base, first * base squared, .. below `most`, and `most`."""
    sizes = [min(first, most)]
    while sizes[-1] < most:
        sizes.append(min(sizes[-1] * base, most))
    return sizes


def padded_widths(max_len: int) -> list[int]:
    """The lengths that prompts are padded to: 16, 32, 64, .. and `max_len`."""
    return powers(max_len, 2, 16)


def bucket_base(platform: str) -> int:
    """The factor between compiled batch sizes on a platform, as jax names it.

    There are half as many on GPUs, whose compiler takes up to a minute for each program. A round
    of more rows reads the same weights there, which takes most of its time up to some 300 rows of
    all trees together.
    """
    return 4 if platform in GPUS else 2


def strategies_of(spec: SpecConfig | None, control: ControlConfig | None) -> list[Strategy] | None:
    """The strategies that the controller may choose, cut to the rows that `spec` allows.

    A strategy that is cut keeps its name. None: there is no controller, and so only `spec`'s own.
    """
    if control is None:
        return None
    require_speculation(spec)
    rows = spec.spec_verify_tokens
    return [dataclasses.replace(one.capped(rows), name=one.name) for one in control.arms]


def require_speculation(spec: SpecConfig | None) -> None:
    """Refuses a controller beside settings that leave it no choice.

    Raises:
      ValueError: `spec` is plain decoding.
    """
    if spec is None or spec.is_off:
        raise ValueError(
            f"control chooses between ways to speculate, and "
            f"{'spec=None' if spec is None else 'strategy=off'} says that there is no speculation"
        )


def piece_widths(
    config: EngineConfig, max_len: int, given: Sequence[int] | None, platform: str = "cpu"
) -> list[int]:
    """The lengths that pieces of prompts are padded to, ascending, all multiples of 16.

    The last one is the longest piece, and all pieces of a prompt start at multiples of it, unless a
    prefix cache has its beginning.

    Args:
      given: lengths that the caller wants; None: powers of two, on GPUs every other one.
    """
    longest = min(config.prefill_chunk // 16 * 16, -(-max_len // 16) * 16)
    by_default = padded_widths(longest)[1::2] if platform in GPUS else padded_widths(longest)
    widths = by_default if given is None else [-(-w // 16) * 16 for w in given]
    return sorted({w for w in widths if w < longest} | {longest})


def end_of_pieces(max_len: int, widths: Sequence[int], anywhere: bool = False) -> int:
    """The position at which the padded pieces of the longest prompt end; 0: there are none.

    A prompt's last token is not read. No shorter prompt's pieces end later, because a shorter last
    piece is not padded to more.

    Args:
      widths: see `piece_widths`.
      anywhere: whether pieces begin at any position, as behind a prefix that is not read.
    """
    if not widths or max_len < 2:
        return 0
    if anywhere:
        padding = max(b - a for a, b in itertools.pairwise([0, *widths])) - 1
        return max_len - 1 + padding
    start = (max_len - 2) // widths[-1] * widths[-1]
    return start + next(w for w in widths if w >= max_len - 1 - start)
