"""Chooses and loads the draft source that a config names: a head, a model, or n-grams."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from specjax.checked_json import CheckpointError
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.draft_files import find_draft, load_draft_files
from specjax.checkpoint.weights import (
    DRAFT,
    HEAD_SWITCHES,
    HUGGING_FACE,
    RUN,
    Head,
    cast_floats,
    config_in,
    fitted_to,
    float_dtype,
    head_shapes_of,
    holds_a_head,
    kind_in,
    layout_of,
    load_weights,
    metadata_of,
    placed,
    run_as,
    source_in,
)
from specjax.config import ModelConfig, RunConfig, SpecConfig, Strategy
from specjax.config.spec import (
    AUTO_DRAFT,
    CHECKPOINT_DRAFT,
    DRAFT_KINDS,
    DRAFT_WORDS,
    NGRAM_DRAFT,
    RANDOM_DRAFT,
)
from specjax.control import ControlConfig
from specjax.drafts.eagle3 import Eagle3Source
from specjax.drafts.model import ModelSource
from specjax.drafts.mtp import MTPSource, new_head
from specjax.engine.settings import require_speculation
from specjax.hub import ModelNotFoundError, find_model
from specjax.interfaces import Draft
from specjax.kernels import dispatch
from specjax.models.rows import param_axes
from specjax.models.transformer import Params, to_decode_layout
from specjax.parallel import sharding
from specjax.registry import DRAFTS
from specjax.spelling import SettingError, Spell, python
from specjax.weights import load_tokenizer, open_checkpoint, recognised
from specjax.weights.safetensors import CONFIG, HEAD_FILE


def source_of(cfg: ModelConfig, spec: SpecConfig) -> Draft:
    """The draft source that `spec` names, made from the model's config alone.

    `auto` is the head if the config has one, else n-grams.

    Raises:
      ValueError: `spec` names a path, which must be loaded (see `load_source`).
      SettingError: it names a class of the user's own that does not exist, or is no class.
    """
    own, name = spec.own_draft, spec.draft
    if own is not None:
        return own_class(own.name).of(cfg, spec)
    if name == AUTO_DRAFT:
        name = CHECKPOINT_DRAFT if cfg.mtp_num_layers else NGRAM_DRAFT
    if name not in DRAFT_WORDS:
        raise ValueError(
            f"the draft {name!r} has weights of its own; load it with "
            "specjax.engine.sources.load_source and give the engine its source, or use LLM"
        )
    kinds = {CHECKPOINT_DRAFT: "mtp", RANDOM_DRAFT: spec.draft_kind}
    return DRAFTS.find(kinds.get(name, name)).of(cfg, spec)


_PROTOCOL = ("of", "load", "begin", "step", "needs")  # of `specjax.interfaces.Draft`


def own_class(name: str) -> type[Draft]:
    """Imports a class of the user's own.

    Raises:
      SettingError: there is nothing at `name`, or it is no class of drafts.
    """
    try:
        found, problem = DRAFTS.find(name), ""
    except ValueError as error:
        found, problem = None, str(error)
    lacking = [x for x in _PROTOCOL if not hasattr(found, x)]
    if not problem and (lacking or not isinstance(found, type)):
        what = f"a class without {', '.join(lacking)}" if isinstance(found, type) else repr(found)
        problem = f"expected a class with the methods of specjax.interfaces.Draft, got {what}"
    if problem:
        raise SettingError(lambda spell: f"{spell('draft', name)}: {problem}")
    return found


class Drafting(NamedTuple):
    """The draft source and controller that will run, as `settle_draft` decided.

    Attributes:
      spec: how to speculate, with a strategy and a `draft` that is not `auto`; None: plain
        decoding.
      control: settings of the controller; None: always the strategy of `spec`.
      by_default: whether `auto` became n-grams because the checkpoint has no head.
      kind: class of what drafts; None: plain decoding.
      has_head: whether the checkpoint has a head.
    """

    spec: SpecConfig | None
    control: ControlConfig | None
    by_default: bool = False
    kind: type[Draft] | None = None
    has_head: bool = False

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The strategies that may be used."""
        if self.control is not None:
            return self.control.arms
        return (Strategy.OFF if self.spec is None else self.spec.resolve(),)

    @property
    def with_head(self) -> bool:
        """Whether a draft head drafts, and no model, n-grams or class of the user's own."""
        heads = (CHECKPOINT_DRAFT, RANDOM_DRAFT)
        if self.spec is None or self.kind is None:
            return False
        if self.spec.draft_path is not None:
            return not issubclass(self.kind, ModelSource)
        return self.spec.draft in heads

    def described(self, spell: Spell = python, always_drafts: bool = False) -> str:
        """A line for the user: what drafts, why, and which setting changes it.

        Args:
          spell: function that spells settings as the user types them.
          always_drafts: whether the program refuses plain decoding.
        """
        spec = self.spec
        if self.strategies == (Strategy.OFF,):
            return "draft: none, by plain decoding"
        known = CHECKPOINT_DRAFT if self.has_head else RANDOM_DRAFT
        others = [name for name in (known, NGRAM_DRAFT) if name != spec.draft]
        if spec.draft_path is None:
            others.append("DIR")
        ways = [spell("draft", name) for name in others]
        ways += [] if always_drafts else [spell("strategy", "off")]
        change = f"to change it: {', '.join(ways[:-1])}{', or ' if ways[1:] else ''}{ways[-1]}"
        how = f"always {self.strategies[0]}"
        if len(self.strategies) > 1:
            names = ", ".join(map(str, self.strategies))
            how = f"the controller {self.control.controller} chooses among {names}"
        why = ", for the checkpoint has no draft head" if self.by_default else ""
        return f"draft: {self.named()}{why}; {how}; {change}"

    def named(self) -> str:
        """What drafts, in words."""
        spec = self.spec
        if spec.draft_path is not None:
            return f"the {'head' if self.with_head else 'model'} {spec.draft}"
        kind = "" if spec.draft_kind == "mtp" else f" {spec.draft_kind}"
        words = {
            CHECKPOINT_DRAFT: "the checkpoint's head",
            RANDOM_DRAFT: f"a random{kind} head",
            NGRAM_DRAFT: "n-grams",
        }
        return words.get(spec.draft, spec.draft)


