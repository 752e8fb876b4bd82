"""Packages that only some uses need."""

import importlib
from types import ModuleType

from examples.trainer.system.errors import UserError


def load(module: str, use: str, file: str) -> ModuleType:
    """Imports a module that `use` needs; if it is missing, says what installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{use} needs the package {module.split('.')[0]} ({error}): "
            f"pip install -r requirements/{file}.txt."
        ) from None
