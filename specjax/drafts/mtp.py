"""The multi-token-prediction draft head (DeepSeek-V3, arXiv 2412.19437, section 2.2; MiMo).

Row j takes (h_j, e(x_{j+1})): the target's state after token j and the embedding of the token that
followed. It predicts x_{j+2}. Drafting deeper feeds the head its own output in place of h. The head
owns its projection, layer(s) and norms; embedding and language-model head are the policy's, read
only.

Module s predicts at step s; a head with fewer modules than steps repeats its last module, which
training unrolls as far. (vLLM would begin with the first one again; transformers drafts no more
tokens than there are modules. With one module, as published, all do the same.) In training and in
decoding alike, a query of step s of the last module sees that module's base rows up to its own
position, and of the later steps only its own rows (EAGLE-3's training-time test).

`MTPHead` is the network; `MTPSource` drafts with it, see `specjax.drafts.head`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.config import ModelConfig, SpecConfig
from specjax.config.model import Layer
from specjax.config.stacks import part_of, stacks
from specjax.drafts import vocabulary
from specjax.drafts.head import WINDOW, HeadNetwork, HeadSource, drawn
from specjax.interfaces import Axes, DraftFiles, DraftNeeds, Param, Scratch, Where
from specjax.kernels import dispatch
from specjax.memory import KVCache, keeps_state
from specjax.models.layers import block, rms_norm
from specjax.models.rows import (
    axes_of,
    fixed_dtypes,
    fuse,
    fused_rows,
    layer_rows,
    merge_axes,
    param_axes,
)
from specjax.models.transformer import Params, layers_by_kernel
from specjax.parallel.sharding import whole_rows
from specjax.weights.matrix import PLAIN, cast, dot, pack, require_matches, unpack
from specjax.weights.safetensors import CONFIG, HEAD_FILE

# Fields of a policy's `ModelConfig` about its head.
HEAD_SWITCHES = ("mtp_num_layers", "mtp_concat", "mtp_target_hidden", "mtp_recycle")


def head_layer(cfg: ModelConfig) -> Layer:
    """The decoder layer of each module: a model's layer `layer_number`, without a window.

    Raises:
      ValueError: that layer keeps recurrent state, which a head cannot.
    """
    layer = cfg.layers[layer_number(cfg)]
    mixer = layer.mixer
    if getattr(mixer, "window", None) is not None:
        mixer = dataclasses.replace(mixer, window=None)
    layer = dataclasses.replace(layer, mixer=mixer)
    if keeps_state(cfg.replace(layers=(layer,))):
        raise ValueError(
            f"an MTP head is like the model's last layer, and {mixer.kind} keeps recurrent state"
        )
    return layer


@functools.lru_cache(maxsize=64)
def layer_number(cfg: ModelConfig) -> int:
    """The number of the last layer that can be a head's; the last of all where none can.

    That is none with recurrent state, nor attention without a rotary embedding (SmolLM3): a head
    keeps the rotary embedding of that layer, with which the weights that it copies work.
    """

    def fits(layer: Layer) -> bool:
        share = getattr(getattr(layer.mixer, "rope", None), "share", 1)
        return bool(share) and not keeps_state(cfg.replace(layers=(layer,)))

    kinds = {layer: fits(layer) for layer in dict.fromkeys(cfg.layers)}
    numbers = [number for number, layer in enumerate(cfg.layers) if kinds[layer]]
    return numbers[-1] if numbers else cfg.num_layers - 1


def module_rows(cfg: ModelConfig) -> dict[str, Param]:
    """Returns the rows of a module's arrays outside its layer."""
    d = cfg.hidden_size
    scale = Param((d,), (None,), init=0 if cfg.norm_offset else None)
    proj = Param((2 * d, d), ("embed", "mlp"), matrix=True)
    return {"embed_norm": scale, "hidden_norm": scale, "proj": proj, "norm": scale}