def head_class(head: Head | Params | None) -> type[Draft] | None:
    """The class that drafts with a checkpoint's head, see `load_source`; None: it has none."""
    if head is None:
        return None
    return type(head.source) if isinstance(head, Head) else MTPSource


def settle_draft(
    spec: SpecConfig | None,
    control: ControlConfig | Mapping[str, Any] | str | None,
    head: type[Draft] | None,
    may_stop: bool = True,
    target: ModelConfig | None = None,
    find: Callable[[str], Path] | None = None,
) -> Drafting:
    """Decides what `SpecConfig.draft` stands for.

    `auto` is the checkpoint's head, or else n-grams. Drafting may cost more time than it saves. So
    if the user chose neither a strategy nor a controller, the `goodput` controller chooses between
    the default strategy and `off` while running; with n-grams that the user did not name, between
    the given one and `off`. In `block` and `recursive` mode it does not, because there the tokens
    would depend on its choices.

    Args:
      spec: how to speculate; None: plain decoding.
      control: the controller, as `LLM` takes it.
      head: class of the draft head in the checkpoint; None: it has none.
      may_stop: whether a controller may choose `off`.
      target: config of the policy, see `kind_of`.
      find: function that returns the path of a draft that `spec` names, by default `find_draft_at`.

    Raises:
      ValueError: a controller is given and `spec` is plain decoding.
      SettingError: `spec` names a path or id that does not exist.
      CheckpointError: the files there are those of no draft.
    """
    if control is not None:
        control = ControlConfig.of(control)
        require_speculation(spec)
    settled = Drafting(spec, control)
    if spec is None or spec.is_off:
        return settled
    by_default, is_open = spec.draft == AUTO_DRAFT and head is None, spec.strategy is None
    spec = dataclasses.replace(spec, strategy=spec.own_strategy)
    if spec.draft == AUTO_DRAFT:
        spec = dataclasses.replace(spec, draft=NGRAM_DRAFT if by_default else CHECKPOINT_DRAFT)
    if control is None and (by_default or is_open) and spec.by_token and may_stop:
        control = ControlConfig(strategies=(Strategy.OFF, spec.strategy))
    kind = _class_of(spec, head, target, find or find_draft_at)
    return Drafting(spec, control, by_default, kind, head is not None)


