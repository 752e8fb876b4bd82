"""Comments have a subject, docstrings say the thing, and those of functions begin with a verb."""

import ast
import inspect
import io
import re
import tokenize

import pytest

import optax_muonplus as omp
from tests.support.documents import ROOT

PACKAGE = ROOT / "optax_muonplus"
DOORS = [omp, *(getattr(omp, name) for name in dir(omp))]
PUBLIC = {name for door in DOORS if inspect.ismodule(door) for name in dir(door)}
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
# "Of both sides ..." takes its noun from the code below it.
HEADLESS = re.compile(r"#:? *(Of|As|That of|Those of|Whether|Which) ", re.I)
PRONOUN = re.compile(r"(Of|As|The same|The inverse of|Those of|That of|Both|It)\b")
VERB = re.compile(r"(Is|Has|Does|[A-Z][a-z]{2,}s),? ")
NOUNS = re.compile(
    r"(Axes|Bytes|Dimensions|Lines|Links|Matrices|Names|Numbers|Paths|Rules|Shapes)\b"
)


def first_lines(text):
    """Comments at the end of a line, and of those that stand below each other the first one."""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            if not alone or last != token.start[0] - 1:
                yield token.string
            last = token.start[0] if alone else -1


def is_verb(docstring):
    return bool(VERB.match(docstring) and not NOUNS.match(docstring))


def functions(tree):
    """Functions that do something: a property has a value, and a public name may be a thing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name not in PUBLIC:
            names = {ast.unparse(x).rpartition(".")[2] for x in node.decorator_list}
            if not names & {"property", "cached_property"}:
                yield node


@pytest.mark.parametrize("name", FILES)
def test_sentences_have_a_subject_and_say_the_thing(name):
    text = (PACKAGE / name).read_text()
    found = [x for x in first_lines(text) if HEADLESS.match(x)]
    for node in ast.walk(tree := ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            said = ast.get_docstring(node) or "-"
            found += [said] if PRONOUN.match(said) else []
    said = [ast.get_docstring(node) or "Has none" for node in functions(tree)]
    assert found + [x.splitlines()[0] for x in said if not is_verb(x + " ")] == []


def test_the_test_knows_what_it_looks_for():
    comments = "# Of both\n# sides\nx = 1  # of items\n# A noun\n# of both sides\n"
    assert [bool(HEADLESS.match(x)) for x in first_lines(comments)] == [True, True, False]
    assert PRONOUN.match("Those of ``f``.") and not PRONOUN.match("Ofsets are counted.")
    said = {"Returns x.": True, "Whether x.": False, "Names of x.": False, "The x.": False}
    assert {text: is_verb(text) for text in said} == said
