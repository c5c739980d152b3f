"""Files of a run that a kill, a full disk or an editor damaged."""

import json

import pytest

from train.run.files import RunFileError, keep_before, read_lines
from train.run.start import USER_ERRORS, can_resume

CUT = json.dumps({"step": 2, "text": "\u00e9"}, ensure_ascii=False).encode()[:-3]


def test_a_damaged_line_is_named_and_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for bad, said in ((CUT, "line 1: not JSON"), (b"[1]", "line 1: expected an object")):
        path.write_bytes(bad + b"\n" + b'{"step": 2}\n')
        for read in (read_lines, lambda path: keep_before(path, 2)):
            with pytest.raises(RunFileError, match=said):
                read(path)
        assert path.read_bytes() == bad + b"\n" + b'{"step": 2}\n'
        assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("run.json", b"[{", "run.json: expected a list of starts, .* it cannot be read"),
        ("run.json", b"{}", "run.json: expected a list of starts"),
        ("config.yaml", b"a: [", "config.yaml: expected settings in sections"),
        ("metrics.jsonl", b'{\n{"step": 1}\n', "metrics.jsonl, line 1: not JSON"),
    ],
)
def test_resuming_names_a_damaged_file_before_anything_is_compiled(tmp_path, name, text, said):
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    (tmp_path / name).write_bytes(text)
    with pytest.raises(RunFileError, match=said) as error:
        can_resume(tmp_path, None)
    assert isinstance(error.value, USER_ERRORS), "printed without traceback"
