"""The tiny models of the engine's tests serve here, too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "engine"))
