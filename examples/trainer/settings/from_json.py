"""Settings read from JSON, each value checked against the type of its field."""

import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from examples.trainer.settings import older
from examples.trainer.system.json_lines import shown

WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def from_dict(cls: Any, values: Any, path: str = "") -> Any:
    """The inverse of `dataclasses.asdict` after a trip through JSON.

    Fields that are not there were added to the code since. They get the values that `older` has
    for them, or else their defaults. Raises ValueError, which names the field, for fields that are
    not known and for values of other types.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{path or 'the whole'} is {shown(values)} and must be an object")
    hints = get_type_hints(cls)
    built = {}
    for key, value in older.completed(cls, values).items():
        name = f"{path}.{key}" if path else key
        if key not in hints:
            raise ValueError(f"{name} is no setting")
        built[key] = of_type(hints[key], value, name)
    return cls(**built)


def of_type(hint: Any, value: Any, name: str) -> Any:
    """A value as a field of that type has it; raises ValueError for a value of another type."""
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, value, name)
    if get_origin(hint) in (Union, types.UnionType):  # a type or None
        (kind,) = (arg for arg in get_args(hint) if arg is not types.NoneType)
        return None if value is None else of_type(kind, value, name)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(
                f"{name} is {shown(value)} and must be one of {', '.join(get_args(hint))}"
            )
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} is {shown(value)} and must be a list")
        return tuple(of_type(get_args(hint)[0], one, name) for one in value)
    kinds = (int, float) if hint is float else (hint,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{name} is {shown(value)} and must be {WORDS[hint]}")
    return value
