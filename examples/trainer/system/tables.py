"""Tables as text: in Markdown, or with columns of one width for a terminal."""

import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence


def markdown(
    head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, padded: bool = True
) -> str:
    """A table in Markdown; the first columns, ``left`` of them, hold words, the others numbers.

    Padded, it can be read as text too. Rows may end before the last column.
    """
    lines = filled(head, rows)
    widths = [max(4, *map(len, column)) if padded else 3 for column in zip(*lines, strict=True)]
    rule = ["-" * w if i < left else "-" * max(w - 1, 3) + ":" for i, w in enumerate(widths)]
    lines = [aligned(line, widths, left) for line in lines] if padded else lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def plain(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table for a terminal, with a line below its head."""
    lines = filled(head, rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *others = ("  ".join(aligned(line, widths, left)).rstrip() for line in lines)
    return "\n".join([first, "-" * len(first), *others])


def filled(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[list[str]]:
    """The head and the rows, with empty cells up to the last column."""
    return [[*row, *[""] * (len(head) - len(row))] for row in [head, *rows]]


def aligned(line: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    """Cells of one width for each column, words to the left and numbers to the right."""
    pairs = enumerate(zip(line, widths, strict=True))
    return [x.ljust(w) if i < left else x.rjust(w) for i, (x, w) in pairs]


def fitted(table: str, width: int, leave_out: Sequence[str]) -> str:
    """The text of `omp.describe`, no wider than this where leaving out columns can do it.

    Columns go in the order of `leave_out`; lines below the table are wrapped.
    """
    if max(map(len, table.splitlines())) <= width or "\n---" not in table:
        return table
    head, _, *others = table.splitlines()
    n_rows = next((i for i, line in enumerate(others) if line.startswith("muon: ")), len(others))
    starts = [found.start() for found in re.finditer(r"\S+( \S+)*", head)]
    slices = [slice(*pair) for pair in itertools.pairwise([*starts, None])]
    rows = [[line[part].strip() for part in slices] for line in (head, *others[:n_rows])]
    for n in range(len(leave_out) + 1):
        gone = leave_out[:n]
        kept = [i for i, name in enumerate(rows[0]) if name not in gone]
        first, *lines = [[row[i] for i in kept] for row in rows]
        shown = plain(first, lines, left=len(first))
        if max(map(len, shown.splitlines())) <= width:
            break
    below = [*others[n_rows:], f"not shown for lack of room: {', '.join(gone)}" if gone else ""]
    wrapped = [textwrap.fill(x, width, subsequent_indent="  ") for x in below if x]
    return "\n".join([shown, *wrapped])