def _class_of(
    spec: SpecConfig,
    head: type[Draft] | None,
    target: ModelConfig | None,
    find: Callable[[str], Path],
) -> type[Draft]:
    if spec.draft_path is not None:
        path = find(spec.draft_path)
        kind = kind_of(path, target)
        if spec.draft_overrides:
            _require_overridable(spec.draft_path, path, kind)
        return kind
    if spec.own_draft is not None:
        return own_class(spec.own_draft.name)
    if spec.draft == CHECKPOINT_DRAFT:
        return head or MTPSource  # a head that is missing is refused where it would be loaded
    return DRAFTS.find({RANDOM_DRAFT: spec.draft_kind, NGRAM_DRAFT: "ngram"}[spec.draft])


def kind_of(path: Path, target: ModelConfig | None = None) -> type[Draft]:
    """Returns the class that drafts from files, which the files decide.

    Files of a policy with an MTP head are a head, unless its width is not the target's: then they
    are a model, which drafts without that head.

    Args:
      path: a file or directory.
      target: config of the policy that it drafts for; None: unknown.

    Raises:
      CheckpointError, UnsupportedModelError: the files are those of no draft.
    """
    path = _head_dir(path, target)
    if layout_of(path) != HUGGING_FACE:
        return kind_in(path, metadata_of(path))
    found = find_draft(path)
    if found is not None:
        _require_config(path)
        return found
    if path.is_file():
        _refuse_one_file(path)
        return MTPSource if path.suffix == ".safetensors" else ModelSource
    if not recognised(path):
        return MTPSource
    if (path / HEAD_FILE).exists() and not (path / CONFIG).exists():
        return MTPSource
    cfg = hf.read_config(path)
    fits = target is None or cfg.hidden_size == target.hidden_size
    return MTPSource if cfg.mtp_num_layers and fits else ModelSource


def _head_dir(path: Path, target: ModelConfig | None) -> Path:
    """The directory of the head in that of a policy, if it has one there, else the path itself.

    A policy of another width than the target's is a model, which drafts without its head.
    """
    if layout_of(path) != HUGGING_FACE or not path.is_dir() or not holds_a_head(path):
        return path
    fits = target is None or hf.read_config(path).hidden_size == target.hidden_size
    return path / DRAFT if fits else path


def _require_config(path: Path) -> None:
    if not (path / CONFIG).exists():
        raise CheckpointError(
            f"{path} holds the weights of a draft head and no {CONFIG}, which says what the head "
            f"computes; fetch {CONFIG} of the head to it"
        )


def _refuse_one_file(path: Path) -> None:
    """Raises `CheckpointError` for a file of a head that is read from its directory."""
    found = None
    if path.suffix != ".gguf":
        with contextlib.suppress(CheckpointError):
            found = find_draft(path.parent)
    if found is not None:
        raise CheckpointError(
            f"{path} is one of the files of a draft head, which is read from its directory; name "
            f"the directory {path.parent}"
        )


def takes_overrides(path: Path, kind: type[Draft]) -> bool:
    """Whether `SpecConfig.draft_overrides` may change what files say.

    Args:
      path: a file or directory of a draft.
      kind: what `kind_of` returns of it.
    """
    return layout_of(path) == HUGGING_FACE and kind not in (MTPSource, ModelSource)


