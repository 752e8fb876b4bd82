"""The table of what arguments are called in other libraries, for the page on PyTorch."""

from optax_muonplus.extras.argument_names import LIBRARIES, NAMES


def table() -> str:
    """A row for each argument here, or for what to pass in its place, in Markdown."""
    lines = [["here", *LIBRARIES.values()], ["---"] * (len(LIBRARIES) + 1)]
    for row in NAMES:
        names = [row.elsewhere.get(library, []) for library in LIBRARIES]
        cells = [", ".join(f"`{name}`" for name in cell) for cell in names]
        lines.append([row.how or f"`{row.here}`", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
