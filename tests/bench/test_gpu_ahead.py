"""`bench.gpu.ahead`: figures of a chunk that XLA made for a GPU, and tables of them."""

import contextlib
import json
import subprocess
from pathlib import Path

import pytest
from chunk_text import CHUNK

from bench import gpu
from bench.gpu.ahead import __main__ as command
from bench.gpu.ahead.rounds import (
    LINEAR,
    PAGE,
    SETTINGS,
    SOURCES,
    figures_in,
    figures_of,
    is_current,
    layers_traced,
    line,
    name_of,
    whole,
)
from bench.gpu.ahead.table import TOOL, table
from bench.gpu.chunks import Chunk, Size
from bench.gpu.program import Place
from bench.markdown import marks, programs_of, put
from bench.record import figure, result_of
from train.plan.hlo import Module
from train.plan.launches import launches, thunks

ROOT = Path(__file__).resolve().parents[2]
# A round that gathers all pages of 8 slots, also within a fusion that sees the cache differently.
_SCOPED = 'metadata={op_name="jit(within)/while/body/%s"}'
GATHERS = CHUNK.replace(
    "  %again = ",
    f"""  %pages = bf16[8,64,128,128]{{3,2,1,0}} gather(%kv, %i), {_SCOPED % "layers/gather"}
  %more = bf16[4,64,128,128]{{3,2,1,0}} fusion(%kv, %i), calls=%taken, {_SCOPED % "draft/layers"}
  %call = bf16[8,128]{{1,0}} custom-call(%pages, %more), {_SCOPED % "layers"}, {{target}}
  %again = """.replace("{target}", 'custom_call_target="__cudnn$fmhaSoftmax"'),
).replace(
    "%gathered (g: ",
    """%taken (c: bf16[2,64,128,128], n: s32[]) -> bf16[4,64,128,128] {
  %c = bf16[2,64,128,128]{3,2,1,0} parameter(0)
  %n = s32[] parameter(1)
  %flat = bf16[128,128,128]{2,1,0} bitcast(%c)
  ROOT %g = bf16[4,64,128,128]{3,2,1,0} gather(%flat, %n)
}

%gathered (g: """,
)
THUNKS = """000: kCommandBuffer [source | next=001 (1)]
    001: kCustomKernel [source | sink] loop_fusion grid: [1, 1, 1] threads: [16, 1, 1]
002: kWhile         [prev=000 (1) | sink]
condition:
    003: kCustomKernel [source | sink] loop_or_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source | next=006 (1)]
        004: kWhile [source | sink]
        condition:
            005: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
    006: kConditional   [prev=000 (1) | next=008 (1)]
        007: kGemm [source | sink] gemm
    008: kCopy [prev=006 (1) | sink] kCopy
"""
GRAPH = """000: kCommandBuffer [source | sink]
    001: kWhile [source | sink]
    condition:
        002: kCustomKernel [source | sink] loop_or_fusion grid: [1, 1, 1] threads: [1, 1, 1]
"""


@pytest.fixture(scope="module")
def figures() -> dict:
    timed = {name: figure(2.0, "s") for name in ("lowering", "compiling")}
    of_compiler = {"temporaries": figure(5e6, "bytes"), "traced": figure(3, "layers")}
    return figures_of(GATHERS, THUNKS) | timed | of_compiler


def test_kernels_are_counted_by_part_and_loops_as_often_as_they_run():
    module = Module(CHUNK)
    found = launches(module, module.round)
    # Without a scope: two sums, predicates of three iterations, a copy, an early copy.
    assert found.kernels == {"layers": 2, "lm_head": 1, "noise": 1, "rest": 7}
    assert found.loops == {"layers x 2": 1, "noise x ?": 1} and not found.branches
    assert found.bytes["lm_head"] == 2 * 8 * 128 + 2 * 4096 * 1024 + 4 * 8 * 1024
    assert not found.gathers and not found.library


