"""An OpenAI-compatible server on the engine (`python -m serve --help`), and the command `specjax`.

api.py             the FastAPI application: routes and OpenAPI document
middleware.py      API keys, the size of bodies, the access log
protocol.py        bodies of requests
generation.py      completions and chat completions: bodies in, samples run, responses out
responses.py       bodies of responses
errors.py          errors in OpenAI's shape
engine_thread.py   the one thread that owns the engine
detokenize.py      the text of a sample while it grows
admin.py           new weights, sleep and wake
metrics.py         Prometheus metrics
dashboard.py       what the page at `/` shows; page/ has its HTML, CSS and JavaScript
settings.py        every setting of the server
cli/               the command `specjax`
"""
