"""The stages that a matrix goes through inside of Muon+, computed again beside the optimizer."""

import functools
from typing import Any

from optax_muonplus._parameters.paths import flatten_with_names, path_name
from optax_muonplus._parameters.selection import Target, by_target
from optax_muonplus.diagnostics._recording import Arrays, Probe
from optax_muonplus.transforms._apply import apply_to_matrices
from optax_muonplus.transforms._links import MomentumState, find_momentum, momentum
from optax_muonplus.transforms._steps import (
    dual_norm_step,
    normalize_step,
    orthogonalize_step,
    rounded_on_arrival,
    scale_step,
)


def inside_of_muonplus(given: dict[str, Any]) -> Probe:
    """The stages of Muon+ with the arguments that ``scale_by_muonplus`` was given."""
    norm = given.get("norm", "none")  # muon has no such argument
    polar, compute_dtype = given["polar"], given["compute_dtype"]
    first = momentum(
        given["beta"], nesterov=given["nesterov"], bias_correction=given["bias_correction"]
    )
    polar_step = orthogonalize_step(
        polar,
        given["ns_coeffs"],
        given["ns_steps"],
        given["eps"],
        given["preconditioning"],
        compute_dtype,
    )
    norm_step = normalize_step(norm, given["norm_eps"], given["match_frobenius"])
    shape_step = scale_step(
        given["shape_scale"], given["consistent_rms"], norm, given["match_frobenius"]
    )
    moved_as = rounded_on_arrival(polar, compute_dtype)

    def capture(targets: list[Target], updates: Any, state: Any, done: Any) -> Any:
        """The momentum: what the optimizer computes too, so that the compiler does so once.

        Computed on recorded updates only, it would keep the old buffer, and that would have to be
        copied at all others: it is overwritten where it lies.
        """
        del done
        old = find_momentum(state)
        mu = {path_name(name): x for name, x in zip(*flatten_with_names(old.mu), strict=True)}
        own = MomentumState({target.path: mu[target.path] for target in targets}, old.count)
        return first.update(by_target(targets, updates), own)[0]

    def unfold(targets: list[Target], moments: Arrays) -> dict[str, Arrays]:
        lift = functools.partial(
            apply_to_matrices,
            dimension_numbers={target.path: target.spec for target in targets},
            sharding=_shardings(targets),
            moved_as=moved_as,
        )
        factors = lift([polar_step], moments)
        if given["adaptive"]:
            done = lift([dual_norm_step(polar_step, norm_step), shape_step], moments)
        else:
            done = lift([norm_step, shape_step], factors, moved_as=None)
        return {"momentum": moments, "polar": factors, "update": done}

    return Probe(("momentum", "polar", "update"), capture, unfold, norm, given["norm_eps"])


def _shardings(targets: list[Target]) -> Any:
    known = {target.path: target.sharding for target in targets}
    return known if any(known.values()) else None