def test_gathers_of_pages_are_found_in_fusions_too():
    module = Module(GATHERS)
    found, page = launches(module, module.round), 2 * 64 * 128 * 128
    assert found.gathers == {"layers": 1, "draft": 1} and found.gathered == 12 * page
    assert found.library == 1 and found.own == 0
    few = launches(Module(CHUNK), "round")
    called = found.bytes["layers"] - few.bytes["layers"]
    assert called == 2 * 8 * page + 12 * page + 2 * 8 * 128  # cuDNN reads what was gathered


def test_the_host_reads_predicates_outside_of_command_buffers_only():
    assert thunks(THUNKS) == thunks(THUNKS + "\n")
    found = thunks(THUNKS)
    assert (found.buffers, found.decisions, found.outside) == (2, 2, 3)
    found = thunks(GRAPH)
    assert (found.buffers, found.decisions, found.outside) == (1, 0, 0)
    with pytest.raises(ValueError, match="expected the thunk sequence"):
        thunks(CHUNK)


def test_figures_of_a_whole_model_are_computed_from_the_difference_of_two(figures):
    more = {key: entry for key, entry in figures.items()}
    more["kernels/layers"] = figure(10, "launches")
    more["traced"], more["loops"] = figure(3, "layers"), figure(["noise x 4"], "loops")
    few = more | {"kernels/layers": figure(7, "launches"), "traced": figure(2, "layers")}
    found = whole(more, few | {"loops": figure([], "loops")}, (3, 2), 36)
    assert found["kernels/layers"]["value"] == 10 + 33 * 3 and found["traced"]["value"] == 36
    assert found["loops"]["value"] == ["noise x 4"] and not LINEAR.match("loops")
    said = line("8B:off:8", found)
    assert "layers 109" in said and "36 layers traced" in said and "2 gathers of pages" in said
    assert "2 command buffers, 2 decisions by the host, 3 launches outside" in said


def test_a_text_without_rounds_is_refused():
    text = CHUNK.replace("while(", "custom-call(")
    with pytest.raises(ValueError, match="with a loop over rounds"):
        figures_of(text, THUNKS)


def test_a_name_says_shape_strategy_batch_and_options():
    name = name_of("1.7B:4_1_5:8:top_p:graph:attention=library")
    assert (name.shape, name.strategy, name.batch) == ("1.7B", "4_1_5", 8)
    assert name.graph and name.features.top_p and name.attention == "library"
    assert name.text == "1.7B:4_1_5:8:top_p:graph:attention=library"
    assert name_of("8B:4_1_5:8:draft_vocab=32768").draft_vocab == 32768 and not name.draft_vocab
    assert name_of("135M:off:1").attention == "auto" and not name_of("135M:off:1").graph


def test_layers_that_are_traced_are_counted():
    with layers_traced() as traced:
        Chunk(Place(), Size("tiny", 2, 24, rounds=2, attention="reference"))._lower()
    assert traced


def test_a_table_has_a_row_before_and_one_after(figures, tmp_path, capsys):
    def result(**changes):
        found = figures | {key: figure(value, "x") for key, value in changes.items()}
        return result_of("h100", {}, {f"8B:4_1_5:8:top_p/{k}": v for k, v in found.items()})

    before, after = result(), result(**{"kernels/rest": 0})
    rows = [row.split(" | ") for row in table([before, after]).splitlines()]
    assert rows[2][:3] == ["| 8B `4_1_5` x 8, top-p", "before", "14"]
    assert rows[3][:3] == ["| 8B `4_1_5` x 8, top-p", "after", "7 (0.50x)"]
    assert programs_of(before)["8B:4_1_5:8:top_p"]["decisions"] == 2
    page, (begin, end) = tmp_path / "page.md", marks("rounds", TOOL)
    page.write_text(f"a\n{begin}\nold\n{end}\nb\n")
    (tmp_path / "h100.json").write_text(json.dumps(before))
    command.main(["table", str(tmp_path / "h100.json"), "--into", str(page)])
    command.main(["table", str(tmp_path / "h100.json")])
    assert page.read_text() == f"a\n{begin}\n{capsys.readouterr().out}{end}\nb\n"


