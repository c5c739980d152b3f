"""`train.draft`: a head for any policy, from the policy's own samples or from given texts."""

import dataclasses
import json
import math
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import jax
import numpy as np
import pytest
import tiny_run
from safetensors.numpy import load_file, save_file

from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint.store import Checkpointer
from specjax.checkpoint.weights import load_model
from specjax.command_line import ConfigError, parse_config, require_same_settings
from specjax.drafts.dflash import DFlashSource
from specjax.drafts.eagle3 import Eagle3Source
from specjax.drafts.model import ModelSource
from specjax.drafts.mtp import MTPSource
from specjax.engine.engine import Engine
from specjax.interfaces import Memory
from specjax.models.mixers.attention import Attention
from specjax.registry import DRAFTS
from train import draft, draft_data, draft_kinds
from train.cli import Interrupted
from train.draft_curve import Curve
from train.draft_data import Pair, choose_vocabulary, order_of, pack_pairs, read_texts
from train.draft_kinds import head_to_go_on_with
from train.draft_schema import DraftRunConfig
from train.draft_states import States
from train.inputs import Prompts
from train.log import read_metrics

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

programs_of_its_own = draft.Run._engine  # which the fixture `programs` replaces

EAGLE = {"kind": "eagle3", "draft_vocab": 64, "rollout__max_prompt_tokens": 40}


def arguments(model, out, **changes) -> list[str]:
    """`key=value` arguments; dots of keys are written as two underscores."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    settings = {**SETTINGS, "model": model, "out": out, **changes}
    given = {name: value for name, value in settings.items() if value is not None}
    return tiny_run.with_effect(DraftRunConfig, given)


def settings(**changes) -> DraftRunConfig:
    return parse_config(DraftRunConfig, arguments("d", "unused", **changes))[0]


@pytest.fixture(autouse=True)
def ctrl_c_interrupts():
    """A suite that is a background job ignores Ctrl-C, which these tests press."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Runs with the same settings take the programs of the first of them."""
    known, made, begin = {}, draft.Run._engine, draft.Run.begin

    def engine(self, spec, source, batch):
        found = made(self, spec, source, batch)
        runner, key = found.runner, str((self.model, spec, source, batch, self.cfg.rollout))
        first = known.setdefault(key, runner)
        runner.executables.by_key, runner.convert = first.executables.by_key, first.convert
        runner._empty = first._empty
        return found

    def begun(self, pairs):
        begin(self, pairs)
        key = str((self.model, self.source, self.cfg.draft, self.cfg.rollout))
        first = known.setdefault(key, self)
        self.policy = first.policy
        self.trainer._update = first.trainer._update

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft.Run, "_engine", engine)
        patch.setattr(draft.Run, "begin", begun)
        yield


def saved_head(out: Path) -> list[np.ndarray]:
    """The arrays of head and optimizer in the last checkpoint of a run."""
    from specjax.checkpoint.store import read_record
    from specjax.checkpoint.weights import _shapes

    with Checkpointer(out / "checkpoints") as checkpoints:
        step = checkpoints.all_steps()[-1]
        record, _ = read_record(out / "checkpoints" / str(step))
        wanted = {name: _shapes(tree) for name, tree in record["trees"].items()}
        trees, _ = checkpoints.restore(step, wanted)
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


def test_a_run_says_how_it_was_started_and_on_which_files(run, eagle):
    [start] = json.loads((run / "run.json").read_text())
    assert start["program"] == "train.draft" and start["data"] == []
    [start] = json.loads((eagle / "run.json").read_text())
    rows, *texts = start["data"]
    assert rows["setting"] == "data.path" and rows["file"].endswith("rows.jsonl")
    assert {file["setting"] for file in texts} == {"data.texts"}


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


def test_the_curve_has_the_first_and_the_last_head_beside_n_grams(run):
    curve = json.loads((run / "curve.json").read_text())
    first, last = curve["points"]
    assert (first["step"], first["tokens"]) == (0, 0)
    assert last["tokens"] == read_metrics(run)[-1]["train/tokens"]
    assert set(last["accept_length"]) == set(curve["ngram"]) == {"1", "0"}
    assert min(first["accept_length"]["1"], last["accept_length"]["1"]) > 1
    assert curve["prompts"] == 6 and (run / "curve.png").stat().st_size > 1000


