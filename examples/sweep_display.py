"""What a person sees of a sweep: a live table, or a line for each run without a terminal."""

import math
import statistics
from collections import defaultdict

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from examples.evaluate import Evaluation
from examples.grid import Cell, Grid, count, methods, wanted
from examples.ledger import Ledger


class SweepDisplay:
    """A row for each method, and a line for the run under way."""

    def __init__(self, console: Console, grid: Grid, ledger: Ledger):
        self.console = console
        self.grid = grid
        self.ledger = ledger
        self.live = Live(console=console, auto_refresh=False)
        self.rows: Table | None = None

    def __enter__(self) -> "SweepDisplay":
        if self.console.is_terminal:
            self.live.start()
        done, all_runs = len(self.done()), count(self.grid)
        self.say(f"{all_runs} runs, {done} of them done")
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self.show("", anew=True)
            self.live.stop()

    def done(self) -> dict[Cell, float]:
        """The finished runs of this grid, and their losses."""
        losses = self.ledger.losses()
        return {cell: losses[cell] for cell in wanted(self.grid, losses) if cell in losses}

    def say(self, line: str) -> None:
        """Writes a line that stays."""
        self.console.print(line)

    def show(self, line: str, anew: bool = False) -> None:
        """Draws the table, read again from the ledger if `anew`, and the line below it."""
        if not self.console.is_terminal:
            return
        if anew or self.rows is None:
            self.rows = self.table()
        self.live.update(Group(self.rows, line), refresh=True)

    def wait(self) -> None:
        """Says that other processes have the rest."""
        self.show("waiting for the runs of other processes ...", anew=True)

    def of(self, cell: Cell, steps: int) -> "RunDisplay":
        """What the loop of a run reports to."""
        return RunDisplay(self, cell, steps)

    def finished(self, cell: Cell) -> None:
        """Reports a run that has come to its end."""
        done = self.done()
        self.say(f"{cell.name}  {number(done[cell])}  ({len(done)} of {count(self.grid)})")

    def table(self) -> Table:
        """Best rate and loss of each method so far."""
        table = Table(box=None, pad_edge=False)
        for heading in ("method", "runs", "best rate", "validation loss", "seeds"):
            table.add_column(heading, justify="left" if heading == "method" else "right")
        by_method: dict[object, dict[Cell, float]] = defaultdict(dict)
        for cell, loss in self.done().items():
            by_method[cell.method][cell] = loss
        for method in methods(self.grid):
            losses = by_method[method]
            if not losses:
                table.add_row(method.name, "0", "", "", "")
                continue
            best = min((c for c in losses if c.seed == 0), key=lambda cell: losses[cell])
            same = [loss for cell, loss in losses.items() if cell.rate == best.rate]
            mean = statistics.fmean(same)
            table.add_row(
                method.name, str(len(losses)), f"{best.rate:g}", number(mean), str(len(same))
            )
        return table


class RunDisplay:
    """Turns what a loop reports into the line below the table."""

    def __init__(self, sweep: SweepDisplay, cell: Cell, steps: int):
        self.sweep = sweep
        self.name = cell.name
        self.steps = steps

    def begin(self, step: int) -> None:
        """Says which run it is."""
        self.sweep.show(f"{self.name}  step {step}/{self.steps}  compiling ...", anew=True)

    def __enter__(self) -> "RunDisplay":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def trained(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Shows the step."""
        speed = "" if tokens_per_second is None else f"  {tokens_per_second:,.0f} tokens/s"
        self.sweep.show(f"{self.name}  step {step}/{self.steps}  loss {loss:.3f}{speed}")

    def skipped(self, step: int) -> None:
        """Shows the step."""
        self.sweep.show(f"{self.name}  step {step}/{self.steps}  not finite")

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Shows nothing: the next step follows at once."""


def number(loss: float) -> str:
    """A loss, or that there is none."""
    return f"{loss:.4f}" if math.isfinite(loss) else "diverged"
