"""Names at the places that they had in the last version, for one version more."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def former_names(module: str, moved: Mapping[str, tuple[str, Any]]) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a module with names that moved; each use of them warns.

    Args:
      module: the module's ``__name__``.
      moved: for each former name what takes its place, in words, and its value.
    """

    def get(name: str) -> Any:
        if name not in moved:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        instead, value = moved[name]
        message = f"{module}.{name} goes in the next version: {instead}."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return value

    return get
