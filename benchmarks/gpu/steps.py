"""Runs steps one after the other within a time budget, and records what each gave or why not."""

import gc
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from rich.console import Console

Figures = dict[str, Any]


class Unavailable(Exception):
    """What a step needs is not there; the message says what."""


class Step(NamedTuple):
    """One entry of a part's record.

    Attributes:
      name: of the entry.
      seconds: how long it takes on an H100, roughly; it is left out where less time is left.
      run: makes the figures.
    """

    name: str
    seconds: float
    run: Callable[[], Figures]


def run_all(
    steps: Iterable[Step],
    done: dict[str, Figures],
    budget_s: float,
    save: Callable[[], None],
    console: Console,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Runs ``steps`` in order.

    Args:
      steps: what is to be run. An iterator may look at ``done`` to decide about its next step.
      done: filled with the figures of each step, by its name. One that raised has ``failed``, one
        that was left out ``skipped``, with the reason.
      budget_s: seconds for all steps.
      save: called after each step.
      console: where progress is shown.
      clock: seconds that pass.
    """
    begin = clock()
    for step in steps:
        left = budget_s - (clock() - begin)
        start = clock()
        if step.seconds > left:
            reason = f"takes some {step.seconds:.0f} s, and {left:.0f} of {budget_s:.0f} s are left"
            figures: Figures = {"skipped": reason}
        else:
            console.print(f"{step.name} ({left:.0f} s left)")
            figures = guarded(step.run)
        done[step.name] = figures | {"wall_s": clock() - start}
        for kind in ("failed", "skipped"):
            if kind in figures:
                console.print(f"{step.name} {kind}: {figures[kind]}", markup=False)
        save()
        if "failed" in figures:
            gc.collect()  # the error may hold arrays, which take memory from the next step


def guarded(run: Callable[[], Figures]) -> Figures:
    """What ``run`` returns, or how it failed: the first line of the error, and where it arose."""
    try:
        return run()
    except Unavailable as error:
        return {"skipped": str(error)}
    except Exception as error:  # whatever it is, the next step is to run
        lines = str(error).strip().splitlines() or [""]
        place = traceback.extract_tb(error.__traceback__)[-1]
        return {
            "failed": f"{type(error).__name__}: {lines[0][:500]}",
            "at": f"{place.filename.rpartition('/')[2]}:{place.lineno}",
        }
