"""Tables that people read."""


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines with the columns of ``rows`` below each other, the first of which is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]
