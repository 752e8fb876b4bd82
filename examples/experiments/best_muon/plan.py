"""The cells and their neighbours, and the lines of the table of tests."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

FAMILIES = ("gpt", "llama")
SECOND_RATES = (0.01, 0.02, 0.03, 0.045)
SCHEDULES = {
    "cosine": ["warmup_cosine"],
    "linear": ["constant_linear", "--optimizer.hold-share", "0"],
    "hold-0.4": ["constant_linear", "--optimizer.hold-share", "0.4"],
    "hold-0.7": ["constant_linear", "--optimizer.hold-share", "0.7"],
}
RATES = (0.0035, 0.005, 0.007, 0.01, 0.014, 0.02, 0.028, 0.04, 0.056, 0.08)
ADAM_RATES = (0.00035, 0.0005, 0.0007, 0.001, 0.0014, 0.002, 0.0028, 0.004, 0.0056, 0.008)
NORMS = ("row_col", "col_row", "long", "row")
RIVALS = ("normuon", "aurora", "muoneq_max")
CLOSE = 0.03  # nats: farther from the lowest loss of the first look, a cell is left out
MOST = 4  # cells that are kept
CHOOSE, ALL = 3, 11  # seeds that choose a rate, and those with the eight that answer


class Cell(NamedTuple):
    """What the matrices' rule and its rate are tried within."""

    family: str
    schedule: str
    second: float
    """Peak rate of embeddings and norms."""

    def sweep(self, shape: str) -> str:
        """The folder of its runs with a shape factor; rules with one of their own are in max.

        The first look has a folder of its own: a rate with fewer seeds would have no part in a
        choice by three.
        """
        return f"{self.family}-{self.schedule}-{self.second:g}-{shape}"


class Choice(NamedTuple):
    """The best Muon of a family."""

    cell: Cell
    shape: str
    method: str
    rate: float


def neighbours(cell: Cell, looked: list[list[Any]]) -> list[Cell]:
    """The cells one step from a cell: second rates beside it, and the next best schedule."""
    place = SECOND_RATES.index(cell.second)
    beside = [SECOND_RATES[i] for i in (place - 1, place + 1) if 0 <= i < len(SECOND_RATES)]
    others = [
        (loss, schedule)
        for loss, _, schedule, second, _ in looked
        if second == cell.second and schedule != cell.schedule
    ]
    return [
        *(cell._replace(second=second) for second in beside),
        cell._replace(schedule=min(others)[1]),
    ]


def contrast(
    name: str, first: tuple[str, str], second: tuple[str, str], refuted_if: str = ""
) -> dict[str, Any]:
    """A line of the table of tests: the loss of one (sweep, method) less that of another."""
    terms = [[1, *first], [-1, *second]]
    return {"name": name, "terms": terms, "refuted_if": refuted_if, "fresh": True}


def contrasts(
    best: Choice, beside: list[Cell], adamw_second: float | None
) -> Iterator[dict[str, Any]]:
    """One family's lines of the one table of tests; fixed by the choice of the cell alone."""
    cell, muon = best.cell, (best.cell.sweep("max"), "Muon")
    yield contrast(
        f"{cell.family}: Muon+ row_col max - Muon max",
        (cell.sweep("max"), "Muon+ row_col"),
        muon,
        "above -0.01",
    )
    for shape, norm, end in itertools.product(("max", "spectral"), NORMS, ("", " matched norm")):
        if (shape, norm, end) != ("max", "row_col", ""):
            name = f"Muon+ {norm}{end}"
            title = f"{cell.family}: {name} {shape} - Muon max"
            yield contrast(title, (cell.sweep(shape), name), muon)
    for name in ("Optax Muon", "NorMuon", "Aurora", "MuonEq max"):
        yield contrast(f"{cell.family}: {name} - Muon max", (muon[0], name), muon)
    yield contrast(
        f"{cell.family}: Muon spectral - Muon max", (cell.sweep("spectral"), "Muon"), muon
    )
    if adamw_second is not None:
        place = cell._replace(second=adamw_second).sweep("max")
        yield contrast(f"{cell.family}: AdamW - Muon max", (place, "AdamW"), muon)
    for other in beside:
        where, base = f"{cell.family} {other.schedule} {other.second:g}", other.sweep("max")
        for name, shape in (
            ("Muon+ row_col", "max"),
            ("Muon+ col_row", "spectral"),
            ("NorMuon", "max"),
        ):
            title = f"{where}: {name} {shape} - Muon max"
            yield contrast(title, (other.sweep(shape), name), (base, "Muon"))
