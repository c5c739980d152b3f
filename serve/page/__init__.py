"""The page at `/`: plain HTML, CSS and JavaScript beside this file, sent as one document.

It asks nobody but this server for anything, and its Content-Security-Policy would not let it.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from serve.engine_thread import EngineThread
from serve.generation import EventStream
from serve.settings import ServeConfig

SCRIPTS = ("base.js", "words.js", "draw.js", "live.js", "prompt.js")  # in order
_STYLE, _SCRIPT, _KEY = "/* style.css */", "/* scripts */", "data-key=no"


def document(needs_key: bool) -> tuple[str, str]:
    """The page, and the policy that it is sent with.

    Args:
      needs_key: it asks for the key before it asks for anything else.
    """
    html, style = _text("index.html"), _text("style.css")
    script = "\n".join(map(_text, SCRIPTS))
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    for mark, text in ((_STYLE, style), (_SCRIPT, script), (_KEY, f"data-key={_word(needs_key)}")):
        if html.count(mark) != 1:
            raise ValueError(f"index.html has {mark!r} {html.count(mark)} times, expected once")
        html = html.replace(mark, text)
    return html, policy


def add_page(app: FastAPI, cfg: ServeConfig, thread: EngineThread) -> None:
    """Routes `/` and `/live`, what the page shows as server-sent events."""
    html, policy = document(cfg.api_key is not None)
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    live, named = thread.live, {"model": cfg.name}

    def state() -> dict:
        error, word = thread.error, "ok"
        if error is not None:
            word = "dead"
        elif live.drains():
            word = "draining"
        elif thread.asleep:
            word = "asleep"
        said = None if error is None else f"{type(error).__name__}: {error}"
        return {**named, "state": word, "error": said, "outstanding": thread.outstanding}

    def leave() -> None:
        live.viewers -= 1

    @app.get("/", include_in_schema=False)
    async def page():
        return HTMLResponse(html, headers=headers)

    @app.get("/live", include_in_schema=False)
    async def events():
        live.viewers += 1
        return EventStream(live.events(state), leave)


def _text(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a policy names the content of an inline element."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _word(yes: bool) -> str:
    return "yes" if yes else "no"
