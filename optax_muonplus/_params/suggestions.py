"""The arguments to write for parameters that no rule can read."""

import re
from collections.abc import Sequence

from optax_muonplus._chain.layout import MatrixLayout, MuonDimensionNumbers, Shape
from optax_muonplus._chain.paths import fold_all
from optax_muonplus._chain.record import LeafInfo
from optax_muonplus._params.stacks import infer_stacks

_WINDOW = 7  # where no name tells a window from layers and experts, its sides are no longer
_HELP = """]
Arguments: input axes, then output axes. None sends a parameter to AdamW.
Axes in neither (layers, experts, separate heads) are batch axes.
(-2, -1) is a guess, and wrong for a layer with several axes of outputs or
inputs, such as DenseGeneral: (0, (1, 2)) or ((0, 1), 2).
Where layers are stacked on an axis, pass layer_axes={pattern: axis}."""


def suggest_rules(leaves: Sequence[LeafInfo]) -> str:
    """Lists the unknown ones of all ``leaves``, and the arguments for them."""
    unknown = [x for x in leaves if not x.known]
    shown = [f"  {name} {shape}" for name, shape in fold_all((x.name, x.shape) for x in unknown)]
    stacks = [x for x in infer_stacks(leaves) if not all(m.known for m in x.members)]
    if stacks:
        axes = {f"^{re.escape('/'.join(x.node))}/": x.axis for x in stacks}
        lines = ["These look like stacked layers. If they are, pass", f"layer_axes={axes!r}"]
        return "\n".join([*shown, *lines, "If not, write a rule for each."])
    biases = {x.path[:-1]: x.layer_shape for x in leaves if x.path[-1:] in (("bias",), ("b",))}
    rules = dict.fromkeys(f"  {_rule(x, biases.get(x.path[:-1], ()))}," for x in unknown)
    lines = ["If their axes are what these lines say, pass", "rules=[", *rules, _HELP]
    return "\n".join([*shown, *lines])


def _rule(leaf: LeafInfo, bias: Shape) -> str:
    """Writes a rule for a leaf, and the same in other layers."""
    name = "/".join(leaf.path)
    pattern = re.sub(r"\d+", r"\\d+", f"^{re.escape(name)}$")
    return f"({pattern!r}, {_numbers(name, leaf.layer_shape, bias)}, {len(leaf.layer_shape)})"


def _numbers(name: str, shape: Shape, bias: Shape) -> str:
    """Writes the likely dimension numbers of an unknown leaf, of one layer.

    Muon+ would leave nothing but signs of a matrix with one row or column: it gets None.
    """
    bias = tuple(size for size in bias if size > 1)  # Equinox adds axes of length 1
    out_first = re.search(r"weight(_v)?(/0|/array)?$", name) is not None
    sides = shape[2:] if out_first else shape[:-2]
    out, other = (0, 1) if out_first else (len(shape) - 1, len(shape) - 2)
    # PyTorch's ConvTranspose2d is (in, out, *window), and Keras' Conv2DTranspose (.., out, in).
    turned = re.search(r"(?i)_transpose|convtranspose|deconv", name)
    if turned or (shape[out],) != bias == (shape[other],):
        out = other
    is_window = len(sides) > 1 and {*sides} == {sides[0]} and sides[0] <= _WINDOW
    numbers = MuonDimensionNumbers(*((-1, -2) if out_first else (-2, -1)))
    if is_window or bias == (shape[out],) or re.search(r"(?i)conv|patch|stem", name):
        inputs = tuple(axis for axis in range(len(shape)) if axis != out)
        numbers = MuonDimensionNumbers(inputs, out)
    if min(MatrixLayout.of(shape, numbers).block_shapes()[0][1:]) == 1:
        return "None"
    return f"omp.MuonDimensionNumbers({numbers.reduction_axis}, {numbers.output_axis})"
