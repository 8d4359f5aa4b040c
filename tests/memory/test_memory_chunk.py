"""Chunks: views that never overlap, gradients stored then added, masters published, items packed by group and block."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lindos.memory.chunk import ALIGN, Chunk, Item, Phase, pack

CPU = torch.device("cpu")
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def item(name="w", shape=(3, 5), work=F32, master=F32, block="b", group=("dp",), trained=True) -> Item:
    return Item(name, shape, work, master, block, group, trained)


def one_chunk(*shapes, work=F32, master=F32, **more) -> Chunk:
    items = [item(f"w{i}", shape, work, master, **more) for i, shape in enumerate(shapes)]
    (made,) = pack(items, CPU, 2**40)
    return made


SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=6)


@settings(deadline=None)
@given(SHAPES, st.sampled_from([(F32, F32), (BF16, F32), (F64, F64)]))
def test_views_do_not_overlap(shapes, dtypes):
    chunk = one_chunk(*shapes, work=dtypes[0], master=dtypes[1])
    for buffer in (chunk.work, chunk.master):
        for number, slot in enumerate(chunk.slots, 1):
            chunk.view(buffer, slot).fill_(number)
        for number, slot in enumerate(chunk.slots, 1):
            view = chunk.view(buffer, slot)
            assert view.shape == slot.item.shape
            assert view.is_contiguous()
            assert (view == number).all()
            assert slot.start % ALIGN == 0
            assert view.numel() == 0 or view.data_ptr() == buffer.data_ptr() + slot.start * buffer.itemsize
            assert buffer.data_ptr() % 32 == 0
        counts = [math.prod(shape) for shape in shapes]
        assert [int((buffer == number).sum()) for number in range(1, len(shapes) + 1)] == counts
        buffer.zero_()
    assert chunk.size == sum(-(-math.prod(shape) // ALIGN) * ALIGN for shape in shapes)


def test_the_first_gradient_is_stored_and_later_ones_added():
    chunk = one_chunk((3,), (2,))
    first, second = chunk.slots
    chunk.gradient_of(first).fill_(float("nan"))
    chunk.put(first, torch.tensor([1.0, 2.0, 3.0]), 1.0)
    assert not chunk.complete
    chunk.put(first, torch.tensor([1.0, 1.0, 1.0]), 0.5)
    chunk.put(second, torch.tensor([4.0, 8.0]), 0.25)
    assert chunk.complete
    assert chunk.gradient_of(first).tolist() == [1.5, 2.5, 3.5]
    assert chunk.gradient_of(second).tolist() == [1.0, 2.0]
    chunk.forget()
    assert (chunk.phase, chunk.complete, chunk.stored) == (Phase.IDLE, False, set())
    chunk.put(first, torch.tensor([7.0, 7.0, 7.0]), 1.0)
    assert chunk.gradient_of(first).tolist() == [7.0] * 3


@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3])
def test_bf16_gradients_add_up_in_fp32(scale):
    chunk = one_chunk((64,), work=BF16)
    (slot,) = chunk.slots
    parts = [torch.randn(64, generator=torch.Generator().manual_seed(i)).to(BF16) for i in range(9)]
    for part in parts:
        chunk.put(slot, part, scale)
    expected = sum(part.double() * scale for part in parts)
    assert chunk.gradient_of(slot).dtype == F32
    assert (chunk.gradient_of(slot).double() - expected).abs().max() < 1e-6 * 9
    rounded = torch.stack(parts).sum(0).double() * scale
    assert (rounded - expected).abs().max() > 1e-4, "this test could not see bf16 sums"


def test_a_scaled_first_gradient_leaves_its_source_alone():
    chunk = one_chunk((4,))
    source = torch.ones(4)
    chunk.put(chunk.slots[0], source, 0.5)
    assert source.tolist() == [1.0] * 4
    chunk.gradient_of(chunk.slots[0]).zero_()
    assert source.tolist() == [1.0] * 4


def test_settle_gives_zeros_to_the_unused_only():
    chunk = one_chunk((3,), (2,), (0,))
    used, unused, _ = chunk.slots
    chunk.gradient_of(unused).fill_(float("nan"))
    chunk.put(used, torch.ones(3), 1.0)
    chunk.settle()
    assert chunk.phase is Phase.CLOSED
    assert chunk.gradient_of(used).tolist() == [1.0] * 3
    assert chunk.gradient_of(unused).tolist() == [0.0] * 2
    chunk.put(unused, torch.ones(2), 1.0)
    assert chunk.gradient_of(unused).tolist() == [1.0] * 2
    assert chunk.stored == {"w0", "w1", "w2"}


def test_publish():
    chunk = one_chunk((5,), (3,), work=BF16)
    for slot in chunk.slots:
        chunk.view(chunk.master, slot).copy_(torch.linspace(0, 1, slot.item.numel) / 3)
    assert not chunk.work.any()
    chunk.publish()
    assert torch.equal(chunk.work, chunk.master.to(BF16))
    assert chunk.view(chunk.work, chunk.slots[1])[2] == torch.tensor(1 / 3).to(BF16)


@pytest.mark.parametrize(
    ("work", "master", "trained", "item_bytes"),
    [(F32, F32, True, 4), (BF16, F32, True, 6), (BF16, BF16, True, 2), (BF16, F32, False, 6), (F64, F64, True, 8)],
)
def test_bytes_at_rest(work, master, trained, item_bytes):
    chunk = one_chunk((5, 7), (16,), work=work, master=master, trained=trained)
    assert chunk.bytes_at_rest == (48 + 16) * item_bytes
    storages = {buffer.untyped_storage().data_ptr(): buffer.untyped_storage() for buffer in (chunk.work, chunk.master)}
    assert chunk.bytes_at_rest == sum(storage.nbytes() for storage in storages.values())
    assert (chunk.master is chunk.work) == (work == master)
    assert chunk.gradient is None
    chunk.publish()


def names(chunks: list[Chunk]) -> list[list[str]]:
    return [[slot.name for slot in chunk.slots] for chunk in chunks]


def blocks(sizes: list[list[int]], prefix: str = "") -> list[Item]:
    """Items of so many units of ALIGN elements, block by block."""
    return [
        item(f"{prefix}{i}.{j}", (units * ALIGN,), block=f"{prefix}{i}")
        for i, block in enumerate(sizes)
        for j, units in enumerate(block)
    ]


def test_equal_blocks_are_chunks():
    chunks = pack(blocks([[2, 3]] * 3), CPU)
    assert names(chunks) == [["0.0", "0.1"], ["1.0", "1.1"], ["2.0", "2.1"]]
    assert [chunk.index for chunk in chunks] == [0, 1, 2]


def test_small_blocks_share_a_chunk():
    assert names(pack(blocks([[2], [3], [5]]), CPU)) == [["0.0", "1.0"], ["2.0"]]


def test_a_border_that_wastes_little_is_a_block_border():
    five_percent = blocks([[95], [4, 90], [100]])
    assert names(pack(five_percent, CPU)) == [["0.0"], ["1.0", "1.1"], ["2.0"]]
    six_percent = blocks([[94], [4, 90], [100]])
    assert names(pack(six_percent, CPU)) == [["0.0", "1.0"], ["1.1"], ["2.0"]]


def test_a_limit_of_ones_own():
    unit_bytes = ALIGN * 4
    split = names(pack(blocks([[2, 2, 2, 2], [2]]), CPU, 5 * unit_bytes))
    assert split == [["0.0", "0.1"], ["0.2", "0.3"], ["1.0"]]
    assert names(pack(blocks([[2, 9, 2]]), CPU, 5 * unit_bytes)) == [["0.0"], ["0.1"], ["0.2"]]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=8),
    st.integers(1, 40) | st.none(),
)
def test_packing(sizes, limit_units):
    items = blocks(sizes)
    limit_bytes = None if limit_units is None else limit_units * ALIGN * 4
    chunks = pack(items, CPU, limit_bytes)
    assert [name for chunk in names(chunks) for name in chunk] == [one.name for one in items]
    limit = limit_bytes or max(map(sum, sizes)) * ALIGN * 4
    ends = {f"{i}.{len(block) - 1}" for i, block in enumerate(sizes)}
    for chunk, following in zip(chunks, [*chunks[1:], None]):
        size_bytes = chunk.size * 4
        assert size_bytes <= limit or len(chunk.slots) == 1
        if following is None:
            continue
        inside = chunk.slots[-1].name not in ends
        fits = size_bytes + following.slots[0].item.room * 4 <= limit
        assert not (fits and inside), "a block was split although more of it fits"
        assert not (fits and size_bytes < 0.95 * limit), "a border wastes more than 5 %"


def test_groups_and_dtypes_are_apart():
    kinds = [
        {},
        {"group": ("dp", "sp")},
        {"work": BF16},
        {"work": F64, "master": F64},
        {"trained": False},
        {"group": None, "trained": False},
    ]
    items = [item(f"{k}.{i}", block=f"{i}", **kind) for i in range(2) for k, kind in enumerate(kinds)]
    chunks = pack(items, CPU, 2**30)
    assert names(chunks) == [[f"{k}.0", f"{k}.1"] for k in range(len(kinds))]
    for chunk, kind in zip(chunks, kinds):
        assert (chunk.group, chunk.trained) == (kind.get("group", ("dp",)), kind.get("trained", True))
        assert (chunk.work.dtype, chunk.master.dtype) == (
            kind.get("work", F32),
            kind.get("master", F32) if chunk.trained else chunk.work.dtype,
        )


def test_chunks_stand_in_the_order_in_which_they_are_complete():
    items = [
        item("first", group="a", block="0"),
        item("middle", group="b", block="0"),
        item("last", group="a", block="0"),
    ]
    assert names(pack(items, CPU)) == [["middle"], ["first", "last"]]
    assert pack([], CPU) == []
