"""Muon: Muon+ without the normalization."""

from optax_muonplus._optimizers.muonplus import muonplus
from optax_muonplus._optimizers.variants import variant


@variant(muonplus, norm="none")
def muon() -> None:
    """Muon: :func:`muonplus` with ``norm="none"``, and every other argument the same.

    To get ``optax.contrib.muon``'s update rather than the Muon+ paper's baseline, add
    ``shape_scale="max", bias_correction=True, adam_nesterov=True``.

    Source: Jordan et al., *Muon*, https://kellerjordan.github.io/posts/muon/ (2024).
    """
