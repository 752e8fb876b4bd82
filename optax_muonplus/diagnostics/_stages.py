"""The stages that a matrix goes through inside of Muon+, computed again beside the optimizer."""

from collections.abc import Sequence
from typing import Any

from optax_muonplus._parameters.leaves import LeafInfo
from optax_muonplus._parameters.paths import flatten_with_names, path_name
from optax_muonplus._parameters.selection import by_name
from optax_muonplus.diagnostics._recording import Arrays, Probe
from optax_muonplus.matrices._normalization import Normalize
from optax_muonplus.matrices._shape_factor import ScaleByShape
from optax_muonplus.polar._orthogonalize import Orthogonalize
from optax_muonplus.transforms._apply import apply_to_arrays
from optax_muonplus.transforms._momentum import MomentumState, find_momentum, momentum
from optax_muonplus.transforms._steps import muonplus_steps


def inside_of_muonplus(arguments: dict[str, Any]) -> Probe:
    """The stages of Muon+ with the arguments that ``scale_by_muonplus`` was given."""
    norm = arguments.get("norm", "none")  # muon has no such argument
    average = momentum(
        arguments["beta"],
        nesterov=arguments["nesterov"],
        bias_correction=arguments["bias_correction"],
    )
    polar_factor = Orthogonalize(
        *(arguments[name] for name in ("ns_coeffs", "ns_steps", "eps", "polar")),
        preconditioning=arguments["preconditioning"],
        compute_dtype=arguments["compute_dtype"],
    )
    match_frobenius, adaptive = arguments["match_frobenius"], arguments["adaptive"]
    normalize = Normalize(norm, arguments["norm_eps"], match_frobenius)
    scale = ScaleByShape(
        arguments["shape_scale"], arguments["consistent_rms"], norm, match_frobenius
    )
    steps = muonplus_steps(polar_factor, normalize, scale, adaptive)

    def capture(leaves: Sequence[LeafInfo], updates: Any, state: Any, results: Any) -> Any:
        """The momentum: what the optimizer computes too, so that the compiler does so once.

        Computed on recorded updates only, it would keep the old buffer, and that would have to be
        copied at all others: it is overwritten where it lies.
        """
        del results
        old = find_momentum(state)
        mu = {path_name(path): x for path, x in zip(*flatten_with_names(old.mu), strict=True)}
        selected = MomentumState({leaf.name: mu[leaf.name] for leaf in leaves}, old.count)
        return average.update(by_name(leaves, updates), selected)[0]

    def unfold(leaves: Sequence[LeafInfo], moments: Arrays) -> dict[str, Arrays]:
        names = [leaf.name for leaf in leaves]
        arrays = [moments[name] for name in names]
        # Measures are of what the steps compute, not of what the updates are rounded to.
        wide = [leaf._replace(dtype=x.dtype) for leaf, x in zip(leaves, arrays, strict=True)]
        transfer_dtype = polar_factor.transfer_dtype
        factors = apply_to_arrays([polar_factor], arrays, wide, transfer_dtype)
        if adaptive:
            results = apply_to_arrays(steps, arrays, wide, transfer_dtype)
        else:
            results = apply_to_arrays(steps[1:], factors, wide)
        return {
            "momentum": moments,
            "polar": dict(zip(names, factors, strict=True)),
            "update": dict(zip(names, results, strict=True)),
        }

    return Probe(("momentum", "polar", "update"), capture, unfold, norm, arguments["norm_eps"])
