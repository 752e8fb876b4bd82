"""What kernels of convolutions are, by their shapes and by those of their neighbours.

The kernel of a convolution of Flax and Keras has the axes of the window, the inputs of one group
and the outputs, in this order.
"""

import math
import re
from collections.abc import Mapping

from optax_muonplus.frame import Shape

_WIDEST = 11  # of a window with one long side, as of AlexNet; more may be layers
_FEW = 4  # as many inputs as depthwise kernels are wide


def is_one_kernel(module: Mapping[str, Shape], own: str) -> bool:
    """Whether a shape is that of a window, and not of stacked layers with smaller windows.

    The sides of a window are equal, or 1: (3, 3), (1, 7), (1, 3, 3). Of few inputs and one side,
    (12, 4, 1024), it may be 12 depthwise kernels. The inputs of one group only are no matrix.
    """
    *window, inputs, _ = module[own]
    if len(window) == 1:
        fits = window[0] <= max(inputs, _WIDEST) and not 1 < inputs <= _FEW
    else:
        sides = {side for side in window if side > 1}
        fits = len(sides) == 1 and (1 not in window or max(sides) <= _WIDEST)
    return fits and not is_grouped(module, own)


def is_first(module: Mapping[str, Shape], own: str) -> bool:
    """Whether a kernel of one input is that of grey images, and not depthwise.

    Depthwise kernels have that input too. They follow a layer with as many outputs, and a
    convolution of 1 x 1 or a dense layer with as many inputs follows them. A first layer has none
    before it, and is followed by a convolution with a window, or by a dense layer of all pixels.
    """
    outputs = module[own][-1]
    before, after = _others(module, own, later=False), _others(module, own, later=True)
    if not is_one_kernel(module, own) or any(shape[-1] == outputs for shape in before):
        return False
    takers = [shape for shape in after if shape[-2] == outputs]
    of_pixels = (len(x) == 2 and x[0] > outputs and x[0] % outputs == 0 for x in after)
    return any(math.prod(x[:-2]) > 1 for x in takers) or (not takers and any(of_pixels))


def is_grouped(module: Mapping[str, Shape], own: str) -> bool:
    """Whether the layer just before gives several times the inputs that a kernel has.

    Two branches may have one input: the layer before has other inputs than this one.
    """
    *_, inputs, outputs = module[own]
    name = re.sub(r"\d+(?=\D*$)", lambda number: str(int(number[0]) - 1), own)
    unnumbered = name.replace("_0/", "/")  # as Keras calls the first
    *_, others, given = module.get(name) or module.get(unnumbered) or (1, 1)
    groups = given // inputs
    return groups > 1 < inputs != others and given % inputs == 0 and outputs % groups == 0


def _others(module: Mapping[str, Shape], own: str, later: bool) -> list[Shape]:
    """Shapes of kernels that come after one, or before it; those of other names may do both."""

    def comes(name: str) -> bool:
        same_kind = re.sub(r"\d+", "", name) == re.sub(r"\d+", "", own)
        return (_number(name) > _number(own)) == later if same_kind else True

    kernels = {name: x for name, x in module.items() if len(x) > 1 and name.endswith("/kernel")}
    return [shape for name, shape in kernels.items() if name != own and comes(name)]


def _number(name: str) -> int:
    return int((re.findall(r"\d+", name) or [0])[-1])
