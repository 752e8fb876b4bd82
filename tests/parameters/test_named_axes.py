"""Layers that name their own axes, as Haliax's do: rows are output units, however a weight lies.

Haliax is no package of the dev extra: its own layers are in test_haliax.py, skipped where it
is missing, and stand-ins with its fields are here.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus.trees import reader_of, resolve
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
    bias: NamedArray | None
    In: object = eqx.field(static=True)
    Out: object = eqx.field(static=True)


class Embedding(eqx.Module):
    weight: NamedArray
    Vocab: object = eqx.field(static=True)
    Embed: object = eqx.field(static=True)


class Norm(eqx.Module):
    axis: object = eqx.field(static=True)
    weight: NamedArray


SHAPES = [((4,), "a"), ((4, 6), "ab")]
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
def test_stand_ins_of_every_layout(case):
    names, inputs, outputs = STAND_INS[case]
    rest = "".join(name for name in names if name not in letters(inputs) + letters(outputs))
    rng = np.random.default_rng(0)
    weight, x, c = (
        jnp.asarray(rng.normal(size=[SIZES[name] for name in axes]), jnp.float32)
        for axes in (names, rest + letters(inputs), rest + letters(outputs))
    )
    layer = Linear(NamedArray(weight, names), None, inputs, outputs)
    formula = f"{names},{rest}{letters(inputs)}->{rest}{letters(outputs)}"
    grads = jax.grad(lambda layer: (c * jnp.einsum(formula, layer.weight.array, x)).sum())(layer)
    tx, grads, params = row_optimizer(), {"up": grads}, {"up": layer}
    update = jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params)
    assert_rows_are_outputs(update["up"].weight.array, names, letters(inputs), letters(outputs))


def named(*sizes):
    return NamedArray(jnp.ones(sizes), "abcdefgh"[: len(sizes)])


def test_describe_says_that_the_layer_was_read():
    model = {
        "tokens": Embedding(named(9, 4), A, B),
        "layers": {
            "scale_of": Norm(Axis("b"), named(2, 4)),
            "up": Linear(named(2, 4, 6), NamedArray(jnp.ones((2, 6)), "ac"), B, C),
            "patch_embed": Linear(named(4, 6), None, A, B),
        },
        "lm_head": Linear(named(9, 4), None, B, A),
        "flat/weight": named(3, 4),
    }
    rows = {line.split()[0]: line for line in omp.describe(model).splitlines()[2:]}
    assert rows["layers/up/weight/0"].endswith("layer: b -> c (Haliax)")
    assert "6x4x2" in rows["layers/up/weight/0"]
    assert "6x4x1" in rows["layers/patch_embed/weight/0"]
    assert rows["layers/scale_of/weight/0"].endswith("norm (Haliax)")
    assert rows["tokens/weight/0"].endswith("embedding (Haliax)")
    assert rows["lm_head/weight/0"].endswith("head")
    assert rows["flat/weight/0"].endswith("weight: out, in (Equinox, PyTorch, Haliax)")


def test_rules_of_the_user_and_missing_weights():
    layers = {"up": Linear(named(4, 6), None, A, B), "off": Linear(None, None, A, B)}
    assert omp.partition_labels(layers)["up"].weight.array == "muon"
    dims = omp.muon_dimension_numbers(layers, [("up/weight", omp.MuonDimensionNumbers(1, 0))])
    assert dims["up"].weight.array == omp.MuonDimensionNumbers(1, 0)
    other = Linear(named(4, 6), None, Axis("nowhere"), B)  # its axes were renamed
    assert omp.muon_dimension_numbers(other).weight.array == omp.MuonDimensionNumbers(1, 0)
    single = Linear(named(4, 1), None, A, ())
    assert omp.partition_labels(single).weight.array == "adam"


def test_heads_are_all_outputs_but_the_last():
    """Levanter's queries have axes of key heads, of queries for each, and within a head."""
    weight = NamedArray(jnp.ones((2, 3, 4)), "abc")
    model = {"q_proj": Linear(weight, None, C, (A, B)), "o_proj": Linear(weight, None, (A, B), C)}

    def read(**options):
        found = omp.per_head(3, **options)(model)
        return [
            jax.tree.leaves(found[name], is_leaf=lambda x: isinstance(x, omp.MuonDimensionNumbers))
            for name in model
        ]

    numbers = omp.MuonDimensionNumbers
    assert read() == [[numbers((2,), (1,))], [numbers((0, 1), (2,))]]
    assert read(output=True) == [[numbers((2,), (1,))], [numbers((1,), (2,))]]
    assert "per head" in omp.describe(model, omp.per_head())