def _require_overridable(name: str, path: Path, kind: type[Draft]) -> None:
    if takes_overrides(path, kind):
        return
    what = {MTPSource: "an MTP head", ModelSource: "a model"}.get(kind, "a head")
    if layout_of(path) != HUGGING_FACE:
        what += " in a checkpoint of specjax"
    raise SettingError(
        lambda spell: (
            f"{spell('draft_overrides')} is about an EAGLE-3 head in files, a directory with "
            f"config.json, and {spell('draft', name)} is {what}; leave it out"
        )
    )


def with_kernel(
    source: Draft | None, settle: Callable[..., ModelConfig], what: str = "attention"
) -> Draft | None:
    """Chooses the kernels of a draft source's network, if it has one.

    Args:
      source: the draft source; None: there is none.
      settle: function that chooses, `specjax.kernels.dispatch.settle` or
        `specjax.weights.matrix.settle`.
      what: name of the kernels in its messages.
    """
    if source is None or source.network is None:
        return source
    return source.with_network(settle(source.network, whose=f"the draft's {what}"))


def page_multiple(cfg: ModelConfig, source: Draft | None) -> int:
    """A number of which the page size must be a multiple, for the kernels of target and draft."""
    drafts = None if source is None else source.network
    cfgs = [cfg] if drafts is None else [cfg, drafts]
    return max(dispatch.page_multiple(each.run.attention) for each in cfgs)


def trains(source: Draft | type[Draft]) -> bool:
    """Returns whether a draft can be trained: its class has an own `init` and an own `unroll`."""
    cls = source if isinstance(source, type) else type(source)
    return cls.init is not Draft.init and cls.unroll is not Draft.unroll


def load_source(
    cfg: ModelConfig,
    spec: SpecConfig,
    head: Head | Params | None,
    tokenizer,
    mesh: jax.sharding.Mesh | None,
    policy: Params | None = None,
) -> tuple[ModelConfig, Draft, Params]:
    """Loads the draft source that `spec` names.

    Args:
      cfg: config of the target.
      spec: how to speculate.
      head: the checkpoint's head, or the parameters of an MTP head; None: it has none.
      tokenizer: tokenizer of the target, which a draft model must share; None: there is none.
      mesh: mesh of the target.
      policy: parameters of the target, of which a new head starts with copies, see
        `Eagle3Source.new` and `specjax.drafts.mtp.new_head`; None: all of its parameters are
        random.

    Returns:
      the target's config (with the switches of an MTP head), the source, and its parameters.

    Raises:
      ValueError: the checkpoint's head is asked for and there is none, or there is nothing at the
        given path; see also `load_draft_model`.
      CheckpointError: as in `load_head`.
    """
    own = spec.own_draft
    if own is not None or spec.draft == NGRAM_DRAFT:
        source = source_of(cfg, spec)
        files = own and own.path and open_checkpoint(find_draft_at(own.path))
        return cfg, source, source.load(files or None)
    if spec.draft_path is not None:
        path, overrides = find_draft_at(spec.draft_path), dict(spec.draft_overrides)
        if kind_of(path, cfg) is ModelSource:
            if overrides:
                _require_overridable(spec.draft_path, path, ModelSource)
            dtype = cfg.run.compute_dtype
            source, params = load_draft_model(spec.draft_path, cfg, tokenizer, dtype, mesh)
            return cfg, source, params
        cfg, found = load_head(spec.draft_path, cfg, mesh, overrides)
        return cfg, *found
    if spec.draft == RANDOM_DRAFT:
        cfg, source = new_source(cfg, spec)
        if isinstance(source, Eagle3Source):
            source, params = Eagle3Source.new(cfg, policy=policy, seed=spec.head_seed)
        elif isinstance(source, MTPSource):
            params = new_head(cfg, policy, spec.head_seed)
        else:
            params = source.init(spec.head_seed)
        return cfg, *placed(Head(source, params), mesh)
    if head is None and spec.draft == AUTO_DRAFT:
        return load_source(cfg, dataclasses.replace(spec, draft=NGRAM_DRAFT), None, None, mesh)
    if head is None:
        raise SettingError(
            lambda spell: (
                f"the checkpoint has no draft head, and {spell('draft', spec.draft)} asks for it; "
                f"use {spell('draft', 'auto')} (n-grams, where there is no head), "
                f"{spell('draft', 'ngram')}, {spell('draft', 'DIR')}, {spell('draft', 'random')} "
                f"to train one online, or {spell('strategy', 'off')}"
            )
        )
    if not isinstance(head, Head):
        head = Head(MTPSource(cfg), head)
    return cfg, run_as(head.source, cfg.run), head.params