def test_an_eagle_3_head_learns_from_given_samples(eagle):
    losses = by_pass(eagle, "train/mtp_loss")
    assert losses[0] > losses[1] > losses[2]
    overlaps = by_pass(eagle, "train/mtp_overlap_depth_1")
    assert overlaps[2] > overlaps[0] + 0.02
    last = json.loads((eagle / "curve.json").read_text())["points"][-1]
    assert last["accept_length"]["1"] > 1.2
    text = (eagle / "head" / "config.json").read_text()
    assert json.loads(text)["draft_vocab_size"] == 64


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_the_exported_head_has_the_accept_length_that_was_measured(kind, run, thin_policy, request):
    out = run if kind == "mtp" else request.getfixturevalue("eagle")
    spec = SpecConfig("2_1_3", draft=str(out / "head"))
    llm = LLM(thin_policy, spec, max_batch=1, max_len=60)
    cfg = settings()
    if kind == "eagle3":
        cfg = settings(**EAGLE, data__texts="unused", data__path=out.parent / "rows.jsonl")
    problems = draft.data.problems(cfg.data, "heldout")[:6]
    asked = [(problem.index, problem.prompt) for problem in problems]
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
    cached = tmp_path / "memory"
    draft.main(arguments(thin_policy, cached, states="cache", eval__problems=0))
    assert_same_head(cached, run)
    files = tmp_path / "states"
    on_disk = {"states": "cache", "cache_dir": files, "eval__problems": 0}
    draft.main(arguments(thin_policy, tmp_path / "disk", **on_disk))
    assert_same_head(tmp_path / "disk", run)
    assert len(list(files.glob("*.states"))) > 3
    capsys.readouterr()


def test_states_of_a_policy_that_was_changed_in_its_directory_are_not_used(
    run, thin_policy, tmp_path, capsys
):
    policy, files = shutil.copytree(thin_policy, tmp_path / "policy"), tmp_path / "states"
    texts = {"data__texts": run / "samples", "eval__problems": 0}
    given = {"states": "cache", "cache_dir": files, **texts}
    draft.main(arguments(policy, tmp_path / "first", **given))
    weights = load_file(policy / "model.safetensors")
    [name] = [name for name in weights if name.endswith("layers.0.mlp.down_proj.weight")]
    weights[name] = weights[name] + 1  # the final norm stays as it is
    save_file(weights, policy / "model.safetensors", metadata={"format": "pt"})
    draft.main(arguments(policy, tmp_path / "again", **given))
    draft.main(arguments(policy, tmp_path / "computed", **texts))
    assert_same_head(tmp_path / "again", tmp_path / "computed")
    capsys.readouterr()


class Killed(BaseException):
    """Ends a run at once, as a signal would."""


