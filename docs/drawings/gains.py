"""What Muon+ gains over Muon by the size of the model: runs of this repository, and of others."""

import functools
import math
import pathlib
from typing import NamedTuple

from docs.drawings.canvas import Canvas
from examples.experiments.sweeps import contrasts, results
from examples.experiments.sweeps.contrasts import Term
from examples.experiments.sweeps.grid import Method
from examples.experiments.sweeps.results import MUON

EXPERIMENTS = pathlib.Path(__file__).parent.parent.parent / "results" / "experiments"
COL_ROW, MATCHED = (Method("muonplus", "col_row", "jordan", x) for x in ("free", "matched"))
LOW, HIGH, LEFT, WIDTH, LINE = -0.09, 0.08, 238, 372, 20  # nats, nats, pixels, pixels, pixels
HEIGHTS = {2: (-3, 3), 3: (-5, 0, 5)}  # of lines in a row, pixels


class Row(NamedTuple):
    """A model, and where its runs are: a sweep of this repository, or the gap that others found."""

    words: str
    sweep: str = ""
    cell: str = ""  # schedule and second rate are the best for Muon, of which Optax's is the best
    plan: str = ""  # whose first contrasts are RECOMMENDED and the default, minus Muon
    paper: float = math.nan
    others: float = math.nan


def nats(plus: float, muon: float) -> float:
    """The difference of two losses from their perplexities."""
    return math.log(plus / muon)


# The paper's perplexities are of its tables of validation; see docs/explain/replications.md.
ROWS = {
    "GPT": (
        Row("0.24 M, fused query, key, value", "blocks-fused-scaled-base"),
        Row("the same, warm-up and cosine", "norms-gpt"),
        Row("minus Optax's Muon, tuned", cell="best_muon/gpt-hold-0.4-0.02"),
        Row("minus Optax's, on another text", cell="repeat/gpt"),
        Row("0.24 M, three matrices", "blocks-separate-scaled-base"),
        Row("0.24 M, four times the steps", "map-gpt-steps-x4"),
        Row("0.5 M, 8 layers, fused", "blocks-fused-scaled-depth"),
        Row("1.1 M, fused", "orthogonalization-gpt-laptop"),
        Row("2.1 M, three matrices", "map-gpt-width-x4"),
        Row("10 M, fused", "norms-gpt-larger"),
        Row("10 M, 17 times the tokens", plan="ten_million"),
        Row("124 M", paper=nats(27.64, 29.66)),
        Row("286 M", others=2.7265 - 2.7311),
        Row("362 M", paper=nats(19.98, 21.70)),
        Row("774 M", paper=nats(16.91, 17.82)),
        Row("1.4 B", others=2.3483 - 2.3587),
        Row("6.7 B", paper=nats(14.69, 15.90)),
    ),
    "LLaMA": (
        Row("0.36 M", "map-llama-base"),
        Row("minus Optax's Muon, tuned", cell="best_muon/llama-hold-0.4-0.03"),
        Row("minus Optax's, on another text", cell="repeat/llama"),
        Row("0.36 M, four times the steps", "map-llama-steps-x4"),
        Row("0.7 M, 8 layers", "map-llama-depth-x4"),
        Row("1.3 M", "laptop-llama"),
        Row("2.6 M", "map-llama-width-x4"),
        Row("30 M", others=3.4941 - 3.5091),
        Row("58 M", paper=nats(25.25, 25.75)),
        Row("134 M", paper=nats(18.65, 19.06)),
        Row("368 M", paper=nats(13.41, 14.02)),
        Row("1.3 B", paper=nats(10.31, 10.68)),
        Row("6.7 B", paper=nats(10.12, 10.54)),
    ),
}


@functools.cache
def measured(sweep: str, method: Method) -> contrasts.Estimate | None:
    """Loss minus Muon's, each at its best rate, or None if the sweep has no such runs."""
    read = results.read(EXPERIMENTS / sweep)
    return contrasts.estimate(read.gaps(method, MUON)) if method in read.methods() else None


