"""Keeps compiled programs in the user's cache directory, so that the next start compiles none."""

from __future__ import annotations

import hashlib
import os
import platform

import jax

from specjax.shipped import cache_dir, processor_features

MOST_BYTES = 4 << 30  # the programs that were used longest ago are deleted beyond this size
LEAST_SECONDS = 0.05  # compiling time below which a program is not kept


def keep_programs() -> None:
    """Turns jax's compilation cache on, unless the user has chosen a directory, or none.

    jax tells programs of other versions, devices and compiler options apart. The directory is that
    of processors of one kind, since machine code may use instructions that others do not have.
    """
    if jax.config.jax_compilation_cache_dir is not None or cache_dir() is None:
        return
    folder = cache_dir() / f"programs-{_processor()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder, os.W_OK):
        return
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_compilation_cache_max_size": MOST_BYTES,
        "jax_persistent_cache_min_compile_time_secs": LEAST_SECONDS,
    }
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)


def _processor() -> str:
    """A hash of what the processor can do."""
    facts = [platform.machine(), platform.processor(), processor_features()]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=4).hexdigest()
