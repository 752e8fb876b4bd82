"""`docs/start/replace.md`: each line is the project's rule in float64, on names of its parameters.

The rules are written from what the projects publish, at the commits of the page. Shapes are small;
names and axes are theirs.
"""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import optax_muonplus as omp
from tests.support import reference
from tests.support.compilation import collectives
from tests.support.documents import PAGES
from tests.support.reference_coefficients import POLAR_EXPRESS

PAGE = PAGES["start/replace.md"]
STEPS = 3


def rate(step):
    return 0.02 * (1 - step / 10)


def muon_rate(step):
    return 16 * rate(step)


def adam_rate(step):
    return 0.5 * rate(step)


@dataclasses.dataclass(frozen=True)
class Project:
    """By leaf its shape, and for a matrix its axes (out, in); the rules of both groups."""

    leaves: dict[str, tuple]
    matrices: dict = dataclasses.field(default_factory=dict)  # of `reference.muonplus_step`
    others: dict = dataclasses.field(default_factory=dict)  # of `reference.adamw_step`
    matrix_rate: object = rate
    other_rate: object = rate
    decayed: object = lambda shape: True  # which of the others
    stored: type | None = None  # dtype of both first moments
    names: dict = dataclasses.field(default_factory=dict)  # that the page's lines use


LINEAR = ((1,), (0,))  # of a kernel (in, out): axes of rows, of columns
STACK = ((2,), (1,))
POLAR_ROWS = POLAR_EXPRESS[:5]


def two_axes(shape):
    return len(shape) >= 2


PROJECTS = {
    "optax.contrib.muon": Project(
        {
            "up/kernel": ((12, 20), LINEAR),
            "query/kernel": ((12, 2, 8), ((1, 2), (0,))),
            "up/bias": ((20,), None),
        },
    ),
    "yxTPU": Project(  # layers are on axis 1
        {
            "cycles/layer_3/mixer/qkv_proj/kernel": ((12, 2, 4, 4), ((2, 3), (0,))),
            "cycles/layer_3/mixer/out_proj/kernel": ((2, 2, 4, 12), ((3,), (0, 2))),
            "cycles/layer_3/mlp/wi/kernel": ((12, 2, 2, 10), ((2, 3), (0,))),
            "cycles/layer_3/mlp/wo/kernel": ((10, 2, 12), ((2,), (0,))),
            "cycles/layer_3/input_norm/scale": ((12, 2), None),
            "token_embedding/embedding": ((24, 12), None),
            "logits/kernel": ((12, 24), None),
        },
        {"consistent_rms": 0.2, "weight_decay": 0.1},
        {"b2": 0.95, "weight_decay": 0.1},
    ),
    "param-decomp": Project(
        {
            "in_proj_w": ((3, 12, 8), STACK),
            "in_proj_b": ((3, 8), None),
            "blocks/0/wq": ((3, 8, 8), STACK),
            "blocks/0/wk": ((3, 4, 8), STACK),
            "blocks/0/w1": ((3, 8, 20), STACK),
            "blocks/0/b1": ((3, 20), None),
            "out_ws/0": ((3, 8, 12), STACK),
            "out_bs/0": ((3, 12), None),
        },
        {"consistent_rms": 0.2, "weight_decay": 0.1},
    ),
    "visionary": Project(
        {
            f"params/transformer/TransformerBlock_0/{name}/kernel": (shape, LINEAR)
            for name, shape in {
                "Attention_0/Dense_0": (16, 12),
                "Attention_0/Dense_1": (16, 4),
                "SwiGLU_0/Dense_2": (24, 16),
            }.items()
        }
        | {
            "params/observation_projection/kernel": ((6, 16), LINEAR),
            "params/observation_projection/bias": ((16,), None),
            "params/prediction_projection/kernel": ((16, 6), LINEAR),
            "params/action_embedding/action_projection_kernel": ((2, 7, 16), None),
            "params/action_embedding/action_projection_bias": ((2, 16), None),
            "params/shortcut_embedding/step_embedding/embedding": ((8, 8), None),
            "params/register_tokens": ((2, 16), None),
            "params/transformer/final_norm/scale": ((16,), None),
        },
        {"weight_decay": 0.1},
        {"b2": 0.99},
        other_rate=adam_rate,
    ),
    "chomp": Project(
        {
            f"model/layers/0/{name}/weight": (shape, ((0,), (1,)))
            for name, shape in {
                "attn/wz": (4, 16),
                "attn/wv": (24, 16),
                "attn/wh2": (16, 24),
                "ffn/fc1": (20, 16),
            }.items()
        }
        | {
            "model/layers/0/attn/wz/bias": ((4,), None),
            "model/layers/0/attn/cema/alpha": ((16, 4, 1), None),
            "model/layers/0/attn/cema/gamma_real": ((16, 4), None),
            "model/layers/0/attn/gamma": ((2, 4), None),
            "model/embed/weight": ((32, 16), None),
            "model/norm/weight": ((16,), None),
            "lm_head/weight": ((32, 16), ((0,), (1,))),
        },
        {"shape_scale": "none", "weight_decay": 0.01},
        {"weight_decay": 0.01, "nesterov": False},
        matrix_rate=muon_rate,
        decayed=two_axes,
    ),
    "TinyRefinementModel": Project(
        {
            f"blocks/0/{name}/kernel": (shape, LINEAR)
            for name, shape in {
                "attn/q": (16, 16),
                "attn/k": (16, 8),
                "attn/o": (16, 16),
                "gate_proj": (16, 40),
                "down_proj": (40, 16),
            }.items()
        }
        | {
            "blocks/0/attn/q/bias": ((16,), None),
            "blocks/0/attn/q_norm/scale": ((8,), None),
            "embed/embedding": ((48, 16), None),
            "out_norm/scale": ((16,), None),
        },
        {"table": POLAR_ROWS, "shape_scale": "none", "weight_decay": 0.01},
        {"b2": 0.95, "weight_decay": 0.1, "nesterov": False},
        matrix_rate=muon_rate,
        decayed=two_axes,
        stored=ml_dtypes.bfloat16,
    ),
}


