"""Checkpoints: saved in the background while training continues, restored onto any mesh."""

import contextlib
import json
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from absl import logging

from examples.trainer.runs import host_memory, integrity, places, processes
from examples.trainer.runs.about import check_about, check_folder
from examples.trainer.runs.places import Place
from examples.trainer.system import files
from examples.trainer.system.errors import UserError
from examples.trainer.training.step import TrainState

KEPT = 2  # the newest, and the one before in case the newest is damaged

# Else Orbax logs every item that is not requested, and errors with a traceback before it raises.
logging.set_verbosity(logging.FATAL)
host_memory.mend()

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
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT,
            keep_period=keep_every or None,
            enable_async_checkpointing=True,
            create=True,
        )
        self.folder = folder
        self.metadata = metadata
        self.say = say
        self.is_closed = False
        self.advice = places.advice(folder)
        self.saving = f"cannot save to {folder} (the earlier checkpoints are complete)"
        with explained(f"the checkpoints {folder} cannot be read", self.advice):
            # A bucket compares checksums of its own, and is not read again after each save.
            registry = handlers() if places.is_local(folder) else None
            if isinstance(folder, Path):
                check_folder(folder)
            self.manager = ocp.CheckpointManager(
                places.absolute(folder), options=options, handler_registry=registry
            )

    def save(self, step: int, state: TrainState) -> None:
        """Begins to save the state after `step` steps; waits until an earlier save is complete."""
        if places.is_local(self.folder) and not self.folder.is_dir():
            raise UserError(
                f"{self.folder} is gone: it was removed or moved while the run was going, so that "
                f"step {step} cannot be saved. Put it back and resume, or start a new run."
            )
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(self.metadata(step))
        )
        with explained(self.saving, self.advice):
            self.manager.save(step, args=items)

    def wait_until_saved(self) -> None:
        with explained(self.saving, self.advice):
            self.manager.wait_until_finished()

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state after `step` steps, with the shapes, types and shardings of `abstract`."""
        path = self.folder / str(step)
        processes.together(lambda: verify(path, self.manager.all_steps(), self.say))
        reading = f"the checkpoint {path} cannot be read", way_out(path, self.manager.all_steps())
        about = ocp.args.Composite(about=ocp.args.JsonRestore())
        state = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        with explained(*reading):
            saved = self.manager.restore(step, args=about)["about"]
        # Before the state, which would not fit if the optimizer or the model is another one.
        check_about(path, saved, self.metadata(step))
        with explained(*reading):
            return self.manager.restore(step, args=state)["state"]

    def __enter__(self) -> "Checkpoints":
        self.leftovers = without_leftovers()
        self.leftovers.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self.close(kind)
        self.leftovers.__exit__(kind, *error)

    def close(self, kind: type[BaseException] | None, *error: Any) -> None:
        """Waits for a save that is under way; called a second time, does nothing."""
        # After an error, closing could wait forever for a process that has ended; and who presses
        # Ctrl-C a second time does not want to wait. What is incomplete is in a temporary folder.
        waits = kind is None or (jax.process_count() == 1 and issubclass(kind, Exception))
        if waits and not self.is_closed:
            self.is_closed = True
            said = explained(self.saving, self.advice)
            with said if kind is None else contextlib.suppress(Exception):
                self.manager.close()


@contextlib.contextmanager
def without_leftovers() -> Generator[None]:
    """Drops complaints of reads and writes that outlive the first that failed.

    Orbax ends its event loop at the first error. The others then have no loop to report to, and
    each would print a traceback, `Event loop is closed`, below the message that says what is wrong.
    After an error this stays so, as they may end at any later time.
    """
    before = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            before(unraisable)

    sys.unraisablehook = hook
    yield
    sys.unraisablehook = before


def handlers() -> ocp.handlers.CheckpointHandlerRegistry:
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    arrays, values = integrity.CheckedArrays(), integrity.CheckedJson()
    registry.add("state", ocp.args.StandardSave, arrays)
    registry.add("state", ocp.args.StandardRestore, arrays)
    registry.add("about", ocp.args.JsonSave, values)
    registry.add("about", ocp.args.JsonRestore, values)
    return registry


def verify(path: Place, steps: Sequence[int], say: Callable[[str], None]) -> None:
    """Refuses a checkpoint with a file that is not as it was written; process i reads its share.

    Those of a bucket have no checksums here.
    """
    if not isinstance(path, Path):
        return
    share = jax.process_index(), jax.process_count()
    try:
        found = [integrity.verify(path / part, *share) for part in ("state", "about")]
        if any(found) and not all(found):
            raise integrity.Damaged("the checksums of a part of it are missing")
        integrity.check_bound(path)
    except integrity.Damaged as error:
        raise UserError(
            f"the checkpoint {path} of step {path.name} is damaged: {error}.\n"
            f"{way_out(path, steps)}"
        ) from None
    if not any(found):
        say(
            f"the checkpoint {path} is not verified: it has no checksums, as those of earlier "
            "versions of this trainer. The next ones will have them."
        )


def way_out(path: Place, steps: Sequence[int]) -> str:
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
    except (jax.errors.JaxRuntimeError, UserError):  # another process has ended; said already
        raise
    except Exception as error:  # of the disk, of Orbax, of TensorStore: no common class
        if jax.process_count() > 1 and processes.is_joint(error):
            raise
        advice = advice or f"To do: {files.remedy(error)}, and resume."
        raise UserError(f"{what}: {reason(error)}\n{advice}") from error


def restore_part(
    folder: Place,
    step: int | None,
    part: Literal["params", "opt_state"],
    abstract: Any,
    metadata: Metadata,
) -> tuple[int, Any]:
    """The step (by default the last) and one part of its state; no other arrays are read.

    Raises `UserError` if the checkpoint was saved with another `metadata`.
    """
    step, parts = restore_parts(folder, step, {part: abstract}, metadata)
    return step, parts[part]


def restore_parts(
    folder: Place, step: int | None, abstract: dict[str, Any], metadata: Metadata
) -> tuple[int, dict[str, Any]]:
    """The same for several parts, by their names in a `TrainState`."""
    options = ocp.CheckpointManagerOptions(read_only=True)
    with explained(f"the checkpoints {folder} cannot be read", places.advice(folder)):
        if not folder.is_dir():
            raise UserError(f"{folder.parent} has no checkpoints yet.")
        manager = ocp.CheckpointManager(places.absolute(folder), options=options)
    with manager, without_leftovers():
        steps = manager.all_steps()
        if not steps or (step is not None and step not in steps):
            existing = f"those of {', '.join(map(str, sorted(steps)))}" if steps else "none"
            raise UserError(f"{folder} has no checkpoint of --step {step}: there are {existing}.")
        step = max(steps) if step is None else step
        path = folder / str(step)
        args = ocp.args.PyTreeRestore(
            item=abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=True,
        )
        verify(path, steps, lambda line: print(line, file=sys.stderr))
        with explained(f"the checkpoint {path} cannot be read", way_out(path, steps)):
            check_about(path, json.loads((path / "about" / "metadata").read_text()), metadata(step))
        with explained(f"the checkpoint {path} cannot be read", way_out(path, steps)):
            restored = manager.restore(step, args=ocp.args.Composite(state=args))
    return step, restored["state"]


def reason(error: Exception) -> str:
    """What went wrong in a line, without the long specification that TensorStore adds."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    text = str(error.args[0] if error.args else error) or type(error).__name__
    return text.split(" [tensorstore_spec")[0]
