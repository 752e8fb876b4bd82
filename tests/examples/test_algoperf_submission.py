"""The submission to AlgoPerf: layouts and updates are the library's, the API is the benchmark's."""

import importlib.util
import inspect
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optax_muonplus as omp
from examples.submissions.algoperf import submission, workloads

H = submission.HPARAMS
STEPS = 100
# From the benchmark's template of a submission (algorithms/template/submission.py, September 2025).
ARGUMENTS = {
    "get_batch_size": "workload_name",
    "init_optimizer_state": "workload model_params model_state hyperparameters rng",
    "update_params": "workload current_param_container current_params_types model_state"
    " hyperparameters batch loss_type optimizer_state eval_results global_step rng train_state",
    "prepare_for_eval": "workload current_param_container current_params_types model_state"
    " hyperparameters loss_type optimizer_state eval_results global_step rng",
    "data_selection": "workload input_queue optimizer_state current_param_container model_state"
    " hyperparameters global_step rng",
}


def output_layer(name):
    """Returns what says of a layer whether it gives the outputs of a workload's model."""
    return lambda layer: layer == workloads.OUTPUT_LAYERS.get(name)


def dimension_numbers(name):
    """Reads the full shapes of a workload by the library's rules."""
    return omp.muon_dimension_numbers(workloads.tree(name), rules=workloads.rules(name))


def the_same_in_the_library(name):
    """Makes `omp.muonplus` with the submission's settings."""
    rate = optax.cosine_decay_schedule(H["learning_rate"], STEPS)
    return omp.muonplus(
        lambda count: H["muon_multiplier"] * rate(count),
        beta=H["beta"],
        nesterov=False,
        weight_decay=H["weight_decay"],
        match_frobenius=True,
        shape_scale="max",
        adam_learning_rate=rate,
        adam_b1=H["b1"],
        adam_b2=H["b2"],
        adam_eps=H["eps"],
        adam_nesterov=True,
        adam_weight_decay=H["other_weight_decay"],
        muon_weight_dimension_numbers=dimension_numbers(name),
    )


