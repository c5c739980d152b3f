"""What training computes of logits, a block of them at a time.

The logits of a micro-batch are its largest array: 32,768 tokens times 151,936 ids in float32 are 20
GB, and so is their gradient. Here a device never holds more than a block of its own logits, in the
forward pass and in the backward pass, which computes them again from the states. A micro-batch
whose logits are few is one block, and is computed as if there were no blocks.

    next_token_scores   log-probability and entropy of the next token: blocks of the vocabulary.
                        The gradient of the head's matrix is written once, block by block; blocks of
                        tokens would add to all of it each time.
    over_tokens         any function of whole distributions, with its gradient: blocks of tokens.
    Cut                 cuts arrays into blocks of tokens.

Blocks are cut from what a device holds: no states, logits or labels change devices for them. The
matrix is cast and gathered once, and its gradient is added up over devices once. A device sums its
own tokens in float32. `over_tokens` adds up these sums in float32, too; `next_token_scores` writes
them to the place of the cast matrix, and they are added up in the dtype of the states.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from specjax.config import ModelConfig
from specjax.config.model import LogitForm
from specjax.kernels import dispatch
from specjax.kernels.names import GPUS
from specjax.models.transformer import lm_logits, products_gradient
from specjax.parallel import sharding
from specjax.parallel.context import Context
from specjax.parallel.stored import Stored

# Logits of a block by default, and the least ids, or tokens, that a block has: with fewer a matrix
# product would wait for its operands.
LOGITS, LEAST = 2**25, 512
# Of a GPU: each block of tokens reads and writes all of the matrix's gradient, each block of ids
# all of the states' gradient. An update has 0 to 0.2 GB more temporaries than with `LOGITS`.
GPU_LOGITS = 2**27
_LANES = 128  # blocks of the vocabulary are multiples of it, where they are that large


def head_name(cfg: ModelConfig) -> str:
    """Returns the name of the parameter that is the language-model head's matrix in training."""
    return "embed" if cfg.tie_embeddings else "lm_head"


