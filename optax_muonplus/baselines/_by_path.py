"""Rules for the parameters that are no matrices, chosen by their paths."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import optax

from optax_muonplus import transforms

REST = "rest"


@dataclasses.dataclass(frozen=True, eq=False)
class ByPath:
    """A rule for each pattern, and one for what no pattern finds, in the place of AdamW.

    ``omp.optimizer(rule, 0.02, adamw=ByPath({"embed": AdamW(0.3), "head": AdamH()}))`` gives
    embeddings a rate of their own and holds the norm of the head. The state is that of
    ``optax.partition`` with the patterns as labels, on a dict of paths.

    Attributes:
      rules: by regular expression, which is searched in paths such as ``lm_head/kernel``: the first
        that is found decides. One that finds nothing is an error.
      rest: the rule for everything else.
      learning_rate: number or schedule, for rules that have none; None means that of the matrices.
    """

    rules: Mapping[str, Any]
    rest: Any = transforms.AdamW()
    learning_rate: optax.ScalarOrSchedule | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for what is no regular expression, or no rule."""
        if REST in self.rules:
            raise ValueError(
                f"The pattern {REST!r} is the label of what no pattern finds. Write '({REST})'."
            )
        for pattern, rule in self.rules.items():
            if not hasattr(rule, "transformation"):
                raise ValueError(
                    f"The rule for {pattern!r} is {rule!r}. It has the place of AdamW, and must be"
                    " like AdamW(0.01), AdamH() or TokenNorm(0.01)."
                )
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}.") from error

    def transformation(self) -> optax.GradientTransformation:
        """Returns the transformation, for a learning rate that is given."""
        rules = {**self.rules, REST: self.rest}
        made: dict[Any, Any] = {
            pattern: self._with_rate(rule).transformation() for pattern, rule in rules.items()
        }
        inner: Any = optax.partition(made, self._labels)

        def init(params: optax.Params) -> Any:
            by_path, _ = _by_path(params)
            if not by_path:  # the placeholder for parameters of optax.tree.map_params
                states = {name: optax.MaskedState(x.init(params)) for name, x in made.items()}
                return optax.PartitionState(states)
            found = set(self._labels(by_path).values())
            if lost := [pattern for pattern in self.rules if pattern not in found]:
                raise ValueError(
                    f"The pattern {lost[0]!r} is the first to find none of the parameters that are"
                    f" no matrices: {', '.join(by_path)}. Matrices have a rule of their own."
                )
            return inner.init(by_path)

        def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            by_path, unflatten = _by_path(updates)
            own = None if params is None else _by_path(params)[0]
            made, state = inner.update(by_path, state, own, **extra)
            return unflatten(made[path] for path in by_path), state

        return optax.GradientTransformationExtraArgs(init, update)

    def _with_rate(self, rule: Any) -> Any:
        if rule.learning_rate is not None:
            return rule
        return dataclasses.replace(rule, learning_rate=self.learning_rate)

    def _labels(self, by_path: Mapping[str, Any]) -> dict[str, str]:
        return {
            path: next((pattern for pattern in self.rules if re.search(pattern, path)), REST)
            for path in by_path
        }


def _by_path(tree: Any) -> tuple[dict[str, Any], Any]:
    """Returns the leaves by their paths, which no container changes, and the way back."""
    paths, leaves, unflatten = transforms.flatten_tree(tree)
    return dict(zip(map("/".join, paths), leaves, strict=True)), unflatten
