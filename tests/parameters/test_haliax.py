"""Haliax's own layers: rows of an update are output units, seen by the layer's forward pass.

As in test_named_axes.py, with the package: skipped where it is not installed.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import optax_muonplus as omp
from tests.support.rows import assert_rows_are_outputs, row_optimizer

hax = pytest.importorskip("haliax", exc_type=ImportError)
hnn = hax.nn
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its calls of JAX, not ours

KEY = jax.random.key(0)
Batch, In, Mid, Out, Same, Layers, Experts, Vocab = hax.make_axes(
    Batch=1, In=5, Mid=7, Out=3, Same=5, Layers=2, Experts=4, Vocab=11
)


class Block(eqx.Module):
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        return Block(
            hnn.Linear.init(In, Mid, key=key), hnn.Linear.init(Mid, In, key=key, out_first=False)
        )

    def __call__(self, x):
        return x + hax.tanh(self.down(hax.tanh(self.up(x))))


def names_of(array):
    """Versions before 1.4 have the axes only."""
    return getattr(array, "axis_names", None) or [axis.name for axis in array.axes]


def token(*axes):
    return hax.random.normal(jax.random.key(1), axes)


def linear(In, Out, **options):
    axes = In if isinstance(In, tuple) else (In,)
    return hnn.Linear.init(In, Out, key=KEY, **options), lambda layer: layer(token(*axes))


def stacked():
    model = hnn.Stacked.init(Layers, Block)(key=jax.random.split(KEY, Layers.size))
    return model, lambda model: model.fold(token(In))


def experts():
    """One token for each expert."""
    model = hnn.MoELinear.init(Experts, In, Out, key=KEY)
    tokens = Batch.resize(Experts.size)
    sizes = hax.ones(Experts, dtype=jnp.int32)
    return model, lambda model: model(token(tokens, In), sizes)


def convolution():
    """One window of the kernel's size."""
    model = hnn.Conv.init(("H", "W"), In, Out, 3, key=KEY)
    window = token(In, hax.Axis("H", 3), hax.Axis("W", 3))
    return model, lambda model: model(window)


# By case: model and forward pass, and of each weight names of inputs and outputs.
CASES = {
    "out first": (lambda: linear(In, Out), {"weight": ("In", "Out")}),
    "in first": (lambda: linear(In, Out, out_first=False), {"weight": ("In", "Out")}),
    "square, in first": (lambda: linear(In, Same, out_first=False), {"weight": ("In", "Same")}),
    "several": (lambda: linear((In, Mid), (Out, Vocab)), {"weight": ("In Mid", "Out Vocab")}),
    "stacked": (
        stacked,
        {"stacked.up.weight": ("In", "Mid"), "stacked.down.weight": ("Mid", "In")},
    ),
    "experts": (experts, {"weight": ("In", "Out")}),
    "convolution": (convolution, {"weight": ("In H W", "Out")}),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_output_units(case):
    make, weights = CASES[case]
    model, forward = make()

    @jax.jit
    def first_update(params):
        def loss(params):
            y = forward(params).array
            return (y * jnp.arange(1.0, y.size + 1).reshape(y.shape)).sum()

        grads = eqx.filter_grad(loss)(params)
        tx = row_optimizer()
        return tx.update(grads, tx.init(params), params)[0]

    updates = first_update(eqx.filter(model, eqx.is_inexact_array))
    for path, sides in weights.items():
        update = updates
        for name in path.split("."):
            update = getattr(update, name)
        inputs, outputs = (side.split() for side in sides)
        assert_rows_are_outputs(update.array, names_of(update), inputs, outputs)


def test_embeddings_norms_and_heads_get_adamw():
    model = {
        "tokens": hnn.Embedding.init(Vocab, In, key=KEY),
        "scale": hnn.LayerNorm.init(In),
        "lm_head": hnn.Linear.init(In, Vocab, key=KEY),
        "mlp": hnn.MLP.init(In, Out, 8, 2, key=KEY),
    }
    labels = omp.partition_labels(eqx.filter(model, eqx.is_inexact_array))
    assert labels["tokens"].weight.array == labels["scale"].weight.array == "adam"
    assert labels["lm_head"].weight.array == "adam"
    assert [layer.weight.array for layer in labels["mlp"].layers] == ["muon"] * 3
    assert [layer.bias.array for layer in labels["mlp"].layers] == ["adam"] * 3
