"""Checkpoints by Orbax: saved in the background while training continues, read onto any mesh."""

import contextlib
import ctypes
import functools
import json
import os
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from examples.trainer.runs import integrity, processes
from examples.trainer.settings.run import RunConfig
from examples.trainer.settings.validation import MISSING, differences
from examples.trainer.system import files, optional_packages
from examples.trainer.system.errors import UserError
from examples.trainer.training.step import TrainState

Place = Path | epath.Path
"""A folder on a disk, or of a bucket."""


def place_of(folder: Path, config: RunConfig) -> Place:
    """The folder of the checkpoints of the run in `folder`."""
    if not config.checkpoint_dir:
        return folder / "checkpoints"
    optional_packages.load("gcsfs", "--checkpoint-dir", "gcs")
    return epath.Path(config.checkpoint_dir) / folder.resolve().name


def absolute(place: Place) -> Place:
    return place.absolute() if isinstance(place, Path) else place


def saved_steps(place: Place) -> list[int]:
    """The steps of the checkpoints there; raises `UserError` if a bucket cannot be read."""
    if not isinstance(place, Path):  # what is incomplete has its name already
        try:
            return sorted(ocp.utils.checkpoint_steps(place))
        except Exception as error:  # of the network, of gcsfs, of credentials: no common class
            raise UserError(f"{place} cannot be read: {error}\n{advice_for(place)}") from None
    return sorted(int(path.name) for path in place.glob("*") if path.name.isdecimal())


def chosen(steps: Sequence[int], step: int | None, place: Place) -> int:
    """The step that was asked for, or the last one, of the checkpoints that are there."""
    if not steps:
        raise UserError(f"{place} has no checkpoints.")
    if step not in (None, *steps):
        raise UserError(
            f"{place} has no checkpoint of step {step}: there are those of"
            f" {', '.join(map(str, steps))}; a run keeps its last two."
        )
    return max(steps) if step is None else step


def refuse_bucket(folder: Path, config: RunConfig) -> None:
    """Refuses the name of a new run, if there are checkpoints of another one in the bucket."""
    if config.checkpoint_dir and saved_steps(place := place_of(folder, config)):
        raise UserError(f"{place} has checkpoints of another run: choose another --name.")


def advice_for(place: Place) -> str:
    """What to do about a bucket that cannot be used; empty for a disk, whose errors say more."""
    if isinstance(place, Path):
        return ""
    return (
        "To do: see to the network, to the bucket and to the credentials (gcloud auth"
        " application-default login), and resume."
    )


# Of glibc: the variable by which a user sets it, its number in malloc.h, and what a run takes.
MALLOC = (
    ("MALLOC_ARENA_MAX", -8, max(2, os.cpu_count() or 1)),
    ("MALLOC_MMAP_THRESHOLD_", -3, 2**29),
    ("MALLOC_TRIM_THRESHOLD_", -1, 2**29),
)
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

# glibc makes eight heaps for each core, which threads of saves and compilers fill by turns. On two
# cores a toy run took 693 MB with them, and 399 MB with one for each core. With fewer than that the
# threads of a tokenizer wait for each other. And glibc gives large arrays back to the system when
# they are free, so that every step on a CPU asks for its memory again, and the system fills that
# with zeros: a third of the time of a small model. Up to 512 MB stay with the process instead.
for variable, option, value in MALLOC:
    if variable not in os.environ:
        with contextlib.suppress(AttributeError):  # of another C library
            ctypes.CDLL(None).mallopt(option, value)

Metadata = Callable[[int], dict[str, Any]]
"""Step to the JSON values that a checkpoint holds besides the arrays."""


class Checkpoints:
    """The checkpoints of a run, named by their step.

    A save continues in the background while training does. The next steps may still reuse the
    memory of the state: when `save` returns, Orbax has copied it or, on the CPU, keeps it alive.
    Orbax writes into a temporary folder and renames it when it is complete, so that a killed
    process leaves no incomplete checkpoint.
    """

    def __init__(
        self,
        folder: Place,
        metadata: Metadata,
        say: Callable[[str], None] = print,
        keep_every: int = 0,
    ):
        """Keeps the two newest checkpoints, and those of multiples of `keep_every` steps."""
        kept: list[policies.PreservationPolicy] = [policies.LatestN(KEPT)]
        if keep_every:
            kept.append(policies.EveryNSteps(keep_every))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(kept),
            cleanup_tmp_directories=True,
        )
        self.folder = folder
        self.metadata = metadata
        self.say = say
        self.is_closed = False
        with explained(f"the checkpoints {folder} cannot be read", folder):
            if isinstance(folder, Path):
                check_folder(folder)
            self.manager = ocp.CheckpointManager(
                absolute(folder), options=options, handler_registry=handlers(folder)
            )

    def save(self, step: int, state: TrainState) -> None:
        """Begins to save the state after `step` steps; waits until an earlier save is complete."""
        if isinstance(self.folder, Path) and not self.folder.is_dir():
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
        return read(self.manager, self.folder, step, args, self.metadata, self.say)

    def saving(self) -> contextlib.AbstractContextManager[None]:
        what = f"cannot save to {self.folder} (the earlier checkpoints are complete)"
        return explained(what, self.folder)

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


