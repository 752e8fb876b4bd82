"""The backend that tests run on: a CPU, or of the core's tests an accelerator."""

import os
from collections.abc import Collection, Mapping

VARIABLE = "OPTAX_MUONPLUS_TEST_PLATFORM"

# Folders of tests and marks that stay on a CPU, and why.
FOLDERS = {
    "execution/mesh": "needs eight devices, which a CPU simulates",
    "zero1": "needs eight devices, which a CPU simulates",
    "examples": "trains toys on simulated devices; the core's tests run on accelerators",
    "documentation": "reads files",
}
MARKS = {
    "several_devices": "needs eight devices, which a CPU simulates",
    "cpu_program": "reads what JAX makes for a CPU, at its default precision of products",
}


def chosen(environment: Mapping[str, str]) -> str:
    """The backend's name: `cpu`, unless the variable names another one, such as `cuda`."""
    return environment.get(VARIABLE) or "cpu"


# On a GPU products sum in another order, and an SVD was up to twice as far from the exact factor
# (H100, float32). Half-precision iterations had 1.5 to 2.3 times the error of products rounded once
# there. The program compiled for an H100 rounds each array once. But its products are cuBLASLt's,
# of which untuned ones may split a sum and add the parts in the dtype of the result.
LESS_EXACT = 1.0 if chosen(os.environ) == "cpu" else 2.5


def jax_platforms(platform: str) -> str:
    """What JAX is told: the first is its default, and a CPU stays for what asks for one."""
    return platform if platform == "cpu" else f"{platform},cpu"


def reason_to_skip(platform: str, folder: str, marks: Collection[str]) -> str | None:
    """Why a test in a folder of `tests`, with these marks, does not run on a platform."""
    if platform == "cpu":
        return None
    reasons = [why for known, why in FOLDERS.items() if f"{folder}/".startswith(f"{known}/")]
    reasons += [MARKS[mark] for mark in marks if mark in MARKS]
    return next(iter(reasons), None)