def settled_chunk(chunk: int | None, mesh, vocab: int) -> int | None:
    """Returns the setting `logprob_chunk_size`, or in place of None what suits the devices.

    Args:
      mesh: mesh whose devices decide; None: the default device.
      vocab: number of ids.
    """
    if chunk is None and dispatch.device_of(mesh).platform in GPUS:
        return max(LEAST, GPU_LOGITS // vocab)
    return chunk


@dataclasses.dataclass(frozen=True)
class Head:
    """The language-model head of packed rows, and how many logits exist at a time; static.

    Attributes:
      matrix: the matrix [D V], or the embedding [V D].
      tokens: tokens of a micro-batch on each device.
      chunk: tokens whose logits a device holds at once, see `logprob_chunk_size`; None decides.
      form: how logits follow from the products of the matrix.
    """

    matrix: Stored
    tokens: int
    chunk: int | None = None
    form: LogitForm = LogitForm()

    @classmethod
    def of(
        cls,
        mesh,
        axes: tuple,
        matrix: Array,
        rows: tuple[int, int],
        chunk: int | None,
        form: LogitForm | None = None,
    ) -> Head:
        """The head of rows [R S] that a mesh splits.

        Args:
          axes: logical axes of the matrix.
        """
        split = () if mesh is None else sharding.row_axes(mesh)
        tokens = math.prod(rows) // math.prod(mesh.shape[axis] for axis in split)
        return cls(
            Stored(mesh, axes, matrix.shape, matrix.dtype), tokens, chunk, form or LogitForm()
        )

    @property
    def axis(self) -> int:
        """The dimension of the matrix that is the vocabulary."""
        return self.matrix.axes.index("vocab")

    @property
    def vocab(self) -> int:
        """The number of ids whose logits a device computes."""
        return self.matrix.size("vocab")

    @property
    def ways(self) -> int:
        """The number of devices that split the rows."""
        mesh = self.matrix.mesh
        return 1 if mesh is None else math.prod(mesh.shape[a] for a in sharding.row_axes(mesh))

    @property
    def is_whole(self) -> bool:
        """Whether a device computes all of its logits at once."""
        return self.block_tokens == self.tokens

    @property
    def block_tokens(self) -> int:
        """The number of tokens of a block of tokens."""
        return min(self.tokens, self.chunk or max(LEAST, LOGITS // self.vocab))

    @property
    def block_ids(self) -> int:
        """The number of ids of a block of the vocabulary, for all tokens of a device."""
        if self.chunk is None:
            most = max(LEAST, LOGITS // self.tokens)
        else:
            most = max(1, self.chunk * self.vocab // self.tokens)
        if self.is_whole or most >= self.vocab:
            return self.vocab
        unit = _LANES if most >= _LANES else 1
        blocks = math.ceil(self.vocab / (most - most % unit))
        return unit * math.ceil(self.vocab / blocks / unit)

    @property
    def most_logits(self) -> int:
        """The most numbers of logits and their gradients that a device holds in a policy update.

        Of logits in blocks of the vocabulary the gradient is not held.
        """
        return self.tokens * (2 * self.vocab if self.is_whole else self.block_ids)

    def logits(self, normed: Float[Array, "... D"], matrix: Array) -> Float[Array, "... V"]:
        """Computes float32 logits of normed states by the gathered matrix, or by some columns."""
        return lm_logits(normed, matrix.T if self.axis == 0 else matrix, self.form)

    def all_logits(self, normed: Float[Array, "... D"], matrix: Array) -> Float[Array, "... V"]:
        """Computes the logits of all tokens at once, by the matrix as it is stored."""
        return self.logits(normed, self.matrix.gathered(matrix, normed.dtype))


# --- blocks of the vocabulary ---------------------------------------------------------------------


def next_token_scores(
    head: Head,
    normed: Float[Array, "R S D"],
    matrix: Float[Array, "..."],
    labels: Int[Array, "R S"],
    temperature: Float[Array, ""],
    entropy_gradient: bool = False,
) -> tuple[Float[Array, "R S"], Float[Array, "R S"]]:
    """Log-probabilities of labels and entropies, at logits divided by a temperature.

    Args:
      head: the head.
      normed: states after the final norm.
      matrix: the head's matrix as it is stored.
      labels: the token after each position.
      temperature: temperature, above 0.
      entropy_gradient: whether the entropy has a gradient.

    Returns:
      (logprobs, entropy), float32. The temperature has no gradient.
    """
    return _next_token_scores(head, entropy_gradient, normed, matrix, labels, temperature)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _next_token_scores(head, entropy_gradient, normed, matrix, labels, temperature):
    return _scores_fwd(head, entropy_gradient, normed, matrix, labels, temperature)[0]


def _scores_fwd(head: Head, entropy_gradient: bool, normed, matrix, labels, temperature):
    matrix, split = head.matrix.gathered(matrix, normed.dtype), head.matrix.split("vocab")

    @jax.named_scope("lm_head")
    def local(normed, matrix, labels, temperature):
        rows, label = normed.reshape(-1, normed.shape[-1]), _own_columns(head, labels)
        table = matrix.T if head.axis else matrix

        def one(width, sums, first):
            peak, total, weighted, picked = sums
            logits, _, columns = _block(head, rows, table, first, width)
            scores = logits / temperature
            higher = jnp.maximum(peak, scores.max(axis=-1))
            shift = _finite(higher)
            p, before = jnp.exp(scores - shift[:, None]), jnp.exp(peak - shift)
            total = before * total + p.sum(axis=-1)
            weighted = before * weighted + jnp.where(p > 0, p * scores, 0.0).sum(axis=-1)
            picked += jnp.where(columns == label, scores, 0.0).sum(axis=-1)
            return higher, total, weighted, picked

        nothing = jnp.zeros(len(rows), jnp.float32)
        start = nothing - jnp.inf, nothing, nothing, nothing
        peak, total, weighted, picked = _in_blocks(head, one, start)
        if split:
            highest = jax.lax.pmax(peak, split)
            scale = jnp.exp(peak - _finite(highest))
            sums = scale * total, scale * weighted, picked
            peak, (total, weighted, picked) = highest, jax.lax.psum(sums, split)
        log_z = jnp.log(total) + _finite(peak)
        scores = picked - log_z, log_z - weighted / total, log_z
        return tuple(x.reshape(labels.shape) for x in scores)

    row, one = _specs(head)
    local = head.matrix.on_devices(local, (row, one, row, jax.P()), (row, row, row))
    logprobs, entropy, log_z = local(normed, matrix, labels, temperature)
    of_rows = (log_z, entropy) if entropy_gradient else (log_z,)
    return (logprobs, entropy), ((normed, matrix, labels, temperature), of_rows)


def _scores_bwd(head: Head, entropy_gradient: bool, residuals, cotangents):
    given, of_rows = residuals
    of_rows = *of_rows, *cotangents[: len(of_rows)]
    split = head.matrix.split("vocab")

    @jax.named_scope("lm_head")
    def local(normed, matrix, labels, temperature, *of_rows):
        rows, label = normed.reshape(-1, normed.shape[-1]), _own_columns(head, labels)
        of_rows = [x.reshape(-1, 1) for x in of_rows]
        if entropy_gradient:
            log_z, entropy, weight, of_entropy = of_rows
        else:
            log_z, weight = of_rows
        weight = weight / temperature

        def one(width, gradients, first):
            d_rows, table = gradients
            logits, part, columns = _block(head, rows, table, first, width)
            scores = logits / temperature
            p = jnp.exp(scores - log_z)
            d = weight * ((columns == label) - p)
            if entropy_gradient:  # d entropy / d score = -p (log p + entropy)
                surprise = jnp.where(p > 0, scores - log_z + entropy, 0.0)
                d -= of_entropy / temperature * p * surprise
            d = products_gradient(head.form, logits, d)
            d_part = _gradient(d, rows, ((0,), (0,))).astype(table.dtype)
            table = jax.lax.dynamic_update_slice_in_dim(table, d_part, first, 0)
            return d_rows + _gradient(d, part, ((1,), (0,))), table

        # The gradient takes the place of the matrix, each part of which one block reads.
        start = jnp.zeros(rows.shape, jnp.float32), matrix.T if head.axis else matrix
        d_rows, d_table = _in_blocks(head, one, start)
        d_matrix = d_table.T if head.axis else d_table
        d_rows = d_rows.astype(normed.dtype).reshape(normed.shape)
        d_rows = jax.lax.psum(d_rows, split) if split else d_rows
        return d_rows, head.matrix.add_up(d_matrix).astype(head.matrix.dtype)

    row, one = _specs(head)
    stored = None if head.matrix.mesh is None else head.matrix.spec
    shapes = row, one, row, jax.P(), *[row] * len(of_rows)
    d_normed, d_matrix = head.matrix.on_devices(local, shapes, (row, stored))(*given, *of_rows)
    return d_normed, d_matrix, None, None


_next_token_scores.defvjp(_scores_fwd, _scores_bwd)


def _specs(head: Head) -> tuple[jax.P | None, jax.P | None]:
    """The specs of rows and of the gathered matrix."""
    mesh = head.matrix.mesh
    if mesh is None:
        return None, None
    return sharding.rows_sharding(mesh).spec, head.matrix.gathered_spec


def _in_blocks(head: Head, one: Callable, carry: Any) -> Any:
    """Runs `one(width, carry, first column)` block by block; the last one may have fewer ids."""
    width, vocab = head.block_ids, head.vocab
    full = functools.partial(one, width)
    firsts = jnp.arange(0, vocab - vocab % width, width)
    carry, _ = jax.lax.scan(lambda carry, first: (full(carry, first), None), carry, firsts)
    return one(vocab % width, carry, vocab - vocab % width) if vocab % width else carry


def _own_columns(head: Head, ids: Int[Array, "R S"]) -> Int[Array, "T 1"]:
    """The columns of ids on this device; outside of these for ids of other devices."""
    return ids.reshape(-1, 1) - head.matrix.first("vocab")


def _block(
    head: Head, rows: Float[Array, "T D"], table: Float[Array, "V D"], first, width: int
) -> tuple:
    """Computes the logits of a block of the vocabulary.

    Returns:
      (logits [T width], the block's part of the matrix, its columns).
    """
    part = jax.lax.dynamic_slice_in_dim(table, first, width)
    return lm_logits(rows, part.T, head.form), part, first + jnp.arange(width)


def _finite(peak: Array) -> Array:
    return jnp.where(jnp.isfinite(peak), peak, 0.0)


def _gradient(left: Array, right: Array, over: tuple, batch: tuple = ((), ())) -> Array:
    """Multiplies a float32 gradient of logits, and a matrix of any float type, in float32.

    On GPUs both are rounded to the narrower type of the two first, as TPUs round the gradient to
    bfloat16 by themselves. A GPU multiplies float32 by bfloat16 as float32 by float32: in TF32 at
    half the rate, of twice the bytes.
    """
    dims = over, batch
    return jax.lax.platform_dependent(
        left, right, cuda=functools.partial(_rounded, dims), default=functools.partial(_dot, dims)
    )


def _dot(dims: tuple, left: Array, right: Array) -> Array:
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _rounded(dims: tuple, left: Array, right: Array) -> Array:
    # The narrower type is bfloat16, which has float32's range. No training computes in float16
    # (`train.schema`), to which small gradients would be rounded as zeros.
    dtype = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
    return _dot(dims, left.astype(dtype), right.astype(dtype))


# --- blocks of tokens -----------------------------------------------------------------------------

_UNIT = 16  # blocks of tokens are multiples of it, where they are that large


@dataclasses.dataclass(frozen=True)
class Cut:
    """Cuts rows [R S ..] that a mesh splits into blocks [blocks N size ..] of tokens; static.

    A block has `size` consecutive tokens of every piece of a row that a device holds. The N pieces
    are split over all devices that split the rows.

    Attributes:
      head: the head.
      pieces: pieces of each row that a device holds, see `specjax.parallel.context.Context.chunks`.
      rows, length: number of rows and tokens of a row on a device.
    """

    head: Head
    pieces: int
    rows: int
    length: int

    @classmethod
    def of(cls, head: Head, shape: tuple[int, int], context: Context | None) -> Cut:
        rows, length = shape
        if (mesh := head.matrix.mesh) is not None:
            rows //= math.prod(mesh.shape[axis] for axis in sharding.PHYSICAL["batch"])
            length //= math.prod(mesh.shape[axis] for axis in sharding.PHYSICAL["sequence"])
        return cls(head, 1 if context is None else context.chunks, rows, length)

    @property
    def piece(self) -> int:
        """The number of tokens of a piece."""
        return self.length // self.pieces

    @property
    def size(self) -> int:
        """The number of tokens of a block in each piece."""
        most = max(1, self.head.block_tokens // (self.rows * self.pieces))
        unit = _UNIT if most >= _UNIT else 1
        blocks = math.ceil(self.piece / (most - most % unit))
        return unit * math.ceil(self.piece / blocks / unit)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return math.ceil(self.piece / self.size)

    def cut(self, rows: Shaped[Array, "R S *rest"]) -> Shaped[Array, "blocks N size *rest"]:
        """Cuts rows into blocks; the last one is filled up with zeros."""
        return self.windows(rows, ())

    def windows(self, rows: Array, further: Sequence[Array]) -> Array:
        """Cuts rows into blocks that have the first tokens of the next block as well.

        Args:
          rows: values per token [R S ..].
          further: the rows shifted left by 1, 2 ..; as many as a block has further tokens.

        Returns:
          values [blocks N size+further ..].
        """
        size, more = self.size, len(further)

        def local(rows, *further):
            shape = self.rows * self.pieces, self.piece, *rows.shape[2:]
            ends = [x.reshape(shape)[:, -1:] for x in further]
            rest = (shape[0], self.blocks * size - self.piece, *shape[2:])
            x = jnp.concatenate([rows.reshape(shape), *ends, jnp.zeros(rest, rows.dtype)], axis=1)
            return jnp.stack([x[:, i * size :][:, : size + more] for i in range(self.blocks)])

        return self._on_devices(local, (self._rows,) * (1 + more), self._blocks)(rows, *further)

    def joined(self, blocks: Shaped[Array, "blocks N size *rest"]) -> Shaped[Array, "R S *rest"]:
        """Puts blocks together again."""

        def local(blocks):
            x = jnp.moveaxis(blocks, 0, 1)
            x = x.reshape(x.shape[0], self.blocks * self.size, *x.shape[3:])[:, : self.piece]
            return x.reshape(self.rows, self.length, *x.shape[2:])

        return self._on_devices(local, (self._blocks,), self._rows)(blocks)

    @property
    def _rows(self) -> jax.P | None:
        mesh = self.head.matrix.mesh
        return None if mesh is None else sharding.rows_sharding(mesh).spec

    @property
    def _blocks(self) -> jax.P | None:
        mesh = self.head.matrix.mesh
        return None if mesh is None else jax.P(None, sharding.row_axes(mesh))

    def _on_devices(self, local: Callable, given: tuple, made: Any) -> Callable:
        return self.head.matrix.on_devices(local, given, made)


def over_tokens(
    cut: Cut,
    function: Callable[[Any, Array, Any], tuple[Any, Any]],
    start: Any,
    normed: Float[Array, "R S D"],
    matrix: Array,
    rows: Any,
) -> Any:
    """Applies a function to the logits of blocks of tokens, one block after the other.

    Args:
      cut: how rows are cut.
      function: (carry, logits [N size V], values of `rows` [N size]) to (carry, values [N size]).
        Only the logits have a gradient.
      start: the carry before the first block.
      normed: states after the final norm.
      matrix: the head's matrix, as it is stored.
      rows: values per token [R S].

    Returns:
      the function's values [R S].
    """
    return _over_tokens(cut, function, normed, matrix, start, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _over_tokens(cut, function, normed, matrix, start, rows):
    return _over_tokens_fwd(cut, function, normed, matrix, start, rows)[0]


def _over_tokens_fwd(cut: Cut, function: Callable, normed, matrix, start, rows):
    matrix = cut.head.matrix.gathered(matrix, normed.dtype)

    def one(carry, now):
        normed, rows = now
        new, result = function(carry, cut.head.logits(normed, matrix), rows)
        return new, (result, carry)

    blocks = jax.tree.map(cut.cut, (normed, rows))
    _, (result, carries) = jax.lax.scan(one, start, blocks)
    return jax.tree.map(cut.joined, result), (normed, matrix, carries, rows)


def _over_tokens_bwd(cut: Cut, function: Callable, residuals, d_found):
    normed, matrix, carries, rows = residuals
    head = cut.head

    def one(d_matrix, now):
        normed, rows, carry, d_found = now
        logits = head.logits(normed, matrix)
        _, pull = jax.vjp(lambda logits: function(carry, logits, rows)[1], logits)
        d = products_gradient(head.form, logits, *pull(d_found))
        d_normed = _gradient(d, matrix, ((2,), (head.axis,))).astype(normed.dtype)
        return d_matrix + matrix_gradient(head, normed, d), d_normed

    blocks = jax.tree.map(cut.cut, (normed, rows))
    d_blocks = jax.tree.map(cut.cut, d_found)
    start = no_matrix_gradient(head)
    d_matrix, d_normed = jax.lax.scan(one, start, (*blocks, carries, d_blocks))
    d_matrix = added_up(head, d_matrix)
    return cut.joined(d_normed), d_matrix.astype(head.matrix.dtype), None, None


_over_tokens.defvjp(_over_tokens_fwd, _over_tokens_bwd)


# The gradient of a head's matrix over blocks of tokens, in float32. Each device adds up its own
# tokens: the first axis is the device's, until all blocks are done.


def no_matrix_gradient(head: Head) -> Float[Array, "ways ..."]:
    """The gradient of a head's matrix before the first block, for `matrix_gradient` to be added."""
    nothing = jnp.zeros((head.ways, *head.matrix.shape), jnp.float32)
    if head.matrix.mesh is None:
        return nothing
    where = jax.NamedSharding(head.matrix.mesh, _parts_spec(head))
    return jax.lax.with_sharding_constraint(nothing, where)


def matrix_gradient(
    head: Head, normed: Float[Array, "N size D"], d_logits: Float[Array, "N size C"]
) -> Float[Array, "ways ..."]:
    """The gradient of a head's matrix from the states and the logits' gradient of a block."""
    parts = [x.reshape(head.ways, -1, x.shape[-1]) for x in (normed, d_logits)]
    return _gradient(*(parts if head.axis else parts[::-1]), ((1,), (1,)), ((0,), (0,)))


def added_up(head: Head, parts: Float[Array, "ways ..."]) -> Array:
    """Adds up the devices' gradients of a head's matrix; the sum is split as the matrix is."""
    if head.matrix.mesh is None:
        return parts[0]
    given = (_parts_spec(head),)
    add_up = head.matrix.on_devices(
        lambda parts: head.matrix.add_up(parts[0]), given, head.matrix.spec
    )
    return add_up(parts)


def _parts_spec(head: Head) -> jax.P:
    return jax.P(sharding.row_axes(head.matrix.mesh), *head.matrix.gathered_spec)
