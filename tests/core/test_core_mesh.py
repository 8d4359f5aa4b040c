"""Meshes: ranks and coordinates, groups that partition the world, sub-axes, products, thousands of ranks."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lindos.core.errors import InputError
from lindos.core.mesh import Axis, Mesh

AXES = st.lists(st.tuples(st.sampled_from(["pp", "dp", "sp", "tp"]), st.integers(1, 5)), unique_by=lambda a: a[0])


@given(AXES)
def test_rank_is_a_number_in_mixed_radix(sizes):
    mesh = Mesh.of(**dict(sizes))
    places = itertools.product(*(range(size) for _, size in sizes))
    names = [name for name, _ in sizes]
    for rank, place in enumerate(places):
        assert tuple(mesh.coordinate(name, rank) for name in names) == place
        assert mesh.coordinate(tuple(names), rank) == rank
    assert mesh.world_size == math.prod(size for _, size in sizes) == rank + 1
    assert mesh.size(tuple(names)) == mesh.world_size


@st.composite
def chosen(draw):
    """A mesh with a split axis, and disjoint axes of it in any order."""
    sizes = dict(draw(AXES)) | {"x": draw(st.integers(1, 2))}
    name = draw(st.sampled_from(sorted(sizes)))
    subs = {f"s{i}": size for i, size in enumerate(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))}
    mesh = Mesh.of(**(sizes | {name: math.prod(subs.values())})).split(name, **subs)
    pool = [other for other in sizes if other != name] + (list(subs) if draw(st.booleans()) else [name])
    return mesh, tuple(draw(st.permutations(pool))[: draw(st.integers(0, len(pool)))])


@settings(deadline=None)
@given(chosen())
def test_groups_partition_the_world(drawn):
    mesh, axes = drawn
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert {len(group) for group in groups} == {mesh.size(axes)}
    leaves = [axis.name for axis in mesh.axes if not any(other.parent == axis.name for other in mesh.axes)]
    for group in groups[:8]:
        assert [mesh.coordinate(axes, rank) for rank in group] == list(range(len(group)))
        assert all(mesh.group(axes, rank) == group for rank in group)
        for rank in group:
            still = [n for n in leaves if n not in axes and mesh.axis(n).parent not in axes]
            assert all(mesh.coordinate(n, rank) == mesh.coordinate(n, group[0]) for n in still)


def test_written_out():
    mesh = Mesh.of(pp=2, dp=2, tp=2)
    assert mesh.group("tp", 5) == (4, 5)
    assert mesh.group("pp", 5) == (1, 5)
    assert mesh.group(("pp", "tp"), 3) == (2, 3, 6, 7)
    assert mesh.group(("tp", "pp"), 3) == (2, 6, 3, 7)
    assert mesh.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.group((), 3) == (3,)
    assert str(mesh) == "pp=2 x dp=2 x tp=2"


def test_sub_axes_of_one_axis_twice():
    mesh = Mesh.of(dp=2, tp=8).split("tp", row=2, col=4).split("tp", held=4, share=2)
    assert mesh.world_size == 16
    assert [axis.name for axis in mesh.base] == ["dp", "tp"]
    assert mesh.group("row", 9) == (9, 13)
    assert mesh.group("share", 9) == (8, 9)
    assert mesh.group(("row", "share"), 9) == (8, 9, 12, 13)
    assert mesh.split("tp", row=2, col=4) == mesh
    assert mesh.split("col", north=2, south=2).group("north", 9) == (9, 11)
    assert mesh.axis("held") == Axis("held", 4, 2, "tp")


@pytest.mark.parametrize("axes", [("tp", "row"), ("row", "tp"), ("col", "held"), ("tp", "tp"), ("col", "share")])
def test_overlapping_axes(axes):
    mesh = Mesh.of(dp=2, tp=8).split("tp", row=2, col=4).split("tp", held=4, share=2)
    with pytest.raises(InputError, match="overlap"):
        mesh.group(axes, 0)


@pytest.mark.parametrize("axes", [("tp", "a"), ("tp", "b"), ("a", "c"), ("a", "d"), ("b", "d"), ("b", "c")])
def test_overlap_of_sizes_without_a_common_factor(axes):
    mesh = Mesh.of(tp=6).split("tp", a=2, b=3).split("tp", c=3, d=2)
    with pytest.raises(InputError, match="overlap"):
        mesh.group(axes, 0)


def test_axes_of_size_one_never_overlap():
    mesh = Mesh.of(dp=1, tp=4).split("tp", one=1, four=4)
    assert mesh.group(("tp", "one", "dp"), 2) == (0, 1, 2, 3)
    assert mesh.group("one", 2) == (2,)


def test_4096_ranks():
    mesh = Mesh.of(pp=8, dp=32, sp=2, tp=8).split("tp", row=2, col=4)
    groups = mesh.groups(("pp", "row"))
    assert len(groups) == 256
    assert sorted(rank for group in groups for rank in group) == list(range(4096))
    assert mesh.group(("pp", "row"), 4095) == tuple(511 - 4 + 512 * p + 4 * r for p in range(8) for r in range(2))


def test_own_rank():
    mesh = Mesh.of(rank=3, dp=2, tp=2)
    assert (mesh.coordinate("dp"), mesh.coordinate("tp"), mesh.group("dp")) == (1, 1, (1, 3))
    assert mesh.at(2).coordinate("tp") == 0
    assert mesh.split("dp", a=2, b=1).rank == 3
    assert Mesh.of().world_size == 1


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: Mesh.of(dp=0), "'dp' must be an integer of at least 1; got 0"),
        (lambda: Mesh.of(dp=2.0), "at least 1; got 2.0"),
        (lambda: Mesh.of(dp=2).coordinate("dp"), "carries no rank"),
        (lambda: Mesh.of(dp=2).coordinate("dp", 2), r"in 0\.\.1; got 2"),
        (lambda: Mesh.of(dp=2).group("dp", -1), r"in 0\.\.1; got -1"),
        (lambda: Mesh.of(dp=2, tp=2).axis("pd"), "no axis 'pd'.*Known: dp, tp"),
        (lambda: Mesh.of(tp=4).split("tp", a=2, b=3), "multiply to its size 4; got a=2 x b=3"),
        (lambda: Mesh.of(tp=4).split("tp", a=-2, b=-2), "at least 1; got -2"),
        (lambda: Mesh.of(tp=4).split("dp", a=2, b=2), "no axis 'dp'"),
        (lambda: Mesh.of(tp=4).split("tp", a=2, b=2).split("tp", b=2, a=2), "already has an axis"),
        (lambda: Mesh.of(dp=4, tp=4).split("tp", dp=2, a=2), "already has an axis 'dp'"),
    ],
)
def test_errors(ask, message):
    with pytest.raises(InputError, match=message):
        ask()
