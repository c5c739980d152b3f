"""The command line of every program: what it accepts, what it says when it does not."""

import copy
import errno
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from serve.settings import ServeConfig
from specjax.command_line import (
    ConfigError,
    fingerprint,
    load_config,
    parse_config,
    require_same_settings,
)
from specjax.schema import REQUIRED, Needs, keys_of, option
from train.draft_schema import DraftRunConfig
from train.schema import RLConfig, SFTConfig
from train.trainer import Trainer


@dataclass
class Rollout:
    n: int = option(8, "samples per prompt")
    temperature: float = option(1.0, "sampling temperature")
    strategy: str = option("4_1_5", "draft strategy")


@dataclass
class Optimizer:
    lr: float = option(1e-4, "peak learning rate")
    clip: float | None = option(None, "largest gradient norm; null for none")


@dataclass
class Config:
    steps: int = option(10, "number of updates")
    mode: str = option("online", "how the draft head is trained", choices=("none", "online"))
    betas: list[float] = option([0.9, 0.95], "Adam's decay rates")
    resume: bool = option(False, "go on from the last checkpoint")
    rollout: Rollout = option(Rollout, "generation")
    optimizer: Optimizer = option(Optimizer, "the policy's optimizer")

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps: expected at least 1, got {self.steps}")


@dataclass
class Documented:
    """Keys without `option`.

    Attributes:
      first, second: the ends
        of a range: both included.
      third: replaced below.

    Nothing: here is no attribute.
    """

    first: int = 1
    second: int = 2
    third: int = 3


@dataclass
class DocumentedFurther(Documented):
    """More of them.

    Attributes:
      third: a third number.
      fourth: a fourth.
    """

    fourth: int = option(4, "in the field itself")


@dataclass
class Documents:
    range: DocumentedFurther = option(DocumentedFurther(first=7), "a section with a default")


@dataclass
class NeedsModel:
    model: str = option(REQUIRED, "directory of the model")


def _error(capsys, *argv: str, schema=Config) -> str:
    with pytest.raises(SystemExit) as exit_info:
        load_config(schema, argv, prog="train.rl")
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and not captured.out
    assert captured.err.startswith("python -m train.rl: error: ")
    return captured.err


def test_arguments_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("steps: 3\nrollout: {n: 4}\noptimizer: {clip: 1}\n")
    config = load_config(
        Config, ["--config", str(file), "rollout.n=2", "betas=[0.8,0.9]", "optimizer.lr=3e-4"]
    )
    assert isinstance(config, Config) and isinstance(config.rollout, Rollout)
    assert (config.steps, config.rollout.n, config.rollout.strategy) == (3, 2, "4_1_5")
    assert (config.optimizer.lr, config.optimizer.clip, config.betas) == (3e-4, 1.0, [0.8, 0.9])
    assert load_config(Config, ["optimizer.clip=null"]).optimizer.clip is None


def test_two_configs_do_not_share_mutable_defaults():
    first, second = load_config(Config, []), load_config(Config, [])
    first.betas.append(0.5)
    first.rollout.n = 99
    assert second.betas == [0.9, 0.95] and second.rollout.n == 8


def test_help_lists_every_key_with_type_default_and_documentation(capsys):
    with pytest.raises(SystemExit) as exit_info:
        load_config(Config, ["--help"], prog="train.rl", description="GRPO training")
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert "GRPO training" in text and "python -m train.rl" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert lines["rollout.n=8"].split()[1:] == ["int", "samples", "per", "prompt"]
    assert "float | None" in lines["optimizer.clip=null"]
    assert "betas=[0.9," in lines and "list[float]" in lines["betas=[0.9,"]
    assert "[one of none, online]" in lines["mode=online"]
    assert "generation" in lines["rollout"]


