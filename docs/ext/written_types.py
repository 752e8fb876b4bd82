"""Types of arguments as the source writes them, and no headings between arguments."""

import ast
import inspect
import re
import textwrap
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode


def written(function: Any) -> dict[str, str]:
    """Annotations of a function's arguments, and of what it returns, as text."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        definition = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}  # a builtin, or made at run time
    if not isinstance(definition, ast.FunctionDef):
        return {}
    taken = definition.args
    arguments = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg]
    found = {x.arg: ast.unparse(x.annotation) for x in arguments if x and x.annotation}
    return found | ({"return": ast.unparse(definition.returns)} if definition.returns else {})


def _record(app: Sphinx, what: str, name: str, value: Any, *_: Any) -> None:
    if what in ("function", "method"):
        app.env.current_document.autodoc_annotations[name] = written(value)


def _link(app: Sphinx, env: Any, node: Any, shown: nodes.Node) -> nodes.Node | None:
    """Links a type to the page's entry of that name, also of a value; others stay words."""
    role = isinstance(node.next_node(), nodes.literal)  # :class:`...`, which must lead somewhere
    if node.get("refdomain") != "py" or node.get("reftype") not in ("class", "obj") or role:
        return None
    last = node["reftarget"].rpartition(".")[2]
    for name, entry in env.domains.python_domain.objects.items():
        if name.rpartition(".")[2] == last and not entry.aliased:
            page = node["refdoc"]
            return make_refnode(app.builder, page, entry.docname, entry.node_id, shown, name)
    return shown


def _drop_headings(app: Sphinx, what: str, name: str, value: Any, _: Any, lines: list[str]) -> None:
    """Headings between arguments are for ``help``; here they would end the argument before."""
    lines[:] = [line for line in lines if not re.fullmatch(r" +\*\*[A-Z][a-z ]+\*\*", line)]


def setup(app: Sphinx) -> dict[str, bool]:
    """Replaces what autodoc found, which is why it comes later."""
    app.connect("autodoc-process-signature", _record, priority=900)
    app.connect("autodoc-process-docstring", _drop_headings, priority=400)  # before napoleon
    app.connect("missing-reference", _link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
