"""Pages have short titles, and the searches that the browser checks lead to pages that exist."""

import re

import pytest

from docs.searches import FIRST
from tests.support.documents import PAGES


@pytest.mark.parametrize("page", PAGES)
def test_titles_have_five_words_at_most(page):
    """The sidebar and a phone show them whole."""
    title = re.search(r"^# (.+)$", PAGES[page], re.M)
    if title:  # the changelog's is in the file that its page includes
        assert len(title[1].split()) <= 5


def test_queries_lead_to_pages():
    assert len(FIRST) == 35
    assert {f"{page}.md" for page in FIRST.values()} <= set(PAGES)
