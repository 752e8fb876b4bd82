"""A line ``%names`` in a page stands for the table of what arguments are called elsewhere."""

import pathlib
import re

from sphinx.application import Sphinx

from docs import names

LINE = re.compile(r"^%names$", re.M)


def _expand(app: Sphinx, page: str, content: list[str]) -> None:
    if LINE.search(content[0]):
        package = pathlib.Path(names.__file__).parent.parent / "optax_muonplus"
        for file in (names.__file__, package / "extras" / "argument_names.py"):
            app.env.note_dependency(str(file))
        content[0] = LINE.sub(lambda _: names.table(), content[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Expands the line when a page is read."""
    app.connect("source-read", _expand)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
