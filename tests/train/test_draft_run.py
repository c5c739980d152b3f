"""`train.draft`: a head for any policy, from the policy's own samples or from given texts."""

import json
import logging
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run
from tiers import slow_but

from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint.store import Checkpointer
from specjax.checkpoint.weights import read_config
from specjax.command_line import parse_config
from specjax.engine.engine import Engine
from specjax.engine.sources import load_head
from train import draft
from train.data import samples as draft_data
from train.data.prompts import Prompts
from train.data.rows import problems
from train.data.samples import Pair, choose_vocabulary, order_of, pack_pairs, read_texts
from train.draft_schema import DraftRunConfig
from train.loss.policy import PolicyTrainer
from train.run.files import read_metrics

SETTINGS = {
    "kind": "mtp",
    "seed": 3,
    "epochs": 3,
    "data.max_terms": 3,
    "rollout.prompts": 12,
    "rollout.n": 2,
    "rollout.max_tokens": 20,
    "rollout.max_prompt_tokens": 12,
    "rollout.max_batch": 1,  # one size of the batch to compile
    "eval.problems": 6,
    "eval.strategy": "2_1_3",
    "eval.max_batch": 1,
    "packing.row_length": 64,
    "packing.rows": 1,
    "draft.optim.lr": 3e-3,
    "draft.unroll_steps": 2,
    "log_every": 1,
    "export_dtype": "float32",
}

EAGLE = {"kind": "eagle3", "draft_vocab": 64, "rollout__max_prompt_tokens": 40}


def arguments(model, out, **changes) -> list[str]:
    """`key=value` arguments; dots of keys are written as two underscores."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    settings = {**SETTINGS, "model": model, "out": out, **changes}
    given = {name: value for name, value in settings.items() if value is not None}
    return tiny_run.with_effect(DraftRunConfig, given)


def settings(**changes) -> DraftRunConfig:
    return parse_config(DraftRunConfig, arguments("d", "unused", **changes))[0]


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Runs with the same settings take the programs of the first of them."""
    known, made, begin = {}, draft.HeadTrainer.engine, draft.HeadTrainer.begin

    def engine(self, spec, source, batch):
        found = made(self, spec, source, batch)
        runner, key = found.runner, str((self.model, spec, source, batch, self.cfg.rollout))
        first = known.setdefault(key, runner)
        runner.executables.by_key, runner.weights.convert = (
            first.executables.by_key,
            first.weights.convert,
        )
        runner._empty = first._empty
        return found

    def begun(self, pairs):
        begin(self, pairs)
        key = str((self.model, self.source, self.cfg.draft, self.cfg.rollout))
        first = known.setdefault(key, self)
        self.policy = first.policy
        self.trainer._update = first.trainer._update

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft.HeadTrainer, "engine", engine)
        patch.setattr(draft.HeadTrainer, "begin", begun)
        yield


def saved_head(out: Path) -> list[np.ndarray]:
    """The arrays of head and optimizer in the last checkpoint of a run."""
    from specjax.checkpoint.store import read_record

    with Checkpointer(out / "checkpoints") as checkpoints:
        step = checkpoints.all_steps()[-1]
        record, _ = read_record(out / "checkpoints" / str(step))
        trees, _ = checkpoints.restore(step, record["trees"].keys())
    return [np.asarray(a) for a in jax.tree.leaves(trees)]


def assert_same_head(one: Path, other: Path) -> None:
    pairs = list(zip(saved_head(one), saved_head(other), strict=True))
    assert len(pairs) > 10
    for a, b in pairs:
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def run(thin_policy, tmp_path_factory):
    out = tmp_path_factory.mktemp("draft") / "run"
    draft.main(arguments(thin_policy, out))
    return out


@pytest.fixture(scope="module")
def eagle(thin_policy, run, tmp_path_factory):
    """A run that trains an EAGLE-3 head of a part of the vocabulary, on the samples of `run`."""
    out = tmp_path_factory.mktemp("eagle") / "run"
    file = tiny_run.write_gsm8k(out.parent / "rows.jsonl", 200)  # of which some are held out
    draft.main(arguments(thin_policy, out, **EAGLE, data__texts=run / "samples", data__path=file))
    return out


def refusal(argv) -> str:
    with pytest.raises(SystemExit) as ended:
        draft.main(argv)
    assert isinstance(ended.value.code, str), ended.value.code
    return ended.value.code


