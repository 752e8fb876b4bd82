"""Submissions: AlgoPerf's, the one in PyTorch for modded-nanogpt, and reports on Optax's Muon."""

import collections
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
from examples.submissions.optax import muon_reports
from tests.support.documents import ROOT, imported

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


def dimension_numbers(name, shapes):
    """Reads full shapes of a workload by the library's rules."""
    return omp.muon_dimension_numbers(workloads.tree(shapes), rules=workloads.rules(name))


def two_of_each_kind(name):
    """Returns path and shape of parameters: two of those that differ in a number of their names.

    Twelve equal blocks would have the same rules twelve times, and programs six times as large.
    """
    shapes, seen = {}, collections.Counter()
    for path, shape in workloads.shapes(name).items():
        kind = re.sub(r"\d+", "", path), shape
        seen[kind] += 1
        if seen[kind] <= 2:
            shapes[path] = shape
    return shapes


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
        muon_weight_dimension_numbers=dimension_numbers(name, two_of_each_kind(name)),
    )


def small(name, seed):
    """Returns arrays for a workload's parameters, with sides of 12 at most, or 9 of first axes."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for path, shape in two_of_each_kind(name).items():
        sides = [min(n, 12 if i else 9) for i, n in enumerate(shape)]
        arrays[path] = jnp.asarray(rng.normal(size=sides), jnp.float32)
    return workloads.nested(arrays)


@pytest.mark.parametrize(
    ("file", "packages"),
    [
        ("algoperf/submission.py", {"jax", "optax", "algoperf"}),
        ("modded_nanogpt/muonplus_torch.py", {"torch"}),
    ],
)
def test_a_file_to_send_needs_nothing_of_this_project(file, packages):
    names = imported(ROOT / "examples" / "submissions" / file)
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == packages


@pytest.mark.parametrize("name", workloads.NAMES)
def test_layouts_are_those_of_the_library(name):
    shapes = workloads.shapes(name)
    read = jax.tree.leaves(
        dimension_numbers(name, shapes),
        is_leaf=lambda x: x is None or isinstance(x, omp.MuonDimensionNumbers | omp.MatrixSpec),
    )
    tree = workloads.tree(shapes)
    paths = [submission.path_name(x) for x, _ in jax.tree.leaves_with_path(tree)]
    for path, spec in zip(paths, read, strict=True):
        shape = shapes[path]
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


def test_variants_may_have_a_batch_size_of_their_own():
    assert submission.get_batch_size("imagenet_resnet_silu") == 512
    with pytest.raises(ValueError, match="Known: criteo1tb, "):
        submission.get_batch_size("cifar")


@pytest.mark.parametrize("function", ARGUMENTS)
def test_signatures_are_the_benchmarks(function):
    signature = inspect.signature(getattr(submission, function))
    assert list(signature.parameters) == ARGUMENTS[function].split()


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


# modded-nanogpt's track 3: three steps are those of `omp.muonplus`


SHAPES = {"tall": (24, 8), "wide": (8, 24), "square": (16, 16)}


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_steps_are_those_of_the_library(dtype):
    torch = pytest.importorskip("torch")
    theirs = importlib.import_module("examples.submissions.modded_nanogpt.muonplus_torch")
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


# Optax: a report that no longer holds is taken off the page


PAGE = (Path(muon_reports.__file__).parent / "README.md").read_text()


NAMES = [report.__name__ for report in muon_reports.REPORTS]


@pytest.mark.parametrize("report", muon_reports.REPORTS, ids=NAMES)
def test_the_installed_optax_has_the_defect(report):
    try:
        report()
    except Exception:
        return
    pytest.fail(f"Optax has mended it: take {report.__name__} off the page and out of REPORTS")


def test_the_page_lists_every_report():
    assert sorted(re.findall(r"^\| `(\w+)` \|", PAGE, re.M)) == sorted(NAMES)
