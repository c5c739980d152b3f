"""The log of requests, on a disk that fills up."""

import asyncio
import errno
import json
import os

import httpx

from serve.metrics import Metrics
from serve.middleware import AccessLogMiddleware


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


def test_lines_that_do_not_fit_are_counted_and_said_when_it_begins(tmp_path, monkeypatch, caplog):
    metrics, file = Metrics("m"), tmp_path / "log.jsonl"
    logged = AccessLogMiddleware(app, metrics, frozenset({"/a"}), str(file))
    write, room = os.write, [250]  # a few lines, and a part of one

    def until_full(descriptor, text):
        if descriptor != logged._file:
            return write(descriptor, text)
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = min(room[0], len(text))
        room[0] -= count
        return write(descriptor, text[:count])

    monkeypatch.setattr(os, "write", until_full)

    async def ask():
        transport = httpx.ASGITransport(logged)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return [(await client.get("/a")).status_code for _ in range(6)]

    assert asyncio.run(ask()) == [200] * 6
    *whole, cut = file.read_text().split("\n")
    assert whole and cut and all(json.loads(line)["path"] == "/a" for line in whole)
    assert f"specjax:log_errors_total {6 - len(whole)}.0" in metrics.text().decode()
    said = [r.getMessage() for r in caplog.records if r.name.startswith("serve")]
    assert len(said) == 1 and "No space left" in said[0]
