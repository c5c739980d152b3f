"""`python -m specjax` is the command `specjax`, which lives in `serve.cli`."""

import sys


def main() -> int:
    """Runs it on the arguments of this process."""
    from serve.cli.main import main as command  # the library itself knows nothing of it

    return command()


if __name__ == "__main__":
    sys.exit(main())
