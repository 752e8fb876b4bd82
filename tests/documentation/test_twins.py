"""The Markdown beside each page has its text and nothing that only the site understands."""

import re

import pytest

from docs.ext.headings import expanded
from docs.ext.twins import first_words, twin
from tests.support.documents import PAGES


@pytest.mark.parametrize("page", PAGES)
def test_only_markdown_is_left(page):
    text = twin(expanded(PAGES[page]), page.removesuffix(".md"))
    assert not re.search(r"\{(index|toctree|code-cell)\}|^\.\. auto|^%section", text, re.M)
    assert not text.startswith("---\n")


def test_links_from_the_root_are_relative_and_code_is_python():
    cell = "```{code-cell}\n:tags: [remove-input]\nx = 1\n```\n"
    text = f"---\na: b\n---\n\n# A\n\n{cell}[b](/c/d.md#e)\n"
    assert twin(text, "c/f") == "# A\n\n```python\nx = 1\n```\n[b](d.md#e)\n"


def test_names_of_the_reference_have_signature_and_docstring():
    text = twin(PAGES["reference/optimizers.md"], "reference/optimizers")
    assert "### `optax_muonplus.muonplus(learning_rate" in text and "Args:" in text


def test_a_page_is_listed_with_its_first_sentence():
    text = "\n```sh\npip\n```\n\nThis [page](x.md) says\nthings. More.\n"
    assert first_words(text) == "This page says things."
