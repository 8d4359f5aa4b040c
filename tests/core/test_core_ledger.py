"""The ledger: entries by any name, bytes as numpy counts them, a digest of everything, layers folded in print."""

import dataclasses

import numpy as np
import pytest
from cuttings import expected_local, layouts
from hypothesis import given, settings
from hypothesis import strategies as st

from lindos.core.errors import InputError
from lindos.core.layout import Cut, Layout
from lindos.core.ledger import Entry, Ledger
from lindos.core.mesh import Mesh

MESH = Mesh.of(rank=0, dp=2, tp=2)


def entry(name="w", kind="parameter", shape=(8, 6), cuts=(), rest=(), **more) -> Entry:
    in_use = Layout(shape, cuts)
    fields = {"role": "column", "dtype": "float32"} | more
    return Entry(name, kind, at_rest=Layout(shape, (*cuts, *rest)), in_use=in_use, **fields)


def ledger(*entries: Entry) -> Ledger:
    made = Ledger()
    for one in entries:
        made.add(one)
    return made


def test_entries_by_any_of_their_names():
    first, second = entry("embed.weight", tied=("head.weight", "other.weight")), entry("norm.weight")
    made = ledger(first, second, entry("rope", "buffer"))
    assert all(made.parameter(name) is first for name in ("embed.weight", "head.weight", "other.weight"))
    assert made.parameter("norm.weight") is second
    assert [one.name for one in made.of("parameter")] == ["embed.weight", "norm.weight"]
    with pytest.raises(InputError, match=r"no parameter 'norm.wieght': did you mean 'norm.weight'"):
        made.parameter("norm.wieght")
    with pytest.raises(InputError, match="no parameter 'rope'"):
        made.parameter("rope")


def test_an_entry_is_written_once_and_of_a_kind():
    made = ledger(entry("w"))
    made.add(entry("w", "gradient"))
    with pytest.raises(AssertionError, match="twice"):
        made.add(entry("w"))
    with pytest.raises(AssertionError, match="no known kind"):
        made.add(entry("v", "weight"))


TP, DP = Cut("tp", 0, 2), Cut("dp", "flat", 2)
CHANGES = [
    {"name": "v"},
    {"kind": "buffer"},
    {"role": "row"},
    {"dtype": "bfloat16"},
    {"at_rest": Layout((8, 6), (TP,))},
    {"in_use": Layout((8, 6))},
    {"in_use": Layout((8, 6), (Cut("tp", 1, 2),))},
    {"in_use": Layout((8, 6), (Cut("tp", 0, 2, (((0, 5),), ((5, 8),))),))},
    {"sum_over": ("tp",)},
    {"stage": 1},
    {"home": "host"},
    {"tied": ("v",)},
    {"trained": False},
    {"inside": True},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_digest_sees_every_field(change):
    base = entry("w", cuts=(TP,), rest=(DP,))
    assert ledger(base).digest() == ledger(entry("w", cuts=(TP,), rest=(DP,))).digest()
    assert ledger(dataclasses.replace(base, **change)).digest() != ledger(base).digest()


def test_digest_sees_order_and_every_field_has_a_case():
    assert ledger(entry("a"), entry("b")).digest() != ledger(entry("b"), entry("a")).digest()
    assert {name for change in CHANGES for name in change} == {field.name for field in dataclasses.fields(Entry)}


DTYPES = st.sampled_from(["float64", "float32", "float16", "int64", "int8", "bool", "complex64"])


@settings(deadline=None, max_examples=50)
@given(layouts(), DTYPES, st.data())
def test_local_bytes_as_numpy_counts(drawn, dtype, data):
    mesh, layout = drawn
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    one = Entry("w", "parameter", "whole", dtype, at_rest=layout, in_use=Layout(layout.shape))
    other = entry("s", "state", shape=(5,), dtype=dtype)
    expected = expected_local(layout, mesh, rank).astype(dtype).nbytes
    assert one.local_bytes(mesh, rank) == expected
    made, rest = ledger(one, other), np.zeros(5, dtype).nbytes
    assert made.local_bytes(["parameter"], mesh, rank) == expected
    assert made.local_bytes(["parameter", "state", "buffer"], mesh, rank) == expected + rest
    assert made.local_bytes([], mesh, rank) == 0


def test_local_bytes_of_bfloat16():
    assert entry(dtype="bfloat16", cuts=(Cut("tp", 0, 2),)).local_bytes(MESH) == 8 // 2 * 6 * 2


def test_line():
    one = entry("w", cuts=(TP,), rest=(DP,), sum_over=("dp", "tp"), tied=("v", "u"), trained=False, home="host")
    assert one.line() == "w[8/tp, 6] float32 column at rest [8/tp, 6]@dp sum over dp,tp frozen host = v, u"
    assert entry("b", "buffer", trained=False).line() == "b[8, 6] float32 column device"


def test_text_folds_layers():
    layers = [entry(f"layers.{i}.mlp.up", cuts=(TP,)) for i in range(3)]
    experts = [entry(f"layers.{i}.experts.{j}.w", shape=(4,)) for i in range(2) for j in range(4)]
    made = ledger(entry("embed", shape=(100, 6)), *layers, *experts, entry("rope", "buffer", shape=(256,)))
    assert made.text(MESH).splitlines() == [
        "776 parameters",
        " parameter: 2.75 KiB a rank",
        "    buffer: 1.00 KiB a rank",
        "  embed[100, 6] float32 column device",
        "  layers.{0..2}.mlp.up[8/tp, 6] float32 column device",
        "  layers.{0..1}.experts.{0..3}.w[4] float32 column device",
    ]


def test_text_keeps_gaps_and_differences():
    shapes = [(8, 6) if i % 3 else (4, 6) for i in range(7)]
    made = ledger(*(entry(f"layers.{i}.w", shape=shape) for i, shape in enumerate(shapes)))
    assert made.text(MESH).splitlines()[2:] == [
        "  layers.{0,3,6}.w[4, 6] float32 column device",
        "  layers.{1..2,4..5}.w[8, 6] float32 column device",
    ]


def test_text_folds_tied_names():
    pairs = [entry(f"encoder.{i}.w", tied=(f"decoder.{i}.w", f"other.{i}.w")) for i in range(3)]
    made = ledger(*pairs, entry("embed", tied=("heads.0.w",)))
    assert made.text(MESH).splitlines()[2:] == [
        "  encoder.{0..2}.w[8, 6] float32 column device = decoder.{0..2}.w, other.{0..2}.w",
        "  embed[8, 6] float32 column device = heads.0.w",
    ]
