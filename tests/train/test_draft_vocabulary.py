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
    """A function that returns the directory of a run that chooses its ids anew, or keeps them."""

    @functools.cache
    def out(follows: bool):
        folder = tmp_path_factory.mktemp("vocabulary") / "run"
        with pytest.MonkeyPatch.context() as patch:
            if not follows:
                patch.setattr(DraftVocabulary, "choose", lambda self: self.ids)
            rl.main(tiny_run.arguments(thin_policy, folder, **SOME))
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
    chosen, kept = (read_metrics(run(follows)) for follows in (True, False))
    assert len(chosen) == len(kept) == 4
    for one, other in zip(chosen, kept, strict=True):
        assert [one.get(name) for name in names] == [other.get(name) for name in names]
    for one, other in zip(chosen[1:], kept[1:], strict=True):
        assert one[COVERAGE] > other[COVERAGE] + 0.1
    assert chosen[-1]["rollout/spec_accept_length"] >= kept[-1]["rollout/spec_accept_length"]


@pytest.mark.slow
def test_a_run_that_goes_on_drafts_from_the_same_ids(run, thin_policy, tmp_path, used):
    whole, part = read_metrics(run(True)), tmp_path / "run"
    used.clear()
    rl.main(tiny_run.arguments(thin_policy, part, **{**SOME, "steps": 2}))
    rl.main([*tiny_run.arguments(thin_policy, part, **SOME), "--resume"])
    names = COVERAGE, "rollout/tokens_sha", "rollout/spec_accept_length"
    assert [[r[n] for n in names] for r in read_metrics(part)] == [
        [r[n] for n in names] for r in whole
    ]
    assert len(used) == 4
    first, *rest = [ids[0] for ids, _, _ in used]
    assert all((first != later).any() for later in rest), "the ids did change"
    for _, before, after in used:
        assert before == after, "what is drafted from is data of the programs"


def test_earlier_steps_count_less_and_the_end_is_always_there():
    found = DraftVocabulary(10, np.array([0, 1, 2]), (9,), follows=True)
    assert found.ids.tolist() == [0, 1, 9]
    assert found.end_step([[5, 5, 5, 5], [9]]) == {COVERAGE: 0.2}
    assert found.ids.tolist() == [0, 5, 9]
    found.end_step([[6, 6, 6]])  # 5 counts 3.2 now
    assert found.ids.tolist() == [5, 6, 9]
    found.end_step([[7, 7, 7, 8, 8, 8]])
    assert found.ids.tolist() == [7, 8, 9], "and 2.56 of 5, beside 2.4 of 6"
    assert found.end_step([]) == {}
