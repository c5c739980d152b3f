"""`train.sft` makes a policy and a head from nothing, or goes on with them."""

import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run

from bench.programs import change_dense
from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.store import Checkpointer
from specjax.drafts.mtp import init_head_params, weight_axes
from specjax.models.rows import matrix_names
from specjax.models.transformer import init_params
from train import sft
from train.loss.optim import OptimConfig, decays
from train.run.files import read_metrics
from train.schema import SFTConfig

SETTINGS = {
    "steps": 60,
    "draft_steps": 40,
    "vocab_size": 272,
    "tokenizer_texts": 200,
    "log_every": 5,
    "data.max_terms": 3,
    "model.hidden_size": 32,
    "model.intermediate_size": 64,
    "model.num_layers": 1,
    "model.num_heads": 4,
    "model.head_dim": 8,
    "model.max_position": 256,
    "packing.row_length": 64,
    "packing.rows": 4,
    "optim.lr": 1e-2,
    "optim.warmup_steps": 0,
    "draft.optim.lr": 1e-2,
    "draft.optim.warmup_steps": 0,
    "draft.unroll_steps": 2,
    "checkpoint.every": 30,
    "checkpoint.keep_last": 3,
}


def arguments(out, **changes) -> list[str]:
    return tiny_run.with_effect(SFTConfig, {**SETTINGS, "out": out, **changes})


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Runs with the same settings take the updates of the first of them."""
    known, run, draft = {}, sft.SFTTrainer.__init__, sft.DraftTrainer.__init__

    def begin(self, cfg, *arguments, **more):
        run(self, cfg, *arguments, **more)
        key = str((self.model, cfg.optim, cfg.mesh, cfg.attention))
        self.policy = known.setdefault(key, self.policy)

    def begin_head(self, model, settings, *arguments, **more):
        draft(self, model, settings, *arguments, **more)
        self._update = known.setdefault(str((model, settings, self.mesh)), self._update)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft.SFTTrainer, "__init__", begin)
        patch.setattr(sft.DraftTrainer, "__init__", begin_head)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("sft") / "run"
    sft.main(arguments(out))
    return out


def series(run, name) -> list[float]:
    return [r[name] for r in read_metrics(run) if name in r]


def test_the_policy_learns_and_then_its_head(run):
    losses = series(run, "train/loss")
    assert losses[0] < math.log(272) and losses[-1] < 0.6 * losses[0]
    assert losses[-1] < 2.5
    for name in ("train/mtp_overlap_depth_1", "train/mtp_overlap_depth_2"):
        overlap = series(run, name)
        assert overlap[-1] > overlap[0] + 0.05 and overlap[-1] < 1
    assert [r["step"] for r in read_metrics(run)] == list(range(5, 101, 5))
    assert (run / "checkpoints" / "100").is_dir()


@pytest.mark.slow
def test_the_export_generates_with_its_own_tokenizer_and_head(run):
    llm = LLM(run / "hf", SpecConfig("2_1_3"), max_batch=1, max_len=64)
    assert llm.cfg.mtp_num_layers == 1
    params = SamplingParams(max_tokens=32, n=4, seed=0)
    samples = llm.generate(["4+17+9=", "8+5="], params)[0].samples
    assert all(s.text and s.finish_reason in ("stop", "length") for s in samples)
    assert llm.totals.accept_length > 1.3, "the trained head is of no use"


def test_init_continues_a_policy_with_its_tokenizer_and_head(run, tmp_path):
    changes = {"init": run / "hf", "steps": 5, "draft_steps": 5, "log_every": 1}
    sft.main(arguments(tmp_path / "more", **changes))
    assert series(tmp_path / "more", "train/loss")[0] < 1.2 * series(run, "train/loss")[-1]
    overlap = "train/mtp_overlap_depth_1"
    assert series(tmp_path / "more", overlap)[0] > series(run, overlap)[0]
    tokenizers = [(p / "hf" / "tokenizer.json").read_text() for p in (run, tmp_path / "more")]
    assert tokenizers[0] == tokenizers[1]
    before, after = (hf.load_checkpoint(p / "hf")[1]["embed"] for p in (run, tmp_path / "more"))
    assert not np.array_equal(np.asarray(before), np.asarray(after))


def test_a_directory_with_checkpoints_is_not_trained_over(run, capsys):
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="holds checkpoints of an earlier run"):
        sft.main(arguments(run))
    assert (run / "metrics.jsonl").read_bytes() == before


# --- resuming -------------------------------------------------------------------------------------


def learned(run) -> list[dict]:
    """The records of a run without what the clock decides."""
    clock = ("wall_time", "train/tokens_per_sec")
    return [{k: v for k, v in r.items() if k not in clock} for r in read_metrics(run)]


def final_state(run) -> list[np.ndarray]:
    """Policy and head of the last checkpoint, in the dtype they were trained in."""
    _, policy, head = hf.load_checkpoint(run / "hf", "float32")
    with Checkpointer(run / "checkpoints") as checkpoints:
        trees, meta = checkpoints.restore(None, {"policy": policy, "draft": head})
    assert (meta["policy_steps"], meta["step"]) == (60, 100)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trees)]


@pytest.mark.slow
def test_a_run_resumed_in_the_policy_stage_ends_as_one_that_was_not(run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run, out, ignore=shutil.ignore_patterns("hf"))
    sft.main([*arguments(out), "--resume_step", "30"])
    assert learned(out) == learned(run)
    for mine, theirs in zip(final_state(out), final_state(run), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"optim.lr": 1e-3, "data.seed": 9}, "other settings of data, optim;"),
        ({"steps": 59}, "has 60 updates of the policy and 40 of the head"),
    ],
)
def test_a_run_is_not_resumed_as_another(run, changes, expected):
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit, match=expected):
        sft.main([*arguments(run, **changes), "--resume"])
    assert (run / "metrics.jsonl").read_bytes() == before


# --- the head's settings, the export's dtype ------------------------------------------------------


def test_a_head_that_is_not_trained_is_exported_as_it_started(tmp_path, capsys):
    changes = {
        "steps": 2,
        "draft.mode": "frozen",
        "export_dtype": "float32",
        "model.mtp_concat": "hidden_first",
        "model.mtp_target_hidden": "pre_norm",
        "model.mtp_recycle": "pre_norm",
    }
    sft.main(arguments(tmp_path / "run", **changes))
    told = capsys.readouterr().out
    assert "updates (steps=2); draft.mode=frozen: the head is not trained" in told
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]
    model, _, head = hf.load_checkpoint(tmp_path / "run" / "hf")
    switches = (model.mtp_concat, model.mtp_target_hidden, model.mtp_recycle)
    assert switches == ("hidden_first", "pre_norm", "pre_norm")
    assert model.run.param_dtype == "float32"
    start = init_head_params(model, 1)
    for mine, theirs in zip(jax.tree.leaves(head), jax.tree.leaves(start), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


# --- the optimizer --------------------------------------------------------------------------------


def test_weight_decay_is_on_weight_matrices_only(run):
    model = change_dense(hf.load_checkpoint(run / "hf")[0], model_type="qwen2", qkv_bias=True)
    params = {"policy": init_params(model, 0), "head": init_head_params(model, 0)}
    names = {"policy": matrix_names(model)}
    names["head"] = [n for n, axes in weight_axes(model).items() if len(axes) > 1]
    marked = {part: decays(names[part], tree) for part, tree in params.items()}
    flat = jax.tree_util.tree_leaves_with_path(marked)
    by_name = {str(path[-1].key): value for path, value in flat}
    assert by_name == {
        **dict.fromkeys(["embed", "q", "k", "v", "o", "gate", "up", "down", "proj"], True),
        **dict.fromkeys(["norm", "input_norm", "post_norm", "q_norm", "k_norm"], False),
        **dict.fromkeys(["q_bias", "k_bias", "v_bias"], False),
        **dict.fromkeys(["embed_norm", "hidden_norm"], False),
    }
    config = OptimConfig(lr=0.1, warmup_steps=0, weight_decay=0.5)
    weights = {"q": jnp.ones((2, 3, 3)), "input_norm": jnp.ones((2, 3))}
    optimizer = config.build(["q"])
    zero = jax.tree.map(jnp.zeros_like, weights)
    updates, _ = optimizer.update(zero, optimizer.init(weights), weights)
    after = optax.apply_updates(weights, updates)
    assert np.allclose(after["q"], 0.95) and np.all(np.asarray(after["input_norm"]) == 1)


@pytest.mark.parametrize(("warmup", "decay"), [(0, 8), (1, 0), (4, 8)])
def test_the_rate_rises_from_its_first_share_to_the_peak_and_falls(warmup, decay):
    schedule = OptimConfig(
        lr=2.0, warmup_steps=warmup, decay_steps=decay, final_lr_ratio=0.25
    ).schedule()
    rates = [float(schedule(i)) for i in range(max(warmup, 1) + 9)]
    rise = max(warmup, 1)
    assert rates[:rise] == pytest.approx([2.0 * (i + 1) / rise for i in range(rise)])
    tail = rates[rise - 1 :]
    if not decay:
        assert tail == pytest.approx([2.0] * len(tail))
        return
    assert all(a > b for a, b in zip(tail[:8], tail[1:9], strict=True))
    assert tail[4] == pytest.approx((2.0 + 0.5) / 2)
    assert tail[8:] == pytest.approx([0.5] * len(tail[8:]))
