"""Curves: what the iteration does to singular values, and the best rate at three widths."""

import json
import math
import pathlib
from collections.abc import Sequence

import numpy as np

from docs.drawings.canvas import Canvas, Point
from examples.experiments.theory.regions import composed_regions, phi

EXPERIMENTS = pathlib.Path(__file__).parent.parent.parent / "results" / "experiments"
# Sweeps that differ in width: 64 and 256 in nothing else; see examples/README.md.
WIDTHS = {64: "map-{}-base", 256: "map-{}-width-x4"}


class Axes:
    """A frame on a canvas, and the positions of values in it."""

    def __init__(self, canvas: Canvas, at: Point, size: Point, x: Point, y: Point) -> None:
        """A frame at a position, for values from ``x[0]`` to ``x[1]`` and ``y[0]`` to ``y[1]``."""
        self.canvas, self.at, self.size, self.x, self.y = canvas, at, size, x, y
        canvas.line([at, (at[0], at[1] + size[1]), (at[0] + size[0], at[1] + size[1])], "soft", 1)

    def place(self, x: float, y: float) -> Point:
        """Where a value lies."""
        right = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.at[0] + right * self.size[0], self.at[1] + (1 - up) * self.size[1]

    def ticks(self, x: Sequence[tuple[float, str]], y: Sequence[tuple[float, str]]) -> None:
        """Numbers below the frame and on its left."""
        for value, shown in x:
            place = self.place(value, self.y[0])
            self.canvas.text((place[0], place[1] + 16), shown, colour="soft", size=11)
        for value, shown in y:
            place = self.place(self.x[0], value)
            where = (place[0] - 6, place[1] + 4)
            self.canvas.text(where, shown, colour="soft", size=11, anchor="end")


def regions() -> Canvas:
    """One step and five of Jordan's, with the singular values that they drive apart."""
    words = (
        "Jordan's polynomial after one and five steps, for singular values from 0 to 1. Shaded:"
        " where neighbouring eigenvalues are driven apart."
    )
    canvas = Canvas(760, 290, words)
    grid = np.concatenate([np.linspace(0, 0.1, 80), np.linspace(0.1, 1, 180)[1:]])
    for index, steps in enumerate((1, 5)):
        frame = Axes(canvas, (50 + index * 370, 40), (310, 190), (0, 1), (0, 1.3))
        for low, high in composed_regions("jordan", steps).amplification:
            left, right = frame.place(math.sqrt(low), 0)[0], frame.place(math.sqrt(high), 0)[0]
            canvas.rect((left, 40), (max(right - left, 0.6), 190), "two", opacity=0.25)
        values = phi(grid, "jordan", steps)
        canvas.line([frame.place(*point) for point in zip(grid, values, strict=True)], "one")
        canvas.line([frame.place(0, 1), frame.place(1, 1)], "soft", 0.7)
        frame.ticks([(v, f"{v:g}") for v in (0, 0.25, 0.5, 0.75, 1)], [(0, "0"), (1, "1")])
        name = "one step" if steps == 1 else f"{steps} steps"
        canvas.text((205 + index * 370, 26), f"φ of {name}", bold=True)
        canvas.text((205 + index * 370, 266), "singular value", colour="soft", size=12)
    canvas.text((380, 286), "shaded: neighbouring eigenvalues move apart, |g'| > 1", size=12)
    return canvas


def losses(folder: str, optimizer: str) -> dict[float, float]:
    """Final validation loss by rate, of the first seed, without matched norms."""
    found: dict[float, float] = {}
    lines = (EXPERIMENTS / folder / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    for run in map(json.loads, lines):
        method = run["method"]
        plain = method["frobenius"] != "matched" and method["norm"] in ("", "col_row")
        if method["optimizer"] == optimizer and plain and run["seed"] == 0:
            found[run["rate"]] = run["val"][-1][1]
    return dict(sorted(found.items()))


def rates_by_width() -> Canvas:
    """Loss against the learning rate at widths 64 and 256, above the best loss of each method."""
    canvas = Canvas(
        760, 300, "Loss minus the lowest loss of each curve, by learning rate, at two widths."
    )
    for index, family in enumerate(("gpt", "llama")):
        frame = Axes(canvas, (56 + index * 370, 40), (300, 190), (-5.4, -3.1), (0, 0.06))
        for width, folder in WIDTHS.items():
            for optimizer, colour in (("muon", "soft"), ("muonplus", "one")):
                curve = losses(folder.format(family), optimizer)
                best = min(curve.values())
                points = [
                    frame.place(math.log(rate), loss - best)
                    for rate, loss in curve.items()
                    if loss - best <= 0.06
                ]
                canvas.line(points, colour, 1.5 if width == 64 else 3)
                canvas.dot(points[[p[1] for p in points].index(frame.place(0, 0)[1])], colour)
        rates = [(math.log(rate), f"{rate:g}") for rate in (0.005, 0.01, 0.02, 0.04)]
        frame.ticks(rates, [(v, f"{v:g}") for v in (0, 0.02, 0.04, 0.06)])
        canvas.text((206 + index * 370, 26), family.upper().replace("LLAMA", "LLaMA"), bold=True)
        canvas.text((206 + index * 370, 264), "learning rate", colour="soft", size=12)
    canvas.text((250, 290), "grey: Muon, blue: Muon+ col_row", size=12)
    canvas.text((540, 290), "thin: width 64, thick: width 256", size=12)
    return canvas
