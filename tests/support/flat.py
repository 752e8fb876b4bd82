"""Optimizers and links with all hyperparameters as keywords, where the library takes values."""

import dataclasses
import functools
import inspect

import optax_muonplus as omp
from optax_muonplus import baselines
from optax_muonplus.baselines import AdaMuon, Mano, Muown, NorMuon
from optax_muonplus.matrices import Normalize, ScaleByShape
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import AdamW, Momentum

# Attributes that only the library sets.
OWN = {"divisor", "bounded", "stored_transposed", "shape", "machine", "symmetric_kernel"}
PREFIXES = {"adamw": "adam_", "others": "adam_"}


def keywords(value, prefix=""):
    """``{keyword: (path of attributes, default)}`` of a value, and of the values in it."""
    found = {}
    for field in dataclasses.fields(value):
        default = getattr(value, field.name)
        if dataclasses.is_dataclass(default):
            for keyword, (path, inner) in keywords(default).items():
                found[keyword] = [(field.name, *path), inner]
        elif field.name not in OWN:
            found[prefix + field.name] = [(field.name,), default]
    return found


def changed(value, path, new):
    """``value`` with another attribute, which may be one of a value in it."""
    name, *rest = path
    inner = changed(getattr(value, name), rest, new) if rest else new
    return dataclasses.replace(value, **{name: inner})


def flat(factory, **values):
    """``factory`` with the attributes of the arguments ``values`` as keywords."""
    own = inspect.signature(factory).parameters
    parameters = {name: p for name, p in own.items() if name not in values}
    taken = {}
    for argument, value in values.items():
        for keyword, (path, default) in keywords(value, PREFIXES.get(argument, "")).items():
            if keyword in own:
                continue
            taken.setdefault(keyword, []).append((argument, path))
            parameters[keyword] = inspect.Parameter(
                keyword, inspect.Parameter.KEYWORD_ONLY, default=default
            )

    @functools.wraps(factory)
    def made(*args, **kwargs):
        unknown = kwargs.keys() - parameters.keys()
        if unknown:
            raise TypeError(f"got an unexpected keyword argument {sorted(unknown)}")
        parts = dict(values)
        for keyword in kwargs.keys() & taken.keys():
            for argument, path in taken[keyword]:
                parts[argument] = changed(parts[argument], path, kwargs[keyword])
        rest = {name: x for name, x in kwargs.items() if name not in taken}
        return factory(*args, **parts, **rest)

    made.__signature__ = inspect.Signature(list(parameters.values()))
    return made


def matrices_of(link, weight_dimension_numbers=None, sharding=None):
    """The transformation of matrices alone, of one link."""
    return omp.matrix_chain(
        link, weight_dimension_numbers=weight_dimension_numbers, sharding=sharding
    )


def muon_of(momentum=Momentum(), polar_factor=Orthogonalize()):
    """The rule that Hyperball is around."""
    return omp.matrix_chain(momentum, polar_factor)


def of_parts(name, link_of=None):
    """The optimizer of that name, with the parts of its link as arguments."""
    link_of = link_of or getattr(baselines, f"scale_by_{name}")
    parts = inspect.signature(link_of).parameters

    def made(learning_rate, *args, **given):
        link = link_of(**{key: given.pop(key) for key in parts})
        return getattr(baselines, name)(learning_rate, link, *args, **given)

    own = inspect.signature(getattr(baselines, name)).parameters.values()
    made.__signature__ = inspect.Signature(
        [p for p in own if p.name != "link"]
        + [p.replace(kind=p.KEYWORD_ONLY) for p in parts.values()]
    )
    others = "adamw" if "adamw" in made.__signature__.parameters else "others"
    return flat(made, **{others: AdamW()}, **{key: p.default for key, p in parts.items()})


scale_by_muonplus = flat(
    omp.scale_by_muonplus,
    momentum=Momentum(),
    polar_factor=Orthogonalize(),
    normalization=Normalize(),
    scale=ScaleByShape(),
)
orthogonalize = flat(omp.orthogonalize, polar_factor=Orthogonalize())
scale_by_normuon = flat(matrices_of, link=NorMuon())
scale_by_adamuon = flat(matrices_of, link=AdaMuon())
scale_by_mano = flat(matrices_of, link=Mano())
scale_by_muown = flat(matrices_of, link=Muown())
normuon = flat(baselines.normuon, link=NorMuon(), adamw=AdamW())
adamuon = flat(baselines.adamuon, link=AdaMuon(), adamw=AdamW())
mano = flat(baselines.mano, link=Mano(), adamw=AdamW())
aurora = of_parts("aurora")
hyperball = of_parts("hyperball", muon_of)
meqmuon = of_parts("meqmuon")
muoneq = of_parts("muoneq")
muown = flat(baselines.muown, link=Muown(), adamw=AdamW())
turbo_muon = of_parts("turbo_muon")
