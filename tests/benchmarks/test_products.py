"""`benchmarks.products`: every product that an update needs is timed on its own."""

import pytest

from benchmarks import products, trees


@pytest.mark.parametrize("tree", trees.SIZES)
def test_every_product_of_an_update_is_one_of_a_chain(tree):
    size = trees.SIZES[tree]._replace(layers=1, width=32)
    timed = {x for chain in products.chains(size, "float32").values() for x in chain.products}
    assert products.needed(size, "auto", None).keys() <= timed
