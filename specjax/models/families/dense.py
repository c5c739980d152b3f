"""Models of attention and gated feed-forward networks, which most families are settings of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from specjax.checked_json import CheckpointError, Keys, UnsupportedModelError
from specjax.config.model import Layer, LogitForm, ModelConfig
from specjax.interfaces import Place
from specjax.models.families import common
from specjax.models.mixers.attention import Attention
from specjax.models.mlps.dense import ACTIVATIONS, Dense
from specjax.models.rope import LongScaling, Rope, Scaling
from specjax.models.rows import layer_rows, top_rows


class Option(NamedTuple):
    """A number in config.json that is a field of the config.

    Attributes:
      key: key of config.json; null stands for None.
      part: the part of the config: `mixer`, `layer`, `model` or `logits`.
      field: field of that part.
      default: value of the key where a file lacks it.
      read, write: field of a key's value, and the other way round.
    """

    key: str
    part: str
    field: str
    default: float | None
    read: Callable[[float], float] = lambda value: value
    write: Callable[[float], float] = lambda value: value

    def of(self, keys: Keys) -> float | None:
        """Returns the value of the field."""
        value = keys.number(self.key, None)
        if value is None and self.key not in keys.raw:
            value = self.default
        return None if value is None else self.read(value)


# The scale of scores by the size of a head that they are divided by the root of.
SCALE_BY_SIZE = Option(
    "query_pre_attn_scalar", "mixer", "scale", 256, lambda x: x**-0.5, lambda s: round(s**-2)
)


@dataclasses.dataclass(frozen=True)
class DenseFamily:
    """A `specjax.interfaces.Family` of Llama's structure.

    Attributes:
      model_type: see `Family`, as for the attributes up to `inert`.
      qkv_bias: whether q, k and v have biases; None: the key `attention_bias` says it.
      qk_norm: whether queries and keys are normed; None: the key `use_qk_norm` says it.
      norms: where the norms of a layer are, see `Layer`.
      norm_offset: whether norms multiply by 1 + w.
      wide_norm: see `Attention`.
      activation: activation where a file does not say it.
      activation_key: key of the activation.
      scaled_embedding: whether embeddings are multiplied by the root of the width.
      partial_rotary: whether a part of each head may be rotated.
      options: numbers that are fields of the config.
      defaults: keys and their values where a file lacks them.
      mixer_kinds, mlp_kinds: classes of the mixers and mlps (class attributes).
    """

    mixer_kinds: ClassVar[tuple[type, ...]] = (Attention,)
    mlp_kinds: ClassVar[tuple[type, ...]] = (Dense,)

    model_type: str
    architecture: str
    head_style: str | None = None
    qkv_bias: bool | None = None
    qk_norm: bool | None = False
    layer_prefix: str = common.LAYER_PREFIX
    mtp_key: str = common.MTP_KEY
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()
    norms: str = "before"
    norm_offset: bool = False
    wide_norm: bool = False
    activation: str = "silu"
    activation_key: str = "hidden_act"
    scaled_embedding: bool = False
    partial_rotary: bool = False
    options: tuple[Option, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    # --- config in and out -----------------------------------------------------------------------

    def read(self, keys: Keys) -> ModelConfig:
        """See `Family.read`."""
        keys = keys.with_defaults(self.defaults)
        heads, kv_heads, head_dim = common.read_heads(keys, "head_dim" in self.defaults)
        count = keys.integer("num_hidden_layers", most=common.MOST_LAYERS)
        common.refuse(keys, self.problems(keys))
        activation = keys.text(self.activation_key, self.activation)
        if activation not in ACTIVATIONS:
            expected = f"expected one of {', '.join(ACTIVATIONS)}"
            common.refuse(keys, [f"{self.activation_key} {activation!r} ({expected})"])
        max_position = keys.integer("max_position_embeddings")
        eps = keys.number("rms_norm_eps", 1e-6, least=0.0)
        width = keys.integer("hidden_size")
        fields = {part: {} for part in ("mixer", "layer", "model", "logits")}
        for option in self.options:
            fields[option.part][option.field] = option.of(keys)
        biased = keys.flag("attention_bias", False if self.qkv_bias is None else None)
        if self.qkv_bias is False and biased:
            common.refuse(keys, ["attention_bias true"])
        qk_norm = keys.flag("use_qk_norm") if self.qk_norm is None else self.qk_norm
        mixer = Attention(
            heads, kv_heads, head_dim, qkv_bias=self.qkv_bias or biased, qk_norm=qk_norm,
            norm_eps=eps, norm_offset=self.norm_offset and qk_norm, wide_norm=self.wide_norm,
            **fields["mixer"],
        )  # fmt: skip
        mlps = self.mlps(keys, count, activation)
        windows = self.windows(keys, count)
        ropes = self.ropes(keys, max_position, windows)
        for rope in {*ropes}:
            pairs = rope.width(head_dim) // 2
            if isinstance(rope.scaling, LongScaling) and len(rope.scaling.short) != pairs:
                raise CheckpointError(
                    f"{keys.file}: expected {pairs} factors of longrope, one per pair of numbers "
                    f"that is rotated, got {len(rope.scaling.short)}"
                )
        if self.scaled_embedding:
            fields["model"]["embedding_multiplier"] = width**0.5
        mixers = self.mixers(
            keys,
            [
                dataclasses.replace(mixer, window=window, rope=rope)
                for window, rope in zip(windows, ropes, strict=True)
            ],
        )
        return ModelConfig(
            vocab_size=keys.integer("vocab_size"),
            hidden_size=width,
            layers=tuple(
                Layer(mixer, mlp, self.norms, self.norm_offset, **fields["layer"])
                for mixer, mlp in zip(mixers, mlps, strict=True)
            ),
            model_type=self.model_type,
            rms_norm_eps=eps,
            norm_offset=self.norm_offset,
            tie_embeddings=keys.flag("tie_word_embeddings"),
            max_position=max_position,
            logits=LogitForm(**fields["logits"]),
            **fields["model"],
        )

    def problems(self, keys: Keys) -> list[str]:
        """Lists what a config asks for and the family does not compute."""
        return common.not_dense(keys)

    def mlps(self, keys: Keys, layers: int, activation: str) -> Sequence[Any]:
        """Returns the mlp of each layer."""
        return [Dense(keys.integer("intermediate_size"), activation)] * layers

    def mixers(self, keys: Keys, attention: list[Attention]) -> Sequence[Any]:
        """Returns the mixer of each layer, given what it is where it is attention."""
        return attention

    def windows(self, keys: Keys, layers: int) -> tuple[int | None, ...]:
        """Returns the window of each layer; None: the layer sees all positions before its own."""
        return common.layer_windows(keys, layers, None)

    def ropes(self, keys: Keys, max_position: int, windows: Sequence[int | None]) -> Sequence[Rope]:
        """Returns the rotary embedding of each layer."""
        return [common.read_rope(keys, max_position, self.partial_rotary)] * len(windows)

    def write(self, cfg: ModelConfig) -> dict[str, Any]:
        """See `Family.write`."""
        cfg = cfg.for_length(cfg.max_position)
        # A class derived from one of them may compute something else than the family means.
        kinds = {type(part) for layer in cfg.layers for part in (layer.mixer, layer.mlp)}
        if others := sorted(x.__name__ for x in kinds - {*self.mixer_kinds, *self.mlp_kinds}):
            mixers, mlps = (
                " or ".join(kind.__name__ for kind in kinds)
                for kinds in (self.mixer_kinds, self.mlp_kinds)
            )
            self.refuse(f"has {mixers} and {mlps} in every layer", ", ".join(others))
        layer, attention = cfg.layers[0], cfg.mixers(Attention.kind)
        if not attention:
            self.refuse("has attention", "none")
        mixer = attention[0]
        windows = tuple(getattr(x.mixer, "window", None) for x in cfg.layers)
        parts = {"mixer": mixer, "layer": layer, "model": cfg, "logits": cfg.logits}
        values = {o.key: (o.write, getattr(parts[o.part], o.field)) for o in self.options}
        raw = {
            "vocab_size": cfg.vocab_size,
            "hidden_size": cfg.hidden_size,
            "num_hidden_layers": cfg.num_layers,
            "num_attention_heads": mixer.num_heads,
            "num_key_value_heads": mixer.num_kv_heads,
            "head_dim": mixer.head_dim,
            self.activation_key: layer.mlp.activation,
            "attention_bias": mixer.qkv_bias,
            "attention_dropout": 0.0,
            "max_position_embeddings": cfg.max_position,
            "rms_norm_eps": cfg.rms_norm_eps,
            "tie_word_embeddings": cfg.tie_embeddings,
            "use_cache": True,
            **{key: None if x is None else write(x) for key, (write, x) in values.items()},
            **({"use_qk_norm": mixer.qk_norm} if self.qk_norm is None else {}),
            **self.mlps_json([x.mlp for x in cfg.layers]),
            **self.windows_json(windows),
            **self.mixers_json([x.mixer for x in cfg.layers]),
            **self.ropes_json(cfg),
        }
        again = DenseFamily.read(self, Keys(Path("config.json"), raw))
        facts = {name: getattr(cfg, name) for name in _NOT_OF_FAMILIES}
        if different := _difference(cfg, again.replace(**facts)):
            raise UnsupportedModelError(
                f"model_type {self.model_type!r} cannot express {different}; set another one"
            )
        return raw

    def mlps_json(self, mlps: Sequence[Any]) -> dict[str, Any]:
        """Returns the keys that `mlps` reads, but for the activation."""
        return {"intermediate_size": mlps[0].intermediate_size}

    def mixers_json(self, mixers: Sequence[Any]) -> dict[str, Any]:
        """Returns the keys that `mixers` reads."""
        return {}

    def windows_json(self, windows: tuple[int | None, ...]) -> dict[str, Any]:
        """Returns the keys that `windows` reads.

        Raises:
          UnsupportedModelError: the family has no such windows.
        """
        if set(windows) != {None}:
            listed = ", ".join(str(window) for window in dict.fromkeys(windows))
            self.refuse("sees all positions in every layer", f"windows {listed}")
        return {}

    def one_window(self, windows: tuple[int | None, ...]) -> tuple[int | None, list[str]]:
        """Returns the window that some layers have, or None, and the type of each layer.

        Raises:
          UnsupportedModelError: there are several windows.
        """
        used = {*windows} - {None}
        if len(used) > 1:
            self.refuse("has at most one window", f"{windows}")
        return next(iter(used), None), [common.window_kind(window) for window in windows]

    def ropes_json(self, cfg: ModelConfig) -> dict[str, Any]:
        """Returns the keys that `ropes` reads."""
        return common.rope_json(cfg.mixers(Attention.kind)[0].rope)

    def refuse(self, has: str, got: str) -> None:
        """Raises `UnsupportedModelError`, for a config that the family cannot express."""
        raise UnsupportedModelError(
            f"model_type {self.model_type!r} {has}, got {got}; set a model_type that fits"
        )

    # --- files -----------------------------------------------------------------------------------

    def stored(self, cfg: ModelConfig, layer: Layer | None) -> Mapping[str, Place]:
        """See `Family.stored`: where the rows of the arrays say."""
        rows = top_rows(cfg) if layer is None else layer_rows(layer, cfg.hidden_size)
        return {name: row.stored for name, row in rows.items()}

    def zeros(self, cfg: ModelConfig, layer: Layer) -> Mapping[str, tuple[int, ...]]:
        """Lists the bias of the output projection, where `attention_bias` decides on biases.

        transformers gives the output projection a bias then, and checkpoints that were converted
        from a family without this bias hold zeros.
        """
        if self.qkv_bias is None and layer.mixer.qkv_bias:
            return {"self_attn.o_proj.bias": (cfg.hidden_size,)}
        return {}


# Fields of `ModelConfig` that are read for all families alike.
_NOT_OF_FAMILIES = (
    "model_type", "eos_token_ids", "bos_token_id", "pad_token_id", "mtp_num_layers", "mtp_concat",
    "mtp_target_hidden", "mtp_recycle", "generation", "run",
)  # fmt: skip


def _difference(one: Any, other: Any, name: str = "config") -> str:
    """Describes the first field of two configs that differs; empty if they are equal."""
    if one == other:
        return ""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        pairs = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(one, other, strict=True))]
    elif dataclasses.is_dataclass(one) and type(one) is type(other):
        names = [field.name for field in dataclasses.fields(one)]
        pairs = [(n, getattr(one, n), getattr(other, n)) for n in names]
    else:
        return f"{name} {one!r}, which would be read as {other!r}"
    return next(filter(None, (_difference(x, y, label) for label, x, y in pairs)))


@dataclasses.dataclass(frozen=True)
class SlidingFamily(DenseFamily):
    """A family whose layers have one window, but for those that see all positions.

    Attributes:
      period: every so many layers one sees all positions, where a file has no `layer_types`; 0:
        none does.
      period_key: key of the period; None: it has none.
      thetas: see `common.read_ropes`; empty: all layers have one rotary embedding.
    """

    period: int = 0
    period_key: str | None = None
    thetas: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def windows(self, keys: Keys, layers: int) -> tuple[int | None, ...]:
        window = keys.integer("sliding_window", None)
        period = keys.integer(self.period_key, self.period) if self.period_key else self.period
        full = [window is None or (period and (i + 1) % period == 0) for i in range(layers)]
        kinds = ["full_attention" if x else "sliding_attention" for x in full]
        return common.layer_windows(keys, layers, window, kinds=kinds)

    def ropes(self, keys: Keys, max_position: int, windows: Sequence[int | None]) -> Sequence[Rope]:
        if not self.thetas:
            return super().ropes(keys, max_position, windows)
        ropes = common.read_ropes(keys, max_position, self.thetas)
        return [ropes[common.window_kind(window)] for window in windows]

    def windows_json(self, windows: tuple[int | None, ...]) -> dict[str, Any]:
        window, kinds = self.one_window(windows)
        return {"sliding_window": window, "layer_types": kinds}

    def ropes_json(self, cfg: ModelConfig) -> dict[str, Any]:
        if not self.thetas:
            return super().ropes_json(cfg)
        ropes = {common.window_kind(x.mixer.window): x.mixer.rope for x in cfg.layers}
        raw = {kind: common.rope_json(ropes[kind]) for kind in self.thetas if kind in ropes}
        return {
            "rope_parameters": {kind: one["rope_parameters"] for kind, one in raw.items()},
            **{self.thetas[kind]: one["rope_theta"] for kind, one in raw.items()},
            "rope_scaling": raw.get([*self.thetas][-1], {}).get("rope_scaling"),
        }


# --- by flat numbers ------------------------------------------------------------------------------


def dense_config(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    rope_theta: float = 10_000.0,
    rope_scaling: Scaling | None = None,
    qkv_bias: bool = False,
    qk_norm: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    o_bias: bool = False,
    rms_norm_eps: float = 1e-6,
    **others: Any,
) -> ModelConfig:
    """Makes the config of a model whose layers are all alike.

    Arguments that are not listed are those of `Attention`, `Dense` and `Rope`.

    Args:
      vocab_size: size V of the vocabulary.
      hidden_size: width D.
      num_layers: number L of layers.
      others: further fields of `ModelConfig`.
    """
    rope = Rope(rope_theta, rope_scaling)
    mixer = Attention(
        num_heads, num_kv_heads, head_dim, rope, qkv_bias, qk_norm, rms_norm_eps, window, soft_cap,
        o_bias,
    )  # fmt: skip
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=(Layer(mixer, Dense(intermediate_size)),) * num_layers,
        rms_norm_eps=rms_norm_eps,
        **others,
    )
