"""The display during a sweep: a live table, or one line per run without a terminal."""

import math
import statistics
from collections import defaultdict
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from examples.experiments.sweeps.grid import Grid, Trial, count, methods, wanted
from examples.experiments.sweeps.ledger import Ledger
from examples.trainer.runs.progress import Observer, in_short


class SweepDisplay:
    """A row for each method, and a line for the current run."""

    def __init__(self, console: Console, grid: Grid, ledger: Ledger):
        self.console = console
        self.grid = grid
        self.ledger = ledger
        self.live = Live(console=console, auto_refresh=False)
        self.rows: Table | None = None

    def __enter__(self) -> "SweepDisplay":
        if self.console.is_terminal:
            self.live.start()
        self.say(f"{count(self.grid)} runs, {len(self.done())} of them done")
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self.show("", refresh=True)
            self.live.stop()

    def done(self) -> dict[Trial, float]:
        """The finished runs of this grid, and their losses."""
        losses = self.ledger.losses()
        return {trial: losses[trial] for trial in wanted(self.grid, losses) if trial in losses}

    def say(self, line: str) -> None:
        """Prints a line."""
        self.console.print(line)

    def show(self, line: str, refresh: bool = False) -> None:
        """Draws the table and a line below it; `refresh` reads the ledger again."""
        if not self.console.is_terminal:
            return
        if refresh or self.rows is None:
            self.rows = self.table()
        self.live.update(Group(self.rows, line), refresh=True)

    def wait(self) -> None:
        """Shows that other processes do the remaining runs."""
        self.show("waiting for the runs of other processes ...", refresh=True)

    def of(self, trial: Trial, steps: int) -> "RunDisplay":
        """The observer of a run's training loop."""
        return RunDisplay(self, trial, steps)

    def finished(self, trial: Trial) -> None:
        """Prints the result of a finished run."""
        done = self.done()
        self.say(
            f"{trial.name}  {loss_or_diverged(done[trial])}  ({len(done)} of {count(self.grid)})"
        )

    def table(self) -> Table:
        """Best rate and loss of each method so far."""
        table = Table(box=None, pad_edge=False)
        for heading in ("method", "runs", "best rate", "validation loss", "seeds"):
            table.add_column(heading, justify="left" if heading == "method" else "right")
        by_method: dict[object, dict[Trial, float]] = defaultdict(dict)
        for trial, loss in self.done().items():
            by_method[trial.method][trial] = loss
        for method in methods(self.grid):
            losses = by_method[method]
            if not losses:
                table.add_row(method.name, "0", "", "", "")
                continue
            best = min((c for c in losses if c.seed == 0), key=lambda trial: losses[trial])
            same = [loss for trial, loss in losses.items() if trial.rate == best.rate]
            mean = statistics.fmean(same)
            table.add_row(
                method.name,
                str(len(losses)),
                f"{best.rate:g}",
                loss_or_diverged(mean),
                str(len(same)),
            )
        return table


class RunDisplay(Observer):
    """Shows the events of a training loop in the line below the table."""

    def __init__(self, sweep: SweepDisplay, trial: Trial, steps: int):
        self.sweep = sweep
        self.name = trial.name
        self.steps = steps

    def begin(self, step: int) -> None:
        """Shows which run it is."""
        self.sweep.show(f"{self.name}  step {step}/{self.steps}  compiling ...", refresh=True)

    def trained(self, step: int, figures: dict[str, Any]) -> None:
        """Shows the step."""
        self.sweep.show(f"{self.name}  step {step}/{self.steps}  {in_short(figures)}")

    def skipped(self, step: int) -> None:
        """Shows that a step was skipped."""
        self.sweep.show(f"{self.name}  step {step}/{self.steps}  not finite")


def loss_or_diverged(loss: float) -> str:
    """A loss, or "diverged"."""
    return f"{loss:.4f}" if math.isfinite(loss) else "diverged"