def test_a_run_that_was_killed_twice_ends_with_the_same_bits(run, thin_policy, tmp_path, capsys):
    out, generate, update = tmp_path / "run", Engine.generate, draft.Run.update
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
        if self.step == 5:
            raise Killed
        return update(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(draft.Run, "update", until_5)
        draft.main([*arguments(thin_policy, out, **changes), "--resume"])
    assert "2 of 6 blocks are there already" in capsys.readouterr().out
    for name, time in blocks.items():
        assert (out / "samples" / name).stat().st_mtime_ns == time, "it was generated again"
    draft.main([*arguments(thin_policy, out, **changes), "--resume"])
    assert "resumed at update 4" in capsys.readouterr().out
    assert_same_head(out, run)
    steps = [record["step"] for record in read_metrics(out)]
    assert steps == list(range(1, steps[-1] + 1))


def test_ctrl_c_saves_the_update_that_is_done(run, thin_policy, tmp_path, capsys):
    out, update = tmp_path / "run", draft.Run.update

    def pressed(self):
        found = update(self)
        if self.step == 3:
            signal.raise_signal(signal.SIGINT)
        return found

    changes = {"save_every": 0, "eval__problems": 0}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(draft.Run, "update", pressed)
        draft.main(arguments(thin_policy, out, **changes))
    assert ended.value.code == 130
    assert "step 3 is saved in" in capsys.readouterr().err
    draft.main([*arguments(thin_policy, out, **changes), "--resume"])
    assert "resumed at update 3" in capsys.readouterr().out
    assert_same_head(out, run)


def test_ctrl_c_while_the_policy_answers_keeps_the_blocks(thin_policy, tmp_path, capsys):
    out, generate = tmp_path / "run", Engine.generate

    def pressed(self, jobs, on_progress=None):
        if (out / "samples" / "00000.jsonl").exists():
            signal.raise_signal(signal.SIGINT)
        return generate(self, jobs, on_progress)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(Engine, "generate", pressed)
        draft.main(arguments(thin_policy, out))
    assert ended.value.code == 130
    assert "1 of 6 blocks of samples are in" in capsys.readouterr().err


def test_a_head_goes_on_from_another_runs_files(run, thin_policy, tmp_path, capsys):
    changes = {"init": run / "head", "data__texts": run / "samples", "steps": 1, "epochs": None}
    draft.main(arguments(thin_policy, tmp_path / "run", **changes))
    assert f"from init={run / 'head'}" in capsys.readouterr().out
    first = read_metrics(tmp_path / "run")[-1]
    begun = next(r for r in read_metrics(run) if "train/mtp_loss" in r)
    assert first["train/mtp_loss"] < 0.9 * begun["train/mtp_loss"]


def test_an_eagle_3_head_goes_on_from_files_and_no_other_head_does(
    run, eagle, thin_policy, tmp_path, capsys
):
    changes = {"kind": "eagle3", "data__texts": run / "samples", "eval__problems": 0}
    changes |= {"steps": 1, "epochs": None, "export": "safeailab"}
    draft.main(arguments(thin_policy, tmp_path / "run", init=eagle / "head", **changes))
    first = read_metrics(tmp_path / "run")[-1]["train/mtp_loss"]
    assert first < 0.9 * read_metrics(eagle)[1]["train/mtp_loss"]
    names = json.loads((tmp_path / "run" / "head" / "config.json").read_text())
    assert names["architectures"] == ["Qwen3ForCausalLMEagle3"]
    capsys.readouterr()
    said = refusal(arguments(thin_policy, tmp_path / "no", init=run / "head", **changes))
    assert "is a head of kind=mtp, and kind is eagle3; set kind=mtp" in said


def test_a_head_that_does_not_learn_is_a_loud_warning(thin_policy, run, tmp_path, capsys):
    changes = {"draft__optim__lr": 0.0, "data__texts": run / "samples", "eval__problems": 0}
    draft.main(arguments(thin_policy, tmp_path / "run", **changes))
    said = capsys.readouterr().out
    assert "WARNING: THE HEAD HAS NOT LEARNT: the acceptance of its first token went from" in said
    assert "!" * 100 in said


def test_a_head_that_has_not_learnt_yet_raises_no_alarm_of_the_engine(thin_policy):
    found = load_model(thin_policy)
    made = SimpleNamespace(cfg=settings(), asked=[1], model=found.cfg.replace(mtp_num_layers=0))
    made._engine = lambda *given: programs_of_its_own(made, *given)
    source = draft.drafting_copy(MTPSource(found.cfg))
    assert made._engine(SpecConfig("2_1_3"), source, 1).alarm is not None
    assert draft.Run._measuring(made, source).alarm is None


def test_what_counts_as_learnt():
    cfg = settings()
    rising = [{"train/mtp_overlap_depth_1": 0.1 + 0.01 * i} for i in range(20)]
    flat = [{"train/mtp_overlap_depth_1": 0.3}] * 20
    good = Curve({}, {}, [{"accept_length": {"1": 1.8, "0": 1.9}}])
    poor = Curve({}, {}, [{"accept_length": {"1": 1.01, "0": 1.9}}])
    lost = Curve({}, {}, [{"accept_length": {"1": math.nan}}])
    assert draft.not_learnt(cfg, rising, good) is None
    assert "from 0.300 to 0.300" in draft.not_learnt(cfg, flat, good)
    assert "accept length is 1.010" in draft.not_learnt(cfg, rising, poor)
    assert "accept length is nan" in draft.not_learnt(cfg, rising, lost)
    assert draft.not_learnt(settings(init="d"), flat, good) is None


def test_a_curve_goes_on_with_what_it_was_measured_with_alone():
    about = {"model": "a", "strategy": "2_1_3", "seed": 1, "prompts": 6, "loss": "kl"}
    point = {"step": 0, "tokens": 0, "accept_length": {"1": 1.1}}
    state = json.loads(json.dumps(Curve(about, {"1": 1.2}, [point]).state()))
    same = Curve({**about, "model": "b"})  # another name of it
    same.load_state(state)
    assert (same.points, same.ngram) == ([point], {"1": 1.2})
    for name, value in {"strategy": "4_1_5", "seed": 2, "prompts": 7}.items():
        with pytest.raises(ConfigError, match=f"{about[name]}, further ones would be .*{value}"):
            Curve({**about, name: value}).load_state(state)
    # Where nothing more is measured the points stay what they are, at the next start, too.
    stopped = Curve({**about, "prompts": 0, "seed": 2})
    stopped.load_state(state, grows=False)
    assert (stopped.about, stopped.points) == (about, [point])
    begun = Curve({**about, "seed": 2})
    begun.load_state(Curve(about).state())  # of a run that has measured nothing yet
    assert (begun.about["seed"], begun.points) == (2, [])
    begun.load_state({"ngram": {}, "points": [point]})  # of a version before
    assert begun.points == [point]


# --- refusals -------------------------------------------------------------------------------------


def test_resuming_with_other_settings_names_them(run, thin_policy):
    said = refusal([*arguments(thin_policy, run, rollout__temperature=0.7), "--resume"])
    assert "made with other settings of rollout" in said
    said = refusal([*arguments(thin_policy, run, draft__optim__lr=0.5), "--resume"])
    assert "made with other settings of draft" in said
    assert "raise steps or epochs" in refusal(
        [*arguments(thin_policy, run, steps=2, epochs=None), "--resume"]
    )


def fingerprint_of(**changes) -> dict:
    return draft.Run.fingerprint(SimpleNamespace(cfg=settings(**changes)))


def test_whether_texts_are_held_out_may_not_change_on_the_way():
    given = {"data__texts": "f", "rollout__prompts": None, "rollout__n": None}
    some, others, none = (fingerprint_of(**given, eval__problems=n) for n in (6, 7, 0))
    require_same_settings(some, others, DraftRunConfig)
    for saved, current in ((some, none), (none, some)):
        with pytest.raises(ConfigError, match="other settings of eval;"):
            require_same_settings(saved, current, DraftRunConfig)
    # Where the held-out prompts are other ones, all texts are trained on in any case.
    for prompts in ({}, {**given, "data__path": "g"}):
        some, none = (fingerprint_of(**prompts, eval__problems=n) for n in (6, 0))
        require_same_settings(some, none, DraftRunConfig)


def test_samples_of_an_id_are_those_of_its_commit_wherever_the_cache_lies(tmp_path):
    def of(cache: str, commit: str) -> DraftRunConfig:
        cfg = settings()
        cfg.model = f"{cache}/hub/models--some--policy/snapshots/{commit}"
        return cfg

    draft_data.check_samples(of("/here", "f00d"), tmp_path, resume=False, tokenizer=None)
    draft_data.check_samples(of("/there", "f00d"), tmp_path, resume=True, tokenizer=None)
    with pytest.raises(ConfigError, match="other settings of model;"):
        draft_data.check_samples(of("/here", "beef"), tmp_path, resume=True, tokenizer=None)


def test_a_directory_without_a_run_cannot_be_resumed(thin_policy, tmp_path):
    said = refusal([*arguments(thin_policy, tmp_path / "none"), "--resume"])
    assert said.startswith("train.draft: error: nothing to resume")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "nowhere"}, "model: expected a checkpoint directory, got 'nowhere'"),
        ({"data.path": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        (
            {"init": "nowhere"},
            "init: expected the directory or Hugging Face id of a head, got 'now",
        ),
        ({"rollout.max_prompt_tokens": 2}, "rollout.max_prompt_tokens=2"),
        ({"rollout.max_tokens": 4000, "packing.row_length": 8192}, "the longest sequence of"),
        ({"family": "nowhere:FAMILY"}, "nowhere"),
    ],
)
def test_mistakes_are_named(changes, said, thin_policy, run, tmp_path):
    settings = {**SETTINGS, "model": thin_policy, "out": tmp_path / "run", **changes}
    if "init" in changes:
        settings |= {"data.texts": run / "samples"}
    assert said in refusal(tiny_run.with_effect(DraftRunConfig, settings))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"init": "nowhere"},
            "init: expected the directory or Hugging Face id of a head, got 'now",
        ),
        ({"init": "POLICY", "kind": "eagle3"}, "is a head of kind=mtp, and kind is eagle3; set "),
        ({"draft_vocab": 999_999, "kind": "eagle3"}, "(the policy's vocabulary), got 999999"),
    ],
)
def test_a_head_that_cannot_be_is_refused_before_the_policy_answers(
    changes, said, thin_policy, tmp_path, monkeypatch
):
    monkeypatch.setattr(draft.Run, "collect", lambda self: pytest.fail("it was sampled from"))
    changes = {name: thin_policy if v == "POLICY" else v for name, v in changes.items()}
    assert said in refusal(arguments(thin_policy, tmp_path / "run", **changes))


