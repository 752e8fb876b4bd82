"""NVIDIA GPUs as XLA's compiler needs them described: a message GpuTargetConfigProto, as text.

Values are those of XLA's files xla/backends/gpu/target_config/specs/ (openxla/xla @4336d12:
a100_sxm_80.txtpb, h100_sxm.txtpb, h200.txtpb, b200.txtpb).
"""

from typing import Any

from examples.trainer.system.chips import CHIPS

CUDNN = {"major": 9, "minor": 12}

_ALL: dict[str, Any] = {
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
    "shared_memory_per_block": 48 * 2**10,
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "threads_per_core_limit": 2048,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
}
_HOPPER: dict[str, Any] = {
    "cuda_compute_capability": {"major": 9},
    "core_count": 132,
    "fpus_per_core": 128,
    "clock_rate_ghz": 1.98,
    "memory_bandwidth": 3352320000000,
    "l2_cache_size": 50 * 2**20,
    "shared_memory_per_block_optin": 227 * 2**10,
    "shared_memory_per_core": 228 * 2**10,
}
GPUS: dict[str, dict[str, Any]] = {
    "h100": _HOPPER,
    "h200": {**_HOPPER, "memory_bandwidth": 4800000000000},
    "b200": {
        **_HOPPER,
        "cuda_compute_capability": {"major": 10},
        "core_count": 148,
        "clock_rate_ghz": 1.965,
        "memory_bandwidth": 7672320000000,
        "l2_cache_size": 132644864,
    },
    "a100": {
        "cuda_compute_capability": {"major": 8},
        "core_count": 108,
        "fpus_per_core": 64,
        "clock_rate_ghz": 1.41,
        "memory_bandwidth": 2039040000000,
        "l2_cache_size": 40 * 2**20,
        "shared_memory_per_block_optin": 163 * 2**10,
        "shared_memory_per_core": 164 * 2**10,
    },
}
"""Kind of GPU to the fields in which it differs from others."""


def config(kind: str) -> str:
    """The message for a kind of GPU, in protobuf's text format."""
    chip = CHIPS[kind]
    return _text(
        {
            "gpu_device_info": {**_ALL, **GPUS[kind], "device_memory_size": chip.memory},
            "platform_name": "CUDA",
            "runtime_version": {"major": 13, "minor": 0},
            "dnn_version_info": CUDNN,
            "device_description_str": chip.name,
        }
    )


def _text(fields: dict[str, Any]) -> str:
    lines = []
    for name, value in fields.items():
        if isinstance(value, dict):
            lines.append(f"{name} {{ {_text(value)} }}")
        else:
            lines.append(f'{name}: "{value}"' if isinstance(value, str) else f"{name}: {value}")
    return " ".join(lines)
