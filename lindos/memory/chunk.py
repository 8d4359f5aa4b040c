"""Chunk: one contiguous buffer for many local shards, their masters and their gradients.

Parameters of the model are views into `work`, the optimizer's are views into `master` (the same memory when both
dtypes are one), gradients are views into `gradient`. A gradient is touched once a micro-batch: the first is stored,
later ones are added, in the accumulation dtype; nothing is zeroed in between.

A chunk may be one of several equal parts of what a group of ranks keeps together: then `master` and the reduced
gradient, `total`, are this rank's part, a range of elements that may begin and end inside a tensor.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

ALIGN = 16  # elements: views start on borders of 64 bytes in fp32, of 32 in bf16


@dataclass(frozen=True)
class Item:
    """One local tensor to be placed.

    Attributes:
        name: parameter name.
        shape: local shape.
        work: dtype that the model computes with.
        master: dtype that the optimizer steps and gradients are summed in.
        block: the unit of the model that it belongs to, a decoder layer for example.
        group: what separates chunks besides dtypes: the axes that its gradient is reduced over.
        trained: whether it has a gradient.
        largest: elements on the rank that holds most, so that places are the same on all ranks; 0 for its own.
    """

    name: str
    shape: tuple[int, ...]
    work: torch.dtype
    master: torch.dtype
    block: str
    group: Hashable
    trained: bool = True
    largest: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def room(self) -> int:
        """Elements that it takes in a chunk, alignment included."""
        return -(-self.extent // ALIGN) * ALIGN

    @property
    def extent(self) -> int:
        """Elements on the rank that holds most."""
        return max(self.numel, self.largest)


@dataclass(frozen=True)
class Slot:
    """Where an item lies in its chunk."""

    item: Item
    start: int

    @property
    def name(self) -> str:
        return self.item.name

    def inside(self, first: int, last: int) -> tuple[int, int]:
        """The range of its own elements, those of the largest rank included, that lies in a range of the chunk."""
        low, high = max(first, self.start), min(last, self.start + self.item.extent)
        return (low - self.start, high - self.start) if low < high else (0, 0)


class Phase(enum.Enum):
    """Idle between steps; open while a backward fills it; closed when all of its gradients are there; reduced."""

    IDLE = "idle"
    OPEN = "open"
    CLOSED = "closed"
    REDUCED = "reduced"


@dataclass
class Chunk:
    """Slots and their buffers. `stored` is empty until the first micro-batch of a step has stored its gradients.

    Attributes:
        parts, part: how many ranks share the masters, and which part is this rank's.
        work: what the model computes with, whole.
        master: this rank's part of what the optimizer steps.
        gradient: whole, of this rank's micro-batches.
        total: this rank's part of the reduced gradient; `gradient` itself where there is one part.
    """

    slots: tuple[Slot, ...]
    device: torch.device
    index: int = 0
    parts: int = 1
    part: int = 0
    phase: Phase = Phase.IDLE
    work: torch.Tensor = field(init=False)
    master: torch.Tensor = field(init=False)
    gradient: torch.Tensor | None = None
    total: torch.Tensor | None = None
    stored: set[str] = field(default_factory=set)
    arrived: set[str] = field(default_factory=set)
    summed: bool = False

    def __post_init__(self) -> None:
        first = self.slots[0].item
        self.group, self.trained = first.group, first.trained
        self.size = size_of(self.slots, self.parts)
        self.range = (self.part * self.size // self.parts, (self.part + 1) * self.size // self.parts)
        self.work = torch.zeros(self.size, dtype=first.work, device=self.device)
        if first.work == first.master:
            self.master = self.work if self.parts == 1 else self.work[slice(*self.range)]
        else:
            self.master = torch.zeros(self.size // self.parts, dtype=first.master, device=self.device)

    @property
    def apart(self) -> bool:
        """Whether masters have memory of their own."""
        first = self.slots[0].item
        return first.work != first.master

    def view(self, buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
        """The slot's part of a whole buffer, in the item's shape."""
        return buffer[slot.start : slot.start + slot.item.numel].view(slot.item.shape)

    def own(self, buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
        """The slot's part of `master` or `total`: in the item's shape, or flat where ranks share the chunk."""
        if self.parts == 1:
            return self.view(buffer, slot)
        low, high = slot.inside(*self.range)
        start = slot.start + low - self.range[0] if low < high else 0
        return buffer[start : start + high - low]

    def fill(self, slot: Slot, value: torch.Tensor) -> None:
        """Give a slot its whole value: masters take it exactly, the working copy rounds it."""
        self.view(self.work, slot).copy_(value)
        if self.apart:
            low, high = slot.inside(*self.range)
            mine = value.reshape(-1)[low:high]
            self.own(self.master, slot).view(-1)[: mine.numel()].copy_(mine)

    def gradient_of(self, slot: Slot) -> torch.Tensor:
        """This rank's part of a reduced gradient."""
        if self.parts == 1:
            return self.view(self.whole_gradient(), slot)
        if self.total is None:
            self.total = torch.zeros(self.size // self.parts, dtype=self.slots[0].item.master, device=self.device)
        return self.own(self.total, slot)

    def whole_gradient(self) -> torch.Tensor:
        """The buffer that micro-batches store and add to, made where there is none."""
        if self.gradient is None:
            self.gradient = torch.zeros(self.size, dtype=self.slots[0].item.master, device=self.device)
        return self.gradient

    def take(self, part: torch.Tensor, keep: bool) -> None:
        """Add this rank's part of a reduction to those of the same step; the next gradients are stored again.

        Args:
            keep: the whole buffer, for the next micro-batch.
        """
        if self.summed and self.total is not None:
            self.total.add_(part)
        else:
            self.total = part
        self.summed = True
        self.stored.clear()
        if not keep:
            self.gradient = None

    def rescale(self, factor: float | torch.Tensor) -> None:
        """Multiply the gradients, or this rank's part of them."""
        buffer = self.gradient if self.parts == 1 else self.total
        if buffer is not None:
            buffer.mul_(factor)

    def put(self, slot: Slot, gradient: torch.Tensor, scale: float) -> None:
        """Take a gradient of one micro-batch, times `scale`: store the first of a step, add later ones."""
        target = self.view(self.whole_gradient(), slot)
        if slot.name not in self.stored:
            self.stored.add(slot.name)
            if scale == 1.0 or target.dtype != gradient.dtype:
                target.copy_(gradient)
                if scale != 1.0:
                    target.mul_(scale)
            else:
                torch.mul(gradient, scale, out=target)
        else:
            target.add_(gradient.to(target.dtype), alpha=scale)
        self.arrived.add(slot.name)

    @property
    def complete(self) -> bool:
        """Whether every gradient of this backward has arrived."""
        return len(self.arrived) == len(self.slots)

    def settle(self) -> None:
        """Zeros for the parameters that no micro-batch of the step has used."""
        for slot in self.slots:
            if slot.name not in self.stored:
                self.view(self.whole_gradient(), slot).zero_()
                self.stored.add(slot.name)
        self.phase = Phase.CLOSED

    def forget(self) -> None:
        """The next gradient begins a new step."""
        self.stored.clear()
        self.arrived.clear()
        self.summed = False
        self.phase = Phase.IDLE

    def publish(self) -> None:
        """This rank's masters to its part of the working copy that the model computes with."""
        if self.apart:
            self.work[slice(*self.range)].copy_(self.master)

    @property
    def bytes_at_rest(self) -> int:
        """Bytes of parameters and masters that exist, from the storages."""
        buffers = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in (self.work, self.master)}
        return sum(buffers.values())


