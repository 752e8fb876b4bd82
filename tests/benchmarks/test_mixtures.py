"""Trees of mixtures of experts: their matrices, how they are spread, and the fewest bytes."""

from benchmarks import meshes, products, trees

SIZE = trees.Size(16, 2, 24, gated=True, experts=8)


def placed(mesh, spec, experts="-", scanned=False):
    tree = meshes.placed(trees.shapes(SIZE), meshes.simulated(mesh), spec, experts)
    return trees.scanned(tree) if scanned else tree


def test_experts_are_matrices_of_their_own():
    assert products.matrix_shapes(SIZE) == {(16, 16): 8, (16, 8): 2, (16, 24): 32, (24, 16): 16}
    assert meshes.described(placed("data=8", "data", scanned=True)) == [
        "1 of 2 x 8 x 24 x 16, cut along nothing and nothing and data and nothing",
        "2 of 2 x 8 x 16 x 24, cut along nothing and nothing and data and nothing",
        "4 of 2 x 16 x 16, cut along nothing and data and nothing",
        "1 of 2 x 16 x 8, cut along nothing and data and nothing",
    ]
    scanned = placed("data=8", "data", scanned=True)["blocks"]
    up = trees.dimension_numbers({"blocks": scanned})["blocks"]["experts"]["up"]["kernel"]
    assert (up.reduction_axis, up.output_axis) == ((2,), (3,))


def test_experts_that_are_whole_need_no_bytes():
    experts = 4 * 2 * 8 * 3 * 16 * 24
    others = 4 * 2 * (4 * 16 * 16 + 16 * 8)

    def sent(total, groups=1):
        """The bytes of matrices in shards, which the devices of each group share."""
        return 2 * total / 8 * (1 - groups / 8)

    assert meshes.fewest_bytes(placed("expert=8", "expert", "expert")) == sent(others)
    both = "expert=2,data=4", "data,expert", "expert"
    assert meshes.fewest_bytes(placed(*both)) == sent(others) + sent(experts, groups=2)
    assert meshes.fewest_bytes(placed(*both, scanned=True)) == sent(others) + sent(experts, 2)
    assert meshes.fewest_bytes(placed("data=8", "-")) == (others + experts) * 7 / 8
