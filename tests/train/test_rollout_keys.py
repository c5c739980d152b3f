"""How rollouts speculate is set by `rollout.*`, and why drafts fail is written beside the run."""

import pytest
import tiny_run

from specjax import SpecConfig
from specjax.checked_json import CheckpointError
from specjax.command_line import ConfigError, parse_config
from specjax.control import ControlConfig
from specjax.telemetry import read_jsonl
from train import rl
from train.rollout_schema import RolloutSection, with_draft_key
from train.schema import RLConfig
from train.scoring import RewardsFailedError


@pytest.fixture(scope="module", autouse=True)
def programs():
    with tiny_run.shared_programs():
        yield


def test_the_keys_of_a_rollout_are_those_of_spec_config():
    section = RolloutSection(
        strategy="6_4_16", aligned=False, tau=0.3, spec_verify_tokens=12, telemetry=True
    )
    assert section.spec() == SpecConfig(
        "6_4_16", aligned=False, tau=0.3, spec_verify_tokens=12, telemetry=True
    )
    assert RolloutSection().spec() == SpecConfig()
    assert RolloutSection(strategy="4x2x1", acceptance="recursive").spec().resolve().rows == 21


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "6_4_16", "acceptance": "recursive"}, "'coupled'"),
        ({"strategy": "4x4x4"}, "spec_verify_tokens = 48"),
        ({"tau": 0.0}, "tau must be a finite number greater than 0"),
        ({"draft": "ngram", "acceptance": "block"}, "the samples that share a batch"),
    ],
)
def test_a_combination_that_cannot_be_is_refused_with_the_section(settings, said):
    with pytest.raises(ValueError, match=said):
        RolloutSection(**settings)