def trees(project):
    """Parameters, and the gradients of each step: float32, flat by path."""
    random = np.random.default_rng(0)

    def draw():
        return {k: random.normal(size=v).astype(np.float32) for k, (v, _) in project.leaves.items()}

    return draw(), [draw() for _ in range(STEPS)]


def blocks(x, axes):
    """A leaf as (batch, out, in), and how to turn it back."""
    rows, columns = axes
    batch = [i for i in range(x.ndim) if i not in rows + columns]
    order = [*batch, *rows, *columns]
    turned = x.transpose(order)
    out = int(np.prod([x.shape[i] for i in rows]))
    inner = int(np.prod([x.shape[i] for i in columns]))
    return turned.reshape(-1, out, inner), lambda y: y.reshape(turned.shape).transpose(
        np.argsort(order)
    )


def round_to(x, dtype):
    return x if dtype is None else x.astype(np.float32).astype(dtype).astype(np.float64)


def rule(project):
    """The updates of each step in float64, by path; the parameters move."""
    params, gradients = trees(project)
    params = {k: v.astype(np.float64) for k, v in params.items()}
    m, v = ({k: np.zeros_like(x) for k, x in params.items()} for _ in range(2))
    for t, grads in enumerate(gradients, 1):
        updates = {}
        for k, (shape, axes) in project.leaves.items():
            w, g = params[k], grads[k].astype(np.float64)
            if axes is None:
                options = dict(project.others)
                options["weight_decay"] = project.decayed(shape) * options.get("weight_decay", 0)
                updates[k], first, v[k] = reference.adamw_step(
                    w, m[k], v[k], g, t, learning_rate=project.other_rate(t - 1), **options
                )
            else:
                (ws, back), (ms, _), (gs, _) = (blocks(x, axes) for x in (w, m[k], g))
                options = {"norm": "none", "bias_correction": True, "eps": 1e-8, **project.matrices}
                options["learning_rate"] = project.matrix_rate(t - 1)
                steps = [
                    reference.muonplus_step(*x, t, **options) for x in zip(ws, ms, gs, strict=True)
                ]
                updates[k], first = (back(np.stack(x)) for x in zip(*steps, strict=True))
            m[k] = round_to(first, project.stored)
            params[k] = w + updates[k]
        yield updates


def nested(flat, leaf=lambda x: x):
    """A tree of dictionaries from paths."""
    tree = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf(value)
    return tree


def path_of(keys):
    return "/".join(key.key for key in keys)


