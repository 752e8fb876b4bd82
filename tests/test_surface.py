"""The surface that users build on, as lists: whoever adds a name removes one."""

import inspect
import types

import optax_muonplus as omp

# What pages teach, each name at one address.
LIBRARY = """
    Matrices MatrixSpec MuonDimensionNumbers PAPER describe learning_rate matrix_chain momentum muon
    muon_dimension_numbers muonplus normalize optimizer orthogonalize partition_labels per_head
    scale_by_muonplus scale_by_shape take_over
    coefficients: TABLES for_steps
    polar: FastPolar Orthogonalize Polar polar_factor svd
    matrices: Norm Normalize ScaleByShape ShapeScale
    rules: AGENTS MAXTEXT MOE
    transforms: DualNorm Int8MomentumState LeafInfo MatrixLayout Momentum MomentumState
    find_momentum map_blocks param_remainders run_plain shard_state state_layout
"""
# What a rule of one's own, such as the contributed ones, is written with.
TOOLS = """
    matrices: DECAY Elementwise Kind MatrixFunction NOT_NEGATIVE POSITIVE as_real check_flag
    check_number check_word divide_by_pow2 known_count matrix_function root
    scale_by_pow2 static sum_of_squares upcast_for_sum
    transforms: FusedLink Link MatrixTransformation Part Run attention_layer check_rate
    flatten_tree nadamw
"""
CONTRIBUTED = """
    contrib: AdaMuon Aurora Balance Hyperball Mano NorMuon Record RecordState adamh hopper_polar
    hyperball qk_clip read_record recorded scale_by_aurora scale_by_muon scale_by_muoneq
    scale_by_turbo_muon
"""
ADVICE = (
    "A commit that adds a public name, or an argument, removes one, or argues in its text why not:"
    " a name is a promise with a page, tests and messages."
)


def names_in(lists):
    """Full names: ``matrices: Norm Normalize`` has ``matrices.Norm`` and another one."""
    found, room = set(), ""
    for word in lists.split():
        if word.endswith(":"):
            room = word.replace(":", ".")
        else:
            found.add(room + word)
    return found


def test_help_lists_what_a_module_gathers():
    for module in (omp.transforms, omp.polar, omp.matrices):
        assert module.__all__ == [name for name in dir(module) if not name.startswith("_")]


def test_the_public_names_are_these():
    public = set()
    for name in dir(omp):
        value = getattr(omp, name)
        if isinstance(value, types.ModuleType):
            same = {x for x in dir(value) if getattr(omp, x, None) is getattr(value, x)}
            public |= {f"{name}.{x}" for x in {*dir(value)} - same if not x.startswith("_")}
        else:
            public.add(name)
    listed = names_in(LIBRARY) | names_in(TOOLS) | names_in(CONTRIBUTED)
    assert public == listed, f"new: {public - listed}, gone: {listed - public}. {ADVICE}"


def test_the_library_has_at_most_sixty():
    assert len(names_in(LIBRARY)) <= 60, ADVICE


def test_muonplus_has_no_more_arguments():
    assert len(inspect.signature(omp.muonplus).parameters) <= 32, ADVICE
