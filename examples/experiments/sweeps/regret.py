"""What someone gets who tries k rates.

    python -m examples.experiments.sweeps.regret SWEEP ... --out FOLDER

It reads finished sweeps and runs nothing. Of a grid of n rates someone draws k, each set of them as
likely as another, and keeps the one with the lowest loss. What they may expect is known exactly.
"""

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from matplotlib.figure import Figure

from examples.experiments.sweeps import command_line, results
from examples.experiments.sweeps.contrasts import estimate
from examples.experiments.sweeps.figures import STYLES
from examples.experiments.sweeps.grid import Method
from examples.experiments.sweeps.results import MUON, Sweep
from examples.trainer.runs.report import save_figure
from examples.trainer.system import tables
from examples.trainer.system.errors import UserError
from examples.trainer.system.exit_status import command

TRIES = (1, 2, 3, 5)
METHODS = (
    MUON,
    Method("muonplus", "col_row", "jordan", "free"),
    Method("muonplus", "col_row", "jordan", "matched"),
)

Curve = list[float]
"""A value for each number of tries."""


def expected(losses: Sequence[float], tries: int) -> float:
    r"""The mean of the lowest of `tries` losses that are drawn without putting back.

    Of n losses in increasing order the i-th, from 0, is the lowest of
    :math:`\binom{n-1-i}{k-1}` of the :math:`\binom{n}{k}` sets of k.
    """
    n = len(losses)
    if not 1 <= tries <= n:
        raise ValueError(f"tries is {tries}, and there are {n} losses: give 1 to {n}.")
    sets = [math.comb(n - 1 - i, tries - 1) for i in range(n)]
    parts = zip(sorted(losses), sets, strict=True)
    return sum(loss * count for loss, count in parts if count) / math.comb(n, tries)


def regret(sweep: Sweep, methods: Sequence[Method] = METHODS) -> dict[Method, Curve] | None:
    """The expected loss of each method by tries, less the lowest that Muon has in the grid.

    The grid are the rates that all methods were run with by the first seed. None for a sweep that
    lacks a method, or whose grid has fewer rates than the most tries.
    """
    if not set(methods) <= set(sweep.methods()):
        return None
    grid = set.intersection(*(set(sweep.rates(method)) for method in methods))
    if len(grid) < max(TRIES):
        return None
    losses = {m: [sweep.losses(m, rate)[0] for rate in sorted(grid)] for m in methods}
    return {m: [expected(losses[m], k) - min(losses[MUON]) for k in TRIES] for m in methods}


def write(folders: Annotated[tuple[Path, ...], tyro.conf.Positional], out: Path) -> Path:
    """Writes a table and a figure of means over sweeps; returns the page that it has written.

    Args:
      folders: folders of sweeps, of one family or two; those that lack a method are left out.
      out: where to write.
    """
    found: dict[str, list[dict[Method, Curve]]] = defaultdict(list)
    for folder in folders:
        family = command_line.read(folder / "sweep.json")["base"]["model"]["family"]
        if curves := regret(results.read(folder)):
            found[{"gpt": "GPT", "llama": "LLaMA"}[family]].append(curves)
    if not found:
        raise UserError(
            f"no sweep has {', '.join(m.name for m in METHODS)} at {max(TRIES)} rates: give some."
        )
    out.mkdir(parents=True, exist_ok=True)
    draw(found, out / "regret.png")
    page = out / "regret.md"
    page.write_text(
        "# Expected loss of someone who tries k rates\n\nNats a token above the lowest loss of Muon"
        " in the same grid, by the first seed: mean over sweeps with its 95% interval. The sweeps"
        f" share text and seed.\n\n{table(found)}\n\n![Expected loss by tries](regret.png)\n",
        encoding="utf-8",
    )
    return page


def table(found: dict[str, list[dict[Method, Curve]]]) -> str:
    """A row for each family and method."""
    rows = []
    for family, sweeps in sorted(found.items()):
        for method in METHODS:
            cells = [[curves[method][i] for curves in sweeps] for i in range(len(TRIES))]
            written = [estimate(values) for values in cells]
            several = len(sweeps) > 1
            ends = [f" ± {e.half_width:.3f}" if several else "" for e in written]
            numbers = [f"{e.mean:+.3f}{end}" for e, end in zip(written, ends, strict=True)]
            rows.append([f"{family}, {len(sweeps)}", method.name, *numbers])
    return tables.markdown(["model, sweeps", "method", *(f"k = {k}" for k in TRIES)], rows, 2)


def draw(found: dict[str, list[dict[Method, Curve]]], path: Path) -> None:
    """A panel for each family: the mean over its sweeps."""
    figure = Figure(figsize=(1 + 4.3 * len(found), 3.8), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for axes, (family, sweeps) in zip(panels, sorted(found.items()), strict=True):
        for method in METHODS:
            means = [
                statistics.fmean(curves[method][i] for curves in sweeps) for i in range(len(TRIES))
            ]
            colour, mark = STYLES[method]
            axes.plot(TRIES, means, color=colour, marker=mark, label=method.name)
        axes.axhline(0.0, color="0.7", linewidth=1)
        axes.set(title=f"{family}, {len(sweeps)} sweeps", xlabel="rates that are tried")
        axes.set_xticks(TRIES)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("expected loss above Muon's best (nats)")
    panels[0].legend(frameon=False)
    save_figure(figure, path)


main = command(write, "examples.experiments.sweeps.regret")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
