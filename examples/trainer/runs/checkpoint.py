"""Checkpoints by Orbax: saved in the background while training continues, read onto any mesh.

Orbax does not notice a bit that has changed in an array: `about/checksums.json` has the SHA-256 of
every file of `state`, which is compared before it is read.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import orbax.checkpoint as ocp
from absl import logging

from examples.trainer.runs.processes import is_first
from examples.trainer.settings.run import RunConfig
from examples.trainer.settings.validation import from_dict
from examples.trainer.system.errors import UserError
from examples.trainer.system.files import read_json, sha256
from examples.trainer.training.step import TrainState

State = TypeVar("State")  # a tree of arrays, or of their shapes
KEPT = 2  # the newest, and the one before in case the newest is damaged
CHECKSUMS = "checksums.json"
REMEDY = (
    "Remove that folder: the run then resumes from the checkpoint before it, or from its start."
)

# Else Orbax logs every item that is not requested, and errors with a traceback before it raises.
logging.set_verbosity(logging.FATAL)


class Checkpoints:
    """The checkpoints of a run, named by their step, of which the two newest are kept.

    A save continues in the background while training does. The next steps may still reuse the
    memory of the state: when `save` returns, Orbax has copied it or, on the CPU, keeps it alive.
    Orbax writes into a temporary folder and renames it when it is complete, so that a killed
    process leaves no incomplete checkpoint.
    """

    def __init__(self, folder: Path, metadata: dict[str, Any], read_only: bool = False):
        """`metadata` are JSON values that each checkpoint holds besides the arrays."""
        self.folder, self.metadata, self.read_only = folder, metadata, read_only
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, cleanup_tmp_directories=not read_only, read_only=read_only
        )
        self.manager = ocp.CheckpointManager(
            folder.absolute(), options=options, handler_registry=handlers()
        )

    def save(self, step: int, state: TrainState) -> None:
        """Begins to save the state after `step` steps; waits until an earlier save is complete."""
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            about=ocp.args.JsonSave({**self.metadata, "step": step}),
        )
        self.manager.save(step, args=items)

    def restore(self, step: int, abstract: State) -> State:
        """The state after `step` steps, with the shapes, types and shardings of `abstract`.

        A manager that only reads leaves out what `abstract` does not have.
        """
        check(self.folder / str(step), self.metadata)
        own = ocp.checkpoint_utils.construct_restore_args(abstract)
        args = ocp.args.PyTreeRestore(abstract, restore_args=own, partial_restore=self.read_only)
        return self.manager.restore(step, args=ocp.args.Composite(state=args))["state"]

    def choose(self, step: int | None) -> int:
        """The step, if it was saved; None: the last one."""
        steps = sorted(self.manager.all_steps())
        if not steps or step not in (None, *steps):
            raise UserError(
                f"{self.folder} has no checkpoint of step {step or 1}: there are those of "
                f"{', '.join(map(str, steps)) or 'no step yet'}."
            )
        return steps[-1] if step is None else step

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        # Who presses Ctrl-C a second time does not want to wait for a save that is under way.
        if kind is None or issubclass(kind, Exception):
            self.manager.close()


class CheckedJson(ocp.JsonCheckpointHandler):
    """Writes `about` as Orbax does, and then the checksums of `state`, which is complete."""

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        found = checksums(Path(directory).parent / "state")
        (Path(directory) / CHECKSUMS).write_text(json.dumps(found, indent=1) + "\n")


def handlers() -> ocp.handlers.CheckpointHandlerRegistry:
    """Those of Orbax, and checksums. Orbax finishes the parts in the order of registration."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("state", ocp.args.StandardSave, ocp.StandardCheckpointHandler())
    registry.add("state", ocp.args.PyTreeRestore, ocp.PyTreeCheckpointHandler())
    registry.add("about", ocp.args.JsonSave, CheckedJson())
    return registry


def checksums(state: Path) -> dict[str, str]:
    """The SHA-256 of each file of a state, by its name."""
    paths = sorted(path for path in state.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:
        found = pool.map(sha256, paths)
        return {path.relative_to(state).as_posix(): x for path, x in zip(paths, found, strict=True)}


def check(path: Path, metadata: dict[str, Any]) -> None:
    """Refuses a checkpoint with a damaged file, and one of another run; process 0 reads for all."""
    if not is_first():
        return
    about = path / "about"
    try:
        written, saved = dict(read_json(about / CHECKSUMS)), read_json(about / "metadata")
        found, step = checksums(path / "state"), int(saved["step"])
    except (UserError, OSError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"the checkpoint {path} is damaged ({error}). {REMEDY}") from None
    if step != int(path.name):
        raise UserError(f"the checkpoint {path} is of step {step}. {REMEDY}")
    for name in sorted(found.keys() | written.keys()):
        if found.get(name) != written.get(name):
            raise UserError(
                f"the checkpoint {path} is damaged: state/{name} is not as it was written. {REMEDY}"
            )
    if changed := differences(saved, metadata):
        raise UserError(
            f"the checkpoint {path} was saved with another {', '.join(changed)} than the run has: "
            "put back the config.json and tokenizer.json that the run began with."
        )


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The settings that are others by now, but for the steps of a run that was made longer."""
    old, new = (from_dict(RunConfig, values["config"]) for values in (saved, now))
    names = [field.name for field in fields(RunConfig) if field.name != "steps"]
    changed = [name for name in names if getattr(old, name) != getattr(new, name)]
    return changed + ["tokenizer"] * (saved["tokenizer_sha256"] != now["tokenizer_sha256"])
