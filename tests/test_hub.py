"""Hugging Face ids: the local cache first, then a download of what is read, and errors in a line.

The hub is a server on this machine that answers as the real one does.
"""

import http.server
import json
import re
import shutil
import socket
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

from serve.cli.main import main
from serve.settings import ServeConfig, load_llm
from specjax import LLM, SpecConfig, hub, verify
from specjax.checked_json import CheckpointError
from specjax.checkpoint import huggingface as hf
from specjax.command_line import parse_config
from train import rl, sft
from train.data import __main__ as data_report
from train.schema import RLConfig, SFTConfig

GOLDEN = Path(__file__).resolve().parent / "golden" / "qwen3"
COMMIT, OTHER = "a" * 40, "b" * 40
OFF = SpecConfig(strategy="off")

pytestmark = pytest.mark.usefixtures("logging_as_it_was")  # `specjax serve` sets it up


def fill_cache(home: Path, name: str, source: Path, commit: str = COMMIT, refs=("main",)) -> Path:
    """A model in a local cache as downloads leave it there: blobs, links to them, and refs."""
    model = home / "hub" / f"models--{name.replace('/', '--')}"
    folder = model / "snapshots" / commit
    folder.mkdir(parents=True)
    for number, file in enumerate(sorted(source.iterdir())):
        blob = model / "blobs" / f"{commit[:4]}{number}"
        blob.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, blob)
        (folder / file.name).symlink_to(blob)
    for ref in refs:
        (model / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (model / "refs" / ref).write_text(commit)
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache of its own; nothing may be downloaded."""
    for name in ("HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "home"


class Hub(http.server.BaseHTTPRequestHandler):
    """Models by id, each with the files of a directory; `gated/*` may not be read."""

    protocol_version = "HTTP/1.1"
    models: dict[str, Path] = {}
    asked: list[str] = []

    def do_GET(self):
        self._answer(body=True)

    def do_HEAD(self):
        self._answer(body=False)

    def _answer(self, body: bool):
        path = self.path.partition("?")[0]
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        name, revision = (api[1], api[3]) if api else (file[1], file[2]) if file else ("", "")
        if name not in self.models:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, body)
        if revision not in ("main", "v1", COMMIT):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
        files = sorted(self.models[name].iterdir())
        if api and api[2] == "revision":
            siblings = [{"rfilename": f.name} for f in files]
            return self._json({"id": name, "sha": COMMIT, "siblings": siblings}, body)
        if api:
            tree = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f"{n:040x}"}
                for n, f in enumerate(files)
            ]
            return self._json(tree, body)
        if name.startswith("gated/"):
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"}, body)
        if body:
            self.asked.append(file[3])
        content = (self.models[name] / file[3]).read_bytes()
        head = {"ETag": f'"{file[3]}"', "X-Repo-Commit": COMMIT}
        return self._send(200, content, head, body)

    def _json(self, value, body: bool):
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body)

    def _send(self, status: int, content: bytes, headers: dict, body: bool):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *unused):
        pass


@pytest.fixture
def remote(home, monkeypatch, tmp_path):
    """A hub with a model; the cache is empty."""
    source = tmp_path / "source"
    shutil.copytree(GOLDEN, source)
    (source / "consolidated.safetensors").write_bytes(b"the same weights in another layout")
    (source / "pytorch_model.bin").write_bytes(b"and again")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(Hub, "models", {"someone/tiny": source, "gated/tiny": source})
    monkeypatch.setattr(Hub, "asked", [])
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield source
    server.shutdown()
    server.server_close()
    thread.join()


# --- which directory ----------------------------------------------------------------------------


def test_a_local_directory_wins_over_an_id(home, tmp_path, monkeypatch):
    fill_cache(home, "owner/name", GOLDEN)
    monkeypatch.chdir(tmp_path)
    assert hub.find_model("owner/name").is_relative_to(home)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert hub.find_model("owner/name") == tmp_path / "owner" / "name"
    with pytest.raises(CheckpointError, match="revision 'main' belongs to a Hugging Face id"):
        hub.find_model("owner/name", "main")


@pytest.mark.parametrize(
    "name",
    ["/no/such/model", "./owner/name", "../owner/name", "name", "a/b/c", "owner/n/", "~/x"],
)
def test_what_can_only_be_a_path_is_not_taken_for_an_id(name, home):
    with pytest.raises(hub.ModelNotFoundError) as caught:
        hub.find_model(name)
    assert f"{name} does not exist" in str(caught.value) and "\n" not in str(caught.value)


# --- the local cache ----------------------------------------------------------------------------


def test_a_revision_is_a_branch_a_tag_or_a_commit_of_the_cache(home):
    first = fill_cache(home, "owner/name", GOLDEN)
    other = fill_cache(home, "owner/name", GOLDEN, OTHER, ("v2", "refs/pr/3"))
    found = [hub.find_model("owner/name", r) for r in (None, "main", "v2", OTHER, "refs/pr/3")]
    assert found == [first, first, other, other, other]
    with pytest.raises(CheckpointError, match="revision 'v3' of owner/name cannot be"):
        hub.find_model("owner/name", "v3")


@pytest.mark.parametrize("lost", ["model.safetensors", "config.json"])
def test_a_cache_that_is_not_complete_is_not_used_offline(lost, home):
    (fill_cache(home, "owner/name", GOLDEN) / lost).unlink()
    with pytest.raises(CheckpointError) as caught:
        hub.find_model("owner/name")
    said = str(caught.value)
    assert "owner/name" in said and "\n" not in said


def test_shards_are_complete_when_all_that_the_index_lists_are_there(home, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN, source)
    (source / "model.safetensors").rename(source / "model-00001-of-00002.safetensors")
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = {"weight_map": {"one": files[0], "two": files[1]}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    folder = fill_cache(home, "owner/name", source)
    with pytest.raises(CheckpointError, match="is not complete in"):
        hub.find_model("owner/name")
    assert hub.find_model("owner/name", weights=False) == folder
    (folder / files[1]).write_bytes(b"x")
    assert hub.find_model("owner/name") == folder


# --- downloads ----------------------------------------------------------------------------------


def test_what_is_read_is_downloaded_once_and_nothing_else(remote, home, monkeypatch):
    folder = hub.find_model("someone/tiny")
    assert folder == home / "hub" / "models--someone--tiny" / "snapshots" / COMMIT
    wanted = {"config.json", "generation_config.json", "model.safetensors"}
    assert {f.name for f in folder.iterdir()} == set(Hub.asked) == wanted
    assert hf.load_checkpoint(folder)[0] == hf.read_config(GOLDEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.find_model("someone/tiny") == folder
    assert len(Hub.asked) == len(wanted)


def test_a_complete_cache_is_used_without_asking_the_hub(remote, home, tiny_policy):
    folder = fill_cache(home, "someone/tiny", tiny_policy)
    assert hub.find_model("someone/tiny") == folder and not Hub.asked


def test_what_was_interrupted_is_completed(remote, home):
    (fill_cache(home, "someone/tiny", GOLDEN) / "model.safetensors").unlink()
    assert (hub.find_model("someone/tiny") / "model.safetensors").exists()


def refused(name: str, revision: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        hub.find_model(name, revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_refusal_of_the_hub_is_one_line_that_says_what_to_do(remote):
    assert "RepositoryNotFoundError" in refused("nobody/tiny")
    assert "revision 'v9' of someone/tiny" in refused("someone/tiny", "v9")
    assert "GatedRepoError" in refused("gated/tiny")
    (remote / "model.safetensors").unlink()
    (remote / "pytorch_model.bin").unlink()
    assert "someone/tiny is not complete in" in refused("someone/tiny")


def test_without_a_network_one_line_says_where_it_was_looked_for(remote, home, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        said = refused("someone/tiny")
        assert "no directory someone/tiny" in said and "the network" in said
        # Weights without a tokenizer may be all there is of a model.
        folder = fill_cache(home, "someone/tiny", GOLDEN)
        assert hub.find_model("someone/tiny") == folder
        (folder / "model.safetensors").unlink()
        said = refused("someone/tiny")
        assert "check the network" in said and str(folder) in said


# --- the programs ---------------------------------------------------------------------------------


def test_every_program_takes_an_id_and_a_revision(home, thin_policy, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = fill_cache(home, "owner/thin", thin_policy, refs=("v1",))
    llm = LLM("owner/thin", spec=OFF, max_batch=1, max_len=32, revision="v1")
    assert llm.tokenizer is not None and llm.cfg == hf.read_config(folder)
    cfg = ServeConfig(model="owner/thin", revision="v1")
    assert load_llm(cfg).cfg == llm.cfg and cfg.name == "owner/thin"
    assert verify.load("owner/thin", revision="v1").cfg.vocab_size == llm.cfg.vocab_size
    assert main(["convert", "owner/thin", "run", "--revision", "v1"]) == 0
    assert (tmp_path / "run" / "checkpoints" / "0").is_dir()
    settings = ["model=owner/thin", "revision=v1", f"out={tmp_path}/rl"]
    trainer = rl.Trainer(parse_config(RLConfig, settings)[0])
    assert any("through the tokenizer of owner/thin;" in note for note in trainer.notes)
    assert trainer.cfg.model == str(folder)  # of this commit, whatever becomes of the tag
    assert trainer.fingerprint()["model"] == f"owner/thin@{COMMIT}"  # wherever the cache lies
    run = sft.SFTTrainer(parse_config(SFTConfig, ["init=owner/thin", "revision=v1", "out=sft"])[0])
    assert run.cfg.init == str(folder)
    assert run.fingerprint()["init"] == f"owner/thin@{COMMIT}"
    rows = (json.dumps({"prompt": f"{i}+2=", "answer": i + 2}) for i in range(40))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    for model in (["owner/thin", "--revision", "v1"], ["run"]):
        capsys.readouterr()
        data_report.main(["rows.jsonl", "--model", *model])
        assert "prompt length in tokens: " in capsys.readouterr().out
    asked = ["generate", "--model", "owner/thin", "--revision", "v1", "1+2=", "--max-tokens", "2"]
    assert main([*asked, "--strategy=off", "--max-len", "32"]) == 0
    assert capsys.readouterr().out
