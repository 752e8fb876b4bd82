"""Suggested arguments for parameters that no rule fits."""

import re
from collections.abc import Sequence

from optax_muonplus._leaves.layout import MatrixLayout, MuonDimensionNumbers, Shape
from optax_muonplus._leaves.paths import fold_all
from optax_muonplus._leaves.record import LeafInfo
from optax_muonplus._params.attention import LIKELY_OUT, LIKELY_QKV
from optax_muonplus._params.neighbours import is_plausible
from optax_muonplus._params.stacks import infer_stacks

_WINDOW = 7  # longest side of a window without the name of a convolution
_HELP = """]
Arguments: input axes, then output axes. None sends a parameter to AdamW.
Axes in neither (layers, experts, separate heads) are batch axes.
Inputs or outputs may be several axes, such as (0, (1, 2)) in DenseGeneral.
Where layers are stacked on an axis, pass layer_axes={pattern: axis}."""


def suggest_rules(leaves: Sequence[LeafInfo]) -> str:
    """Lists the unknown leaves and the arguments to pass for them."""
    unknown = [x for x in leaves if not x.known]
    shown = [f"  {name} {shape}" for name, shape in fold_all((x.name, x.shape) for x in unknown)]
    stacks = infer_stacks(leaves).items()
    stacked = [(node, axis) for node, (axis, found) in stacks if not all(x.known for x in found)]
    if stacked:
        axes = {f"^{re.escape('/'.join(node))}/": axis for node, axis in stacked}
        lines = ["These look like stacked layers. If they are, pass", f"layer_axes={axes!r}"]
        return "\n".join([*shown, *lines, "If not, write a rule for each."])
    biases = {x.path[:-1]: x.layer_shape for x in leaves if x.path[-1:] in (("bias",), ("b",))}
    rules, guesses = {}, {}
    for leaf in unknown:
        name, shape = "/".join(leaf.path), leaf.layer_shape
        axes, is_guess = _axes(name, shape, biases.get(leaf.path[:-1], ()))
        # Normalization leaves only signs of a matrix with one row or column.
        is_matrix = min(_block(shape, axes)[1:]) > 1
        value = f"omp.MuonDimensionNumbers{axes}" if is_matrix else None
        pattern = re.sub(r"\d+", r"\\d+", f"^{re.escape(name)}$")  # same in other layers
        rules[f"  ({pattern!r}, {value}, {len(shape)}),"] = None
        if is_guess and is_matrix:
            guesses[f"{axes} is a guess from names and shapes."] = None
    lines = ["If these axes are right, pass", "rules=[", *rules, _HELP, *guesses]
    return "\n".join([*shown, *lines])


def _block(shape: Shape, axes: tuple) -> tuple[int, int, int]:
    return MatrixLayout.of(shape, MuonDimensionNumbers(*axes)).block_shapes()[0]


def _axes(name: str, shape: Shape, bias: Shape) -> tuple[tuple, bool]:
    """Returns the likely axes of one layer of a leaf, and whether they are a guess."""
    bias, n = tuple(size for size in bias if size > 1), len(shape)  # Equinox adds axes of length 1
    out_first = re.search(r"weight(_v)?(/0|/array)?$", name) is not None
    sides = shape[2:] if out_first else shape[:-2]
    ends: list[Shape] = [(0,), (1,)] if out_first else [(n - 1,), (n - 2,)]
    # PyTorch's ConvTranspose2d is (in, out, *window), Keras' Conv2DTranspose (*window, out, in).
    if re.search(r"(?i)_transpose|convtranspose|deconv", name):
        ends.reverse()
    if 1 < len(bias) < n:
        ends.append(tuple(range(n)[: len(bias)] if out_first else range(n)[-len(bias) :]))
    by_bias = [x for x in ends if tuple(shape[axis] for axis in x) == bias]
    is_window = len(sides) > 1 and {*sides} == {sides[0]} and sides[0] <= _WINDOW
    if re.search("(?i)spectral(?!_?norm)|fourier", name):
        return (0, 1), True  # (in, out, *modes)
    if by_bias or is_window or re.search("(?i)conv|patch|stem|spline", name):
        outputs = [*by_bias, *ends][0]
        inputs = tuple(axis for axis in range(n) if axis not in outputs)
        axes = tuple(x[0] if len(x) == 1 else x for x in (inputs, outputs))
        return axes, not by_bias or shape.count(bias[0]) > 1
    return _guess(name, shape, out_first), True


def _guess(name: str, shape: Shape, out_first: bool) -> tuple:
    """Returns axes whose matrices have plausible sides."""
    *lead, last = range(len(shape))
    for axes, names in (((0, (*lead[1:], last)), LIKELY_QKV), ((tuple(lead), last), LIKELY_OUT)):
        _, short, long = sorted(_block(shape, axes))
        if not out_first and re.search(names, name) and long < 4 * short:  # fused qkv has three
            return axes
    ways = [(-1, -2), (-1, 0)] if out_first else [(-2, -1), (0, -1)]
    return next((x for x in ways if is_plausible(*_block(shape, x))), ways[0])
