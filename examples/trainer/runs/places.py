"""Where the checkpoints of a run are: in its folder, or in Google Cloud Storage."""

from pathlib import Path

import orbax.checkpoint as ocp
from etils import epath

from examples.trainer.settings.run import RunConfig
from examples.trainer.system import optional_packages
from examples.trainer.system.errors import UserError

Place = Path | epath.Path
"""A folder on a disk, or of a bucket."""


def checkpoints(folder: Path, config: RunConfig) -> Place:
    """The folder of the checkpoints of the run in `folder`."""
    if not config.checkpoint_dir:
        return folder / "checkpoints"
    optional_packages.load("gcsfs", "--checkpoint-dir", "gcs")
    return epath.Path(config.checkpoint_dir) / folder.resolve().name


def is_local(place: Place) -> bool:
    return isinstance(place, Path)


def absolute(place: Place) -> Place:
    return place.absolute() if isinstance(place, Path) else place


def saved_steps(place: Place) -> list[int]:
    """The steps of the checkpoints there; raises `UserError` if a bucket cannot be read."""
    if not isinstance(place, Path):  # what is incomplete has its name already
        try:
            return sorted(ocp.utils.checkpoint_steps(place))
        except Exception as error:  # of the network, of gcsfs, of credentials: no common class
            raise UserError(f"{place} cannot be read: {error}\n{advice(place)}") from None
    return sorted(int(path.name) for path in place.glob("*") if path.name.isdecimal())


def refuse_taken(folder: Path, config: RunConfig) -> None:
    """Refuses the name of a new run, if there are checkpoints of another one in the bucket."""
    if config.checkpoint_dir and saved_steps(place := checkpoints(folder, config)):
        raise UserError(f"{place} has checkpoints of another run: choose another --name.")


def advice(place: Place) -> str:
    """What to do about a bucket that cannot be used; empty for a disk, whose errors say more."""
    if is_local(place):
        return ""
    return (
        "To do: see to the network, to the bucket and to the credentials (gcloud auth"
        " application-default login), and resume."
    )
