"""What someone gets who tries a few rates of a grid: the expected loss of the best of them."""

import itertools
import pathlib
import statistics
from collections.abc import Iterator, Sequence

from docs.drawings.canvas import Canvas
from docs.drawings.plots import Axes
from examples.experiments.sweeps import results
from examples.experiments.sweeps.grid import Method
from examples.experiments.sweeps.results import MUON, Sweep

EXPERIMENTS = pathlib.Path(__file__).parent.parent.parent / "results" / "experiments"
KINDS = ("blocks", "laptop", "map", "norms", "orthogonalization")
METHODS = {
    "Muon": (MUON, "soft"),
    "col_row, the default": (Method("muonplus", "col_row", "jordan", "free"), "one"),
    "with match_frobenius": (Method("muonplus", "col_row", "jordan", "matched"), "three"),
}
TRIED = (1, 2, 3, 4, 5)


def expected_best(losses: Sequence[float], tried: int) -> float:
    """Mean of the lowest of ``tried`` losses, over all choices of so many of them."""
    return statistics.fmean(map(min, itertools.combinations(losses, tried)))


def _sweeps(family: str) -> Iterator[Sweep]:
    """Sweeps of GPT or LLaMA; those of blocks have GPT alone."""
    for path in sorted(EXPERIMENTS.glob("*/runs.jsonl")):
        kind, *words = path.parent.name.split("-")
        if kind in KINDS and (words[0] if kind != "blocks" else "gpt") == family:
            yield results.read(path.parent)


def regrets(family: str) -> dict[str, list[float]]:
    """Expected loss above Muon's lowest, by number of rates, as a mean over sweeps; first seed."""
    found: dict[str, list[list[float]]] = {words: [] for words in METHODS}
    for sweep in _sweeps(family):
        grids = [set(sweep.rates(method)) for method, _ in METHODS.values()]
        rates = sorted(set.intersection(*grids))
        if len(rates) < max(TRIED):
            continue
        curves = {
            words: [sweep.losses(method, rate)[0] for rate in rates]
            for words, (method, _) in METHODS.items()
        }
        for words, losses in curves.items():
            best = min(curves["Muon"])
            found[words].append([expected_best(losses, k) - best for k in TRIED])
    return {
        words: [statistics.fmean(column) for column in zip(*rows, strict=True)]
        for words, rows in found.items()
    }


def regret() -> Canvas:
    """Two panels: GPT and LLaMA."""
    words = "Expected loss of the best of one to five rates of a grid, above Muon's lowest loss."
    canvas = Canvas(760, 296, words)
    for index, (family, title) in enumerate((("gpt", "GPT"), ("llama", "LLaMA"))):
        frame = Axes(canvas, (56 + index * 370, 36), (300, 180), (0.8, 5.2), (-0.028, 0.036))
        canvas.line([frame.place(0.8, 0), frame.place(5.2, 0)], "faint", 1)
        for name, values in regrets(family).items():
            points = [frame.place(*point) for point in zip(TRIED, values, strict=True)]
            canvas.line(points, METHODS[name][1])
            for point in points:
                canvas.dot(point, METHODS[name][1], 3.5)
        frame.ticks(
            [(k, str(k)) for k in TRIED],
            [(y, f"{y:g}") for y in (-0.02, -0.01, 0, 0.01, 0.02, 0.03)],
        )
        canvas.text((206 + index * 370, 24), title, bold=True)
        canvas.text((206 + index * 370, 250), "rates tried", colour="soft", size=12)
    for index, (name, (_, colour)) in enumerate(METHODS.items()):
        canvas.dot((170 + index * 170, 278), colour)
        canvas.text((180 + index * 170, 282), name, anchor="start", size=12)
    return canvas
