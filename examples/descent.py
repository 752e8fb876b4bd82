"""How curved a trained model's loss is along updates of Muon and Muon+: the paper's theorem 1."""

import functools
from typing import Any

import jax
import numpy as np
import optax

import optax_muonplus as omp
from examples import optimizers, trained
from examples.data.loader import Loader
from examples.data.prepare import prepare
from examples.errors import UserError
from examples.imbalance import SIDES
from examples.loss import next_token_loss
from examples.trained import Place, Trained
from optax_muonplus import theory
from optax_muonplus.diagnostics import Side
from optax_muonplus.matrices import Norm

NORMS: tuple[Norm, ...] = ("none", "col", "row", "col_row", "row_col")
MATRICES = "^blocks/{layer}/"
ROWS = 4  # of text, whose loss it is
BLOCKS = 16  # rows or columns of each matrix, drawn at random, the same for all norms
ITERATIONS = 12  # of the power method


def compare(place: Place, layer: int) -> dict[str, Any]:
    """What updates of the matrices of one layer meet, by side, path and norm.

    `mean_curvature` is the curvature of a row or column, averaged with the squared norms of the
    update's rows or columns as weights; `decrease` is what the bound guarantees the loss to fall by
    at the update's best step size, in nats. Updates are those of the gradient, as in the theorem.
    """
    model = trained.load(place)
    if model.config.model.scan or not 0 <= layer < model.config.model.n_layer:
        raise UserError(
            f"--layer {layer}: give one of the {model.config.model.n_layer} of a model that was "
            "trained without --model.scan."
        )
    dataset = prepare(model.config.data, print)
    loader = Loader(dataset.train.ids, model.config.model.context, ROWS, model.config.seed)
    result: dict[str, Any] = {"step": model.step, "layer": layer}
    for side in SIDES:
        bounds = jax.device_get(of_side(model, side, layer, *loader.batch(model.step)))
        result[side] = {
            path: {
                norm: {word: float(getattr(bounds[norm][path], word)[0]) for word in WORDS}
                for norm in NORMS
            }
            for path in bounds["none"]
        }
    return result


WORDS = ("mean_curvature", "decrease")


def of_side(
    model: Trained, side: Side, layer: int, inputs: np.ndarray, targets: np.ndarray
) -> dict[Norm, dict[str, theory.DescentBound]]:
    """The bounds for the update of each norm, on some text."""

    @jax.jit
    def bounds(params: optax.Params, key: jax.Array) -> dict[Norm, Any]:
        def loss(params: optax.Params) -> jax.Array:
            return next_token_loss(model.extend(params, inputs, None, 0)[0], targets)

        gradients = jax.grad(loss)(params)
        curvatures = theory.block_curvatures(
            loss,
            params,
            side,
            optimizers.dimension_numbers,
            key=key,
            only=MATRICES.format(layer=layer),
            blocks=BLOCKS,
            iterations=ITERATIONS,
        )
        matrices = {path: x for path, x in trained.by_path(gradients).items() if path in curvatures}
        make = functools.partial(omp.scale_by_muonplus, beta=0.0)
        result = {}
        for norm in NORMS:
            rule = make(norm=norm)
            updates, _ = rule.update(matrices, rule.init(matrices))
            result[norm] = theory.descent_bound(curvatures, gradients, updates)
        return result

    return bounds(model.params, jax.random.key(model.config.seed))
