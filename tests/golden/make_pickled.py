"""Writes golden/pickled/pytorch_model.bin with torch 2.13.0: every storage that is read, and views.

    python tests/golden/make_pickled.py

tests/weights/test_pickled.py compares it with the same numbers made by NumPy.
"""

from collections import OrderedDict
from pathlib import Path

import torch

COUNT = 24
DTYPES = {
    "double": torch.float64, "float": torch.float32, "half": torch.float16,
    "bfloat": torch.bfloat16, "long": torch.int64, "int": torch.int32, "short": torch.int16,
    "char": torch.int8, "byte": torch.uint8,
}  # fmt: skip


def tensors():
    """The tensors of the file by name."""
    numbers = torch.arange(COUNT) - 8
    found = OrderedDict((f"{n}.weight", numbers.abs().to(t)) for n, t in DTYPES.items())
    found["bool.weight"] = numbers % 3 == 0
    base = (numbers / 8).to(torch.float32).reshape(4, 6)
    found["base"] = base
    found["transposed"] = base.T
    found["rows"] = base[1:3]
    found["steps"] = base[::2, 1::2]
    found["scalar"] = base[2, 3]
    found["repeated"] = base[0].expand(3, 6)
    found["empty"] = torch.zeros(0, 5)
    found["parameter"] = torch.nn.Parameter(base[3])
    linear = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(linear.weight, 0.5)
    state = linear.state_dict()  # has the attribute `_metadata`
    state.update(found)
    return state


if __name__ == "__main__":
    torch.save(tensors(), Path(__file__).parent / "pickled" / "pytorch_model.bin")
