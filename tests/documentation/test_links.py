"""Links between the repository's documents lead to files, and to headings that exist."""

import re

import pytest

from tests.support.documents import PAGES, ROOT

DOCUMENTS = [
    *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("*.md")),
    "benchmarks/README.md",
    "examples/README.md",
    *(f"docs/{page}" for page in PAGES),
]


def without_code(text):
    return re.sub(r"^( *)```(?!\{picture\}).*?^\1```$", "", text, flags=re.M | re.S)


def headings(path):
    """Anchors of a document's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.+)$", without_code(path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_and_headings(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{document} links to {target}"
        if anchor:
            assert anchor in headings(linked), f"{document} links to {target}"
