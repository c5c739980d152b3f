"""Shows a run as a page: `python -m train.view RUN [--port N] [--open]`, or `--html FILE`.

The page has the curves of all metrics, samples with each token in the colour of its origin, one
prompt over the steps, the evaluations, and what the run says of itself. It is served to this
machine alone (127.0.0.1), loads nothing from elsewhere, and takes in what the run writes while it
goes on. `--html` writes one file with everything in it.

    GET /                                the page (`view.html`)
    GET /updates?metrics=G&records=N&..  records and rows since the N-th, or all of them if the
                                         file is another one than G (a resumed run cuts it)
    GET /samples?set=S&step=N            whole samples; or `problem=N`
"""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C from here on
    from specjax import interrupts

    interrupts.begin("train.view")

import base64
import dataclasses
import datetime
import hashlib
import http.server
import itertools
import json
import re
import sys
import threading
import time
import urllib.parse
import webbrowser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from specjax.command_line import parse_config
from specjax.settings import REQUIRED
from train.run.files import (
    CONFIG_FILE,
    METRICS_FILE,
    RUN_FILE,
    SAMPLES_FILE,
    read_settings,
    read_starts,
)

PAGE = Path(__file__).with_name("view.html")
FILES = (METRICS_FILE, SAMPLES_FILE, RUN_FILE, CONFIG_FILE)
WHOLE_BYTES = 50_000_000  # of samples in a page that is one file
NOTES = 10  # of damaged lines
_EMPTY = '<script id="embedded" type="application/json">null</script>'


class RecordFile:
    """The records of a .jsonl file that is written meanwhile.

    Lines without an end are not read yet. A line that is no record is left out, with a note.

    Args:
      path: the file, which may not be there yet.
      keep: function of a record and the size of its line that returns what is kept.

    Attributes:
      items: what is kept, in the order of the file.
      notes: what is wrong with the file, line by line.
      generation: changes when the file is another one, as a resumed run makes it.
    """

    def __init__(self, path: Path, keep: Callable[[dict[str, Any], int], Any]):
        self.path, self._keep, self._whole = path, keep, b""  # the lines that were read
        self.items: list[Any] = []
        self.notes: list[str] = []
        self._damaged: list[str] = []
        self.generation = time.time_ns()  # not that of a server before this one

    def refresh(self) -> None:
        """Reads the lines that were written since the last call."""
        data = self.path.read_bytes() if self.path.exists() else b""
        if not data.startswith(self._whole):  # it is another file
            self.generation += 1
            self._whole, self.items, self._damaged = b"", [], []
        *lines, rest = data[len(self._whole) :].split(b"\n")
        for number, line in enumerate(lines, self._whole.count(b"\n") + 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line, parse_constant=_refuse)
                if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                    raise ValueError("no object with a step")
                self.items.append(self._keep(record, len(line)))
            except (ValueError, KeyError, TypeError) as error:
                self._damaged.append(
                    f"{self.path.name}, line {number}: no record of a step, left out ({error})"
                )
        self._whole = data[: len(data) - len(rest)]
        self.notes = self._damaged[:NOTES]
        if len(self._damaged) > NOTES:
            self.notes.append(f"{self.path.name}: {len(self._damaged) - NOTES} more such lines")
        if rest.strip():
            self.notes.append(
                f"{self.path.name}: the last line is not complete yet and left out; if the run was "
                "killed, --resume removes it"
            )


class Sample(NamedTuple):
    """A sample of a run.

    Attributes:
      row: what the page needs to know of it before it shows it.
      record: the whole sample.
      size: bytes of its line.
    """

    row: dict[str, Any]
    record: dict[str, Any]
    size: int


