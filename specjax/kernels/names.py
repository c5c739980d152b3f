"""Names of attention kernels that users may ask for; a leaf, for parsers that import no jax."""

from __future__ import annotations

# `auto` is the platform's own. `tpu` and `library` choose by the device; what follows a colon is
# the same by its full name, and `tpu:interpret` is the TPU's on CPU, for tests.
ATTENTION = (
    "auto", "reference", "cpu", "gpu", "tpu", "tpu:v5e", "tpu:v5p", "tpu:v6e", "tpu:interpret",
    "library", "library:xla", "library:cudnn",
)  # fmt: skip
ATTENTION_DOC = (
    "the attention kernel: auto, the platform's own, with a line at start that says which; or by "
    "name, which is refused where it cannot run"
)
