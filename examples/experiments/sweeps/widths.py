"""What the width of a model changes: tables and figures of coordinate checks and of best rates."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def write_check(path: Path) -> Path:
    """Writes a table of exponents and a figure of a coordinate check; returns the table's path."""
    records = coordinates.read(path)
    if not records:
        raise UserError(f"{path} has no measurements: run python -m examples.widths check first.")
    by_title = {title: curves(records, *where) for title, where in SHOWN.items()}
    draw(by_title, "root mean square", path.parent / "coordinates.png")
    rows = [
        [label, *(f"{exponent(by_title[title][label]):+.2f}" for title in SHOWN)]
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


def curves(records: Sequence[dict[str, Any]], part: str, words: str) -> dict[str, Points]:
    """Returns by label a value for each width."""
    found: dict[str, Points] = defaultdict(dict)
    for r in records:
        rates = f"rates {r['rate']:g} and {r['other_rate']:g}"
        label = f"{r['family']} {r['method']}, {r['shape']}, {rates}"
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

    Returns the table's path. A star marks a best rate at the edge of its grid.
    """
    if not folders:
        raise UserError("give the folders of sweeps that differ in --model.d-model.")
    best: dict[str, Points] = defaultdict(dict)
    cells: dict[str, dict[int, str]] = defaultdict(dict)
    for folder in folders:
        base, sweep = plan.read(folder / "sweep.json")["base"], results.read(folder)
        width, shape = base["model"]["d_model"], base["optimizer"]["shape_scale"]
        for method in sweep.methods():
            label = f"{base['model']['family']} {method.name}, {shape}"
            best[label][width] = rate = sweep.best_rate(method)
            cells[label][width] = f"{rate:g}{'*' if sweep.at_edge(method) else ''}"
    out.mkdir(parents=True, exist_ok=True)
    draw({"best rate": dict(best)}, "peak learning rate", out / "rates.png")
    widths = sorted({width for points in best.values() for width in points})
    rows = [[name, *(cells[name].get(w, "") for w in widths)] for name in sorted(best)]
    page = out / "rates.md"
    table = tables.markdown(["best rate", *map(str, widths)], rows)
    page.write_text(f"# Best rate by width\n\n{table}\n\n![](rates.png)\n", encoding="utf-8")
    return page


def draw(panels: dict[str, dict[str, Points]], unit: str, path: Path) -> None:
    """Draws curves over the width, both axes logarithmic, one panel for each title."""
    figure = Figure(figsize=(1 + 4.2 * len(panels), 5), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for one, (title, labelled) in zip(axes, panels.items(), strict=True):
        for i, (label, points) in enumerate(sorted(labelled.items())):
            xs = sorted(points)
            mark = MARKS[i % len(MARKS)]
            one.plot(xs, [points[x] for x in xs], marker=mark, label=label)
        one.set(xscale="log", yscale="log", xlabel="width", title=title)
        ticks = sorted({x for points in labelled.values() for x in points})
        one.set_xticks(ticks, [str(x) for x in ticks])
        one.minorticks_off()
        one.grid(alpha=0.3)
    axes[0].set_ylabel(unit)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=110)
