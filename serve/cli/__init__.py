"""The command `specjax`, also `python -m serve.cli`.

main.py       the commands, and their exit statuses
generate.py   specjax generate
arguments.py  settings of specjax generate
prompts.py    prompts from arguments and files
outputs.py    samples as text and as JSON lines
convert.py    specjax convert

These modules import jax only when a command needs it, so that `--help` and errors in arguments
appear at once.
"""


class Failure(Exception):
    """The command failed; the user sees the message without a traceback."""

    status = 1


class UsageError(Failure):
    """The arguments of a command are wrong."""

    status = 2
