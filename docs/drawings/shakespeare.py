"""tiny Shakespeare with nanoGPT's model: training loss by step, and nats of the held-out text."""

import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.yardsticks.tiny_shakespeare import CHOOSE
from docs.drawings.canvas import Canvas
from docs.drawings.plots import Axes
from examples.experiments.sweeps import results

RUNS = (
    pathlib.Path(__file__).parent.parent.parent / "results/benchmarks/yardsticks/tiny-shakespeare"
)
# Folder: colour and words.
ROWS = {
    "adamw-as-published": ("soft", "AdamW as nanoGPT has it"),
    "adamw-0.004": ("three", "AdamW, both rates tuned"),
    "muon-max-0.008": ("one", "Muon"),
    "recommended-0.008": ("two", "Muon+, RECOMMENDED"),
}
STEPS, LOW, HIGH = 2000, 1.3, 2.3  # steps, nats, nats
WINDOW = 5  # records of 20 steps in a point of a line


class Row(NamedTuple):
    """Means over the seeds that answer, at the rate that the others chose."""

    curve: list[tuple[float, float]]  # step and nats of the training text
    nats: float  # of the whole held-out text, at the end


def row(folder: str) -> Row:
    """Reads the runs of a method."""
    read = results.read(RUNS / folder)
    (method,) = read.methods()
    rate = read.best_rate(method)
    lines = (RUNS / folder / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [x for x in map(json.loads, lines) if x["rate"] == rate and x["seed"] >= CHOOSE]
    columns = zip(*(run["train"] for run in runs), strict=True)
    means = [(column[0][0], statistics.fmean(loss for _, loss in column)) for column in columns]
    return Row(smoothed(means), statistics.fmean(run["val"][-1][1] for run in runs))


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of each ``WINDOW`` points that follow each other."""
    windows = (points[i : i + WINDOW] for i in range(len(points) - WINDOW + 1))
    return [tuple(map(statistics.fmean, zip(*each, strict=True))) for each in windows]


def steps_to(curve: Sequence[tuple[float, float]], target: float) -> float:
    """The first step at which a curve is below ``target``."""
    return next(step for step, loss in curve if loss <= target)


def shakespeare() -> Canvas:
    """A line for each method, with its nats at the end, and the step that saves the others."""
    words = "Training loss by step of nanoGPT's character model: AdamW, Muon and Muon+."
    canvas = Canvas(760, 356, words)
    frame = Axes(canvas, (56, 44), (440, 256), (0, STEPS), (LOW, HIGH))
    found = {folder: row(folder) for folder in ROWS}
    published = found["adamw-as-published"].curve[-1][1]
    fewer = steps_to(found["recommended-0.008"].curve, published)
    canvas.line([frame.place(fewer, published), frame.place(STEPS, published)], "faint", 1)
    canvas.line([frame.place(fewer, published), frame.place(fewer, LOW)], "faint", 1)
    canvas.text(frame.place(fewer + 20, LOW + 0.03), f"step {fewer:.0f}", anchor="start", size=12)
    for index, (folder, (colour, name)) in enumerate(ROWS.items()):
        inside = [(step, loss) for step, loss in found[folder].curve if loss <= HIGH]
        canvas.line([frame.place(*point) for point in inside], colour)
        y = 104 + 56 * index
        canvas.text((516, y), name, anchor="start", colour=colour, bold=True)
        canvas.text(
            (516, y + 18), f"{found[folder].nats:.3f} nats held out", anchor="start", size=12
        )
    frame.ticks(
        [(step, f"{step:,}") for step in range(0, STEPS + 1, 500)],
        [(nats, f"{nats:g}") for nats in (1.4, 1.6, 1.8, 2.0, 2.2)],
    )
    canvas.text((276, 338), "step", colour="soft", size=12)
    canvas.text((56, 26), "training loss, nats a character", anchor="start", colour="soft", size=12)
    return canvas
