"""Heads by their names and by their neighbours; lines of the model zoo have more of them."""

import equinox as eqx
import jax
import optax
import pytest

import optax_muonplus as omp
from tests.support.trees import nested_shapes

ATTENTION = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))


def labels(tree):
    found = jax.tree.leaves_with_path(omp.partition_labels(tree))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in found}


@pytest.mark.parametrize("name", ["mha", "mixing", "self", "decoder"])
def test_the_output_of_attention_is_no_head(name):
    """Its neighbours say so, also if they were left out of the tree."""
    params = eqx.filter({name: ATTENTION}, eqx.is_inexact_array)
    assert set(labels(params).values()) == {"muon"}
    is_output = lambda layer: layer.output_proj.weight  # noqa: E731
    alone = jax.tree.map(lambda _: optax.MaskedNode(), params[name])
    alone = eqx.tree_at(is_output, alone, params[name].output_proj.weight, is_leaf=_is_masked)
    assert labels({name: alone}) == {f"{name}/output_proj/weight": "muon"}


def _is_masked(x):
    return isinstance(x, optax.MaskedNode)


def test_the_output_of_a_network_is_a_head():
    params = nested_shapes(
        output_proj__kernel=(8, 9), in_proj__kernel=(3, 8), block__q_proj__kernel=(8, 8)
    )
    assert labels(params)["output_proj/kernel"] == "adam"
    assert labels(nested_shapes(decoder__output_proj=(8, 9)))["decoder/output_proj"] == "adam"
    bare = nested_shapes(mix__output_proj=(8, 8), mix__query_proj=(8, 8))
    assert set(labels(bare).values()) == {"muon"}


AGENT = {"Dense_0": (4, 64), "Dense_1": (64, 64), "Dense_2": (64, 2)}


@pytest.mark.parametrize(
    "name", ["actor", "critic", "policy_net", "qf1", "value_head", "target_critic"]
)
def test_the_last_layer_of_an_agent_is_a_head(name):
    params = nested_shapes(**{f"{name}__{x}__kernel": shape for x, shape in AGENT.items()})
    assert [x for x, label in labels(params).items() if label == "adam"] == [
        f"{name}/Dense_2/kernel"
    ]
    # One that was left out comes after it.
    params[name]["Dense_2"]["kernel"] = None
    assert "adam" not in labels(params).values()
    params[name]["mean"] = params[name].pop("Dense_2")
    assert "adam" not in labels(params).values()


def test_heads_in_a_list_and_by_task():
    params = nested_shapes(
        heads__0__kernel=(8, 3), heads__policy__kernel=(8, 5), attn__heads__0__kernel=(8, 8)
    )
    assert labels(params) == {
        "heads/0/kernel": "adam",
        "heads/policy/kernel": "adam",
        "attn/heads/0/kernel": "muon",
    }
