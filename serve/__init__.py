"""An OpenAI-compatible server on the engine; `python -m serve --help`.

api.py             the routes
generation.py      what completions and chat completions share: jobs in, answers out
protocol.py        bodies of requests
nothing.py         fields that are known and do nothing, and the values that ask for nothing
schema.py          the OpenAPI document, with the server's limits
replies.py         bodies of answers
engine_thread.py   the one thread that owns the engine
live.py            what the page shows
page/              the page
detokenize.py      text of a sample that still grows
metrics.py         what Prometheus reads
admin.py           weights, sleep and wake
guard.py           API key and size of bodies, before anything is read
errors.py          errors in OpenAI's shape
log.py             one line per request
settings.py        every setting
cli/               the command `specjax`
"""
