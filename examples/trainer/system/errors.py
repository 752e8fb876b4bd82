"""Exceptions whose message is written for the person at the terminal, and packages that lack."""

import importlib
from types import ModuleType


class UserError(Exception):
    """Something the user can correct; printed without a traceback."""


class Diverged(UserError):
    """Too many steps in a row had a loss or gradient that is not finite."""

    def __init__(self, step: int, skipped: int, saved: int):
        self.step = step
        steps = f"at {skipped} steps in a row" if skipped > 1 else "at a step"
        kept = f"the last checkpoint is of step {saved}" if saved else "there is no checkpoint yet"
        super().__init__(
            f"the loss or its gradient was not finite {steps}, the last of them step {step}. None "
            f"of them changed the parameters; {kept}. Start again with a lower "
            "--optimizer.learning-rate or --optimizer.adam-learning-rate."
        )


class DamagedFileError(UserError):
    """A file does not hold what was written to it."""


def load_package(module: str, use: str, file: str) -> ModuleType:
    """Imports a module that `use` needs; if it is missing, says what installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{use} needs the package {module.split('.')[0]} ({error}): "
            f"pip install -r requirements/{file}.txt."
        ) from None
