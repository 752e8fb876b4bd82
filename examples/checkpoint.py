"""Parameters, optimizer state and step on disk."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from absl import logging

from examples.errors import UserError
from examples.training import TrainState

KEPT = 2  # the newest, and one before it in case the disk fills up

logging.set_verbosity(logging.ERROR)  # or else a note for each item that is not asked for


class Checkpoints:
    """The checkpoints of a run, named by their step."""

    def __init__(self, folder: Path):
        # Saving has ended when `save` returns: the next step reuses the memory of the state.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, enable_async_checkpointing=False, create=True
        )
        self.folder = folder
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest_step(self) -> int:
        """The last step that was saved whole; 0 if there is none."""
        return self.manager.latest_step() or 0

    def save(self, step: int, state: TrainState, about: dict[str, Any]) -> None:
        """Saves the state after `step` steps, and what the run is about next to it."""
        self.manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about)
            ),
        )

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state after `step` steps, with the shapes, types and shardings of `abstract`."""
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        try:
            return self.manager.restore(step, args=args)["state"]
        except (ValueError, OSError) as error:
            raise UserError(f"{self.folder / str(step)} cannot be restored: {error}") from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self.manager.close()
