"""Names that other libraries have, and words with a typing error, are answered with those here."""

import inspect
import re

import pytest

import optax_muonplus as omp

BASELINES = [
    value
    for name, value in vars(omp.baselines).items()
    if name.islower() and not name.startswith(("_", "scale_by"))
]


@pytest.mark.parametrize(
    ("given", "here"),
    {
        "momentum": "beta",
        "lr": "learning_rate",
        "wd": "weight_decay",
        "b1": "adam_b1",
        "b2": "adam_b2",
        "epsilon": "eps",
        "adam_lr": "adam_learning_rate",
        "backend_steps": "ns_steps",
        "mask": "weight_decay_mask",
        "weight_dimension_numbers": "muon_weight_dimension_numbers",
    }.items(),
)
def test_names_of_other_libraries_are_said_here(given, here):
    for make in (omp.muonplus, omp.muon):
        message = rf"^{make.__name__}\(\) has no argument {given}: it is called {here} here\.$"
        with pytest.raises(TypeError, match=message):
            make(learning_rate=0.1, **{given: 0.5})
    with pytest.raises(TypeError, match=f"it is called {here} here"):
        omp.describe({}, **{given: 0.5})


def test_the_argument_here_is_one():
    from optax_muonplus._argument_names import ELSEWHERE

    names = inspect.signature(omp.muonplus).parameters
    for given, here in ELSEWHERE.items():
        assert given not in names and here in names


@pytest.mark.parametrize("make", BASELINES)
def test_baselines_say_names_too(make):
    with pytest.raises(TypeError, match="it is called learning_rate here"):
        make(lr=0.1)
    with pytest.raises(TypeError, match=r"b1: it is in (adamw|others) here"):
        make(0.1, b1=0.9)
    with pytest.raises(TypeError, match=r"Options of the rule itself are in link\.$"):
        make(0.1, momentum=0.9)


def test_a_misspelt_keyword_is_asked_about_and_others_are_listed():
    with pytest.raises(TypeError, match=r"no argument nestrov\. Did you mean 'nesterov'\?"):
        omp.muonplus(0.1, nestrov=True)
    with pytest.raises(TypeError, match="no argument xyzzy: it has learning_rate, ns_coeffs, "):
        omp.muonplus(0.1, xyzzy=1)


def test_the_signature_stays():
    assert list(inspect.signature(omp.muonplus).parameters)[:2] == ["learning_rate", "ns_coeffs"]
    assert inspect.signature(omp.muon).parameters["norm"].default == "none"
    kinds = {x.kind for x in inspect.signature(omp.muonplus).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


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
