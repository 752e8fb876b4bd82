"""What an update moves between devices."""

import json
import pathlib

from docs.drawings.canvas import Canvas

COLOURS = ("one", "two", "three", "four")
RESULTS = pathlib.Path(__file__).parent.parent.parent / "results" / "benchmarks"
COLLECTIVES = RESULTS / "collectives-gpt-256-data4-model2-by-data-model-float32.json"


def _device(canvas: Canvas, left: float, top: float, name: str) -> None:
    canvas.rect((left, top), (150, 40), "none", outline="faint", radius=6)
    canvas.text((left - 8, top + 25), name, anchor="end", colour="soft", size=12)


def all_to_alls() -> Canvas:
    """Four matrices in shards on four devices: together on one device each, and back."""
    words = (
        "Each of four devices holds a quarter of each of four matrices. One all-to-all brings the"
        " quarters of a matrix together on one device; a second one sends the results back."
    )
    canvas = Canvas(760, 270, words)
    titles = ("shards of all matrices", "one whole matrix each", "shards of all updates")
    for column, title in enumerate(titles):
        left = 76 + column * 258
        canvas.text((left + 75, 24), title, bold=True)
        for device in range(4):
            top = 40 + device * 48
            _device(canvas, left, top, f"device {device}" if column == 0 else "")
            for part in range(4):
                matrix = device if column == 1 else part
                piece = part if column == 1 else device
                x = left + 8 + part * (16 if column == 1 else 34) + (35 if column == 1 else 0)
                width = 16 if column == 1 else 26
                opacity = 0.45 + 0.18 * piece
                canvas.rect((x, top + 8), (width, 24), COLOURS[matrix], opacity=opacity)
    for column in range(2):
        left = 76 + column * 258 + 156
        for start in range(4):
            for end in range(4):
                colour = COLOURS[end if column == 0 else start]
                canvas.line([(left, 60 + 48 * start), (left + 96, 60 + 48 * end)], colour, 1)
        canvas.text((left + 48, 250), "one all-to-all", colour="soft", size=12)
    canvas.text((409, 250), "polar, norms, scale", colour="soft", size=12)
    return canvas


def collectives() -> Canvas:
    """Collectives and bytes of an update of 12 layers on 4 x 2 devices, from its record."""
    rows = json.loads(COLLECTIVES.read_text(encoding="utf-8"))["rows"]
    names = ("optax.contrib.muon", "omp.muonplus, left to the compiler", "omp.muonplus, sharding=")
    figures = [
        (sum(rows[name]["collectives"].values()), rows[name]["received_bytes"] / 1e6)
        for name in names
    ]
    words = "; ".join(
        f"{name}: {count} collectives, {size:.1f} MB received per device"
        for name, (count, size) in zip(names, figures, strict=True)
    )
    canvas = Canvas(760, 190, words)
    canvas.text((250, 24), "collectives of an update", anchor="start", bold=True)
    canvas.text((520, 24), "MB received per device", anchor="start", bold=True)
    most = [max(column) for column in zip(*figures, strict=True)]
    for index, (name, values) in enumerate(zip(names, figures, strict=True)):
        y = 44 + index * 44
        colour = "two" if index < 2 else "one"
        canvas.text((238, y + 18), name, anchor="end")
        for column, value in enumerate(values):
            x, length = 250 + column * 270, max(2, 170 * value / most[column])
            canvas.rect((x, y + 2), (length, 24), colour)
            shown = f"{value:,}" if column == 0 else f"{value:.1f}"
            canvas.text((x + length + 6, y + 19), shown, anchor="start")
    note = "12 layers of width 256 on 4 x 2 simulated devices, counted in compiled programs"
    canvas.text((380, 182), note, colour="soft", size=12)
    return canvas