# --- a whole run ----------------------------------------------------------------------------------


def by_pass(out: Path, name: str, passes: int = 3) -> list[float]:
    """The mean of a metric over each pass of a run; updates of a pass are records of equal size."""
    values = [r[name] for r in read_metrics(out) if name in r]
    return [float(np.mean(part)) for part in np.array_split(values, passes)]


def test_a_head_learns_from_the_policys_own_samples(run):
    losses = by_pass(run, "train/mtp_loss")
    assert losses[0] > losses[1] > losses[2]
    overlaps = by_pass(run, "train/mtp_overlap_depth_1")
    assert overlaps[2] > overlaps[0] + 0.02
    last = read_metrics(run)[-1]
    a, b = last["train/mtp_overlap_depth_1"], last["train/mtp_overlap_depth_2"]
    assert last["train/accept_estimate"] == pytest.approx(1 + a + a * b)
    samples = [
        json.loads(line)
        for file in sorted((run / "samples").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    assert len(samples) == 24 and len({row["position"] for row in samples}) == 12
    assert last["train/tokens"] == 3 * sum(len(row["token_ids"]) for row in samples)


@pytest.mark.slow
def test_an_eagle_3_head_learns_from_given_samples(eagle):
    losses = by_pass(eagle, "train/mtp_loss")
    assert losses[0] > losses[1] > losses[2]
    overlaps = by_pass(eagle, "train/mtp_overlap_depth_1")
    assert overlaps[2] > overlaps[0] + 0.02
    last = json.loads((eagle / "curve.json").read_text())["points"][-1]
    assert last["accept_length"]["1"] > 1.2
    text = (eagle / "head" / "config.json").read_text()
    assert json.loads(text)["draft_vocab_size"] == 64


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["mtp", "eagle3"], "eagle3"))
def test_the_exported_head_has_the_accept_length_that_was_measured(kind, run, thin_policy, request):
    out = run if kind == "mtp" else request.getfixturevalue("eagle")
    spec = SpecConfig("2_1_3", draft=str(out / "head"))
    llm = LLM(thin_policy, spec, max_batch=1, max_len=60)
    cfg = settings()
    if kind == "eagle3":
        cfg = settings(**EAGLE, data__texts="unused", data__path=out.parent / "rows.jsonl")
    heldout = problems(cfg.data, "heldout")[:6]
    asked = [(problem.index, problem.prompt) for problem in heldout]
    curve = json.loads((out / "curve.json").read_text())
    assert curve["prompts"] == len(asked) > 0
    for temperature, measured in curve["points"][-1]["accept_length"].items():
        params = [
            SamplingParams(temperature=float(temperature), max_tokens=20, seed=1234 + index)
            for index, _ in asked
        ]
        llm.generate([prompt for _, prompt in asked], params)
        assert llm.totals.accept_length == pytest.approx(measured, abs=1e-9)


def test_states_that_are_kept_give_the_same_head(run, thin_policy, tmp_path, capsys):
    computed, states = [], PolicyTrainer.states
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolicyTrainer, "states", lambda *a: computed.append(1) or states(*a))
        kept = {"states": "cache", "eval__problems": 0}
        draft.main(arguments(thin_policy, tmp_path / "kept", **kept))
    assert_same_head(tmp_path / "kept", run)
    updates = max(record["step"] for record in read_metrics(tmp_path / "kept"))
    assert 3 < len(computed) < updates, "once for each micro-batch"
    capsys.readouterr()


class Killed(BaseException):
    """Ends a run at once, as a signal would."""


