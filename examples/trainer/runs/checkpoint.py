"""Checkpoints by Orbax: saved in the background while training continues, read onto any mesh."""

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from examples.trainer.runs import integrity, processes
from examples.trainer.settings.validation import MISSING, differences
from examples.trainer.system import files
from examples.trainer.system.errors import UserError
from examples.trainer.training.step import TrainState

KEPT = 2  # the newest, and the one before in case the newest is damaged

# Else Orbax logs every item that is not requested, and errors with a traceback before it raises.
logging.set_verbosity(logging.FATAL)

Show = Callable[["sys.UnraisableHookArgs"], object]


def without_leftovers(show: Show) -> Show:
    """A hook that drops complaints of reads and writes that outlive the first that failed.

    Orbax ends its event loop at the first error. Each of the others would print a traceback, `Event
    loop is closed`, below the message that says what is wrong.
    """
    closed = "Event loop is closed"
    return lambda unraisable: str(unraisable.exc_value) == closed or show(unraisable)


sys.unraisablehook = without_leftovers(sys.unraisablehook)

# glibc gives large arrays back to the system when they are free, so that every step on a CPU asks
# for its memory again, and the system fills that with zeros: a third of the time of a small model.
# Up to 512 MB stay with the process instead. The numbers are those of malloc.h.
for variable, option in (("MALLOC_MMAP_THRESHOLD_", -3), ("MALLOC_TRIM_THRESHOLD_", -1)):
    if variable not in os.environ:
        with contextlib.suppress(AttributeError):  # of another C library
            ctypes.CDLL(None).mallopt(option, 2**29)

Metadata = Callable[[int], dict[str, Any]]
"""Step to the JSON values that a checkpoint holds besides the arrays."""


class Checkpoints:
    """The checkpoints of a run, named by their step, of which the two newest are kept.

    A save continues in the background while training does. The next steps may still reuse the
    memory of the state: when `save` returns, Orbax has copied it or, on the CPU, keeps it alive.
    Orbax writes into a temporary folder and renames it when it is complete, so that a killed
    process leaves no incomplete checkpoint.
    """

    def __init__(self, folder: Path, metadata: Metadata):
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, cleanup_tmp_directories=True)
        self.folder = folder
        self.metadata = metadata
        self.is_closed = False
        with explained(f"the checkpoints {folder} cannot be read"):
            check_folder(folder)
            self.manager = ocp.CheckpointManager(
                folder.absolute(), options=options, handler_registry=handlers()
            )

    def save(self, step: int, state: TrainState) -> None:
        """Begins to save the state after `step` steps; waits until an earlier save is complete."""
        if not self.folder.is_dir():
            raise UserError(
                f"{self.folder} is gone: it was removed or moved while the run was going, so that "
                f"step {step} cannot be saved. Put it back and resume, or start a new run."
            )
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(self.metadata(step))
        )
        with self.saving():
            self.manager.save(step, args=items)

    def wait_until_saved(self) -> None:
        with self.saving():
            self.manager.wait_until_finished()

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state after `step` steps, with the shapes, types and shardings of `abstract`."""
        args = ocp.args.StandardRestore(abstract)
        return read(self.manager, self.folder, step, args, self.metadata)

    def saving(self) -> contextlib.AbstractContextManager[None]:
        return explained(f"cannot save to {self.folder}")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self.close(kind)

    def close(self, kind: type[BaseException] | None, *error: Any) -> None:
        """Waits for a save that is under way; called a second time, does nothing."""
        # After an error, closing could wait forever for a process that has ended; and who presses
        # Ctrl-C a second time does not want to wait. What is incomplete is in a temporary folder.
        waits = kind is None or (jax.process_count() == 1 and issubclass(kind, Exception))
        if waits and not self.is_closed:
            self.is_closed = True
            with self.saving() if kind is None else contextlib.suppress(Exception):
                self.manager.close()


def handlers() -> ocp.handlers.CheckpointHandlerRegistry:
    """Those of Orbax, and checksums. Orbax finishes the parts in the order of registration."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    arrays, values = ocp.StandardCheckpointHandler(), integrity.CheckedJson()
    registry.add("state", ocp.args.StandardSave, arrays)
    registry.add("state", ocp.args.StandardRestore, arrays)
    registry.add("about", ocp.args.JsonSave, values)
    registry.add("about", ocp.args.JsonRestore, values)
    return registry


