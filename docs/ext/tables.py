"""Tables that fit: where code may be broken, and the header's words at each cell for phones.

``docs/_static/site.css`` shows a row as a card on a narrow screen, with ``data-label`` before each
cell, and tables of many columns (class ``wide``) in smaller letters.
"""

import re
from typing import Any

from bs4 import BeautifulSoup
from sphinx.application import Sphinx

TABLE = re.compile(r"<table\b.*?</table>", re.S)
CODE = re.compile(r"<code\b.*?</code>", re.S)
# Behind these a long name may be broken, outside of tags and of characters written as &...;
BREAKS = re.compile(r"(?<=[._/(,=|\[])(?=\w)(?![^<>]*>)")
WIDE = 6  # columns


def fitted(table: str) -> str:
    """Marks one table of HTML for the style sheet."""
    table = CODE.sub(lambda code: BREAKS.sub("<wbr/>", code[0]), table)
    soup = BeautifulSoup(table, "html.parser")
    found: Any = soup.table
    header = [cell.get_text(" ", strip=True) for cell in found.select("thead th")]
    kinds = ["wide"] * (len(header) >= WIDE) + ["cards"] * (len(header) > 2)
    found["class"] = [*found.get("class", []), *kinds]
    for row in found.select("tbody tr"):
        for cell, words in zip(row.find_all("td"), header, strict=False):
            if words:
                cell["data-label"] = words
            if not cell.get_text(strip=True):
                cell["class"] = [*cell.get("class", []), "empty"]
    return str(soup)


def _fit(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if "body" in context:
        context["body"] = TABLE.sub(lambda table: fitted(table[0]), context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Marks the tables of each page when it is written."""
    app.connect("html-page-context", _fit)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
