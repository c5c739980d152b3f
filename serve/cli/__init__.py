"""The command `specjax`, also `python -m serve.cli`: thin over the library.

main.py       which command; exit statuses
generate.py   specjax generate: options, and what becomes of samples
prompts.py    prompts from arguments and files
outputs.py    samples as text and as JSON lines
convert.py    specjax convert
bench.py      specjax bench

Nothing here imports jax before a command needs it, so that help and mistakes cost no seconds.
"""


class Failure(Exception):
    """The command cannot do what it was asked; the message is all that the user sees."""

    status = 1


class UsageError(Failure):
    """It was asked for something that cannot be."""

    status = 2