def restore_parts(
    folder: Path, step: int | None, abstract: dict[str, Any], metadata: Metadata
) -> tuple[int, dict[str, Any]]:
    """The step (by default the last) and parts of its state, by their names in a `TrainState`.

    No other arrays are read. Raises `UserError` if it was saved with another `metadata`.
    """
    options = ocp.CheckpointManagerOptions(read_only=True)
    with explained(f"the checkpoints {folder} cannot be read"):
        if not folder.is_dir():
            raise UserError(f"{folder.parent} has no checkpoints yet.")
        manager = ocp.CheckpointManager(folder.absolute(), options=options)
    with manager:
        step = chosen(sorted(manager.all_steps()), step, folder)
        args = ocp.args.PyTreeRestore(
            item=abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=True,
        )
        return step, read(manager, folder, step, args, metadata)


def chosen(steps: Sequence[int], step: int | None, folder: Path) -> int:
    """The step that was asked for, or the last one, of the checkpoints that are there."""
    if not steps or step not in (None, *steps):
        there = f"there are those of {', '.join(map(str, steps))}" if steps else "there is none"
        raise UserError(f"{folder} has no checkpoint of step {step or 1}: {there}.")
    return max(steps) if step is None else step


def read(
    manager: ocp.CheckpointManager,
    folder: Path,
    step: int,
    args: ocp.args.CheckpointArgs,
    metadata: Metadata,
) -> Any:
    """The arrays of a checkpoint that is as it was written, and of the run that `metadata` says."""
    path = folder / str(step)
    advice = way_out(path, manager.all_steps())
    processes.together(lambda: verify(path, advice))
    reading = f"the checkpoint {path} cannot be read"
    with explained(reading, advice):
        saved = json.loads((path / "about" / "metadata").read_text())
    # Before the state, which would not fit if the optimizer or the model is another one.
    check_about(path, saved, metadata(step))
    with explained(reading, advice):
        return manager.restore(step, args=ocp.args.Composite(state=args))["state"]


def verify(path: Path, advice: str) -> None:
    """Refuses a checkpoint with a file that is not as it was written; process i reads its share."""
    try:
        integrity.verify(path, jax.process_index(), jax.process_count())
    except integrity.Damaged as error:
        raise UserError(f"the checkpoint {path} is damaged: {error}.\n{advice}") from None


def way_out(path: Path, steps: Sequence[int]) -> str:
    earlier = [step for step in steps if step < int(path.name)]
    if not earlier:
        return "There is no checkpoint before it: start a new run."
    return (
        f"Remove that folder: the run then resumes from the checkpoint before it, of step "
        f"{max(earlier)}, {path.with_name(str(max(earlier)))}."
    )


@contextlib.contextmanager
def explained(what: str, advice: str = "") -> Generator[None]:
    """Says what cannot be done, why, and what to do."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, UserError):  # another process has ended; explained already
        raise
    except Exception as error:  # of the disk, of Orbax, of TensorStore: no common class
        if jax.process_count() > 1 and processes.is_joint(error):
            raise
        advice = advice or f"To do: {files.remedy(error)}, and resume."
        raise UserError(f"{what}: {reason(error)}\n{advice}") from error


def reason(error: Exception) -> str:
    """What went wrong in a line, without the long specification that TensorStore adds."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    text = str(error.args[0] if error.args else error) or type(error).__name__
    return text.split(" [tensorstore_spec")[0]


def check_about(path: Path, saved: Any, now: dict[str, Any]) -> None:
    """Refuses a checkpoint that was saved with other settings or another tokenizer than now.

    A run that was made longer has more steps than its checkpoints of before.
    """
    now = json.loads(json.dumps(now))
    longer = saved.get("config", {}).get("steps", 0) < now.get("config", {}).get("steps", 0)
    changed = [
        f"{name.removeprefix('config.')} was {old!r}, and is {None if new is MISSING else new!r}"
        for name, old, new in differences(saved, now)
        if old is not MISSING and not (longer and name == "config.steps")
    ]
    if changed:
        raise UserError(
            f"the checkpoint {path} is of another run than config.json and tokenizer.json say: "
            f"{', '.join(changed)}. Put back the files that the run began with, or start a new run."
        )


def check_folder(folder: Path) -> None:
    """Refuses a folder of checkpoints from elsewhere, of which Orbax would delete what is old."""
    files.check_no_link(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.name.isdecimal():
            continue
        written = any((path / name).exists() for name in ("_CHECKPOINT_METADATA", "state"))
        if path.is_symlink() or not written:
            raise UserError(
                f"{path} is no checkpoint of this trainer, and older checkpoints are deleted: move "
                "it away."
            )