def new_source(cfg: ModelConfig, spec: SpecConfig) -> tuple[ModelConfig, Draft]:
    """Makes the source of a new head; returns the target's config with its switches, and it."""
    if spec.draft_kind == "mtp":
        cfg = _with_a_head(cfg)
    return cfg, DRAFTS.find(spec.draft_kind).of(cfg, spec)


def require_same_draft(new: Draft, served: Draft) -> None:
    """Refuses a head in place of another one, unless both compute the same.

    Raises:
      ValueError: they are of different kinds, or differ in a setting; the message names it.
    """
    if type(new) is not type(served):
        raise ValueError(
            f"it is a head for {type(new).__name__}, and {type(served).__name__} drafts; give a "
            "head of the same kind, or start again with this one as the draft"
        )
    new, served = (run_as(one, RunConfig()) for one in (new, served))
    if dataclasses.is_dataclass(new):
        for field in dataclasses.fields(new):
            name, got, expected = field.name, getattr(new, field.name), getattr(served, field.name)
            # How its files are laid out is no matter, and an MTP head has its target's config.
            if not field.compare or name in ("layout", "writes") or isinstance(new, MTPSource):
                continue
            if got != expected:
                name, got, expected = first_difference(name, got, expected)
                raise ValueError(
                    f"its {name} is {got!r}, that of the draft is {expected!r}; give a head that "
                    "computes the same, or start again with this one as the draft"
                )


def first_difference(name: str, one: Any, other: Any) -> tuple[str, Any, Any]:
    """The path of the first part in which two configs differ, and both parts."""
    if type(one) is not type(other):
        return name, one, other
    parts = []
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        parts = [(n, getattr(one, n), getattr(other, n)) for n in names]
    elif name.endswith("layers") and len(one) != len(other):
        return f"number of {name}", len(one), len(other)
    elif name.endswith("layers"):
        parts = [(i, *both) for i, both in enumerate(zip(one, other, strict=True))]
    for part, mine, theirs in parts:
        if mine != theirs:
            return first_difference(f"{name}.{part}", mine, theirs)
    return name, one, other


def check_vocabulary(
    draft_cfg: ModelConfig,
    target_cfg: ModelConfig,
    draft_ids: dict[str, int] | None,
    target_ids: dict[str, int] | None,
) -> None:
    """Refuses a draft model whose token ids differ in meaning from the target's.

    Args:
      draft_cfg: config of the draft model.
      target_cfg: config of the target.
      draft_ids: id of each token by the draft model's tokenizer; None: it has none.
      target_ids: id of each token by the target's tokenizer; None: it has none.

    Raises:
      ValueError: an id stands for two different tokens; or the vocabulary sizes differ and a
        tokenizer is missing. (Models of one family often pad their embeddings to different sizes,
        and only a tokenizer tells padding from tokens.)
    """
    sizes = draft_cfg.vocab_size, target_cfg.vocab_size
    if draft_ids is None or target_ids is None:
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the draft model has a vocabulary of {sizes[0]}, the target of {sizes[1]}; "
                "expected the same, or a tokenizer beside each to show that the ids they share "
                "mean the same; use a draft model of the target's family"
            )
        return
    theirs = {index: token for token, index in draft_ids.items()}
    clashes = sorted(
        (index, token) for token, index in target_ids.items() if theirs.get(index, token) != token
    )
    if clashes:
        index, token = clashes[0]
        raise ValueError(
            f"the draft model's tokenizer differs from the target's in {len(clashes)} ids: id "
            f"{index} is {theirs[index]!r}, expected {token!r}; use a draft model of the target's "
            "family"
        )


