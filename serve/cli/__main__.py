"""`python -m serve.cli` is the command `specjax`."""

import sys

from serve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
