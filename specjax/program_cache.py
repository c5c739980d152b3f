"""Keeps compiled programs in the user's cache directory, so that the next start compiles none.

jax finds a program in its cache by what was lowered. Tracing and lowering it again takes longer
than loading it, so `Kept` finds executables by all that decides what is lowered.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import marshal
import os
import pickle
import platform
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from specjax.parallel import sharding
from specjax.shipped import cache_dir, is_writable, processor_features
from specjax.versions import installed

# The programs that were used longest ago are deleted beyond this size; of each of two folders.
MOST_BYTES = 2 << 30
LEAST_SECONDS = 0.05  # compiling time below which jax does not keep a program
# Modules whose functions programs are traced from.
TRACED = tuple(
    f"specjax.{name}"
    for name in "config decode drafts engine.pages engine.prompt_scores engine.runner indexing "
    "interfaces kernels memory models parallel verify weights".split()
)
# Packages whose classes their objects say enough about; those of users may change.
KNOWN = {"specjax", "builtins", "numpy", "ml_dtypes"}
# Attributes of functions, and of what wraps them, that have parts of what they do.
PARTS = "__defaults__ __kwdefaults__ __wrapped__ __func__ fget func args keywords".split()


def keep_programs() -> None:
    """Turns jax's compilation cache on, unless the user has chosen a directory, or none.

    jax tells programs of other versions, devices and compiler options apart. The directory is that
    of processors of one kind, since machine code may use instructions that others do not have.
    """
    folder = _folder()
    is_chosen = jax.config.jax_compilation_cache_dir is not None
    if is_chosen or folder is None or not is_writable(folder):
        return
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_compilation_cache_max_size": MOST_BYTES,
        "jax_persistent_cache_min_compile_time_secs": LEAST_SECONDS,
    }
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)


def _folder() -> Path | None:
    facts = [platform.machine(), platform.processor(), processor_features()]
    processor = hashlib.blake2b("\n".join(facts).encode(), digest_size=4).hexdigest()
    return cache_dir() and cache_dir() / f"programs-{processor}"


class Lowering(NamedTuple):
    """Lowers a program for the shapes of its inputs when it is called."""

    program: Callable
    inputs: tuple
    donate: tuple[int, ...]
    mesh: jax.sharding.Mesh | None

    def __call__(self) -> jax.stages.Lowered:
        out = None
        if self.mesh is not None:
            shapes = jax.eval_shape(self.program, *self.inputs)
            out = tuple(sharding.state_shardings(self.mesh, shape) for shape in shapes)
        jitted = jax.jit(self.program, donate_argnums=self.donate, out_shardings=out)
        return jitted.lower(*self.inputs)


_of_thread = threading.local()


def _note(event: str, seconds: float, **_: object) -> None:
    if event.endswith("/compile_time_saved_sec"):  # jax keeps whole seconds, rounded down
        _of_thread.saved = saved_seconds() + max(seconds, 0.0) + 1.0


jax.monitoring.register_event_duration_secs_listener(_note)


def saved_seconds() -> float:
    """The seconds of compiling that programs of earlier processes have saved on this thread."""
    return getattr(_of_thread, "saved", 0.0)


class Kept:
    """Executables that earlier processes made, where `keep_programs` has chosen the directory.

    The name of a file is a digest of all files of specjax, of the functions and constants of its
    modules in memory, and of settings, versions, devices and the inputs' shapes.

    Args:
      facts: settings that decide what is lowered. Where a class or a function of the user's is
        among them, nothing is kept, since its code may change.
      devices: devices that programs run on.
    """

    def __init__(self, facts: Any, devices: Sequence[jax.Device]):
        self._devices, self._facts = devices, b""
        folder, cache = _folder(), jax.config.jax_compilation_cache_dir
        if jax.process_count() > 1 or folder is None or cache != str(folder):
            return
        self._folder, pickled = folder.with_name(f"{folder.name}-loaded"), io.BytesIO()
        flags = map(os.environ.get, ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
        versions = installed(("jax", "jaxlib", "flax"))
        # Devices that are compiled for without being there have no client.
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            about = versions, devices[0].client.platform_version, *map(repr, devices), *flags
            _Facts(pickled).dump((about, facts))
            self._facts = pickled.getvalue() + _code()

    def compiled(self, key: tuple, lower: Lowering, options: Mapping) -> jax.stages.Compiled:
        """The executable of a program, which an earlier process made or which is made now.

        Args:
          key: what tells the program from others of the same facts and inputs.
          options: options of the compiler.
        """
        if not self._facts or jax.config.jax_default_device is not None:
            return lower().compile(dict(options))
        leaves, tree = jax.tree_util.tree_flatten(lower.inputs)
        places = [getattr(leaf, "sharding", None) for leaf in leaves]
        if {d for place in places if place for d in place.device_set} - {*self._devices}:
            return lower().compile(dict(options))
        settings = [(name, getattr(jax.config, name, None)) for name in sorted(jax.config.values)]
        shapes = [f"{jax.typeof(leaf)} {place}" for leaf, place in zip(leaves, places, strict=True)]
        about = repr((key, sorted(options.items()), settings, shapes, str(tree))).encode()
        digest = hashlib.sha256(self._facts + about).hexdigest()
        path, client = self._folder / digest, self._devices[0].client
        with contextlib.suppress(Exception):  # of any type: there is no file, or it is damaged
            os.utime(path)
            seconds, *parts = pickle.loads(path.read_bytes())
            loaded = deserialize_and_load(*parts, client, self._devices)
            _of_thread.saved = saved_seconds() + seconds
            return loaded
        # In jax's cache it has a name of its own, for XLA cannot serialize what was loaded there.
        lower.program.__name__ = f"{key[0]}_{digest}"
        began, saved = time.perf_counter(), saved_seconds()
        made = lower().compile(dict(options))
        if saved_seconds() == saved:
            with contextlib.suppress(Exception):  # not all executables can be serialized
                self._keep(path, pickle.dumps((time.perf_counter() - began, *serialize(made))))
        return made

    def _keep(self, path: Path, data: bytes) -> None:
        self._folder.mkdir(exist_ok=True)
        whole = path.with_name(f"{path.name}.{os.getpid()}")
        whole.write_bytes(data)
        os.replace(whole, path)  # no process sees a partial file
        room = MOST_BYTES
        for old in sorted(self._folder.iterdir(), key=os.path.getmtime, reverse=True):
            room -= old.stat().st_size
            if room < 0:
                old.unlink(missing_ok=True)


class _Facts(pickle.Pickler):
    """Refuses what has a class, is a function or a path `module:attribute` of the user's."""

    def persistent_id(self, item: Any) -> None:
        named = item if isinstance(item, (type, types.FunctionType)) else type(item)
        module = named.__module__
        if isinstance(item, str) and ":" in item and item.partition(":")[0] in sys.modules:
            module = item
        if module.partition(".")[0] not in KNOWN:
            raise pickle.PicklingError(f"{item} is not of specjax")


