"""The protocols between the parts of specjax, and the types that several parts share.

Each protocol is one kind of thing that can be added with one new file, one row of a table (or a
user's own path `module:attribute`), and one test; docs/extend.md has an example of each. The tables
are in `specjax.registry` and `train.registry`; mixers and mlps have none, for families name their
classes.

    Family     a Hugging Face `model_type`: its config, and where its files hold which array
    Mixer      how a layer mixes positions: attention, or a recurrence
    Mlp        how a layer works on each position by itself: dense, or a mixture of experts
    Draft      what proposes tokens: a head, a standalone model, n-grams
    Weight     how a matrix is stored, and how it multiplies
    Reader     a file format of checkpoints
    Backend    kernels of a platform, by operation
    Objective  what the policy is trained on
    Task       what a row of a data set means

Letters name dimensions: B slots (rows of the running batch), T rows of a tree or of a piece of a
prompt, S positions of a packed row in training, L layers, D width, N query heads, K key and value
heads, H head size, E experts, V vocabulary, G samples per prompt. Further ones: P pages of a pool,
X pages of one sequence, A = steps + 1 rows of an accepted path (the tokens that a round can emit at
most), C columns of a proposal, R rows of a level of the tree or packed rows of a micro-batch, W
words of 32 bits, M layers that record facts; other dimensions are written as words. `B T` with a
star, `*B T`, may lack B: then all slots share the array.

This module imports nothing of specjax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

Params = dict[str, Any]  # nested dicts of arrays, or of `Weight` where decoding has its own layout
# The pages of each sequence, in the order of its positions; None: sequence b has page b to itself.
Table = Int[Array, "B X"] | None


# --- parameters -----------------------------------------------------------------------------------


# Logical axes of arrays, by the names of the arrays. They are those of the last dimensions: an
# array may be stacked with others, with further dimensions in front.
Axes = Mapping[str, tuple[str | None, ...]]


class Fused(NamedTuple):
    """The array in which decoding joins one parameter with others, see `Param`.

    Attributes:
      name: name of the joined array.
      order: place of this parameter in the joined array.
      copies: None: parameters are joined along the last axis. A number: a parameter [H] is repeated
        this many times along a new axis before the last, and parameters are joined along that axis.
    """

    name: str
    order: int
    copies: int | None = None


class TensorSlice(NamedTuple):
    """A slice of a tensor along one axis.

    Attributes:
      axis: axis of the tensor.
      start: first index of the slice.
      stop: index before which the slice ends.
      size: length of the whole tensor along that axis.
      groups: number of equal groups of indices, in each of which the slice is taken; its start and
        stop are those in a group.
    """

    axis: int
    start: int
    stop: int
    size: int
    groups: int = 1

    @property
    def indices(self) -> Int[np.ndarray, " length"]:
        """The indices of the slice along the axis."""
        first = np.arange(self.groups)[:, None] * (self.size // self.groups)
        return (first + np.arange(self.start, self.stop)).reshape(-1)


class Stored(NamedTuple):
    """A tensor of a checkpoint's files, or a part of one, that holds an array.

    Attributes:
      name: name of the tensor; for an array of a layer, without `Family.layer_prefix`.
      transpose: whether the last two axes are the other way round in the file, `[out, in]`.
      part: slice of the tensor, as it is in the file, that holds the array. Several arrays may be
        parts of one tensor, and must fill it together. None: the array is the whole tensor.
    """

    name: str
    transpose: bool = False
    part: TensorSlice | None = None


# Where files hold an array. A tuple of tensors is stacked along the array's first axis, such as the
# matrices of experts, one tensor each.
Place = Stored | tuple[Stored, ...] | None


@dataclasses.dataclass(frozen=True)
class Param:
    """One array of a model or layer, declared by the code that computes with it.

    Initialising, loading, exporting, sharding, fusing and comparing weights read these rows.

    Attributes:
      shape: shape of the array in memory; projections are `[in, out]`.
      axes: logical axis of each dimension, see `specjax.parallel.sharding.PHYSICAL`; a dimension
        whose axis is None is never split.
      stored: where files hold the array, unless the `Family` says otherwise; None: only a family
        knows.
      init: standard deviation of random initial values; None: all ones; 0: all zeros.
      residual: whether the product with this matrix is added to the residual stream: its random
        values are then divided by the root of twice the number of layers, as in GPT-2.
      matrix: whether activations are multiplied with the array, so that it may become a `Weight`.
        Its last two dimensions are then those of a matrix; dimensions in front number matrices,
        such as experts.
      table: whether rows of the array are looked up, as in an embedding; it may become a `Weight`.
      fused: the joined array that holds this one where decoding fuses projections that share their
        input; None: it is not fused.
      dtype: dtype that the array always has, in files too; None: that of the model.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    stored: Place = None
    init: float | None = 0.02
    residual: bool = False
    matrix: bool = False
    table: bool = False
    fused: Fused | None = None
    dtype: str | None = None


# --- what a sequence keeps ------------------------------------------------------------------------


class Memory(NamedTuple):
    """What a layer, or a whole model, keeps of each sequence between forward passes.

    Pages grow with a sequence. A slot is the part of fixed size that a sequence has in a layer: its
    recurrent state. It is called so because row b of the array belongs to slot b of the batch.

    In the memory of a model both attributes are tuples with one entry per layer. Where layers are
    scanned they have one entry per layer of the repeating pattern, and the repetitions are an axis
    of their own (see `specjax.memory`).

    Attributes:
      pages: arrays [P K page_size H] of keys and values, which tables point into; None: the layer
        keeps no keys and values.
      slots: arrays [B ..] of fixed size, such as recurrent states; None: the layer has no such
        state.
    """

    pages: Any
    slots: Any


