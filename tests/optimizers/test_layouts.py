"""Batch axes, several axes on a side and fused blocks: each matrix is updated by itself."""

import jax.numpy as jnp
import numpy as np
from optax.contrib import MuonDimensionNumbers

import optax_muonplus as omp
from tests.support.trees import first_update, random_tree


def _updates(grads, dims=None, **options):
    """Updates of several arrays with their own dimension numbers, in one program."""
    tx = omp.scale_by_muonplus(weight_dimension_numbers=dims, **options)
    return first_update(tx, grads)


def test_batch_axes_are_independent_matrices():
    """Experts in front, scanned layers in the middle, heads behind: the same as one by one."""
    matrices = [random_tree([(6, 10)], seed)[0] for seed in range(3)]
    grads = {
        "experts": jnp.stack(matrices, 0),
        "layers": jnp.stack(matrices, 1),
        "both": jnp.stack([jnp.stack(matrices), jnp.stack(matrices[::-1])], -1),
        "transposed": jnp.stack(matrices, 1).transpose(2, 1, 0),
    }
    dims = {
        "experts": MuonDimensionNumbers(1, 2),
        "layers": MuonDimensionNumbers(0, 2),
        "both": MuonDimensionNumbers(1, 2),
        "transposed": MuonDimensionNumbers(-1, 0),
    }
    options = {"adaptive": True, "match_frobenius": True, "norm": "col_row"}
    updates = _updates(grads, dims, **options)
    alone = _updates(dict(enumerate(matrices)), None, **options)
    for i in range(3):
        for update in (
            updates["experts"][i],
            updates["layers"][:, i],
            updates["both"][i, :, :, 0],
            updates["both"][2 - i, :, :, 1],
            updates["transposed"][:, i].T,
        ):
            np.testing.assert_allclose(update, alone[i], rtol=1e-4, atol=1e-5)


def test_several_axes_on_a_side_are_flattened():
    """Attention kernels (embed, heads, head) and back, and a convolution (h, w, in, out)."""
    (q, o, conv) = random_tree([(6, 4, 3), (4, 3, 6), (2, 2, 3, 5)])
    updates = _updates(
        {"q": q, "o": o, "conv": conv},
        {
            "q": MuonDimensionNumbers(0, (1, 2)),
            "o": MuonDimensionNumbers((0, 1), 2),
            "conv": MuonDimensionNumbers((0, 1, 2), 3),
        },
        polar="svd",
    )
    flat = {"q": q.reshape(6, 12), "o": o.reshape(12, 6), "conv": conv.reshape(12, 5)}
    flat = _updates(flat, polar="svd")
    for key, update in updates.items():
        np.testing.assert_allclose(update.reshape(flat[key].shape), flat[key], rtol=1e-4, atol=1e-5)


def test_split_axes_are_separate_parameters():
    """Each block gets its own polar factor, norms and shape factor, also under a batch axis."""
    (qkv, gate_up, fused_in) = random_tree([(8, 20), (2, 6, 10), (14, 8)])
    dims = {
        "qkv": omp.MatrixSpec(0, 1, split_sizes=(8, 8, 4)),
        "gate_up": omp.MatrixSpec(1, 2, split_sizes=(5, 5)),
        "fused_in": omp.MatrixSpec(0, 1, split_sizes=(6, 8), split_axis=0),
    }
    fused = {"qkv": qkv, "gate_up": gate_up, "fused_in": fused_in}
    updates = _updates(fused, dims, polar="svd")
    blocks = {
        "qkv": [qkv[:, :8], qkv[:, 8:16], qkv[:, 16:]],
        "gate_up": [gate_up[:, :, :5], gate_up[:, :, 5:]],
        "fused_in": [fused_in[:6], fused_in[6:]],
    }
    plain = MuonDimensionNumbers(0, 1)
    dims = {"qkv": plain, "gate_up": MuonDimensionNumbers(1, 2), "fused_in": plain}
    alone = _updates(blocks, dims, polar="svd")
    for key, axis in [("qkv", 1), ("gate_up", 2), ("fused_in", 0)]:
        joined = np.concatenate(alone[key], axis)
        np.testing.assert_allclose(updates[key], joined, rtol=1e-4, atol=1e-5)
