"""What the width of a model changes: tables and figures of coordinate checks and of best rates."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from examples.experiments.sweeps import coordinates, plan, results
from examples.trainer.system import tables
from examples.trainer.system.errors import UserError

Points = dict[int, float]
SHOWN = {
    "change of the last block": ("changes", "block"),
    "change of the logits": ("changes", "logits"),
    "last update of mlp/up": ("last_update", "mlp/up/kernel"),
}
"""Title to the part of a measurement, and the last name in it that has these words."""
MARKS = "os^vDPX<>*"


class Label(NamedTuple):
    """A curve: the row of panels that it is in, and its name there."""

    row: str
    name: str

    def __str__(self) -> str:
        """Says both."""
        return f"{self.row}: {self.name}"


Curves = dict[Label, Points]


def write_check(path: Path) -> Path:
    """Writes a table of exponents and a figure of a coordinate check; returns the table's path."""
    records = coordinates.read(path)
    if not records:
        raise UserError(f"{path} has no measurements: run python -m examples.widths check first.")
    by_title = {title: curves(records, *where) for title, where in SHOWN.items()}
    draw(by_title, "root mean square", path.parent / "coordinates.png")
    rows = [
        [str(label), *(f"{exponent(by_title[title][label]):+.2f}" for title in SHOWN)]
        for label in sorted(by_title["change of the logits"])
    ]
    widths = sorted({record["width"] for record in records})
    table = tables.markdown(["exponent of the width", *SHOWN], rows)
    page = path.parent / "coordinates.md"
    page.write_text(
        f"# Coordinate check, widths {', '.join(map(str, widths))}\n\nRoot mean squares grow as the"
        " width to this power (least squares of logarithms). Rates are those of the matrices and of"
        f" the other parameters.\n\n{table}\n\n"
        "![Root mean squares by width](coordinates.png)\n",
        encoding="utf-8",
    )
    return page


def curves(records: Sequence[dict[str, Any]], part: str, words: str) -> Curves:
    """Returns by label a value for each width."""
    found: Curves = defaultdict(dict)
    for r in records:
        rates = f"rates {r['rate']:g} and {r['other_rate']:g}"
        label = Label(f"{r['family']}, {rates}", f"{r['method']}, {r['shape']}")
        name = [name for name in r[part] if words in name][-1]
        found[label][r["width"]] = r[part][name]
    return dict(found)


def exponent(points: Points) -> float:
    """Fits a power of the width."""
    if len(points) < 2 or min(points.values()) <= 0:
        return math.nan
    return float(np.polyfit(np.log(list(points)), np.log(list(points.values())), 1)[0])


def write_rates(folders: Sequence[Path], out: Path) -> Path:
    """Writes the best rate of each method by width, of sweeps that differ in width.

    Returns the table's path. A star marks a best rate at the edge of its grid. Raises UserError if
    two sweeps have the same method at the same width.
    """
    if not folders:
        raise UserError("give the folders of sweeps that differ in --model.d-model.")
    best: Curves = defaultdict(dict)
    cells: dict[Label, dict[int, str]] = defaultdict(dict)
    for folder in folders:
        base, sweep = plan.read(folder / "sweep.json")["base"], results.read(folder)
        width, shape = base["model"]["d_model"], base["optimizer"]["shape_scale"]
        for method in sweep.methods():
            label = Label(base["model"]["family"], f"{method.name}, {shape}")
            if width in best[label]:
                raise UserError(
                    f"{folder} has {label} at width {width}, as another sweep does: give sweeps"
                    " that differ in --model.d-model only."
                )
            best[label][width] = rate = sweep.best_rate(method)
            cells[label][width] = f"{rate:g}{'*' if sweep.at_edge(method) else ''}"
    out.mkdir(parents=True, exist_ok=True)
    draw({"best rate": dict(best)}, "peak learning rate", out / "rates.png")
    widths = sorted({width for points in best.values() for width in points})
    rows = [[str(label), *(cells[label].get(w, "") for w in widths)] for label in sorted(best)]
    page = out / "rates.md"
    table = tables.markdown(["best rate", *map(str, widths)], rows)
    page.write_text(f"# Best rate by width\n\n{table}\n\n![](rates.png)\n", encoding="utf-8")
    return page


def draw(panels: dict[str, Curves], unit: str, path: Path) -> None:
    """Draws curves over the width, both axes logarithmic: a column of panels for each title."""
    labels = {label for drawn in panels.values() for label in drawn}
    rows, names = (sorted(set(part)) for part in zip(*labels, strict=True))
    size = 1 + 4.2 * len(panels), 1.2 + 2.8 * len(rows) + 0.1 * len(names)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(rows), len(panels), squeeze=False)
    lines = {}
    for i, row in enumerate(rows):
        axes[i, 0].set_ylabel(f"{row}\n{unit}", fontsize=8)
        for one, (title, drawn) in zip(axes[i], panels.items(), strict=True):
            here = {label.name: points for label, points in drawn.items() if label.row == row}
            for name, points in sorted(here.items()):
                at, xs = names.index(name), sorted(points)
                mark = MARKS[at % len(MARKS)]
                (lines[name],) = one.plot(xs, [points[x] for x in xs], f"C{at}", marker=mark)
            ticks = sorted({x for points in here.values() for x in points})
            one.set(xscale="log", yscale="log", xlabel="width", title=title)
            one.set_xticks(ticks, [str(x) for x in ticks])
            one.tick_params(which="minor", bottom=False, labelbottom=False)
            one.grid(alpha=0.3)
    place = {"loc": "outside lower center", "ncols": 3}
    figure.legend(list(lines.values()), list(lines), frameon=False, fontsize=8, **place)
    figure.savefig(path, dpi=110)
