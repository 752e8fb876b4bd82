r"""Turbo-Muon: Muon with four Newton-Schulz steps after a scaling that brings matrices nearer to 1.

Source: Boissin et al., arXiv:2512.04632; its code, thib-s/flash-newton-schulz @145260f.
"""

from optax_muonplus._optimizers.muonplus import muonplus
from optax_muonplus._optimizers.variants import Default, variant


@variant(
    muonplus,
    ns_coeffs=Default("turbo"),
    ns_steps=Default(4),
    shape_scale=Default("max"),
    norm="none",
    norm_eps=0.0,
    match_frobenius=False,
    consistent_rms=None,
    bias_correction=False,
    preconditioning="aol_out",
    adaptive=False,
)
def turbo_muon() -> None:
    r"""Turbo-Muon on the matrices, AdamW on everything else.

    Before the iteration the shorter side of a matrix X is scaled, so that no singular value is
    above 1 (Gershgorin), by

    .. math:: s_i = \Big(\textstyle\sum_j |(X X^T)_{ij}|\Big)^{-1/2}

    which brings most of them nearer to 1 than a division by the Frobenius norm does; four steps
    then are enough. The result is the polar factor of the scaled matrix, which differs from that of
    X unless its rows are orthogonal. A square matrix is scaled on its output side, as in the code:
    ``preconditioning="aol_out"`` (``"aol"`` has the input side, as Optax). The state is Muon's.

    Arguments are those of :func:`optax_muonplus.muonplus`; ``"turbo"`` are the rows of the
    code, the last four of ``"dion"``. Its learning rate is 0.02.

    Raises:
      ValueError: as :func:`optax_muonplus.muonplus`.

    Source: Boissin et al., arXiv:2512.04632; thib-s/flash-newton-schulz @145260f.
    """
