"""`python -m serve --model DIR [--config FILE] [key=value ...]`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence

from serve.settings import WARM_UP, ServeConfig, load_llm
from specjax.checkpoint import CheckpointError
from specjax.command_line import ConfigError, parse_config
from specjax.models.hf import UnsupportedModelError

KEYS = {"api_key": "SPECJAX_API_KEY", "admin_key": "SPECJAX_ADMIN_KEY"}


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until SIGTERM or SIGINT; requests that run then may finish.

    Raises:
      SystemExit: a mistake of the user, with one message.
    """
    arguments = _with_model(sys.argv[1:] if argv is None else argv)
    description = "Serves a model behind OpenAI's API, with speculative decoding."
    cfg, _ = parse_config(ServeConfig, arguments, "serve", description, _add_model)
    for name, variable in KEYS.items():
        if getattr(cfg, name) is None:
            setattr(cfg, name, os.environ.get(variable) or None)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        serve(cfg)
    except (ConfigError, CheckpointError, UnsupportedModelError, ModuleNotFoundError) as error:
        sys.exit(f"python -m serve: error: {error}")


def serve(cfg: ServeConfig) -> None:
    """Loads, compiles, listens."""
    try:
        import uvicorn

        from serve.api import create_app
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; install the server: pip install 'specjax[serve]'") from error

    llm = load_llm(cfg)
    requests = WARM_UP[cfg.engine.warm_up]
    if requests:
        llm.warm_up(requests)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(cfg, llm),
            host=cfg.host,
            port=cfg.port,
            log_level="info",
            access_log=False,
            timeout_graceful_shutdown=cfg.drain_seconds,
        )
    )
    # uvicorn drains, then raises the signal again for the handler that was there before.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server.run()
    if not server.started:
        sys.exit(f"python -m serve: error: cannot listen on {cfg.host}:{cfg.port}")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="the same as model=DIR")


def _with_model(argv: Sequence[str]) -> list[str]:
    """`--model DIR` as the setting it is."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model")
    known, rest = parser.parse_known_args(argv)
    return rest if known.model is None else [*rest, f"model={known.model}"]


if __name__ == "__main__":
    main()
