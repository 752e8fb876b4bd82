"""The arguments to write for parameters that no rule can read."""

import re
from collections.abc import Sequence

from optax_muonplus._chain.layout import MuonDimensionNumbers
from optax_muonplus._chain.paths import fold_all
from optax_muonplus._chain.record import LeafInfo
from optax_muonplus._params.stacks import infer_stacks

_WINDOW = 7  # where no name tells a window from layers and experts, its sides are no longer
_HELP = """]
Arguments: input axes, then output axes. None sends a parameter to AdamW.
Axes in neither (layers, experts, separate heads) are batch axes.
They are guesses: wrong for transposed convolutions, and for layers with
several axes of outputs or inputs, such as DenseGeneral: (0, (1, 2)).
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
    rules = dict.fromkeys(f"  {_rule(x)}," for x in unknown)
    lines = ["If their axes are what these lines say, pass", "rules=[", *rules, _HELP]
    return "\n".join([*shown, *lines])


def _rule(leaf: LeafInfo) -> str:
    """Writes a rule for a leaf, and the same in other layers, with a guess of its axes."""
    shape, name = leaf.layer_shape, "/".join(leaf.path)
    out_first = re.search(r"weight(_v)?(/0|/array)?$", name) is not None
    sides = shape[2:] if out_first else shape[:-2]
    is_window = len(sides) > 1 and {*sides} == {sides[0]} and sides[0] <= _WINDOW
    numbers = MuonDimensionNumbers(-1, -2) if out_first else MuonDimensionNumbers(-2, -1)
    if is_window or re.search(r"(?i)conv|patch|stem", name):
        axes = tuple(range(len(shape)))
        numbers = MuonDimensionNumbers(*((axes[1:], 0) if out_first else (axes[:-1], axes[-1])))
    pattern = re.sub(r"\d+", r"\\d+", f"^{re.escape(name)}$")
    written = f"omp.MuonDimensionNumbers({numbers.reduction_axis}, {numbers.output_axis})"
    return f"({pattern!r}, {written}, {len(shape)})"