def test_help_takes_sentences_from_docstrings_and_defaults_from_the_section(capsys):
    with pytest.raises(SystemExit):
        load_config(Documents, ["--help"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "range.first=7 int the ends of a range: both included" in lines
    assert "range.second=2 int the ends of a range: both included" in lines
    assert "range.third=3 int a third number" in lines
    assert "range.fourth=4 int in the field itself" in lines


@pytest.mark.parametrize("schema", [RLConfig, SFTConfig])
def test_every_key_of_the_programs_has_a_sentence(schema):
    assert [key.name for key in keys_of(schema) if not key.doc] == []


def test_print_config_prints_yaml_that_reads_back_to_the_same_config(tmp_path, capsys):
    arguments = ["steps=7", "rollout.temperature=0.5"]
    with pytest.raises(SystemExit) as exit_info:
        load_config(Config, [*arguments, "--print-config"])
    assert exit_info.value.code == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert load_config(Config, ["--config", str(file)]) == load_config(Config, arguments)


def test_programs_add_flags_of_their_own():
    config, flags = parse_config(
        Config,
        ["steps=2", "--resume", "rollout.n=1", "--resume_step", "5"],
        add_arguments=lambda parser: (
            parser.add_argument("--resume", action="store_true"),
            parser.add_argument("--resume_step", type=int),
        ),
    )
    assert (config.steps, config.rollout.n, flags.resume, flags.resume_step) == (2, 1, True, 5)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("rolout.n=2", "unknown key 'rolout'; did you mean 'rollout'?"),
        ("rollout.temprature=2", "unknown key 'rollout.temprature'; did you mean 'rollout.temp"),
        ("lr=1", "unknown key 'lr'; did you mean 'optimizer.lr'?"),
        ("zzzz=1", "unknown key 'zzzz'; --help lists every key"),
        ("steps=many", "command line: steps: expected a whole number (int), got 'many'"),
        ("steps=2.5", "steps: expected a whole number (int), got 2.5"),
        ("rollout.temperature=hot", "rollout.temperature: expected a number (float), got 'hot'"),
        ("rollout=3", "rollout is a section: set rollout.KEY=value instead"),
        ("rollout=null", "rollout is a section"),
        ("mode=onlin", "mode: expected one of none, online, got onlin"),
        ("steps=0", "steps: expected at least 1, got 0"),
        ("steps", "expected key=value, got 'steps'"),
        ("betas=[0.1", "betas: expected a list such as [a, b] (float each), got '[0.1'"),
        ("betas=[a]", "betas: entry 0: expected a number (float), got 'a'"),
        ("steps=null", "steps: expected a whole number (int), got null"),
        ("steps=", "steps: expected a whole number (int), got null"),
        ("steps=true", "steps: expected a whole number (int), got true"),
        ("resume=yes", "resume: expected true or false (bool), got 'yes'; write true"),
        ("resume=0", "resume: expected true or false (bool), got 0; write false"),
        ("betas=0.9", "betas: expected a list such as [a, b] (float each), got 0.9"),
        ("betas={a: 1}", "betas: expected a list such as [a, b] (float each), got {a: 1}"),
        ("betas=[0.1, null]", "betas: entry 1: expected a number (float), got null"),
        ("optimizer.clip=big", "optimizer.clip: expected a number (float) or null, got 'big'"),
        ("mode=null", "mode: expected one of none, online, got null"),
        ("mode=onlin", "; did you mean 'online'?"),
        ("steps.more=3", "unknown key 'steps.more'"),
        ("rollout=fast", "set rollout.KEY=value instead, such as rollout.n=..., got fast"),
        ("=3", "expected key=value, got '=3'"),
        ("steps", "steps=VALUE sets it"),
        ("--stepz=3", "unknown key 'stepz'; did you mean 'steps'?"),
        ("--print-confg", "unknown key 'print_confg'; did you mean '--print-config'?"),
        ("--rollout.n", "--rollout.n: expected a whole number (int) after it, got nothing"),
    ],
)
def test_a_wrong_argument_is_one_clear_message_and_status_2(capsys, argument, expected):
    assert expected in _error(capsys, argument)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("stepz: 3", "c.yaml: unknown key 'stepz'; did you mean 'steps'?"),
        ("rollout: {m: 3}", "unknown key 'rollout.m'"),
        ("steps: [1", "c.yaml is not valid YAML"),
        ("steps: 1\nsteps: 2", "the key 'steps' is given twice"),
        ("- 1", "expected a mapping of keys at the top, got a list"),
        ("steps", "expected a mapping of keys at the top, got 'steps'"),
        ("mode: {a: b}", "mode: expected text (str), got {a: b}; put the text in quotes"),
        ("rollout: 3", "rollout is a section"),
        ("steps: many", "c.yaml: steps: expected a whole number (int), got 'many'"),
        ("optimizer: {lr: '${nowhere}'}", "nowhere"),
    ],
)
def test_a_wrong_file_is_one_clear_message_and_status_2(tmp_path, capsys, content, expected):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    assert expected in _error(capsys, "--config", str(file))


