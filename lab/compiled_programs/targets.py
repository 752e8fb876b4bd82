"""Accelerators that need not be there: JAX compiles for them with their own compilers.

XLA's GPU compiler needs a description of the device and no driver. libtpu knows its devices by
name. Nothing can be run, and nothing is tuned by trying: products on a GPU are therefore calls of
cuBLASLt here, in place of Triton kernels with untuned tiles. Do not ship such a program.
"""

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import re
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

GPUS_OF_A_HOST = 8
CUDNN = {"major": 9, "minor": 12}
# NVIDIA's data sheet of the H100 (SXM) in the fields of XLA's message for a device.
H100 = f"""
gpu_device_info {{
  cuda_compute_capability {{ major: 9 }}
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000
  l2_cache_size: {50 * 2**20}
  device_memory_size: 84929347584
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_block_optin: {227 * 2**10}
  shared_memory_per_core: {228 * 2**10}
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
}}
platform_name: "CUDA"
runtime_version {{ major: 13 minor: 0 }}
dnn_version_info {{ major: {CUDNN["major"]} minor: {CUDNN["minor"]} }}
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# Bytes of one device; TPUs' are from Google Cloud's pages.
MEMORY = {"h100": 84929347584, "v5e": 16 * 2**30, "v5p": 95 * 2**30, "v6e": 32 * 2**30}

_TPU_TYPES = {"v5e": "v5litepod", "v5p": "v5p", "v6e": "v6e"}


class Target(NamedTuple):
    """A kind of accelerator and how many of them.

    Attributes:
      kind: ``"h100"``, a TPU such as ``"v5e"``, or ``"cpu"`` for devices that the CPU of this
        machine simulates.
      devices: how many.
      layout: of TPUs, such as ``"4x4"``.
    """

    kind: str
    devices: int
    layout: str

    @property
    def is_gpu(self) -> bool:
        return self.kind == "h100"

    @property
    def is_tpu(self) -> bool:
        return self.kind in _TPU_TYPES

    @property
    def memory(self) -> int:
        """Bytes of one device; simulated devices share the memory of this machine."""
        if self.kind == "cpu":
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // self.devices
        return MEMORY[self.kind]

    @property
    def compiler_options(self) -> dict[str, Any]:
        return {"xla_gpu_enable_triton_gemm": False} if self.is_gpu else {}


def parse(text: str) -> Target:
    """Reads the target that ``"h100:8"``, ``"v5e:4x4"`` or ``"cpu:8"`` names.

    Raises:
      ValueError: for another text, or GPUs that do not fill their hosts.
    """
    found = re.fullmatch(rf"(h100|cpu):(\d+)|({'|'.join(_TPU_TYPES)}):(\d+(?:x\d+)*)", text)
    if not found:
        known = "h100:8, v5e:4x4, v5p:2x2x1, v6e:2x2 or cpu:8"
        raise ValueError(f"A target is {known}, say; got {text!r}")
    kind, layout = found[1] or found[3], found[2] or found[4]
    devices = math.prod(int(n) for n in layout.split("x"))
    if devices == 0:
        raise ValueError(f"A target has at least one device; got {text!r}")
    if kind == "h100" and devices > GPUS_OF_A_HOST and devices % GPUS_OF_A_HOST:
        raise ValueError(f"GPUs are 1 to 8, or fill hosts of 8; got {text!r}")
    return Target(kind, devices, layout)


def missing(target: Target) -> str | None:
    """Names what to install in a sentence; None if the compiler is installed."""
    if target.kind == "cpu":
        return None
    given, name, module = ("-e '.[tpu]'", "libtpu", "libtpu")
    if target.is_gpu:
        given = "-r requirements/cuda-compiler.txt"
        name, module = ("XLA's CUDA compiler", "jax_cuda13_plugin")
    if _find(module):
        return None
    return (
        f"{name} is not installed: pip install {given} brings what compiles for"
        f" {target.kind} on any machine."
    )


def _find(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def compilers(target: Target) -> dict[str, str]:
    names = ("jax-cuda13-plugin", "nvidia-cuda-nvcc") if target.is_gpu else ("jaxlib",)
    names = ("libtpu",) if target.is_tpu else names
    return {name: importlib.metadata.version(name) for name in names}


def environment(target: Target) -> dict[str, str]:
    """Makes the environment of a process that compiles for ``target``.

    JAX must not look for devices or metadata of a cloud, and must not read programs that were
    compiled before, since the time to compile is a figure. XLA's flags are left out. For the CPU of
    this machine only the number of devices differs from other programs here.
    """
    cpu = {"JAX_PLATFORMS": "cpu"}
    if target.kind == "cpu":
        return {**os.environ, **cpu, "JAX_NUM_CPU_DEVICES": str(target.devices)}
    left_out = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "JAX_NUM_CPU_DEVICES")
    inherited = {name: x for name, x in os.environ.items() if name not in left_out}
    # The CUDA plugin would look for a driver.
    ours = {**inherited, **cpu, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    if target.is_gpu:
        return ours
    return ours | {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": f"{_TPU_TYPES[target.kind]}-{max(target.devices, 4)}",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }


def assume_cudnn() -> None:
    """Lets JAX trace cuDNN's attention in this process, which only compiles.

    JAX looks for the library first, but XLA needs none to compile. It may then choose the sizes of
    workspaces by the library's answers; without it they are 0.
    """
    version = 10_000 * CUDNN["major"] + 100 * CUDNN["minor"]
    with contextlib.suppress(ImportError):  # not public; without it, it is not traced
        from jax._src.cudnn import fused_attention_stablehlo

        setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: version)  # noqa: B010


def devices(target: Target) -> np.ndarray:
    """Makes the devices, which can be compiled for and nothing else."""
    if target.kind == "cpu":
        return np.array(jax.devices("cpu"))[: target.devices]
    if target.is_gpu:
        hosts = math.ceil(target.devices / GPUS_OF_A_HOST)
        name, options = (
            f"1x{hosts}x{target.devices // hosts}",
            {"target_config": H100},
        )
        found = topologies.get_topology_desc("", "cuda", topology=name, **options)
    else:
        # The smallest layouts that libtpu knows have several chips; one of them serves for one.
        layout = target.layout if target.devices > 1 else _SMALLEST[target.kind]
        found = topologies.get_topology_desc(f"{target.kind}:{layout}", "tpu")
    return np.array(found.devices)[: target.devices]


_SMALLEST = {"v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2"}
