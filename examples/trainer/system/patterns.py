"""Regular expressions that a user gives to choose among names."""

import difflib
import re
from collections.abc import Sequence

from examples.trainer.system.errors import UserError


def search(pattern: str, names: Sequence[str], flag: str, kind: str) -> list[str]:
    """The names in which the pattern is found; raises `UserError` if there is none."""
    try:
        found = [name for name in names if re.search(pattern, name)]
    except re.error as error:
        raise UserError(f"{flag} {pattern}: this is no regular expression: {error}.") from None
    if not found:
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
        raise UserError(
            f"{flag} {pattern} finds no {kind}: give a regular expression for names such as"
            f" {', '.join(near)}."
        )
    return found
