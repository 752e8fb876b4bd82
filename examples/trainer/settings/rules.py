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
    "meqmuon",
    "muoneq",
    "muoneq_max",
    "muown",
    "optax_muon",
    "adamw",
]
Norm = Literal["none", "col", "row", "col_row", "row_col", "long", "long_row", "long_col", "auto"]
"""Those of the library, which takes seconds to import."""


class Rule(NamedTuple):
    """What other parts of the trainer need to know of a rule."""

    title: str
    """Its name in tables and figures."""
    large: bool = False
    """Whether it changes each element of a matrix by about the learning rate."""
    records_inside: bool = False
    """Whether momentum and polar factor can be recorded too, not only gradient and update."""
    decays: bool = True
    """Whether it has weight decay."""
    holds_norms: bool = False
    """Whether its update may not be scaled: a matrix, or its rows, must have a known norm after."""
    size: dict[str, Any] = {}  # noqa: RUF012 (no one changes it)
    """Arguments of `omp.describe` that give the size of its updates."""
    remark: str = ""
    """What the table of parameters cannot say of it."""


RULES: dict[Name, Rule] = {
    "adamw": Rule("AdamW", large=True),
    "muon": Rule("Muon", records_inside=True, size={"norm": "none"}),
    # optax.contrib.muon: its shape factor, bias correction, and NAdamW on the other parameters.
    "optax_muon": Rule(
        "Optax Muon", records_inside=True, size={"norm": "none", "shape_scale": "max"}
    ),
    "muonplus": Rule("Muon+", records_inside=True),
    # Its second moment keeps the Frobenius norm of a matrix.
    "normuon": Rule("NorMuon", size={"norm": "none", "shape_scale": "max"}),
    "adamuon": Rule("AdaMuon", large=True, size={"norm": "none", "consistent_rms": 0.2}),
    "aurora": Rule("Aurora", size={"norm": "none", "shape_scale": "max"}),
    "turbo_muon": Rule("Turbo-Muon", size={"norm": "none", "shape_scale": "max"}),
    "mano": Rule("Mano", large=True, size={"norm": "none", "consistent_rms": 0.2}),
    "hyperball": Rule(
        "MuonH",
        decays=False,
        holds_norms=True,
        size={"norm": "none", "shape_scale": "none"},
        remark="hyperball: scale and rms are no sizes; a step is the rate times its matrix's norm",
    ),
    "muown": Rule(
        "Muown",
        large=True,
        holds_norms=True,
        size={"norm": "none", "consistent_rms": 0.2},
        remark="muown: scale and rms are of the directions of rows; Adam changes the rows' sizes",
    ),
    "meqmuon": Rule("MeqMuon", large=True, size={"norm": "none", "consistent_rms": 0.2}),
    "muoneq": Rule("MuonEq", large=True, size={"norm": "none", "consistent_rms": 0.2}),
    # With the shape factor of Optax's Muon, so that the two differ in one thing.
    "muoneq_max": Rule("MuonEq max", size={"norm": "none", "shape_scale": "max"}),
}
