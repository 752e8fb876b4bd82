"""The two forms of the iteration as functions, by the fast polar factor."""

import dataclasses

from optax_muonplus.polar import Orthogonalize, polar_factor


def plain(x, options=Orthogonalize()):
    return polar_factor(x, dataclasses.replace(options, polar="newton_schulz"))


def gram(x, options=Orthogonalize()):
    return polar_factor(x, dataclasses.replace(options, polar="gram"))
