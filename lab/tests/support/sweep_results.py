"""Made-up results of sweeps, and pages that have the numbers of real ones."""

import dataclasses

from lab.sweeps.grid import Method, Trial
from lab.sweeps.ledger import Result
from lab.sweeps.results import ADAMW, MUON, Sweep
from tests.support.documents import PAGES

PLUS = Method("muonplus", "col_row", "jordan", "free")
MATCHED = dataclasses.replace(PLUS, frobenius="matched")
DEFAULT = dataclasses.replace(MATCHED, norm="row_col")


def with_plain_signs(page):
    """The text of a page, its minus signs as Python prints them."""
    return PAGES[page].replace("\N{MINUS SIGN}", "-")


def rows(table):
    """The cells of a table in Markdown, below its head."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()][2:]


def result(*val):
    """A result with these validation losses after 10, 20, ... steps."""
    steps = [10 * (i + 1) for i in range(len(val))]
    return Result(list(zip(steps, val, strict=True)), 1.0, None, 1.0)


def toy_sweep():
    """Muon ends at 2.0 and 2.2 after 30 steps; col_row is there after 20, and goes lower."""
    svd = dataclasses.replace(MUON, ortho="svd")
    runs = {
        Trial(MUON, 0.1, 0): result(4.0, 3.0, 2.0),
        Trial(MUON, 0.1, 1): result(4.0, 3.0, 2.2),
        Trial(MUON, 0.2, 0): result(4.0, 3.0, 2.5),
        Trial(PLUS, 0.1, 0): result(4.0, 2.0, 1.9),
        Trial(PLUS, 0.1, 1): result(4.0, 2.2, 2.0),
        Trial(PLUS, 0.2, 0): dataclasses.replace(result(4.0), diverged_at=12),
        Trial(svd, 0.1, 0): result(1.95),
        Trial(dataclasses.replace(PLUS, ortho="svd"), 0.1, 0): result(1.85),
        Trial(MATCHED, 0.1, 0): result(1.97),
        Trial(ADAMW, 0.01, 0): result(4.0, 3.0, 2.6),
    }
    return Sweep("toy", runs)