class Sums(Attention):
    """A mixer with a recurrent state."""

    kind: ClassVar[str] = "sums"

    def empty(self, run, room):
        return Memory(None, np.zeros((room.slots, 4)))


def test_a_new_head_that_the_policy_cannot_have_is_refused_at_start(thin_policy):
    target = load_model(thin_policy).cfg
    last = dataclasses.replace(target.layers[-1], mixer=Sums(4, 2, 8))
    with pytest.raises(ConfigError, match="kind=mtp: .* the last layer is sums, which keeps rec"):
        head_to_go_on_with(settings(), target.replace(layers=(*target.layers[:-1], last)))
    assert head_to_go_on_with(settings(), target) is None


class OwnEagle3(Eagle3Source):
    """A class of the user's own, that the table of drafts has not."""


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
@pytest.mark.parametrize(
    ("found", "said"),
    [
        (DFlashSource, "init=d is a head of the kind dflash, which train.draft does not train"),
        (OwnEagle3, "init=d is a head of the kind OwnEagle3, which train.draft does not train"),
        (ModelSource, "init=d is a model without a head"),
    ],
)
def test_a_head_of_a_kind_that_is_not_trained_passes_for_none_that_is(kind, found, said):
    with pytest.raises(ConfigError, match=f"^{said}.*kind={kind}"):
        draft_kinds._require_kind(settings(init="d", kind=kind), found)
    draft_kinds._require_kind(settings(init="d", kind=kind), DRAFTS.named(kind))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["kind=medusa"], "kind"),
        (["eval.strategy=off"], "eval.strategy=off drafts nothing"),
        (["eval.strategy=4_x"], "eval.strategy: "),
        (["rollout.top_p=0"], "rollout.top_p must be greater than 0"),
        (["packing.row_length=64"], "must fit a row, got packing.row_length=64"),
        (["eval.seed=99999999999999999999"], "eval.seed: expected"),
        (["epochs=0"], "epochs: expected at least 1"),
    ],
)
def test_values_that_make_no_sense_are_refused(argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        draft.main(argv)
    message = capsys.readouterr().err
    assert ended.value.code == 2 and said in message and "Traceback" not in message


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
    [found] = [texts_of(tmp_path / "a.jsonl", [{"text": "1+2=3 " * 40}], tokenizer,
                        eval__problems=0)]  # fmt: skip
    assert found.cut == 1 and len(found.train) > 1
    assert all(len(p.prompt) == 1 and len(p.tokens) < 64 for p in found.train)
    ids = [token for pair in found.train for token in (*pair.prompt, *pair.tokens)]
    assert tokenizer.decode(ids) == "1+2=3 " * 40
    rows = [{"prompt": "1+2=", "completion": " 3" * 99}, {"prompt": "1+3=", "completion": " 4"}]
    asked = {"eval__problems": 0, "data__overlong_prompts": "drop"}
    found = texts_of(tmp_path / "b.jsonl", rows, tokenizer, **asked)
    assert (found.passed_over, len(found.train)) == (1, 1)
    with pytest.raises(ValueError, match="raise packing.row_length"):
        texts_of(tmp_path / "b.jsonl", rows[:1], tokenizer, **asked)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "no row is left to train on"),
        ([{"prompt": "1+1="}], "a row of task prompt without a demonstration"),
        ([{"colour": "red"}], "cannot tell what the rows of data.texts mean"),
        ([{"prompt_token_ids": [1], "token_ids": "1 2"}], "expected a list of token ids"),
    ],
)
def test_texts_that_cannot_be_trained_on_are_refused(rows, said, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=said):
        texts_of(tmp_path / "a.jsonl", rows, tokenizer, eval__problems=0)