@functools.cache
def against_the_best(cell: str) -> tuple[contrasts.Estimate, ...]:
    """`col_row` with NAdamW (the default) and AdamW, and `omp.RECOMMENDED`, minus Optax's update.

    The seeds that chose a rate are left out.
    """
    muon = Term(-1, f"{cell}-max", "Optax Muon")
    forms = (
        Term(1, f"{cell}-spectral-nadam", "Muon+ col_row"),
        Term(1, f"{cell}-spectral", "Muon+ col_row"),
        Term(1, f"{cell}-max-nadam", "Muon+ row_col matched norm"),
    )
    differences = (contrasts.Contrast(cell, (plus, muon), fresh=True) for plus in forms)
    return tuple(contrasts.measured(x, EXPERIMENTS) for x in differences)


@functools.cache
def of_plan(name: str) -> tuple[contrasts.Estimate, ...]:
    """The first two contrasts of a plan."""
    folder = EXPERIMENTS / name
    planned = contrasts.read(folder / "contrasts.json")[:2]
    return tuple(contrasts.measured(x, folder) for x in planned)


def place(gap: float) -> float:
    """Pixels from the left; what lies outside stands at the edge."""
    return LEFT + (min(max(gap, LOW), HIGH) - LOW) / (HIGH - LOW) * WIDTH


def _row(canvas: Canvas, row: Row, y: float) -> None:
    canvas.text((LEFT - 12, y + 4), row.words, anchor="end", size=12)
    if row.cell:
        estimates, colours = against_the_best(row.cell), ("one", "soft", "ink")
    elif row.plan:
        estimates, colours = of_plan(row.plan), ("ink", "one")
    else:
        estimates = [measured(row.sweep, x) if row.sweep else None for x in (COL_ROW, MATCHED)]
        colours = ("one", "three")
    for found, colour, up in zip(estimates, colours, HEIGHTS[len(colours)], strict=True):
        if found:
            ends = [(place(found.mean + sign * found.half_width), y + up) for sign in (-1, 1)]
            canvas.line(ends, colour, 1.5)
            canvas.dot((place(found.mean), y + up), colour, 3.5)
    for gap, colour in ((row.paper, "two"), (row.others, "four")):
        if not math.isnan(gap):
            canvas.dot((place(gap), y), colour)


def gains() -> Canvas:
    """A line for each model: the interval of the difference, or what others have published."""
    lines = sum(map(len, ROWS.values())) + 2 * len(ROWS)
    bottom = 24 + LINE * lines
    words = "Validation loss of Muon+ minus that of Muon, by the size of the model: left is better."
    canvas = Canvas(620, bottom + 86, words)
    for gap in (-0.08, -0.04, 0.0, 0.04):
        x = place(gap)
        canvas.line([(x, 20), (x, bottom)], "faint" if gap else "soft", 1)
        canvas.text((x, bottom + 18), f"{gap:+g}" if gap else "Muon", colour="soft", size=12)
    y = 24.0
    for family, rows in ROWS.items():
        canvas.text((LEFT - 12, y + 8), family, anchor="end", bold=True)
        for row in rows:
            y += LINE
            _row(canvas, row, y + 4)
        y += 2 * LINE
    canvas.text((LEFT + WIDTH / 2, bottom + 38), "loss minus Muon's, nats: left is better", size=12)
    for index, (colour, legend) in enumerate(
        (("one", "col_row"), ("three", "matched"), ("ink", "RECOMMENDED"),
         ("soft", "adam_nesterov=False"), ("two", "the paper"), ("four", "others"))
    ):  # fmt: skip
        x = (16, 98, 182, 304, 464, 556)[index]
        canvas.dot((x, bottom + 64), colour)
        canvas.text((x + 10, bottom + 68), legend, anchor="start", size=12)
    return canvas