def lines(name, project, **more):
    """`had` and `new` of a section of the page."""

    def dimensions(tree):  # a tree may have masked leaves

        def of(keys, x):
            axes = project.leaves[path_of(keys)][1]
            return axes and MuonDimensionNumbers(reduction_axis=axes[1], output_axis=axes[0])

        return jax.tree.map_with_path(of, tree)

    names = {
        "jnp": jnp,
        "optax": optax,
        "omp": omp,
        "rate": rate,
        "muon_rate": muon_rate,
        "adam_rate": adam_rate,
        "rows": POLAR_ROWS,
        "dimensions": dimensions,
        "mask": lambda tree: jax.tree.map(lambda x: x.ndim >= 2, tree),
        "labels": lambda tree: jax.tree.map_with_path(
            lambda keys, _: "muon" if project.leaves[path_of(keys)][1] else "adam", tree
        ),
        "stacked_muon": lambda *_, **__: None,  # param-decomp's own
        "dtype": "float32",
        **more,
    }
    (section,) = (x for x in re.split(r"^## ", PAGE, flags=re.M) if x.startswith(f"{name}\n"))
    (code,) = re.findall(r"^```py\n(.*?)^```$", section, re.M | re.S)
    exec(code, names)
    return names["had"], names["new"]


def differences(tx, project):
    """Largest difference of an update from the rule, over the rule's largest entry, by leaf."""
    params, gradients = trees(project)
    params, found = nested(params, jnp.asarray), {}
    state, update = tx.init(params), jax.jit(tx.update)
    for expected, grads in zip(rule(project), gradients, strict=True):
        updates, state = update(nested(grads, jnp.asarray), state, params)
        params = optax.apply_updates(params, updates)
        for keys, x in jax.tree.leaves_with_path(updates):
            want = expected[path_of(keys)]
            error = np.abs(np.asarray(x, np.float64) - want).max() / np.abs(want).max()
            found[path_of(keys)] = max(error, found.get(path_of(keys), 0))
    return found


def bounds():
    """By project, the page's bound for its matrices, in bfloat16 too, and for the others."""
    rows = re.findall(r"^\| [`\[]([\w.-]+)[`\]].* \| (.*) \| (.*) \|$", PAGE, re.M)
    return {name: [re.findall(r"\de-\d", cell) for cell in cells] for name, *cells in rows}


BOUNDS = bounds()


def test_the_page_has_a_row_for_each_project():
    assert [*BOUNDS] == [*PROJECTS]


@pytest.mark.parametrize("name", PROJECTS)
def test_the_line_is_the_rule_to_the_bound_of_the_page(name):
    project = PROJECTS[name]
    found = differences(lines(name, project)[1], project)
    matrices, others = BOUNDS[name]
    for path, (_, axes) in project.leaves.items():
        bound = matrices if axes else others or ["1e-2"]  # in bfloat16
        assert found[path] <= float(bound[0]), f"{path}: {found[path]:.1e}"


@pytest.mark.parametrize("name", [name for name in PROJECTS if name != "param-decomp"])
def test_what_they_have_is_the_rule_too(name):
    """Optax's own transformations; 1e-2 where it multiplies a momentum in bfloat16."""
    project = PROJECTS[name]
    bound = 2e-5 if project.stored is None else 1e-2
    assert max(differences(lines(name, project)[0], project).values()) <= bound


def test_bfloat16_products_of_param_decomp():
    project = PROJECTS["param-decomp"]
    found = differences(lines("param-decomp", project, dtype="bfloat16")[1], project)
    bound = float(BOUNDS["param-decomp"][0][1])
    assert 1e-3 < max(found.values()) <= bound


def test_the_other_parameters_of_tiny_refinement_model_get_bit_for_bit_what_they_had():
    project = PROJECTS["TinyRefinementModel"]
    params, (grads, *_) = trees(project)
    params, grads = nested(params, jnp.asarray), nested(grads, jnp.asarray)
    txs = lines("TinyRefinementModel", project)
    had, new = (tx.update(grads, tx.init(params), params)[0] for tx in txs)
    for path in ("embed", "out_norm"):
        jax.tree.map(np.testing.assert_array_equal, had[path], new[path])


def test_dimension_numbers_of_yxtpu_stay_a_function_on_nnx_variables():
    """Its function returns Variables for Variables, and pure values for pure arrays."""
    project = PROJECTS["yxTPU"]
    params, (grads, *_) = trees(project)

    def state(flat):
        return nnx.from_flat_state([(tuple(k.split("/")), nnx.Param(x)) for k, x in flat.items()])

    def dimensions(tree):
        axes = {k: v and MuonDimensionNumbers(v[1], v[0]) for k, (_, v) in project.leaves.items()}
        first = nnx.to_flat_state(tree)[0][1]
        return state(axes) if isinstance(first, nnx.Variable) else nnx.as_pure(state(axes))

    _, tx = lines("yxTPU", project, dimensions=dimensions)
    expected = next(rule(project))
    params, grads = ({k: jnp.asarray(x) for k, x in flat.items()} for flat in (params, grads))
    for convert in (lambda x: x, nnx.as_pure):
        w, g = convert(state(params)), convert(state(grads))
        updates, _ = tx.update(g, tx.init(w), w)
        for path, x in nnx.to_flat_state(updates):
            actual = x.get_value() if isinstance(x, nnx.Variable) else x
            np.testing.assert_allclose(actual, expected["/".join(path)], atol=1e-6)


