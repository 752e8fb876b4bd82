"""The directive ``picture``: a drawing of docs/drawings, in the page, where themes reach it."""

import pathlib

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from docs.drawings import DRAWINGS


class Picture(SphinxDirective):
    """Draws when the page is read; the content is the caption."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """A figure with the SVG."""
        for path in pathlib.Path(DRAWINGS["chain"].__code__.co_filename).parent.glob("*.py"):
            self.env.note_dependency(str(path))
        drawing = DRAWINGS[self.arguments[0]]().svg()
        figure = nodes.figure("", nodes.raw("", drawing, format="html"), classes=["drawing"])
        if self.content:
            figure += nodes.caption("", "", *self.parse_inline(" ".join(self.content))[0])
        return [figure]


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive."""
    app.add_directive("picture", Picture)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
