"""`bench.tpu`: figures of a chunk that the TPU compiler made, and tables of them."""

import json
from pathlib import Path

import pytest
from chunk_text import CHUNK

from bench import record
from bench.markdown import marks, programs_of, put
from bench.record import figure, figures_in, result_of
from bench.tpu import __main__ as command
from bench.tpu.programs import LAYERS, MODEL
from bench.tpu.rounds import figures_of, line, scaled
from bench.tpu.table import TOOL, table

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def figures() -> dict:
    return figures_of(CHUNK) | {"temporaries": figure(5e6, "bytes")}


def result(figures: dict, layers: int, **changes) -> dict:
    """A result file of one program whose figures are replaced by `changes`."""
    figures = figures | {key: figure(value, "x") for key, value in changes.items()}
    named = {f"4_1_5:8/{key}": entry for key, entry in figures.items()}
    return result_of("v5e", {"layers": layers}, named)


def test_figures_of_a_chunk_are_those_of_a_round(figures):
    value = {key: entry["value"] for key, entry in figures.items()}
    assert value["cycles/layers"] == 2000 and value["cycles/lm_head"] == 700
    assert value["cycles/commit"] == value["cycles/draft"] == 0
    assert value["cycles_outside"] == 360 and value["calls/all-reduce"] == 2
    assert value["counted_once"] == ["noise"] and value["loops"] == ["layers x 2", "noise x ?"]
    assert value["copied_inputs/round"] == {"state.memory.pages[0].k": "cache"}
    assert value["copied_inputs/entry"] == {"params['layers']['q']": "weights"}
    assert value["copied/entry"] == 2 * 4096 * 1024


def test_layers_are_scaled_to_as_many_as_the_model_has_and_nothing_else_is(figures):
    cycles = scaled({key: entry["value"] for key, entry in figures.items()}, layers=2)
    assert LAYERS == 36 and cycles["layers"] == 18 * 2000 and cycles["lm_head"] == 700
    said = line("off:8", figures, layers=2)
    assert "at 36 layers: layers 0.036M" in said and "noise 4e-05M+" in said
    assert "2 all-reduce" in said and "params['layers']['q']" in said


def test_a_text_without_rounds_or_estimates_is_refused():
    with pytest.raises(ValueError, match="with a loop over rounds and estimated cycles"):
        figures_of(CHUNK.replace("estimated_cycles", "x"))


def test_a_table_has_a_row_before_and_one_after(figures):
    before, after = result(figures, 2), result(figures, 4)
    rows = [row.split(" | ") for row in table([before, after]).splitlines()]
    assert [row[:3] for row in rows[2:]] == [
        ["| `4_1_5` x 8", "before", "0.04+"],
        ["| `4_1_5` x 8", "after", "0.02+ (0.51x)"],
    ]
    assert "version" not in table([before])
    with pytest.raises(ValueError, match="expected one or two files"):
        table([before] * 3)
    other = result_of("v5e", {"layers": 2}, {"off:1/loops": figure([], "x")})
    with pytest.raises(ValueError, match="a program in common"):
        table([before, other])
    assert list(programs_of(other)) == ["off:1"]


def test_a_table_replaces_the_one_between_its_marks(figures, tmp_path, capsys):
    page, file = tmp_path / "page.md", tmp_path / "v5e.json"
    begin, end = marks("rounds", TOOL)
    page.write_text(f"a\n{begin}\nold\n{end}\nb\n")
    file.write_text(json.dumps(result(figures, 2)))
    command.main(["table", str(file), "--into", str(page)])
    command.main(["table", str(file)])
    assert page.read_text() == f"a\n{begin}\n{capsys.readouterr().out}{end}\nb\n"
    with pytest.raises(ValueError, match="expected .* in the page"):
        put("a page", "rounds", "x", TOOL)


def test_texts_that_were_kept_are_read_again(figures, tmp_path, capsys):
    file, out = tmp_path / "4_1_5_x_8.txt", tmp_path / "v5e.json"
    file.write_text(CHUNK)
    old = result(figures, 2, **{"cycles/layers": 1})
    out.write_text(json.dumps(old))
    command.main(["read", str(file), "--layers", "2", "--out", str(out)])
    assert capsys.readouterr().out.startswith("4_1_5:8: 0.0367M at 36 layers")
    again = json.loads(out.read_text())
    assert again["figures"]["4_1_5:8/cycles/layers"]["value"] == 2000
    assert again["figures"]["4_1_5:8/temporaries"]["value"] == 5e6
    assert again["date"] == old["date"] and again["command"] == old["command"]
    new = tmp_path / "whole.json"
    command.main(["read", str(file), "--whole", "--temporaries", "7e6", "--out", str(new)])
    whole = programs_of(json.loads(new.read_text()))["4_1_5:8"]
    assert whole["cycles/rest"] == 5 + 300 + 60 and whole["cycles_outside"] == 0
    assert whole["temporaries"] == 7e6
    assert "| `4_1_5` x 8 | 0.00+ | 0.00+ |" in table([json.loads(new.read_text())])


def test_figures_are_added_to_a_file_of_the_same_settings_only(figures, tmp_path):
    settings = {"topology": "v5e:2x2", "layers": 2, "scan": False, "features": []}
    file = tmp_path / "v5e.json"
    assert figures_in(file, settings) == {}
    record.write_result("v5e", settings, {f"off:8/{key}": x for key, x in figures.items()}, file)
    assert figures_in(file, settings).keys() == {f"off:8/{key}" for key in figures}
    with pytest.raises(ValueError, match="has figures with other layers, scan; expected the same"):
        figures_in(file, settings | {"layers": 4, "scan": True})


@pytest.mark.parametrize("name", ["v5e", "v5e_36", "v5p", "training"])
def test_the_tables_in_the_docs_are_made_of_the_files_that_are_committed(name):
    page = (ROOT / "docs/tpu.md").read_text(encoding="utf-8")
    files = [ROOT / f"bench/results/tpu/{file}.json" for file in (f"base_{name}", name)]
    made = table([json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()])
    assert put(page, name, made, TOOL) == page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rounds", "off"], "a strategy, a colon and a batch of 1 to 64"),
        (["rounds", "off:65"], "a batch of 1 to 64"),
        (["rounds", "of:8"], "of"),
        (["rounds", "off:8", "--features", "top_q"], "expected one of sampled, top_k"),
        (["rows"], "expected one of rounds, read, table"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert said in f"{stopped.value} {capsys.readouterr().err}"


def test_the_model_has_the_widths_of_qwen3_8b():
    shape = json.loads((ROOT / "assets/shapes/Qwen3-8B/config.json").read_text())
    mixer, mlp = MODEL.layers[0].mixer, MODEL.layers[0].mlp
    assert (MODEL.hidden_size, MODEL.vocab_size) == (shape["hidden_size"], shape["vocab_size"])
    assert mlp.intermediate_size == shape["intermediate_size"]
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (
        shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"],
    )  # fmt: skip
    assert shape["num_hidden_layers"] == LAYERS
