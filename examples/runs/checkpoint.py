"""Checkpoints: saved in the background while training continues, restored onto any mesh."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from absl import logging

from examples.system.errors import UserError
from examples.training.step import TrainState

KEPT = 2  # the newest, and the one before in case the newest is damaged

logging.set_verbosity(logging.ERROR)  # else Orbax logs every item that is not requested

Metadata = Callable[[int], dict[str, Any]]
"""Step to the JSON values that a checkpoint holds besides the arrays."""


class Checkpoints:
    """The checkpoints of a run, named by their step.

    A save continues in the background while training does. The next steps may still reuse the
    memory of the state: when `save` returns, Orbax has copied it or, on the CPU, keeps it alive.
    Orbax writes into a temporary folder and renames it when it is complete, so that a killed
    process leaves no incomplete checkpoint.
    """

    def __init__(self, folder: Path, metadata: Metadata):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, enable_async_checkpointing=True, create=True
        )
        self.folder = folder
        self.metadata = metadata
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest_step(self) -> int:
        """The step of the last complete checkpoint; 0 if there is none."""
        return self.manager.latest_step() or 0

    def save(self, step: int, state: TrainState) -> None:
        """Begins to save the state after `step` steps; waits until an earlier save is complete."""
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(self.metadata(step))
        )
        try:
            self.manager.save(step, args=items)
        except (ValueError, OSError) as error:
            raise self.save_error(error) from error

    def wait_until_saved(self) -> None:
        """Waits until all saves are on disk."""
        try:
            self.manager.wait_until_finished()
        except (ValueError, OSError) as error:
            raise self.save_error(error) from error

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
        if not matches(restored["about"], json.loads(json.dumps(self.metadata(step)))):
            raise UserError(
                f"the checkpoint {path} is of another run than config.json says. Put back the "
                "config.json that the run began with, or start a new run."
            )
        return restored["state"]

    def save_error(self, error: Exception) -> UserError:
        """The error for a save that failed."""
        return UserError(
            f"cannot save to {self.folder}: {reason(error)}\nThe earlier checkpoints are complete: "
            "make room or repair the disk, and resume."
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # After an error, closing could wait forever for a process that has ended.
        if kind is None or jax.process_count() == 1:
            self.manager.close()


def restore_part(
    folder: Path, step: int | None, part: Literal["params", "opt_state"], abstract: Any
) -> tuple[int, Any]:
    """The step (by default the last) and one part of its state; nothing else is read."""
    if not folder.is_dir():
        raise UserError(f"{folder.parent} has no checkpoints yet.")
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
        steps = manager.all_steps()
        if not steps or (step is not None and step not in steps):
            existing = f"those of {', '.join(map(str, sorted(steps)))}" if steps else "none"
            raise UserError(f"{folder} has no checkpoint of --step {step}: there are {existing}.")
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


def matches(saved: Any, now: Any) -> bool:
    """Whether all saved values are unchanged; settings added to the code since are ignored."""
    if isinstance(saved, dict) and isinstance(now, dict):
        return all(key in now and matches(value, now[key]) for key, value in saved.items())
    return saved == now


def reason(error: Exception) -> str:
    """Orbax's message without the long specification that TensorStore adds."""
    return str(error.args[0] if error.args else error).split(" [tensorstore_spec")[0]
