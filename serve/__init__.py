"""An OpenAI-compatible server on the engine (`python -m serve --help`), and the command `specjax`.

api.py             the FastAPI application: routes and OpenAPI document
middleware.py      API keys, the size of bodies, the access log
protocol.py        request bodies
generation.py      completions and chat completions: from request body to response
responses.py       response bodies
errors.py          errors in OpenAI's shape
engine_thread.py   the one thread that runs the engine
detokenize.py      the text of a sample that is still generated
admin.py           new weights, sleep and wake
metrics.py         Prometheus metrics
dashboard.py       the data of the page at `/`; page/ has its HTML, CSS and JavaScript
settings.py        every setting of the server
cli/               the command `specjax`
"""
