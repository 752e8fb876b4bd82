"""What Muon+ gains over Muon by the tokens that a parameter sees: runs here, and the paper's."""

import functools
import math
import pathlib

from docs.drawings.canvas import Canvas
from docs.drawings.gains import nats
from docs.drawings.plots import Axes
from examples.experiments.sweeps import contrasts
from examples.trainer.system.errors import UserError

TOKENS = pathlib.Path(__file__).parent.parent.parent / "results" / "experiments" / "tokens"
# Name to colour, and to its name in the list of contrasts.
METHODS = {
    "row_col, max, matched": ("three", "row_col max matched"),
    "row_col, max": ("four", "row_col max"),
    "col_row, spectral": ("one", "col_row spectral"),
}
# The paper's perplexities, at 20 and 200 tokens a parameter; see docs/explain/replications.md.
PAPER = {
    "gpt": {20: -nats(19.98, 21.70), 199: -nats(15.84, 16.97)},
    "llama": {17: -nats(13.41, 14.02), 196: -nats(11.03, 11.48)},
}


@functools.cache
def planned() -> dict[str, contrasts.Contrast]:
    """The contrasts of the plan by name."""
    return {each.name: each for each in contrasts.read(TOKENS / "contrasts.json")}


@functools.cache
def gain(family: str, tokens: int, name: str) -> contrasts.Estimate | None:
    """Muon's loss minus a method's by seeds that chose no rate, or None before there are runs."""
    wanted = f"{family}, {tokens} tokens a parameter: gain of {METHODS[name][1]}"
    try:
        return contrasts.measured(planned()[wanted], TOKENS)
    except UserError:  # one of the methods has no runs
        return None


def tokens() -> Canvas:
    """Two panels, GPT and LLaMA: a line for each method, and the paper's points."""
    words = "Validation loss of Muon minus that of Muon+, by tokens a parameter: up is better."
    canvas = Canvas(760, 320, words)
    for index, (family, title) in enumerate((("gpt", "GPT"), ("llama", "LLaMA"))):
        frame = Axes(canvas, (56 + index * 370, 36), (300, 200), (0, 2.6), (-0.06, 0.1))
        canvas.line([frame.place(0, 0), frame.place(2.6, 0)], "faint", 1)
        for shift, (name, (colour, _)) in enumerate(METHODS.items()):
            found = {n: e for n in (2, 20, 200) if (e := gain(family, n, name))}
            middles = []
            for count, estimate in found.items():
                x = math.log10(count) + 0.04 * (shift - 1)
                ends = [estimate.mean + sign * estimate.half_width for sign in (-1, 1)]
                canvas.line([frame.place(x, y) for y in ends], colour, 1.5)
                middles.append(frame.place(x, estimate.mean))
                canvas.dot(middles[-1], colour, 3.5)
            canvas.line(middles, colour, 1)
        published = [frame.place(math.log10(n), y) for n, y in PAPER[family].items()]
        canvas.line(published, "two", 1)
        for point in published:
            canvas.dot(point, "two")
        frame.ticks(
            [(math.log10(n), str(n)) for n in (2, 20, 200)],
            [(y, f"{y:g}") for y in (-0.04, -0.02, 0, 0.02, 0.04, 0.06, 0.08)],
        )
        canvas.text((206 + index * 370, 24), title, bold=True)
        canvas.text((206 + index * 370, 272), "tokens a parameter", colour="soft", size=12)
    legend = {**{name: colour for name, (colour, _) in METHODS.items()}, "the paper": "two"}
    for index, (name, colour) in enumerate(legend.items()):
        x = (100, 290, 430, 560)[index]
        canvas.dot((x, 302), colour)
        canvas.text((x + 10, 306), name, anchor="start", size=12)
    return canvas