@pytest.mark.slow  # that it writes them is seen below
def test_a_run_with_telemetry_writes_its_rejections_and_may_resume_without(
    thin_policy, tmp_path, monkeypatch
):
    monkeypatch.delenv("SPECJAX_TELEMETRY", raising=False)

    def trainer(**changes):
        argv = tiny_run.arguments(thin_policy, tmp_path, draft__mode="frozen", **changes)
        return rl.Trainer(parse_config(RLConfig, argv)[0])

    watched = trainer(**{"rollout.telemetry": "true"})
    rounds = 0
    for _ in range(2):  # the second is not told of the first's again
        watched.step()
        rounds += sum(s.stats.rounds for g in watched.last_rollout for s in g.responses)
    summary = read_jsonl(tmp_path / "telemetry.jsonl").summary()
    assert summary.rounds == rounds and summary.rejections > 0
    assert watched.engine.telemetry.records == []
    told = (tmp_path / "telemetry.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(watched.cfg, "max_failed_rewards", -1.0)
        with pytest.raises(RewardsFailedError):
            watched.step()
    # Nothing of a step that is given up is told, then or with the next one.
    assert watched.engine.telemetry.records == []
    assert (tmp_path / "telemetry.jsonl").read_bytes() == told
    assert trainer().fingerprint() == watched.fingerprint()
    assert trainer().engine.telemetry is None
    fewer = {"rollout.max_batch": 3, "rollout.scan_layers": "true", "remat": "true"}
    assert trainer(**fewer).fingerprint() == watched.fingerprint()  # fewer devices hold less
    assert trainer(**{"rollout.temperature": 0.9}).fingerprint() != watched.fingerprint()


def test_a_cache_too_small_for_all_slots_is_told_and_changes_no_token(tmp_path):
    """`rollout.cache_bytes` for one sample and a little more: the second has to step back."""
    # One token ends a response: they are long.
    policy = tiny_run.write_policy(tmp_path / "policy", num_layers=1, eos_token_ids=(1,))

    settings = {
        "rollout.page_size": 16,
        "rollout.max_tokens": 60,
        "rollout.chunk_tokens": 4,
        "rollout.strategy": "1_1_2",
        "packing.row_length": 96,
        "draft.mode": "frozen",
    }

    def trainer(**changes):
        argv = tiny_run.arguments(policy, tmp_path / "run", **settings, **changes)
        return rl.Trainer(parse_config(RLConfig, argv)[0])

    ample = trainer()
    runner = ample.engine.runner
    pages = 1 + runner.pages_of(runner.max_len)  # one is spare
    small = {"rollout.cache_bytes": pages * runner.page_bytes, "rollout.max_batch": 2}
    scarce = trainer(**small)
    assert scarce.engine.runner.pages == pages < runner.pages
    free, tight = ample.step(), scarce.step()
    assert free["rollout/preemptions"] == 0 < tight["rollout/preemptions"]
    for name in ("rollout/tokens_sha", "rollout/reward", "train/grad_norm"):
        assert tight[name] == free[name]


def cool_trainer(model, out, **changes) -> rl.Trainer:
    settings = {"draft.mode": "frozen", "rollout.temperature": 0.5}
    argv = tiny_run.arguments(model, out, **settings, **changes)
    return rl.Trainer(parse_config(RLConfig, argv)[0])


@pytest.fixture(scope="module")
def silent(thin_policy, tmp_path_factory):
    """Metrics of a step without drafts."""
    out = tmp_path_factory.mktemp("silent")
    return cool_trainer(thin_policy, out, **{"rollout.strategy": "off"}).step()


@pytest.mark.parametrize("source", ["ngram", pytest.param("model", marks=pytest.mark.slow)])
def test_other_sources_than_the_head_draft_and_sample_the_same_tokens(
    source, silent, thin_policy, thin_model, tmp_path
):
    settings = {"rollout.draft": "ngram", "rollout.strategy": "3_2_6", "rollout.telemetry": "true"}
    if source == "model":  # the policy drafts for itself: nothing is rejected
        settings = {"rollout.draft": thin_model, "rollout.strategy": "2_1_3"}
    drafting = cool_trainer(thin_policy, tmp_path, **settings)
    assert drafting.head is None and "draft" not in drafting.trees()
    spoken = drafting.step()
    assert spoken["rollout/tokens_sha"] == silent["rollout/tokens_sha"]
    assert "rollout/spec_accept_length" not in silent
    least = 1.0 if source == "ngram" else 2.0
    assert spoken["rollout/spec_accept_length"] > least
    if source == "ngram":
        groups = drafting.last_rollout
        rounds = sum(r.stats.rounds for group in groups for r in group.responses)
        assert read_jsonl(tmp_path / "telemetry.jsonl").summary().rounds == rounds
        assert drafting.engine.telemetry.records == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"rollout.draft": "ngram", "draft.mode": "online"},
            "draft.mode=online trains the draft head",
        ),
        (
            {"rollout.draft": "no/such/dir", "draft.mode": "frozen"},
            "rollout.draft: expected auto, checkpoint, random, ngram, the directory",
        ),
        (
            {"rollout.draft": "model", "draft.mode": "frozen"},
            "did you mean rollout.draft=DIR?",
        ),
    ],
)
def test_a_source_that_cannot_draft_is_refused_with_the_remedy(
    settings, said, thin_policy, tmp_path, capsys
):
    argv = tiny_run.arguments(thin_policy, tmp_path, **settings)
    with pytest.raises((ConfigError, CheckpointError, SystemExit)) as stopped:
        rl.Trainer(parse_config(RLConfig, argv)[0])
    assert said in f"{stopped.value} {capsys.readouterr().err}"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"over_sample": 0.5}, "rollout.over_sample: expected a finite number of at least 1"),
        ({"over_sample": "inf"}, "rollout.over_sample: expected a finite number, got inf"),
        ({"partial": "true"}, "raise over_sample, or set partial=false"),
        (
            {"max_staleness": 0, "partial": "true", "over_sample": 2},
            "rollout.max_staleness: expected at least 1, got 0",
        ),
        ({"order": "lifo"}, "rollout.order: expected one of fifo, longest_first"),
        ({"chunk_tokens": 0}, "rollout.chunk_tokens must be at least 1"),
        ({"prefill_chunk": 8}, "rollout.prefill_chunk must be at least 16"),
        ({"cache_bytes": 1}, "cache_bytes"),
        ({"control": "bandit"}, "rollout.control is a section"),
        ({"control.controler": "bandit"}, "did you mean 'rollout.control.controller'?"),
        ({"control.controller": "best"}, "rollout.control.controller: expected one of goodput"),
        ({"control.strategies": "[wide]"}, "rollout.control: strategy 'wide' is not understood"),
        (
            {"control.controller": "bandit", "control.bandit": "{eps: 1}"},
            "unknown setting 'eps' of bandit",
        ),
        ({"control": "{}", "strategy": "off"}, "rollout.strategy=off says that there is no"),
        ({"control": "{}", "acceptance": "block"}, "rollout.acceptance=coupled, or"),
        (
            {"control.controller": "static", "control.bs_threshold": 4, "acceptance": "block"},
            "what is learned would depend on the clock",
        ),
        ({"control.fastrl": "{enable: true, mode: 1}"}, "speculative has unknown keys mode"),
        (
            {"control.fastrl": "{enable: true}", "control.controller": "bandit"},
            "fastrl stands in place of all other keys",
        ),
    ],
)  # fmt: skip
def test_wrong_keys_of_a_rollout_say_what_to_do(settings, said, thin_policy, tmp_path, capsys):
    settings = {f"rollout.{name}": value for name, value in settings.items()}
    argv = tiny_run.arguments(thin_policy, tmp_path, **settings)
    with pytest.raises((ConfigError, SystemExit)) as stopped:
        rl.Trainer(parse_config(RLConfig, argv)[0])
    assert said in f"{stopped.value} {capsys.readouterr().err}"


