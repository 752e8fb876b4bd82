"""What is read in the parameters of public models, leaf by leaf, against what a person judged.

The tables in ``model_zoo/`` have for each leaf its path, its shape, what is right (out x in, with
x batch where there are several, ``adam``, or ``?`` where it cannot be known) and the rule that
says so. Each model is read as a whole, since neighbours matter. Where a user has to write rules to
get what is right, a line ``rules=`` behind the name of the model has them.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus._params.reader import reader_of
from optax_muonplus._params.resolve import resolve
from tests.support.readings import shown as _shown

ZOO = pathlib.Path(__file__).parent / "model_zoo"
LEFT_OUT = "-"


def read_models():
    """``{(file, model): [(path, shape, right, rule)]}``; a leaf "alone" is a model of its own."""
    models, rules = {}, {}
    for file in sorted(ZOO.glob("*.txt")):
        for line in file.read_text().splitlines():
            if line.startswith("["):
                model = line.strip("[]")
            elif line.startswith("rules="):
                rules[file.stem, model] = eval(line.removeprefix("rules="), {"omp": omp})
            elif line and not line.startswith("#"):
                path, shape, right, rule = re.split(
                    r" {2,}|(?<=\S) (?=\d+x|adam|\?)", line, maxsplit=3
                )
                sizes = () if shape in ("scalar", LEFT_OUT) else tuple(map(int, shape.split("x")))
                name = f"{path} {shape}" if model.startswith("alone:") else model
                leaves = models.setdefault((file.stem, name), [])
                leaves.append((path, sizes, right, rule))
    return models, rules


MODELS, RULES = read_models()


def test_number_of_leaves():
    counts = {}
    for (file, _), leaves in MODELS.items():
        counts[file] = counts.get(file, 0) + len(leaves)
    assert counts.pop("small_trees") == 297
    assert counts == {
        "equinox_haliax": 53,
        "flax_linen": 105,
        "haiku_keras_others": 92,
        "lists_and_agents": 55,
        "maxtext_tunix_easydel": 86,
        "transformers_flax": 89,
        "vision": 45,
    }
    assert sum(counts.values()) == 525


@pytest.mark.parametrize("model", MODELS, ids="/".join)
def test_each_leaf_is_read_as_a_person_judged(model):
    leaves = MODELS[model]
    there = [leaf for leaf in leaves if leaf[2] != LEFT_OUT]
    tree = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape, _, _ in there}
    for hole in (None, optax.MaskedNode()) if len(there) < len(leaves) else (None,):
        whole = {path: tree.get(path, hole) for path, *_ in leaves}
        assert len(whole) == len(leaves)
        reader = reader_of(None, RULES.get(model, ()))
        found = {leaf.name: leaf for leaf in resolve(whole, reader, strict=False).leaves}
        assert {path: found[path].shape for path in tree} == {x[0]: x[1] for x in there}
        read = {path: (_shown(found[path]), found[path].rule) for path in tree}
        assert read == {path: (right, rule) for path, _, right, rule in there}
