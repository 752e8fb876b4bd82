"""Mixtures of experts on a mesh: what moves for each way to shard them, and that results agree."""

import re

import jax
import pytest
from jax.sharding import NamedSharding

import optax_muonplus as omp
from tests.support.compilation import collectives
from tests.support.mesh import (
    AUTO,
    D,
    P,
    lowered_update,
    make_mesh,
    shape,
)

LAYER_AXES = {"^blocks/": 0}
# The last one is fused.
RULES = [("gate_up/kernel", omp.MatrixSpec(-2, -1, split_sizes=(D, D)))]


def mixture(d):
    """Of width ``d``: a layer of eight experts, and three stacked ones."""
    experts = {
        "up": {"kernel": shape(8, d, 3 * d)},
        "down": {"kernel": shape(8, 3 * d, d)},
        "gate_up": {"kernel": shape(8, d, 2 * D)},
    }
    stacked = {"up": {"kernel": shape(3, 8, d, d)}}
    return {
        "block_0": {"experts": experts, "q": {"kernel": shape(d, d)}},
        "blocks": {"experts": stacked, "router": {"kernel": shape(3, d, 8)}},
    }


# Mesh, how experts, their rows and other rows are cut, and the collectives of an update.
BOTH = ((2, 4), "ed")
WAYS = {
    "by expert": (((8,), "e"), "e", None, "e", ["all-to-all"] * 2),
    "fsdp": (((8,), "d"), None, "d", "d", ["all-to-all"] * 2),
    "both": (BOTH, "e", "d", ("e", "d"), ["all-to-all"] * 4),
    "by expert, replicas": (BOTH, "e", None, None, ["all-gather"]),
    "replicated": (((8,), "r"), None, None, None, ["all-gather"]),
}


def placed(tree, way, types=AUTO):
    (sizes, names), expert, rows, others, _ = WAYS[way]
    mesh = make_mesh(sizes, names, types)

    def place(path, leaf):
        layers = (None,) * (path[0].key == "blocks")
        cut = (expert, rows) if "experts" in jax.tree_util.keystr(path) else (others,)
        return NamedSharding(mesh, P(*layers, *cut))

    return jax.tree_util.tree_map_with_path(place, tree)


def optimizer(**options):
    return omp.muonplus(0.1, rules=RULES, layer_axes=LAYER_AXES, **options)


@pytest.mark.parametrize("way", WAYS)
def test_collectives_do_not_grow_with_layers_or_experts(way):
    tree = mixture(128)  # so large that replicas divide the work
    wanted = placed(tree, way)
    lowered = lowered_update(optimizer(sharding=wanted), tree, wanted)
    assert sorted(collectives(lowered.compile())) == WAYS[way][-1]


def test_experts_that_are_whole_stay_where_they_lie():
    """Nothing moves, and nothing is copied into lines of 128 as for a transfer."""
    tree = {name: {"experts": layer["experts"]} for name, layer in mixture(D).items()}
    wanted = placed(tree, "by expert")
    lowered = lowered_update(optimizer(sharding=wanted), tree, wanted)
    assert collectives(lowered.compile()) == []
    assert not re.findall(r"tensor<[x\d]*x128xf32>", lowered.as_text())


def test_fewer_experts_than_devices_share_the_work():
    """Two experts in two groups of four devices: of six matrices and one, each is on its own."""
    sides = 128, 512
    tree = {
        "experts": {"up": {"kernel": shape(2, *sides)}},
        "blocks": {"experts": {"up": {"kernel": shape(2, 2, *sides)}}},
        "q": {"kernel": shape(*sides)},
    }
    wanted = placed(tree, "both")
    table = omp.describe(tree, layer_axes=LAYER_AXES, sharding=wanted)
    assert "7 matrices shared out among 8 devices: the busiest has 1.14 x" in table
