"""What is counted in programs for GPUs and TPUs, on small texts; no compiler is needed."""

import pytest

from lab.compiled_programs import gpu, hlo, tpu, walk


def library_product(shape, operands):
    """A call of cuBLASLt as XLA writes it: a result and a workspace."""
    return (
        f'({shape}, s8[4194304]) custom-call({operands}), custom_call_target="__cublas$lt$matmul",'
        ' backend_config={"gemm_backend_config":{"beta":0,"dot_dimension_numbers":{'
        '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
    )


def gpu_work(body, computations="", devices=1):
    """The work of a program for a GPU whose entry computation is ``body``."""
    text = f"""HloModule toy, is_scheduled=true, num_partitions={devices}
{computations}
ENTRY %main (x: bf16[64,64], y: f32[64,64], z: f32[8,64,64], i: s32[]) -> bf16[64,64] {{
  %x = bf16[64,64] parameter(0)
  %y = f32[64,64] parameter(1)
  %z = f32[8,64,64] parameter(2)
  %i = s32[] parameter(3)
{body}
}}
"""
    return gpu.most_work(hlo.parse(text))


def of(work, name):
    return walk.of_kinds(work, name)


HALF, WIDE = 64 * 64 * 2, 64 * 64 * 4  # bytes of a matrix


CUBE = 2 * 64**3  # operations of a product


@pytest.mark.parametrize(
    ("shape", "operands", "size"),
    [
        ("bf16[64,64]", "%x, %x", 3 * HALF),
        ("bf16[64,64]", "%x, %x, %x", 4 * HALF),
        ("f32[64,64]", "%x, %x", 2 * HALF + WIDE),
        ("f32[64,64]", "%y, %y", 3 * WIDE),
    ],
)
def test_a_library_product_has_its_operations_and_no_workspace(shape, operands, size):
    work = gpu_work("  ROOT %product = " + library_product(shape, operands))
    assert of(work, "operations") == {"products": CUBE}
    assert of(work, "bytes") == {"products": size}
    assert of(work, "kernels") == {"products": 1}


FUSIONS = """
%sums (p: bf16[64,64]) -> f32[64] {
  %p = bf16[64,64] parameter(0)
  %wide = f32[64,64] convert(%p)
  %zero = f32[] constant(0)
  ROOT %r = f32[64] reduce(%wide, %zero), dimensions={1}, to_apply=%add
}

%cut (p: f32[8,64,64]) -> bf16[64,64] {
  %p = f32[8,64,64] parameter(0)
  %one = f32[1,64,64] slice(%p), slice={[2:3], [0:64], [0:64]}
  %matrix = f32[64,64] bitcast(%one)
  ROOT %narrow = bf16[64,64] convert(%matrix)
}

%put (p: f32[8,64,64], q: f32[64,64], k: s32[]) -> f32[8,64,64] {
  %p = f32[8,64,64] parameter(0)
  %q = f32[64,64] parameter(1)
  %one = f32[1,64,64] bitcast(%q)
  %k = s32[] parameter(2)
  ROOT %all = f32[8,64,64] dynamic-update-slice(%p, %one, %k, %k, %k)
}

%small (a: bf16[64,64]) -> bf16[64,16] {
  %a = bf16[64,64] parameter(0)
  %b = bf16[64,16] slice(%a), slice={[0:64], [0:16]}
  ROOT %dot = bf16[64,16] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.mark.parametrize(
    ("line", "kind", "size"),
    [
        ("f32[64] fusion(%x), kind=kInput, calls=%sums", "reductions", HALF + 4 * 64),
        ("bf16[64,64] fusion(%z), kind=kLoop, calls=%cut", "arithmetic", WIDE + HALF),
        ("f32[8,64,64] fusion(%z, %y, %i), kind=kLoop, calls=%put", "moves", 2 * WIDE + 4),
        ("f32[64,64] copy(%y)", "moves", 2 * WIDE),
        ("f32[1,64,64] dynamic-slice(%z, %i, %i, %i)", "moves", 2 * WIDE),
        ("f32[8,64,64] dynamic-update-slice(%z, %y, %i)", "moves", 2 * WIDE),
    ],
)
def test_a_kernel_beside_products_has_the_bytes_that_it_reads_and_writes(line, kind, size):
    """Where it cuts a stack, or puts a matrix into one, the bytes of one matrix count."""
    work = gpu_work(f"  ROOT %kernel = {line}", FUSIONS)
    assert of(work, "bytes") == {kind: size}
    assert of(work, "operations") == {}


def test_a_product_inside_a_fusion_is_a_product():
    work = gpu_work("  ROOT %k = bf16[64,16] fusion(%x), kind=kCustom, calls=%small", FUSIONS)
    assert of(work, "operations") == {"products": 2 * 64 * 64 * 16}
    assert of(work, "kernels") == {"products": 1}


BRANCHES = f"""
%two (t: (s32[], bf16[64,64])) -> (bf16[64,64]) {{
  %t = (s32[], bf16[64,64]) parameter(0)
  %m = bf16[64,64] get-tuple-element(%t), index=1
  %a = {library_product("bf16[64,64]", "%m, %m")}
  %mm = bf16[64,64] get-tuple-element(%a), index=0
  %b = {library_product("bf16[64,64]", "%mm, %m")}
  %mmm = bf16[64,64] get-tuple-element(%b), index=0
  ROOT %out = (bf16[64,64]) tuple(%mmm)
}}