@pytest.mark.parametrize("changed", ["rollout.control={}", "rollout.replicas=2"])
def test_a_run_says_where_the_last_bits_of_its_weights_depend_on_the_clock(changed):
    """They do where the loss is weighed by log-probabilities of rollouts."""

    def said(*argv, dtype="float32"):
        return rl.precision_warning(parse_config(RLConfig, [*argv])[0], dtype)

    told = said("algo.tis=true", changed)
    assert "parameters, and hence later tokens, may differ between repetitions" in told
    assert "set rollout.invariant=true, or rollout.strategy=" in told
    ngrams = said("algo.tis=true", changed, "rollout.draft=ngram")
    assert "set rollout.invariant=true, or rollout.control.controller=static" in ngrams
    assert said("algo.tis=true", changed, dtype="bfloat16") == told
    assert said(changed) is None and "rollout.invariant=true" in said(changed, dtype="bfloat16")
    for dtype in ("float32", "bfloat16"):
        assert said("algo.tis=true", changed, "rollout.invariant=true", dtype=dtype) is None
        assert said("algo.tis=true", dtype=dtype) is None


def section(**settings):
    return parse_config(RLConfig, [f"rollout.{k}={v}" for k, v in settings.items()])[0].rollout


def names(roll) -> list[str]:
    return [arm.name for arm in roll.control_config().arms]


def test_a_control_section_is_goodput_unless_it_says_otherwise():
    assert section().control_config() is None
    assert section(control="{}").control_config() == ControlConfig()
    static = {"control.controller": "static", "strategy": "3_1_4"}
    assert names(section(**static)) == ["3_1_4"]
    assert names(section(**static, **{"acceptance": "block"})) == ["3_1_4"]
    listed = {"control.controller": "static", "control.strategies": "[off]"}
    assert names(section(**listed)) == ["off"]


def test_fastrls_section_is_read_as_it_stands():
    fastrl = (
        "{enable: true, bs_threshold: 32, eagle: {tune_algorithm: BEG, mab_configs: [8_4_32], "
        "spec_verify_tokens: 40, spec_model_path: some/head}}"
    )
    roll = section(**{"control.fastrl": fastrl})
    control = roll.control_config()
    assert (control.controller, names(roll)) == ("bandit", ["8_4_32", "off"])
    assert control.bs_threshold == 32 and roll.spec_verify_tokens == 40
    assert roll.draft == "some/head" and section(**{"control.fastrl": fastrl}) == roll


def test_how_the_engine_uses_its_device_may_change_between_runs(thin_policy, tmp_path):
    def trainer(**changes):
        argv = tiny_run.arguments(thin_policy, tmp_path, **changes)
        return rl.Trainer(parse_config(RLConfig, argv)[0])

    changes = {"rollout.chunk_tokens": 8, "rollout.page_size": 16, "rollout.order": "longest_first"}
    changed = trainer(**changes)
    assert changed.fingerprint() == trainer().fingerprint()
    config = changed.engine.config
    assert (config.chunk_tokens, config.page_size, config.order) == (8, 16, "longest_first")


def test_settings_of_ema_may_lie_in_a_file(tmp_path, capsys):
    file = tmp_path / "ema.json"
    file.write_text('{"candidate_steps": [2, 5], "ema_alpha": 0.5}')
    argv = ["rollout.control.controller=ema", f"rollout.control.ema_file={file}"]
    control = parse_config(RLConfig, argv)[0].rollout.control.build()
    assert list(control.ema.candidate_steps) == [2, 5] and control.ema.ema_alpha == 0.5
    file.unlink()
    with pytest.raises(SystemExit):
        parse_config(RLConfig, argv)
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "head", "model", "draft"),
    [
        ("head", "checkpoint", None, "checkpoint"),
        ("head", "random", None, "random"),
        ("head", "some/head", None, "some/head"),
        ("ngram", "checkpoint", None, "ngram"),
        ("model", "checkpoint", "some/model", "some/model"),
        ("mine:Own", "checkpoint", None, "mine:Own"),
        ("mine:Own", "checkpoint", "some/files", "mine:Own:some/files"),
    ],
)
def test_a_run_of_an_earlier_version_goes_on_with_what_drafted(source, head, model, draft):
    roll = {"source": source, "head": head, "draft_model": model, "strategy": "4_1_5"}
    now = with_draft_key({"seed": 1, "rollout": roll})
    assert now == {"seed": 1, "rollout": {"draft": draft, "strategy": "4_1_5"}}
    assert with_draft_key(now) == now