@pytest.mark.slow
def test_a_run_that_was_killed_twice_ends_with_the_same_bits(run, thin_policy, tmp_path, capsys):
    out, generate, update = tmp_path / "run", Engine.generate, draft.HeadTrainer.update
    calls = []

    def once(self, *arguments):
        calls.append(1)
        if len(calls) == 3:
            raise Killed
        return generate(self, *arguments)

    changes = {"save_every": 2, "eval__problems": 0}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Engine, "generate", once)
        draft.main(arguments(thin_policy, out, **changes))
    blocks = {file.name: file.stat().st_mtime_ns for file in (out / "samples").glob("*.jsonl")}
    assert len(blocks) == 2
    said = refusal(arguments(thin_policy, out, **changes))
    assert "holds samples or checkpoints of an earlier run" in said

    def until_5(self):
        if self.done_steps == 5:
            raise Killed
        return update(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(draft.HeadTrainer, "update", until_5)
        draft.main([*arguments(thin_policy, out, **changes), "--resume"])
    assert "2 of 6 blocks are there already" in capsys.readouterr().out
    for name, time in blocks.items():
        assert (out / "samples" / name).stat().st_mtime_ns == time, "it was generated again"
    draft.main([*arguments(thin_policy, out, **changes), "--resume"])
    assert "resumed at step 4" in capsys.readouterr().out
    assert_same_head(out, run)
    steps = [record["step"] for record in read_metrics(out)]
    assert steps == list(range(1, steps[-1] + 1))


def test_a_head_goes_on_from_another_runs_files(run, eagle, thin_policy, tmp_path, capsys):
    changes = {"kind": "eagle3", "data__texts": run / "samples", "eval__problems": 0}
    changes |= {"steps": 1, "epochs": None}
    draft.main(arguments(thin_policy, tmp_path / "run", init=eagle / "head", **changes))
    assert f"from init={eagle / 'head'}" in capsys.readouterr().out
    first = read_metrics(tmp_path / "run")[-1]["train/mtp_loss"]
    assert first < 0.9 * read_metrics(eagle)[1]["train/mtp_loss"]


def test_a_head_is_measured_with_the_policy_in_the_format_of_rollouts(
    run, thin_policy, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    changes = {"init": run / "head", "steps": 0, "epochs": None, "eval__policy_products": "int8"}
    draft.main(arguments(thin_policy, tmp_path / "run", **changes))
    assert "products of *: int8" in caplog.text


def test_a_head_is_aligned_with_packed_weights_and_written(
    run, eagle, thin_policy, tmp_path, capsys
):
    packed = {"products": "int8", "steps": 0, "epochs": None, "data__texts": run / "samples"}
    packed |= {"eval__problems": 0, "align": "norm,scales,temperature"}
    given = {**EAGLE, "draft_vocab": None, "init": eagle / "head"}
    draft.main(arguments(thin_policy, tmp_path / "eagle", **packed, **given))
    target = read_config(thin_policy)
    before, after = (load_head(str(out / "head"), target)[1] for out in (eagle, tmp_path / "eagle"))
    assert (before.source.cfg.fc_norm, after.source.cfg.fc_norm) == ("none", "each")
    assert np.ptp(after.params["fc_norm"][0]) > 0  # by channel
    factors = np.asarray(after.params["lm_head"] / before.params["lm_head"])
    np.testing.assert_allclose(factors, factors[0, 0], rtol=1e-5)
    assert factors[0, 0] != 1
    mtp = {"init": run / "head", **packed}
    assert "norms the policy's states already" in refusal(
        arguments(thin_policy, tmp_path / "mtp", **mtp)
    )


def test_a_head_that_does_not_learn_is_a_loud_warning(thin_policy, run, tmp_path, capsys):
    changes = {"draft__optim__lr": 0.0, "data__texts": run / "samples", "eval__problems": 0}
    draft.main(arguments(thin_policy, tmp_path / "run", **changes))
    said = capsys.readouterr().out
    assert "WARNING: THE HEAD HAS NOT LEARNT: the acceptance of its first token went from" in said
    assert "!" * 100 in said


# --- refusals -------------------------------------------------------------------------------------


def test_resuming_with_other_settings_names_them(run, thin_policy):
    said = refusal([*arguments(thin_policy, run, rollout__temperature=0.7), "--resume"])
    assert "made with other settings of rollout" in said
    argv = arguments(thin_policy, run, steps=2, epochs=None)
    assert "raise steps or epochs" in refusal([*argv, "--resume"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"init": "nowhere"}, "init: expected the directory or Hugging Face id of a head, got 'no"),
        ({"init": "POLICY", "kind": "eagle3"}, "is a head of kind=mtp, and kind is eagle3; set "),
        ({"draft_vocab": 999_999, "kind": "eagle3"}, "(the policy's vocabulary), got 999999"),
        ({"rollout.max_tokens": 4000, "packing.row_length": 8192}, "the longest sequence of"),
    ],
)
def test_mistakes_are_named_before_the_policy_answers(
    changes, said, thin_policy, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        draft.HeadTrainer, "collect", lambda self: pytest.fail("it was sampled from")
    )
    changes = {name: thin_policy if v == "POLICY" else v for name, v in changes.items()}
    assert said in refusal(arguments(thin_policy, tmp_path / "run", **changes))


