"""Words of a page's ``{index}`` line lead to the page, not to an empty place in it.

The search shows the text at the place that an entry leads to, and fails where there is none.
"""

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx


def _lead_to_page(app: Sphinx, doctree: nodes.document) -> None:
    for node in doctree.findall(addnodes.index):
        node["entries"] = [
            (kind, words, "" if place.startswith("index-") else place, main, key)
            for kind, words, place, main, key in node["entries"]
        ]


def setup(app: Sphinx) -> dict[str, bool]:
    """Changes the entries of each page when it has been read."""
    app.connect("doctree-read", _lead_to_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
