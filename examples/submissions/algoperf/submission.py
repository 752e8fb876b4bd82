r"""Muon+ for the self-tuning ruleset of AlgoPerf, in JAX and in one file.

For each weight matrix W with gradient G, in the layout that Flax stores, (inputs, outputs):

    M = beta M + (1 - beta) G
    O = normalize(polar factor of M)
    W = W - rate (sqrt(max(1, outputs / inputs)) O + decay W)

The polar factor is five Newton-Schulz steps. `normalize` divides the weights of each input
feature, then those of each output unit, by their Euclidean norm, and restores the Frobenius norm of
the polar factor, so that a rate found for Muon stays right. NAdamW updates all other parameters:
embeddings, output layers, depthwise convolutions, norms and biases. Convolutions and attention
kernels are read as the matrices that they multiply by: 3 x 3 x 64 x 128 is a matrix with 576 inputs
and 128 outputs.

Source of the method: Zhang et al., Muon+, arXiv:2602.21545. The file needs JAX and Optax, 0.2.2 or
newer.
"""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

# One setting for all workloads. Rates, decays and moments are those that Google's Muon submission
# of May 2026 publishes: only layouts, normalization and the group of output layers differ from it.
HPARAMS = {
    "learning_rate": 1.357495179e-4,  # of NAdamW; the schedule is a cosine from here to 0
    "muon_multiplier": 28.61130298,
    "beta": 0.9560745273,
    "weight_decay": 0.02397563985,
    "b1": 0.96586744,
    "b2": 0.8629173173,
    "eps": 1e-8,
    "other_weight_decay": 0.01275028385,
    "dropout_rate": 0.0,
}

# Newton-Schulz coefficients of Jordan et al. (2024), used at each of the five steps.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
NORM_EPS = 1e-8  # inside the root of the row and column norms

# The first pattern that is found in a path decides how many leading axes of a kernel are its
# inputs: a number, "all but the last", or None for a parameter that NAdamW updates.
ALL_BUT_LAST = -1
LAYOUTS = (
    ("embed", None),
    (r"ConvolutionBlock_\d+/Conv_\d+/", None),  # depthwise: one input for each output
    (r"(query|key|value)/kernel$", 1),
    (r"kernel$", ALL_BUT_LAST),
)


class MomentumState(NamedTuple):
    """One momentum buffer for each matrix."""

    mu: optax.Updates


def input_axes(
    path: str, shape: tuple[int, ...], is_output: Any = lambda name: False
) -> int | None:
    """Returns how many leading axes of a parameter are its inputs; None if it is no matrix.

    `is_output` says of the first name in a path whether that layer gives the model's outputs.
    """
    if len(shape) < 2 or is_output(path.partition("/")[0]):
        return None
    for pattern, inputs in LAYOUTS:
        if re.search(pattern, path):
            return len(shape) - 1 if inputs == ALL_BUT_LAST else inputs
    return None


def path_name(path: Any) -> str:
    """Returns the names in a path of JAX, joined by slashes."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def polar_factor(x: jax.Array) -> jax.Array:
    """Returns the approximate polar factor of a matrix: all singular values become about 1."""
    x = x / jnp.maximum(jnp.max(jnp.abs(x)), jnp.finfo(x.dtype).tiny)  # squares stay in range
    x = x / jnp.maximum(jnp.linalg.norm(x), jnp.finfo(x.dtype).tiny)
    wide = x if x.shape[0] <= x.shape[1] else x.T
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


def normalize(x: jax.Array) -> jax.Array:
    """Divides input features, then output units, by their norms; the Frobenius norm stays."""
    y = x
    for axis in (1, 0):  # of (inputs, outputs)
        y = y * jax.lax.rsqrt(jnp.sum(y * y, axis=axis, keepdims=True) + NORM_EPS)
    return y * (jnp.linalg.norm(x) / jnp.maximum(jnp.linalg.norm(y), jnp.finfo(x.dtype).tiny))


def muonplus_update(momentum: jax.Array, inputs: int) -> jax.Array:
    """Returns the update of one parameter, before rate and decay, in the parameter's shape."""
    shape = momentum.shape
    x = momentum.reshape(math.prod(shape[:inputs]), math.prod(shape[inputs:]))
    o = normalize(polar_factor(x))
    return (math.sqrt(max(1.0, x.shape[1] / x.shape[0])) * o).reshape(shape)


def scale_by_muonplus(beta: float) -> optax.GradientTransformation:
    """Returns Muon+ without rate and decay, for a tree in which all arrays are matrices."""

    def init(params: optax.Params) -> MomentumState:
        return MomentumState(jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        del params
        mu = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.mu, updates)

        def one(path: Any, m: jax.Array) -> jax.Array:
            inputs = input_axes(path_name(path), m.shape)
            assert inputs is not None, path  # the partition sends only matrices here
            return muonplus_update(m, inputs)

        return jax.tree_util.tree_map_with_path(one, mu), MomentumState(mu)

    return optax.GradientTransformation(init, update)


