"""Builds the kernels for CPUs unless they are cached, without running them; prints their path."""

import sys

from specjax.kernels.cpu import native

try:
    print(native.build())
except native.NoKernelError as error:
    sys.exit(str(error))
