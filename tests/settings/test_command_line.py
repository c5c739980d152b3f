"""The command line of every program: what it accepts, what it says when it does not."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from specjax.command_line import Call, given_in, parse_config, typed_in
from specjax.settings import ConfigError, fingerprint, option, require_same_settings


@dataclass(frozen=True)
class Rollout:
    """Generation.

    Attributes:
      n, m: samples
        per prompt.
    """

    n: int = option(8, least=1)
    m: int = 2
    temperature: float = option(1.0, "sampling temperature", needs="mode=online")
    strategy: str = "4_1_5"
    stop: Any = option(None, kind=str | list[str], several=True)

    def __post_init__(self):
        object.__setattr__(self, "stop", self.stop or ())
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")


@dataclass
class Optimizer:
    lr: float = option(1e-4, "peak learning rate")
    clip: float | None = option(None, "largest gradient norm; null for none")


@dataclass
class Entry:
    path: str | None = None
    n: int = option(1, least=1)


@dataclass
class Config:
    unread: ClassVar[dict[str, str]] = {"rollout.m": "this program has no use for it"}
    aliases: ClassVar[dict[str, str]] = {"lr": "optimizer.lr"}
    words: ClassVar[tuple[str, ...]] = ("prompts",)

    prompts: list[str] = option([])
    steps: int = option(10, "number of updates", least=1)
    mode: str = option("online", "how the draft head is trained", choices=("none", "online"))
    betas: list[float] = option([0.9, 0.95], "Adam's decay rates")
    resume: bool = option(False, "go on from the last checkpoint")
    warm: int = option(0, "of the updates", needs=("several", "!resume"))
    template: str | None = None
    args: dict[str, Any] = option({})
    sets: dict[str, Entry] = option({})
    rollout: Rollout = option(Rollout, "generation")
    optimizer: Optimizer = option(Optimizer, "the policy's optimizer")
    more: Optimizer | None = None

    @property
    def several(self) -> bool:
        """Several updates, by steps above 1."""
        return self.steps > 1


@dataclass
class Again(Call):
    again: bool = option(False, "go on")


def read(*argv: str) -> Config:
    return parse_config(Config, argv, "train.rl", call=Again)[0]


@pytest.fixture
def said(capsys):
    def call(*argv: str) -> str:
        with pytest.raises(SystemExit) as end:
            read(*argv)
        captured = capsys.readouterr()
        assert end.value.code == 2 and not captured.out
        assert len(captured.err.splitlines()) == 2
        assert captured.err.startswith("python -m train.rl: error: ")
        return captured.err

    return call


def test_arguments_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("steps: 3\nrollout: {n: 4, strategy: 6_1_7}\noptimizer: {clip: 1, lr: 1e-3}\n")
    config = read("--config", str(file), "rollout.n=2", "betas=0.8,0.9")
    assert isinstance(config, Config) and isinstance(config.rollout, Rollout)
    assert (config.steps, config.rollout.n, config.rollout.strategy) == (3, 2, "6_1_7")
    assert (config.optimizer.lr, config.optimizer.clip, config.betas) == (1e-3, 1.0, [0.8, 0.9])
    assert typed_in(config) == {"rollout.n", "betas"} < given_in(config)
    assert read("--config", str(file), "optimizer.clip=null").optimizer.clip is None


@pytest.mark.parametrize(
    "argv",
    [
        ["steps=3", "rollout.n=2", "optimizer.lr=-1e-3", "resume=true", "more.clip=1"],
        ["--steps", "3", "--rollout.n", "2", "--lr", "-1e-3", "--resume", "--more={clip: 1}"],
        ["--resume", "--steps=7", "steps=3", "rollout={n: 2}", "lr=-.1E-2", "more.clip=1"],
        [
            "--no-resume",
            "--resume",
            "true",
            "--steps=3e0",
            "rollout.n=2",
            "lr=-1e-3",
            "more.clip=1",
        ],
    ],
)
def test_a_setting_may_be_written_with_dashes_and_without(argv):
    config = read(*argv)
    assert (config.steps, config.rollout.n, config.optimizer.lr) == (3, 2, -1e-3)
    assert config.resume is True and config.more == Optimizer(clip=1.0)


def test_text_is_taken_as_it_stands_and_words_need_no_name():
    config = read(
        "17+25=", "a b", r"template={q}: ${x}\n\\ 'a'", "rollout.stop=x", "rollout.stop=y"
    )
    assert config.prompts == ["17+25=", "a b"] and config.template == "{q}: ${x}\n\\ 'a'"
    assert config.rollout.stop == ["x", "y"] and read("template=").template is None
    assert read("template='a'", "--", "--x", "steps=3").prompts == ["--x", "steps=3"]
    assert read("template='a'", "rollout.stop=[x, 'y: z']").rollout.stop == ["x", "y: z"]


def test_entries_have_names_of_the_users_and_mappings_grow(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("sets: {a: {n: 2}}\nargs: {x: 1}\n")
    config = read("--config", str(file), "sets.b.path=f", "args.y=2")
    assert config.sets == {"a": Entry(n=2), "b": Entry("f")} and config.args == {"x": 1, "y": 2}
    assert read("--config", str(file), "sets={}", "args={}") == read()


def test_help_lists_every_key_with_type_default_and_documentation(capsys):
    with pytest.raises(SystemExit) as end:
        parse_config(Config, ["--help"], "train.rl", "GRPO training", call=Again)
    text = capsys.readouterr().out
    assert end.value.code == 0 and "GRPO training" in text and "python -m train.rl PROMPTS" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert lines["rollout.n=8"].split()[1:] == ["int", "samples", "per", "prompt"]
    assert "float | None" in lines["optimizer.clip=null"] and "go on" in lines["--again"]
    assert "[one of none, online]" in lines["mode=online"] and "generation" in lines["rollout"]
    assert "sets.NAME.path=null" in text and "rollout.m" not in text


def test_print_config_prints_yaml_that_reads_back_to_the_same_config(tmp_path, capsys):
    arguments = ["steps=7", "rollout.temperature=0.5", "template=${x}$ {1}", "more.lr=1e-7"]
    with pytest.raises(SystemExit) as end:
        read(*arguments, "--print-config", "--again")
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert end.value.code == 0 and read("--config", str(file)) == read(*arguments)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("rolout.n=2", "unknown key 'rolout.n'; did you mean 'rollout.n'?"),
        ("max_new_tokens=1", "unknown key 'max_new_tokens'; --help lists every key"),
        ("clip=1", "unknown key 'clip'; did you mean 'more.clip'?"),
        ("--stepz=3", "unknown key 'stepz'; did you mean 'steps'?"),
        ("sets.a.pth=3", "unknown key 'sets.a.pth'; did you mean 'sets.a.path'?"),
        ("rollout.m=2", "unknown key 'rollout.m': this program has no use for it"),
        ("steps=2.5", "steps: expected int, got 2.5"),
        ("steps=", "steps: expected int, got null"),
        ("steps=0", "steps: expected at least 1, got 0"),
        ("--steps", "--steps: expected int after it"),
        ("optimizer.lr=nan", "optimizer.lr: expected a finite number, got nan"),
        ("rollout.temperature=hot", "rollout.temperature: expected float, got hot"),
        ("rollout.temperature=-1", "rollout.temperature must be at least 0"),
        ("rollout=3", "rollout: expected a section (rollout.KEY=value), got 3"),
        ("sets.a.n=x", "sets.a.n: expected int, got x"),
        ("mode=onlin", "mode: expected one of none, online, got onlin; did you mean 'online'?"),
        ("betas=[a]", "betas: expected list[float], got [a]"),
        ("betas=[1", "betas: expected list[float], got '[1', which is no YAML"),
        ("resume=maybe", "resume: expected bool, got maybe"),
    ],
)
def test_a_wrong_argument_is_one_clear_message_and_status_2(said, argument, expected):
    assert expected in said(argument)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("stepz: 3", "c.yaml: unknown key 'stepz'; did you mean 'steps'?"),
        ("steps: [1", "c.yaml is not valid YAML"),
        ("steps: 1\nsteps: 2", "the key 'steps' is given twice"),
        ("steps: many", "c.yaml: steps: expected int, got many"),
        ("[1]", "expected a mapping of keys at the top"),
    ],
)
def test_a_wrong_file_is_one_clear_message_and_status_2(tmp_path, said, content, expected):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    assert expected in said("--config", str(file))
    assert "no file no.yaml" in said("--config", "no.yaml")


# --- settings without effect ----------------------------------------------------------------------


def test_a_setting_without_effect_is_refused_with_what_it_needs(said):
    needs = (
        "rollout.temperature=0.5 has no effect: it needs mode=online, and mode is none; set mode"
    )
    assert f"{needs} or leave rollout.temperature out" in said(
        "mode=none", "rollout.temperature=0.5"
    )
    assert "it needs several updates, by steps above 1; change that" in said("steps=1", "warm=2")
    assert "it needs no resume, and resume is true; leave out resume" in said("--resume", "warm=2")
    read("mode=none", "rollout.temperature=1.0", "rollout.n=3", "warm=0")


def test_a_command_line_may_make_settings_of_a_file_idle_but_a_file_not_its_own(tmp_path, said):
    file = tmp_path / "c.yaml"
    file.write_text("rollout: {temperature: 0.5}\n")
    assert read("--config", str(file), "mode=none").mode == "none"
    file.write_text("rollout: {temperature: 0.5}\nmode: none\n")
    assert "rollout.temperature=0.5 has no effect" in said("--config", str(file))
    assert read("--config", str(file), "mode=online").rollout.temperature == 0.5


# --- settings in a checkpoint ---------------------------------------------------------------------


def test_a_run_goes_on_with_the_settings_that_it_had():
    saved = fingerprint(read("sets.a.n=2", "args.x=1"), ["steps"])
    require_same_settings(saved, fingerprint(read("sets.a.n=2", "args.x=1", "steps=3"), ["steps"]))
    said = r"other settings of optimizer, sets; .* \(no more.*optimizer.lr=0.0001, sets.a.n=2\)"
    require_same_settings({"a": {"b": 1}}, {"new": None, "a": {"b": 1}})
    now = fingerprint(read("lr=0.5", "sets.a.n=3", "args.x=1"), ["steps"])
    with pytest.raises(ConfigError, match=said.replace("no more.*", "")):
        require_same_settings(saved, now)
