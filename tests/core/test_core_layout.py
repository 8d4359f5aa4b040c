"""Layouts: what boxes say equals plain slicing, and over all ranks the owned boxes tile the tensor exactly once."""

import math

import numpy as np
import pytest
from cuttings import PADDING, expected_local, layouts, numbers_of, scattered, slices
from hypothesis import given, settings

from lindos.core.errors import InputError, LayoutError
from lindos.core.layout import Cut, Layout, by_units, fused, shared
from lindos.core.mesh import Mesh


def check(mesh: Mesh, layout: Layout) -> None:
    full = numbers_of(layout)
    owned, gathered = np.zeros(layout.shape, int), np.full(layout.shape, PADDING)
    for rank in range(mesh.world_size):
        local, boxes = expected_local(layout, mesh, rank), layout.boxes(mesh, rank)
        assert layout.local_shape(mesh, rank) == local.shape
        assert all(box.numel > 0 for box in boxes)
        np.testing.assert_array_equal(scattered(full, local.shape, boxes), local)
        assert layout.owned_boxes(mesh, rank) == [box for box in boxes if box.owned]
        for box in layout.owned_boxes(mesh, rank):
            owned[slices(box.full)] += 1
            gathered[slices(box.full)] = local[slices(box.local)].reshape(box.shape)
    np.testing.assert_array_equal(owned, np.ones(layout.shape, int))
    np.testing.assert_array_equal(gathered, full)


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_boxes_equal_slicing_and_tile_once(drawn):
    check(*drawn)


TP4 = Mesh.of(dp=2, tp=4)
CASES = {
    "whole": (TP4, Layout((3, 5))),
    "padded even": (TP4, Layout((131, 3), (Cut("tp", 0, 4),))),
    "fewer lines than parts": (TP4, Layout((3, 2), (Cut("tp", 0, 4),))),
    "one line, all but one empty": (TP4, Layout((1, 2), (Cut("tp", 0, 4),))),
    "uneven": (TP4, Layout((9, 2), (Cut("tp", 0, 4, by_units((1, 0, 1, 1), 3)),))),
    "fused": (TP4, Layout((2, 24), (Cut("tp", 1, 4, fused((8, 8, 8), 4)),))),
    "fused, unequal blocks": (TP4, Layout((24, 2), (Cut("tp", 0, 4, fused((16, 4, 4), 4)),))),
    "shared by neighbours": (TP4, Layout((6, 2), (Cut("tp", 0, 4, shared(2, 3, 4)),))),
    "both dims": (TP4, Layout((6, 8), (Cut("tp", 1, 4), Cut("dp", 0, 2)))),
    "one dim twice": (TP4, Layout((16,), (Cut("tp", 0, 4), Cut("dp", 0, 2)))),
    "flat": (TP4, Layout((3, 5), (Cut("dp", "flat", 2),))),
    "flat of nothing": (TP4, Layout((0, 5), (Cut("dp", "flat", 2),))),
    "flat scalar": (TP4, Layout((), (Cut(("dp", "tp"), "flat", 8),))),
    "flat of padded": (TP4, Layout((131, 3), (Cut("tp", 0, 4), Cut("dp", "flat", 2)))),
    "flat of columns": (TP4, Layout((5, 12), (Cut("tp", 1, 4), Cut("dp", "flat", 2)))),
    "flat of fused": (TP4, Layout((24, 3), (Cut("tp", 0, 4, fused((16, 8), 4)), Cut("dp", "flat", 2)))),
    "flat of shared": (TP4, Layout((6, 5), (Cut("tp", 0, 4, shared(2, 3, 4)), Cut("dp", "flat", 2)))),
    "flat of uneven": (TP4, Layout((9, 5), (Cut("tp", 0, 4, by_units((4, 0, 3, 2), 1)), Cut("dp", "flat", 2)))),
    "flat of flat": (TP4, Layout((4, 3, 5), (Cut("dp", "flat", 2), Cut("tp", "flat", 4)))),
    "flat in 3 dims": (Mesh.of(dp=7), Layout((4, 3, 5), (Cut("dp", "flat", 7),))),
    "sub-axes nested": (
        Mesh.of(dp=3, tp=6).split("tp", row=3, col=2),
        Layout((13, 7), (Cut("row", 0, 3), Cut("col", 0, 2), Cut("dp", "flat", 3))),
    ),
    "product, minor axis first": (
        Mesh.of(dp=2, tp=4).split("tp", row=2, col=2),
        Layout((9, 4), (Cut(("col", "dp"), 0, 4), Cut("row", 1, 2))),
    ),
    "experts": (Mesh.of(dp=2, tp=3), Layout((4, 12, 5), (Cut("tp", 1, 3, fused((6, 6), 3)), Cut("dp", "flat", 2)))),
}


@pytest.mark.parametrize("name", CASES)
def test_named_case(name):
    check(*CASES[name])


def test_4096_ranks_tile_once():
    mesh = Mesh.of(pp=4, dp=64, tp=16).split("tp", held=2, shared=8)
    for layout in (
        Layout((48, 6), (Cut("tp", 0, 16, shared(2, 24, 16)), Cut("dp", "flat", 64))),
        Layout((6, 40), (Cut(("dp", "held"), 1, 128),)),
    ):
        owned = np.zeros(layout.shape, int)
        for rank in range(4096):
            for box in layout.owned_boxes(mesh, rank):
                owned[slices(box.full)] += 1
        np.testing.assert_array_equal(owned, np.ones(layout.shape, int))
        for rank in range(0, 4096, 37):
            local = expected_local(layout, mesh, rank)
            found = scattered(numbers_of(layout), layout.local_shape(mesh, rank), layout.boxes(mesh, rank))
            np.testing.assert_array_equal(found, local)


