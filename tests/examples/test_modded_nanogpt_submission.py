"""Muon+ in PyTorch for modded-nanogpt's track 3: three steps are those of `omp.muonplus`."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp

torch = pytest.importorskip("torch")
from examples.submissions.modded_nanogpt import muonplus_torch as theirs  # noqa: E402

SHAPES = {"tall": (24, 8), "wide": (8, 24), "square": (16, 16)}


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_steps_are_those_of_the_library(dtype):
    start = arrays(0)
    tx = omp.muonplus(
        0.025,
        ns_coeffs=theirs.COEFFICIENTS,
        ns_steps=theirs.STEPS,
        weight_decay=0.05,
        norm="col_row",
        match_frobenius=True,
        shape_scale="max",
        compute_dtype=dtype,
        muon_weight_dimension_numbers=omp.MuonDimensionNumbers(1, 0),
    )
    params = jax.tree.map(jnp.asarray, start)
    state = tx.init(params)
    weights = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in start.items()}
    optimizer = theirs.MuonPlus(list(weights.values()), dtype=getattr(torch, dtype))
    for seed in (1, 2, 3):
        updates, state = tx.update(jax.tree.map(jnp.asarray, arrays(seed)), state, params)
        params = optax.apply_updates(params, updates)
        for name, grad in arrays(seed).items():
            weights[name].grad = torch.tensor(grad)
        optimizer.step()
        # A step changes an entry by up to 0.025. Products in bfloat16 round at other places.
        atol = 1e-5 if dtype == "float32" else 2e-3
        for name, x in params.items():
            np.testing.assert_allclose(weights[name].detach().numpy(), x, atol=atol)


def test_the_file_imports_pytorch_alone():
    source = Path(theirs.__file__).read_text()
    assert set(re.findall(r"^(?:import|from) (\w+)", source, re.M)) == {"torch"}
