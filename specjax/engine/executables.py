"""The programs that were compiled, and which of them serves what is asked for.

Every program is held as a `.lower().compile()` executable, which refuses other shapes, so that
nothing compiles behind the caller's back; `compilations` counts what was built.

    key                                    the program
    prefill, (rows, positions)             reads pieces of so many prompts
    place, count                           starts so many sequences
    score, (rows, positions), (rows, pages)   says how likely pieces of so many prompts are
    chunk, strategy, bucket, features      runs so many slots for a while
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax

from specjax import sharding
from specjax.decode.options import Features


class Noted:
    """Stands for a program that is not compiled yet."""

    def __init__(self, donate: tuple[int, ...]):
        self._donate = donate

    def __call__(self, *inputs):
        return (*(inputs[i] for i in self._donate), None)


class Executables:
    """Compiles each program when it is first asked for.

    Args:
      mesh: that programs run on; None is the default device.

    Attributes:
      by_key: what was compiled.
      compilations: programs that were built so far.
      before_build: is called before a program is compiled, which takes seconds.
      build: makes what runs of a program, given its key, what lowers it, and which inputs it is
        donated.
    """

    def __init__(self, mesh: jax.sharding.Mesh | None):
        self._mesh = mesh
        self.by_key: dict[tuple, jax.stages.Compiled] = {}
        self.compilations = 0
        self.before_build: Callable[[], None] = lambda: None
        self.build: Callable = lambda key, lower, donate: lower().compile()
        self._noted: dict[tuple, tuple[jax.stages.Lowered, tuple[int, ...]]] | None = None

    def get(self, key: tuple, program: Callable, inputs: tuple, donate: tuple[int, ...]):
        """The executable of a program whose output begins with its donated inputs, in order."""
        if key in self.by_key:
            return self.by_key[key]
        self.before_build()
        # Kernels and what works on parts of the vocabulary ask for the ambient mesh.
        program = sharding.traced_on(self._mesh, program)

        def lower() -> jax.stages.Lowered:
            out = None
            if self._mesh is not None:
                shapes = jax.eval_shape(program, *inputs)
                out = tuple(sharding.state_shardings(self._mesh, shape) for shape in shapes)
            return jax.jit(program, donate_argnums=donate, out_shardings=out).lower(*inputs)

        if self._noted is None:
            self._keep(key, self.build(key, lower, donate))
        else:
            self._noted[key] = lower(), donate
            self.by_key[key] = Noted(donate)
        return self.by_key[key]

    def _keep(self, key: tuple, built: Callable) -> None:
        self.by_key[key] = built
        self.compilations += 1

    @property
    def threads(self) -> int:
        """Programs that are worth compiling at once. One for CPUs, whose compiler has threads of
        its own, and on several hosts, whose compilers may wait for each other's choices."""
        if jax.process_count() > 1 or jax.default_backend() == "cpu":
            return 1
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

    @contextlib.contextmanager
    def together(self, on_built: Callable[[int, int], None]) -> Iterator[None]:
        """What is asked for within is compiled at the end, several at once.

        Within, programs do nothing: they give back the inputs they are donated, and None.

        Args:
          on_built: hears how many are compiled, and of how many.
        """
        self._noted = {}
        try:
            yield
            noted, self._noted = self._noted, None
            self._build_all(noted, on_built)
        finally:
            self._noted = None
            self.by_key = {k: v for k, v in self.by_key.items() if not isinstance(v, Noted)}

    def _build_all(self, noted: Mapping, on_built: Callable[[int, int], None]) -> None:
        with ThreadPoolExecutor(self.threads, "compile") as pool:
            started = {
                pool.submit(self.build, key, lambda lowered=lowered: lowered, donate): key
                for key, (lowered, donate) in noted.items()
            }
            try:
                for done, built in enumerate(as_completed(started), 1):
                    self._keep(started[built], built.result())
                    on_built(done, len(started))
            except BaseException:  # Ctrl-C, too, need not wait for what nobody began
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def rows(self, positions: int) -> list[int]:
        """Of the programs that read pieces of so many positions, how many each reads at once."""
        sizes = [key[1] for key in self.by_key if key[0] == "prefill"]
        return [rows for rows, read in sizes if read == positions]

    def buckets(self, strategy: str, features: Features) -> list[int]:
        """Buckets for which a program was compiled that serves this, in order."""
        found = {
            key[2]
            for key in self.by_key
            if key[0] == "chunk" and key[1] == strategy and key[3].covers(features)
        }
        return sorted(found)

    def covering(self, strategy: str, bucket: int, features: Features) -> Features:
        """Of the programs that were compiled for this strategy and bucket and serve requests that
        ask for this, the features of the smallest; if there is none, just these."""
        start = ("chunk", strategy, bucket)
        compiled = [key[3] for key in self.by_key if key[:3] == start and key[3].covers(features)]
        return min(compiled, key=lambda f: f.size, default=features)

    def memory(self) -> dict[str, int]:
        """Bytes of what was compiled, as far as the platform tells: code, and the temporaries of
        the program that needs most."""
        found = [compiled.memory_analysis() for compiled in self.by_key.values()]
        found = [analysis for analysis in found if analysis is not None]
        return {
            "code": sum(a.generated_code_size_in_bytes for a in found),
            "temporaries": max((a.temp_size_in_bytes for a in found), default=0),
        }
