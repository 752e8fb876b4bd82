"""Zero-shot tasks of a trained model: `python -m examples.tasks runs/NAME`.

The questions, prompts and measures are those of EleutherAI's lm_eval (the extra `eval`). Without
arguments they are the seven tasks of the paper's table "Downstream evaluation results".
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from examples import extra, trained
from examples.command import run_command
from examples.files import write_atomically
from examples.trained import Place

PROGRAM = "python -m examples.tasks"
PAPER = ("openbookqa", "hellaswag", "arc_easy", "wsc", "winogrande", "boolq", "piqa")


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return run_command(lambda: print(tyro.cli(evaluate, args=argv, prog=PROGRAM)))


def evaluate(
    place: Annotated[Place, tyro.conf.arg(name="")],
    tasks: tuple[str, ...] = PAPER,
    include: Path | None = None,
    limit: int | None = None,
    batch_size: int = 16,
) -> str:
    """Asks a trained model the questions of tasks, and writes `tasks.json` into its run.

    Args:
      place: the run.
      tasks: names of lm_eval, or of your own tasks; their data is downloaded.
      include: a folder with task files (.yaml) of your own.
      limit: questions of each task; all by default.
      batch_size: answers at a time.
    """
    extra.load("lm_eval", "a task", "eval")
    from examples import harness  # which needs it

    manager = harness.find(tasks, str(include) if include else None)
    model = trained.load(place)
    results, table = harness.ask(harness.JaxLM(model, batch_size), tasks, manager, limit)
    kept = {"step": model.step, "limit": limit, "results": results}
    write_atomically(place.run / "tasks.json", json.dumps(kept, indent=2, default=str).encode())
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
