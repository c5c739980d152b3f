"""Servers on loopback with a tiny random policy, and what tests do to them."""

import contextlib
import threading
import time

import httpx
import openai
import uvicorn

from serve.api import create_app
from serve.settings import EngineSection, ServeConfig, SpeculationSection
from specjax import SamplingParams

KEY, ADMIN = "a key", "another key"
TEMPLATE = (
    "{% for t in tools or [] %}tool: {{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
BATCH, MAX_LEN, QUEUE = 4, 96, 24
# Asks for everything, with all slots: what is compiled for this serves every request.
WIDEST = SamplingParams(max_tokens=2, logprobs=2, presence_penalty=0.1, n=BATCH)


def config(policy, **changes) -> ServeConfig:
    """The settings of a small server; `changes` of `engine` and `speculation` are mappings."""
    engine = {
        "max_batch": BATCH, "max_len": MAX_LEN, "chunk_tokens": 8, "prefill_chunk": 16,
        "page_size": 16, "max_stop_tokens": 16, **changes.pop("engine", {}),
    }  # fmt: skip
    cfg = ServeConfig(
        model=str(policy),
        engine=EngineSection(**engine),
        speculation=SpeculationSection(**{"strategy": "2_1_3", **changes.pop("speculation", {})}),
        **{
            "served_name": "tiny", "chat_template": TEMPLATE, "api_key": KEY, "admin_key": ADMIN,
            **changes,
        },
    )  # fmt: skip
    cfg.limits.queue, cfg.limits.n, cfg.limits.body_bytes = QUEUE, 8, 20_000
    return cfg


class Server:
    """A running server.

    Attributes:
      url, app, llm: where and what it serves; `llm`'s engine belongs to the server.
      uvicorn: what listens.
    """

    def __init__(self, url, app, llm, uvicorn=None):
        self.url, self.app, self.llm, self.uvicorn = url, app, llm, uvicorn

    def client(self, kind=openai.OpenAI):
        return kind(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=120)

    def post(self, path, key=ADMIN, **options) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        return httpx.post(self.url + path, headers=headers, timeout=120, **options)

    def get(self, path) -> httpx.Response:
        return httpx.get(self.url + path, headers={"Authorization": f"Bearer {KEY}"}, timeout=120)

    @contextlib.contextmanager
    def slowly(self, seconds=0.5):
        """Samples run slowly until a request comes, so that it comes while they run.

        After a step that has brought tokens the engine waits so long, or until it is called.
        """
        engine, thread, fast = self.llm.engine, self.app.state.thread, threading.Event()
        step = engine.step

        def later(*options):  # replicas take none
            until = time.monotonic() + seconds * bool(thread._unsent)
            thread._send()
            while time.monotonic() < until and thread._calls.empty() and not fast.is_set():
                time.sleep(0.005)
            return step(*options)

        engine.step = later
        try:
            yield
        finally:
            fast.set()
            engine.step = step

    def metrics(self) -> dict[str, float]:
        """Every sample, by name and labels as written."""
        lines = self.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {f"{name.removeprefix('specjax:')}": float(value) for name, value in pairs}

    def settles(self, condition, seconds=60):
        """Waits until the metrics fulfil something; returns them."""
        for _ in range(seconds * 20):
            if condition(found := self.metrics()):
                return found
            time.sleep(0.05)
        raise AssertionError(f"it never came to that: {found}")


def run(app, **options):
    """A uvicorn server in a thread of its own, listening."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", **options))
    app.state.dashboard.is_draining = lambda: server.should_exit
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    return server, thread, server.servers[0].sockets[0].getsockname()[1]


@contextlib.contextmanager
def served(cfg, llm):
    app = create_app(cfg, llm)
    server, thread, port = run(app)
    try:
        yield Server(f"http://127.0.0.1:{port}", app, llm, server)
    finally:
        server.should_exit = True
        thread.join(60)