def small(name, seed):
    """Returns arrays for a workload's parameters, with sides of 12 at most, or 9 of first axes."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for path, shape in workloads.shapes(name).items():
        sides = [min(n, 12 if i else 9) for i, n in enumerate(shape)]
        arrays[path] = jnp.asarray(rng.normal(size=sides), jnp.float32)
    return workloads.nested(arrays)


@pytest.mark.parametrize("name", workloads.NAMES)
def test_layouts_are_those_of_the_library(name):
    read = jax.tree.leaves(
        dimension_numbers(name),
        is_leaf=lambda x: x is None or isinstance(x, omp.MuonDimensionNumbers | omp.MatrixSpec),
    )
    paths = [submission.path_name(x) for x, _ in jax.tree.leaves_with_path(workloads.tree(name))]
    for path, spec in zip(paths, read, strict=True):
        shape = workloads.shapes(name)[path]
        inputs = submission.input_axes(path, shape, output_layer(name))
        if spec is None or inputs is None:
            assert spec is None, path
            assert inputs is None, path
            continue
        axes = [tuple(np.atleast_1d(x) % len(shape)) for x in spec[:2]]
        assert axes == [tuple(range(inputs)), tuple(range(inputs, len(shape)))], path


@pytest.mark.parametrize("name", workloads.NAMES)
def test_updates_are_those_of_the_library(name):
    params = small(name, 0)
    optimizers = submission.make_optimizer(STEPS, output_layer(name)), the_same_in_the_library(name)
    states = [tx.init(params) for tx in optimizers]
    steps = [jax.jit(tx.update) for tx in optimizers]
    for seed in (1, 2):
        results = [f(small(name, seed), x, params) for f, x in zip(steps, states, strict=True)]
        (ours, theirs), states = zip(*results, strict=True)
        for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            # Sums in another order move an entry by some 1e-6 of the largest one.
            np.testing.assert_allclose(left, right, atol=8e-6 * float(jnp.abs(right).max()))
        params = optax.apply_updates(params, theirs)


@pytest.mark.parametrize("name", workloads.NAMES)
def test_every_workload_has_a_batch_size(name):
    assert submission.get_batch_size(name) > 0
    assert submission.get_batch_size(f"{name}_of_a_variant") == submission.get_batch_size(name)


def test_variants_may_have_a_batch_size_of_their_own():
    assert submission.get_batch_size("imagenet_resnet_silu") == 512
    with pytest.raises(ValueError, match="Known: criteo1tb, "):
        submission.get_batch_size("cifar")


@pytest.mark.parametrize("function", ARGUMENTS)
def test_signatures_are_the_benchmarks(function):
    signature = inspect.signature(getattr(submission, function))
    assert list(signature.parameters) == ARGUMENTS[function].split()


def test_the_file_needs_nothing_of_this_project():
    source = Path(submission.__file__).read_text()
    imported = set(re.findall(r"^ *(?:import|from) (\w+)(?=$| import|\.| as)", source, re.M))
    assert imported == {"functools", "math", "re", "typing", "jax", "optax", "algoperf"}


def test_the_page_of_tables_is_up_to_date():
    assert (workloads.FOLDER / "tables.md").read_text() == workloads.tables()


class Regression:
    """A workload of one dense layer, with the attributes that a submission may use."""

    step_hint = STEPS

    def __init__(self):
        rng = np.random.default_rng(0)
        self.params = {"Dense_0": {"kernel": jnp.zeros((8, 4)), "bias": jnp.zeros((1, 4))}}
        self.param_shapes = jax.tree.map(
            lambda x: types.SimpleNamespace(shape_tuple=x.shape), self.params
        )
        inputs, weights = rng.normal(size=(16, 8)), rng.normal(size=(8, 4))
        self.batch = {"inputs": np.float32(inputs), "targets": np.float32(inputs @ weights)}

    def is_output_params(self, name):
        return name.contains("output")  # the language model of the benchmark asks a str like this

    def model_fn(self, params, batch, state, mode, rng, update_batch_norm, dropout_rate):
        layer = params["Dense_0"]
        return batch["inputs"] @ layer["kernel"] + layer["bias"], state

    def loss_fn(self, label_batch, logits_batch, mask_batch=None, label_smoothing=0.0):
        losses = jnp.sum((logits_batch - label_batch) ** 2, axis=-1)
        return {"summed": jnp.sum(losses), "n_valid_examples": losses.size}

    def loss(self, params):
        logits, _ = self.model_fn(params, self.batch, {}, None, None, True, 0.0)
        return float(self.loss_fn(self.batch["targets"], logits)["summed"])


@pytest.fixture
def algoperf(monkeypatch):
    """The benchmark's package, or modules with the two things that a step asks it for."""
    if importlib.util.find_spec("algoperf") is None:
        mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
        package, spec, utils = map(types.ModuleType, ("algoperf", "spec", "jax_sharding_utils"))
        spec.ForwardPassMode = types.SimpleNamespace(TRAIN="train")
        utils.get_replicate_sharding = lambda: NamedSharding(mesh, PartitionSpec())
        utils.get_batch_dim_sharding = lambda: NamedSharding(mesh, PartitionSpec("batch"))
        package.spec, package.jax_sharding_utils = spec, utils
        monkeypatch.setitem(sys.modules, "algoperf", package)
    submission.compiled_step.cache_clear()
    yield
    submission.compiled_step.cache_clear()


@pytest.mark.usefixtures("algoperf")
def test_a_run_through_the_benchmarks_functions(monkeypatch):
    monkeypatch.setitem(
        H, "learning_rate", 3e-3
    )  # the rate of long runs is too small for 100 steps
    workload = Regression()
    params, model_state, nothing = workload.params, {}, None
    before = workload.loss(params)
    state = submission.init_optimizer_state(workload, params, model_state, nothing, nothing)
    for step in range(STEPS):
        batch = submission.data_selection(
            workload, iter([workload.batch]), state, params, model_state, nothing, step, nothing
        )
        state, params, model_state = submission.update_params(
            workload,
            params,
            nothing,
            model_state,
            nothing,
            batch,
            nothing,
            state,
            [],
            step,
            jax.random.key(0),
        )
    evaluated = submission.prepare_for_eval(
        workload, params, nothing, model_state, nothing, nothing, state, [], STEPS, nothing
    )
    assert evaluated == (state, params, model_state)
    assert workload.loss(params) < before / 2
