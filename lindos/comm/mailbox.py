"""Collectives between ranks of one host through memory that they share.

Each rank owns a mailbox of two slots and a counter. One exchange is: copy into my slot, count up, wait until every
other counter has arrived, read the others' slots. Two slots are enough: whoever has seen all counters at n+1 knows
that all have read slot n. The signature of the call travels beside the data, so a rank that makes another call is
found before a byte of it is used. Sums run in rank order on every rank, hence are bit-equal over ranks.

Gloo needs a loopback round trip where this needs two copies: 1 MiB over two ranks costs an eighth (benchmarks/comm.py).
Plain stores are seen in order by other cores on x86; elsewhere gloo serves.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

SLOT_BYTES, HEAD_BYTES = 1 << 20, 4096
_TWO_ROUNDS_FROM = 4  # ranks from which an all_reduce reads less as reduce_scatter and all_gather


_END = object()


class Mismatch(Exception):
    """Another rank makes a different call."""

    def __init__(self, index: int) -> None:
        self.index = index


class Gone(Exception):
    """The process of another rank has ended."""

    def __init__(self, index: int) -> None:
        self.index = index


class Box:
    """One rank's mailbox, seen through a writable buffer."""

    def __init__(self, memory: mmap.mmap | bytearray, pid: int = 0) -> None:
        self.memory, self.pid = memory, pid
        self.head = memoryview(memory)[:HEAD_BYTES].cast("q")
        self.slots = [
            torch.frombuffer(memory, dtype=torch.uint8, count=SLOT_BYTES, offset=HEAD_BYTES + i * SLOT_BYTES)
            for i in (0, 1)
        ]


