"""The record of collectives: what was really communicated, call by call, taken where the process groups are called."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

_active = threading.local()

RING = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}


@dataclass(frozen=True)
class Call:
    """One collective of this rank.

    Attributes:
        op: all_reduce, all_gather, reduce_scatter, all_to_all or broadcast.
        axes: mesh axes it ran over.
        name: module and phase.
        elements: elements of the full tensor: reduced, gathered, or before it is scattered.
        dtype: what travelled.
        ranks: size of the group.
    """

    op: str
    axes: tuple[str, ...]
    name: str
    elements: int
    dtype: torch.dtype
    ranks: int

    @property
    def received_elements(self) -> float:
        """Elements that a rank receives in the ring form of the collective, whatever form this backend used."""
        return RING[self.op](self.ranks) * self.elements

    @property
    def received_bytes(self) -> float:
        return self.received_elements * self.dtype.itemsize


@dataclass
class Record:
    """Collectives in order."""

    calls: list[Call] = field(default_factory=list)

    def received_bytes(self, axes: str | tuple[str, ...] | None = None, op: str | None = None) -> float:
        """Bytes that this rank received, over all calls or those of one axis or one kind."""
        wanted = (axes,) if isinstance(axes, str) else axes
        return sum(
            call.received_bytes
            for call in self.calls
            if (wanted is None or call.axes == wanted) and (op is None or call.op == op)
        )


@contextmanager
def record() -> Iterator[Record]:
    """Collect every collective that this rank makes inside the block.

    Example:
        >>> with record() as seen:
        ...     pass
        >>> seen.received_bytes("tp")
        0
    """
    made = Record()
    stack = _stack()
    stack.append(made)
    try:
        yield made
    finally:
        stack.remove(made)


@contextmanager
def rank_thread() -> Iterator[None]:
    """Around the work of a thread that is a rank of its own: its calls are in no other thread's records."""
    stack = _stack()
    try:
        yield
    finally:
        _process[:] = [other for other in _process if other is not stack]


def _stack() -> list[Record]:
    if not hasattr(_active, "stack"):
        _active.stack = []
        _process.append(_active.stack)
    return _active.stack


# Backward runs on the thread that called it on CPU, but on device threads with an accelerator: then the only stack
# that this process has is meant.
_process: list[list[Record]] = []


def note(call: Call) -> None:
    """Write one call to every open record of this thread, or of the process when this thread opened none."""
    stack = getattr(_active, "stack", None)
    if stack is None and len(_process) == 1:
        stack = _process[0]
    for made in stack or ():
        made.calls.append(call)


def recording() -> bool:
    """Whether anybody records."""
    return any(_process)
