"""Set-up that comes before jax is imported, what "torch required" means, and the suite's report.

The report says how many programs the test processes compiled, for compiling is most of the time
that the suite takes.
"""

import gc
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import time
import zlib
from pathlib import Path

# Tests run on CPU with 8 fake devices unless another platform is asked for by name.
os.environ["JAX_PLATFORMS"] = os.environ.get("SPECJAX_TEST_PLATFORM", "cpu")
_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
# A name that is no directory is not looked up elsewhere.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Small programs too: workers, modules and the processes that tests start have many in common.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Compiling is most of what tests spend. Graphs are rewritten and fused as for users; only machine
# code is made with less care. `make test-full` makes it as users get it.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_cpu_enable_concurrency_optimized_scheduler": "false",  # see specjax/parallel/sharding.py
    # Programs are built side by side by the workers already: one that is cut into 32 modules to be
    # built by as many threads takes a third more.
    "--xla_cpu_parallel_codegen_split_count": "1",
}
# The older emitter takes half the time. Newer jaxlibs have none, and refuse flags they do not know.
_HAS_OLDER_EMITTER = importlib.metadata.version("jaxlib").startswith("0.10.")
if _HAS_OLDER_EMITTER and os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] not in ("0", "false"):
    _FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
for _name, _value in _FLAGS.items():
    if _name not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_name}={_value}".strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from specjax.engine import programs  # noqa: E402

# How long compiling takes is the machine's affair: tests of what is logged must not depend on it.
programs.SILENT_SECONDS = 3600.0

# Looking for cyclic garbage in the heap that jax keeps took a tenth of the time: it is left to the
# collection at the end of each module.
gc.set_threshold(100_000, 50, 1_000)

hypothesis.settings.register_profile(
    "specjax", deadline=None, max_examples=20, derandomize=True, database=None
)
hypothesis.settings.load_profile("specjax")

# `jax`: see `with_newest_jax.py`; `part`: see `keep_a_part`.
_TESTS = os.environ.get("SPECJAX_TESTS", "all")
_EXPECT_TORCH = os.environ.get("SPECJAX_EXPECT_TORCH") == "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `torch` skip where torch is not installed."""
    if item.get_closest_marker("torch") and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")


def _fail_if_torch_was_wanted(report, name: str, marked: bool):
    """With SPECJAX_EXPECT_TORCH=1 a skipped comparison with torch is a failure, not a silence."""
    if _EXPECT_TORCH and report.skipped and (marked or "torch" in str(report.longrepr)):
        report.outcome = "failed"
        report.longrepr = (
            f"{name} was skipped although SPECJAX_EXPECT_TORCH=1: install torch, or remove the skip"
        )
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    return _fail_if_torch_was_wanted(report, item.nodeid, bool(item.get_closest_marker("torch")))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield  # a whole module skips at collection by pytest.importorskip
    return _fail_if_torch_was_wanted(report, collector.nodeid, marked=False)


# --- the report ----------------------------------------------------------------------------------

_BEGAN = time.monotonic()
# Of this process: programs that were asked for, those of them that the cache had, and seconds.
_programs = {"asked": 0, "cached": 0, "seconds": 0.0}
_totals = dict(_programs)


def _count_compilation(event: str, seconds: float, **_) -> None:
    if event.endswith("/backend_compile_duration"):
        _programs["asked"] += 1
        _programs["seconds"] += seconds


def _count_cache_hit(event: str, **_) -> None:
    if event.endswith("/cache_hits"):
        _programs["cached"] += 1


jax.monitoring.register_event_duration_secs_listener(_count_compilation)
jax.monitoring.register_event_listener(_count_cache_hit)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker sends its counts to the process that started it; without workers there is one."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput |= {"programs": _programs, "left_out": _left_out}
    else:
        _add_to_totals(_programs)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """A worker of pytest-xdist has ended."""
    told = getattr(node, "workeroutput", {})
    _add_to_totals(told.get("programs", {}))
    _left_out.update(told.get("left_out", {}))


def _add_to_totals(counts: dict[str, float]) -> None:
    for name, count in counts.items():
        _totals[name] += count


def report_line(counts: dict[str, float], seconds: float) -> str:
    """What a suite compiled and how long it took, in one line."""
    return (
        f"{counts['asked'] - counts['cached']:,} programs compiled and {counts['cached']:,} read "
        f"from the cache in {counts['seconds'] / 60:.1f} min of the test processes (those that "
        f"tests start are not counted); the suite took {seconds / 60:.1f} min"
    )


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.write_line(report_line(_totals, time.monotonic() - _BEGAN))
    if _left_out["tests"]:
        terminalreporter.write_line(
            f"left out by SPECJAX_TESTS={_TESTS}: {_left_out['tests']:,} tests"
        )


