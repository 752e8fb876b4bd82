"""What is read in whole models of other projects, and what `describe` asks about in them.

The tables have for each leaf what its own project chose, and the right reading. Leaves whose group
is not the project's were judged one by one: biases of heads, kernels of one channel, and heads.
"""

import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import optax_muonplus as omp
from optax_muonplus._params.reader import RuleReader, reader_of
from optax_muonplus._params.resolve import resolve
from tests.support.readings import shown

FILE = pathlib.Path(__file__).parent / "model_zoo" / "trees" / "whole_models.txt"


def expand(path):
    """Lists the paths of ``a{0..2,5}/b``."""
    parts = re.split(r"\{(.*?)\}", path)
    for i in range(1, len(parts), 2):
        ends = (run.split("..") for run in parts[i].split(","))
        parts[i] = [str(n) for x in ends for n in range(int(x[0]), int(x[-1]) + 1)]
    return map("".join, itertools.product(*(x if isinstance(x, list) else [x] for x in parts)))


def read_models():
    """By model: its shapes, what the project chose, what is right, and the options above them."""
    models = {}
    for line in FILE.read_text().splitlines():
        if line.startswith("["):
            shapes, chosen, right, options = models[line.strip("[]")] = {}, {}, {}, {}
        elif found := re.match("(rules|layer_axes|asked)=(.*)", line):
            name, text = found.groups()
            options[name] = text.split() if name == "asked" else eval(text, {"omp": omp})
        elif line and not line.startswith("#"):
            path, shape, choice, reading = line.split()
            for leaf in expand(path):
                shapes[leaf] = jax.ShapeDtypeStruct(tuple(map(int, shape.split("x"))), jnp.float32)
                chosen[leaf], right[leaf] = choice, reading
    return models


MODELS = read_models()


def options_of(model):
    options = MODELS[model][3]
    return {name: options[name] for name in ("rules", "layer_axes") if name in options}


def asked(table):
    """The parameters in the questions below a table."""
    lines = re.findall(r"^a (?:head|matrix)\? (.*)", table, re.M)
    return [path for line in lines for x in re.findall(r"(\S+) \(", line) for path in expand(x)]


def test_the_models_are_whole():
    sizes = {name: len(shapes) for name, (shapes, *_) in MODELS.items()}
    assert list(sizes.values()) == [17, 24, 161, 200, 154, 178, 66, 292, 24, 27], sizes


@pytest.mark.parametrize("model", MODELS)
def test_leaves_are_read_as_a_person_judged_and_doubts_are_asked(model):
    shapes, _, right, options = MODELS[model]
    reader = reader_of(None, **options_of(model))
    leaves = resolve(shapes, reader).leaves
    assert {leaf.name: shown(leaf) for leaf in leaves} == right
    table = omp.describe(shapes, **options_of(model))
    assert asked(table) == options.get("asked", []), table


def test_where_the_project_chose_otherwise():
    """The list is short: 2-D biases of heads, one channel, one output, and heads."""
    kinds = set()
    for shapes, chosen, right, _ in MODELS.values():
        for path in shapes:
            if chosen[path] != ("adam" if right[path] == "adam" else "muon"):
                kinds.add(re.sub(r"\d+", "*", "/".join(path.split("/")[-2:])))
    assert kinds == {
        "query/bias",
        "key/bias",
        "value/bias",
        "head/kernel",
        "lm_head/weight",
        "Conv_*/kernel",
        "Conv*dSubsampling_*/kernel",
        "Dense_*/kernel",
    }


@pytest.mark.parametrize("model", ["transformer of param-decomp", "DeepSeek-V2-Lite, scanned"])
def test_without_the_options_no_stack_is_read_along_a_wrong_axis(model):
    """Matrices are refused, and no vector of layers is a matrix, so that no loss is silent."""
    shapes, _, right, _ = MODELS[model]
    leaves = resolve(shapes, RuleReader(), strict=False).leaves
    assert {x.label for x in leaves if right[x.name] == "adam"} == {"adam"}
    assert {x.label for x in leaves if right[x.name] != "adam"} == {"?"}
    if "scanned" in model:
        axes = {"^params/decoder/dense_layers/": 1, "^params/decoder/moe_layers/": 1}
        assert f"layer_axes={axes!r}" in omp.describe(shapes)
