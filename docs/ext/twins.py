"""A page of the site as plain Markdown, for readers that are programs; needs no Sphinx."""

import importlib
import inspect
import os
import re

from docs.ext.headings import FENCES

MATTER = re.compile(r"\A---\n.*?\n---\n+", re.S)
HIDDEN = re.compile(r"^( *)(`{3,}|:{3,})\{(?:index|toctree)\}.*?^\1\2\n*", re.M | re.S)
CELL = re.compile(r"^(`{3,})\{code-cell\}.*?\n(?::tags:.*\n+)?", re.M)
ENTRY = re.compile(r"^\.\. auto(function|class|data|module):: ([\w.]+)\n(?:   :.*\n)*", re.M)
FROM_ROOT = re.compile(r"\]\(/([^)\s]+)\)")


def described(match: re.Match[str]) -> str:
    """A public name with its signature and its docstring."""
    kind, path = match.groups()
    if kind == "module":  # a function, such as muonplus, may have the name of its module
        return f"{inspect.getdoc(importlib.import_module(path)) or ''}\n"
    module, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    try:
        signature = str(inspect.signature(value))
    except (TypeError, ValueError):  # a value that is not called
        signature = ""
    return f"### `{path}{signature}`\n\n{inspect.getdoc(value) or ''}\n"


def twin(text: str, page: str) -> str:
    """The Markdown of a page without what only the site understands.

    Args:
      text: with all sections in their places.
      page: its path without an ending.
    """

    def relative(match: re.Match[str]) -> str:
        return f"]({os.path.relpath(match[1], os.path.dirname(page) or '.')})"

    text = HIDDEN.sub("", MATTER.sub("", text))
    text = CELL.sub(r"\1python\n", text)
    return FROM_ROOT.sub(relative, ENTRY.sub(described, text)).strip() + "\n"


def first_words(text: str) -> str:
    """The first sentence of a page below its title, on one line, without links."""
    for block in re.split(r"\n\s*\n", FENCES.sub("", text).strip()):
        if re.match(r"[A-Z`*]", block):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(block.split()))
            found = re.match(r".*?[.:](?=\s|\*|$)", words)
            return (found[0] if found else words).strip("*").rstrip(":.") + "."
    return ""
