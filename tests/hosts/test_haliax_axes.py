"""Layers that name their own axes, as Haliax' do: stand-ins with their fields are here."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from examples.hosts.haliax_axes import dimension_numbers
from tests.support.rows import assert_rows_are_outputs, row_optimizer


@jax.tree_util.register_pytree_node_class
class NamedArray:
    """An array that names its axes, and is flattened without a name of its own."""

    def __init__(self, array, axis_names):
        self.array, self.axis_names = array, tuple(axis_names)

    def tree_flatten(self):
        return (self.array,), self.axis_names

    @classmethod
    def tree_unflatten(cls, names, children):
        return cls(children[0], names)


class Axis:
    def __init__(self, name):
        self.name = name


class Linear(eqx.Module):
    weight: NamedArray
    In: object = eqx.field(static=True)
    Out: object = eqx.field(static=True)


class Embedding(eqx.Module):
    weight: NamedArray
    Vocab: object = eqx.field(static=True)
    Embed: object = eqx.field(static=True)


class Norm(eqx.Module):
    axis: object = eqx.field(static=True)
    weight: NamedArray


class Stacked(eqx.Module):
    stacked: object
    Block: object = eqx.field(static=True)


A, B, C = (Axis(name) for name in "abc")
# Letters of the weight's axes, then of the layer's In and Out as Haliax may give them.
STAND_INS = {
    "out first": ("oi", Axis("i"), Axis("o")),
    "in first": ("io", Axis("i"), Axis("o")),
    "several": ("abijk", (Axis("i"), Axis("j"), Axis("k")), (A, B)),
    "in between": ("aibj", (Axis("i"), Axis("j")), (A, B)),
    "stacked": ("loi", "i", {"o": 4}),
    "stacked experts, in first": ("leio", (Axis("i"),), ("o",)),
    "square, in first": ("uv", Axis("u"), Axis("v")),
}
SIZES = dict(zip("abcdeijklouv", (2, 3, 4, 5, 3, 4, 2, 3, 2, 5, 4, 4), strict=True))


def letters(axes):
    axes = (axes,) if isinstance(axes, str | Axis) else axes
    return "".join(axis if isinstance(axis, str) else axis.name for axis in axes)


@pytest.mark.parametrize("case", STAND_INS)
def test_rows_are_output_units_in_every_layout(case):
    names, inputs, outputs = STAND_INS[case]
    rest = "".join(name for name in names if name not in letters(inputs) + letters(outputs))
    rng = np.random.default_rng(0)
    weight, x, c = (
        jnp.asarray(rng.normal(size=[SIZES[name] for name in axes]), jnp.float32)
        for axes in (names, rest + letters(inputs), rest + letters(outputs))
    )
    layer = Linear(NamedArray(weight, names), inputs, outputs)
    formula = f"{names},{rest}{letters(inputs)}->{rest}{letters(outputs)}"
    grads = jax.grad(lambda layer: (c * jnp.einsum(formula, layer.weight.array, x)).sum())(layer)
    tx, grads, params = row_optimizer(dimension_numbers), {"up": grads}, {"up": layer}
    update = jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params)
    assert_rows_are_outputs(update["up"].weight.array, names, letters(inputs), letters(outputs))


def named(*sizes):
    return NamedArray(jnp.ones(sizes), "abcdefgh"[: len(sizes)])


def test_tables_heads_norms_and_vectors_of_layers_are_no_matrices():
    mixing = NamedArray(jnp.ones((2, 4)), "la")
    model = {
        "tokens": Embedding(named(9, 4), A, B),
        "scale_of": Norm(A, named(4)),
        "decoder": Linear(named(9, 4), B, A),
        "back": Linear(named(9, 4), A, B),
        "blocks": Stacked({"mixing": mixing, "up": Linear(named(2, 4, 6), B, C)}, Axis("l")),
    }
    rows = {
        line.split()[0]: line.split()[2]
        for line in omp.describe(model, dimension_numbers).splitlines()[2:7]
    }
    assert rows == {
        "back/weight/0": "muon",
        "blocks/stacked/mixing/0": "adam",
        "blocks/stacked/up/weight/0": "muon",
        "decoder/weight/0": "adam",
        "scale_of/weight/0": "adam",
    }
    assert dimension_numbers(model)["tokens"].weight.array is None


def test_rules_come_before_axes():
    model = {"up": Linear(named(4, 6), A, B)}
    assert dimension_numbers(model)["up"].weight.array == omp.MuonDimensionNumbers((0,), (1,))
    assert dimension_numbers(model, [("up", None)])["up"].weight.array is None
