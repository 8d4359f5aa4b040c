"""In which order rows are trained on: pure functions of the seed, so a resumed run needs no stored state.

Nothing here remembers anything. A run that stops at step 700 and resumes, or resumes on another number of ranks,
asks the same functions and sees the same rows.
"""

from __future__ import annotations

import operator
from functools import lru_cache

import numpy as np

from lindos.core.errors import InputError


def order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The permutation of `count` rows in which one epoch visits them.

    Each row draws a 64-bit number from the counter-based generator Philox keyed by (seed, epoch), and rows are sorted
    by it. The raw stream of Philox is fixed by its paper, and sorting has no choices (equal keys keep row order), so
    the order is the same on every machine and numpy version, which `Generator.permutation` does not promise.

    Args:
        seed: 0 to 2**64 - 1.
        epoch: 0 to 2**64 - 1.
        count: number of rows, at least 1.

    Returns:
        int64 array of shape [count].

    Raises:
        InputError: a number out of its range.

    Source:
        Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (2011).
    """
    seed, epoch, count = (
        _within("seed", seed, 0, 2**64 - 1),
        _within("epoch", epoch, 0, 2**64 - 1),
        _within("count", count, 1, 2**62),
    )
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def rows_of_step(seed: int, step: int, batch: int, count: int) -> np.ndarray:
    """The rows that step `step` trains on, from all epochs laid end to end.

    Step s takes places s * batch to (s + 1) * batch - 1 of order(seed, 0), order(seed, 1), ...: a batch may end one
    epoch and begin the next, no row is dropped, and none is seen twice in an epoch. The order of the latest two epochs
    is kept at hand, so a step costs its batch and not the epoch.

    Args:
        seed: as in `order`.
        step: 0 for the first.
        batch: rows a step takes over all ranks, at least 1.
        count: rows in the data set, at least 1.

    Returns:
        int64 array of shape [batch].

    Raises:
        InputError: a number out of its range.
    """
    step, batch, count = (
        _within("step", step, 0, 2**62),
        _within("batch", batch, 1, 2**40),
        _within("count", count, 1, 2**62),
    )
    rows = np.empty(batch, dtype=np.int64)
    filled = 0
    while filled < batch:
        epoch, place = divmod(step * batch + filled, count)
        length = min(count - place, batch - filled)
        rows[filled : filled + length] = _kept_order(seed, epoch, count)[place : place + length]
        filled += length
    return rows


@lru_cache(maxsize=2)
def _kept_order(seed: int, epoch: int, count: int) -> np.ndarray:
    return order(seed, epoch, count)


def _within(name: str, value: int, low: int, high: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{name} must be an integer, got {value!r}.") from None
    if not low <= number <= high:
        raise InputError(f"{name} must be {low} to {high}, got {number}.")
    return number
