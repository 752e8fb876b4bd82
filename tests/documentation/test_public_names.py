"""Public names have docstrings."""

import inspect
import re
import types

import pytest

import optax_muonplus

PACKAGES = [
    name
    for name in dir(optax_muonplus)
    if isinstance(getattr(optax_muonplus, name), types.ModuleType)
]


def test_the_papers_form_cannot_be_changed():
    with pytest.raises(TypeError, match="does not support item assignment"):
        optax_muonplus.PAPER["norm"] = "col"  # ty: ignore[invalid-assignment]


@pytest.mark.parametrize("package", PACKAGES)
def test_public_functions_and_classes_are_documented(package):
    module = getattr(optax_muonplus, package)
    assert module.__doc__
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    defined = [value for value in public.values() if inspect.isroutine(value)]
    defined += [value for value in public.values() if inspect.isclass(value)]
    assert defined or package == "rules"  # lists to pass
    for value in defined:
        assert inspect.cleandoc(value.__doc__ or ""), f"{package}.{value.__name__}"
        if inspect.isclass(value):  # NamedTuple writes such a docstring by itself
            assert not re.fullmatch(rf"{value.__name__}\(.*\)", value.__doc__), value
        assert value.__module__.startswith(f"{optax_muonplus.__name__}."), value
    assert not [name for name, value in public.items() if isinstance(value, types.ModuleType)]
