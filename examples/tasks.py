"""Zero-shot tasks of a trained model: `python -m examples.tasks runs/NAME`.

The questions, prompts and measures are those of EleutherAI's lm_eval, which
`pip install -r requirements/eval.txt` installs. By default they are the
seven tasks of the paper's table "Downstream evaluation results".
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import tyro

from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.system.errors import load_package
from examples.trainer.system.exit_status import command
from examples.trainer.system.files import write_atomically

PAPER = ("openbookqa", "hellaswag", "arc_easy", "wsc", "winogrande", "boolq", "piqa")


def evaluate(
    checkpoint: Annotated[CheckpointRef, tyro.conf.arg(name="")],
    tasks: tuple[str, ...] = PAPER,
    include: Path | None = None,
    limit: int | None = None,
    batch_size: int = 16,
) -> str:
    """Evaluates a trained model on tasks, and writes `tasks.json` into its run.

    Args:
      checkpoint: the model.
      tasks: tasks of lm_eval or your own; their data is downloaded.
      include: a folder with task files (.yaml) of your own.
      limit: number of questions of each task; all by default.
      batch_size: number of answers at a time.
    """
    load_package("lm_eval", "a task", "eval")
    from examples.trainer.inference import lm_eval_model  # imports lm_eval

    manager = lm_eval_model.find(tasks, str(include) if include else None)
    model = trained.load(checkpoint)
    results, table = lm_eval_model.ask(
        lm_eval_model.JaxLM(model, batch_size), tasks, manager, limit
    )
    kept = {"step": model.step, "limit": limit, "results": results}
    write_atomically(
        checkpoint.run / "tasks.json", json.dumps(kept, indent=2, default=str).encode()
    )
    return table


main = command(evaluate, "examples.tasks")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
