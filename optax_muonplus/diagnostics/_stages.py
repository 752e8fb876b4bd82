"""The stages that a matrix goes through in a chain, computed again next to the optimizer."""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from optax_muonplus._parameters import LeafInfo, by_name, flatten_with_names, path_name
from optax_muonplus.diagnostics._recording import Probe
from optax_muonplus.diagnostics._state import Arrays
from optax_muonplus.matrices import Normalize
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import MomentumState, Steps, find_momentum, links_of
from optax_muonplus.transforms._apply import apply_to_arrays, with_dtypes


def inside_of(transformation: optax.GradientTransformation) -> Probe:
    """The stages of the momentum and the functions in the chain of ``transformation``.

    Raises:
      ValueError: for one that has no chain with a momentum and its polar factor.
    """
    steps = [x for x in links_of(transformation) if isinstance(x, Steps) and x.average is not None]
    if not steps or not isinstance(steps[0].functions[0], Orthogonalize):
        raise ValueError(
            "recorded knows the inside of chains with a momentum and its polar factor, as those of"
            " omp.muonplus, omp.muon and omp.scale_by_muonplus are. For any other optimizer, or a"
            " link of a chain, there is watched."
        )
    link = steps[0]
    average, polar_factor = link.average, link.functions[0]
    norms = [x for x in link.functions if isinstance(x, Normalize)] or [Normalize("none")]

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
        if isinstance(link.steps[0], Orthogonalize):
            others = link.steps[1:]
            results = apply_to_arrays(others, factors, wide) if others else factors
        else:  # the dual norm is an inner product with the momentum
            results = apply_to_arrays(link.steps, arrays, wide)
        stages = {
            "momentum": [x * average.divisor for x in arrays] if average.divisor != 1 else arrays,
            "polar": factors,
            "update": results,
        }
        return {stage: dict(zip(names, xs, strict=True)) for stage, xs in stages.items()}

    return Probe(("momentum", "polar", "update"), capture, unfold, norms[0].norm, norms[0].norm_eps)
