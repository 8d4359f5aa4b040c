"""Chunk: one contiguous buffer for many local shards, their masters and their gradients.

Parameters of the model are views into `work`, the optimizer's are views into `master` (the same memory when both
dtypes are one), gradients are views into `gradient`. A gradient is touched once a micro-batch: the first is stored,
later ones are added, in the accumulation dtype; nothing is zeroed in between.
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
    """

    name: str
    shape: tuple[int, ...]
    work: torch.dtype
    master: torch.dtype
    block: str
    group: Hashable
    trained: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def room(self) -> int:
        """Elements that it takes in a chunk, alignment included."""
        return -(-self.numel // ALIGN) * ALIGN


@dataclass(frozen=True)
class Slot:
    """Where an item lies in its chunk."""

    item: Item
    start: int

    @property
    def name(self) -> str:
        return self.item.name


class Phase(enum.Enum):
    """Idle between steps; open while a backward fills it; closed when all of its gradients are there; reduced."""

    IDLE = "idle"
    OPEN = "open"
    CLOSED = "closed"
    REDUCED = "reduced"


@dataclass
class Chunk:
    """Slots and their buffers. `fresh` until the first micro-batch of a step has stored its gradients."""

    slots: tuple[Slot, ...]
    device: torch.device
    index: int = 0
    phase: Phase = Phase.IDLE
    work: torch.Tensor = field(init=False)
    master: torch.Tensor = field(init=False)
    gradient: torch.Tensor | None = None
    stored: set[str] = field(default_factory=set)
    arrived: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        first = self.slots[0].item
        self.group, self.trained = first.group, first.trained
        self.size = max(slot.start + slot.item.room for slot in self.slots)
        self.work = torch.zeros(self.size, dtype=first.work, device=self.device)
        same = first.work == first.master
        self.master = self.work if same else torch.zeros(self.size, dtype=first.master, device=self.device)

    def view(self, buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
        """The slot's part of one of the buffers, in the item's shape."""
        return buffer[slot.start : slot.start + slot.item.numel].view(slot.item.shape)

    def gradient_of(self, slot: Slot) -> torch.Tensor:
        return self.view(self._gradients(), slot)

    def _gradients(self) -> torch.Tensor:
        if self.gradient is None:
            self.gradient = torch.zeros(self.size, dtype=self.slots[0].item.master, device=self.device)
        return self.gradient

    def put(self, slot: Slot, gradient: torch.Tensor, scale: float) -> None:
        """Take a gradient of one micro-batch, times `scale`: store the first of a step, add later ones."""
        target = self.gradient_of(slot)
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
                self.gradient_of(slot).zero_()
                self.stored.add(slot.name)
        self.phase = Phase.CLOSED

    def forget(self) -> None:
        """The next gradient begins a new step."""
        self.stored.clear()
        self.arrived.clear()
        self.phase = Phase.IDLE

    def publish(self) -> None:
        """Masters to the working copy that the model computes with."""
        if self.master is not self.work:
            self.work.copy_(self.master)

    @property
    def bytes_at_rest(self) -> int:
        """Bytes of parameters and masters that exist, from the storages."""
        buffers = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in (self.work, self.master)}
        return sum(buffers.values())


def pack(items: Sequence[Item], device: torch.device, limit_bytes: int | None = None) -> list[Chunk]:
    """Place items, in order, into chunks of one dtype pair and reduction group.

    A chunk is at most the largest block; it ends on a block border unless that leaves more than 5 % of it unused.

    Args:
        items: in the order in which their gradients are expected.
        limit_bytes: largest chunk; default the bytes of the largest block.
    """
    chunks: list[Chunk] = []
    keys = dict.fromkeys((item.work, item.master, item.group, item.trained) for item in items)
    for key in keys:
        mine = [item for item in items if (item.work, item.master, item.group, item.trained) == key]
        blocks = _blocks(mine)
        limit = limit_bytes or max(_bytes(block) for block in blocks)
        for members in _fill(blocks, limit):
            chunks.append(_chunk(members, device))
    order = {item.name: i for i, item in enumerate(items)}
    chunks.sort(key=lambda chunk: max(order[slot.name] for slot in chunk.slots))
    for i, chunk in enumerate(chunks):
        chunk.index = i
    return chunks


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


def _chunk(items: Sequence[Item], device: torch.device) -> Chunk:
    slots, start = [], 0
    for item in items:
        slots.append(Slot(item, start))
        start += item.room
    return Chunk(tuple(slots), device)
