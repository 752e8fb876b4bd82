"""Which kernels an update spends its time in, by JAX's profiler."""

import collections
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu import updates, variants
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.steps import Figures, Unavailable

# Kinds of kernels by their names, the first that matches: cuBLAS's products, XLA's operations.
KINDS = {
    "products": r"nvjet|gemm|cutlass|xmma|cublas|wgmma|triton_dot|symmetric",
    "copies": r"copy|memcpy|memset|transpose|concatenate|slice|pad",
    "reductions": r"reduce",
    "others": r"",
}
LISTED = 20


def breakdown(name: str, settings: Settings) -> Figures:
    """Device time of an update by kernel and by kind of kernel."""
    params, grads = updates.random_trees(settings.swept)
    update, _ = updates.compile_update(variants.VARIANTS[name], params, grads)
    jax.block_until_ready(update())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(settings.calls):
                result = update()
            jax.block_until_ready(result)
        times = device_times(Path(folder))
    return summary(times, settings.calls)


def device_times(folder: Path) -> list[tuple[str, float]]:
    """Name and seconds of each kernel in a profile."""
    file = next(folder.rglob("*.xplane.pb"), None)
    if file is None:
        raise Unavailable("the profiler wrote nothing")
    planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    devices = [plane for plane in planes if re.match(r"/device:(GPU|CUDA)", plane.name)]
    # A CPU has no plane of its own: what its threads did is no kernel, but shows that this works.
    return list(_events(devices or planes, streams_only=bool(devices)))


def _events(planes: list[Any], streams_only: bool) -> Iterator[tuple[str, float]]:
    """Other lines of a GPU's plane list the same time again, by operation and by module."""
    for plane in planes:
        for line in plane.lines:
            if line.name.startswith("Stream") or not streams_only:
                for event in line.events:
                    yield event.name, event.duration_ns / 1e9


def summary(times: list[tuple[str, float]], calls: int) -> Figures:
    """Seconds and launches of one call, by kind and of the longest kernels."""
    seconds: dict[str, float] = collections.defaultdict(float)
    launches: dict[str, int] = collections.defaultdict(int)
    kinds: dict[str, float] = collections.defaultdict(float)
    for name, duration in times:
        seconds[name] += duration / calls
        launches[name] += 1
        kinds[kind_of(name)] += duration / calls
    longest = sorted(seconds.items(), key=lambda item: -item[1])
    return {
        "seconds": sum(seconds.values()),
        "launches": len(times) / calls,
        "seconds_by_kind": dict(kinds),
        "longest": [
            {"kernel": name[:120], "seconds": s, "launches": launches[name] / calls}
            for name, s in longest[:LISTED]
        ],
    }


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name."""
    return next(kind for kind, words in KINDS.items() if re.search(words, kernel, re.IGNORECASE))
