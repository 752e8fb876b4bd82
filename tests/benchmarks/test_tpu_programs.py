"""Programs of a TPU, as `benchmarks.accelerators` reads them."""

import pytest

from examples.compiled_programs import hlo, tpu, walk

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
