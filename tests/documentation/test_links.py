"""Links between documents lead to files, to headings that exist, and not to tops of long pages."""

import re

import pytest

from docs.ext.headings import expanded, outline, slug
from tests.support.documents import CONTRIBUTING, PAGES, ROOT

DOCUMENTS = [
    *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("*.md")),
    "benchmarks/README.md",
    "examples/README.md",
    *(f"docs/{page}" for page in PAGES),
]
LONG = 1500  # words of three screens of a laptop
# Where whole pages are listed, and where files are named as such.
LISTS = re.compile(r"^## (Where to read on|What is where)\n.*?(?=^## |\Z)", re.M | re.S)


def without_code(text):
    return re.sub(r"^( *)```(?!\{picture\}).*?^\1```$", "", text, flags=re.M | re.S)


def links(text):
    """Targets in the repository, without those of other hosts."""
    found = re.findall(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)", without_code(text))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


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
            anchors = {slug(title) for *_, title in outline(expanded(linked.read_text()))}
            assert anchor in anchors, f"{document} links to {target}"


def test_files_that_contributing_names_exist():
    """Paths in code, from the root or within the library; a name alone is in a room beside it."""
    named = re.findall(r"`([\w./]*\w\.(?:py|txt|md|yml|svg))`", CONTRIBUTING)
    files = {path.as_posix() for path in (ROOT / "optax_muonplus").rglob("*.py")}
    for name in named:
        found = (ROOT / name).exists() or any(file.endswith(f"/{name}") for file in files)
        made = name == "llms.txt"  # by the build of the site
        assert found or made or (ROOT / ".github" / "workflows" / name).exists(), name


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != "CHANGELOG.md"])
def test_no_link_leads_to_the_top_of_a_long_page(document):
    """A reader who looks for one number does not find it on a page of thirty screens."""
    path = ROOT / document
    for target in links(LISTS.sub("", path.read_text())):
        linked = (path.parent / target).resolve()
        is_page = linked.suffix == ".md" and linked.is_file() and linked != ROOT / "CHANGELOG.md"
        if is_page and (ROOT / "results") not in linked.parents:  # records are read whole
            words = len(expanded(linked.read_text()).split())
            assert words < LONG, f"{document} links to the top of {target}, which has {words} words"
