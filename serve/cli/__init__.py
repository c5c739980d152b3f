"""The command `specjax`, also `python -m serve.cli`.

main.py       the commands, their exit statuses, `specjax bench`
generate.py   specjax generate
arguments.py  its arguments
prompts.py    prompts from arguments and files
outputs.py    samples as text and as JSON lines
convert.py    specjax convert

No module here imports jax before a command needs it: `--help` and wrong arguments take no seconds.
"""


class Failure(Exception):
    """The command failed; the user sees the message alone."""

    status = 1


class UsageError(Failure):
    """The arguments of a command are wrong."""

    status = 2
