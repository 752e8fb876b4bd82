"""Tables and code that fit: where a name may be broken, and how wide the lines of a block are.

``docs/_static/site.css`` shows a row as a card on a narrow screen, with ``data-label`` (the words
of the header) before each cell, and tables of many columns (class ``wide``) and blocks with long
lines (``--columns``) in smaller letters.
"""

import html
import re
from typing import Any

from bs4 import BeautifulSoup
from sphinx.application import Sphinx

BLOCK = re.compile(r"<pre>(.*?)</pre>", re.S)
TABLE = re.compile(r"<table\b.*?</table>", re.S)
# Behind these a long name may be broken, outside of tags and of characters written as &...;
BREAKS = re.compile(r"(?<=[._:/,=|\[])(?=[A-Za-z_])(?![^<>]*>)")
WIDE = 6  # columns of a table
LONG = 90  # columns of code


def fitted(table: str) -> str:
    """Marks one table of HTML for the style sheet."""
    soup = BeautifulSoup(BREAKS.sub("<wbr/>", table), "html.parser")
    found: Any = soup.table
    header = [" ".join(cell.get_text().split()) for cell in found.select("thead th")]
    least = {"cards": 3, "wide": WIDE, "widest": 2 * WIDE}
    kinds = [kind for kind, columns in least.items() if len(header) >= columns]
    found["class"] = [*found.get("class", []), *kinds]
    for row in found.select("tbody tr"):
        for cell, words in zip(row.find_all("td"), header, strict=False):
            if words:
                cell["data-label"] = words
            if not cell.get_text(strip=True):
                cell["class"] = [*cell.get("class", []), "empty"]
    return str(soup)


def sized(block: str) -> str:
    """Says how long the longest line of a block is, if it is long."""
    lines = html.unescape(re.sub(r"<[^>]+>", "", block)).splitlines()
    columns = max(map(len, lines), default=0)
    return (
        block.replace("<pre>", f'<pre style="--columns: {columns}">', 1)
        if columns > LONG
        else block
    )


def _fit(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if "body" in context:
        body = BLOCK.sub(lambda block: sized(block[0]), context["body"])
        context["body"] = TABLE.sub(lambda table: fitted(table[0]), body)


def setup(app: Sphinx) -> dict[str, bool]:
    """Marks the tables of each page when it is written."""
    app.connect("html-page-context", _fit)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
