"""docs/results.md and README's table are made from the result files."""

import pytest

from bench import results_page
from bench.results_page import PAGE, README, RESULTS, ROOT, cell, contents, rows


def test_the_pages_are_what_the_command_makes_of_the_result_files():
    again = "run `make results` after a change of result files or of bench/results_page.py"
    assert (ROOT / PAGE).read_text(encoding="utf-8") == results_page.page(), again
    readme = (ROOT / README).read_text(encoding="utf-8")
    assert results_page.BEGIN in readme and results_page.END in readme
    assert readme == results_page.with_table(readme), again
    assert len(contents()["readme"]) <= 10


def test_every_result_file_is_on_the_page():
    sections = contents()["sections"]
    shown = {words.split()[0] for section in sections for words in section["files"].values()}
    files = {path.name for path in (ROOT / RESULTS).glob("*.json")}
    assert files <= shown, "show it in bench/results_page.py, or delete it"


def result(value, interval=None, unit="x"):
    return {"figures": {"a": {"value": value, "unit": unit, "interval": interval}}}


@pytest.mark.parametrize(
    ("found", "row", "text"),
    [
        (result(1.234, [1.1, 1.35]), "w | a", "1.23x [1.10, 1.35]"),
        (result(0.5, [0.25, None]), "w | a | %", "50% [25, none]"),
        (result(0.011, [0.01, 0.02]), "w | a | s in ms", "11 ms [10, 20]"),
        (result(20, unit="of 20 steps"), "w | a | of", "20 of 20 steps"),
        (result("4_1_5"), "w | a | text", "`4_1_5`"),
        (result(3.0), "w | a -> a | plain", "3.00 -> 3.00"),
        (result(1.0), "w | b", ""),
    ],
)
def test_a_figure_is_written_with_its_interval(found, row, text):
    assert cell(found, *rows(row)) == text


def test_a_figure_that_no_file_has_is_an_error():
    section = {"title": "T", "note": "Note.", "files": {"x": "identity.json"}}
    section["rows"] = ["w, batch {1 2} | no_such/{}"]
    with pytest.raises(ValueError, match="T: no file has the figure no_such/1"):
        results_page.table(section)