def _code() -> bytes:
    """A digest of specjax: of its files, and of what is in memory, which may have been replaced."""
    digest, known = hashlib.sha256(), set()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())

    def add(item: Any) -> None:
        if isinstance(item, (bool, int, float, str)):
            return digest.update(repr(item).encode())
        # Some modules are loaded when they are looked into.
        if isinstance(item, types.ModuleType) or id(item) in known:
            return None
        known.add(id(item))
        if isinstance(item, (tuple, list)):
            parts = item
        elif isinstance(item, dict):
            parts = itertools.chain(*item.items())
        elif isinstance(item, type):
            ours = item.__module__.startswith("specjax.")
            parts = itertools.chain(*sorted(vars(item).items())) if ours else ()
        else:
            parts = [getattr(item, name, None) for name in PARTS]
            cells = getattr(item, "__closure__", None) or ()
            parts += [cell.cell_contents for cell in cells if cell != types.CellType()]
            if isinstance(item, types.FunctionType):
                digest.update(marshal.dumps(item.__code__, 2))  # of a version without references
        for part in parts:
            add(part)
        return None

    for name, module in sorted(sys.modules.items()):
        if name.startswith(TRACED):
            for item in itertools.chain(*sorted(vars(module).items())):
                add(item)
    return digest.digest()
