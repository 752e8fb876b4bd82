"""Names that other libraries have, and words with a typing error, are answered with those here."""

import inspect
import re

import pytest

import optax_muonplus as omp
from docs import names
from optax_muonplus.extras.argument_names import ALIASES
from tests.support.documents import PAGES

BASELINES = [
    value
    for name, value in vars(omp.baselines).items()
    if name.islower() and not name.startswith(("_", "scale_by"))
]


NAMES = inspect.signature(omp.muonplus).parameters


def test_the_argument_here_is_one():
    for given, row in ALIASES.items():
        assert given not in NAMES
        assert row.here in NAMES or row.how


@pytest.mark.parametrize("given", ALIASES)
def test_every_name_of_another_library_is_answered_with_an_argument_here(given):
    """By its name, or by what to pass: never by a guess at another one that looks alike."""
    with pytest.raises(TypeError) as caught:
        omp.muonplus(0.1, **{given: 1})
    message = str(caught.value).removeprefix(f"muonplus() has no argument {given}")
    assert "Did you mean" not in message and "it has learning_rate" not in message
    row = ALIASES[given]
    assert f"it is called {row.here} here" in message if not row.how else row.how in message
    for make in BASELINES:
        if given not in inspect.signature(make).parameters:  # "beta2" is NorMuon's
            with pytest.raises(TypeError, match=f"has no argument {given}[:.]"):
                make(0.1, **{given: 1})


@pytest.mark.parametrize("make", BASELINES)
def test_baselines_say_names_too(make):
    with pytest.raises(TypeError, match="it is called learning_rate here"):
        make(lr=0.1)
    with pytest.raises(TypeError, match="it is called beta here"):
        make(0.1, momentum=0.9)
    called, given = "it is called adam_b1 here", "adam_b1=0.9, adam_b2=0.95"
    with pytest.raises(TypeError, match=re.escape(called)):
        make(0.1, b1=0.9)
    with pytest.raises(TypeError, match=re.escape(given)):
        make(0.1, adamw_betas=(0.9, 0.95))
    with pytest.raises(TypeError, match=r"wrap the optimizer, omp\.transforms\.shard_state"):
        make(0.1, state_sharding="data")


def test_the_page_on_pytorch_has_every_name():
    """Its table is made of the names that messages know, by an extension of the site."""
    page = PAGES["start/from_pytorch.md"]
    assert re.search("^%names$", page, re.M)
    table = names.table()
    for given in ALIASES:
        assert f"`{given}`" in table
    cells = [cell for line in table.splitlines() for cell in line.split(" | ")]
    assert max(len(cell.split()) for cell in cells) <= 25


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"norm": "colrow"}, "col_row"),
        ({"norm": "Row-Col"}, "row_col"),
        ({"ns_coeffs": "polar-express"}, "polar_express"),
        ({"shape_scale": "Spectral"}, "spectral"),
        ({"polar": "newtonschulz"}, "newton_schulz"),
        ({"preconditioning": "frobenious"}, "frobenius"),
        ({"compute_dtype": "bf16"}, "bfloat16"),
        ({"mu_dtype": "fp32"}, "float32"),
        ({"mu_dtype": "bfloat"}, "bfloat16"),
    ],
)
def test_misspelt_words_are_asked_about(options, meant):
    with pytest.raises(ValueError, match=rf"Did you mean '{meant}'\?$"):
        omp.muonplus(0.1, **options)


def test_a_word_like_no_other_is_not():
    with pytest.raises(ValueError, match=r"Known: none, .*auto\.$"):
        omp.muonplus(0.1, norm="xyz")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MuonPlus", "Did you mean 'muonplus'?"),
        ("muon_plus", "Did you mean 'muonplus'?"),
        ("Muon", "Did you mean 'muon'?"),
        ("normuon", "It is optax_muonplus.baselines.normuon."),
        ("Orthogonalize", "It is optax_muonplus.polar.Orthogonalize."),
        ("xyzzy", "no attribute 'xyzzy'."),
        ("_private", "no attribute '_private'"),
    ],
)
def test_names_of_the_package_are_said(name, message):
    with pytest.raises(AttributeError, match=re.escape(message) + "$"):
        getattr(omp, name)
