"""The update rules of matrices by name: what differs between them, in one table."""

from typing import Any, Literal, NamedTuple

Name = Literal[
    "muonplus",
    "muon",
    "normuon",
    "adamuon",
    "aurora",
    "turbo_muon",
    "mano",
    "hyperball",
    "muoneq",
    "muoneq_max",
    "optax_muon",
    "adamw",
]
Norm = Literal["none", "col", "row", "col_row", "row_col", "long"]
"""Those of the library, which takes seconds to import."""


MOMENTUM = ("beta", "nesterov", "mu_dtype")
POLAR = ("polar", "ns_coeffs", "ns_steps", "preconditioning", "compute_dtype")
MUON = (*MOMENTUM, *POLAR, "bias_correction", "cautious_weight_decay")


class Rule(NamedTuple):
    """What other parts of the trainer need to know of a rule."""

    title: str
    """Its name in tables and figures."""
    function: str = ""
    """Its name in `optax_muonplus` or its `contrib`; empty: Optax's AdamW."""
    takes: tuple[str, ...] = (*MOMENTUM, *POLAR)
    """The settings that are its arguments, by the same names."""
    fixed: dict[str, Any] = {}  # noqa: RUF012 (no one changes it)
    """Its other arguments."""
    large: bool = False
    """Whether it changes each element of a matrix by about the learning rate."""
    records_inside: bool = False
    """Whether it is the library's own, with Optax's names of AdamW's arguments: its momentum and
    polar factor can be recorded too, not only gradient and update."""
    decays: bool = True
    """Whether it has weight decay."""
    holds_norms: bool = False
    """Whether its update may not be scaled: a matrix must have a known norm after."""
    size: dict[str, Any] = {}  # noqa: RUF012
    """Arguments of `omp.describe` that give the size of its updates."""
    remark: str = ""
    """What the table of parameters cannot say of it."""


def like_optax(title: str, function: str, **options: Any) -> Rule:
    """A rule with the shape factor of Optax's Muon."""
    return Rule(title, function, size={"norm": "none", "shape_scale": "max"}, **options)


def like_adam(title: str, function: str, **options: Any) -> Rule:
    """A rule whose updates have the size of Adam's."""
    size = {"norm": "none", "consistent_rms": 0.2}
    return Rule(title, function, large=True, size=size, **options)


RULES: dict[Name, Rule] = {
    "adamw": Rule("AdamW", large=True),
    "muon": Rule(
        "Muon", "muon", (*MUON, "shape_scale"), records_inside=True, size={"norm": "none"}
    ),
    # optax.contrib.muon: its shape factor, bias correction, and NAdamW on the other parameters.
    "optax_muon": like_optax(
        "Optax Muon",
        "muon",
        takes=MUON,
        fixed={"shape_scale": "max", "bias_correction": True},
        records_inside=True,
    ),
    "muonplus": Rule(
        "Muon+",
        "muonplus",
        (*MUON, "shape_scale", "norm", "norm_eps", "match_frobenius"),
        records_inside=True,
    ),
    # Its second moment keeps the Frobenius norm of a matrix.
    "normuon": like_optax("NorMuon", "normuon"),
    "adamuon": like_adam("AdaMuon", "adamuon"),
    "aurora": like_optax("Aurora", "aurora"),
    # It has its own polar step.
    "turbo_muon": like_optax("Turbo-Muon", "turbo_muon", takes=(*MOMENTUM, "compute_dtype")),
    # Its default is without Nesterov, and it has no polar step.
    "mano": like_adam("Mano", "mano", takes=("beta", "mu_dtype"), fixed={"nesterov": False}),
    "hyperball": Rule(
        "MuonH",
        "hyperball",
        decays=False,
        holds_norms=True,
        size={"norm": "none", "shape_scale": "none"},
        remark="hyperball: scale and rms are no sizes; a step is the rate times its matrix's norm",
    ),
    "muoneq": like_adam("MuonEq", "muoneq"),
    # With the shape factor of Optax's Muon, so that the two differ in one thing.
    "muoneq_max": like_optax(
        "MuonEq max", "muoneq", fixed={"shape_scale": "max", "consistent_rms": None}
    ),
}