# --- given texts ----------------------------------------------------------------------------------


def texts_of(path: Path, rows, tokenizer, **changes) -> draft_data.Texts:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = settings(data__texts=path, rollout__prompts=None, rollout__n=None, **changes)
    return read_texts(cfg, Prompts(tokenizer, cfg.data))


@pytest.fixture(scope="module")
def tokenizer(thin_policy):
    return LLM(thin_policy, None, max_batch=1, max_len=32).tokenizer


def test_rows_of_any_layout_are_texts_to_train_on(tokenizer, tmp_path):
    rows = [{"prompt": f"{i}+1=", "completion": f" {i + 1}"} for i in range(40)]
    found = texts_of(tmp_path / "a.jsonl", rows, tokenizer)
    assert len(found.train) + len(found.heldout) == 40 and found.heldout
    ids = {tokenizer.decode(p.prompt): tokenizer.decode(p.tokens) for p in found.train}
    assert all(text == f" {int(ask[:-3]) + 1}<|eos|>" for ask, text in ids.items())
    rows = [{"question": "1 and 2?", "answer": "1+2=3\n#### 3"}]
    [pair] = texts_of(tmp_path / "b.jsonl", rows, tokenizer, eval__problems=0).train
    assert tokenizer.decode(pair.prompt) == "Question: 1 and 2?\nAnswer:"
    rows = [{"prompt_token_ids": [3, 4], "token_ids": [5, 6, 7]}]
    [pair] = texts_of(tmp_path / "c.jsonl", rows, tokenizer, eval__problems=0).train
    assert pair == Pair([3, 4], [5, 6, 7])


def test_texts_longer_than_a_row_are_cut_and_demonstrations_left_out(tokenizer, tmp_path):
    found = texts_of(tmp_path / "a.jsonl", [{"text": "1+2=3 " * 40}], tokenizer, eval__problems=0)
    assert found.notes[1].startswith("1 texts have more tokens than") and len(found.train) > 1
    assert all(len(p.prompt) == 1 and len(p.tokens) < 64 for p in found.train)
    ids = [token for pair in found.train for token in (*pair.prompt, *pair.tokens)]
    assert tokenizer.decode(ids) == "1+2=3 " * 40
    rows = [{"prompt": "1+2=", "completion": " 3" * 99}, {"prompt": "1+3=", "completion": " 4"}]
    asked = {"eval__problems": 0, "data__overlong_prompts": "drop"}
    found = texts_of(tmp_path / "b.jsonl", rows, tokenizer, **asked)
    assert "1 demonstrations have more tokens than" in found.notes[1] and len(found.train) == 1


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "no row is left to train on"),
        ([{"prompt": "1+1="}], "a row of task prompt without a demonstration"),
        ([{"prompt_token_ids": [1], "token_ids": "1 2"}], "expected a list of token ids"),
    ],
)
def test_texts_that_cannot_be_trained_on_are_refused(rows, said, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=said):
        texts_of(tmp_path / "a.jsonl", rows, tokenizer, eval__problems=0)


# --- batches, vocabulary, states ------------------------------------------------------------------


def test_every_sample_is_packed_once_and_each_pass_has_an_order_of_its_own():
    cfg = settings(packing__rows=2)
    pairs = [Pair([1, 2], [3 + i % 200] * (1 + i % 30)) for i in range(300)]
    batches = pack_pairs(cfg, pairs)
    assert all(batch["tokens"].shape == (2, 64) for batch in batches)
    total = sum(batch["loss_mask"].sum() for batch in batches)
    assert total == sum(len(pair.tokens) for pair in pairs)
    assert total / (len(batches) * 128) > 0.7
    orders = [order_of(cfg, len(batches), epoch).tolist() for epoch in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(len(batches)))
    assert orders[0] != orders[1] != order_of(settings(seed=4), len(batches), 1).tolist()


@pytest.mark.slow
def test_the_most_frequent_tokens_and_the_end_are_drafted_from():
    cfg = settings(kind="eagle3", draft_vocab=4)
    pairs = [Pair([9, 9, 9], [1, 1, 1, 2, 2, 5]), Pair([9], [7, 7, 2])]
    ids, covered = choose_vocabulary(cfg, pairs, 10, (3, 12))
    assert ids.tolist() == [1, 2, 3, 7] and covered == pytest.approx(8 / 9)
    assert choose_vocabulary(settings(), pairs, 10, (3,))[0] is None