def head_rows(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the rows of all modules, as checkpoints hold them."""
    rows = {**module_rows(cfg), "layer": layer_rows(head_layer(cfg), cfg.hidden_size)}
    return {"blocks": dict.fromkeys(range(cfg.mtp_num_layers), rows)}


def weight_axes(cfg: ModelConfig) -> dict[str, tuple]:
    """Returns the logical axes of the arrays of a model and its head, by their names."""
    if not cfg.mtp_num_layers:
        return param_axes(cfg)
    layer = layer_rows(head_layer(cfg), cfg.hidden_size)
    return merge_axes([param_axes(cfg), axes_of(module_rows(cfg)), axes_of(layer)])


@dataclasses.dataclass(frozen=True)
class MTPHead(HeadNetwork):
    """The network: `mtp_num_layers` modules, see `HeadNetwork`; `cfg` is the policy's config.

    A module norms both inputs, projects them to D, runs a decoder layer, and has a final norm. The
    layers may be fused, see `to_format`.
    """

    cfg: ModelConfig

    @property
    def network(self) -> ModelConfig:
        return self.cfg

    @property
    def layers(self) -> tuple[Layer, ...]:
        return (head_layer(self.cfg),)

    @property
    def modules(self) -> int:
        return self.cfg.mtp_num_layers

    def through(self, index: int, hidden, embedded, where: Where, mix: Callable):
        w, [layer] = self.w["blocks"][index], self.layers
        x, run = self._inputs(w, hidden, embedded), functools.partial(mix, 0, layer.mixer)
        x, rows, *_ = block(layer, w["layer"], x, where, self.cfg, run)
        return *self._outputs(w, x), [rows]

    def decode(self, index: int, hidden, embedded, where, pages, scratch=None):
        """See `HeadNetwork.decode`; the layer may be run by a kernel for whole layers."""
        if not dispatch.runs_layers(self.cfg):
            return super().decode(index, hidden, embedded, where, pages, scratch)
        w = self.w["blocks"][index]
        x, buffers = self._inputs(w, hidden, embedded), scratch and scratch.pages
        arrays = where.positions, pages, where.prefix, where.visible, buffers, where.held
        x, [rows] = layers_by_kernel(self.cfg, [w["layer"]], x, *arrays, where.table)
        return *self._outputs(w, x), Scratch((KVCache(*rows),), None)

    def _inputs(self, w: Params, hidden: Array, embedded: Array) -> Float[Array, "B T D"]:
        """Computes a layer's input; `mtp_concat` says which operand is the first half."""
        eps, offset = self.cfg.rms_norm_eps, self.cfg.norm_offset
        e = rms_norm(embedded, w["embed_norm"], eps, offset)
        h = rms_norm(hidden.astype(embedded.dtype), w["hidden_norm"], eps, offset)
        halves = [e, h] if self.cfg.mtp_concat == "embedding_first" else [h, e]
        # Devices of `tp` compute columns, which are then gathered: sums are those of one device.
        return whole_rows(dot(jnp.concatenate(halves, -1), w["proj"]))

    def _outputs(self, w: Params, x: Float[Array, "B T D"]) -> tuple[Array, Array]:
        """Returns states for the language-model head, and states to use as h of the next step."""
        normed = rms_norm(x, w["norm"], self.cfg.rms_norm_eps, self.cfg.norm_offset)
        return normed, (normed if self.cfg.mtp_recycle == "post_norm" else x)


def init_head_params(cfg: ModelConfig, seed: int = 0) -> Params:
    """Makes random head parameters as a plain nested dict, in the layout of checkpoints."""
    if cfg.mtp_num_layers < 1:
        raise ValueError(f"an MTP head needs mtp_num_layers >= 1, got {cfg.mtp_num_layers}")
    return drawn(head_rows(cfg), cfg, seed)


def copied_layer(cfg: ModelConfig, policy: Params) -> Params:
    """Returns the arrays of a model's layer `layer_number` by their names.

    Args:
      policy: the model's parameters as they are trained, or with one entry per layer.
    """
    layers, number = policy["layers"], layer_number(cfg)
    if number in layers:
        return dict(layers[number])
    stack = next(stack for stack in stacks(cfg.layers) if number in stack.numbers)
    row = stack.numbers.index(number)
    return jax.tree.map(lambda array: array[row], dict(part_of(layers, stack)))


def new_head(target: ModelConfig, policy: Params | None = None, seed: int = 0) -> Params:
    """Makes the parameters of a head that is to be trained.

    Args:
      target: config of the model, with `mtp_num_layers` modules.
      policy: the model's parameters as they are trained. The layer and the final norm of each
        module then start as copies of the model's last ones, and the layer's input as the sum of
        both normed inputs, beside the random part of the projection. None: all are random.
      seed: seed of the random parameters.
    """
    params = init_head_params(target, seed)
    if policy is None:
        return params
    layer = copied_layer(target, policy)
    both = jnp.tile(jnp.eye(target.hidden_size), (2, 1))

    def started(module: Params) -> Params:
        # Copies: a trainer donates the head's arrays, and the policy's must outlive them.
        layer_copy = {
            name: jnp.array(unpack(layer[name]), array.dtype)
            for name, array in module["layer"].items()
        }
        proj, norm = module["proj"], module["norm"]
        proj = proj + both.astype(proj.dtype)
        norm = jnp.array(policy["norm"], norm.dtype)
        return {**module, "layer": layer_copy, "proj": proj, "norm": norm}

    return {"blocks": {i: started(module) for i, module in params["blocks"].items()}}


def to_format(params: Params, cfg: ModelConfig) -> Params:
    """Converts matrices to `cfg.run.products`; fuses layers for it, unless a mesh splits them."""
    rows, blocks = layer_rows(head_layer(cfg), cfg.hidden_size), params["blocks"]
    if cfg.run.fused and cfg.run.products != PLAIN:
        blocks = {
            index: {**module, "layer": fuse(module["layer"], rows)}
            for index, module in blocks.items()
        }
        rows = fused_rows(rows)
    all_rows = {"blocks": {index: {**module_rows(cfg), "layer": rows} for index in blocks}}
    params = {**params, "blocks": blocks}
    require_matches(cfg.run.products, all_rows)
    return pack(cast(params, cfg.run.compute_dtype, fixed_dtypes(cfg)), all_rows, cfg)


# --- the head as a draft --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MTPSource(HeadSource):
    """Drafts with an `MTPHead`, whose parameters it takes; its config is that of the policy."""

    cfg: ModelConfig
    in_policy = True

    @classmethod
    def of(cls, target: ModelConfig, spec: SpecConfig | None = None) -> MTPSource:
        return cls(target.replace(mtp_num_layers=max(target.mtp_num_layers, 1)))

    @classmethod
    def of_policy(cls, cfg: ModelConfig) -> MTPSource | None:
        return cls(cfg) if cfg.mtp_num_layers else None

    @classmethod
    def new(
        cls, target: ModelConfig, policy: Params | None = None, seed: int = 0
    ) -> tuple[MTPSource, Params]:
        """Makes a head of at least one module and its starting parameters, see `new_head`."""
        source = cls.of(target)
        return source, new_head(source.cfg, policy, seed)

    def target(self, cfg: ModelConfig) -> ModelConfig:
        return cfg.replace(**{name: getattr(self.cfg, name) for name in HEAD_SWITCHES})

    @classmethod
    def recognises(cls, files: DraftFiles, target: ModelConfig | None) -> bool:
        """See `Draft.recognises`. A policy's own head is none for a target of another width."""
        path = files.path
        if path.is_file():
            return path.suffix == ".safetensors"
        if not files.is_policy or ((path / HEAD_FILE).exists() and not (path / CONFIG).exists()):
            return True
        cfg = files.model_config()
        fits = target is None or cfg.hidden_size == target.hidden_size
        return bool(cfg.mtp_num_layers) and fits

    @classmethod
    def read(cls, files: DraftFiles | None, target: ModelConfig) -> MTPSource:
        return cls.of(target)

    def load(self, files: DraftFiles) -> Params:
        return files.policy_head(self.cfg)

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds((self.cfg.mtp_target_hidden,), self.cfg.mtp_num_layers, WINDOW)

    @property
    def network(self) -> ModelConfig:
        return self.cfg

    def axes(self) -> Axes:
        return weight_axes(self.cfg)

    def init(self, seed: int) -> Params:
        return init_head_params(self.cfg, seed)

    @property
    def taps_width(self) -> int:
        return self.cfg.hidden_size

    def bound(self, params: Params) -> MTPHead:
        return MTPHead(self.cfg, params)

    def with_network(self, cfg: ModelConfig) -> MTPSource:
        return dataclasses.replace(self, cfg=cfg)

    def pack(self, params: Params) -> Params:
        return to_format(params, self.cfg)

    def columns(self, params: Params, target: Params, ids) -> Params:
        return vocabulary.columns(vocabulary.head_of(target), ids, self.cfg)
