"""Settings that must be made before JAX starts: platform, eight CPU devices, compilation cache."""

import gc
import inspect
import os
import pathlib
import platform

from tests.support import platforms

PLATFORM = platforms.chosen(os.environ)
os.environ["JAX_PLATFORMS"] = platforms.jax_platforms(PLATFORM)
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Tracing makes many objects that live on. Without a collector a file of tests took 31 s, not 34.
gc.set_threshold(100_000, 20, 20)
# Compilation is most of the suite's time; the second run reads it from here, also in another
# checkout.
_CACHES = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
_CACHE = _CACHES / "optax_muonplus" / "tests"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax  # noqa: E402
import pytest  # noqa: E402

# Programs are small and run a few times: compiling them without optimization takes half the time,
# and so does leaving out the emitters of fusions where JAX still can. Without these, a fused
# multiply-add would round by what happens to be compiled together; AVX has none.
_FLAGS = ["--xla_backend_optimization_level=0"] if PLATFORM == "cpu" else []
if jax.__version_info__ < (0, 11) and platform.machine() in ("x86_64", "AMD64"):
    _FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_max_isa=AVX"]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS]).strip()

# A (3,) added to a (4, 3) by accident is an error; it is never meant in this package.
jax.config.update("jax_numpy_rank_promotion", "raise")

if PLATFORM != "cpu":
    # Accelerators round float32 operands by default: to TF32, or to bfloat16.
    jax.config.update("jax_default_matmul_precision", "highest")


USE = pytest.StashKey[tuple[int, int]]()
COUNT = pytest.StashKey[int]()


def pytest_collection_modifyitems(items):
    """Skips on an accelerator what needs a CPU."""
    here = pathlib.Path(__file__).parent
    for item in items:
        inside = item.path.is_relative_to(here)
        folder = item.path.relative_to(here).parent.as_posix() if inside else ""
        marks = [mark.name for mark in item.iter_markers()]
        if reason := platforms.reason_to_skip(PLATFORM, folder, marks):
            item.add_marker(pytest.mark.skip(reason=reason))


def free_programs(config):
    """Frees compiled programs, each of which holds several of a process's 65,530 maps."""
    largest = config.stash.setdefault(USE, (0, 0))
    config.stash[USE] = tuple(map(max, largest, memory_use()))
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def programs(request):
    """Frees the programs of a file."""
    yield
    free_programs(request.config)


@pytest.fixture(autouse=True)
def many_programs(request):
    """Frees those of a long file before its end; every twentieth test is asked."""
    yield
    count = request.config.stash[COUNT] = request.config.stash.get(COUNT, 0) + 1
    if count % 20 == 0 and memory_use()[0] > 8_000:
        free_programs(request.config)


def memory_use():
    """Memory maps of this process, and the most memory that it had, in MB; zeros without /proc."""
    try:
        maps = len(pathlib.Path("/proc/self/maps").read_text().splitlines())
        status = pathlib.Path("/proc/self/status").read_text()
    except OSError:
        return 0, 0
    return maps, int(status.partition("VmHWM:")[2].split()[0]) // 1024


def pytest_sessionfinish(session):
    """Hands the use of memory from a worker of pytest-xdist to the process that prints it."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["memory use"] = session.config.stash.get(USE, (0, 0))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Keeps the largest use of memory of all workers."""
    found = getattr(node, "workeroutput", {}).get("memory use", (0, 0))
    largest = node.config.stash.get(USE, (0, 0))
    node.config.stash[USE] = tuple(map(max, largest, found))


def pytest_terminal_summary(terminalreporter, config):
    maps, megabytes = config.stash.get(USE, (0, 0))
    if maps:
        terminalreporter.write_line(f"largest process: {maps:,} memory maps, {megabytes:,} MB")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """No test reads or writes the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of about 100 kB of plain text."""
    path = tmp_path_factory.mktemp("text") / "own.txt"
    path.write_text(inspect.getsource(inspect), encoding="utf-8")
    return path
