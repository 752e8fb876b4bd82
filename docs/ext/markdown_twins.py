"""Beside each page its Markdown, ``page.md``, and ``llms.txt``, which lists them all.

The convention is that of https://llmstxt.org: a program that helps a user reads plain text.
"""

import pathlib
import re
from typing import Any

from sphinx import addnodes
from sphinx.application import Sphinx

from docs.ext.sections import linked
from docs.ext.twins import first_words, twin

SUMMARY = (
    "Muon+ for JAX: the Muon optimizer with one normalization after the orthogonalization, as Optax"
    " gradient transformations that take the place of optax.contrib.muon or optax.adamw."
)


def _write(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.name != "html":
        return
    source, out = pathlib.Path(app.srcdir), pathlib.Path(app.outdir)
    texts: dict[str, str] = {}
    for page in sorted(app.env.found_docs):
        text = pathlib.Path(app.env.doc2path(page)).read_text(encoding="utf-8")
        texts[page] = twin(linked(text, page, source)[0], page)
        path = out / f"{page}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[page], encoding="utf-8")
    (out / "llms.txt").write_text(_listed(app, texts), encoding="utf-8")


def _listed(app: Sphinx, texts: dict[str, str]) -> str:
    """Pages under the headings of the sidebar, in its order; those that it lacks come last."""
    lines = [f"# {app.config.project}", "", f"> {SUMMARY}", ""]
    rest = dict(texts)

    def line(page: str) -> str:
        title = re.search(r"^# (.+)$", rest.pop(page), re.M)
        words = first_words(texts[page].partition("\n")[2])
        return f"- [{title[1] if title else page}]({page}.md)" + (f": {words}" if words else "")

    for tree in app.env.get_doctree(app.config.root_doc).findall(addnodes.toctree):
        pages: list[Any] = [page for _, page in tree["entries"] if page in rest]
        lines += [f"## {tree['caption']}", "", *map(line, pages), ""]
    return "\n".join([*lines, "## Other pages", "", *map(line, list(rest)), ""])


def setup(app: Sphinx) -> dict[str, bool]:
    """Writes the files when the site has been built."""
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
