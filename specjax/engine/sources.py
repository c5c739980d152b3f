"""Chooses and loads the draft source that a config names: a head, a model, or n-grams."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from specjax.checkpoint.draft_files import FilesAt
from specjax.checkpoint.weights import (
    Head,
    class_in_policy,
    kind_of,
    placed,
    read_draft,
    run_as,
    source_of_policy,
)
from specjax.config import ModelConfig, RunConfig, SpecConfig, Strategy
from specjax.config.spec import (
    AUTO_DRAFT,
    CHECKPOINT_DRAFT,
    DRAFT_WORDS,
    NGRAM_DRAFT,
    RANDOM_DRAFT,
)
from specjax.control import ControlConfig
from specjax.drafts.head import HeadSource
from specjax.engine.settings import require_speculation
from specjax.hub import ModelNotFoundError, find_model
from specjax.interfaces import Draft
from specjax.models.transformer import Params
from specjax.registry import DRAFTS
from specjax.spelling import nearest


def source_of(cfg: ModelConfig, spec: SpecConfig) -> Draft:
    """The draft source that `spec` names, made from the model's config alone.

    `auto` is the head if the config has one, else n-grams.

    Raises:
      ValueError: `spec` names a path, which must be loaded (see `load_source`), or a class of the
        user's own that does not exist, or is no class.
    """
    own_draft, name = spec.own_draft, spec.draft
    if own_draft is not None:
        return own_class(own_draft.name).of(cfg, spec)
    if name == AUTO_DRAFT:
        name = NGRAM_DRAFT if source_of_policy(cfg) is None else CHECKPOINT_DRAFT
    if name not in DRAFT_WORDS:
        raise ValueError(
            f"the draft {name!r} has weights of its own; give the engine its source, or use LLM"
        )
    return _class_of_word(name, spec).of(cfg, spec)


def _class_of_word(name: str, spec: SpecConfig) -> type[Draft]:
    """Returns the class that a word stands for."""
    if name == CHECKPOINT_DRAFT:
        return class_in_policy()
    return DRAFTS.find(spec.draft_kind if name == RANDOM_DRAFT else name)


def own_class(name: str) -> type[Draft]:
    """Imports a class of the user's own.

    Raises:
      ValueError: there is nothing at `name`.
    """
    try:
        kind = DRAFTS.find(name)
        if not hasattr(kind, "begin"):
            raise ValueError(f"expected a class as specjax.interfaces.Draft, got {kind!r}")
        return kind
    except ValueError as error:
        raise ValueError(f"draft={name}: {error}") from error


class Drafting(NamedTuple):
    """The draft source and controller that will run, as `settle_draft` decided.

    Attributes:
      spec: how to speculate, with a strategy and a `draft` that is not `auto`; None: plain
        decoding.
      control: settings of the controller; None: always the strategy of `spec`.
      by_default: whether `auto` became n-grams because the checkpoint has no head.
      kind: class of what drafts; None: plain decoding.
    """

    spec: SpecConfig | None
    control: ControlConfig | None
    by_default: bool = False
    kind: type[Draft] | None = None

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The strategies that may be used."""
        if self.control is not None:
            return self.control.arms
        return (Strategy.OFF if self.spec is None else self.spec.resolve(),)

    @property
    def with_head(self) -> bool:
        """Whether a draft head drafts, and no model, n-grams or class of the user's own."""
        is_ours = self.spec is not None and self.spec.own_draft is None
        return is_ours and self.kind is not None and issubclass(self.kind, HeadSource)

    def described(self) -> str:
        """A line for the user: what drafts, and why."""
        if self.strategies == (Strategy.OFF,):
            return "draft: none, by plain decoding"
        how = f"always {self.strategies[0]}"
        if len(self.strategies) > 1:
            names = ", ".join(map(str, self.strategies))
            how = f"the controller {self.control.controller} chooses among {names}"
        why = ", for the checkpoint has no draft head" if self.by_default else ""
        return f"draft: {self.named()}{why}; {how}"

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
    return type(head.source) if isinstance(head, Head) else class_in_policy()


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
      ValueError: `spec` names a path or id that does not exist.
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
    if spec.draft_path is not None:
        kind = kind_of((find or find_draft_at)(spec.draft_path), target)
    elif spec.own_draft is not None:
        kind = own_class(spec.own_draft.name)
    elif head is not None and spec.draft == CHECKPOINT_DRAFT:
        kind = head
    else:  # a head that is missing is refused where it would be loaded
        kind = _class_of_word(spec.draft, spec)
    return Drafting(spec, control, by_default, kind)


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
      head: the checkpoint's head, or the parameters of one that `cfg` describes; None: it has none.
      tokenizer: tokenizer of the target, which a draft model must share; None: there is none.
      mesh: mesh of the target.
      policy: parameters of the target, of which a new head starts with copies, see `Draft.new`;
        None: all of its parameters are random.

    Returns:
      the target's config (with what it says of a new head), the source, and its parameters.

    Raises:
      ValueError: the checkpoint's head is asked for and there is none, or there is nothing at the
        given path.
      CheckpointError: as in `read_draft`.
    """
    own_draft, name = spec.own_draft, spec.draft
    if name == AUTO_DRAFT:
        name = NGRAM_DRAFT if head is None else CHECKPOINT_DRAFT
    if own_draft is not None or name == NGRAM_DRAFT:
        source = source_of(cfg, dataclasses.replace(spec, draft=name))
        files = FilesAt(find_draft_at(own_draft.path)) if own_draft and own_draft.path else None
        return cfg, source, source.load(files)
    if spec.draft_path is not None:
        head_read = read_draft(find_draft_at(spec.draft_path), cfg, mesh, tokenizer)
    elif name == RANDOM_DRAFT:
        kind = _class_of_word(name, spec)
        head_read = placed(Head(*kind.new(cfg, policy=policy, seed=spec.head_seed)), mesh)
    elif head is None:
        raise ValueError(
            f"the checkpoint has no draft head, and draft={spec.draft} asks for it; use ngram, "
            "a path, draft=random to train one online, or strategy=off"
        )
    else:
        head_read = head if isinstance(head, Head) else Head(head_class(head).of(cfg, spec), head)
        head_read = head_read._replace(source=run_as(head_read.source, cfg.run))
    return head_read.source.target(cfg), *head_read


def require_same_draft(new: Draft, served: Draft) -> None:
    """Refuses a head in place of another one, unless both compute the same.

    Raises:
      ValueError: they are of different kinds, or differ in a setting; the message names it.
    """
    kinds = type(new).__name__, type(served).__name__
    if kinds[0] != kinds[1]:
        raise ValueError(f"it is a head for {kinds[0]}, and {kinds[1]} drafts")
    if new.in_policy or not dataclasses.is_dataclass(new):
        return  # the config of a policy describes the head, too
    # What follows from the engine is no difference: dtypes, and the longest sequence.
    new, served = (run_as(one, RunConfig()).for_length(1) for one in (new, served))
    if new != served:
        names = [field.name for field in dataclasses.fields(new) if field.compare]
        name, got, expected = differing_setting(new, served, names)
        raise ValueError(
            f"its {name} is {got!r}, that of the draft is {expected!r}; start again with it"
        )


def differing_setting(one: Any, other: Any, names: Collection[str]) -> tuple[str, Any, Any]:
    """The dotted name of the first setting, in some fields of two configs, and both values."""
    settings = []
    for config in (one, other):
        tree = {name: v for name, v in dataclasses.asdict(config).items() if name in names}
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None)
        name_of = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
        settings.append({name_of(path): value for path, value in leaves})
    mine, theirs = settings
    name = next((n for n in mine | theirs if mine.get(n) != theirs.get(n)), "kind of layer")
    return name, mine.get(name), theirs.get(name)


def find_draft_at(name: str) -> Path:
    """Finds the file or directory of a draft.

    Args:
      name: a path, or the Hugging Face id of a head or a model.

    Raises:
      ValueError: there is no such file or id.
      CheckpointError: the id cannot be downloaded.
    """
    try:
        if name.strip():  # an empty path is the working directory
            return find_model(name)
    except ModelNotFoundError:
        pass
    raise ValueError(
        f"draft: expected {', '.join(DRAFT_WORDS)}, the directory or id of a head or a model, or "
        f"module:attribute[:PATH]; got {name!r}{nearest(name.lower(), DRAFT_WORDS)} (a new head is "
        "draft=random with draft_kind=mtp or eagle3; strategy=off drafts nothing)"
    )


def load_head(
    name: str,
    model: ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
    weights: bool = True,
) -> tuple[ModelConfig, Head]:
    """Loads a draft that is stored apart from its policy, by its path or id.

    Args:
      name: path or id, see `find_draft_at`.
      model: config of the policy, with or without a head of its own.
      mesh, weights: see `read_draft`.

    Returns:
      the policy's config with what it says of the head, and the head.

    Raises:
      ValueError: there is no such file or id.
      CheckpointError: as in `read_draft`.
    """
    head = read_draft(find_draft_at(name), model, mesh, weights=weights)
    return head.source.target(model), head
