"""What drafts in a plan is what drafts in a run, whatever head the policy or a path has."""

import jax
import jax.numpy as jnp
import pytest

from specjax.checkpoint.draft_files import save_draft_files
from specjax.checkpoint.store import Checkpointer
from specjax.checkpoint.weights import Head, describe, describe_head, head_shapes_of
from specjax.command_line import parse_config
from specjax.config import ModelConfig
from specjax.drafts.dflash import DFlashConfig, DFlashSource
from specjax.drafts.eagle3 import Eagle3Source
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params
from train.plan import programs
from train.schema import RLConfig

MODEL = dense_config(48, 16, 32, 2, 2, 1, 8, max_position=256)


def zeros(shapes):
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)


def run_with(source, path, cfg: ModelConfig = MODEL):
    """The directory of a run, whose checkpoint has a policy of zeros, and perhaps a head."""
    trees = {"policy": zeros(jax.eval_shape(lambda: init_params(cfg)))}
    about = None
    if source is not None:
        trees["draft"] = zeros(head_shapes_of(source))
        about = describe_head(Head(source, trees["draft"]))
    with Checkpointer(path / "checkpoints", 1) as checkpoints:
        checkpoints.save(1, trees, {"step": 1, **describe(cfg, None, about)}, True)
    return path


@pytest.fixture
def eagle3_run(tmp_path):
    return run_with(Eagle3Source.of(MODEL), tmp_path / "run")


@pytest.fixture
def dflash(tmp_path):
    network = dense_config(48, 16, 20, 1, 2, 1, 8, qk_norm=True, tie_embeddings=False)
    source = DFlashSource(DFlashConfig(network, 16, 48, mask_token=1, block=6, taps=(1,)))
    save_draft_files(tmp_path / "head", source, zeros(head_shapes_of(source)), "float32")
    return tmp_path / "head"


class Reached(Exception):
    """Holds what a plan would build its programs of."""


def planned(monkeypatch, *argv):
    """The settings and what drafts of a plan, before it builds any program."""

    def build(cfg, model, source, mesh, places):
        raise Reached(cfg, model, source)

    monkeypatch.setattr(programs, "build_programs", build)
    cfg, _ = parse_config(RLConfig, ["out=unused", *argv])
    with pytest.raises(Reached) as reached:
        programs.Shapes(cfg, jax.devices()[:1])
    return reached.value.args


@pytest.mark.parametrize("asked", [[], ["rollout.draft=checkpoint"]])
def test_the_eagle_3_head_of_a_run_is_planned_as_it_is_trained(eagle3_run, asked, monkeypatch):
    cfg, model, source = planned(monkeypatch, f"model={eagle3_run}", *asked)
    assert (cfg.rollout.draft, cfg.draft.mode) == ("checkpoint", "online")
    assert isinstance(source, Eagle3Source) and model.mtp_num_layers == 0


def test_a_dflash_head_is_planned_as_a_head_and_not_as_a_model(eagle3_run, dflash, monkeypatch):
    argv = f"model={eagle3_run}", f"rollout.draft={dflash}", "rollout.strategy=4_1_5"
    cfg, _, source = planned(monkeypatch, *argv)
    assert isinstance(source, DFlashSource) and cfg.draft.mode == "frozen"
