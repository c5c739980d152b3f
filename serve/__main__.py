"""`python -m serve --model DIR [--config FILE] [key=value ...]`."""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C from here on
    from specjax import interrupts

    interrupts.begin("python -m serve")

import dataclasses
import errno
import gc
import logging
import math
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from tqdm import tqdm

from serve.settings import WARM_UP, ServeConfig, load_llm
from specjax import LLM
from specjax.checked_json import CheckpointError, UnsupportedModelError
from specjax.command_line import ConfigError, parse_config
from specjax.engine.base import BaseEngine
from specjax.engine.programs import CompileProgress
from specjax.engine.prompt_scores import PromptScorer
from specjax.models.generation_config import describe_defaults

log = logging.getLogger(__name__)
POLL = 0.5  # seconds between two looks at the number of compiled programs
KEYS = {"api_key": "SPECJAX_API_KEY", "admin_key": "SPECJAX_ADMIN_KEY"}


def main(argv: Sequence[str] | None = None, prog: str = "python -m serve") -> None:
    """Serves until SIGTERM or SIGINT; running requests may finish.

    Args:
      prog: the command as the user typed it, for messages.

    Raises:
      SystemExit: the settings cannot be used; the exception holds the message.
    """
    description = "Serves a model behind OpenAI's API, with speculative decoding."
    cfg, _ = parse_config(ServeConfig, argv, prog, description)
    try:
        keys = {
            name: getattr(cfg, name) or os.environ.get(KEYS[name]) or _read(cfg, f"{name}_file")
            for name in KEYS
        }
        cfg = dataclasses.replace(cfg, **keys)
    except (ConfigError, ValueError) as error:
        sys.exit(f"{prog}: error: {error}")
    # `force`: an imported module may have configured logging for warnings only.
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    try:
        serve(cfg)
    except (ConfigError, CheckpointError, UnsupportedModelError, ModuleNotFoundError) as error:
        sys.exit(f"{prog}: error: {error}")


def _read(cfg: ServeConfig, name: str) -> str | None:
    """Reads the file that a setting names, without white space around; None: it names none."""
    path = getattr(cfg, name)
    if path is None:
        return None
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot read {path}: {error}") from error
    if not key:
        raise ConfigError(f"{name}: {path} is empty; write the key into it")
    return key


def serve(cfg: ServeConfig) -> None:
    """Loads the model, compiles, and listens."""
    try:
        import uvicorn

        from serve.api import create_app
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; install the server: pip install 'specjax[serve]'") from error

    _require_free(cfg)
    llm = _load(cfg)
    app = create_app(cfg, llm)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=cfg.host,
            port=cfg.port,
            log_level="info",
            access_log=False,
            # Longer than clients keep an idle connection (httpx: 5 s), so that the server never
            # closes one while a client sends.
            timeout_keep_alive=75,
            timeout_graceful_shutdown=cfg.drain_seconds,
            ssl_keyfile=cfg.ssl_keyfile,
            ssl_certfile=cfg.ssl_certfile,
        )
    )
    app.state.dashboard.is_draining = lambda: server.should_exit
    # uvicorn drains, then raises the signal again for the handler that was there before.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server.run()
    if not server.started:
        raise ConfigError(f"cannot listen on {cfg.host}:{cfg.port}")
    if llm.engine.compiling:  # the interpreter would wait for the program that is being compiled
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


def _require_free(cfg: ServeConfig) -> None:
    """Checks before compiling, which takes long, that the address is free and files can be used.

    Raises:
      ConfigError: the address is in use, the log cannot be written, or the certificate not read.
    """
    if cfg.log_file is not None:
        try:
            open(cfg.log_file, "ab").close()
        except OSError as error:
            raise ConfigError(f"log_file: cannot write to {cfg.log_file}: {error}") from error
    if cfg.ssl_certfile or cfg.ssl_keyfile:
        try:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(cfg.ssl_certfile or "", cfg.ssl_keyfile)
        except OSError as error:  # ssl.SSLError is one
            files = f"ssl_certfile={cfg.ssl_certfile} ssl_keyfile={cfg.ssl_keyfile}"
            raise ConfigError(f"{files} cannot be used for HTTPS: {error}") from error
    family = socket.AF_INET6 if ":" in cfg.host else socket.AF_INET
    try:
        socket.create_server((cfg.host, cfg.port), family=family).close()
    except OSError as error:
        why = error.strerror or str(error)
        advice = "host=ADDRESS or port=NUMBER"
        if error.errno == errno.EADDRINUSE:
            why, advice = "another program listens there", "another port=NUMBER, or port=0 for any"
        raise ConfigError(
            f"cannot listen on host={cfg.host} port={cfg.port}: {why}; choose {advice}"
        ) from error


def _load(cfg: ServeConfig) -> LLM:
    """Loads and compiles the model, and logs the progress."""
    began = time.perf_counter()
    # With the default of 5 ms a thread waits that long while another, which compiles or runs the
    # event loop, is busy.
    sys.setswitchinterval(0.0001)
    log.info("loading %s", cfg.model)
    llm = load_llm(cfg)
    for note in llm.notes:
        log.info("%s", note)
    matrices = jax.tree.leaves(llm.params, is_leaf=lambda leaf: hasattr(leaf, "dot_t"))
    weights = sum(math.prod(matrix.shape) for matrix in matrices)
    log.info("loaded %.4g M weights in %.1f s", weights / 1e6, time.perf_counter() - began)
    if line := describe_defaults(llm.generation, "generation_config=none"):
        log.info(line)
    requests = WARM_UP[cfg.engine.warm_up]
    if requests:
        log.info("compiling for %s", ", ".join(llm.engine.runner.plans))
        requests = (*requests, llm.get_default_sampling_params())
        llm.warm_up(requests, CompileProgress(log.info), background=True)
        if cfg.engine.warm_up == "all":  # for the log-probabilities of prompts
            behind = llm.engine.may_compile_behind
            PromptScorer(llm.engine, llm.max_len).warm_up(background=behind)
        log.info(
            "ready for requests after %.1f s; %d further programs are compiled meanwhile",
            time.perf_counter() - began, llm.engine.compiling,
        )  # fmt: skip
        threading.Thread(target=_show_progress, args=(llm.engine,), daemon=True).start()
    # Objects that live as long as the server need no examination by each garbage collection.
    gc.collect()
    gc.freeze()
    return llm


def _show_progress(engine: BaseEngine) -> None:
    """Shows how many of the programs are ready that are compiled in the background."""
    total = engine.compiling
    bar = tqdm(total=total, desc="compiling", unit="program", leave=False, disable=None)
    lines = CompileProgress(log.info)  # where there is no terminal
    done = -1
    while done < total:
        done = total - engine.compiling
        bar.update(done - bar.n)
        if bar.disable:
            lines(done, total)
        time.sleep(POLL)
    bar.close()


if __name__ == "__main__":
    interrupts.run(main)
