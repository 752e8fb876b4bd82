"""The display during training: a live bar, or plain lines without a terminal."""

import statistics
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from examples.trainer.runs.speed import GRADIENT_NORM, MFU, TOKENS_PER_SECOND
from examples.trainer.training.evaluate import Evaluation, in_words, short


class Observer:
    """Receives the events of a training loop; what a subclass does not define does nothing."""

    def begin(self, step: int) -> None:
        """The run starts from this step."""

    def __enter__(self) -> object:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def trained(self, step: int, figures: dict[str, Any]) -> None:
        """A step is finished; its figures have the names of `metrics.jsonl`."""

    def skipped(self, step: int) -> None:
        """A step was skipped because its loss or gradient was not finite."""

    def left_out(self, step: int, norm: float, bound: float) -> None:
        """A step was skipped because the norm of its gradient was above a bound."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """The state after a step was evaluated."""


def in_short(figures: dict[str, Any]) -> str:
    """Loss, gradient norm, speed and MFU of a step; the last two where they were measured."""
    parts = [f"loss {figures['train_loss']:.3f}", f"grad {figures[GRADIENT_NORM]:.2f}"]
    if TOKENS_PER_SECOND in figures:
        parts.append(f"{figures[TOKENS_PER_SECOND]:,.0f} tokens/s")
    if MFU in figures:
        parts.append(f"MFU {figures[MFU]:.1f}%")
    return "  ".join(parts)


class Display(Observer):
    """Shows step, loss, speed and remaining time."""

    def __init__(self, console: Console, steps: int):
        self.console = console
        self.steps = steps
        self.first: tuple[int, float] | None = None
        self.speeds: dict[str, list[float]] = {}
        """Of the steps since the last line, which has medians: single steps differ much."""
        self.status = "compiling ..."
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=steps, status=self.status)

    def begin(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def __enter__(self) -> "Display":
        if not self.console.is_terminal and not self.bar.finished:
            self.console.print(self.status)
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def trained(self, step: int, figures: dict[str, Any]) -> None:
        now = time.monotonic()
        if self.first is None:  # timing starts here, so that compilation does not count
            self.first = (step, now)
        for name in {TOKENS_PER_SECOND, MFU}.intersection(figures):
            self.speeds.setdefault(name, []).append(figures[name])
        figures = figures | {name: statistics.median(x) for name, x in self.speeds.items()}
        self.status = f"{in_short(figures)}  {self.time_left(step, now)}"
        self.bar.update(self.task, completed=step, status=self.status)

    def time_left(self, step: int, now: float) -> str:
        """The remaining time at the mean speed since the first step."""
        step_0, time_0 = self.first or (step, now)
        if step == step_0:
            return ""
        seconds = round((now - time_0) / (step - step_0) * (self.steps - step))
        return f"{seconds // 60}:{seconds % 60:02d} left"

    def skipped(self, step: int) -> None:
        self.console.print(f"step {step}/{self.steps}  loss or gradient not finite: left out")

    def left_out(self, step: int, norm: float, bound: float) -> None:
        self.console.print(f"step {step}/{self.steps}  gradient {norm:.4g} > {bound:.4g}: left out")

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self.speeds.clear()
        self.console.print(
            f"step {step}/{self.steps}  {self.status}\n"
            f"{'':8}val loss {evaluation.val_loss:.3f}  "
            f"perplexity {short(evaluation.val_perplexity)}  "
            f"bits per byte {in_words(evaluation.val_bits_per_byte, 3)}"
            + "".join(f"\n{'':8}{loss:.3f} {name}" for name, loss in evaluation.of_parts.items()),
            highlight=False,
        )
