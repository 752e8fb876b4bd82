"""Parameters by the names of the paper's code: a tied head, and what does not fit."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from examples import weights as state_dict
from examples.trainer.settings.run import ModelConfig
from examples.trainer.system.errors import UserError
from examples.weights import abstract, from_state_dict, sizes_of, to_state_dict
from tests.support.model_trees import leaves

V, D, H, F = 7, 6, 2, 8
GPT = ModelConfig(n_layer=2, n_head=H, d_model=D, d_ff=F, context=5)
LLAMA = dataclasses.replace(GPT, family="llama", tied=False)


def numbered(config):
    """Parameters all of whose numbers differ."""
    shapes = abstract(config, V)
    start = itertools.count(step=10_000)
    return jax.tree.map(
        lambda x: (next(start) + np.arange(x.size, dtype=np.float32)).reshape(x.shape), shapes
    )


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, x in one.items():
        np.testing.assert_array_equal(x, other[name], err_msg=name, strict=True)


def test_a_tied_head_is_read_as_one():
    """PyTorch writes it beside the embedding."""
    published = to_state_dict(numbered(GPT), GPT)
    published[state_dict.HEAD] = embedding = published["transformer.wte.weight"]
    assert sizes_of(published, "gpt", H, context=5) == (GPT, V)
    assert_equal(leaves(from_state_dict(published, GPT, V)), leaves(numbered(GPT)))
    published[state_dict.HEAD] = embedding + 1
    assert not sizes_of(published, "gpt", H, context=5)[0].tied


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.norm.weight": None}, r"model.norm.weight has the shape None, .* has \(6,\)"),
        ({"model.norm.bias": np.ones(D)}, r"model.norm.bias has the shape \(6,\), .* has None"),
        (
            {"model.layers.0.mlp.up_proj.weight": np.ones((D, F))},
            r"up_proj.weight has the shape \(6, 8\), and in a llama .* it has \(8, 6\)",
        ),
    ],
)
def test_other_names_and_shapes_are_refused(change, words):
    published = {**to_state_dict(numbered(LLAMA), LLAMA), **change}
    with pytest.raises(UserError, match=words):
        from_state_dict({k: x for k, x in published.items() if x is not None}, LLAMA, V)
