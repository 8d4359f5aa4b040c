"""Homes: copies of bytes between the device and host memory, beside the computation where the device can do that.

On an accelerator the host side is pinned and copies run on a stream of their own. Without one the device home is host
memory too: the same calls copy to another buffer, so that everything but the speed can be tested.
"""

from __future__ import annotations

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Homes:
    """Moves storages to the host and back, each once however many hold it.

    Attributes:
        evicted_bytes, fetched_bytes: moved so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.evicted_bytes = self.fetched_bytes = 0
        self.stream = torch.Stream(device) if device.type != "cpu" else None
        self._away: weakref.WeakValueDictionary[int, Away] = weakref.WeakValueDictionary()

    def evict(self, storage: torch.UntypedStorage) -> Away:
        """Begin to copy a storage to the host; its device memory is free once nothing else holds it."""
        away = self._away.get(storage._cdata)
        if away is None:
            away = self._away[storage._cdata] = Away(self, storage)
        return away


class Away:
    """A storage that rests on the host."""

    def __init__(self, homes: Homes, storage: torch.UntypedStorage) -> None:
        self.homes, self.count_bytes = homes, storage.nbytes()
        self._weak = StorageWeakRef(storage)  # keeps the number, by which others find this copy, from being given again
        self._fetched: torch.Tensor | None = None
        self._arrived: torch.Event | None = None
        source, stream = bytes_of(storage), homes.stream
        homes.evicted_bytes += self.count_bytes
        if stream is None:
            self._host = source.clone()
            return
        self._host = torch.empty(self.count_bytes, dtype=torch.uint8, pin_memory=True)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            self._host.copy_(source, non_blocking=True)
        source.record_stream(stream)  # its memory is not given away before the copy has read it

    def begin(self) -> None:
        """Begin to copy it back, if that has not begun."""
        if self._fetched is not None:
            return
        homes, stream = self.homes, self.homes.stream
        homes.fetched_bytes += self.count_bytes
        if stream is None:
            self._fetched = self._host.clone()
            return
        self._fetched = torch.empty(self.count_bytes, dtype=torch.uint8, device=homes.device)
        stream.wait_stream(torch.accelerator.current_stream())  # the allocator may give what that stream still reads
        with stream:
            self._fetched.copy_(self._host, non_blocking=True)
            self._arrived = stream.record_event()
        self._fetched.record_stream(stream)

    def here(self) -> torch.UntypedStorage:
        """The storage on the device again, complete for what is computed next on the current stream."""
        self.begin()
        assert self._fetched is not None
        if self._arrived is not None:
            current = torch.accelerator.current_stream()
            current.wait_event(self._arrived)
        return self._fetched.untyped_storage()


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as one row of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
