"""Which parameters are matrices: rules on paths and shapes."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_muonplus._parameters.dimension_numbers import (
    DimensionNumbers,
    MatrixSpec,
    MuonDimensionNumbers,
    is_dimension_numbers,
)
from optax_muonplus._parameters.paths import Path, flatten_tree


class Rule(NamedTuple):
    """What parameters whose path matches are.

    Attributes:
      pattern: regular expression, searched in the path ``"blocks/0/attn/query/kernel"``.
      dimension_numbers: their dimension numbers, or None for the AdamW group.
      ndim: number of axes that the rule is for; None means any.
    """

    pattern: str
    dimension_numbers: DimensionNumbers | None
    ndim: int | None = None


# A name stands for a whole path component, with or without a counter behind it: Embed_0, ln_1.
# Embeddings and norms are looked for in the module that owns the leaf and in the leaf itself, so
# that the layers of a "time_embed" network stay matrices.
_LAST_TWO = r"(?i)(^|/)({})(/[^/]*)?$"
DEFAULT_RULES: tuple[Rule, ...] = (
    Rule(r"(?i)(^|/|_)(bias|scale|offset|gain|gamma|beta)(_?\d+)?$", None),
    Rule(r"[^/]/b$", None),  # Haiku's bias, which has a module above it
    Rule(_LAST_TWO.format(r"[^/]*embed[^/]*|([^/]*_)?emb(_[^/]*|\d+)?|w[tp]e"), None),
    # A norm has no kernel: "norm_proj/kernel" is a matrix.
    Rule(r"(?i)(^|/)([^/]*norm|ln|rms)(_[^/]*|\d+)?(/(?!kernel$|w$)[^/]*)?$", None),
    Rule(
        _LAST_TWO.format(r"(?!multi)([^/]*_)?(head|logits|unembed|readout)(_dense)?(_?\d+)?"), None
    ),
    Rule(r"(?i)^((params|model|transformer)/)*output(/[^/]*)?$", None),  # LLaMA's unembedding
    Rule(_LAST_TWO.format(r"pos(ition(s|al)?)?(_[^/]*)?|[^/]*_pos(ition)?"), None),
    # Flax's attention: DenseGeneral (features, heads, head_dim) and back.
    Rule(r"(^|/)(query|key|value)/kernel$", MuonDimensionNumbers(0, (1, 2)), 3),
    Rule(r"(^|/)out/kernel$", MuonDimensionNumbers((0, 1), 2), 3),
    # Equinox and PyTorch name it so and store it as (out, in).
    Rule(r"(^|/)weight$", MuonDimensionNumbers(1, 0), 2),
    Rule(r"", MuonDimensionNumbers(0, 1), 2),
)


def muon_dimension_numbers(params: Any, rules: Iterable[Sequence[Any]] = ()) -> Any:
    """Dimension numbers of every parameter, by rules on its path; None means the AdamW group.

    Leaves of fewer than two axes are not matrices. For the others the first rule whose pattern is
    found in the path decides: the given ``rules`` in order, then the default ones. Those send
    embeddings, unembeddings, positional tables, norms, scales and biases to AdamW, know the
    attention kernels of Flax, read a 2-D ``weight`` as (out, in) and any other 2-D leaf as (in,
    out).

    To use rules in an optimizer pass a function, which is asked at init and at every update::

      conv = omp.MuonDimensionNumbers(reduction_axis=(0, 1, 2), output_axis=3)
      functools.partial(omp.muon_dimension_numbers, rules=[("conv", conv)])

    Args:
      params: parameters or updates; only paths and shapes are read.
      rules: ``(pattern, dimension numbers or None)``, or with a third item, the number of axes that
        the rule is for. Patterns are regular expressions, searched in paths such as
        ``blocks/0/attn/query/kernel``.

    Returns:
      A tree with the structure of ``params``.

    Raises:
      ValueError: if a given rule matches no parameter, or no rule a leaf of three or more axes:
        guessing its layout could mix experts or heads.
    """
    paths, leaves, unflatten = flatten_tree(params)
    return unflatten(dimension_numbers_by_rule(paths, leaves, rules))


def dimension_numbers_by_rule(
    paths: Sequence[Path], leaves: Sequence[Any], rules: Iterable[Sequence[Any]] = ()
) -> list[DimensionNumbers | None]:
    """As :func:`muon_dimension_numbers`, for the leaves of a tree at their paths."""
    user_rules = [_rule(rule) for rule in rules]
    names = ["/".join(path) for path in paths]
    named = list(zip(names, leaves, strict=True))
    idle = [rule for rule in user_rules if not any(_matches(rule, *pair) for pair in named)]
    if idle:
        raise ValueError(
            f"Rules that match no parameter: {', '.join(repr(r.pattern) for r in idle)}."
            f" The paths are: {', '.join(names)}."
        )
    specs, unknown = [], []
    for name, leaf in named:
        rule = next((r for r in (*user_rules, *DEFAULT_RULES) if _matches(r, name, leaf)), None)
        if rule is None and np.ndim(leaf) > 2:
            unknown.append(f"{name} {np.shape(leaf)}")
        specs.append(rule.dimension_numbers if rule else None)
    if unknown:
        raise ValueError(
            f"No rule says how these parameters are matrices: {', '.join(unknown)}. Pass"
            " muon_weight_dimension_numbers=functools.partial(omp.muon_dimension_numbers,"
            " rules=[(pattern, dimension numbers), ...]), where dimension numbers are"
            " optax.contrib.MuonDimensionNumbers(reduction_axis=..., output_axis=...), or None for"
            " AdamW. Axes in neither (layers, experts, separate heads) are batch axes."
        )
    return specs


def _rule(rule: Sequence[Any]) -> Rule:
    if isinstance(rule, str) or not 2 <= len(rule) <= 3:
        raise ValueError(
            f"A rule is (pattern, dimension numbers or None), or with a third item its number of"
            f" axes; got {rule!r}."
        )
    made = Rule(*rule)
    if made.dimension_numbers is not None and not is_dimension_numbers(made.dimension_numbers):
        raise ValueError(
            f"The rule for {made.pattern!r} must give {MuonDimensionNumbers.__name__},"
            f" {MatrixSpec.__name__} or None, got {made.dimension_numbers!r}."
        )
    return made


def _matches(rule: Rule, path: str, leaf: Any) -> bool:
    # A vector is no matrix, whatever its path; a rule without ndim may only confirm that.
    fits = np.ndim(leaf) == rule.ndim
    if rule.ndim is None:
        fits = rule.dimension_numbers is None or np.ndim(leaf) >= 2
    return fits and re.search(rule.pattern, path) is not None
