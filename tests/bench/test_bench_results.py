"""docs/results.md, README's table and tables of other pages are made from the result files."""

from bench.results_page import RESULTS, ROOT, contents, made


def test_the_pages_are_what_the_command_makes_of_the_result_files():
    for path, text in made().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make results`"


def test_every_result_file_is_on_the_page():
    sections = contents()["sections"]
    shown = {words.split()[0] for section in sections for words in section["files"].values()}
    files = {path.name for path in (ROOT / RESULTS).glob("*.json")}
    assert files <= shown, "show it in bench/results_page.yaml, or delete it"
