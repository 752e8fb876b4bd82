"""A momentum and the functions of it that follow: each matrix is read and written once."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus.frame.leaves import LeafInfo
from optax_muonplus.frame.momentum import Momentum
from optax_muonplus.frame.operand import Operand
from optax_muonplus.frame.plainly import Run, plainly
from optax_muonplus.method import (
    Elementwise,
    MatrixFunction,
    Normalize,
    Orthogonalize,
    ScaleByShape,
    as_real,
    compose,
    matrix_function,
    scale_by_pow2,
    static,
    supported,
    times_pow2,
)


@dataclasses.dataclass(frozen=True, eq=False)
class DualNorm:
    """Multiplies the result O of the functions before it by <M, O>, where M is the momentum.

    For a polar factor O this is the nuclear norm of M, the dual of the spectral norm.
    """


@dataclasses.dataclass(frozen=True, eq=False)
class FusedLink:
    """Functions of each matrix, or of its momentum, which is made where it is read.

    Attributes:
      momentum: of the gradients, or None.
      functions: in order, as they were given.
      steps: the functions that run.
      rounds: whether results have the dtype of the gradients, or else that of the functions' input.
      run: how functions are applied to the matrices of a tree.
    """

    momentum: Momentum | None
    functions: tuple[MatrixFunction | DualNorm, ...]
    steps: tuple[MatrixFunction, ...]
    rounds: bool = True
    run: Run = plainly

    @classmethod
    def of(
        cls,
        momentum: Momentum | None,
        functions: Sequence[MatrixFunction | DualNorm],
        rounds: bool = True,
        run: Run | None = None,
    ) -> "FusedLink":
        """Returns the link, with each function adapted to what stands before it."""
        given = tuple(functions)
        first = given[0]
        # The momentum with bias correction may be twice the largest gradient: it is halved before
        # it can overflow. A polar factor is the same, but a caller's function may see the size.
        corrected = momentum is not None and momentum.bias_correction
        if corrected and isinstance(first, Orthogonalize) and not callable(first.polar):
            momentum = dataclasses.replace(momentum, divisor=2.0)
            first = first.replace(eps=first.eps / 2)
        divisor = 1.0 if momentum is None else momentum.divisor
        steps = _adapted([first, *given[1:]], divisor)
        return cls(momentum, given, steps, rounds, run or plainly)

    def times(self, factor: jax.Array) -> "FusedLink":
        """Adds a function that multiplies by a number, such as the learning rate."""
        return dataclasses.replace(self, steps=(*self.steps, Times(factor)))

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> Any:
        """Returns the state of the momentum and an empty one, or an empty one."""
        given = [f for f in self.functions if not isinstance(f, DualNorm)]
        _check_functions(given, leaves)
        if self.momentum is None:
            return optax.EmptyState()
        return self.momentum.init(params), optax.EmptyState()

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Sequence[LeafInfo]
    ) -> tuple[optax.Updates, Any]:
        """Returns the functions of the updates, or of their momentum.

        With a momentum the state is ``(its state, optax.EmptyState())``, as :meth:`init` makes it.
        """
        del params
        arrays, treedef = jax.tree.flatten(updates)
        if self.momentum is None:
            operands = [Operand.of(x) for x in arrays]
        else:
            mu, nothing = state
            mu, operands = self.momentum.advance(updates, mu, self.steps[0].input_dtype)
            state = (mu, nothing)
        if not self.rounds:
            pairs = zip(leaves, operands, strict=True)
            leaves = [leaf._replace(dtype=x.dtype) for leaf, x in pairs]
        return treedef.unflatten(self.run(self.steps, operands, leaves)), state


def _adapted(
    functions: Sequence[MatrixFunction | DualNorm], divisor: float
) -> tuple[MatrixFunction, ...]:
    """Returns the functions that run, for a momentum that is divided by ``divisor``."""
    steps: list[MatrixFunction] = []
    before_dual_norm = None
    for function in functions:
        before = steps[-1] if steps else None
        if isinstance(function, DualNorm):
            before_dual_norm = len(steps)
            continue
        if isinstance(function, Normalize) and isinstance(before, Orthogonalize):
            # Nothing is known of the entries that a caller's function makes.
            function = function.replace(bounded=not callable(before.polar))
        if _is_open(function) and isinstance(before, Normalize):
            function = function.replace(norm=before.norm, match_frobenius=before.match_frobenius)
        steps.append(function)
    if before_dual_norm is None:
        return tuple(steps)
    inner, outer = steps[:before_dual_norm], steps[before_dual_norm:]
    return (ScaleByDualNorm(compose(inner), compose(outer), divisor),)


def _is_open(function: MatrixFunction | DualNorm) -> bool:
    """Tells whether a factor by shape lacks the normalization before it."""
    is_factor = isinstance(function, ScaleByShape)
    return is_factor and function.norm == "none" and not function.match_frobenius


@matrix_function
class Times(Elementwise):
    """Multiplies each matrix by a number."""

    factor: ArrayLike

    def __call__(self, x: jax.Array) -> jax.Array:
        return as_real(self.factor, jnp.finfo(x.dtype).dtype) * x


@matrix_function
class ScaleByDualNorm(MatrixFunction):
    """``s(O)``, ``O = f(M)``, times the real part of <M, O>; if polar, the nuclear norm of M."""

    function: MatrixFunction  # f
    scale: MatrixFunction  # s, which multiplies each matrix by a number
    divisor: float = static(default=1.0)  # M is this times the argument

    def __call__(self, x: jax.Array) -> jax.Array:
        """Multiplies ``s(f(x))`` by the inner product, to the largest number at most."""
        o = self.function(x)
        # The inner product may be beyond the largest number where the update is not.
        y, power = scale_by_pow2(x)
        inner = jnp.real(jnp.sum(y.conj() * o, axis=(-2, -1), keepdims=True))
        return times_pow2(self.scale(o) * inner.astype(o.dtype), power * self.divisor)

    @property
    def transpose_equivariant(self) -> bool:
        return self.function.transpose_equivariant and self.scale.transpose_equivariant

    def transposed(self) -> MatrixFunction:
        return ScaleByDualNorm(self.function.transposed(), self.scale.transposed(), self.divisor)

    def flops(self, shape: tuple[int, int]) -> int:
        return self.function.flops(shape)


def _is_known(function: MatrixFunction, dtype: Any) -> bool:
    """Tells whether a function of the library is defined for all matrices of ``dtype``."""
    if type(function) is Orthogonalize and not callable(function.polar):
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        operand = function.compute_dtype
        return operand is None or jnp.issubdtype(operand, jnp.complexfloating) == is_complex
    return type(function) in (Normalize, ScaleByShape)


def _check_functions(functions: Sequence[MatrixFunction], leaves: Sequence[LeafInfo]) -> None:
    """Raises ValueError unless ``functions`` are defined, and keep the shape, on all matrices.

    Nothing is computed: each distinct shape is traced once, for functions that may not.
    """
    shapes: dict[jax.ShapeDtypeStruct, str] = {}
    for leaf in leaves:
        for shape in leaf.matrix.block_shapes():
            shapes.setdefault(jax.ShapeDtypeStruct(shape, leaf.dtype), leaf.name)
    for (probe, name), function in itertools.product(shapes.items(), functions):
        if _is_known(function, probe.dtype):
            continue
        try:
            result = jax.eval_shape(lambda x, function=function: function(x), probe)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if getattr(result, "shape", None) != probe.shape:
            raise ValueError(
                f"{name}: a function on matrices must map arrays (*batch, out, in) to arrays of the"
                f" same shape; for {probe.shape} it gave {getattr(result, 'shape', result)}."
            )
        complex_only_now = jnp.iscomplexobj(result) and not jnp.iscomplexobj(probe)
        if not supported(result.dtype) or complex_only_now:
            raise ValueError(
                f"{name}: a function on matrices must map floating-point arrays to such, and real"
                f" ones to real ones; for {probe.dtype} it gave {result.dtype}. Cast its result."
            )
