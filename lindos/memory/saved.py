"""What a forward saves for its backward, in bytes: unique storages, parameters not counted."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_active = threading.local()


class Saved:
    """Storages that are saved for backward, each counted once however many tensors lie on it.

    A storage that a block moved to the host counts there; if it is also held on the device, there too.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._excluded = {StorageWeakRef(p.untyped_storage()) for p in parameters}
        self._numbers = {weak.cdata for weak in self._excluded}
        self._device: dict[int, tuple[StorageWeakRef, int]] = {}
        self._host: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided:
            self.add_storage(StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes())

    def add_storage(self, weak: StorageWeakRef, count_bytes: int, host: bool = False) -> None:
        if weak.cdata not in self._numbers:  # a living weak reference keeps the number from being given again
            (self._host if host else self._device)[weak.cdata] = (weak, count_bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes saved on the device and still held."""
        return sum(count_bytes for weak, count_bytes in self._device.values() if not weak.expired())

    @property
    def host_bytes(self) -> int:
        """Bytes moved to the host."""
        return sum(count_bytes for _, count_bytes in self._host.values())


@contextmanager
def saved_bytes(parameters: Iterable[torch.Tensor]) -> Iterator[Saved]:
    """Count what is saved for backward inside; blocks with a tape or a home of their own report what they keep.

    Example:
        >>> x = torch.ones(3, requires_grad=True)
        >>> with saved_bytes([]) as saved:
        ...     y = x.exp()
        >>> saved.device_bytes
        12
    """
    counted = Saved(parameters)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        counted.add(tensor)
        return tensor.detach()

    stack = _stack()
    stack.append(counted)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield counted
    finally:
        stack.remove(counted)


def counters() -> list[Saved]:
    """Who counts on this thread."""
    return _stack()


def _stack() -> list[Saved]:
    if not hasattr(_active, "stack"):
        _active.stack = []
    return _active.stack