class Scratch(NamedTuple):
    """What the rows of a forward pass would add to a `Memory`, if they were accepted.

    Attributes:
      pages: arrays [B K T H] of rows as they will be written to pages, in a tree of the same
        structure as `Memory.pages`.
      slots: arrays [B T ..] that `Mixer.advance` needs of each row.
    """

    pages: Any
    slots: Any


class Cost(NamedTuple):
    """The size of a `Memory`.

    Attributes:
      page: bytes of one page, in all layers.
      slot: bytes of one slot, in all layers.
    """

    page: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Room:
    """The dimensions of a `Memory`.

    Attributes:
      slots: number of sequences.
      pages: number of pages in the pool.
      page_size: positions per page.
    """

    slots: int
    pages: int
    page_size: int


@dataclasses.dataclass(frozen=True)
class Where:
    """The positions of the rows of a forward pass, and which rows each of them sees.

    Attributes:
      form: which rows the pass has. `train`: packed rows [B S], causal within segments. `tree`:
        rows of a tree, or a piece of a prompt as a chain, behind a prefix that the memory holds.
        `by_position`: as `tree`, and each row attends to its ancestors in the order of their
        positions (invariant mode).
      positions: [B T] position of each row, for RoPE: the root's position plus the row's depth.
      segments: [B S] segment of each position in training; 0 is padding.
      prefix: [B] number of positions that the memory holds of each sequence; 0 where a slot does
        not run: its rows are not used and should cost no time.
      visible: [T W] or [B T W] words of bits: bit j of row t is set iff row j is row t or an
        ancestor of it. Earlier rows, which `scratch` holds, are numbered first. In a block of a
        draft that drafts all tokens at once rows also see later ones; its layers have no windows.
      held: number of those earlier rows (a Python integer).
      path_rows: [T A] or [B T A] rows on the path from the root down to each row; None where row 0
        is not the root of a tree (there are earlier rows, or it is a piece of a prompt).
      depth: [T] or [B T] depth of each row; None as `path_rows`.
      table: the pages of each sequence.
      angles: pairs of a `Mixer.rotation` and its cosines and sines at `positions`.
      kernel: name of the backend whose operations run, see `specjax.kernels.dispatch`.
      context: how the tokens of packed rows are split over devices; None: they are not.
    """

    form: str
    positions: Int[Array, "B T"]
    segments: Int[Array, "B S"] | None = None
    prefix: Int[Array, " B"] | None = None
    visible: UInt32[Array, "*B T W"] | None = None
    held: int = 0
    path_rows: Int[Array, "*B T A"] | None = None
    depth: Int[Array, "*B T"] | None = None
    table: Table = None
    angles: tuple[tuple[Any, tuple[Array, Array]], ...] = ()
    kernel: str = "reference"
    context: Any = None

    def rotated_by(self, rotation: Any) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
        """Returns the cosines and sines of one of the model's rotary embeddings."""
        return next(angles for which, angles in self.angles if which == rotation)

    def sees(self, rows: int) -> Bool[Array, "*B T rows"]:
        """Returns the mask [.. T rows] of a causal layer: whether row t is row j or a descendant.

        Args:
          rows: number of rows that may be seen, earlier rows included.
        """
        if self.form == "train":
            same = self.segments[:, :, None] == self.segments[:, None, :]
            return same & (np.arange(rows)[:, None] >= np.arange(rows))
        words = jnp.asarray(self.visible)[..., None] >> np.arange(32, dtype=np.uint32)
        return ((words & 1) == 1).reshape(*self.visible.shape[:-1], -1)[..., :rows]

    def replace(self, **changes: Any) -> Where:
        return dataclasses.replace(self, **changes)


class Forward(NamedTuple):
    """The result of a forward pass.

    Attributes:
      x: [B T D] states before the final norm.
      scratch: what the rows would add to the memory, see `specjax.memory.commit`: a tuple of
        `Scratch`, laid out as the layers of a `Memory`. None in training.
      taps: hidden states [B T D], one for each tap that was asked for, in that order.
      records: [B T M ..] facts of each row, of the M layers that record any, see `Mlp.run`; None:
        there are no such layers.
      figures: mean of each figure over the layers that compute any, see `Mlp.run`.
    """

    x: Float[Array, "B T D"]
    scratch: Any = None
    taps: tuple[Float[Array, "B T D"], ...] = ()
    records: Int[Array, "B T M ..."] | None = None
    figures: Mapping[str, Float[Array, ""]] = MappingProxyType({})

    @property
    def tapped(self) -> Float[Array, "B T taps_width"]:
        """Returns the taps side by side in the last axis; no columns where there are none."""
        return jnp.concatenate(self.taps, axis=-1) if self.taps else self.x[..., :0]


# --- models ---------------------------------------------------------------------------------------


