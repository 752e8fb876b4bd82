"""Products, loops and groups in the text of compiled programs, without a compiler."""

import functools

import pytest

from lab.compiled_programs import collectives, hlo, products, walk
from lab.compiled_programs.gpu import most_work

MAIN = """HloModule toy, is_scheduled=true, num_partitions=16

%cond (t: (s32[], bf16[8,4])) -> pred[] {{
  %t = (s32[], bf16[8,4]) parameter(0)
  %n = s32[] constant(7)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %less = pred[] compare(%i, %n), direction={direction}
}}

%body (t: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {{
  %t = (s32[], bf16[8,4]) parameter(0)
  %one = s32[] constant(1)
  %i = s32[] get-tuple-element(%t), index=0
  %x = bf16[8,4] get-tuple-element(%t), index=1
  %next = s32[] {step}(%i, %one)
  %y = bf16[8,4] {inner}
  ROOT %out = (s32[], bf16[8,4]) tuple(%next, %y)
}}

ENTRY %main (i: s32[], x: bf16[8,4]) -> (s32[], bf16[8,4]) {{
  %i = s32[] parameter(0)
  %x = bf16[8,4] parameter(1)
  %start = (s32[], bf16[8,4]) tuple(%i, %x)
  ROOT %loop = (s32[], bf16[8,4]) while(%start), condition=%cond, body=%body
}}
"""


DOT = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}"


def of_products(program):
    return walk.most_work(program, functools.partial(products.cost, program), "operations")


def program(direction="LT", step="add", inner=DOT):
    return hlo.parse(MAIN.format(direction=direction, step=step, inner=inner))


def test_a_plain_count_is_as_long_as_its_condition_says():
    """libtpu does not write how often a loop runs."""
    work = of_products(program())
    assert walk.of_kinds(work, "operations") == {"products": 7 * 2 * 8 * 4 * 4}


@pytest.mark.parametrize("change", [{"direction": "LE"}, {"step": "multiply"}])
def test_another_loop_with_products_is_refused(change):
    with pytest.raises(ValueError, match="number of iterations is unknown"):
        of_products(program(**change))


@pytest.mark.parametrize(
    ("operands", "out", "attributes", "operations"),
    [
        # A product: no window.
        ("bf16[8,4] x, bf16[4,6] y", "bf16[8,6]", "dim_labels=bf_io->bf", 8 * 4 * 6),
        # libtpu writes the batch of a product as space: each of 5 meets its own weights only.
        (
            "bf16[5,8,4] x, bf16[5,4,6] y",
            "bf16[5,8,6]",
            "window={size=5 stride=4 pad=0_0 lhs_dilate=5}, dim_labels=0bf_0io->0bf",
            5 * 8 * 4 * 6,
        ),
        # A convolution of 5 places with 3 weights, padded by one: its ends meet two.
        (
            "bf16[2,5,4] x, bf16[3,4,6] y",
            "bf16[2,5,6]",
            "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
            2 * (5 * 3 - 2) * 4 * 6,
        ),
    ],
)
def test_operations_of_a_convolution_are_pairs_that_meet(operands, out, attributes, operations):
    left, right = (text.strip().split() for text in operands.split(", ", 1)[0:2])
    text = f"""HloModule toy

ENTRY %main (x: {left[0]}, y: {right[0]}) -> {out} {{
  %x = {left[0]} parameter(0)
  %y = {right[0]} parameter(1)
  ROOT %z = {out} convolution(%x, %y), {attributes}
}}
"""
    work = of_products(hlo.parse(text))
    assert walk.of_kinds(work, "operations") == {"products": 2 * operations}


def of_groups(text, opcode="all-gather", devices=8):
    x = hlo.Instruction("x", opcode, (), "", f", channel_id=1, {text}, dimensions={{0}}")
    return collectives.groups(x, devices)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups={}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
            [[0, 2, 4, 6], [1, 3, 5, 7]],
        ),
    ],
)
def test_groups_are_read_from_every_format(text, expected):
    assert of_groups(text) == expected


def entry(body, devices=1):
    """A program whose entry computation has a bfloat16 array `x`, of 8 by 4, and `body`."""
    return hlo.parse(f"""HloModule toy, num_partitions={devices}

%added (a: bf16[8,4]) -> bf16[8,4] {{
  %a = bf16[8,4] parameter(0)
  ROOT %sum = bf16[8,4] add(%a, %a)
}}

ENTRY %main (x: bf16[8,4]) -> bf16[8,4] {{
  %x = bf16[8,4] parameter(0)
{body}
}}
""")


def test_what_runs_beside_others_is_counted_where_it_begins():
    """A fusion that is taken for another kernel would count its operands twice."""
    begun = "((bf16[8,4]), bf16[8,4], u32[]) {}-start(%x)"
    for opcode, attributes in (("fusion", ", kind=kLoop, calls=%added"), ("copy", "")):
        text = f"  %s = {begun.format(opcode)}{attributes}\n  ROOT %d = bf16[8,4] {opcode}-done(%s)"
        work = most_work(entry(text))
        assert walk.total(work, "bytes") == 2 * 8 * 4 * 2
        assert walk.total(work, "kernels") == 1


def test_an_operation_that_is_not_known_is_refused():
    body = "  %s = ((bf16[8,4]), bf16[8,4]) sort-start(%x)\n  ROOT %d = bf16[8,4] sort-done(%s)"
    with pytest.raises(ValueError, match="s is a sort-start, which is not known"):
        most_work(entry(body))
    kernel = '  ROOT %mine = bf16[8,4] custom-call(%x), custom_call_target="tpu_custom_call"'
    with pytest.raises(ValueError, match="mine is a kernel without an estimate"):
        of_products(entry(kernel))


SPLASH = """  %q = bf16[2,8,1024,64] parameter(1)
  ROOT %splash_mha_dq_no_residuals.1 = bf16[2,8,1024,64] custom-call(%q, %q, %q), \
custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
}}"""
CUDNN = """  %q = bf16[8,1024,4,64] parameter(1)
  ROOT %a = (bf16[8,4,1024,64], u8[0]) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": \
{"intermediate_tensor_shape":{"dimensions":["8","4","1024","1024"]}}}"""


@pytest.mark.parametrize(
    ("kernel", "operations"),
    [(SPLASH, 3 * 2 * (2 * 8 * 1024 * 64) * 512), (CUDNN, 2 * 2 * (8 * 1024 * 4 * 64) * 512)],
)
def test_kernels_of_causal_attention_have_the_products_of_half_the_pairs(kernel, operations):
    """The attributes of one are written in several lines."""
    assert walk.of_kinds(of_products(entry(kernel)), "operations") == {"products": operations}