def test_texts_that_were_kept_are_read_again(tmp_path, capsys):
    for layers in (3, 2):
        (tmp_path / f"8B_x_off_x_8.{layers}.txt").write_text(GATHERS)
        (tmp_path / f"8B_x_off_x_8.{layers}.thunks").write_text(THUNKS)
    out = tmp_path / "h100.json"
    out.write_text(json.dumps(result_of("h100", {}, {"8B:off:8/gathers": figure(1, "x")})))
    command.main(["read", str(tmp_path), "--out", str(out)])
    assert "2 gathers of pages" in capsys.readouterr().out
    assert json.loads(out.read_text())["figures"]["8B:off:8/gathers"]["value"] == 2


def test_figures_are_added_to_a_file_of_the_same_settings_only(tmp_path):
    settings = {"card": "h100", "layers": [3, 2], "context": 4096}
    assert tuple(settings) == SETTINGS
    file = tmp_path / "h100.json"
    assert figures_in(file, settings) == {}
    file.write_text(json.dumps(result_of("h100", settings, {"8B:off:8/gathers": figure(1, "x")})))
    assert list(figures_in(file, settings)) == ["8B:off:8/gathers"]
    with pytest.raises(ValueError, match="has figures with other card; expected the same"):
        figures_in(file, settings | {"card": "h200"})


def test_the_table_in_the_docs_is_made_of_the_files_that_are_committed():
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    files = [ROOT / f"bench/results/gpu/ahead/{name}.json" for name in ("before_h100", "h100")]
    made = table([json.loads(file.read_text(encoding="utf-8")) for file in files])
    assert put(page, "rounds", made, TOOL) == page


def test_every_program_in_the_committed_files_names_the_commit_that_was_compiled():
    for name in ("before_h100", "h100"):
        text = (ROOT / f"bench/results/gpu/ahead/{name}.json").read_text(encoding="utf-8")
        programs = programs_of(json.loads(text))
        assert programs.keys() <= set(PAGE)
        assert all(values["sources"] for values in programs.values())
    assert all(name_of(text).text == text for text in PAGE)
    assert all((ROOT / path).exists() for path in SOURCES)


def test_figures_are_stale_when_sources_have_changed_since_or_history_lacks_the_commit(tmp_path):
    def git(*arguments) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def commit(path: str, text: str) -> dict:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        git("add", ".")
        git("commit", "-qm", text)
        return figure(git("rev-parse", "--short=12", "HEAD"), "commit")

    git("init", "-q")
    first = commit("specjax/a.py", "one")
    assert is_current(first, root=tmp_path) and not is_current(None, root=tmp_path)
    commit("docs/a.md", "a page")
    assert is_current(first, root=tmp_path), "pages decide nothing"
    assert not is_current(first | {"value": first["value"] + "-dirty"}, root=tmp_path)
    second = commit("train/plan/a.py", "two")
    assert is_current(second, root=tmp_path) and not is_current(first, root=tmp_path)
    git("checkout", "-q", "HEAD~1")
    assert not is_current(second, root=tmp_path), "it is not in the history of what is checked out"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rounds", "8B"], "a strategy and a batch, such as 8B:4_1_5:8"),
        (["rounds", "7B:off:8"], "expected a shape (135M, 1.7B, 8B)"),
        (["rounds", "8B:of:8"], "of"),
        (["rounds", "8B:off:8:top_q"], "expected options among graph, sampled"),
        (["rounds", "8B:4_1_5:8:draft_vocab=0"], "draft_vocab=COUNT"),
        (["round"], "expected one of rounds, read, updates, table"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert said in f"{stopped.value} {capsys.readouterr().err}"


def test_without_the_compiler_a_user_is_told_how_to_get_it(capsys):
    with contextlib.suppress(Exception):
        gpu.ahead.rounds.described("h100")
        pytest.skip("this environment has the compiler")
    with pytest.raises(SystemExit) as stopped:
        command.main(["rounds", "8B:off:8"])
    assert "make gpu-check ARGS=--python" in str(stopped.value)