%none (t: (bf16[64,64])) -> (bf16[64,64]) {{
  ROOT %t = (bf16[64,64]) parameter(0)
}}
"""


@pytest.mark.parametrize(
    "form",
    [
        "conditional(%i, %with, %without), true_computation=%two, false_computation=%none",
        "conditional(%i, %without, %with), branch_computations={%none, %two}",
    ],
)
def test_a_conditional_counts_its_most_expensive_branch(form):
    body = f"""  %with = (s32[], bf16[64,64]) tuple(%i, %x)
  %without = (bf16[64,64]) tuple(%x)
  ROOT %either = (bf16[64,64]) {form}"""
    assert of(gpu_work(body, BRANCHES), "operations") == {"products": 2 * CUBE}


def test_collectives_have_dtypes_and_bytes():
    work = gpu_work(
        "  %start = ((bf16[64,64]), bf16[64,64]) all-to-all-start(%x), replica_groups={{0,1,2,3}}\n"
        "  ROOT %done = bf16[64,64] all-to-all-done(%start)",
        devices=4,
    )
    assert of(work, "collectives") == {"all-to-all bf16": 1}
    assert of(work, "received") == {"all-to-all bf16": HALF * 3 // 4}
    assert of(work, "kernels") == {}


TPU = """HloModule toy, is_scheduled=true, num_partitions=16

%fused (p: bf16[64,64]) -> bf16[64,64] {
  %p = bf16[64,64] parameter(0)
  ROOT %c = bf16[64,64] convolution(%p, %p), dim_labels=bf_io->bf, \
backend_config={"estimated_cycles":"1000000"}
}

%gather (p: bf16[64,64]) -> bf16[1024,64] {
  %p = bf16[64,64] parameter(0)
  ROOT %g = bf16[1024,64] all-gather(%p), channel_id=1, replica_groups=[1,16]<=[16]
}

%body (t: (s32[], bf16[64,64])) -> (s32[], bf16[64,64]) {
  %t = (s32[], bf16[64,64]) parameter(0)
  %k = s32[] get-tuple-element(%t), index=0
  %m = bf16[64,64] get-tuple-element(%t), index=1
  %async-collective-start.1 = bf16[1024,64] fusion(%m), kind=kCustom, calls=%gather
  %async-collective-done.1 = bf16[1024,64] fusion(%m), kind=kCustom, calls=%gather
  %f = bf16[64,64] fusion(%m), kind=kOutput, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"30"},"used_scoped_memory_configs":[]}
  ROOT %out = (s32[], bf16[64,64]) tuple(%k, %f)
}

ENTRY %main (i: s32[], x: bf16[64,64]) -> (s32[], bf16[64,64]) {
  %i = s32[] parameter(0)
  %x = bf16[64,64] parameter(1)
  %all = bf16[64,64] all-to-all(%x), replica_groups=[1,16]<=[16], dimensions={0}
  %y = bf16[64,64] copy(%all), backend_config={"estimated_cycles":"4"}
  %start = (s32[], bf16[64,64]) tuple(%i, %y)
  ROOT %loop = (s32[], bf16[64,64]) while(%start), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_estimated_cycles_of_a_tpu_program_are_added_up():
    """A fusion's cycles include its inside."""
    work = tpu.most_work(hlo.parse(TPU))
    assert walk.of_kinds(work, "cycles") == {"copy": 4, "fusion": 5 * 30}
    assert walk.of_kinds(work, "collectives") == {"all-to-all bf16": 1, "all-gather bf16": 5}
    with pytest.raises(ValueError, match="no estimated_cycles"):
        tpu.most_work(hlo.parse(TPU.replace("estimated_cycles", "other")))