def make_optimizer(step_hint: int, is_output: Any) -> optax.GradientTransformation:
    """Returns the optimizer of all parameters for a run of about `step_hint` steps."""
    rate = optax.cosine_decay_schedule(HPARAMS["learning_rate"], max(step_hint, 1))
    muonplus = optax.chain(
        scale_by_muonplus(HPARAMS["beta"]),
        optax.add_decayed_weights(HPARAMS["weight_decay"]),
        optax.scale(HPARAMS["muon_multiplier"]),
        optax.scale_by_learning_rate(rate),
    )
    other = optax.nadamw(
        rate,
        HPARAMS["b1"],
        HPARAMS["b2"],
        HPARAMS["eps"],
        weight_decay=HPARAMS["other_weight_decay"],
    )

    def labels(params: optax.Params) -> Any:
        def label(path: Any, x: Any) -> str:
            inputs = input_axes(path_name(path), x.shape, is_output)
            return "other" if inputs is None else "muonplus"

        return jax.tree_util.tree_map_with_path(label, params)

    return optax.multi_transform({"muonplus": muonplus, "other": other}, labels)


def output_layer_of(workload: Any) -> Any:
    """Returns a function that says whether a layer gives the outputs, as the workload says."""

    def is_output(name: str) -> bool:
        try:
            return bool(workload.is_output_params(name))
        except (AttributeError, NotImplementedError):  # a workload that cannot answer
            return False

    return is_output


def init_optimizer_state(
    workload: Any, model_params: Any, model_state: Any, hyperparameters: Any, rng: Any
) -> tuple[Any, Any]:
    """Returns the optimizer's state and its update function."""
    del model_params, model_state, hyperparameters, rng
    optimizer = make_optimizer(workload.step_hint, output_layer_of(workload))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape_tuple), workload.param_shapes)
    return optimizer.init(zeros), optimizer.update


def train_step(
    workload: Any,
    update: Any,
    model_state: Any,
    optimizer_state: Any,
    params: Any,
    batch: Any,
    rng: Any,
) -> tuple[Any, Any, Any]:
    """Returns state, parameters and model state after one step on the mean loss of a batch."""
    from algoperf import spec

    def loss_fn(params: Any) -> Any:
        logits, new_model_state = workload.model_fn(
            params,
            batch,
            model_state,
            spec.ForwardPassMode.TRAIN,
            rng,
            update_batch_norm=True,
            dropout_rate=HPARAMS["dropout_rate"],
        )
        losses = workload.loss_fn(
            label_batch=batch["targets"], logits_batch=logits, mask_batch=batch.get("weights")
        )
        return losses["summed"], (losses["n_valid_examples"], new_model_state)

    grads, (examples, new_model_state) = jax.grad(loss_fn, has_aux=True)(params)
    grads = jax.tree.map(lambda g: g / examples, grads)
    updates, optimizer_state = update(grads, optimizer_state, params)
    return optimizer_state, optax.apply_updates(params, updates), new_model_state


@functools.cache
def compiled_step() -> Any:
    """Returns the jitted step: the batch is cut over the devices, all else has a copy on each."""
    from algoperf import jax_sharding_utils

    copy, cut = (
        jax_sharding_utils.get_replicate_sharding(),
        jax_sharding_utils.get_batch_dim_sharding(),
    )
    return jax.jit(
        train_step,
        static_argnums=(0, 1),
        donate_argnums=(2, 3, 4),
        in_shardings=(copy, copy, copy, cut, copy),
        out_shardings=(copy, copy, copy),
    )


def update_params(
    workload: Any,
    current_param_container: Any,
    current_params_types: Any,
    model_state: Any,
    hyperparameters: Any,
    batch: dict[str, Any],
    loss_type: Any,
    optimizer_state: tuple[Any, Any],
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: Any,
    train_state: dict[str, Any] | None = None,
) -> tuple[Any, Any, Any]:
    """Returns optimizer state, parameters and model state after one step."""
    del current_params_types, hyperparameters, loss_type, eval_results, global_step, train_state
    state, update = optimizer_state
    state, params, model_state = compiled_step()(
        workload, update, model_state, state, current_param_container, batch, rng
    )
    return (state, update), params, model_state


def prepare_for_eval(
    workload: Any,
    current_param_container: Any,
    current_params_types: Any,
    model_state: Any,
    hyperparameters: Any,
    loss_type: Any,
    optimizer_state: Any,
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: Any,
) -> tuple[Any, Any, Any]:
    """Returns optimizer state, parameters and model state as they are."""
    del workload, current_params_types, hyperparameters, loss_type, eval_results, global_step, rng
    return optimizer_state, current_param_container, model_state


# Batch sizes of Google's Muon submission, so that scores compare optimizers.
BATCH_SIZES = {
    "criteo1tb": 262_144,
    "fastmri": 32,
    "finewebedu_lm": 64,
    "imagenet_resnet": 1024,
    "imagenet_resnet_gelu": 512,
    "imagenet_resnet_silu": 512,
    "imagenet_vit": 1024,
    "librispeech_conformer": 256,
    "librispeech_deepspeech": 256,
    "mnist": 16,
    "ogbg": 512,
    "wmt": 128,
}


def get_batch_size(workload_name: str) -> int:
    """Returns the batch size of a workload, or of the one that it is a variant of.

    Raises:
      ValueError: for a workload that has no batch size here.
    """
    known = [name for name in BATCH_SIZES if workload_name.startswith(name)]
    if not known:
        raise ValueError(f"Unknown workload {workload_name!r}. Known: {', '.join(BATCH_SIZES)}.")
    return BATCH_SIZES[max(known, key=len)]


def data_selection(
    workload: Any,
    input_queue: Any,
    optimizer_state: Any,
    current_param_container: Any,
    model_state: Any,
    hyperparameters: Any,
    global_step: int,
    rng: Any,
) -> dict[str, Any]:
    """Returns the next batch."""
    del workload, optimizer_state, current_param_container, model_state
    del hyperparameters, global_step, rng
    return next(input_queue)
