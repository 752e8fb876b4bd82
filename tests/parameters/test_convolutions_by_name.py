"""Kernels of Flax' convolutions, read by their names, shapes and neighbours."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

import optax_muonplus as omp
from tests.support.trees import nested_shapes

KEY = jax.random.key(0)


def read(**shapes):
    """``out x in`` of each kernel, ``adam`` or ``?``, as describe has it."""
    lines = omp.describe(nested_shapes(**shapes)).splitlines()[2 : 2 + len(shapes)]
    cells = [line.split() for line in lines]
    return {row[0]: row[3] if row[2] == "muon" else row[2] for row in cells}


class Grey(nn.Module):
    """A small network for images of one channel."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(6, (5, 5))(x))
        x = nn.relu(nn.Conv(6, (3, 3))(x))
        return nn.Dense(10)(nn.Dense(12)(x.reshape(len(x), -1)))


class Separable(nn.Module):
    """Depthwise and pointwise convolutions, one after the other, then one in groups."""

    @nn.compact
    def __call__(self, x):
        for width in (8, 16):
            channels = x.shape[-1]
            x = nn.Conv(channels, (3, 3), feature_group_count=channels)(x)
            x = nn.Conv(width, (1, 1))(x)
        return nn.Conv(32, (3, 3), feature_group_count=4)(x)


class Residual(nn.Module):
    """A block of ConvNeXt."""

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(8, (7, 7), feature_group_count=8)(x)
        return x + nn.Dense(8)(nn.gelu(nn.Dense(32)(y)))


def labels_of(model, channels):
    params = jax.eval_shape(model.init, KEY, jax.ShapeDtypeStruct((2, 8, 8, channels), "float32"))
    table, _, _ = omp.describe(params).partition("\nmuon: ")
    rows = [line.split() for line in table.splitlines()]
    return {row[0].removeprefix("params/"): row[2] for row in rows if row[0].endswith("kernel")}


def test_a_network_of_grey_images_needs_no_rule():
    found = labels_of(Grey(), 1)
    assert set(found.values()) == {"muon"} and "Conv_0/kernel" in found


def test_depthwise_kernels_stay_with_adamw_and_grouped_ones_are_asked_for():
    found = labels_of(Separable(), 8)
    assert found["Conv_{0,2}/kernel"] == "adam" and found["Conv_4/kernel"] == "?"
    assert labels_of(Residual(), 8)["Conv_0/kernel"] == "adam"


@pytest.mark.parametrize("sides", [(3,), (3, 3), (3, 3, 3)])
def test_one_matrix_maps_windows_to_outputs(sides):
    """The rows of the update have one norm, as those of the layer's own matrix."""
    x = jax.random.normal(KEY, (1, *sides, 6))
    layer = nn.Conv(7, sides, padding="VALID")
    params = {"Conv_0": layer.init(KEY, x)["params"]}
    loss = lambda p: layer.apply({"params": p["Conv_0"]}, x).sum()  # noqa: E731
    tx = omp.muonplus(1.0, norm="row", polar="svd")
    updates, _ = tx.update(jax.grad(loss)(params), tx.init(params), params)
    rows = np.asarray(updates["Conv_0"]["kernel"]).reshape(-1, 7).T
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), np.sqrt(7 / rows.shape[1]), rtol=1e-4)


def test_nnx_names_its_kernels_likewise():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.conv1 = nnx.Conv(1, 4, (3, 3), rngs=rngs)
            self.conv2 = nnx.Conv(4, 8, (3, 3), rngs=rngs)

    table = omp.describe(nnx.eval_shape(lambda: nnx.state(Model(nnx.Rngs(0)), nnx.Param)))
    assert "4x9x1" in table and "8x36x1" in table and "?" not in table


@pytest.mark.parametrize(
    ("path", "shape", "right"),
    [
        ("encoder__conv1__kernel", (3, 80, 384), "384x240x1"),
        ("Conv_3__kernel", (1, 7, 16, 32), "32x112x1"),
        ("Conv_3__kernel", (2, 2, 16, 32), "32x64x1"),
        ("Conv_3__kernel", (1, 3, 3, 4, 8), "8x36x1"),
        ("ConvTranspose_0__kernel", (3, 3, 16, 8), "8x144x1"),
        ("blocks__0__conv__kernel", (3, 3, 4, 8), "8x36x1"),
        # Several layers, windows of one side, or one kernel: not known.
        ("Conv_0__kernel", (12, 4, 16, 32), "?"),
        ("conv1d__kernel", (12, 4, 1024), "?"),
        ("conv1d__kernel", (2, 4, 1024), "?"),
        ("conv1d__kernel", (24, 11, 512), "?"),
        ("Conv_0__kernel", (12, 1, 64, 64), "?"),
        ("layers__conv__kernel", (3, 3, 16, 32), "?"),
        ("blocks__body__conv__kernel", (3, 3, 3, 16, 32), "?"),
        ("ScanBlock_0__conv__kernel", (3, 3, 16, 32), "?"),
        ("conv2d_transpose__kernel", (3, 3, 8, 16), "?"),  # of Keras: outputs before inputs
        ("Conv_0__kernel", (3, 3, 1, 16), "adam"),  # no neighbour says that it is the first
    ],
)
def test_what_may_be_layers_is_asked_for(path, shape, right):
    assert list(read(**{path: shape}).values()) == [right]


@pytest.mark.parametrize("name", ["depthwise", "dw", "separable_conv"])
def test_names_of_depthwise_kernels_are_believed(name):
    shapes = {f"{name}__Conv_0__kernel": (3, 3, 1, 8), f"{name}__Conv_1__kernel": (3, 3, 8, 16)}
    assert read(**shapes)[f"{name}/Conv_0/kernel"] == "adam"
    shapes = {path.replace(name, "body"): shape for path, shape in shapes.items()}
    assert read(**shapes)["body/Conv_0/kernel"] == "8x9x1"


def test_two_branches_of_one_input_are_not_groups():
    shapes = {"Conv_0__kernel": (3, 3, 16, 32), "Conv_1__kernel": (5, 5, 16, 32)}
    assert set(read(**shapes).values()) == {"32x144x1", "32x400x1"}


@pytest.mark.parametrize("width", [8, 9])
def test_a_kernel_after_a_layer_with_as_many_outputs_is_depthwise(width):
    shapes = {"Conv_0__kernel": (3, 3, 3, width), "Conv_1__kernel": (3, 3, 1, 8)}
    found = read(**shapes, Conv_2__kernel=(3, 3, 8, 16))
    assert found["Conv_1/kernel"] == ("adam" if width == 8 else "8x9x1")


def test_mixers_keep_their_depthwise_kernels():
    """Of Mamba and gated linear attention: projections before them have as many outputs."""
    shapes = {"q_proj__kernel": (64, 32), "q_conv__kernel": (4, 1, 32), "o_proj__kernel": (64, 64)}
    assert read(**shapes)["q_conv/kernel"] == "adam"
    shapes = {"in_proj__kernel": (64, 256), "conv__kernel": (4, 1, 128), "out__kernel": (128, 64)}
    assert read(**shapes)["conv/kernel"] == "adam"


def test_groups_behind_keras_first_layer_are_no_matrix():
    """Keras calls its first layer ``conv2d`` and the next one ``conv2d_1``."""
    params = nested_shapes(conv2d__kernel=(3, 3, 5, 8), conv2d_1__kernel=(3, 3, 4, 6))
    assert "3x3x4x6  ?" in omp.describe(params)
