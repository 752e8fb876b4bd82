"""How long a compiled program waits for collectives, and loops whose length XLA does not write."""

import pytest

from examples.compiled_programs import gpu, hlo, targets, walk

RATES = targets.parse("h100:8").rates
GROUP = "replica_groups={{0,1,2,3,4,5,6,7}}"
SENT = 7 * 4096 * 4096 * 2 / RATES.link  # seconds of a gather
WORK = 2 * 4096**3 / RATES.half  # seconds of a product


def text(body, root="%x"):
    """A program whose entry has `body`, as pairs of a name and what it computes."""
    lines = "\n".join(f"  %{name} = {computed}" for name, computed in body)
    return hlo.parse(f"""HloModule toy, is_scheduled=true, num_partitions=8

%fused (i: s32[]) -> pred[] {{
  %i = s32[] parameter(0)
  %n = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}

%cond (t: (s32[], bf16[4096,4096])) -> pred[] {{
  %t = (s32[], bf16[4096,4096]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %less = pred[] fusion(%i), kind=kLoop, calls=%fused
}}

%body (t: (s32[], bf16[4096,4096])) -> (s32[], bf16[4096,4096]) {{
  %t = (s32[], bf16[4096,4096]) parameter(0)
  %one = s32[] constant(2)
  %i = s32[] get-tuple-element(%t), index=0
  %x = bf16[4096,4096] get-tuple-element(%t), index=1
  %next = s32[] add(%i, %one)
{lines}
  ROOT %out = (s32[], bf16[4096,4096]) tuple(%next, {root})
}}

ENTRY %main (x: bf16[4096,4096]) -> (s32[], bf16[4096,4096]) {{
  %x = bf16[4096,4096] parameter(0)
  %begin = s32[] constant(1)
  %start = (s32[], bf16[4096,4096]) tuple(%begin, %x)
  ROOT %loop = (s32[], bf16[4096,4096]) while(%start), condition=%cond, body=%body
}}
""")


def gather(name, attributes=""):
    shapes = "(bf16[4096,4096], bf16[32768,4096])"
    start = f"{shapes} all-gather-start(%x), {GROUP}, dimensions={{0}}{attributes}"
    return [(f"{name}.s", start)], [(f"{name}.d", f"bf16[32768,4096] all-gather-done(%{name}.s)")]


def product(name):
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    return [(name, f"bf16[4096,4096] dot(%x, %x), {dims}")]


def waits(body):
    """Seconds that one turn of the loop waits; it has three turns, at 1, 3 and 5."""
    work = gpu.most_work(text(body), RATES)
    begun = sum("start(" in computed for _, computed in body)
    assert walk.of_kinds(work, "seconds")["collectives"] == pytest.approx(3 * begun * SENT)
    return walk.of_kinds(work, "waits")["collectives"] / 3


def test_a_collective_is_hidden_by_the_products_before_its_end():
    assert WORK < SENT < 3 * WORK
    start, done = gather("g")
    assert waits([*start, *done, *product("p")]) == pytest.approx(SENT)
    assert waits([*start, *product("p"), *done]) == pytest.approx(SENT - WORK)
    assert waits([*start, *product("p"), *product("q"), *product("r"), *done]) == 0


def test_a_synchronous_collective_is_waited_for_where_it_begins():
    start, done = gather("g", ', backend_config={"is_sync":true}')
    assert waits([*start, *product("p"), *done]) == pytest.approx(SENT)


def test_collectives_share_one_stream_and_the_work_beside_it():
    (start, done), (start_2, done_2) = gather("g"), gather("h")
    body = [*start, *start_2, *product("p"), *done, *done_2]
    assert waits(body) == pytest.approx(2 * SENT - WORK)
