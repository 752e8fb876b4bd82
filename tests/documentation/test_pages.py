"""Pages: short titles and cells, searches that lead to them, pictures, and their Markdown twins."""

import re

import pytest

from docs.drawings import DRAWINGS
from docs.ext.headings import expanded
from docs.ext.twins import first_words, twin
from docs.searches import FIRST
from tests.support.documents import PAGES, ROOT

FILES = ("README.md", "benchmarks/README.md", "examples/README.md", "CONTRIBUTING.md")
CELLS = {name: (ROOT / name).read_text() for name in FILES}


@pytest.mark.parametrize("page", PAGES)
def test_titles_have_five_words_and_the_twin_only_markdown(page):
    """The sidebar and a phone show titles whole."""
    title = re.search(r"^# (.+)$", PAGES[page], re.M)
    assert title is None or len(title[1].split()) <= 5  # the changelog has its in another file
    text = twin(expanded(PAGES[page]), page.removesuffix(".md"))
    assert not re.search(r"\{(index|toctree|code-cell)\}|^\.\. auto|^%section", text, re.M)
    assert not text.startswith("---\n")


@pytest.mark.parametrize("document", [*CELLS, *PAGES])
def test_cells_of_tables_have_25_words_at_most(document):
    """A link counts by its words, and code as one word; longer ones are read by nobody."""
    text = re.sub(r"^( *)```.*?^\1```$", "", (CELLS | PAGES)[document], flags=re.M | re.S)
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", text))
    for line in re.findall(r"^\|.*\|$", text, re.M):
        for cell in line.split("|")[1:-1]:
            assert len(cell.split()) <= 25, f"{document}: {cell}"


def test_the_table_of_choices_fits_one_screen_and_queries_lead_to_pages():
    assert len(re.findall(r"^\|.*\|$", PAGES["choose.md"], re.M)) <= 2 + 8
    assert {f"{page}.md" for page in FIRST.values()} <= set(PAGES)


@pytest.mark.parametrize("name", ["chain", "shakespeare"])
def test_pictures_of_the_readme_are_drawn_from_the_results(name):
    written = (ROOT / "docs" / "_static" / f"{name}.svg").read_text()
    assert written == DRAWINGS[name]().svg() + "\n", "python -m docs.drawings writes it again"


def test_a_twin_has_relative_links_python_code_and_a_first_sentence():
    cell = "```{code-cell}\n:tags: [remove-input]\nx = 1\n```\n"
    text = f"---\na: b\n---\n\n# A\n\n{cell}[b](/c/d.md#e)\n"
    assert twin(text, "c/f") == "# A\n\n```python\nx = 1\n```\n[b](d.md#e)\n"
    text = twin(PAGES["reference/optimizers.md"], "reference/optimizers")
    assert "### `optax_muonplus.muonplus(learning_rate" in text and "Args:" in text
    text = "\n```sh\npip\n```\n\nThis [page](x.md) says\nthings. More.\n"
    assert first_words(text) == "This page says things."