class Stacked(eqx.Module):
    stacked: object
    Block: object = eqx.field(static=True)


class Filter(eqx.Module):
    """A layer of a user's own, whose parameters no rule knows."""

    frequency: NamedArray
    mixing: NamedArray
    up: Linear


def test_a_vector_of_each_layer_is_no_matrix():
    """Also where stacks are in stacks. What has two axes of its own is asked for, as ever."""
    one = Filter(named(4), named(4, 6), Linear(named(4, 6), None, A, B))
    assert omp.partition_labels(one).mixing.array == "muon"

    def stacked(letters):
        number = tuple(range(2, 2 + len(letters)))
        arrays = [(NamedArray(jnp.ones((*number, *s)), (*letters, *n))) for s, n in SHAPES]
        module = Filter(arrays[0], arrays[1], Linear(arrays[1], None, A, B))
        for letter in reversed(letters):
            module = Stacked(module, Axis(letter))
        return {"blocks": module}

    for letters in ("l", "km"):
        numbers = omp.muon_dimension_numbers(stacked(letters), [("mixing", None)])
        is_leaf = lambda x: isinstance(x, omp.MuonDimensionNumbers)  # noqa: E731
        expected = omp.MuonDimensionNumbers((len(letters),), (len(letters) + 1,))
        assert jax.tree.leaves(numbers, is_leaf=is_leaf) == [expected]
        assert "one vector for each layer (Haliax)" in omp.describe(stacked(letters))
        with pytest.raises(ValueError, match="mixing"):
            omp.muon_dimension_numbers(stacked(letters))


def test_a_layer_from_embeddings_to_the_vocabulary_is_a_head():
    table = Embedding(named(9, 4), A, B)
    position = Embedding(NamedArray(jnp.ones((5, 4)), "pb"), Axis("p"), B)
    model = {
        "tokens": table,
        "positions": position,
        "decoder": Linear(named(9, 4), None, B, A),
        "out_first": Linear(NamedArray(jnp.ones((4, 9)), "ba"), None, B, A),
        "mixer": Linear(NamedArray(jnp.ones((5, 6)), "pm"), None, Axis("m"), Axis("p")),
        "back": Linear(named(9, 4), None, A, B),
    }
    labels = omp.partition_labels(model)
    found = {name: layer.weight.array for name, layer in labels.items()}
    heads = dict.fromkeys(["tokens", "positions", "decoder", "out_first"], "adam")
    assert found == heads | {"mixer": "muon", "back": "muon"}


def test_what_a_layer_says_is_not_asked_about_in_a_stack():
    """Beside it others have as many first entries, which looks like layers."""
    others = {"w": jnp.ones((3, 8, 8)), "g": jnp.ones((3, 8))}
    up = Linear(NamedArray(jnp.ones((3, 8)), "ab"), None, A, B)
    leaves = resolve({"layers": {**others, "up": up}}, strict=False).leaves
    found = {leaf.name: leaf.label for leaf in leaves}
    assert found == {"layers/w": "?", "layers/g": "?", "layers/up/weight/0": "muon"}


def test_layers_that_say_their_axes_need_no_axis_of_layers():
    layers = {"up": Linear(named(2, 4, 6), None, B, C), "w": jnp.ones((2, 4, 4))}
    leaves = resolve({"layers": layers}, reader_of(None, (), {"layers": 0})).leaves
    found = {leaf.name: (leaf.layout.block_shapes(), leaf.rule) for leaf in leaves}
    assert found == {
        "layers/up/weight/0": ([(2, 6, 4)], "layer: b -> c (Haliax)"),
        "layers/w": ([(2, 4, 4)], "w: in, out (Haiku, tunix); layers on axis 0"),
    }
