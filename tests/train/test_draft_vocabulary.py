"""`rollout.draft_vocab` in a run: follows what is emitted, changes no token, compiles nothing."""

import functools

import numpy as np
import pytest
import tiny_run

from train import rl
from train.rollout.vocabulary import DraftVocabulary
from train.run.files import read_metrics

pytestmark = pytest.mark.usefixtures("shared_programs")

SOME = {"rollout.draft_vocab": 24, "steps": 4, "checkpoint.every": 2, "checkpoint.keep_last": 2}
COVERAGE = "rollout/draft_vocab_coverage"


@pytest.fixture
def used(monkeypatch):
    """The ids that each step drafted from, with the programs compiled before and after it."""
    steps, step = [], rl.Trainer.step

    def observed(trainer):
        runners = [engine.runner for engine in trainer.engines]
        ids = [runner.weights.ids.copy() for runner in runners]
        before = [runner.compilations for runner in runners]
        found = step(trainer)
        steps.append((ids, before, [runner.compilations for runner in runners]))
        return found

    monkeypatch.setattr(rl.Trainer, "step", observed)
    return steps


@pytest.fixture(scope="module")
def run(thin_policy, tmp_path_factory):
    """A function that returns the directory of a run that chooses so often; 0: it keeps its ids."""

    @functools.cache
    def out(every: int):
        folder = tmp_path_factory.mktemp("vocabulary") / "run"
        changes = {**SOME, "rollout.draft_vocab_every": every}
        rl.main(tiny_run.arguments(thin_policy, folder, **changes))
        return folder

    return out


@pytest.mark.slow
def test_tokens_and_what_is_learned_do_not_depend_on_the_choice(run):
    names = (
        "rollout/tokens_sha",
        "rollout/reward",
        "train/loss",
        "train/grad_norm",
        "train/mtp_loss",
    )
    chosen, kept = (read_metrics(run(every)) for every in (1, 0))
    assert len(chosen) == len(kept) == 4
    for one, other in zip(chosen, kept, strict=True):
        assert [one.get(name) for name in names] == [other.get(name) for name in names]
    assert chosen[0][COVERAGE] == kept[0][COVERAGE] < 0.9, "before the first choice"
    for one, other in zip(chosen[1:], kept[1:], strict=True):
        assert one[COVERAGE] > other[COVERAGE] + 0.1
    assert chosen[-1]["rollout/spec_accept_length"] >= kept[-1]["rollout/spec_accept_length"]


@pytest.mark.slow
def test_a_run_that_goes_on_drafts_from_the_same_ids(run, thin_policy, tmp_path, used):
    whole, part = read_metrics(run(1)), tmp_path / "run"
    used.clear()
    changes = {**SOME, "rollout.draft_vocab_every": 1}
    rl.main(tiny_run.arguments(thin_policy, part, **{**changes, "steps": 2}))
    rl.main([*tiny_run.arguments(thin_policy, part, **changes), "--resume"])
    names = COVERAGE, "rollout/tokens_sha", "rollout/spec_accept_length"
    assert [[r[n] for n in names] for r in read_metrics(part)] == [
        [r[n] for n in names] for r in whole
    ]
    assert len(used) == 4
    first, *rest = [ids[0] for ids, _, _ in used]
    assert all((first != later).any() for later in rest), "the ids did change"
    for _, before, after in used:
        assert before == after, "what is drafted from is data of the programs"


def vocabulary(every=1, decay=0.5, always=(9,)) -> DraftVocabulary:
    return DraftVocabulary(10, np.array([0, 1, 2]), always, every, decay)


def test_earlier_steps_count_less_and_the_end_is_always_there():
    found = vocabulary()
    assert found.ids.tolist() == [0, 1, 9]
    assert found.end_step([[5, 5, 5, 5], [9]]) == {COVERAGE: 0.2}
    assert found.ids.tolist() == [0, 5, 9]
    found.end_step([[6, 6, 6]])  # 5 counts 2 now
    assert found.ids.tolist() == [5, 6, 9] or found.ids.tolist() == [6, 5, 9]
    found.end_step([[7, 7, 8, 8, 8]])
    assert found.ids.tolist() == [7, 8, 9], "and 1, beside 1.5 of 6"
    assert found.end_step([]) == {}
