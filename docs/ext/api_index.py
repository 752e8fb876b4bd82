"""The directive ``api-index``: every public name with one line, by package, each a link.

The line is the first sentence of the name's docstring, or of its entry in docs/reference if it is
a value, whose docstring is that of its type.
"""

import inspect
import pathlib
import re
import types

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import optax_muonplus

ENTRY = re.compile(r"^\.\. py:\w+:: ([\w.]+).*\n\n((?:   .+\n)+)", re.M)
SENTENCE = re.compile(r".*?\.(?=\s|$)", re.S)


def written(folder: pathlib.Path) -> dict[str, str]:
    """First sentence of the entries that pages spell out, by the last part of the name."""
    return {
        name.rpartition(".")[2]: first_sentence(text)
        for page in sorted(folder.glob("*.md"))
        for name, text in ENTRY.findall(page.read_text(encoding="utf-8"))
    }


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends a word, on one line."""
    text = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
    found = SENTENCE.match(text)
    return (found[0] if found else text).rstrip(":.") + "."


def lines(module: types.ModuleType, entries: dict[str, str]) -> list[str]:
    """A row of a list table for each public name."""
    rows = []
    for name in sorted(dir(module), key=str.lower):
        value = getattr(module, name)
        if name.startswith("_") or isinstance(value, types.ModuleType):
            continue
        documented = inspect.isroutine(value) or inspect.isclass(value)
        alias = entries.get(name) if not documented or name == "MuonDimensionNumbers" else None
        said = alias or first_sentence(inspect.getdoc(value) or "")
        full = f"{module.__name__}.{name}"
        rows += [f"   * - :py:obj:`{name} <{full}>`", f"     - {said}"]
    return rows


class ApiIndex(SphinxDirective):
    """A table for each package."""

    def run(self) -> list[nodes.Node]:
        """Parses the tables as reStructuredText."""
        entries = written(pathlib.Path(self.env.srcdir) / "reference")
        packages = [getattr(optax_muonplus, name) for name in dir(optax_muonplus)]
        text = []
        for module in [optax_muonplus, *(x for x in packages if isinstance(x, types.ModuleType))]:
            title = module.__name__.replace("optax_muonplus", "omp")
            text += [f".. py:currentmodule:: {module.__name__}", ""]
            text += [f".. rubric:: {title}", "", ".. list-table::", "   :widths: 30 70", ""]
            text += [*lines(module, entries), ""]
        return self.parse_text_to_nodes("\n".join([*text, ".. py:currentmodule:: None"]))


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive."""
    app.add_directive("api-index", ApiIndex)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