@runtime_checkable
class Family(Protocol):
    """A Hugging Face `model_type`: reads and writes its config.json, and names arrays in its files.

    The arrays and their shapes are declared by the code that computes with them, see `Param`: a
    family chooses among them in `read`, and names them in `stored`.

    Attributes:
      model_type: the model's type in config.json, which is its name in the table.
      architecture: name of the class of transformers, for `architectures` of config.json.
      layer_prefix: how the names of a layer's tensors begin, with `{}` for the layer's number, from
        0.
      head_style: how an MTP head is named in the model's own files, a name in `HEAD_STYLES` of
        `specjax.checkpoint.huggingface_names`; None: transformers has no head for it, and a head is
        written to a file of its own.
      mtp_key: key of config.json with the number of modules of an MTP head.
      renamed: how names of tensors may begin in files, and how the same names begin here.
      ignored: patterns, as of `fnmatch`, of tensors that are left out, such as those that read
        images.
      inert: keys of config.json that look as if they changed what is computed, and do not.

    The table may name a family by several types. A file of another type than the family's own has
    its config in the object `text_config`, as a model that also reads images.
    """

    model_type: str
    architecture: str
    layer_prefix: str
    head_style: str | None
    mtp_key: str
    renamed: Mapping[str, str]
    ignored: Sequence[str]
    inert: Sequence[str]

    def read(self, keys: Any) -> Any:
        """Reads the `ModelConfig` that a config.json describes.

        Token ids, dtypes and the options of an MTP head are read for all families alike, and put in
        afterwards.

        Args:
          keys: the keys of config.json, a `specjax.checked_json.Keys`.

        Raises:
          CheckpointError: a key is absent, or has an invalid value.
          UnsupportedModelError: it asks for what is not implemented, by name.
        """

    def write(self, cfg: Any) -> dict[str, Any]:
        """Returns the part of config.json that `read` reads, in a form that transformers reads too.

        Raises:
          UnsupportedModelError: the family cannot express the config.
        """

    def stored(self, cfg: Any, layer: Any | None) -> Mapping[str, Place]:
        """Returns where files hold arrays, by the names of the arrays.

        There must be an entry for each row of `specjax.models.rows.layer_rows`, or of `top_rows`
        for the arrays outside the layers, the language-model head included although it may be tied.

        Args:
          layer: layer whose arrays are asked for; None: the arrays outside the layers.
        """

    def zeros(self, cfg: Any, layer: Any) -> Mapping[str, tuple[int, ...]]:
        """Lists tensors that files may hold for a layer and that must be zero, with their shapes.

        They are named without the layer's prefix, and written as zeros.
        """


