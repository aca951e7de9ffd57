import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.config import MeshShape, UsageError

DEGREES = st.integers(1, 10**6)


@given(DEGREES, DEGREES, DEGREES)
def test_both_spellings_round_trip(dp: int, pp: int, tp: int) -> None:
    mesh = MeshShape(dp=dp, pp=pp, tp=tp)
    assert MeshShape.parse(str(mesh)) == mesh
    assert MeshShape.parse(f"tp={tp}, dp={dp},pp={pp}") == mesh
    assert mesh.size == dp * pp * tp


def test_axes_left_out_are_one() -> None:
    assert MeshShape.parse("dp=4") == MeshShape(dp=4)


@pytest.mark.parametrize(
    "text",
    [
        *("", "2", "2x2", "2x2x2x2", "0x2x2", "-2x1x1", "axbxc", "1x1x", "2.0x1x1", "1_0x1x1"),
        *(
            "dp=2,dp=2",
            "ep=2",
            "dp=",
            "=2",
            "dp=two",
            "dp=2;tp=2",
            "-1x-1x1",
            "٣x1x1",
            "2 2 2",
            "9" * 5000 + "x1x1",
        ),
    ],
)
def test_refused_with_the_way_to_write_it(text: str) -> None:
    with pytest.raises(UsageError, match="mesh.*--mesh DPxPPxTP"):
        MeshShape.parse(text)


@given(st.text(alphabet="0123456789x-=,dpt ", max_size=12))
def test_any_text_is_a_mesh_or_a_usage_error(text: str) -> None:
    try:
        mesh = MeshShape.parse(text)
    except UsageError:
        return
    assert all(degree >= 1 or degree == -1 for degree in mesh.degrees)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 2), st.integers(1, 4096))
def test_resolve_fills_with_all_devices_or_refuses(a: int, b: int, hole: int, n: int) -> None:
    degrees = [a, b]
    degrees.insert(hole, -1)
    mesh = MeshShape.parse("x".join(map(str, degrees)))
    assert not mesh.is_resolved
    if n % (a * b):
        with pytest.raises(UsageError, match=f"{n} devices"):
            mesh.resolve(n)
    else:
        assert mesh.resolve(n).size == n


def test_resolve_leaves_a_full_mesh() -> None:
    mesh = MeshShape.parse("2x2x2")
    assert mesh.resolve(3) == mesh


def test_size_of_an_open_mesh_is_refused() -> None:
    with pytest.raises(UsageError):
        _ = MeshShape.parse("-1x1x1").size
