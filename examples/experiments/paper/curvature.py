"""Curvature of a trained model's loss along updates of Muon and Muon+: the paper's theorem 1."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_muonplus as omp
from examples.experiments.paper.records import SIDES
from examples.experiments.theory.curvature import DescentBound, block_curvatures, descent_bound
from examples.trainer.data.mixture import loader_of
from examples.trainer.data.prepare import prepare
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef, TrainedModel
from examples.trainer.system.errors import UserError
from examples.trainer.training.loss import next_token_loss
from optax_muonplus.diagnostics import Side
from optax_muonplus.matrices import Norm, Normalize

NORMS: tuple[Norm, ...] = ("none", "col", "row", "col_row", "row_col")
MATRICES = "^blocks/{layer}/"
ROWS = 4  # of text on which the loss is taken
BLOCKS = 16  # rows or columns sampled from each matrix, the same for all norms
ITERATIONS = 12  # of the power method
MEASURES = ("mean_curvature", "decrease")


def compare(checkpoint: CheckpointRef, layer: int) -> dict[str, Any]:
    """Curvature along updates of the matrices of one layer, by side, path and norm.

    `mean_curvature` is the curvature of rows or columns, averaged with the squared norms of the
    update's rows or columns as weights. `decrease` is the decrease of the loss, in nats, that the
    bound guarantees at the best step size. Updates are made from the gradient, as in the theorem.
    """
    model = trained.load(checkpoint)
    if model.config.model.scan or not 0 <= layer < model.config.model.n_layer:
        raise UserError(
            f"--layer {layer}: give one of the {model.config.model.n_layer} of a model that was "
            "trained without --model.scan."
        )
    dataset = prepare(model.config.data, print)
    loader = loader_of(dataclasses.replace(model.config, batch_size=ROWS), dataset)
    result: dict[str, Any] = {"step": model.step, "layer": layer}
    for side in SIDES:
        bounds = jax.device_get(bounds_of_side(model, side, layer, *loader.batch(model.step)))
        result[side] = {
            path: {
                norm: {name: float(getattr(bounds[norm][path], name)) for name in MEASURES}
                for norm in NORMS
            }
            for path in bounds["none"]
        }
    return result


def bounds_of_side(
    model: TrainedModel, side: Side, layer: int, inputs: np.ndarray, targets: np.ndarray
) -> dict[Norm, dict[str, DescentBound]]:
    """The bounds for the update with each norm, on some text."""

    @jax.jit
    def bounds(params: optax.Params, key: jax.Array) -> dict[Norm, Any]:
        def loss(chosen: Mapping[str, jax.Array]) -> jax.Array:
            kernels = {path: x.T.astype(leaves[path].dtype) for path, x in chosen.items()}
            own = jax.tree.unflatten(jax.tree.structure(params), (leaves | kernels).values())
            return next_token_loss(model.forward(own, inputs, None, 0)[0], targets)

        leaves = trained.leaves_by_path(params)
        matrices = {  # kernels are (in, out)
            path: x.T.astype(jnp.float32)
            for path, x in leaves.items()
            if x.ndim == 2 and re.search(MATRICES.format(layer=layer), path)
        }
        gradients = jax.grad(loss)(matrices)
        curvatures = block_curvatures(
            loss, matrices, side, key=key, blocks=BLOCKS, iterations=ITERATIONS
        )
        numbers = dict.fromkeys(matrices, omp.MuonDimensionNumbers(1, 0))
        average = omp.transforms.Momentum(0.0)
        result = {}
        for norm in NORMS:
            rule = omp.scale_by_muonplus(
                average, normalization=Normalize(norm), weight_dimension_numbers=numbers
            )
            updates: Any = rule.update(gradients, rule.init(matrices))[0]
            result[norm] = descent_bound(curvatures, gradients, updates, side)
        return result

    return bounds(model.params, jax.random.key(model.config.seed))
