"""Tokenizers are loaded without a word of what is not needed for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# None in `sys.modules` is a package that cannot be found, whether it is installed or not.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from specjax.tokenizer import load_tokenizer, transformers_class
print(load_tokenizer("assets/sums").encode("1+2=") and transformers_class("AutoTokenizer").__name__)
"""


@pytest.mark.parametrize("users_own, notices", [(None, 0), ("1", 0), ("", 1)])
def test_a_missing_torch_is_not_mentioned_unless_the_user_asks(users_own, notices):
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    environment = {key: value for key, value in os.environ.items() if key != name}
    if users_own is not None:
        environment[name] = users_own
    done = subprocess.run(
        [sys.executable, "-c", f"{WITHOUT_TORCH}\nimport os\nprint(os.environ.get({name!r}))"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["AutoTokenizer", *str(users_own).split()], done.stderr
    assert done.stderr.count("PyTorch was not found") == notices
    assert notices or not done.stderr
