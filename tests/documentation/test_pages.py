"""README and pages: short titles, cells and sentences; links that lead somewhere; few words."""

import re

import pytest

from tests.support.documents import PAGES, README, ROOT

READMES = (
    *("examples/README.md", "lab/README.md", "lab/benchmarks/README.md"),
    "lab/results/experiments/README.md",
)
OTHERS = ("CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md")
DOCUMENTS = {"README.md": README}
DOCUMENTS |= {f"docs/{name}": text for name, text in PAGES.items()}
DOCUMENTS |= {name: (ROOT / name).read_text() for name in OTHERS if (ROOT / name).exists()}
# Lists of publications, whose numbers are their names.
SENTENCES = [name for name in DOCUMENTS if name != "docs/reference/bibliography.md"]


def without_code(text):
    text = re.sub(r"\A---\n.*?^---$", "", text, flags=re.M | re.S)
    text = re.sub(r"^( *)(```|\$\$).*?^\1\2$", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`]*`", "CODE", text)


def prose(text):
    """Sentences of paragraphs and bullets: no tables, headings and targets of links."""
    text = re.sub(r"^(\|.*|#.*|!\[.*|:::.*|%.*)$", "\n", without_code(text), flags=re.M)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", text, flags=re.M):
        yield from re.split(r"(?<=[.:?!])\**\s+(?=[A-Z`*\"(\[])", " ".join(block.split()))


@pytest.mark.parametrize("document", SENTENCES)
def test_sentences_have_at_most_35_words_and_four_figures(document):
    for sentence in prose(DOCUMENTS[document]):
        assert len(sentence.split()) <= 35, f"{document}: {sentence}"
        figures = re.findall(
            r"(?<![\w.:/-])[\u2212-]?\d[\d.,]*(?![\w/])", re.sub(r"arXiv:\S+", "", sentence)
        )
        assert len(figures) <= 4, f"{document}, {len(figures)} figures: {sentence}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_cells_of_tables_have_25_words_at_most(document):
    text = re.sub(r"\]\([^)]*\)", "]", without_code(DOCUMENTS[document]))
    for line in re.findall(r"^\|.*\|$", text, re.M):
        for cell in line.split("|")[1:-1]:
            assert len(cell.split()) <= 25, f"{document}: {cell}"


@pytest.mark.parametrize("page", PAGES)
def test_titles_have_five_words(page):
    """The sidebar and a phone show titles whole."""
    title = re.search(r"^# (.+)$", PAGES[page], re.M)
    assert title is None or len(title[1].split()) <= 5


def test_there_are_few_words():
    """A page that grows makes another one shorter."""
    words = {name: len(text.split()) for name, text in DOCUMENTS.items()}
    assert words["README.md"] <= 900
    assert words["docs/choose.md"] <= 350
    assert len((ROOT / "examples/README.md").read_text().split()) <= 700
    assert words["docs/explain/evidence.md"] <= 1_700
    assert sum(words.values()) <= 25_500
    assert PAGES["reference/glossary.md"].count("\n: ") <= 25


def slug(title):
    """The anchor of a heading, as GitHub and MyST make it."""
    title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("document", [*DOCUMENTS, *READMES, "CHANGELOG.md"])
def test_links_lead_to_files_and_headings(document):
    path = ROOT / document
    text = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{document} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.M)
            assert anchor in map(slug, headings), f"{document} links to {target}"


FOLDERS = "docs|examples|lab|optax_muonplus|requirements|tests|\\.ci"


@pytest.mark.parametrize("document", [*DOCUMENTS, *READMES])
def test_files_and_programs_that_are_named_exist(document):
    """But for blocks that begin with the checkout of another commit."""
    text = (ROOT / document).read_text()
    text = re.sub(r"^```sh\ngit worktree .*?^```$", "", text, flags=re.M | re.S)
    for path in re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./-]*\w)", text):
        assert (ROOT / path).exists(), f"{document} names {path}"
    for name in re.findall(r"python -m ((?:examples|lab)[\w.]*\w)", text):
        path = ROOT / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), f"{document} names {name}"