class Mixer(Protocol):
    """How a layer mixes positions. Implementations are frozen dataclasses: their own config.

    All methods are pure functions. `w` holds the arrays of the layer by the names of `params`, or
    of `Param.fused` where decoding fuses projections. A `Param.matrix` may be a `Weight` there:
    multiply by `specjax.weights.matrix.dot`, which takes either.

    Attributes:
      kind: name for messages and sizes. What a mixer computes is told by its class, not by this.
      rotation: hashable key of the angles of the mixer's rotary embedding; layers with equal keys
        share the angles. None: it has no rotary embedding, and needs no method `angles`.
    """

    kind: str
    rotation: Any

    def params(self, width: int) -> Mapping[str, Param]:
        """Returns the rows of the mixer's arrays by name, without the layer's norm.

        Args:
          width: width D of the model.
        """

    def angles(
        self, positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
        """Computes the cosines and sines of the rotary embedding at some positions.

        Called once per forward pass for each `rotation` of the model; `run` gets the result by
        `where.rotated_by(self.rotation)`.
        """

    def empty(self, run: Any, room: Room) -> Memory:
        """Makes the memory of one layer, as it is before the first token of every sequence.

        Args:
          run: the `RunConfig`, which says the dtype.
          room: dimensions of the memory.
        """

    def run(
        self,
        w: Params,
        x: Float[Array, "B T D"],
        where: Where,
        memory: Memory | None,
        scratch: Scratch | None,
    ) -> tuple[Float[Array, "B T D"], Scratch]:
        """Mixes rows; returns them without the residual, and what they would add to the memory.

        In decoding a row that is not finite may spoil the rows that see it, and no other: zero
        times NaN is NaN (see `specjax.memory.with_marked_keys`).

        Args:
          w: arrays of the layer.
          x: states of the rows, normed.
          where: positions of the rows, and which rows each of them sees.
          memory: memory of this layer, read only. None in training.
          scratch: buffers with room for all rows of a round, whose first `where.held` rows are
            filled; the method returns them with these rows filled in as well, see
            `specjax.memory.append_rows`. None: there are no earlier rows.

        Raises:
          NotImplementedError: it cannot run with `where.context`, or with `scratch`; the message
            names the setting.
        """

    def run_again(
        self,
        w: Params,
        x: Float[Array, "B S D"],
        where: Where,
        earlier: Sequence[Scratch],
    ) -> tuple[Float[Array, "B S D"], Scratch]:
        """Mixes packed rows of a further recursive step in training.

        Optional: without it a head with this mixer is trained over one step per module. A row sees
        the rows of the first step up to its own index, in its segment, and the row of its own index
        in every later step, this one included.

        Args:
          where: positions of the form `train`.
          earlier: scratch of the earlier steps: that of `run` first, then those of this method.
        """

    def operations(self, length: int) -> int:
        """Returns the operations that a forward pass over one sequence needs beside its products.

        Optional: without it the speed of training is not reported. Products with the mixer's
        matrices are not counted.
        """

    def advance(self, slots: Any, rows: Any, count: Int[Array, " B"]) -> Any:
        """Advances `Memory.slots` of one layer over the first `count` rows of an accepted path.

        Called only where `empty` makes slots. Pages need no such method: accepted rows are written
        to them as they are.

        Args:
          slots: `Memory.slots` of the layer.
          rows: `Scratch.slots` [B A ..] of the rows of the path.
          count: [B] number of accepted rows; 0 where a sequence does not run, whose slot must stay
            as it is. Rows past it may hold anything, NaN included.
        """


class Mlp(Protocol):
    """How a layer works on each row by itself. Implementations are frozen dataclasses.

    All methods are pure functions, and `w` is as in `Mixer`: multiply by
    `specjax.weights.matrix.dot`.

    Attributes:
      kind: name for messages and sizes.
    """

    kind: str

    def params(self, width: int) -> Mapping[str, Param]:
        """Returns the rows of the mlp's arrays by name, without the layer's norm."""

    def weights_of_a_row(self, width: int) -> int:
        """Returns the number of matrix weights that one row is multiplied with.

        Optional: without it the speed of training is not reported.
        """

    def run(
        self,
        w: Params,
        x: Float[Array, "B T D"],
        where: Where,
        given: Int[Array, "B T ..."] | None = None,
    ) -> tuple[
        Float[Array, "B T D"], Int[Array, "B T ..."] | None, Mapping[str, Float[Array, ""]] | None
    ]:
        """Computes rows, without the residual, and facts of each, such as the experts it chose.

        Facts are integers, of one dtype and shape in all layers of a model that have any; None: the
        layer has none. Those of prompts and of emitted tokens are returned with the tokens
        (`SampleOutput.records`), and a trainer gives them back. All bits of the facts of a row are
        set, as in -1 or in the largest unsigned number, where nothing is known of the row.

        In the form `train` it may also return figures of its rows, float32 by name, that are logged
        as means over layers; `load_balance` is a loss that a trainer may add to its own.

        Args:
          w: arrays of the layer.
          x: states of the rows, normed.
          where: positions of the rows.
          given: facts to use again; rows of which nothing is known choose anew. None: all do.
        """


# --- draft sources --------------------------------------------------------------------------------


class DraftNeeds(NamedTuple):
    """What a draft needs of the target and of the engine.

    Attributes:
      taps: hidden states of the target that the draft is given. A number: the states after this
        many layers (0: the embeddings); `pre_norm` and `post_norm`: before and after the final
        norm. Several taps are joined along the last axis, which is taps_width wide.
      states: number of positions before the root whose states the draft needs to begin.
      window: number of states of roots that the draft remembers while plain decoding runs, which
        gives them to `commit`; 0: none are kept for it.
      siblings: whether it drafts for one slot from the tokens of others.
      history: whether it drafts from samples that have ended, see `Draft.feed`.
    """

    taps: tuple[int | str, ...] = ()
    states: int = 0
    window: int = 0
    siblings: bool = False
    history: bool = False


class FinishedSample(NamedTuple):
    """A sample that has ended.

    Attributes:
      prompt: token ids of its prompt.
      tokens: token ids that were generated.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]


class Level(NamedTuple):
    """The R rows that a draft step expands, all at one depth of the tree.

    The rows that a round expands below the root are numbered in order, level after level.

    Attributes:
      step: depth of these rows, 1 or more.
      offset: number of rows that earlier levels expanded (a Python integer).
      total: number of rows that all levels of the round expand (a Python integer).
      tokens: [B R] token of each row; negative where a row is not valid.
      parents: [R] or [B R] index of each row's parent among the rows of the previous call; the
        first call, `begin`, has one row: the root.
      visible: [R W] or [B R W] words of bits: bit j is set iff expanded row j is the row or an
        ancestor of it.
      path: [B R step] tokens from below the root down to the row itself.
    """

    step: int
    offset: int
    total: int
    tokens: Int[Array, "B R"]
    parents: Int[Array, "..."]
    visible: UInt32[Array, "... R W"]
    path: Int[Array, "B R step"]


class Proposal(NamedTuple):
    """The tokens that a draft proposes below R rows, with their scores.

    Attributes:
      scores: [B R C] raw logits, float32; -inf: the token is not proposed.
      ids: the target's token id of each column: [C], ascending, for all rows, or [B R C] for each
        row; None: C is the whole vocabulary, in order. The vocabulary size stands for no token, and
        may occur any number of times; another id that occurs twice counts once.
    """

    scores: Float[Array, "B R C"]
    ids: Int[Array, " C"] | Int[Array, "B R C"] | None = None


# The files at a path that a user names as the draft, read when they are asked for: the methods of
# `specjax.checkpoint.draft_files.FilesAt`.
#
#   path              a file or a directory
#   file              path of config.json, for messages
#   is_policy         whether it holds a policy's weights in a known format
#   is_directory      whether it is a directory in the layout of Hugging Face, with a config or not
#   mesh              mesh to put parameters on; None: the default device
#   vocabulary        id of each token by the tokenizer of the target; None: it has none
#   config()          the content of config.json; empty where there is none
#   tensors()         the tensors by name, see `Reader.tensors`; with `required=False` none where
#                     weights cannot be read
#   tokenizer()       the tokenizer, of transformers; None: there is none
#   model_config()    the `ModelConfig` of a policy; with `as_stored=True` embeddings are tied as
#                     the weights are, which are then compared
#   arrays(draft, dtype)   the arrays that `Draft.rows` names, completed by `Draft.loaded`
#   policy(dtype)     the stacked parameters of a policy
#   policy_head(cfg)  the head that lies among a policy's weights, or alone, named like them
DraftFiles = Any


def _lacks(draft: type, method: str) -> str:
    return f"{draft.__name__} has no method `{method}`, which this needs; write it"


class Draft(Protocol):
    """A draft source: it proposes tokens. A wrong proposal costs time. It changes no
    token in `coupled` and `greedy` mode, and no distribution in the other modes.

    Implementations are frozen dataclasses, static in compiled programs; parameters and memory are
    passed to them. A class that inherits from this one must write `begin` and `step`; the other
    methods are then those of a draft without weights and without memory.

    The order of calls: `prefill` for each piece of a prompt, `start` when a sequence gets a slot.
    The rounds of a batch (a chunk has one or more) begin with `resume` and end with `pause`, so
    that the next batch may use another strategy. In a round `begin` is called once, `step` once per
    further level, `commit` once. After plain rounds `commit` is called once, without work.

    `model` is the target as a module, and `state` the batch's decode state, of which a draft may
    read tokens, length, finish, keys, options and table; its own memory is `state.draft`.

    A class in the table that has files says which are its own (`recognises`), makes the draft that
    they describe (`read`), and loads its weights (`load`). One whose weights lie in files of their
    own declares what it reads: `rows` names the tensor of each array, and `loaded` completes the
    arrays. `specjax.checkpoint.draft_files` reads and writes such files.

    Attributes:
      needs: what the draft asks of the target and of the engine.
      network: the `ModelConfig` of the network that drafts; None: there is no network.
      fixed: names at the top of the parameters' tree of what training leaves as it is, such as
        token ids.
      aliases: names of tensors that its files lack, each with that of the one that is read in
        its place, such as the embedding of a head that is tied to it.
      has_files: whether its weights lie in files of their own, see `rows`.
      in_policy: whether its weights lie among those of its policy, whose config describes it.
    """

    needs: DraftNeeds = DraftNeeds()
    network: Any = None
    fixed: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = MappingProxyType({})
    has_files: bool = False
    in_policy: bool = False

    @classmethod
    def of(cls, target: Any, spec: Any) -> Draft:
        """Makes the draft for a target.

        Args:
          target: the target's `ModelConfig`.
          spec: the `SpecConfig` that names this draft.

        Raises:
          ValueError: the draft cannot be made from these two alone.
        """
        return cls()

    @classmethod
    def of_policy(cls, cfg: Any) -> Draft | None:
        """Makes the draft that a policy's config describes; None: the policy has none of the class.

        Args:
          cfg: the policy's `ModelConfig`.
        """
        return None

    @classmethod
    def new(cls, target: Any, policy: Params | None = None, seed: int = 0) -> tuple[Draft, Params]:
        """Makes a new draft that is to be trained, and its starting parameters.

        Args:
          target: the target's `ModelConfig`.
          policy: the target's parameters as they are trained, of which some may be copied; None:
            all parameters are random.
          seed: seed of the random parameters.
        """
        draft = cls.of(target, None)
        return draft, draft.init(seed)

    def target(self, cfg: Any) -> Any:
        """Returns the config of the target, with what it says of a draft in the policy's files."""
        return cfg

    @classmethod
    def recognises(cls, files: DraftFiles, target: Any | None) -> bool:
        """Says whether files hold weights of this draft.

        Classes are asked in the order of the table.

        Args:
          files: the files at a path.
          target: the target's `ModelConfig`; None: it is not known.
        """
        return False

    @classmethod
    def read(cls, files: DraftFiles, target: Any) -> Draft:
        """Makes the draft that files describe; reads no tensor but small ones, such as token ids.

        It refuses files with tensors that it does not know.

        Args:
          files: the files at a path, which it recognises.
          target: the target's `ModelConfig`.

        Raises:
          specjax.checked_json.CheckpointError: the files are damaged, or are of a draft for another
            target.
          specjax.checked_json.UnsupportedModelError: they ask for what cannot be computed.
        """
        raise NotImplementedError(_lacks(cls, "read"))

    def rows(self) -> Mapping[Any, Any]:
        """Returns a tree of `Param`, one per array, in the structure of the draft's parameters.

        `Param.stored` has the whole name of each tensor.
        """
        return {}

    def loaded(self, params: Params) -> Params:
        """Completes parameters that were read as `rows` says, such as offsets of token ids."""
        return params

    def saved(self, dtype: str) -> tuple[dict[str, Any], Draft]:
        """Returns the content of config.json to write, and the draft whose `rows` name the tensors.

        Args:
          dtype: dtype of the weights in the files.
        """
        raise NotImplementedError(_lacks(type(self), "saved"))

    def unwritable(self) -> str | None:
        """Returns why files cannot express the draft; None: they can."""
        return None

    def stored(self, params: Params) -> Params:
        """The inverse of `loaded`, for writing."""
        return params

    def described(self) -> str:
        """Returns a line for the user about what was read from files; may be empty."""
        return ""

    def refuses(self, strategy: Any) -> str | None:
        """Returns why it cannot draft for a `Strategy`; None: it can."""
        return None

    def load(self, files: DraftFiles | None) -> Params:
        """Loads the draft's parameters, in the layout in which it drafts.

        Args:
          files: the files that it was read from; for a class of a user, `module:attribute:PATH`,
            those at PATH. None: there are none.
        """
        return {}

    def head(
        self, params: Params
    ) -> tuple[Float[Array, "D C"] | None, Int[Array, " C"] | None] | None:
        """Returns the draft's own language-model head or vocabulary, for training.

        Returns:
          the matrix (None: the target's, of which the ids are columns), and the target's token id
          of each column, ascending (None: all, in order). None: the draft uses the target's head.
        """
        return None

    def init(self, seed: int) -> Params:
        """Makes random parameters, in the layout in which the draft is trained.

        Optional: without it a draft is not trained.
        """
        raise NotImplementedError(_lacks(type(self), "init"))

    def unroll(
        self,
        params: Params,
        policy: Params,
        states: Float[Array, "R S taps_width"],
        tokens: Sequence[Int[Array, "R S"]],
        positions: Int[Array, "R S"],
        segments: Int[Array, "R S"],
        context: Any = None,
    ) -> list[Float[Array, "R S D"]]:
        """Runs the draft over packed rows in training, as many steps as `tokens` has.

        Only `params` is differentiated. Optional: without it a draft is not trained.

        Args:
          params: parameters as `init` makes them.
          policy: the target's `embed`, `norm` and `lm_head` (none if it is tied).
          states: hidden states of the target, those of `needs.taps` side by side.
          tokens: for each step s the token 1 + s positions behind each row.
          positions: position of each token in its segment.
          segments: 1, 2, ... along a row, one number per segment; 0 is padding.
          context: how rows are split over devices; None: they are not.

        Returns:
          for each step s, states for the language-model head (see `head`), of which row t predicts
          the token 2 + s positions behind it.
        """
        raise NotImplementedError(_lacks(type(self), "unroll"))

    def with_network(self, cfg: Any) -> Draft:
        """Returns the draft with another config of its network: the engine chose the kernels."""
        raise NotImplementedError(_lacks(type(self), "with_network"))

    def for_length(self, longest: int) -> Draft:
        """Returns the draft for sequences of at most so many tokens, see `ModelConfig`."""
        return self.with_network(self.network.for_length(longest)) if self.network else self

    def axes(self) -> Axes:
        """Returns the logical axes of the draft's parameters by their names, see `Param`."""
        return {}

    def pack(self, params: Params) -> Params:
        """Converts parameters to the number format that the network's config says for matrices."""
        return params

    def columns(self, params: Params, target: Params, ids: Int[Array, " C"]) -> Params:
        """Makes the entry `vocabulary` of the draft's parameters, to draft from some tokens only.

        Args:
          params: the draft's parameters, packed.
          target: the target's parameters, in their decode layout.
          ids: token ids that are drafted from, ascending.

        Raises:
          ValueError: this draft always drafts from the whole vocabulary.
        """
        raise ValueError(
            f"{type(self).__name__} cannot draft from a part of the vocabulary: it lacks `columns`"
        )

    def store(self) -> Any:
        """Makes the NumPy arrays that `feed` fills, before any sample has ended.

        The arrays are the entry `history` of the draft's parameters, on every device. Called where
        `needs.history` is set.
        """
        raise NotImplementedError(_lacks(type(self), "store"))

    def feed(self, store: Any, samples: Sequence[FinishedSample]) -> Any:
        """Adds samples that have ended to the store; returns arrays of the same shapes and types.

        The host calls it between chunks, and not under `block` and `recursive`: tokens that a
        request drew with its own noise must not decide what is drafted when it runs again.

        Args:
          store: arrays that `store` or `feed` returned; they may be changed in place.
          samples: samples that have ended since the last call.
        """
        raise NotImplementedError(_lacks(type(self), "feed"))

    def cost(self, page_size: int) -> Cost:
        """Counts the bytes of the draft's memory."""
        return Cost(0, 0)

    def empty(self, room: Room, steps: int) -> Memory:
        """Makes the memory of the draft, as it is between chunks of rounds of up to `steps` steps.

        Its pages are numbered as the target's, and reached by the same tables.
        """
        return Memory(None, None)

    def prefill(
        self,
        model: Any,
        params: Params,
        pages: Any,
        tokens: Int[Array, "prompts T+states"],
        start: Int[Array, " prompts"],
        hidden: Float[Array, "prompts T taps_width"],
        table: Table,
    ) -> Any:
        """Writes positions start .. start + T - 1 of prompts to its pages, behind earlier ones.

        Args:
          model: the target.
          params: parameters of the draft.
          pages: pages of the draft.
          tokens: T + `needs.states` tokens from `start` on; tokens that are not known yet are
            arbitrary.
          start: first position of each prompt that is written.
          hidden: the target's states at the T positions, see `DraftNeeds.taps`.
          table: the pages of each prompt.

        Returns:
          the pages.
        """
        return pages

    def start(
        self,
        tokens: Int[Array, "prompts max_len"],
        prompt_len: Int[Array, " prompts"],
        states: Float[Array, "prompts states taps_width"] | None,
    ) -> Any:
        """Makes the slots of sequences at their beginning.

        Args:
          tokens: tokens of each sequence, of which the first `prompt_len` are its prompt.
          prompt_len: length of each prompt.
          states: hidden states of the last `needs.states` positions before the root; None: the
            draft needs none.
        """
        return None

    def resume(self, model: Any, params: Params, state: Any, steps: int) -> Memory:
        """Makes the memory ready for rounds of `steps` steps, after any number of plain rounds.

        Called before the first speculative round of a batch.
        """
        return state.draft

    def pause(self, memory: Memory, between: Any) -> Memory:
        """Makes the memory ready to be kept between chunks, after the last round of a batch.

        Args:
          memory: memory of the draft after the batch's rounds.
          between: slots whose shapes the result has.
        """
        return memory

    def begin(
        self, model: Any, params: Params, state: Any, steps: int, total: int
    ) -> tuple[Proposal, Any]:
        """Reads the tokens of the last round; proposes what may follow the root.

        Args:
          model: the target.
          params: parameters of the draft.
          state: decode state of the batch.
          steps: number of levels of the tree.
          total: number of rows that all levels of the round expand, without the root.

        Returns:
          the proposal, and work: whatever this call hands to the next call of the round.
        """
        raise NotImplementedError(_lacks(type(self), "begin"))

    def step(self, model: Any, params: Params, work: Any, level: Level) -> tuple[Proposal, Any]:
        """Proposes what may follow each row of a level; returns the proposal and new work."""
        raise NotImplementedError(_lacks(type(self), "step"))

    def commit(
        self,
        memory: Memory,
        work: Any,
        hidden: Float[Array, "B A taps_width"],
        count: Int[Array, " B"],
    ) -> Memory:
        """Advances the memory over the tokens that were emitted.

        Args:
          memory: memory of the draft.
          work: the work that the round's last `step` returned, or `begin` where there was no
            `step`; None after rounds of plain decoding.
          hidden: the target's states of the rows that decided these tokens, the root's first. After
            plain decoding without `needs.window`, A and taps_width are 0.
          count: number of tokens emitted; 0 where a slot does not run, whose memory may not change.
        """
        return memory


# --- number formats, files, kernels ---------------------------------------------------------------


class Weight(Protocol):
    """A matrix [I O] in some number format; models multiply by `specjax.weights.matrix`.

    Implementations are pytrees. They are stacked and sliced leaf by leaf (layers of a scan, experts
    of an mlp), so sizes must come from the leaves. A class may also have `experts(x, sizes,
    kernel)`, on a stack of E matrices, as the function of that name in `specjax.weights.matrix`;
    without it that function multiplies by one matrix after the other. I and O are the input and
    output size.

    Attributes:
      exact: whether the format rounds no number, so that tokens stay what they are (a class
        attribute). `auto` takes only such formats, and only they have their checksums compared
        where weights arrive.
      line: text that is logged at start where the format is chosen (a class attribute).
    """

    exact: bool
    line: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes I and O, with the leading dimensions of a stack before them."""

    @classmethod
    def refuses(cls, device: Any, cfg: Any) -> str | None:
        """Returns why a model cannot have this format on a `Device`; None: it can.

        A `specjax.kernels.backend.Unsuited` is a reason that needs no warning.
        """

    @classmethod
    def pack(cls, array: Float[Array, "I O"], table: bool) -> Weight | None:
        """Converts a matrix to this format, inside a jit; None: it stays an array.

        Args:
          array: the matrix.
          table: whether rows of the matrix are looked up, and its transpose may be multiplied with.
        """

    def unpack(self) -> Float[Array, "I O"]:
        """Returns the matrix as an array, of which draft sources take some columns."""

    def part_axes(self, axes: tuple[str | None, ...]) -> Any:
        """Returns a tree of the weight's structure with the logical axes of each leaf.

        Args:
          axes: logical axes of the array [I O], or of a stack [E I O].
        """

    def dot(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """Computes `x @ matrix`."""

    def dot_t(self, x: Float[Array, "... O"]) -> Float[Array, "... I"]:
        """Computes `x @ matrix.T`, for a language-model head that is the embedding."""

    def rows(self, ids: Int[Array, "..."]) -> Float[Array, "... O"]:
        """Looks up rows of the matrix, embeddings; ids are in range."""


class Reader(Protocol):
    """A file format of checkpoints. It is constructed with the path, which errors must name.

    Config and names are those of Hugging Face, so that families need not know of formats.

    Attributes:
      file: path that messages about the config name.
      has_tokenizer: whether `tokenizer` may find a tokenizer.

    Raises:
      specjax.checked_json.CheckpointError: a file is absent or damaged; the message is one line.
      specjax.checked_json.UnsupportedModelError: it asks for what cannot be computed.
    """

    file: Any
    has_tokenizer: bool

    @staticmethod
    def recognises(path: Any) -> bool:
        """Says whether a path, which may not exist, holds a checkpoint of this format."""

    def config(self) -> dict[str, Any]:
        """Returns what config.json would hold."""

    def generation(self) -> dict[str, Any]:
        """Returns what generation_config.json would hold; may be empty."""

    def tensors(self) -> Mapping[str, Any]:
        """Returns the tensors by their Hugging Face names, with projections `[out, in]`.

        Each has a `shape`, a `dtype` by its name in numpy (`float32`, `bfloat16`), and returns a
        numpy array when it is indexed with a slice per dimension. They may be arrays.
        """

    def tokenizer(self) -> Any:
        """Returns the checkpoint's tokenizer, of transformers; None: it has none."""


class Device(NamedTuple):
    """The devices that programs are compiled for.

    Attributes:
      platform: platform of the devices, as jax names it: `cpu`, `gpu`, `tpu`.
      kind: kind of the devices, as jax names it.
      count: number of devices.
    """

    platform: str
    kind: str
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Backend:
    """Kernels of a platform, by operation.

    Attributes:
      operations: functions, by names of operations. Each has the arguments and results of the
        function of that name in `specjax.kernels.dispatch`, without the kernel's name;
        `causal_attention` and `context_attention` those of `causal_attention_with_own`, without and
        with the context. A function that cannot serve a call raises
        `specjax.kernels.backend.Declined` with the reason.
      line: text that is logged at start where the backend is chosen.
      takes: for each operation the options that it implements, by the names of the keywords in
        `dispatch`: a call with another option is declined. For `layers` the fields of the config,
        such as `Attention.rope`, that may differ from their defaults: a model with another one is
        refused by name.
      refuses: function of an operation's name, a `Device` (None: only the model is to be checked)
        and the `ModelConfig`, that returns why the backend cannot be used; None: it can. A
        `specjax.kernels.backend.Unsuited` is a reason that needs no warning.
      rest: name of the backend that serves the operations that this one lacks or declines.
      kinds: device kinds, as jax names them, for which the backend is chosen among several of a
        platform; empty: any kind.
      page_multiple: number of positions of which the page size must be a multiple.
      by_device: whether attention is called on each device of a mesh with that device's heads and
        rows of the batch, because XLA cannot split a kernel. False: XLA splits it.
      prompts_alone: whether `auto` takes the backend also for an engine in invariant mode, where it
        runs for prompts only, because rounds attend by position.
    """

    operations: Mapping[str, Callable[..., Any]]
    line: str
    takes: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)
    refuses: Callable[[str, Device | None, Any], str | None] = lambda *_: None
    rest: str = "reference"
    kinds: tuple[str, ...] = ()
    page_multiple: int = 16
    by_device: bool = True
    prompts_alone: bool = True