def test_replicated_matrices_of_visionary_are_divided_over_the_chips():
    """Of a size where it pays to send them."""
    replicated = NamedSharding(jax.make_mesh((8,), ("data",), (AxisType.Auto,)), P())
    names = (f"params/transformer/TransformerBlock_{i}/Dense_0/kernel" for i in range(8))
    project = Project({name: ((256, 512), LINEAR) for name in names})
    params = nested(trees(project)[0], lambda x: jax.device_put(x, replicated))

    def compiled(**options):
        _, tx = lines("visionary", project, omp=omp_with(**options))
        return jax.jit(tx.update).lower(params, jax.jit(tx.init)(params), params).compile()

    assert collectives(compiled()) == []
    assert collectives(compiled(sharding=replicated)) == ["all-gather"]


def omp_with(**options):
    """The library for a line, whose `muon` gets these options too."""
    return types.SimpleNamespace(muon=functools.partial(omp.muon, **options))


def test_param_decomps_users_can_read_a_state_that_was_taken_over():
    """The state of Optax's Muon after the same steps: same structure, counts and averages."""
    project = PROJECTS["param-decomp"]
    flat, gradients = trees(project)
    params = nested(flat, jnp.asarray)
    _, new = lines("param-decomp", project)
    had, _ = lines("optax.contrib.muon", project)
    states = [new.init(params), had.init(params)]
    for grads in gradients:
        pair = zip((new, had), states, strict=True)
        states = [tx.update(nested(grads, jnp.asarray), x, params)[1] for tx, x in pair]
    state, report = omp.take_over(states[0], had.init(params), params)
    assert not report.started_anew and not report.not_used
    assert jax.tree.structure(state) == jax.tree.structure(states[1])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), state, states[1])


# What the page says of Optax's Muon

AS_RELEASED = pytest.mark.skipif(optax.__version__ != "0.2.8", reason="said of Optax 0.2.8")


@AS_RELEASED
@pytest.mark.parametrize("spec", [P("data", "model"), P(None, "model"), P("data", None)])
def test_optax_refuses_matrices_on_the_mesh_that_jax_makes_by_default(spec):
    kinds = () if jax.__version_info__ >= (0, 9) else ((AxisType.Explicit,) * 2,)
    mesh = jax.make_mesh((4, 2), ("data", "model"), *kinds)
    assert mesh.axis_types == (AxisType.Explicit,) * 2
    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(jnp.ones((16, 24)), NamedSharding(mesh, spec))}
        had, new = optax.contrib.muon(0.1), omp.muon(0.1)
        with pytest.raises(Exception) as error:
            jax.jit(had.update)(params, had.init(params), params)
        assert type(error.value).__name__ == "ShardingTypeError"
        quoted = re.findall(r"`(Contracting [^`]*|dot_general [^`]*)`", PAGE)
        assert len(quoted) == 2 and str(error.value).startswith(tuple(quoted))
        jax.jit(new.update)(params, new.init(params), params)


@AS_RELEASED
def test_what_gradients_of_each_size_get(capsys):
    (code,) = re.findall(r"^```{code-cell}\n(.*?)^```$", PAGE, re.M | re.S)
    exec(code, {})
    found = re.findall(r"^(\w+).* of (\S+): +(\S+)% off$", capsys.readouterr().out, re.M)
    by_size = {(who, float(size)): float(error) for who, size, error in found}
    assert len(by_size) == 10
    theirs = [by_size["optax", size] for size in (1e-26, 1e-10, 1e-3, 1e18, 1e37)]
    np.testing.assert_allclose(theirs, [100, 31, 0, 100, np.nan], atol=1)
    assert max(error for (who, _), error in by_size.items() if who != "optax") == 0


@pytest.mark.parametrize(("options", "smallest"), [({}, 1e-26), ({"eps": 0.0}, 1e-30)])
def test_updates_are_the_same_for_gradients_of_any_size(options, smallest):
    g = jax.random.normal(jax.random.key(0), (64, 256))
    tx = omp.muon(1.0, **options)
    usual, *others = (
        tx.update({"w": size * g}, tx.init({"w": g}))[0]["w"] for size in (1.0, smallest, 1e37)
    )
    for update in others:
        assert jnp.linalg.norm(update - usual) <= 2e-5 * jnp.linalg.norm(usual)
