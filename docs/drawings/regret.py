"""What someone gets who tries a few rates of a grid: the expected loss of the best of them."""

import pathlib
import statistics

from docs.drawings.canvas import Canvas
from docs.drawings.plots import Axes
from examples.experiments.sweeps import regret as expected
from examples.experiments.sweeps import results

EXPERIMENTS = pathlib.Path(__file__).parent.parent.parent / "results" / "experiments"
KINDS = ("blocks", "laptop", "map", "norms", "orthogonalization")
NAMES = {"Muon": "soft", "col_row": "one", "with match_frobenius": "three"}


def regrets(family: str) -> dict[str, list[float]]:
    """Expected loss above Muon's lowest, by number of rates, as a mean over sweeps; first seed."""
    curves = []
    for path in sorted(EXPERIMENTS.glob("*/runs.jsonl")):
        kind, *words = path.parent.name.split("-")  # sweeps of blocks have GPT alone
        if kind in KINDS and (words[0] if kind != "blocks" else "gpt") == family:
            curves.append(expected.regret(results.read(path.parent)))
    found = [curve for curve in curves if curve is not None]
    return {
        name: [statistics.fmean(column) for column in zip(*(x[method] for x in found), strict=True)]
        for name, method in zip(NAMES, expected.METHODS, strict=True)
    }


def regret() -> Canvas:
    """Two panels: GPT and LLaMA."""
    words = "Expected loss of the best of one to five rates of a grid, above Muon's lowest loss."
    canvas = Canvas(760, 296, words)
    for index, (family, title) in enumerate((("gpt", "GPT"), ("llama", "LLaMA"))):
        frame = Axes(canvas, (56 + index * 370, 36), (300, 180), (0.8, 5.2), (-0.028, 0.036))
        canvas.line([frame.place(0.8, 0), frame.place(5.2, 0)], "faint", 1)
        for name, values in regrets(family).items():
            points = [frame.place(*point) for point in zip(expected.TRIES, values, strict=True)]
            canvas.line(points, NAMES[name])
            for point in points:
                canvas.dot(point, NAMES[name], 3.5)
        frame.ticks(
            [(k, str(k)) for k in expected.TRIES],
            [(y, f"{y:g}") for y in (-0.02, -0.01, 0, 0.01, 0.02, 0.03)],
        )
        canvas.text((206 + index * 370, 24), title, bold=True)
        canvas.text((206 + index * 370, 250), "rates tried", colour="soft", size=12)
    for index, (name, colour) in enumerate(NAMES.items()):
        canvas.dot((170 + index * 170, 278), colour)
        canvas.text((180 + index * 170, 282), name, anchor="start", size=12)
    return canvas
