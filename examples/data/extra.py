"""Packages that only some texts need."""

import importlib
from types import ModuleType

from examples.errors import UserError


def load(module: str, use: str) -> ModuleType:
    """A module of the extra `fineweb`, which `use` needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{use} needs the package {module.split('.')[0]} ({error}): "
            "pip install -e '.[examples,fineweb]'."
        ) from None