def test_4096_ranks_of_a_real_weight():
    mesh = Mesh.of(pp=4, dp=64, tp=16)
    layout = Layout((12288, 4096), (Cut("tp", 0, 16, fused((4096, 4096, 4096), 16)), Cut("dp", "flat", 64)))
    for rank in (0, 17, 1023, 2500, 4095):
        boxes = layout.boxes(mesh, rank)
        assert sum(box.numel for box in boxes) == math.prod(layout.local_shape(mesh, rank)) == 12288 * 4096 // 1024
        assert all(box.owned == (rank < 1024) for box in boxes)


def test_owners():
    layout = Layout((4, 6), (Cut("tp", 0, 4, shared(2, 2, 4)),))
    owners = [all(box.owned for box in layout.boxes(TP4, rank)) for rank in range(8)]
    assert owners == [True, False, True, False, False, False, False, False]
    assert layout.holders(TP4, 5) == (0, 1, 4, 5)
    assert layout.axes == ("tp",)


def test_part_of_what_a_neighbour_holds_is_owned():
    layout = Layout((6,), (Cut("tp", 0, 2, (((0, 4),), ((2, 6),))),))
    boxes = layout.boxes(Mesh.of(tp=2), 1)
    assert [(box.full, box.local, box.owned) for box in boxes] == [
        (((2, 4),), ((0, 2),), False),
        (((4, 6),), ((2, 4),), True),
    ]


def test_given_boxes_belong_to_the_caller():
    layout = CASES["flat"][1]
    layout.boxes(TP4, 0).clear()
    check(TP4, layout)


@pytest.mark.parametrize(
    ("layout", "dims", "text"),
    [
        (Layout((131, 64), (Cut("tp", 0, 4),)), (), "W[131/tp, 64]"),
        (Layout((131, 64), (Cut("tp", 0, 4),)), ("V", "D"), "W[V/tp, D]"),
        (Layout((9, 4), (Cut("tp", 0, 2, by_units((5, 4), 1)),)), ("H", "K"), "W[H/tp{5,4}, K]"),
        (Layout((8, 4), (Cut("tp", 0, 2), Cut("dp", "flat", 4))), (), "W[8/tp, 4]@dp"),
        (Layout((8, 4), (Cut(("z", "x"), 1, 4),)), ("F", "K"), "W[F, K/(z,x)]"),
        (Layout((8, 4), (Cut("row", 0, 2), Cut("col", 0, 2))), (), "W[8/row/col, 4]"),
        (Layout((9,), (Cut("dp", "flat", 2, by_units((5, 4), 1)),)), (), "W[9]@dp{5,4}"),
        (Layout((6,), (Cut("tp", 0, 4, shared(2, 3, 4)),)), (), "W[6/tp]"),
        (Layout(()), (), "W[]"),
    ],
)
def test_text(layout, dims, text):
    assert layout.text(dims=dims) == text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout((4,), (Cut("tp", 1, 2),)), "does not fit shape"),
        (lambda: Layout((4,), (Cut("tp", -1, 2),)), "does not fit shape"),
        (lambda: Layout((4,), (Cut("dp", "flat", 2), Cut("tp", 0, 2))), "after a flat cut"),
        (lambda: Layout((4, 4), (Cut("tp", 0, 2), Cut("tp", 1, 2))), "'tp' cuts .* twice"),
        (lambda: Layout((4, 4), (Cut(("tp", "dp"), 0, 2), Cut("dp", 1, 2))), "'dp' cuts .* twice"),
        (lambda: Layout((4,), (Cut("tp", 0, 4, by_units((2, 2), 1)),)), "as many pieces; got 2"),
        (lambda: Layout((6,), (Cut("tp", 0, 2, by_units((2, 2), 1)),)), "no rank holds element 4"),
        (lambda: Layout((6,), (Cut("tp", 0, 2, (((0, 2),), ((3, 6),))),)), "no rank holds element 2"),
        (lambda: fused((6, 8), 4), "block of 6 must divide by 4"),
        (lambda: fused((6,), 4), "block of 6 must divide by 4"),
        (lambda: shared(3, 2, 4), "3 heads can be shared by a multiple of 3 ranks; got 4"),
    ],
)
def test_what_cannot_be_cut(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


def test_mesh_of_another_size():
    layout = Layout((8,), (Cut("tp", 0, 2),))
    for ask in (layout.boxes, layout.local_shape, layout.owned_boxes):
        with pytest.raises(LayoutError, match="2 parts over 'tp' does not fit its size 4"):
            ask(TP4, 0)


def test_an_axis_and_its_own_part():
    mesh = TP4.split("tp", row=2, col=2)
    with pytest.raises(InputError, match="overlap"):
        Layout((8, 8), (Cut("tp", 0, 4), Cut("row", 1, 2))).boxes(mesh, 0)


def test_no_rank():
    with pytest.raises(InputError, match="give rank="):
        Layout((8,), (Cut("tp", 0, 4),)).boxes(TP4)
    assert Layout((8,), (Cut("tp", 0, 4),)).local_shape(TP4.at(3)) == (2,)
