"""All that a run needs to go on, on disk: written behind its back, read onto any mesh."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from absl import logging

from examples.errors import UserError
from examples.training import TrainState

KEPT = 2  # the newest, and one before it in case the disk fills up

logging.set_verbosity(logging.ERROR)  # or else a note for each item that is not asked for

About = Callable[[int], dict[str, Any]]
"""Step to what a checkpoint says of it besides the arrays, as JSON values."""


class Checkpoints:
    """The checkpoints of a run, named by their step.

    A save goes on while training does. The next steps may reuse the state's memory all the same:
    Orbax has read it, or on the CPU holds on to it, when `save` returns. It writes into a folder
    of another name, which is renamed when whole, so that a kill leaves no half checkpoint.
    """

    def __init__(self, folder: Path, about: About):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, enable_async_checkpointing=True, create=True
        )
        self.folder = folder
        self.about = about
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest_step(self) -> int:
        """The last step that was saved whole; 0 if there is none."""
        return self.manager.latest_step() or 0

    def save(self, step: int, state: TrainState) -> None:
        """Begins to save the state after `step` steps; waits for the save before, if need be."""
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(self.about(step))
        )
        try:
            self.manager.save(step, args=items)
        except (ValueError, OSError) as error:
            raise self.unwritten(error) from error

    def settle(self) -> None:
        """Waits until all is on disk."""
        try:
            self.manager.wait_until_finished()
        except (ValueError, OSError) as error:
            raise self.unwritten(error) from error

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state after `step` steps, with the shapes, types and shardings of `abstract`."""
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), about=ocp.args.JsonRestore()
        )
        path = self.folder / str(step)
        try:
            restored = self.manager.restore(step, args=items)
        except (ValueError, KeyError, OSError) as error:
            raise UserError(
                f"the checkpoint {path} cannot be read: {reason(error)}\nIf it is damaged, remove "
                "that folder: the run then resumes from the checkpoint before it."
            ) from error
        if not agrees(restored["about"], json.loads(json.dumps(self.about(step)))):
            raise UserError(
                f"the checkpoint {path} is of another run than config.json says. Put back the "
                "config.json that the run began with, or start anew."
            )
        return restored["state"]

    def unwritten(self, error: Exception) -> UserError:
        """What to say when a save failed."""
        return UserError(
            f"cannot save to {self.folder}: {reason(error)}\nThe checkpoints before it are whole: "
            "make room or mend the disk, and resume."
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # After an error a save may wait for a process that is gone.
        if kind is None or jax.process_count() == 1:
            self.manager.close()


def restore_part(
    folder: Path, step: int | None, part: Literal["params", "opt_state"], abstract: Any
) -> tuple[int, Any]:
    """The step, by default the last, and a part of its state; reads nothing else of it."""
    if not folder.is_dir():
        raise UserError(f"{folder.parent} has no checkpoints yet.")
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
        steps = manager.all_steps()
        if not steps or (step is not None and step not in steps):
            there = f"those of {', '.join(map(str, sorted(steps)))}" if steps else "none"
            raise UserError(f"{folder} has no checkpoint of --step {step}: there are {there}.")
        step = max(steps) if step is None else step
        item = {part: abstract}
        args = ocp.args.PyTreeRestore(
            item=item,
            restore_args=ocp.checkpoint_utils.construct_restore_args(item),
            partial_restore=True,
        )
        try:
            restored = manager.restore(step, args=ocp.args.Composite(state=args))
        except (ValueError, KeyError, OSError) as error:
            raise UserError(
                f"the checkpoint {folder / str(step)} cannot be read: {reason(error)}"
            ) from error
    return step, restored["state"][part]


def agrees(saved: Any, now: Any) -> bool:
    """Whether what was saved still holds; settings that came into the code later have defaults."""
    if isinstance(saved, dict) and isinstance(now, dict):
        return all(key in now and agrees(value, now[key]) for key, value in saved.items())
    return saved == now


def reason(error: Exception) -> str:
    """What Orbax says, without the page of settings that TensorStore adds."""
    return str(error.args[0] if error.args else error).split(" [tensorstore_spec")[0]