def load_draft_model(
    path: str | Path,
    target_cfg: ModelConfig,
    target_tokenizer=None,
    dtype: str = "float32",
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[ModelSource, Params]:
    """Loads a Hugging Face directory or id as a draft model; a draft head in it is ignored.

    Args:
      path: directory or id.
      target_cfg: config of the target.
      target_tokenizer: tokenizer to compare with the directory's; None: only the vocabulary sizes
        are compared.
      dtype: dtype of parameters and arithmetic.
      mesh: mesh to shard over, that of the target.

    Returns:
      the source, and its parameters in their decode layout.

    Raises:
      ValueError: the vocabularies differ, see `check_vocabulary`.
      CheckpointError: the directory cannot be loaded, see `hf.load_checkpoint`.
    """
    path = find_model(path)
    draft_cfg = hf.read_config(path)
    tokenizer = load_tokenizer(path, required=False)
    ids = [None if t is None else t.get_vocab() for t in (tokenizer, target_tokenizer)]
    check_vocabulary(draft_cfg, target_cfg, *ids)
    cfg, params, _ = hf.load_checkpoint(path, dtype, mesh)
    source = model_source(cfg, target_cfg, mesh)
    params = jax.jit(to_decode_layout, static_argnums=1)(params, source.cfg)
    if mesh is not None:
        params = jax.device_put(params, sharding.param_shardings(mesh, params, param_axes(cfg)))
    return source, params


def model_source(
    cfg: ModelConfig, target_cfg: ModelConfig, mesh: jax.sharding.Mesh | None
) -> ModelSource:
    """The draft source that runs a model of this config."""
    return ModelSource(laid_out(cfg, mesh), target_cfg.vocab_size)


def laid_out(cfg: ModelConfig, mesh: jax.sharding.Mesh | None) -> ModelConfig:
    """The config with the layout of decoding weights on a mesh: fused weights cannot be split."""
    return cfg.running(fused=mesh is None or mesh.size == 1)


def find_draft_at(name: str) -> Path:
    """Finds the file or directory of a draft.

    Args:
      name: a path, or the Hugging Face id of a head or a model.

    Raises:
      SettingError: there is no such file or id.
      CheckpointError: the id cannot be downloaded.
    """
    try:
        if name.strip():  # an empty path is the working directory
            return find_model(name)
    except ModelNotFoundError:
        pass
    raise SettingError(
        lambda spell: (
            f"{spell('draft')}: expected {', '.join(DRAFT_WORDS)}, the directory or Hugging "
            "Face id of a head or a model, or your own class as module:attribute[:PATH]; got "
            f"{name!r}" + _hint(name.strip().lower(), spell)
        )
    )


# What users may write for a setting of another name.
_OTHER_WORDS = {
    **dict.fromkeys(("head",), ("draft", CHECKPOINT_DRAFT)),
    **dict.fromkeys(("model",), ("draft", "DIR")),
    **dict.fromkeys(("none", "off", "no", "false"), ("strategy", "off")),
    **dict.fromkeys(("ngrams", "n-gram", "prompt_lookup", "history"), ("draft", NGRAM_DRAFT)),
    **dict.fromkeys(("new", "init"), ("draft", RANDOM_DRAFT)),
}


def _hint(name: str, spell: Spell) -> str:
    """The end of a message: what a wrong word, in lower case, may have been meant to be."""
    if name in DRAFT_KINDS:
        kind = f" and {spell('draft_kind', name)}" if name != DRAFT_KINDS[0] else ""
        return (
            f"; name the directory of the {name} head, or make a new one with "
            f"{spell('draft', RANDOM_DRAFT)}{kind}"
        )
    close = difflib.get_close_matches(name, DRAFT_WORDS, 1)
    meant = _OTHER_WORDS.get(name) or (("draft", close[0]) if close else None)
    return f"; did you mean {spell(*meant)}?" if meant else ""


def load_head(
    name: str,
    model: ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[ModelConfig, Head]:
    """Loads a draft head that is stored apart from its policy.

    Args:
      name: a file or directory of safetensors, a head that was saved alone (`save_draft`), or the
        directory of a training run, of which the newest checkpoint is loaded; see `find_draft_at`.
      model: config of the policy, with or without a head of its own.
      mesh: mesh to place the head on.
      overrides: settings of an EAGLE-3 head in files in place of those of its config.json, see
        `SpecConfig.draft_overrides`.

    Returns:
      the policy's config with the switches of an MTP head, and the head, with parameters in
      `model.run.param_dtype`.

    Raises:
      SettingError: there is no such file or id, or it takes no overrides.
      CheckpointError: the file is damaged, holds no head, or does not fit the policy.
    """
    from specjax.checkpoint.store import load_draft  # Orbax takes long to import

    path = _head_dir(find_draft_at(name), model)
    layout, kind = layout_of(path), kind_of(path, model)
    if overrides:
        _require_overridable(name, path, kind)
    if layout == HUGGING_FACE and kind is not MTPSource:
        return model, Head(*load_draft_files(path, model, mesh, overrides))
    if layout == HUGGING_FACE:
        model = _with_a_head(model)
        return model, Head(MTPSource(model), hf.load_head(path, model, mesh))
    saved, meta = load_weights(path, head_alone=True)[1:] if layout == RUN else load_draft(path)
    if saved is None:
        raise CheckpointError(f"{path} holds no draft head; expected one")
    model, source = _source_saved(path, model, meta)
    if layout == RUN:
        wanted = head_shapes_of(source)
        params = fitted_to(wanted, saved, f"the draft head in {path}")
    else:
        stored = run_as(source, model.running(param_dtype=float_dtype(saved)).run)
        del saved
        wanted = head_shapes_of(stored)
        if mesh is not None:
            wanted = jax.tree.map(
                lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
                wanted,
                sharding.param_shardings(mesh, wanted, source.axes()),
            )
        params = load_draft(path, wanted)[0]
    return model, placed(Head(source, cast_floats(params, model.run.param_dtype)), mesh)


def head_shapes(
    name: str, model: ModelConfig, overrides: Mapping[str, Any] | None = None
) -> tuple[ModelConfig, Head]:
    """Returns what `load_head` returns, with shapes for arrays; it reads no weights.

    Raises:
      SettingError, CheckpointError: as in `load_head`.
    """
    path = _head_dir(find_draft_at(name), model)
    layout, kind = layout_of(path), kind_of(path, model)
    if overrides:
        _require_overridable(name, path, kind)
    if layout == HUGGING_FACE and kind is not MTPSource:
        reader = open_checkpoint(path)
        source = kind.read(path / CONFIG, reader.config(), reader.tensors(), model, overrides)
    elif layout == HUGGING_FACE:
        model = _with_a_head(model)
        source = MTPSource(model)
    else:
        model, source = _source_saved(path, model, metadata_of(path))
    return model, Head(source, head_shapes_of(source))


def _source_saved(
    path: Path, model: ModelConfig, meta: Mapping[str, Any]
) -> tuple[ModelConfig, Draft]:
    """Returns the policy's config and the source of a head with these metadata."""
    source = source_in(path, meta, model)
    if source is None:
        model = _with_a_head(_with_switches(path, model, meta))
        source = MTPSource(model)
    return model, source


def _with_a_head(model: ModelConfig) -> ModelConfig:
    """The config with at least one MTP module."""
    return model.replace(mtp_num_layers=max(model.mtp_num_layers, 1))


def _with_switches(path: Path, model: ModelConfig, meta: dict) -> ModelConfig:
    """The policy's config with the switches in the metadata of a saved head."""
    switches = vars(config_in(path, meta)) if "config" in meta else meta
    return model.replace(**{n: switches[n] for n in HEAD_SWITCHES if n in switches})
