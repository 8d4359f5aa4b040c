"""Numbers as text and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lindos.core.errors import InputError, LayoutError, LindosError, RankError, RefusedError, nearest
from lindos.core.units import bytes_of_text, text_of_bytes, text_of_count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (2**30, "1.00 GiB"),
        (-(2**20), "-1.00 MiB"),
        (2**50, "1024.00 TiB"),
    ],
)
def test_text_of_bytes(count, text):
    assert text_of_bytes(count) == text


@given(st.integers(0, 2**60))
def test_bytes_there_and_back(count):
    """Two decimals of a unit are within half a percent."""
    assert abs(bytes_of_text(text_of_bytes(count)) - count) <= 0.005 * count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("60GiB", 60 * 2**30), ("1.5 GB", 1_500_000_000), ("500MB", 500_000_000), (" .5 kib ", 512), ("17", 17),
        (17, 17), ("1e3", 1000), ("2e1 kB", 20_000), ("3b", 3), ("2TB", 2 * 10**12), (0, 0),
    ],
)  # fmt: skip
def test_bytes_of_text(text, count):
    assert bytes_of_text(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-5GB", -5, "5 GiBs", "1,5GB", "5 5", "1e999GB", "nan", "0x10"])
def test_no_size(text):
    with pytest.raises(InputError, match="a size is a number and a unit"):
        bytes_of_text(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (8_400_000, "8.40 M"), (1_500, "1.50 K"), (7e9, "7.00 G"), (2e13, "20.00 T")],
)
def test_text_of_count(count, text):
    assert text_of_count(count) == text


def test_nearest():
    assert nearest("fp23", ["fp32", "bf16"]) == "did you mean 'fp32'? Known: bf16, fp32"
    assert nearest("zzz", ["fp32", "bf16"]) == "Known: bf16, fp32"


def test_exit_codes():
    codes = {kind: kind.exit_code for kind in (LindosError, InputError, LayoutError, RefusedError, RankError)}
    assert codes == {LindosError: 2, InputError: 2, LayoutError: 2, RefusedError: 3, RankError: 5}
