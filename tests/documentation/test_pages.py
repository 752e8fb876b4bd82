"""Pages have short titles, and the searches that the browser checks lead to pages that exist."""

import re

import pytest

from docs.searches import FIRST
from tests.support.documents import PAGES, README, ROOT


@pytest.mark.parametrize("page", PAGES)
def test_titles_have_five_words_at_most(page):
    """The sidebar and a phone show them whole."""
    title = re.search(r"^# (.+)$", PAGES[page], re.M)
    if title:  # the changelog's is in the file that its page includes
        assert len(title[1].split()) <= 5


CELLS = {"README.md": README, "benchmarks/README.md": (ROOT / "benchmarks/README.md").read_text()}


@pytest.mark.parametrize("document", [*CELLS, *PAGES])
def test_cells_of_tables_have_25_words_at_most(document):
    """A link counts by its words, and code as one word; longer ones are read by nobody."""
    text = re.sub(r"^( *)```.*?^\1```$", "", (CELLS | PAGES)[document], flags=re.M | re.S)
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", text))
    for line in re.findall(r"^\|.*\|$", text, re.M):
        for cell in line.split("|")[1:-1]:
            assert len(cell.split()) <= 25, f"{document}: {cell}"


def test_the_table_of_choices_fits_one_screen():
    rows = re.findall(r"^\|.*\|$", PAGES["choose.md"], re.M)
    assert len(rows) <= 2 + 8


def test_queries_lead_to_pages():
    assert len(FIRST) == 35
    assert {f"{page}.md" for page in FIRST.values()} <= set(PAGES)