class RunView:
    """The files of a run, as the page is told of them.

    Args:
      directory: directory of the run.

    Raises:
      ValueError: it is no directory of a run; the message says what it is, and where one is.
    """

    def __init__(self, directory: Path):
        self.directory = directory = check_run(directory)
        self._metrics = RecordFile(directory / METRICS_FILE, lambda record, _: record)
        self._samples = RecordFile(directory / SAMPLES_FILE, _sample)
        self._lock = threading.Lock()

    def updates(self, known: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Returns what the page does not know yet.

        Args:
          known: generation and number of what it knows: `metrics`, `records`, `samples`, `rows`.
        """
        known = known or {}
        with self._lock:
            self._metrics.refresh()
            self._samples.refresh()
            about, notes = self._about()
            return {
                "metrics": _since(self._metrics, known.get("metrics"), known.get("records")),
                "samples": _since(
                    self._samples,
                    known.get("samples"),
                    known.get("rows"),
                    lambda sample: sample.row,
                ),
                "notes": [*self._metrics.notes, *self._samples.notes, *notes],
                "about": about,
            }

    def samples(self, wanted: Mapping[str, str]) -> list[dict[str, Any]]:
        """Returns whole samples whose `set`, `step` or `problem`, as text, are the wanted ones."""
        with self._lock:
            self._samples.refresh()
            return [
                sample.record
                for sample in self._samples.items
                if all(str(sample.row.get(name)) == value for name, value in wanted.items())
            ]

    def html(self) -> str:
        """Returns the page as one file, with all metrics and the newest samples.

        There are `WHOLE_BYTES` of these at most.
        """
        updates = self.updates()
        with self._lock:
            samples = self._samples.items
        sizes = itertools.accumulate(sample.size for sample in reversed(samples))
        left_out = sum(size > WHOLE_BYTES for size in sizes)
        if left_out:
            updates["notes"].append(f"{left_out} samples of the first steps are not in this file")
        updates["samples"]["items"] = [sample.row for sample in samples[left_out:]]
        updates["about"]["written"] = datetime.datetime.now().isoformat(" ", timespec="seconds")
        return page({"updates": updates, "whole": [s.record for s in samples[left_out:]]})

    def _about(self) -> tuple[dict[str, Any], list[str]]:
        """Returns what the run says of itself, and what is wrong with that."""
        run, notes, starts, settings = self.directory, [], [], {}
        try:
            starts = read_starts(run)
            settings = read_settings(run)
        except ValueError as error:
            notes.append(str(error))
        file = run / CONFIG_FILE
        config = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        about = {"name": run.resolve().name, "starts": starts, "config": config}
        return about | {"steps": settings.get("steps")}, notes


def check_run(directory: Path) -> Path:
    """Returns the directory of a run; the path of one of its files stands for its directory.

    Raises:
      ValueError: it is none.
    """
    if directory.is_file() and directory.name in FILES:
        directory = directory.parent
    if any((directory / name).is_file() for name in FILES):
        return directory
    runs = sorted({file.parent for name in FILES for file in directory.glob(f"*/{name}")})
    holds = f"; it holds runs: name one of {', '.join(map(str, runs[:5]))}" if runs else ""
    raise ValueError(
        f"{directory}: expected the directory of a run (out=), which holds {METRICS_FILE} or "
        f"{RUN_FILE}{holds}"
    )


def page(embedded: Mapping[str, Any] | None = None) -> str:
    """Returns the text of the page.

    Args:
      embedded: data of a page that is one file; None for a page that asks the server.
    """
    text = PAGE.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    head, place, tail = text.partition(_EMPTY)
    if not place or 'content="POLICY"' not in head:
        raise RuntimeError(f"{PAGE}: expected the places of data and policy; install it again")
    # `<` would end the script; json escapes all that is not ASCII.
    data = json.dumps(embedded).replace("<", "\\u003c")
    return head.replace('content="POLICY"', f'content="{policy}"') + (
        _EMPTY.replace("null", data) + tail
    )


class Server(http.server.ThreadingHTTPServer):
    """Serves the page of a run on 127.0.0.1.

    Args:
      run: the run.
      port: port; 0 for any free one.

    Attributes:
      url: address of the page.

    Raises:
      OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, run: RunView, port: int = 0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.run = run
        self.url = f"http://127.0.0.1:{self.server_port}/"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "specjax", ""

    def do_GET(self) -> None:  # noqa: N802
        # A page of elsewhere could reach this server under a name of its own.
        host = self.headers.get("Host") or ""
        if not re.fullmatch(r"(127\.0\.0\.1|localhost)(:\d+)?", host):  # without one: port 80
            self._send(403, "text/plain", "this page is for 127.0.0.1 alone\n")
            return
        address = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(address.query))
        run = self.server.run
        if address.path == "/":
            self._send(200, "text/html", page())
        elif address.path == "/updates":
            self._send(200, "application/json", json.dumps(run.updates(query)))
        elif address.path == "/samples":
            self._send(200, "application/json", json.dumps({"rows": run.samples(query)}))
        else:
            self._send(404, "text/plain", "there is /, /updates and /samples\n")

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *unused: object) -> None:
        """Prints nothing: the page asks every few seconds."""


def _refuse(name: str) -> None:
    """A number that no browser reads as JSON, and that no run writes."""
    raise ValueError(f"{name} is not JSON")


def _sample(record: dict[str, Any], size: int) -> Sample:
    names = ("step", "set", "problem", "sample", "reward", "followed")
    row = {name: record[name] for name in names}
    return Sample({**row, "head": _head(record["prompt"])}, record, size)


def _head(prompt: str) -> str:
    """The end of a prompt's text, by which a reader knows it, on one line."""
    words = " ".join(re.sub(r"<\|[^<>|]*\|>\w*|</?s>", " ", prompt).split())
    return words if len(words) <= 90 else f"..{words[-88:]}"


def _since(
    file: RecordFile,
    generation: str | None,
    count: str | None,
    shown: Callable[[Any], Any] = lambda item: item,
) -> dict[str, Any]:
    same = generation == str(file.generation) and (count or "").isdecimal()
    first = int(count) if same and count else 0
    return {"generation": str(file.generation), "items": [shown(i) for i in file.items[first:]]}


@dataclasses.dataclass
class ViewConfig:
    """`python -m train.view`: shows a run as a page.

    Attributes:
      run: directory of the run.
      port: port; 0: any free one.
      open: open the page in a browser.
      html: write the page as this one file instead.
    """

    words: ClassVar[tuple[str, ...]] = ("run",)

    run: str = REQUIRED
    port: int = 0
    open: bool = False
    html: str | None = None


def main(argv: list[str] | None = None) -> None:
    """Serves the page until Ctrl-C, or writes it.

    Raises:
      SystemExit: there is no run, or the port is taken.
    """
    cfg, _ = parse_config(ViewConfig, argv, "train.view", __doc__.splitlines()[0])
    try:
        run = RunView(Path(cfg.run))
        if cfg.html is not None:
            page_file, updates = Path(cfg.html), run.updates()
            page_file.write_text(run.html(), encoding="utf-8")
            for note in updates["notes"]:
                print(f"WARNING: {note}", file=sys.stderr)
            if not updates["metrics"]["items"]:
                print(f"{run.directory}: no step has ended yet", file=sys.stderr)
            print(page_file)
            if cfg.open:
                webbrowser.open(page_file.resolve().as_uri())
            return
        server = Server(run, cfg.port)
    except (ValueError, OSError, OverflowError) as error:
        sys.exit(f"train.view: error: {error}")
    with server:
        print(f"{run.directory} is shown at {server.url} (Ctrl-C ends)", flush=True)
        if cfg.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    interrupts.run(main)
