"""What differs between two versions of nested settings."""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

MISSING: Final = object()


class Difference(NamedTuple):
    """An entry that is another, with `MISSING` on the side that lacks it."""

    name: str
    """Its keys, joined by dots."""
    old: Any
    new: Any


def differences(old: Any, new: Any, name: str = "") -> Iterator[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            below = f"{name}.{key}" if name else key
            yield from differences(old.get(key, MISSING), new.get(key, MISSING), below)
    elif old != new:
        yield Difference(name, old, new)