def test_a_file_that_the_system_does_not_let_be_read_is_one_message(tmp_path, capsys, monkeypatch):
    file = tmp_path / "c.yaml"
    file.write_text("steps: 3")

    def read_text(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", read_text)
    said = _error(capsys, "--config", str(file))
    assert f"--config: {file} cannot be read (Permission denied)" in said


def test_numbers_and_strategies_are_read_as_they_are_written(tmp_path):
    """YAML 1.1 takes 4_1_5 for 415 and 1e-3 for text."""
    file = tmp_path / "c.yaml"
    file.write_text("rollout: {strategy: 6_1_7}\noptimizer: {lr: 1e-3}\n")
    config = load_config(Config, ["--config", str(file)])
    assert (config.rollout.strategy, config.optimizer.lr) == ("6_1_7", 1e-3)
    config = load_config(Config, ["rollout.strategy=2_1_3", "optimizer.lr=-.5E+2", "steps=007"])
    assert (config.rollout.strategy, config.optimizer.lr, config.steps) == ("2_1_3", -50.0, 7)


@pytest.mark.parametrize("word", ["off", "OFF", "no", "yes", "on", "y"])
def test_only_true_and_false_are_booleans(tmp_path, word):
    """YAML 1.1 takes `off` for False, and so for the text 'False'."""
    file = tmp_path / "c.yaml"
    file.write_text(f"rollout:\n  strategy: {word}\nresume: TRUE\n")
    config = load_config(Config, ["--config", str(file)])
    assert config.rollout.strategy == word and config.resume is True
    config = load_config(Config, [f"rollout.strategy={word}", "resume=True"])
    assert config.rollout.strategy == word and config.resume is True
    assert load_config(Config, ["resume=false"]).resume is False


def test_an_empty_file_means_the_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("# nothing set\n")
    assert load_config(Config, ["--config", str(file)]) == Config()


def test_a_missing_file_and_a_missing_required_key_are_named(capsys):
    assert "no file nowhere.yaml" in _error(capsys, "--config", "nowhere.yaml")
    assert f"no file {'long' * 100}" in _error(capsys, "--config", "long" * 100)
    assert "required keys ['model']" in _error(capsys, schema=NeedsModel)
    assert load_config(NeedsModel, ["model=here"]).model == "here"


@pytest.mark.parametrize(
    "argv",
    [
        ["steps=3", "rollout.n=2", "optimizer.lr=-1e-3", "resume=true"],
        ["--steps=3", "--rollout.n=2", "--optimizer.lr=-1e-3", "--resume=true"],
        ["--steps", "3", "--rollout.n", "2", "--optimizer.lr", "-1e-3", "--resume", "true"],
        ["--resume", "--steps", "3", "rollout.n=2", "--optimizer.lr=-1e-3"],
    ],
)
def test_a_setting_may_be_written_with_dashes_and_without(argv):
    config = load_config(Config, argv)
    assert (config.steps, config.rollout.n, config.optimizer.lr) == (3, 2, -1e-3)
    assert config.resume is True


@dataclass
class Words:
    aliases: ClassVar[dict[str, str]] = {"base": "start_from"}

    max_batch: int = option(1, "slots")
    start_from: str | None = option(None, "directory")
    template: str = option("{question}", "text")
    tags: list[str] = option([], "words")
    base: Rollout = option(Rollout, "a section whose name stands for another key, too")


@pytest.mark.parametrize(
    "argv",
    [["max-batch=4"], ["--max-batch", "4"], ["--max_batch=4"], ["max_batch=4", "max_batch=4"]],
)
def test_words_are_joined_by_dashes_or_underscores(argv):
    assert load_config(Words, argv).max_batch == 4


def test_an_alias_is_a_text_where_the_section_of_that_name_is_a_mapping():
    config = load_config(Words, ["--base", "here", "base.n=3"])
    assert (config.start_from, config.base.n) == ("here", 3)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{question}", "{question}"),
        ("{question} = ?", "{question} = ?"),
        ("Q: {question}, A:", "Q: {question}, A:"),
        ("[{question}]", "[{question}]"),
        (r"{question}\n\tA:", "{question}\n\tA:"),
        (r"a\\nb", r"a\nb"),
        (r"\d+ \\ \q", r"\d+ \ \q"),
        (r"'{question}\n'", r"{question}\n"),
        (r'"{question}\n"', "{question}\n"),
        ('"a" or "b"', '"a" or "b"'),
        ("5", "5"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("# no comment", "# no comment"),
        ("${question}", "${question}"),
        ("", ""),
    ],
)
def test_the_text_of_a_text_is_taken_as_it_stands(text, value):
    assert load_config(Words, [f"template={text}"]).template == value
    assert load_config(Words, ["--template", text]).template == value
    nullable = load_config(Words, [f"start_from={text}"]).start_from
    assert nullable == (value if text else None)