class Mailboxes:
    """The mailboxes of a group. `tick(started)` is called while waiting and raises when waiting must end."""

    def __init__(self, boxes: Sequence[Box], index: int, tick: Callable[[float], None], patient: bool = True) -> None:
        self.boxes, self.index, self.size, self.tick = boxes, index, len(boxes), tick
        self.others = [(i, box) for i, box in enumerate(boxes) if i != index]
        self.round = 0
        self.spins = 200 if patient else 1
        self.begun: deque[Iterator[None]] = deque()

    def post(self, x: torch.Tensor, signature: int) -> None:
        """Copy a tensor of at most SLOT_BYTES into this round's slot."""
        self.round += 1
        box, parity = self.boxes[self.index], self.round & 1
        if x.numel():
            _typed(box.slots[parity], x.dtype, x.numel()).view(x.shape).copy_(x)
        box.head[1 + parity] = signature
        box.head[0] = self.round

    def collect(self, signature: int) -> None:
        """Wait until all others have posted this round and compare their signatures."""
        number, parity = self.round, 1 + (self.round & 1)
        for i, box in self.others:
            if box.head[0] < number:
                self._wait(i, box, number)
            if box.head[parity] != signature:
                raise Mismatch(i)

    def _wait(self, i: int, box: Box, number: int) -> None:
        head = box.head
        for _ in range(self.spins):
            if head[0] >= number:
                return
        started, looked = time.monotonic(), 0.0
        while head[0] < number:
            waited = time.monotonic() - started
            time.sleep(0 if waited < 0.002 else 0.00005 if waited < 0.1 else 0.001)
            if waited - looked > 0.1:
                looked = waited
                self.tick(started)
                if box.pid and not _alive(box.pid) and head[0] < number:
                    raise Gone(i)

    def arrived(self) -> bool:
        """Whether all others have posted this round."""
        return all(box.head[0] >= self.round for _, box in self.others)

    def begin(self, x: torch.Tensor, signature: int) -> None:
        """An all_reduce in place that goes on whenever `poll` finds the others ready, and ends at `drain`."""
        self.begun.append(self._reduced(x, x, signature, "sum"))
        self.poll()

    def poll(self) -> None:
        """Go on with what was begun as far as that needs no waiting."""
        while self.begun:
            if next(self.begun[0], _END) is None:
                return
            self.begun.popleft()

    def drain(self) -> None:
        """Finish what was begun, waiting where needed."""
        while self.begun:
            for _ in self.begun[0]:
                self.wait_round()
            self.begun.popleft()

    def wait_round(self) -> None:
        for i, box in self.others:
            if box.head[0] < self.round:
                self._wait(i, box, self.round)

    def slot(self, i: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """What rank i posted this round."""
        return _typed(self.boxes[i].slots[self.round & 1], dtype, numel)

    # Each collective below runs piece by piece through the slots; tensors are contiguous.

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor, signature: int, op: str) -> None:
        """out may be x."""
        for _ in self._reduced(out, x, signature, op):
            self.wait_round()

    def _reduced(self, out: torch.Tensor, x: torch.Tensor, signature: int, op: str) -> Iterator[None]:
        """The rounds of an all_reduce; yields while another rank has not posted."""
        two = self.size >= _TWO_ROUNDS_FROM and x.numel() >= 4096
        step = SLOT_BYTES // x.element_size()
        for piece, target in zip(x.view(-1).split(step), out.view(-1).split(step)):
            self.post(piece, signature)
            while not self.arrived():
                yield
            self.collect(signature)
            if not two:
                self._combine(target, 0, target.numel(), op)
                continue
            part = -(-target.numel() // self.size)
            a, b = self.index * part, min((self.index + 1) * part, target.numel())
            if a < b:
                self._combine(target[a:b], a, b, op)
            self.post(target[self.index * part : (self.index + 1) * part], signature)
            while not self.arrived():
                yield
            self.collect(signature)
            self._spread(target, part)

    def _spread(self, piece: torch.Tensor, part: int) -> None:
        for i, _ in self.others:
            target = piece[i * part : (i + 1) * part]
            if target.numel():
                target.copy_(self.slot(i, piece.dtype, target.numel()))

    def _combine(self, out: torch.Tensor, start: int, stop: int, op: str) -> None:
        slots = [self.slot(i, out.dtype, stop)[start:stop] for i in range(self.size)]
        if op == "max":
            out.copy_(torch.stack(slots).amax(0))
        elif self.size == 2:
            torch.add(slots[0], slots[1], out=out)
        else:
            total = slots[0].to(_wide(out.dtype), copy=True)
            for slot in slots[1:]:
                total.add_(slot)
            out.copy_(total)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, signature: int) -> None:
        """out [ranks, n] from x [n]."""
        step = SLOT_BYTES // x.element_size()
        for a in range(0, max(x.numel(), 1), step):
            piece = x[a : a + step]
            self.post(piece, signature)
            self.collect(signature)
            for i in range(self.size):
                out[i, a : a + step].copy_(self.slot(i, x.dtype, piece.numel()))

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, signature: int) -> None:
        """out [n] from x [ranks, n], summed."""
        step = SLOT_BYTES // x.element_size() // self.size
        for a in range(0, max(out.numel(), 1), step):
            piece = x[:, a : a + step]
            self.post(piece, signature)
            self.collect(signature)
            width = piece.shape[1]
            total = self._row(0, x.dtype, width).to(_wide(x.dtype), copy=True)
            for i in range(1, self.size):
                total.add_(self._row(i, x.dtype, width))
            out[a : a + step].copy_(total)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, signature: int) -> None:
        """out [ranks, n]: row i is what rank i had in its row for me."""
        step = SLOT_BYTES // x.element_size() // self.size
        for a in range(0, max(x.shape[1], 1), step):
            piece = x[:, a : a + step]
            self.post(piece, signature)
            self.collect(signature)
            for i in range(self.size):
                out[i, a : a + step].copy_(self._row(i, x.dtype, piece.shape[1]))

    def _row(self, i: int, dtype: torch.dtype, width: int) -> torch.Tensor:
        return self.slot(i, dtype, width * self.size)[self.index * width : (self.index + 1) * width]

    def broadcast(self, x: torch.Tensor, source: int, signature: int) -> None:
        for piece in x.view(-1).split(SLOT_BYTES // x.element_size()):
            self.post(piece if source == self.index else piece[:0], signature)
            self.collect(signature)
            if source != self.index:
                piece.copy_(self.slot(source, x.dtype, piece.numel()))

    def wait(self) -> None:
        """All is done when a call returns."""


def _typed(slot: torch.Tensor, dtype: torch.dtype, numel: int) -> torch.Tensor:
    return slot[: numel * dtype.itemsize].view(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def own_memory(name: str) -> tuple[int, mmap.mmap]:
    """An anonymous file of this process for one mailbox, and its number for the others."""
    number = os.memfd_create(name)
    os.ftruncate(number, HEAD_BYTES + 2 * SLOT_BYTES)
    return number, mmap.mmap(number, HEAD_BYTES + 2 * SLOT_BYTES)


def others_memory(pid: int, number: int) -> mmap.mmap:
    """The same memory opened from another process of this host and user."""
    opened = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    try:
        return mmap.mmap(opened, HEAD_BYTES + 2 * SLOT_BYTES)
    finally:
        os.close(opened)
