"""Losses of all optimizers that sweeps have compared with Muon, each at its best rate."""

import functools
import math
import pathlib
import statistics

from docs.drawings.canvas import Canvas
from examples.experiments.sweeps import results
from examples.experiments.sweeps.results import MUON

EXPERIMENTS = pathlib.Path(__file__).parent.parent.parent / "results" / "experiments"
# Colour, and what distinguishes the runs; a method that a sweep gains is drawn with the next build.
SWEEPS = {
    "laptop": ("two", "width 128, depth 4, three seeds"),
    "norms": ("one", "width 64, depth 2, five seeds, both with warm-up"),
}
FAMILIES = {"gpt": "GPT", "llama": "LLaMA"}
LOW, HIGH, WIDTH, LINE = -0.09, 0.07, 262, 26  # nats, nats, pixels, pixels


def gaps(sweep: str, family: str) -> dict[str, list[float]]:
    """Loss minus Muon's by seed, of each method at its best rate; a diverged run leaves it out."""
    read = results.read(EXPERIMENTS / f"{sweep}-{family}")
    other = EXPERIMENTS / f"{sweep}-{family}-same-rate"  # optimizers that use no AdamW
    if other.is_dir():
        read = results.Sweep(read.name, results.read(other).results | read.results)
    found = {m.name: read.gaps(m, MUON) for m in read.methods() if m != MUON}
    return {name: gap for name, gap in found.items() if gap and all(map(math.isfinite, gap))}


def place(gap: float) -> float:
    """Pixels from the left of a panel; what lies outside stands at its edge."""
    return (min(max(gap, LOW), HIGH) - LOW) / (HIGH - LOW) * WIDTH


def _points(canvas: Canvas, left: float, y: float, colour: str, gap: list[float]) -> None:
    mean = statistics.fmean(gap)
    canvas.line([(left + place(min(gap)), y), (left + place(max(gap)), y)], colour, 1.5)
    canvas.dot((left + place(mean), y), colour)
    if mean > HIGH:
        canvas.text(
            (left + WIDTH - 8, y + 4), f"{mean:+.2f} →", anchor="end", colour=colour, size=11
        )


def comparison() -> Canvas:
    """Loss minus Muon's: a line from the lowest seed to the highest, and a dot at the mean."""
    measured = {(s, f): gaps(s, f) for s in SWEEPS for f in FAMILIES}
    names = sorted(functools.reduce(set.union, map(set, measured.values()), set()))
    words = "Validation loss minus Muon's, each method at its best rate, on small GPTs and LLaMAs."
    height = 64 + LINE * len(names)
    canvas = Canvas(760, height + 72, words)
    for column, (family, title) in enumerate(FAMILIES.items()):
        left = 192 + column * (WIDTH + 24)
        canvas.text((left + WIDTH / 2, 24), title, bold=True)
        for gap in (-0.08, -0.04, 0.0, 0.04):
            x = left + place(gap)
            canvas.line([(x, 40), (x, height - 8)], "faint" if gap else "soft", 1)
            canvas.text((x, height + 8), f"{gap:+g}" if gap else "Muon", colour="soft", size=12)
        for row, name in enumerate(names):
            y = 58 + row * LINE
            if column == 0:
                canvas.text((182, y + 4), name.replace(" matched norm", ", matched"), anchor="end")
            for offset, (sweep, (colour, _)) in zip((-6, 6), SWEEPS.items(), strict=True):
                if gap := measured[sweep, family].get(name):
                    _points(canvas, left, y + offset, colour, gap)
    canvas.text((470, height + 28), "validation loss minus Muon's, nats per token: left is better")
    for row, (colour, words) in enumerate(SWEEPS.values()):
        canvas.dot((190 + row * 250, height + 51), colour)
        canvas.text((200 + row * 250, height + 55), words, anchor="start", size=12)
    return canvas
