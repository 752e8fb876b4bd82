"""The rivals built by name, and several steps of them."""

import dataclasses

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

import optax_muonplus as omp
from optax_muonplus import contrib
from optax_muonplus.matrices import ScaleByShape
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import Momentum

STEPS = 5
# Kernels as Flax stores them, (in, out): W is their transpose.
SHAPES = {"tall": (12, 20), "wide": (20, 12), "square": (16, 16)}
NAMES = (
    "normuon",
    "adamuon",
    "aurora",
    "hyperball",
    "mano",
    "muoneq",
    "turbo_muon",
)
# The others are chains of functions on the momentum of Muon.
WITH_STATE = ("normuon", "adamuon", "hyperball", "mano")


FIELDS = {
    part: [field.name for field in dataclasses.fields(part)] for part in (Momentum, Orthogonalize)
}
DEFAULTS = {
    "mano": {Momentum: Momentum(nesterov=False)},
    "aurora": {Orthogonalize: contrib.Aurora().polar_factor},
    "turbo_muon": {Orthogonalize: contrib.scale_by_turbo_muon().chain.parts[1].polar_factor},
    "muoneq": {ScaleByShape: ScaleByShape(consistent_rms=0.2)},
}
MAKE = {
    "normuon": lambda m, p, s, **own: contrib.NorMuon(momentum=m, polar_factor=p, **own),
    "adamuon": lambda m, p, s, **own: contrib.AdaMuon(momentum=m, polar_factor=p, **own),
    "aurora": lambda m, p, s, **own: contrib.scale_by_aurora(
        m, contrib.Aurora(polar_factor=p, **own)
    ),
    "hyperball": lambda m, p, s: contrib.scale_by_muon(m, p),
    "mano": lambda m, p, s, **own: contrib.Mano(momentum=m, **own),
    "muoneq": lambda m, p, s, **own: contrib.scale_by_muoneq(m, contrib.Balance(**own), p, s),
    "turbo_muon": lambda m, p, s: contrib.scale_by_turbo_muon(m, p),
}


def rule_of(name, **options):
    """The rule with options of its parts by name."""
    parts = []
    for part in (Momentum, Orthogonalize):
        names = [field for field in FIELDS[part] if field in options]
        given = {field: options.pop(field) for field in names}
        default = DEFAULTS.get(name, {}).get(part, part())
        parts.append(dataclasses.replace(default, **given))
    scale = DEFAULTS.get(name, {}).get(ScaleByShape, ScaleByShape("max"))
    return MAKE[name](*parts, scale, **options)


def optimizer(name, rate, rule=None, **options):
    """The optimizer of a rule. Hyperball has its rate inside."""
    rule = rule_of(name) if rule is None else rule
    if name == "hyperball":
        return contrib.hyperball(rate, rule, **options)
    return omp.optimizer(rule, rate, **options)


OUTER = ("weight_decay", "weight_decay_mask", "others", "where")


def build(name, rate=0.05, **options):
    where = {x: options.pop(x) for x in ("weight_dimension_numbers", "sharding") if x in options}
    outer = {x: options.pop(x) for x in OUTER if x in options}
    if where:
        outer["where"] = omp.Matrices(**where)
    return optimizer(name, rate, rule_of(name, **options), **outer)


def decay(name, weight_decay):
    """The option, but for Hyperball, which has no decay."""
    return {} if name == "hyperball" else {"weight_decay": weight_decay}


def trees(seed=0, shapes=SHAPES, dtype=np.float32):
    rng = np.random.default_rng(seed)
    params = {k: rng.normal(size=s).astype(dtype) for k, s in shapes.items()}
    grads = [{k: rng.normal(size=s).astype(dtype) for k, s in shapes.items()} for _ in range(STEPS)]
    return params, grads


def run(tx, params, grads):
    """Parameters after each step."""
    state, update, seen = tx.init(params), jax.jit(tx.update), []
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(params)
    return seen, state


def assert_sharded_is_alone(make, params, grads, specs, kind, sizes=(2, 2)):
    """A mesh gives the parameters of one device, and arrays of the state lie as they do."""
    mesh = jax.make_mesh(sizes, ("fsdp", "tensor"), (kind, kind))
    places = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    alone, _ = run(make(), params, grads)
    tx = make(sharding=places)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, places)
        state = jax.jit(tx.init)(placed)
        sharded, _ = run(tx, placed, [jax.device_put(g, places) for g in grads])
    of_shape = {params[name].shape: place for name, place in places.items()}
    for x in jax.tree.leaves(state):
        if x.ndim > 1 and x.shape in of_shape:
            assert x.sharding.is_equivalent_to(of_shape[x.shape], x.ndim)
    for name in params:
        np.testing.assert_allclose(sharded[-1][name], alone[-1][name], rtol=0, atol=3e-5)
        assert sharded[-1][name].sharding.is_equivalent_to(places[name], params[name].ndim)
