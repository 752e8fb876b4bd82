"""`--against RULE`: the same run with another update rule, and the curves of both."""

import dataclasses
import io
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from examples.trainer.runs import processes
from examples.trainer.runs.launch import start
from examples.trainer.runs.metrics import METRICS, read_metrics
from examples.trainer.runs.report import BLUE, ORANGE, SMOOTHED, VAL_LOSS, save_figure
from examples.trainer.settings.command_line import NewRun
from examples.trainer.settings.rules import RULES
from examples.trainer.system.errors import UserError
from examples.trainer.system.files import write_atomically

PICTURE = "against.png"
Curve = dict[int, float]
"""Step to loss, in nats per token."""


def compare(asked: NewRun, preset: str) -> int:
    """Does both runs, one after the other, and writes the picture into the folder of the first."""
    rule, against = asked.config.optimizer, asked.against
    if against is None or against == rule.name:
        raise UserError(f"--against {against}: the run itself has that rule; give another one.")
    name = f"{asked.config.name}-{against}" if asked.config.name else ""
    other = dataclasses.replace(
        asked.config, name=name, optimizer=dataclasses.replace(rule, name=against)
    )
    folders = []
    for config in (asked.config, other):
        status, folder = start(dataclasses.replace(asked, config=config), preset)
        if status:
            return status
        folders.append(folder)
    if processes.is_first():
        report(folders, (RULES[rule.name].title, RULES[against].title), Console().print)
    return 0


def report(folders: list[Path], titles: tuple[str, str], say: Callable[[str], None]) -> None:
    """Draws the curves of two runs, and says what they ended at."""
    records = [read_metrics(folder / METRICS) for folder in folders]
    val = [curve(one, VAL_LOSS) for one in records]
    last = [next(reversed(one.values())) for one in val]
    picture = io.BytesIO()
    draw([smooth(curve(one, "train_loss")) for one in records], val, titles, picture)
    path = folders[0] / PICTURE
    write_atomically(path, picture.getvalue())
    say(
        f"\nvalidation loss  {titles[0]} {last[0]:.4f}, {titles[1]} {last[1]:.4f}: a difference of"
        f" {last[0] - last[1]:+.4f} with one seed\npicture          {path}"
    )


def curve(records: list[dict[str, Any]], name: str) -> Curve:
    return {record["step"]: record[name] for record in records if name in record}


def smooth(losses: Curve) -> Curve:
    """The mean of each loss and those before it, since single batches are noisy."""
    values = list(losses.values())
    means = (statistics.fmean(values[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(len(values)))
    return dict(zip(losses, means, strict=True))


def draw(train: list[Curve], val: list[Curve], titles: tuple[str, str], file: io.BytesIO) -> None:
    """Losses above, and the first run's minus the second's below."""
    figure = Figure(figsize=(7, 5.6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for title, color, smoothed, evaluated in zip(titles, (BLUE, ORANGE), train, val, strict=True):
        above.plot([*smoothed], [*smoothed.values()], color=color, alpha=0.7)
        above.plot([*evaluated], [*evaluated.values()], "o", color=color, label=title)
    for (one, other), style in ((train, "-"), (val, "o")):
        steps = [step for step in one if step in other]
        below.plot(steps, [one[step] - other[step] for step in steps], style, color=BLUE)
    below.axhline(0, color=ORANGE, linewidth=1)
    above.set(ylabel="loss (nats per token)", title="lines: training, points: validation")
    below.set(xlabel="step", ylabel=f"{titles[0]} - {titles[1]}")
    above.legend(frameon=False)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    save_figure(figure, file, format="png")