def test_text_with_an_escaped_reference_is_checked_as_text(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("template: 'Solve \\${max_batch}, ${max_batch}'\nmax_batch: 4")
    assert load_config(Words, ["--config", str(file)]).template == "Solve ${max_batch}, 4"
    file.write_text("base: {n: '\\${max_batch}'}")
    said = _error(capsys, "--config", str(file), schema=Words)
    assert "c.yaml: base.n: expected a whole number (int), got '${max_batch}'" in said


@pytest.mark.parametrize(
    "argv", [["max_batch=5", "--max-batch", "4"], ["--max_batch=5", "max-batch=4"]]
)
def test_of_several_values_for_a_key_the_last_wins_however_it_is_written(argv):
    assert load_config(Words, argv).max_batch == 4


@dataclass
class Ruled:
    rules: ClassVar[tuple[Needs, ...]] = (
        Needs(
            ("rollout.*", "!rollout.n"),
            lambda v: v["mode"] == "online",
            "[mode] samples nothing; set mode=online, or leave it out",
        ),
        Needs(("warm",), lambda v: v["steps"] > 1, "there is one step", unless=7),
    )

    mode: str = option("online", "what is done")
    steps: int = option(5, "number of updates")
    warm: int = option(0, "of them")
    rollout: Rollout = option(Rollout, "generation")


def test_a_setting_that_changes_nothing_is_refused_with_the_reason(capsys):
    message = _error(capsys, "mode=idle", "rollout.temperature=0.5", schema=Ruled)
    assert "rollout.temperature=0.5 changes nothing: mode=idle samples nothing; set" in message
    assert "warm=2 changes nothing: there is one step" in _error(
        capsys, "steps=1", "warm=2", schema=Ruled
    )
    for argv in (["mode=idle", "rollout.temperature=1.0", "rollout.n=3"], ["steps=1", "warm=7"]):
        load_config(Ruled, argv)


def test_a_command_line_may_make_settings_of_a_file_idle_but_a_file_not_its_own(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("rollout: {temperature: 0.5}\n")
    assert load_config(Ruled, ["--config", str(file), "mode=idle"]).mode == "idle"
    file.write_text("rollout: {temperature: 0.5}\nmode: idle\n")
    message = _error(capsys, "--config", str(file), schema=Ruled)
    assert "rollout.temperature=0.5 changes nothing" in message
    assert load_config(Ruled, ["--config", str(file), "mode=online"]).rollout.temperature == 0.5


@pytest.mark.parametrize("program", [RLConfig, SFTConfig, ServeConfig])
def test_rules_name_keys_that_there_are(program):
    known = [key.name for key in keys_of(program)]
    for rule in program.rules:
        for name in rule.names:
            name = name.removeprefix("!")
            assert any(key == name or key.startswith(name.removesuffix("*")) for key in known), name
        named = re.findall(r"\[([\w.]+)\]", rule.why)
        assert set(named) <= set(known), rule


BITS_64 = f"expected an integer of 64 bits, {-(1 << 63)} to {(1 << 64) - 1}, got "
BITS_32 = f"expected an integer of 32 bits, 0 to {(1 << 32) - 1}, got "
SEEDS = [
    (RLConfig, "seed", 1 << 64, BITS_64),
    (RLConfig, "seed", -(1 << 63) - 1, BITS_64),
    (RLConfig, "eval.seed", 10**30, BITS_64),
    (RLConfig, "eval.seed", (1 << 64) - 1, BITS_64),  # the problems' numbers come on top
    (RLConfig, "data.seed", 1 << 32, BITS_32),
    (RLConfig, "seed", "1.5", "expected a whole number (int), got "),
    (RLConfig, "seed", "true", "expected a whole number (int), got "),
    (RLConfig, "eval.seed", "many", "expected a whole number (int), got "),
    (SFTConfig, "seed", 1 << 32, BITS_32),
    (SFTConfig, "seed", -1, BITS_32),
    (SFTConfig, "data.seed", 1 << 40, BITS_32),
]


@pytest.mark.parametrize(("schema", "key", "seed", "said"), SEEDS)
def test_a_seed_of_too_many_bits_is_refused_and_not_cut(capsys, schema, key, seed, said):
    with pytest.raises(SystemExit) as end:
        parse_config(schema, [f"{key}={seed}"], "train", "Trains.")
    message = capsys.readouterr().err
    assert end.value.code == 2 and f"{key}: " in message and said in message


def test_seeds_that_fit_are_taken_as_they_are():
    taken = [f"seed={(1 << 64) - 1}", f"eval.seed={-(1 << 63)}", f"data.seed={(1 << 32) - 1}"]
    cfg, _ = parse_config(RLConfig, taken, "train", "Trains.")
    seeds = cfg.seed, cfg.eval.seed, cfg.data.seed
    assert seeds == ((1 << 64) - 1, -(1 << 63), (1 << 32) - 1)


@pytest.mark.parametrize(
    "argv",
    [
        ["model=d", "port=8001", "engine.max_batch=3",
         "speculation.control.strategies=[off, 2_1_3]"],
        ["--model=d", "--port=8001", "--engine.max-batch=3",
         "--speculation.control.strategies=[off,2_1_3]"],
        ["--model", "d", "--port", "8001", "--engine.max_batch", "3",
         "--speculation.control.strategies", "[off, 2_1_3]"],
    ],
)  # fmt: skip
def test_the_server_takes_every_spelling(argv):
    cfg = load_config(ServeConfig, [*argv, "speculation.control.controller=goodput"])
    assert (cfg.model, cfg.port, cfg.engine.max_batch) == ("d", 8001, 3)
    assert cfg.speculation.control.strategies == ["off", "2_1_3"]


def test_templates_need_no_quotes_of_their_own():
    cfg = load_config(RLConfig, [r"data.prompt_template={question}\nThink, then: #### n"])
    assert cfg.data.prompt_template == "{question}\nThink, then: #### n"
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    assert load_config(
        ServeConfig, ["--model", "d", "--chat-template", template]
    ).chat_template == (template)


# --- settings in a checkpoint ---------------------------------------------------------------------


def saved_settings(*gone: str, schema=RLConfig) -> dict:
    """The default settings as a version saved them that did not have these yet."""
    settings = fingerprint(schema())
    for name in gone:
        *above, last = name.split(".")
        del functools.reduce(dict.__getitem__, above, settings)[last]
    return settings


@pytest.mark.parametrize(
    "gone", ["seed", "algo", "rollout.invariant", "draft.spot.gaps", "rollout.control", "reward"]
)
def test_a_setting_that_the_version_before_lacked_is_no_difference_at_its_default(gone):
    require_same_settings(saved_settings(gone), fingerprint(RLConfig()), RLConfig)


@pytest.mark.parametrize(
    ("gone", "setting", "section"),
    [
        ("seed", "seed=3", "seed"),
        ("algo", "algo.tis=true", "algo"),
        ("algo.tis", "algo.tis=true", "algo"),
        ("rollout.control", "rollout.control.bs_threshold=4", "rollout"),
        ("draft.spot.updates", "optim.lr=0.5", "optim"),
    ],
)
def test_but_where_it_has_another_value_the_run_is_not_resumed(gone, setting, section):
    current = fingerprint(parse_config(RLConfig, [setting])[0])
    with pytest.raises(ConfigError, match=f"made with other settings of {section};"):
        require_same_settings(saved_settings(gone), current, RLConfig)


@pytest.mark.parametrize("program", [RLConfig, SFTConfig, DraftRunConfig])
def test_a_head_is_trained_on_the_policys_distribution_unless_another_loss_is_set(program):
    assert parse_config(program, [])[0].draft.loss == "kl"


@pytest.mark.parametrize("program", [RLConfig, SFTConfig, DraftRunConfig])
def test_a_run_whose_choice_has_another_name_since_goes_on(program):
    current = fingerprint(parse_config(program, ["draft.loss=kl"])[0])
    saved = copy.deepcopy(current)
    saved["draft"]["loss"] = "soft_ce"
    require_same_settings(saved, current, program)
    saved["draft"]["loss"] = "ce"
    said = r"made with other settings of draft; resume .* configuration \(draft.loss=ce\)"
    with pytest.raises(ConfigError, match=said):
        require_same_settings(saved, current, program)


@pytest.mark.parametrize(
    "untrained", ["draft.mode=none", "draft.mode=frozen", "rollout.draft=ngram"]
)
def test_the_steps_of_a_head_that_is_not_trained_are_no_difference(untrained):
    def settings(*given) -> dict:
        cfg, _ = parse_config(RLConfig, ["model=m", *given])
        return Trainer.fingerprint(SimpleNamespace(cfg=cfg))

    current = settings(untrained)
    for steps in (1, 4):  # as earlier versions saved them, whether a head was trained or not
        saved = copy.deepcopy(current)
        saved["draft"]["unroll_steps"] = steps
        require_same_settings(saved, current, RLConfig)
    trained = settings("rollout.draft=random", "draft.mode=online")
    saved = copy.deepcopy(trained)
    saved["draft"]["unroll_steps"] = 1
    with pytest.raises(ConfigError, match=r"configuration \(draft.unroll_steps=1\)"):
        require_same_settings(saved, trained, RLConfig)


def test_a_setting_that_is_gone_since_or_has_no_default_is_a_difference():
    saved = saved_settings()
    saved["algo"]["of_old"] = None
    with pytest.raises(ConfigError, match="made with other settings of algo;"):
        require_same_settings(saved, fingerprint(RLConfig()), RLConfig)

    @dataclass
    class Asks:
        width: int = option(REQUIRED, "of it")

    with pytest.raises(ConfigError, match="made with other settings of width;"):
        require_same_settings({}, {"width": 3}, Asks)


def test_in_invariant_mode_one_replica_without_devices_of_its_own_is_another_program():
    def settings(*given) -> dict:
        cfg, _ = parse_config(RLConfig, ["model=m", "rollout.invariant=true", *given])
        return Trainer.fingerprint(SimpleNamespace(cfg=cfg))

    one, two, three = settings(), *(settings(f"rollout.replicas={n}") for n in (2, 3))
    require_same_settings(two, three, RLConfig)
    for saved, current in ((one, two), (two, one)):
        with pytest.raises(ConfigError, match="made with other settings of rollout;"):
            require_same_settings(saved, current, RLConfig)
