"""Keywords that a constructor does not have are answered with the one that is meant."""

import copy
import dataclasses
import inspect
import pickle

import pytest
from tiny import tiny_config

from specjax import LLM, ControlConfig, EngineConfig, RunConfig, SamplingParams, SpecConfig
from specjax.control.goodput import GoodputConfig


@pytest.mark.parametrize(
    ("build", "keyword", "meant"),
    [
        (SamplingParams, "max_new_tokens", "max_tokens"),
        (LLM, "max_model_len", "max_len"), (LLM, "tensor_parallel_size", "tp"),
        (LLM, "speculative_config", "spec"), (SpecConfig, "stratgy", "strategy"),
        (EngineConfig, "block_size", "page_size"), (ControlConfig, "control", "controller"),
        (GoodputConfig, "hysterisis", "hysteresis"), (RunConfig, "compute_type", "compute_dtype"),
    ],
)  # fmt: skip
def test_an_unknown_keyword_names_the_parameter_here(build, keyword, meant):
    given = ("/nowhere",) if build is LLM else ()
    said = f"{build.__name__} has no parameter {keyword}; did you mean '{meant}'\\?"
    with pytest.raises(TypeError, match=said):
        build(*given, **{keyword: 3})
    with pytest.raises(TypeError, match="has no parameter xyzzy; there are "):
        build(*given, xyzzy=1)


@pytest.mark.parametrize(
    ("build", "keyword", "owner"),
    [(LLM, "page_size", "EngineConfig"), (ControlConfig, "ngram_max", "SpecConfig has it")],
)
def test_a_keyword_of_another_class_names_that(build, keyword, owner):
    with pytest.raises(TypeError, match=f"has no parameter {keyword}; {owner}"):
        build(**{keyword: 3})


INSTANCES = [
    SamplingParams(seed=3), SpecConfig("off", tau=0.5), EngineConfig(page_size=64),
    ControlConfig(strategies=["off"]), tiny_config(64),
]  # fmt: skip


@pytest.mark.parametrize("one", INSTANCES, ids=lambda one: type(one).__name__)
def test_frozen_classes_are_what_they_were(one):
    fields = [field.name for field in dataclasses.fields(one)]
    assert list(inspect.signature(type(one)).parameters) == fields
    values = {name: getattr(one, name) for name in fields}
    for same in (
        dataclasses.replace(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one)),
        type(one)(**values), type(one)(*values.values()),
    ):  # fmt: skip
        assert same == one and repr(same) == repr(one)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(one, fields[0], None)
    with pytest.raises(TypeError, match=f"{type(one).__name__} has no parameter xyzzy"):
        dataclasses.replace(one, xyzzy=1)