# Workers take modules in turn: those that take half a minute and more come first, so that no worker
# is still at one when the others have nothing left.
FIRST = {
    "test_chaos", "test_chi_square", "test_control", "test_eagle3_parity", "test_engine",
    "test_every_source", "test_feature_table", "test_features", "test_fuzz", "test_hybrid",
    "test_identity", "test_invariant", "test_llm", "test_mutations", "test_no_recompile",
    "test_page", "test_process", "test_processes", "test_replicas", "test_resume", "test_rl",
    "test_sharding", "test_verify_cli",
}  # fmt: skip


# Tests that take more than about a second and a half with a full cache are marked `long`: by name,
# with the folder, whatever their parameters, or as whole files whose tests share what is long.
_MARKED_LONG = frozenset((Path(__file__).parent / "long.txt").read_text().split())


def pytest_itemcollected(item: pytest.Item) -> None:
    name = item.nodeid.partition("[")[0].removeprefix("tests/")
    if {name, name.partition("::")[0]} & _MARKED_LONG:
        item.add_marker("long")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in FIRST)
    if _TESTS == "jax":
        leave_out(config, items)
    elif _TESTS == "part":
        keep_a_part(config, items)
    elif _TESTS != "all":
        raise pytest.UsageError(f"SPECJAX_TESTS must be 'all', 'jax' or 'part', got {_TESTS!r}")


PARTS = 96  # so that one of them takes two or three minutes of two cores
_left_out = {"tests": 0}  # how many of them


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of `with_newest_jax.py` in a list, and no others."""
    from with_newest_jax import files

    kept, here = files(), Path(__file__).parent
    _keep(config, items, lambda item: item.path.relative_to(here).as_posix() in kept)


def keep_a_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps a part of the tests in a list: another one each day, and all of them in `PARTS`."""
    day = int(time.time() // 86_400)
    _keep(config, items, lambda item: (zlib.crc32(item.nodeid.encode()) + day) % PARTS == 0)


def _keep(config: pytest.Config, items: list[pytest.Item], stays) -> None:
    gone = [item for item in items if not stays(item)]
    _left_out["tests"] += len(gone)
    config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if stays(item)]


def pytest_collection_finish():
    """What was imported stays: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def after_module():
    yield
    drop_programs()
    gc.collect()
    gc.freeze()  # what the collector has seen once, it need not look at after every module


@pytest.fixture(autouse=True)
def after_test(request):
    yield
    if request.node.get_closest_marker("slow"):
        drop_programs()


def drop_programs() -> None:
    """Forgets compiled programs when there are many.

    A process has room for 65,530 memory maps, each program on CPU takes dozens, and the compiler
    crashes where there are none left. Before that, what tests have in common is traced and loaded
    once.
    """
    if _memory_maps() > 35_000:
        gc.unfreeze()
        jax.clear_caches()
        gc.collect()


def _memory_maps() -> float:
    """Of this process; infinite where it is not known."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return float("inf")


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory) -> Path:
    """A tiny random policy with tokenizer and head, as a Hugging Face directory (see tiny_run)."""
    import tiny_run

    return tiny_run.write_policy(tmp_path_factory.mktemp("tiny") / "policy")


@pytest.fixture(scope="session")
def thin_policy(tmp_path_factory) -> Path:
    """The same with one layer, for tests of what surrounds a policy: half as much to compile."""
    import tiny_run

    return tiny_run.write_policy(tmp_path_factory.mktemp("thin") / "policy", num_layers=1)


@pytest.fixture(scope="session")
def thin_model(tmp_path_factory) -> Path:
    """The thin policy without its head: as a draft it is a model, and drafts as the policy does."""
    import tiny_run

    path = tmp_path_factory.mktemp("model") / "policy"
    return tiny_run.write_policy(path, with_head=False, num_layers=1)


@pytest.fixture
def folder(tmp_path):
    """Copies a golden checkpoint to where a test may spoil it."""

    golden = Path(__file__).resolve().parent / "golden"

    def copy(family):
        return Path(shutil.copytree(golden / family, tmp_path / family))

    return copy


@pytest.fixture
def edit_json():
    """Changes keys of a JSON file; the value `...` removes a key."""

    def edit(file, **changes):
        value = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))

    return edit


@pytest.fixture(scope="session")
def cpu_kernels() -> None:
    """Skips what cannot run without the kernels for CPUs; an error where a compiler is expected."""
    from specjax.kernels.cpu import native

    try:
        native.load()
    except native.NoKernelError as error:
        if os.environ.get("SPECJAX_EXPECT_COMPILER") == "1":
            raise
        pytest.skip(str(error))


@pytest.fixture
def logging_as_it_was():
    """Programs set up the log of their process, which here is that of all tests."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
