"""Builds the kernels for CPUs where they are not kept yet, runs nothing of them, says where."""

import sys

from specjax.kernels.cpu import native

try:
    print(native.build())
except native.NoKernelError as error:
    sys.exit(str(error))
