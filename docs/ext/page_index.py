"""Words of a page's ``{index}`` line lead to the page, not to an empty place in it.

The search shows the text at the place that an entry leads to, and fails where there is none.
"""

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx


def _lead_to_page(app: Sphinx, doctree: nodes.document) -> None:
    for node in doctree.findall(addnodes.index):
        node["entries"] = [
            (kind, words, "" if place.startswith("index-") else place, main, key)
            for kind, words, place, main, key in node["entries"]
        ]


def _write_again(app: Sphinx, env: Any) -> list[str]:
    """All pages with such a line: the search forgets words of pages that a build does not write."""
    indexed = env.domains.index_domain.entries.items()
    return [page for page, entries in indexed if any(main for *_, main, _ in entries)]


def setup(app: Sphinx) -> dict[str, bool]:
    """Changes the entries of each page when it has been read, and keeps them in the search."""
    app.connect("doctree-read", _lead_to_page)
    app.connect("env-updated", _write_again)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
