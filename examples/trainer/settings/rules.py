"""The update rules of matrices by name: what differs between them, in one table."""

from typing import Any, Literal, NamedTuple

Name = Literal["muonplus", "muon", "normuon", "adamuon", "turbo_muon", "mano", "adamw"]
Norm = Literal["none", "col", "row", "col_row", "row_col", "long"]
"""Those of the library, which takes seconds to import."""

MOMENTUM = ("beta", "nesterov")
MUON = (*MOMENTUM, "polar", "ns_coeffs", "ns_steps", "compute_dtype")


class Rule(NamedTuple):
    """What other parts of the trainer need to know of a rule."""

    title: str
    """Its name in tables and figures."""
    takes: tuple[str, ...]
    """The settings that are its arguments, by the same names."""
    large: bool = False
    """Whether it changes each element of a matrix by about the learning rate, as Adam does."""
    size: dict[str, Any] = {}  # noqa: RUF012 (no one changes it)
    """Arguments of `omp.describe` that give the size of its updates."""


LIKE_OPTAX = {"norm": "none", "shape_scale": "max"}
LIKE_ADAM = {"norm": "none", "consistent_rms": 0.2}

RULES: dict[Name, Rule] = {
    "adamw": Rule("AdamW", (), large=True),
    "muon": Rule("Muon", (*MUON, "shape_scale"), size={"norm": "none"}),
    "muonplus": Rule("Muon+", (*MUON, "shape_scale", "norm", "norm_eps", "match_frobenius")),
    # Its second moment keeps the Frobenius norm of a matrix.
    "normuon": Rule("NorMuon", MUON, size=LIKE_OPTAX),
    "adamuon": Rule("AdaMuon", MUON, large=True, size=LIKE_ADAM),
    # It has its own polar step.
    "turbo_muon": Rule("Turbo-Muon", (*MOMENTUM, "compute_dtype"), size=LIKE_OPTAX),
    # It has no polar step, and is without Nesterov.
    "mano": Rule("Mano", ("beta",), large=True, size=LIKE_ADAM),
}
