"""docs/features.md says which program has which setting of the library, as the schemas say it."""

import dataclasses
import itertools
import os
from pathlib import Path

from serve.cli.arguments import GenerateConfig
from serve.model import Slots
from serve.protocol import ChatRequest, CompletionRequest
from serve.settings import ServeConfig
from specjax import ControlConfig, EngineConfig, SamplingParams, SpecConfig
from specjax.config.sampling import Sampling
from specjax.settings import keys_of
from specjax.verify.__main__ import VerifyConfig
from train.schema import RLConfig

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "features.md"
PROGRAMS = {
    "`specjax generate`": GenerateConfig,
    "`specjax verify`": VerifyConfig,
    "`specjax serve`": ServeConfig,
    "`train.rl`": RLConfig,
}
REQUEST = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
SECTIONS = {
    "How to speculate": SpecConfig,
    "Controllers": ControlConfig,
    "How tokens are drawn": Sampling,
    "Further options of a request": SamplingParams,
    "Slots and devices": Slots,
    "The engine": EngineConfig,
}


def last_words(schema: type) -> set[str]:
    """The keys of a program, without their sections; those of a request belong to the server."""
    of_library = ("", "rollout", "speculation", "engine")
    keys = [key.name for key in keys_of(schema)]
    names = [name.replace("control.", "").split(".") for name in keys]
    words = {name[-1] for name in names if len(name) < 3 and "".join(name[:-1]) in of_library}
    return words | (REQUEST if schema is ServeConfig else set())


def table() -> str:
    lines, taken = [], set()
    known = {name: last_words(schema) for name, schema in PROGRAMS.items()}
    for title, cls in SECTIONS.items():
        fields = [f for f in dataclasses.fields(cls) if not f.metadata.get("internal")]
        names = [field.name for field in fields if field.name not in taken]
        taken |= {*names}
        rows = {name: tuple(name in words for words in known.values()) for name in names}
        for has, group in itertools.groupby(sorted(names, key=rows.get, reverse=True), rows.get):
            cells = " | ".join("yes" if one else "–" for one in has)
            lines.append(f"| {title} | {', '.join(f'`{name}`' for name in group)} | {cells} |")
            title = ""
    return "\n".join(
        [f"|  |  | {' | '.join(PROGRAMS)} |", "|---" * (2 + len(PROGRAMS)) + "|", *lines]
    )


def test_the_document_says_what_the_programs_have():
    head, _, rest = DOCUMENT.read_text(encoding="utf-8").partition("|  |  |")
    tail = rest.partition("\n\n")[2]
    found = f"{head}{table()}\n\n{tail}"
    if os.environ.get("SPECJAX_WRITE_FEATURES") == "1":
        DOCUMENT.write_text(found, encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == found, (
        "run `make features`, and look at what changed"
    )
