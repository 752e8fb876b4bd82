"""Whether checkpoints are those of a run: what they say, and what lies beside them."""

import json
from pathlib import Path
from typing import Any

from examples.trainer.runs.places import Place
from examples.trainer.system import files
from examples.trainer.system.differences import MISSING, differences
from examples.trainer.system.errors import UserError

EXTENDED = ("config.steps", "config.earlier_steps", "config.optimizer.schedule_from")


def check_about(path: Place, saved: Any, now: dict[str, Any]) -> None:
    """Refuses a checkpoint that was saved with other settings or another tokenizer than now."""
    changed = differing(saved, json.loads(json.dumps(now)))
    if changed:
        raise UserError(
            f"the checkpoint {path} is of another run than config.json and tokenizer.json say: "
            f"{', '.join(changed)}. Put back the files that the run began with, or start a new "
            "run. To go on with another optimizer in the middle of a run, take its state over in a "
            "script of your own, as examples/take_over.py does."
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
