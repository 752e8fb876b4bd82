"""Optimizers and links with all hyperparameters as keywords, where the library takes values."""

import dataclasses
import functools
import inspect

import optax_muonplus as omp
from optax_muonplus import baselines
from optax_muonplus.matrices import Normalize, ScaleByShape
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import AdamW, Momentum

# Arguments that are values: the class, and what stands before its attributes in keywords.
VALUES = {
    "polar_factor": (Orthogonalize, ""),
    "adamw": (AdamW, "adam_"),
    "momentum": (Momentum, ""),
    "normalization": (Normalize, ""),
    "scale": (ScaleByShape, ""),
}
# Attributes that only the library sets.
OWN = {"divisor", "bounded", "stored_transposed", "shape", "machine", "symmetric_kernel"}


def attributes(name):
    """``{keyword: field}`` of the value that an argument is."""
    cls, prefix = VALUES[name]
    return {f"{prefix}{x.name}": x for x in dataclasses.fields(cls) if x.name not in OWN}


def flat(factory, **bases):
    """``factory`` with the attributes of its values as keywords.

    Args:
      bases: for an argument the value that keywords change, if it is not the default one.
    """
    given = inspect.signature(factory).parameters
    values = [name for name in given if name in VALUES]
    parameters = {name: p for name, p in given.items() if name not in values}
    for name in values:
        base = bases.get(name)
        for keyword, field in attributes(name).items():
            default = field.default if base is None else getattr(base, field.name)
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.setdefault(keyword, inspect.Parameter(keyword, kind, default=default))

    @functools.wraps(factory)
    def made(*args, **kwargs):
        rest = {name: x for name, x in kwargs.items() if name in given}
        for name in values:
            chosen = {x.name: kwargs[k] for k, x in attributes(name).items() if k in kwargs}
            if chosen:
                base = bases.get(name, VALUES[name][0]())
                rest[name] = dataclasses.replace(base, **chosen)
        unknown = kwargs.keys() - parameters.keys()
        assert not unknown, unknown
        return factory(*args, **rest)

    made.__signature__ = inspect.Signature(list(parameters.values()))
    return made


def link(cls):
    """A transformation of one link of a baseline."""

    def made(
        momentum=None,
        polar_factor=None,
        weight_dimension_numbers=None,
        sharding=None,
        **options,
    ):
        polar_factor = polar_factor or Orthogonalize()
        parts = {"momentum": momentum or Momentum(), "polar_factor": polar_factor}
        fields = {x.name for x in dataclasses.fields(cls)}
        return omp.matrix_chain(
            cls(**{k: x for k, x in parts.items() if k in fields}, **options),
            weight_dimension_numbers=weight_dimension_numbers,
            sharding=sharding,
        )

    parameters = {
        name: p
        for name, p in inspect.signature(made).parameters.items()
        if name != "options" and (name in inspect.signature(cls).parameters or name not in VALUES)
    }
    for name, p in inspect.signature(cls).parameters.items():
        parameters.setdefault(name, p.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    kind = inspect.Parameter.KEYWORD_ONLY
    made.__signature__ = inspect.Signature([p.replace(kind=kind) for p in parameters.values()])
    return made


scale_by_muonplus = flat(omp.scale_by_muonplus)
scale_by_normuon = flat(link(baselines.NorMuon))
scale_by_adamuon = flat(link(baselines.AdaMuon))
scale_by_mano = flat(link(baselines.Mano))
orthogonalize = flat(omp.orthogonalize)
normuon = flat(baselines.normuon)
adamuon = flat(baselines.adamuon)
mano = flat(baselines.mano)
turbo_muon = flat(
    baselines.turbo_muon, polar_factor=Orthogonalize("turbo", 4, preconditioning="aol_out")
)