def handlers(folder: Place) -> ocp.handlers.CheckpointHandlerRegistry | None:
    """Those of Orbax, and checksums where files are on a disk. A bucket has checksums of its own.

    Orbax finishes the parts in the order in which they are registered.
    """
    if not isinstance(folder, Path):
        return None
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    arrays, values = ocp.StandardCheckpointHandler(), integrity.CheckedJson()
    registry.add("state", ocp.args.StandardSave, arrays)
    registry.add("state", ocp.args.StandardRestore, arrays)
    registry.add("about", ocp.args.JsonSave, values)
    registry.add("about", ocp.args.JsonRestore, values)
    return registry


def restore_parts(
    folder: Place, step: int | None, abstract: dict[str, Any], metadata: Metadata
) -> tuple[int, dict[str, Any]]:
    """The step (by default the last) and parts of its state, by their names in a `TrainState`.

    No other arrays are read. Raises `UserError` if it was saved with another `metadata`.
    """
    options = ocp.CheckpointManagerOptions(read_only=True)
    with explained(f"the checkpoints {folder} cannot be read", folder):
        if not folder.is_dir():
            raise UserError(f"{folder.parent} has no checkpoints yet.")
        manager = ocp.CheckpointManager(absolute(folder), options=options)
    with manager:
        step = chosen(sorted(manager.all_steps()), step, folder)
        args = ocp.args.PyTreeRestore(
            item=abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=True,
        )
        aside = functools.partial(print, file=sys.stderr)
        return step, read(manager, folder, step, args, metadata, aside)


def read(
    manager: ocp.CheckpointManager,
    folder: Place,
    step: int,
    args: ocp.args.CheckpointArgs,
    metadata: Metadata,
    say: Callable[[str], None],
) -> Any:
    """The arrays of a checkpoint that is as it was written, and of the run that `metadata` says."""
    path, steps = folder / str(step), manager.all_steps()
    processes.together(lambda: verify(path, steps, say))
    reading = f"the checkpoint {path} cannot be read"
    with explained(reading, folder, way_out(path, steps)):
        saved = json.loads((path / "about" / "metadata").read_text())
    # Before the state, which would not fit if the optimizer or the model is another one.
    check_about(path, saved, metadata(step))
    with explained(reading, folder, way_out(path, steps)):
        return manager.restore(step, args=ocp.args.Composite(state=args))["state"]


def verify(path: Place, steps: Sequence[int], say: Callable[[str], None]) -> None:
    """Refuses a checkpoint with a file that is not as it was written; process i reads its share."""
    if not isinstance(path, Path):
        return
    try:
        if not integrity.verify(path, jax.process_index(), jax.process_count()):
            say(
                f"the checkpoint {path} is not verified: it has no checksums, or those of another "
                "version of this trainer. The next ones will have them."
            )
    except integrity.Damaged as error:
        raise UserError(
            f"the checkpoint {path} of step {path.name} is damaged: {error}.\n"
            f"{way_out(path, steps)}"
        ) from None


def way_out(path: Place, steps: Sequence[int]) -> str:
    earlier = [step for step in steps if step < int(path.name)]
    if not earlier:
        return "There is no checkpoint before it: start a new run."
    return (
        f"Remove that folder: the run then resumes from the checkpoint before it, of step "
        f"{max(earlier)}, {path.with_name(str(max(earlier)))}."
    )


@contextlib.contextmanager
def explained(what: str, folder: Place, advice: str = "") -> Generator[None]:
    """Says what cannot be done, why, and what to do."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, UserError):  # another process has ended; said already
        raise
    except Exception as error:  # of the disk, of Orbax, of TensorStore: no common class
        if jax.process_count() > 1 and processes.is_joint(error):
            raise
        advice = advice or advice_for(folder) or f"To do: {files.remedy(error)}, and resume."
        raise UserError(f"{what}: {reason(error)}\n{advice}") from error


def reason(error: Exception) -> str:
    """What went wrong in a line, without the long specification that TensorStore adds."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    text = str(error.args[0] if error.args else error) or type(error).__name__
    return text.split(" [tensorstore_spec")[0]


EXTENDED = ("config.steps", "config.earlier_steps", "config.optimizer.schedule_from")


def check_about(path: Place, saved: Any, now: dict[str, Any]) -> None:
    """Refuses a checkpoint that was saved with other settings or another tokenizer than now."""
    changed = differing(saved, json.loads(json.dumps(now)))
    if changed:
        raise UserError(
            f"the checkpoint {path} is of another run than config.json and tokenizer.json say: "
            f"{', '.join(changed)}. Put back the files that the run began with, or start a new "
            "run. To go on with another optimizer in the middle of a run, take its state over in a "
            "script of your own."
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


def differing(saved: Any, now: Any) -> list[str]:
    """The saved values that are others now; settings added to the code since are ignored.

    A run that was extended has other steps than its checkpoints of before.
    """
    before = now.get("config", {}).get("earlier_steps", ())
    extended = saved.get("config", {}).get("steps") in before
    return [
        f"{name.removeprefix('config.')} was {old!r}, and is {None if new is MISSING else new!r}"
        for name, old, new in differences(saved, now)
        if old is not MISSING and not (extended and name in EXTENDED)
    ]