# --- training -------------------------------------------------------------------------------------


class Logprobs(NamedTuple):
    """Log-probabilities of sampled tokens under four policies; 0 outside of the loss mask.

    Attributes:
      new: log-probabilities under the policy that is trained; only these have a gradient.
      old: log-probabilities before the updates of the step; of a token of an earlier step, under
        the weights that sampled it.
      behaviour: log-probabilities that the engine computed when it sampled the tokens, under the
        same weights as `old`.
      reference: log-probabilities under a frozen policy; None: there is no such policy.
    """

    new: Float[Array, "R S"]
    old: Float[Array, "R S"]
    behaviour: Float[Array, "R S"]
    reference: Float[Array, "R S"] | None


class Denominators(NamedTuple):
    """The numbers that one update averages over, in all its micro-batches.

    Attributes:
      tokens: number of loss tokens.
      samples: number of samples, those included that are left out of training as truncated.
    """

    tokens: np.float32
    samples: np.float32


class Objective(Protocol):
    """What the policy is trained on: advantages of samples, and a loss per token.

    Implementations are frozen dataclasses that inherit from `train.loss.algo.AlgoSection`. Their
    fields are their options: keys of the section `algo`, each with a default, documented under
    "Attributes:" of the docstring. `specjax.settings.option` says what else an option needs to have
    an effect. An attribute `least_samples` may hold the smallest number of samples per prompt,
    which otherwise is 2. A mistake in an option is a ValueError of `__post_init__`.

    Arrays [R S] are the R packed rows of one micro-batch. A sample is in one row whole, but its
    tokens may be in any order, for a row may be split over devices: sum over samples by `segments`
    (see `train.loss.shared`).
    """

    def advantages(self, rewards: Float[np.ndarray, "prompts G"]) -> Float[np.ndarray, "prompts G"]:
        """Computes the advantage of each sample, from rewards of prompts with G samples each.

        Raises:
          ValueError: no advantages can be computed from these rewards.
        """

    def per_token(
        self,
        logprobs: Logprobs,
        advantages: Float[Array, "R S"],
        segments: Int[Array, "R S"],
        loss_mask: Float[Array, "R S"],
    ) -> tuple[Float[Array, "R S"], dict[str, Float[Array, "R S"]]]:
        """Computes the loss of each token, and numbers to log by name as means over loss tokens.

        Results outside of the loss mask may be any finite numbers. Names that
        `train.loss.terms` logs itself are refused.

        Args:
          logprobs: log-probabilities of the tokens.
          advantages: advantage of each token's sample.
          segments: 1, 2, ... along a row, one number per sample; 0 is padding.
          loss_mask: 1 on tokens that the policy sampled, 0 elsewhere.
        """

    def weights(
        self,
        loss_mask: Float[Array, "R S"],
        segments: Int[Array, "R S"],
        counts: Denominators,
    ) -> Float[Array, "R S"]:
        """Computes the weight of each token, 0 outside of the loss mask.

        Args:
          loss_mask: 1 on tokens that the policy sampled, 0 elsewhere.
          segments: 1, 2, ... along a row, one number per sample; 0 is padding.
          counts: numbers of tokens and samples of the whole update, so that micro-batches add up.
        """


@runtime_checkable
class Task(Protocol):
    """The meaning of a row of a data set; `train.data.tasks.layout.Layout` makes one of functions.

    Attributes:
      name: name of the task, as in `data.task`, for messages.
      columns: names of the columns that the task needs, for messages.
      reward: name of the reward that suits its answers.
      template: default of `data.prompt_template`, for a prompt that is text and a model without a
        chat template: a format string with `{question}`.
    """

    name: str
    columns: str
    reward: str
    template: str

    def recognises(self, columns: Collection[str]) -> bool:
        """Says whether rows with these columns belong to this task."""

    def read(self, row: Mapping[str, Any]) -> Any:
        """Reads a row as a `train.data.tasks.layout.Example`: prompt, gold answer, further columns.

        Raises:
          train.data.tasks.layout.RowError: a column is not as expected.
        """
