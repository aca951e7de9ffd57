"""The audit counts collectives as they were written: small programs with known traffic."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxdist.parallel.audit import Collective, collectives

SHAPE = {"dp": 2, "pp": 2, "tp": 2}
ALL = ("dp", "pp", "tp")
RING = [(0, 1), (1, 0)]


def hlo(function, devices=None, length=64):
    """The compiled text of a function of each device's `length` fp32 numbers and of a scalar."""
    devices = np.array(devices or jax.devices()).reshape(tuple(SHAPE.values()))
    mesh = Mesh(devices, ALL, axis_types=(AxisType.Auto,) * 3)
    region = jax.shard_map(function, mesh=mesh, in_specs=(P(ALL), P()), out_specs=P(ALL))
    arguments = jnp.zeros(8 * length), jnp.int32(0)
    return jax.jit(region).lower(*arguments).compile().as_text() or ""


def vary(x, axes):
    return lax.pcast(x, axes, to="varying")


def total(axes):
    return lambda x: vary(lax.psum(x, axes), axes) * 0.5


def facts(found):
    return [(c.kind, c.axes, c.group_size, c.bytes, len(c.payloads), c.count) for c in found]


def test_kinds_axes_and_bytes():
    """Payload: what is reduced, scattered or sent; what has been gathered."""

    def program(x, _):
        x = lax.ppermute(jnp.sin(x), "pp", RING)
        x = jnp.sin(lax.all_gather(x, "tp", tiled=True))  # 64 -> 128 numbers
        x = jnp.sin(lax.psum_scatter(x, "dp", tiled=True))  # 128 -> 64
        x = jnp.sin(lax.all_to_all(x.reshape(2, 32), "dp", 0, 0).reshape(-1))
        return total(("dp", "tp"))(x)

    found = collectives(hlo(program), SHAPE)
    assert facts(found) == [
        ("collective-permute", ("pp",), 2, 256, 1, 1),
        ("all-gather", ("tp",), 2, 512, 1, 1),
        ("reduce-scatter", ("dp",), 2, 512, 1, 1),
        ("all-to-all", ("dp",), 2, 256, len(found[3].payloads), 1),
        ("all-reduce", ("dp", "tp"), 4, 256, 1, 1),
    ]
    assert [c.sent_bytes for c in found] == [256, 256, 256, 128, 384]
    assert not any(c.in_loop or c.in_branch for c in found)
    assert found[-1].scope.startswith("jit(") and "psum" in found[-1].scope


def test_loops_are_multiplied_out():
    def inner(_, x):
        return lax.ppermute(jnp.sin(x), "pp", RING)

    def outer(_, x):
        return total("dp")(lax.fori_loop(0, 3, inner, x))

    text = hlo(lambda x, _: total("tp")(lax.fori_loop(0, 5, outer, x)))
    want = [("collective-permute", "pp", 15), ("all-reduce", "dp", 5), ("all-reduce", "tp", 1)]
    found = collectives(text, SHAPE)
    assert [(c.kind, *c.axes, c.count) for c in found] == want
    assert [c.in_loop for c in found] == [True, True, False]
    # Where XLA has not noted the trip count, the loop's condition tells it.
    bare = re.sub(r", backend_config=\{.*known_trip_count.*", "", text)
    assert bare != text
    assert collectives(bare, SHAPE) == found


def test_a_trip_count_that_data_decides_is_unknown():
    def program(x, n):
        x = lax.fori_loop(0, n, lambda _, x: total("dp")(x), x)
        return lax.fori_loop(0, 4, lambda _, x: total("tp")(x), x)

    assert [(c.axes, c.count) for c in collectives(hlo(program), SHAPE)] == [
        (("dp",), None),
        (("tp",), 4),
    ]


def test_branches_are_marked():
    def program(x, n):
        x = lax.cond(n > 0, total("tp"), jnp.cos, x)
        return lax.switch(n, [jnp.sin, total("dp"), jnp.exp], x)

    found = collectives(hlo(program), SHAPE)
    assert [(c.axes, c.in_branch, c.count) for c in found] == [
        (("tp",), True, 1),
        (("dp",), True, 1),
    ]


def test_combined_arrays_are_added_up():
    def program(x, _):
        a, b = lax.psum((x, x[:16]), "dp")
        return x + vary(a, "dp").at[:16].add(vary(b, "dp"))

    assert facts(collectives(hlo(program), SHAPE)) == [("all-reduce", ("dp",), 2, 320, 2, 1)]


def test_a_device_is_its_place_in_the_mesh():
    devices = list(np.random.default_rng(0).permutation(jax.devices()))
    found = collectives(hlo(lambda x, _: total(("pp", "tp"))(x), devices), SHAPE)
    assert [c.axes for c in found] == [("pp", "tp")]


def one(groups, operand="f32[8]{0} parameter(0)", mesh=SHAPE):
    """The collectives of a module with one all-reduce."""
    text = f"""HloModule hand_made

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = {operand}
  ROOT %c = f32[8]{{0}} all-reduce(%p), channel_id=1, {groups}, to_apply=%add
}}
"""
    return collectives(text, mesh)


