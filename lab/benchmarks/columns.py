"""Tables of figures in Markdown: a column is a heading, and a function that writes its cells."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]


def table(rows: Iterable[Row], columns: Sequence[Column], left: int = 1) -> str:
    """Writes a table; its first columns, ``left`` of them, hold words."""
    head = [heading for heading, _ in columns]
    rule = ["---" if i < left else "---:" for i in range(len(columns))]
    cells = [[cell(row) for _, cell in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *cells))


def named(rows: Mapping[str, Row]) -> list[Row]:
    """Lists rows, each with its name as ``"name"``."""
    return [{"name": name, **row} for name, row in rows.items()]


def word(heading: str, key: str) -> Column:
    """Makes a column of words."""
    return heading, lambda row: row[key]


def number(heading: str, key: str, digits: int = 1, unit: float = 1) -> Column:
    """Makes a column of numbers in a unit, empty where a row has none."""
    return heading, lambda row: f"{row[key] / unit:.{digits}f}" if key in row else ""


def of_reference(key: str, reference: Row) -> Column:
    """Makes a column of ratios to a figure of Optax's row, empty where that is missing or zero."""
    base = reference.get(key)
    return "of Optax's", lambda row: f"{row[key] / base:.2f}" if base and key in row else ""


def counts(heading: str, key: str) -> Column:
    """Makes a column of how many there are of each kind."""
    return heading, lambda row: ", ".join(f"{n:g} {kind}" for kind, n in sorted(row[key].items()))
