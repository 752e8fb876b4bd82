"""Public names are those that README and pages speak of, and have docstrings."""

import inspect
import re
import types

import pytest

import optax_muonplus
from tests.support.documents import PAGES, README

PACKAGES = [
    name
    for name in dir(optax_muonplus)
    if isinstance(getattr(optax_muonplus, name), types.ModuleType)
]


def test_what_is_recommended_cannot_be_changed():
    with pytest.raises(TypeError, match="does not support item assignment"):
        optax_muonplus.RECOMMENDED["norm"] = "col"  # ty: ignore[invalid-assignment]


def test_public_names_are_those_of_readme_and_pages():
    """Written as ``omp.name``: words of the text do not count."""
    named = set(re.findall(r"\bomp\.(\w+)", "\n".join([README, *PAGES.values()])))
    assert named - {"__version__"} == set(dir(optax_muonplus))
    for name in dir(optax_muonplus):
        value = getattr(optax_muonplus, name)
        assert not callable(value) or inspect.getdoc(value), name


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_an_entry_in_the_reference(package):
    """The build of the site checks the same; this needs no Sphinx.

    Entries of ``auto...`` have full names, and those of ``py:...`` stand in the current module.
    """
    entries = re.findall(r"^\.\. ([\w:]+):: ([\w.]+)", PAGES[f"reference/{package}.md"], re.M)
    full = f"{optax_muonplus.__name__}.{package}"
    entries = [f"{full}.{name}" if ":" in kind else name for kind, name in entries]
    names = vars(getattr(optax_muonplus, package)).items()
    public = {n for n, v in names if not n.startswith("_") and not inspect.ismodule(v)}
    modules = {full, f"{full}.{full}"}  # the page's own, and that of its current module
    assert {f"{full}.{name}" for name in public} == set(entries) - modules


@pytest.mark.parametrize("package", PACKAGES)
def test_public_functions_and_classes_are_documented(package):
    module = getattr(optax_muonplus, package)
    assert module.__doc__
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    defined = [value for value in public.values() if inspect.isroutine(value)]
    defined += [value for value in public.values() if inspect.isclass(value)]
    assert defined
    for value in defined:
        assert inspect.cleandoc(value.__doc__ or ""), f"{package}.{value.__name__}"
        if inspect.isclass(value):  # NamedTuple writes such a docstring by itself
            assert not re.fullmatch(rf"{value.__name__}\(.*\)", value.__doc__), value
        assert value.__module__.startswith(f"{optax_muonplus.__name__}."), value
    assert not [name for name, value in public.items() if isinstance(value, types.ModuleType)]
