"""After the first step nothing is compiled, and memory does not grow."""

from pathlib import Path

import jax
import pytest
import tiny_run

from specjax.command_line import parse_config
from train import rl
from train.run.files import read_metrics

_COMPILED: list[str] = []


def _listen(event: str, seconds: float, **details) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _COMPILED.append(str(details.get("fun_name", "?")))


@pytest.fixture(scope="module")
def compiled():
    """Names of everything that was compiled, in order; read from the compiler's own events."""
    jax.monitoring.register_event_duration_secs_listener(_listen)
    seen = len(_COMPILED)
    jax.jit(lambda x: x * 3 + 41)(2.0)
    assert len(_COMPILED) > seen, "the event of a compilation has another name in this jax"
    return _COMPILED


@pytest.fixture
def steps_seen(monkeypatch):
    """Calls `look()` before each step of a run, and gives the list of what it returned."""

    def watch(look):
        values, step = [], rl.Trainer.step

        def observed(trainer):
            values.append(look())
            metrics = step(trainer)
            trainer.engine.runner.executables.background.join()
            return metrics

        monkeypatch.setattr(rl.Trainer, "step", observed)
        return values

    return watch


PARTIAL = {
    "seed": 14, "rollout.prompts": 2, "rollout.n": 2, "rollout.over_sample": 2,
    "rollout.partial": "true", "rollout.chunk_tokens": 4, "rollout.control.controller": "bandit",
    "rollout.control.strategies": "[off,1_1_2]", "algo.max_num_gen_batches": 2,
    "algo.updates_per_rollout": 2, "draft.mode": "frozen", "packing.row_length": 48,
    "packing.rows": 1,
}  # fmt: skip
EVERYTHING_SAVED = {
    "rollout.prompts": 3, "algo.updates_per_rollout": 2, "algo.kl_loss_coef": 0.1,
    "algo.max_num_gen_batches": 3, "reward": "tiny_run:rare", "draft.epochs": 2,
    "eval.problems": 3, "eval.every": 5, "checkpoint.every": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "changes"),
    [(6, PARTIAL), pytest.param(20, EVERYTHING_SAVED, marks=pytest.mark.slow)],
    ids=["partial", "everything is saved"],
)
def test_nothing_is_compiled_after_the_first_step(
    thin_policy, tmp_path, compiled, steps_seen, steps, changes
):
    counts = steps_seen(lambda: len(compiled))
    rl.main(tiny_run.arguments(thin_policy, tmp_path / "run", **{**changes, "steps": steps}))
    records = [r for r in read_metrics(tmp_path / "run") if r["step"] > 0]
    packs = {r["train/microbatches"] for r in records if "train/microbatches" in r}
    assert len(records) == steps and len(packs) > 1, "the packs were all of one size"
    assert counts[1] > counts[0]
    assert compiled[counts[1] : counts[-1]] == []


def test_the_last_step_and_what_follows_compile_nothing_either(thin_policy, tmp_path, compiled):
    greedy = "{task: sums, problems: 2, temperature: 0}"
    changes = {"eval.problems": 2, "eval.sets.greedy": greedy}
    argv = tiny_run.arguments(thin_policy, tmp_path, **changes)
    trainer = rl.Trainer(parse_config(rl.RLConfig, argv)[0])
    trainer.warm_up()
    trainer.engine.runner.executables.background.join()
    seen = len(compiled)
    assert trainer.evaluate()["eval/greedy/pass@1"] in (0.0, 0.5, 1.0)
    assert compiled[seen:] == [], "evaluation has the programs of rollouts"
    trainer.step()
    seen = len(compiled)
    trainer.step()
    trainer.sync_weights()
    assert compiled[seen:] == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_host_memory_is_flat_over_fifty_steps(thin_policy, tmp_path, steps_seen):
    def megabytes() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    sizes = steps_seen(megabytes)
    changes = {"steps": 50, "checkpoint.every": 5, "checkpoint.export": "false"}
    rl.main(tiny_run.arguments(thin_policy, tmp_path / "run", **changes))
    # The first steps compile and the first saves start threads; from then on there is no growth.
    middle, last = max(sizes[15:30]), max(sizes[40:])
    assert last - middle < 20, f"{middle:.0f} MiB by step 30, {last:.0f} MiB by step 50"