def test_a_policy_that_ends_at_once_cannot_be_trained_on(thin_policy, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt_token_ids": [3, 4], "token_ids": [5]}) + "\n")
    argv = arguments(thin_policy, tmp_path / "run", data__texts=file, eval__problems=0)
    assert "all 1 samples have a single token" in refusal(argv)


def test_questions_without_a_chat_template_are_a_warning(tokenizer):
    problems = [draft_data.Problem("1 and 2?", "3", 0)]
    said = draft.template_warning(settings(data__path="f"), tokenizer, problems)
    assert "has no chat template" in said
    assert draft.template_warning(settings(), tokenizer, problems) is None
    off = settings(data__path="f", data__chat="off")
    assert draft.template_warning(off, tokenizer, problems) is None


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


def test_the_most_frequent_tokens_and_the_end_are_drafted_from():
    cfg = settings(kind="eagle3", draft_vocab=4)
    pairs = [Pair([9, 9, 9], [1, 1, 1, 2, 2, 5]), Pair([9], [7, 7, 2])]
    found = choose_vocabulary(cfg, pairs, 10, (3, 12))
    assert found.ids.tolist() == [1, 2, 3, 7] and found.covered == pytest.approx(8 / 9)
    assert choose_vocabulary(settings(), pairs, 10, (3,)).ids is None
    for most in (1, 11):
        with pytest.raises(ConfigError, match="expected 2 .* to 10"):
            choose_vocabulary(settings(kind="eagle3", draft_vocab=most), pairs, 10, (3, 4))


@pytest.mark.parametrize("on_disk", [False, True])
def test_states_are_kept_up_to_a_limit_and_have_their_bits(on_disk, tmp_path):
    made = []

    def compute(batch):
        if not isinstance(batch["x"], jax.core.Tracer):
            made.append(1)
        return batch["x"].astype("bfloat16") * 3

    folder = tmp_path / "states" if on_disk else None
    batches = [{"x": jax.random.normal(jax.random.key(i), (2, 8, 4))} for i in range(3)]
    states = States(compute, 2 * 128, folder, "one")
    for _ in range(3):
        for number, batch in enumerate(batches):
            found = states(number, batch)
            assert found.dtype == "bfloat16" and (found == batch["x"].astype("bfloat16") * 3).all()
    assert (states.computed, states.bytes, len(made)) == (5, 256, 5)
    if on_disk:
        again = States(compute, 1 << 20, folder, "one")
        assert [np.asarray(again(i, b)).sum() for i, b in enumerate(batches)]
        assert again.computed == 1
        other = States(compute, 1 << 20, folder, "other")
        other(0, batches[0])
        assert other.computed == 1 and len(list(folder.glob("*.states"))) == 1
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("x")
        with pytest.raises(ConfigError, match=r"one that holds thesis\.txt"):
            States(compute, 1, tmp_path / "mine", "one")


def test_an_interruption_is_not_lost(tmp_path):
    stop = draft.Stop()
    stop.check()
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert issubclass(Interrupted, KeyboardInterrupt)
