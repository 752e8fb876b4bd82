"""What a person sees during training: a live bar, or plain lines where there is no terminal."""

import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from examples.evaluate import Evaluation


class Watcher(Protocol):
    """What a loop reports to."""

    def begin(self, step: int) -> None:
        """The run goes on from this step."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: object) -> None: ...

    def trained(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """A step is done."""

    def skipped(self, step: int) -> None:
        """A step changed nothing, since its loss or gradient was not finite."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """The state after a step was evaluated."""


class Display:
    """Shows step, loss, speed and the time that is left."""

    def __init__(self, console: Console, steps: int):
        self.console = console
        self.steps = steps
        self.first: tuple[int, float] | None = None
        self.numbers = "compiling ..."
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=steps, numbers=self.numbers)

    def begin(self, step: int) -> None:
        """Says how many steps are done before the first one is shown."""
        self.bar.update(self.task, completed=step)

    def __enter__(self) -> "Display":
        if not self.console.is_terminal and not self.bar.finished:
            self.console.print(self.numbers)
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def trained(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Moves the bar."""
        now = time.monotonic()
        if self.first is None:  # steps are timed from here, so that compiling does not count
            self.first = (step, now)
        speed = "" if tokens_per_second is None else f"  {tokens_per_second:,.0f} tokens/s"
        self.numbers = f"loss {loss:.3f}{speed}  {self.left(step, now)}"
        self.bar.update(self.task, completed=step, numbers=self.numbers)

    def left(self, step: int, now: float) -> str:
        """The time left, at the mean pace since the first step."""
        step_0, time_0 = self.first or (step, now)
        if step == step_0:
            return ""
        seconds = round((now - time_0) / (step - step_0) * (self.steps - step))
        return f"{seconds // 60}:{seconds % 60:02d} left"

    def skipped(self, step: int) -> None:
        """Writes down that a step changed nothing."""
        self.console.print(f"step {step}/{self.steps}  loss or gradient not finite: left out")

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Writes a line that stays."""
        self.console.print(
            f"step {step}/{self.steps}  {self.numbers}  val loss {evaluation.val_loss:.3f}  "
            f"perplexity {evaluation.val_perplexity:.2f}  "
            f"bits per byte {evaluation.val_bits_per_byte:.3f}",
            highlight=False,
        )
