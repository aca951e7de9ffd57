"""Pairs of a scheduled module, and what lies between them."""

from jaxdist.parallel.overlap import pairs

MODULE = """HloModule hand_made, is_scheduled=true

ENTRY %main (p: f32[8], q: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %g = (f32[8]{0}, f32[16]{0}) all-gather-start(%p), replica_groups=[4,2]<=[8]
  %m = (f32[8]{0}, f32[8]{0}) collective-permute-start(%p), source_target_pairs={{0,2},{2,0}}
  %b = f32[8]{0} bitcast(%q)
  %f = f32[8]{0} fusion(%b), kind=kLoop, calls=%work
  %h = f32[16]{0} all-gather-done(%g)
  %c = f32[8]{0} custom-call(%f, %h), custom_call_target="multiply"
  %n = f32[8]{0} collective-permute-done(%m)
  %r = f32[8]{0} all-reduce-start(%n), replica_groups=[4,2]<=[8], to_apply=%add, \
backend_config={"collective_backend_config":{"is_sync":true}}
  %d = f32[8]{0} fusion(%c), kind=kLoop, calls=%work
  ROOT %o = f32[8]{0} all-reduce-done(%r)
}

%work (x: f32[8]) -> f32[8] {
  ROOT %x = f32[8]{0} parameter(0)
}
"""


def test_what_runs_beside():
    found = pairs(MODULE, {"dp": 2, "pp": 2, "tp": 2})
    assert [(pair.collective.kind, pair.beside) for pair in found] == [
        ("all-gather", ("fusion",)),
        ("collective-permute", ("fusion", "custom-call")),
        ("all-reduce", ()),
    ]
