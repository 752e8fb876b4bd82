"""A momentum and the functions that follow it: each matrix is read and written once."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_muonplus._chain.momentum import PlainMomentum
from optax_muonplus._chain.operand import Operand
from optax_muonplus._chain.plain import Run, run_plain
from optax_muonplus._chain.program import DualNorm, functions_of
from optax_muonplus._core.arguments import is_supported
from optax_muonplus._core.function import MatrixFunction
from optax_muonplus._leaves.record import LeafInfo


@dataclasses.dataclass(frozen=True, eq=False)
class FusedLink:
    """Functions of each matrix, or of its momentum, which is computed as it is read."""

    momentum: PlainMomentum | None
    functions: Sequence[MatrixFunction | DualNorm]  # as given
    rounds: bool = True  # results have the dtype of the gradients; else that of the momentum
    run: Run = run_plain
    factor: jax.Array | None = None  # multiplies all results, as a learning rate

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> Any:
        functions = [f for f in self.functions if not isinstance(f, DualNorm)]
        _check_functions(functions, leaves)
        if self.momentum is None:
            return optax.EmptyState()
        return self.momentum.init(params), optax.EmptyState()

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Sequence[LeafInfo]
    ) -> tuple[optax.Updates, Any]:
        """Applies the functions to the updates, or to their momentum; also returns the state."""
        arrays, treedef = jax.tree.flatten(updates)
        functions = functions_of(self.functions)  # made anew: hyperparameters may be tracers
        if self.momentum is None:
            operands = [Operand.of(x) for x in arrays]
        else:
            mu, nothing = state
            mu, operands = self.momentum.advance(updates, mu)
            state = mu, nothing
        if not self.rounds:
            pairs = zip(leaves, operands, strict=True)
            leaves = [leaf._replace(dtype=x.dtype) for leaf, x in pairs]
        return treedef.unflatten(self.run(functions, operands, leaves, self.factor)), state


def _check_functions(functions: Sequence[MatrixFunction], leaves: Sequence[LeafInfo]) -> None:
    """Raises ValueError unless ``functions`` keep each shape; they are traced, not computed."""
    shapes: dict[jax.ShapeDtypeStruct, str] = {}
    for leaf in leaves:
        for shape in leaf.matrix.block_shapes():
            shapes.setdefault(jax.ShapeDtypeStruct(shape, leaf.dtype), leaf.name)
    for (probe, name), function in itertools.product(shapes.items(), functions):
        try:
            result = jax.eval_shape(function, probe)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        becomes_complex = jnp.iscomplexobj(result) and not jnp.iscomplexobj(probe)
        shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", type(result))
        if shape != probe.shape or not is_supported(dtype) or becomes_complex:
            raise ValueError(
                f"{name}: a function of matrices (out, in) must keep their shape, and return"
                " floating-point numbers, real ones for real matrices; for"
                f" {probe.dtype} of shape {probe.shape} it gave {dtype} of shape {shape}."
            )
