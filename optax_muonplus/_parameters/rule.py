"""A rule on the path and the shape of a parameter."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from optax_muonplus._parameters.dimension_numbers import DimensionNumbers

Shape = tuple[int, ...]


class Rule(NamedTuple):
    """What parameters whose path matches are.

    Attributes:
      pattern: regular expression, searched in the path ``"blocks/0/attn/query/kernel"``.
      dimension_numbers: their dimension numbers, or None for the AdamW group.
      ndim: number of axes that the rule is for; None means any.
      reads: what it takes the parameter for, as ``describe`` shows it.
      library: whose convention that is; empty for what all have in common.
      sizes: of the axes: a number for that size, a letter for axes of one size, None for any.
      agrees: whether the shapes of the module that owns the parameter's layer, by their paths below
        it, allow this reading of the one at a path.
    """

    pattern: str
    dimension_numbers: DimensionNumbers | None
    ndim: int | None = None
    reads: str = ""
    library: str = ""
    sizes: tuple[int | str | None, ...] = ()
    agrees: Callable[[Mapping[str, Shape], str], bool] | None = None


KERNEL = r"/(kernel|w)$"  # of Flax and Keras; of Haiku
CONVOLUTION = r"(?i)(^|/)[^/]*conv[^/]*"
TORCH = "Equinox, PyTorch"