def size_of(slots: Sequence[Slot], parts: int = 1) -> int:
    """Elements of a chunk: a multiple of what its parts are aligned to."""
    unit = ALIGN * parts
    return -(-max(slot.start + slot.item.room for slot in slots) // unit) * unit


def places(items: Sequence[Item], limit_bytes: int | None = None) -> list[tuple[Slot, ...]]:
    """Place items, in order, into chunks of one dtype pair and reduction group.

    A chunk is at most the largest block; it ends on a block border unless that leaves more than 5 % of it unused.

    Args:
        items: in the order in which their gradients are expected.
        limit_bytes: largest chunk; default the bytes of the largest block.
    """
    chunks: list[tuple[Slot, ...]] = []
    keys = dict.fromkeys((item.work, item.master, item.group, item.trained) for item in items)
    for key in keys:
        mine = [item for item in items if (item.work, item.master, item.group, item.trained) == key]
        blocks = _blocks(mine)
        limit = limit_bytes or max(_bytes(block) for block in blocks)
        chunks += [_slots(members) for members in _fill(blocks, limit)]
    order = {item.name: i for i, item in enumerate(items)}
    chunks.sort(key=lambda slots: max(order[slot.name] for slot in slots))
    return chunks


def pack(items: Sequence[Item], device: torch.device, limit_bytes: int | None = None) -> list[Chunk]:
    """Chunks of one part each, by `places`."""
    return [Chunk(slots, device, i) for i, slots in enumerate(places(items, limit_bytes))]


def _fill(blocks: Iterable[list[Item]], limit: int) -> Iterable[list[Item]]:
    """Greedy: whole blocks while they fit; a block is split where its border would waste more than 5 %.

    Only an item that is larger than the limit makes a larger chunk, of its own.
    """
    current: list[Item] = []
    for block in blocks:
        rest = list(block)
        while _bytes(current) + _bytes(rest) > limit:
            if _bytes(current) < 0.95 * limit:
                while rest and (not current or _bytes(current) + _bytes(rest[:1]) <= limit):
                    current.append(rest.pop(0))
            yield current
            current = []
        current = current + rest
    if current:
        yield current


def _blocks(items: Sequence[Item]) -> list[list[Item]]:
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.block, []).append(item)
    return list(found.values())


def _bytes(items: Sequence[Item]) -> int:
    return sum(item.room * item.master.itemsize for item in items)


def _slots(items: Sequence[Item]) -> tuple[Slot, ...]:
    slots, start = [], 0
    for item in items:
        slots.append(Slot(item, start))
        start += item.room
    return tuple(slots)
