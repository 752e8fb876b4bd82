"""The build fails on a public name without a page, and on a page's name that is not public."""

import types

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

import optax_muonplus


def public_names() -> set[str]:
    """Full names of all that a user imports, packages' names included."""
    names = set()
    for name in dir(optax_muonplus):
        value = getattr(optax_muonplus, name)
        names.add(f"optax_muonplus.{name}")
        if isinstance(value, types.ModuleType):
            names |= {
                f"optax_muonplus.{name}.{inner}"
                for inner, found in vars(value).items()
                if not inner.startswith("_") and not isinstance(found, types.ModuleType)
            }
    return names


def _check(app: Sphinx, env) -> None:
    objects = env.get_domain("py").objects
    described = {name for name, entry in objects.items() if not entry.aliased}
    public = public_names()
    if missing := sorted(public - described):
        raise ExtensionError(f"Public names without an entry in docs/reference: {missing}")
    own = {name for name in described if name.startswith("optax_muonplus.")}
    extra = {name for name in own if name not in public and name.rpartition(".")[0] not in public}
    if extra:
        raise ExtensionError(f"Entries in docs/reference that are not public: {sorted(extra)}")


def setup(app: Sphinx) -> dict[str, bool]:
    """Checks when all pages have been read."""
    app.connect("env-check-consistency", _check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
