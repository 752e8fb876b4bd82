"""Checks settings against the types and ranges of their fields, with pydantic."""

import dataclasses
import functools
from typing import Annotated, Any, TypeVar

import pydantic
import pydantic_core
from pydantic import Field

from examples.trainer.system.errors import UserError
from examples.trainer.system.files import shown

STRICT = pydantic.ConfigDict(extra="forbid", strict=True)
"""Takes no field that is not known, and no text for a number; for `__pydantic_config__`."""

LARGEST = 2**31 - 1  # steps, rows and seeds are 32-bit integers on devices
Count = Annotated[int, Field(ge=1, le=LARGEST)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
FiniteOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a mean: 1 would keep the first value for ever

Settings = TypeVar("Settings")

adapter = functools.cache(pydantic.TypeAdapter)


def from_dict(cls: type[Settings], values: Any) -> Settings:
    """Reads what `dataclasses.asdict` has given; ValueError names the fields that are wrong."""
    try:
        return adapter(cls).validate_json(pydantic_core.to_json(values))
    except pydantic.ValidationError as error:
        raise ValueError(problems(error)) from None


def check(settings: Any, flag: str = "--") -> None:
    """Refuses values outside of their ranges; `flag` is what the names of all flags begin with."""
    try:
        values = pydantic_core.to_json(dataclasses.asdict(settings))
    except pydantic_core.PydanticSerializationError as error:  # of a command line
        raise UserError(f"a flag has text that is not UTF-8 ({error}): write it as that.") from None
    if rb"\u0000" in values:
        raise UserError("a setting has a zero byte in its text, as no name of a file can: omit it.")
    try:
        adapter(type(settings)).validate_json(values)
    except pydantic.ValidationError as error:
        raise UserError(f"{problems(error, flag)}.") from None


def problems(error: pydantic.ValidationError, flag: str = "") -> str:
    """Names each field that is wrong, or its flag, and says what it should be."""
    found = []
    for one in error.errors():
        if one["type"] == "value_error":
            found.append(str(one["ctx"]["error"]))
            continue
        name = ".".join(key for key in one["loc"] if isinstance(key, str)) or "the whole"
        sentence = one["msg"].replace("Input", "it")
        sentence = sentence.replace("Unexpected keyword argument", "there is no such setting")
        name = flag + name.replace("_", "-") if flag else name
        found.append(f"{name} is {shown(one['input'])}: {sentence}")
    return "; ".join(found)