# Over (dp, pp, tp) = (2, 2, 2), devices are numbered 0..7 with tp fastest.
@pytest.mark.parametrize(
    "spelling, axes, size",
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tp",), 2),
        ("{{0,2,1,3},{4,6,5,7}}", ("pp", "tp"), 4),
        ("{}", ("dp", "pp", "tp"), 8),
        ("[4,2]<=[8]", ("tp",), 2),
        ("[4,2]<=[2,4]T(1,0)", ("dp",), 2),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("pp",), 2),
        ("[1,8]<=[8]", ("dp", "pp", "tp"), 8),
        ("mesh['a'=4,'b'=2] {'b'}", ("tp",), 2),
        ("mesh['a'=1,'b'=2,'c'=4] {'b'}", ("dp",), 2),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ("dp", "tp"), 4),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ("tp",), 2),
        ("mesh['a'=2,'b'=2,'c'=2], device_ids=([2,2,2]T(1,0,2)) {'a'}", ("pp",), 2),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}", ("tp",), 2),
        ("mesh['a'=8] {'a':(1)2}", ("dp",), 2),
        ("mesh['a'=8] {'a':(2)4}", ("pp", "tp"), 4),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ("dp", "tp"), 4),
    ],
)
def test_spellings_of_groups(spelling, axes, size):
    (found,) = one(f"replica_groups={spelling}, use_global_device_ids=true")
    assert (found.axes, found.group_size) == (axes, size)


def test_an_unknown_spelling_is_an_error():
    with pytest.raises(ValueError, match="all-reduce %c spells its groups in an unknown way"):
        one("replica_groups=@everyone")


def test_a_group_may_be_part_of_an_axis():
    (found,) = one("replica_groups={{0,1},{2,3}}", mesh={"dp": 1, "pp": 1, "tp": 4})
    assert (found.axes, found.group_size) == (("tp",), 2)


def test_groups_of_one_send_nothing():
    assert one("replica_groups=[8,1]<=[8]") == []


@pytest.mark.parametrize(
    "dtype, size",
    [
        ("f32[8]", 32),
        ("bf16[2,4]", 16),
        ("pred[8]", 8),
        ("f8e4m3fn[8]", 8),
        ("s4[8]", 4),
        ("u32[]", 4),
    ],
)
def test_bytes_of_a_dtype(dtype, size):
    (found,) = one("replica_groups=[4,2]<=[8]", f"{dtype} parameter(0)")
    assert found.bytes == size


def test_asynchronous_forms_count_once():
    text = """HloModule hand_made

%wrapped (q: bf16[64]) -> bf16[32] {
  %q = bf16[64]{0} parameter(0)
  ROOT %r = bf16[32]{0} reduce-scatter(%q), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add
}

ENTRY %main (p: f32[8], s: bf16[64]) -> f32[16] {
  %p = f32[8]{0:T(128)} parameter(0)
  %s = bf16[64]{0} parameter(1)
  %g = (f32[8]{0:T(128)}, f32[16]{0}) all-gather-start(%p), replica_groups=[4,2]<=[8]
  %a = ((bf16[64]{0}), bf16[32]{0}, u32[]) async-start(%s), calls=%wrapped
  %m = (f32[8]{0}, f32[8]{0}, u32[]) collective-permute-start(%p), source_target_pairs={{0,2},{2,0}}
  %n = f32[8]{0} collective-permute-done(%m)
  %b = bf16[32]{0} async-done(%a)
  ROOT %h = f32[16]{0} all-gather-done(%g)
}
"""
    assert facts(collectives(text, SHAPE)) == [
        ("all-gather", ("tp",), 2, 64, 1, 1),
        ("reduce-scatter", ("tp",), 2, 128, 1, 1),
        ("collective-permute", ("pp",), 2, 32, 1, 1),
    ]


def test_a_collective_beside_a_chain_of_fusions_counts_once():
    """As XLA:TPU writes it: each fusion that runs beside it names it again."""

    def fused(name: str, chain: int) -> str:
        chained = f'frontend_attributes={{chain_id="{chain}"}}'
        return f"""%{name} (q: f32[8]) -> f32[16] {{
  %q = f32[8]{{0}} parameter(0)
  ROOT %g = f32[16]{{0}} all-gather(%q), channel_id=6, replica_groups=[4,2]<=[8], {chained}
}}
"""

    calls = "\n".join(
        f"  %f{place} = f32[16]{{0}} fusion(%p), kind=kCustom, calls=%{name}"
        for place, name in enumerate(("start", "beside", "done", "another", "another_done"))
    )
    text = f"""HloModule hand_made

{fused("start", 0)}
{fused("beside", 0)}
{fused("done", 0)}
{fused("another", 1)}
{fused("another_done", 1)}
ENTRY %main (p: f32[8]) -> f32[16] {{
  %p = f32[8]{{0}} parameter(0)
{calls}
  ROOT %copy = f32[16]{{0}} copy(%f4)
}}
"""
    assert facts(collectives(text, SHAPE)) == [("all-gather", ("tp",), 2, 64, 1, 1)] * 2


def test_sent_bytes():
    def sent(kind, size):
        return Collective(
            kind=kind,
            axes=("tp",),
            group_size=size,
            payloads=(1000, 200),
            count=1,
            in_loop=False,
            in_branch=False,
            scope="",
        ).sent_bytes

    assert sent("all-reduce", 4) == 1800
    assert sent("all-gather", 4) == sent("reduce-scatter", 4) == sent("all-to-all", 4) == 900
    assert sent("collective-permute", 4) == 1200
