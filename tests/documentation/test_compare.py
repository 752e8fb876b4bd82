"""`docs/explain/compare.md`: sizes of states, and dates of what is said of others."""

import re

import jax
import pytest

import optax_muonplus as omp
from tests.support.documents import PAGES

PAGE = PAGES["explain/compare.md"]
RULES = dict(re.findall(r"^\| `omp\.contrib\.(\w+).* \| ([^|]+) \|$", PAGE, re.M))


def test_the_table_has_all_rules():
    assert len(RULES) == 7


@pytest.mark.parametrize("name", RULES)
def test_sizes_of_states(name):
    make = getattr(omp.contrib, name)
    tx = make(0.01) if name == "hyperball" else omp.optimizer(make(), 0.01)
    state = jax.eval_shape(tx.init, {"up": {"kernel": jax.ShapeDtypeStruct((64, 256), "float32")}})
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state)) / (64 * 256)
    rows = 1 / 64 if "per row" in RULES[name] else 0
    assert numbers == pytest.approx(int(RULES[name][0]) + rows, abs=1e-3)


def test_each_other_library_has_a_source_and_a_date():
    table = PAGE.partition("## Other libraries\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \| (.*) \|$", table, re.M)[1:]
    assert len(rows) >= 10
    for _, _, source, date in rows:
        assert source.strip() and re.fullmatch(r"\d{4}-\d\d-\d\d", date), source


def test_the_page_is_short():
    assert len(PAGE.split()) <= 600
