"""tiny Shakespeare with nanoGPT's model: training loss by step, and nats of the held-out text."""

import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from docs.drawings.canvas import Canvas
from docs.drawings.plots import Axes
from examples.experiments.sweeps import results

YARDSTICKS = pathlib.Path(__file__).parent.parent.parent / "results" / "benchmarks" / "yardsticks"
RUNS = YARDSTICKS / "tiny-shakespeare"
# Folder to colour and words.
ROWS = {
    "adamw-as-published": ("soft", "AdamW, as nanoGPT has it"),
    "adamw-0.004": ("three", "AdamW, tuned"),
    "muon-max-0.008": ("one", "Muon, tuned"),
    "recommended-0.008": ("two", "Muon+, RECOMMENDED, tuned"),
}
ANSWER = range(3, 13)  # seeds that chose no rate
WINDOW = 5  # records of 20 steps in a point of a line
STEPS, LOW, HIGH = 2000, 1.3, 2.3  # steps, nats, nats


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
    runs = [x for x in map(json.loads, lines) if x["rate"] == rate and x["seed"] in ANSWER]
    columns = zip(*(run["train"] for run in runs), strict=True)
    means = [(column[0][0], statistics.fmean(loss for _, loss in column)) for column in columns]
    return Row(smoothed(means), statistics.fmean(run["val"][-1][1] for run in runs))


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Takes the means of each ``WINDOW`` points that follow each other."""
    windows = (points[i : i + WINDOW] for i in range(len(points) - WINDOW + 1))
    columns = (zip(*window, strict=True) for window in windows)
    return [(statistics.fmean(steps), statistics.fmean(losses)) for steps, losses in columns]


def shakespeare() -> Canvas:
    """A line for each method, and the steps at which Muon+ has what AdamW has at the end."""
    words = "Training loss by step of nanoGPT's character model: AdamW, Muon and Muon+."
    canvas = Canvas(760, 348, words)
    frame = Axes(canvas, (56, 40), (440, 256), (0, STEPS), (LOW, HIGH))
    found = {folder: row(folder) for folder in ROWS}
    *_, plus = found.values()
    for folder in ("adamw-as-published", "adamw-0.004"):
        end = found[folder].curve[-1][1]
        step = next(step for step, loss in plus.curve if loss <= end)
        corner = [frame.place(STEPS, end), frame.place(step, end), frame.place(step, LOW)]
        canvas.line(corner, "faint", 1)
        where = frame.place(step + 20, LOW + 0.03)
        canvas.text(where, f"step {step:,.0f}", anchor="start", size=12)
    free = 0.0  # below the label before
    for folder, (colour, name) in ROWS.items():
        inside = [(step, loss) for step, loss in found[folder].curve if loss <= HIGH]
        canvas.line([frame.place(*point) for point in inside], colour)
        end = frame.place(*inside[-1])
        middle = max(end[1], free)
        free = middle + 42
        canvas.line([end, (508, middle)], colour, 1)
        nats = f"{found[folder].nats:.3f} nats on held-out text"
        canvas.text((514, middle - 2), name, anchor="start", colour=colour, bold=True)
        canvas.text((514, middle + 14), nats, anchor="start", size=12)
    frame.ticks(
        [(step, f"{step:,}") for step in range(0, STEPS + 1, 500)],
        [(nats, f"{nats:g}") for nats in (1.4, 1.6, 1.8, 2.0, 2.2)],
    )
    canvas.text((276, 334), "step", colour="soft", size=12)
    canvas.text((56, 24), "training loss, nats a character", anchor="start", colour="soft", size=12)
    return canvas
