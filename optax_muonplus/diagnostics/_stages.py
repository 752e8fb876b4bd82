"""The stages that a matrix goes through inside of Muon+, computed again beside the optimizer."""

from collections.abc import Sequence
from typing import Any

import jax

from optax_muonplus._parameters.leaves import LeafInfo
from optax_muonplus._parameters.paths import flatten_with_names, path_name
from optax_muonplus._parameters.selection import by_name
from optax_muonplus.diagnostics._recording import Probe
from optax_muonplus.diagnostics._state import Arrays
from optax_muonplus.matrices._matrix_function import MatrixFunction
from optax_muonplus.matrices._normalization import Normalize
from optax_muonplus.matrices._shape_factor import ScaleByShape
from optax_muonplus.polar._orthogonalize import Orthogonalize
from optax_muonplus.transforms._apply import apply_to_arrays, with_dtypes
from optax_muonplus.transforms._momentum import Momentum, MomentumState, find_momentum
from optax_muonplus.transforms._steps import momentum_divisor, muonplus_steps


def inside_of_muonplus(arguments: dict[str, Any]) -> Probe:
    """The stages of Muon+ with the arguments that ``scale_by_muonplus`` was given."""
    polar_factor, steps = _steps(arguments)
    flags = arguments["nesterov"], arguments["bias_correction"]
    divisor = momentum_divisor(arguments["polar"], arguments["bias_correction"])
    average = Momentum(arguments["beta"], *flags, None, divisor)

    def capture(leaves: Sequence[LeafInfo], updates: Any, state: Any, results: Any) -> Any:
        """Returns what the directions are made of, arrays that the optimizer has in memory anyway.

        The old buffers would have to be kept, and copied at all updates, which overwrite them.
        """
        del results
        old = find_momentum(state)
        mu = {path_name(path): x for path, x in zip(*flatten_with_names(old.mu), strict=True)}
        selected = MomentumState({leaf.name: mu[leaf.name] for leaf in leaves}, old.count)
        new, read, sources = average.advance(
            by_name(leaves, updates), selected, polar_factor.input_dtype
        )
        return read, jax.tree.structure(new.mu).unflatten(sources)

    def unfold(leaves: Sequence[LeafInfo], captured: Any) -> dict[str, Arrays]:
        names = [leaf.name for leaf in leaves]
        read, sources = captured
        arrays = [read(*sources[name]) for name in names]
        # Measures are of what the steps compute, not of what the updates are rounded to.
        wide = with_dtypes(leaves, [x.dtype for x in arrays])
        factors = apply_to_arrays([polar_factor], arrays, wide)
        if arguments["adaptive"]:
            results = apply_to_arrays(steps, arrays, wide)
        else:
            results = apply_to_arrays(steps[1:], factors, wide)
        moments = [x * divisor for x in arrays] if divisor != 1 else arrays
        return {
            "momentum": dict(zip(names, moments, strict=True)),
            "polar": dict(zip(names, factors, strict=True)),
            "update": dict(zip(names, results, strict=True)),
        }

    norm = arguments.get("norm", "none")
    return Probe(("momentum", "polar", "update"), capture, unfold, norm, arguments["norm_eps"])


def _steps(arguments: dict[str, Any]) -> tuple[Orthogonalize, list[MatrixFunction]]:
    """The polar factor, and all steps."""

    def chosen(*names: str) -> dict[str, Any]:
        return {name: arguments[name] for name in names}

    norm = arguments.get("norm", "none")  # muon has no such argument
    polar_factor = Orthogonalize(
        **chosen("ns_coeffs", "ns_steps", "eps", "polar", "preconditioning", "compute_dtype"),
        **chosen("symmetric_kernel"),
    )
    normalize = Normalize(norm, **chosen("norm_eps", "match_frobenius"))
    scale = ScaleByShape(norm=norm, **chosen("shape_scale", "consistent_rms", "match_frobenius"))
    return polar_factor, muonplus_steps(polar_factor, normalize, scale, arguments["adaptive"])
