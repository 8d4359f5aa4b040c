import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lindos.core.errors import InputError
from lindos.corpus import order, rows_of_step

SEED = st.integers(0, 2**64 - 1)


@given(SEED, SEED, st.integers(1, 300))
@settings(deadline=None)
def test_an_order_visits_every_row_once(seed, epoch, count):
    rows = order(seed, epoch, count)
    assert rows.dtype == np.int64
    assert sorted(rows) == list(range(count))
    assert np.array_equal(rows, order(seed, epoch, count))


@given(SEED, st.integers(0, 1000), st.integers(50, 300))
@settings(deadline=None)
def test_seeds_and_epochs_give_other_orders(seed, epoch, count):
    rows = order(seed, epoch, count)
    assert not np.array_equal(rows, order(seed, epoch + 1, count))
    assert not np.array_equal(rows, order(seed ^ 1, epoch, count))
    assert not np.array_equal(rows, np.arange(count))


@given(SEED, st.integers(1, 40), st.integers(1, 60), st.integers(0, 5))
@settings(deadline=None)
def test_steps_laid_end_to_end_are_epochs_laid_end_to_end(seed, batch, count, epochs):
    steps = -(-count * epochs // batch) + 1
    rows = np.concatenate([rows_of_step(seed, step, batch, count) for step in range(steps)])
    assert len(rows) == steps * batch
    for epoch in range(len(rows) // count):
        assert np.array_equal(rows[epoch * count : (epoch + 1) * count], order(seed, epoch, count))


@given(SEED, st.integers(0, 10**9), st.integers(1, 16), st.integers(1, 50))
@settings(deadline=None)
def test_a_step_needs_nothing_of_the_steps_before(seed, step, batch, count):
    rows = rows_of_step(seed, step, batch, count)
    rows_of_step(seed + 1 & 2**64 - 1, step + 3, batch, count)
    assert np.array_equal(rows, rows_of_step(seed, step, batch, count))
    assert np.array_equal(
        np.concatenate([rows_of_step(seed, 2 * step + half, batch, count) for half in (0, 1)]),
        rows_of_step(seed, step, 2 * batch, count),
    )


def test_the_rows_given_are_the_callers_own():
    first = rows_of_step(3, 0, 10, 10)
    first[:] = -1
    assert sorted(rows_of_step(3, 0, 10, 10)) == list(range(10))


def test_the_order_is_this_one_for_ever():
    # Written down once: a change of these numbers would break the resuming of every run.
    assert order(0, 0, 12).tolist() == [0, 2, 11, 9, 1, 8, 5, 4, 3, 10, 6, 7]
    assert order(2**63 + 5, 7, 12).tolist() == [7, 4, 3, 8, 10, 5, 9, 1, 11, 6, 2, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: order(-1, 0, 5), "seed must be 0 to"),
        (lambda: order(2**64, 0, 5), "seed must be 0 to"),
        (lambda: order(0, -1, 5), "epoch must be 0 to"),
        (lambda: order(0, 0, 0), "count must be 1 to .* got 0"),
        (lambda: order(0.5, 0, 5), "seed must be an integer, got 0.5"),
        (lambda: rows_of_step(0, -1, 2, 5), "step must be 0 to"),
        (lambda: rows_of_step(0, 0, 0, 5), "batch must be 1 to"),
        (lambda: rows_of_step(0, 0, 2, 0), "count must be 1 to"),
        (lambda: rows_of_step(-4, 0, 2, 5), "seed must be 0 to"),
    ],
)
def test_numbers_out_of_range_are_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()
