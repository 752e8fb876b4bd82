"""Tables as text: in Markdown, or with columns of one width for a terminal."""

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
