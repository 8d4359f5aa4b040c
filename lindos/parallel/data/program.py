"""The chunk program: gradients into chunks while backward runs, chunks reduced in one fixed order on every rank.

Stage 0 (DDP): parameters, gradients and optimizer state rest whole on every dp rank. A chunk that is ready early waits
its turn; what no micro-batch has used is reduced as zeros at the end; so every rank makes the same collectives in the
same order whatever its data did. The reduction is a mean over dp and sp, and a sum over the axes that the ledger names
in `sum_over`, in one collective over their product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from lindos.comm.world import Flight, World
from lindos.core.ledger import Entry, Ledger
from lindos.core.mesh import Mesh
from lindos.memory.chunk import Chunk, Item, Phase, Slot, pack

MEAN_AXES = ("dp", "sp")


class Data:
    """The data axis of one model.

    Attributes:
        chunks: in the order of their reduction.
        shards: this rank's part of each trained parameter, as the optimizer sees it, by name.
        stray: a parameter whose gradient came outside `booster.backward`, or None.
    """

    def __init__(self, dtypes: Callable[[torch.dtype], tuple[torch.dtype, torch.dtype]], device: torch.device) -> None:
        self.dtypes, self.device = dtypes, device
        self.chunks: list[Chunk] = []
        self.shards: dict[str, nn.Parameter] = {}
        self.stray: str | None = None
        self._places: dict[str, tuple[Chunk, Slot]] = {}
        self._open = self._last = False
        self._next = 0
        self._pending = 0
        self._flying: list[Flight] = []
        self._stream = torch.Stream(device) if device.type != "cpu" else None

    def contribute(self, ledger: Ledger, mesh: Mesh) -> Mesh:
        """Stage 0: at rest as in use. Adds the gradients' lines."""
        for entry in list(ledger.of("parameter")):
            work, master = self.dtypes(getattr(torch, entry.dtype))
            entry.dtype = str(work).removeprefix("torch.")
            dtype = str(master).removeprefix("torch.")
            if entry.trained:
                ledger.add(
                    Entry(entry.name, "gradient", entry.role, dtype, entry.at_rest, entry.in_use, entry.sum_over)
                )
            if master != work:
                ledger.add(Entry(f"{entry.name}/master", "state", entry.role, dtype, entry.at_rest, entry.in_use))
        return mesh

    def apply(self, model: nn.Module, ledger: Ledger, world: World) -> None:
        """Move parameters into chunks: each becomes a view of its chunk, still to be filled by `fill`."""
        self.world = world
        self.scale = 1.0 / world.mesh.size(self._means(world.mesh))
        entries = list(ledger.of("parameter"))[::-1]
        self.chunks = pack([self._item(entry, world.mesh) for entry in entries], self.device)
        self._trained = [chunk for chunk in self.chunks if chunk.trained]
        owners = _owners(model)
        for chunk in self.chunks:
            for slot in chunk.slots:
                self._places[slot.name] = (chunk, slot)
                entry = ledger.parameter(slot.name)
                parameter = nn.Parameter(chunk.view(chunk.work, slot), requires_grad=entry.trained)
                for name in (entry.name, *entry.tied):
                    module, suffix = owners[name]
                    module._parameters[suffix] = parameter
                if entry.trained:
                    shard = nn.Parameter(chunk.view(chunk.master, slot))
                    self.shards[entry.name] = shard
                    parameter.register_post_accumulate_grad_hook(self._receiver(chunk, slot))

    def fill(self, name: str, value: torch.Tensor) -> None:
        """Give a parameter its local value; masters take it exactly, the working copy rounds it."""
        chunk, slot = self._places[name]
        chunk.view(chunk.master, slot).copy_(value)
        if chunk.master is not chunk.work:
            chunk.view(chunk.work, slot).copy_(value)

    def value(self, name: str) -> torch.Tensor:
        """The local master of a parameter."""
        chunk, slot = self._places[name]
        return chunk.view(chunk.master, slot)

    def gradient(self, name: str) -> torch.Tensor:
        """The local, reduced gradient of a parameter."""
        chunk, slot = self._places[name]
        return chunk.gradient_of(slot)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, local gradient) of every trained parameter, in the order of the chunks."""
        for chunk in self._trained:
            for slot in chunk.slots:
                yield slot.name, chunk.gradient_of(slot)

    @property
    def pending(self) -> bool:
        """Whether gradients were added that have not been reduced."""
        return self._pending > 0

    @property
    def reduced(self) -> bool:
        """Whether this step's gradients are complete and reduced."""
        return all(chunk.phase is Phase.REDUCED for chunk in self._trained) and bool(self._trained)

    def open(self, last: bool) -> None:
        """A backward begins; `last` if its gradients are the last of the step."""
        if self.reduced:
            self._spread()
        self._open, self._last, self._next = True, last, 0
        for chunk in self._trained:
            chunk.phase = Phase.OPEN
            chunk.arrived.clear()

    def close(self) -> None:
        """The backward has ended: reduce what is left, in order."""
        self._open = False
        self._pending += 1
        if not self._last:
            return
        while self._next < len(self._trained):
            self._reduce(self._trained[self._next])
        for flight in self._flying:
            flight.finish()
        self._flying.clear()
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)
        self._pending = 0

    def _spread(self) -> None:
        """Another backward after the last: what is reduced becomes each rank's equal share of the coming sum."""
        for chunk in self._trained:
            assert isinstance(chunk.group, tuple)
            chunk._gradients().mul_(1.0 / self.world.mesh.size(chunk.group))

    def abandon(self) -> None:
        """A backward failed: forget what it left."""
        self._open = False
        self._flying.clear()
        self.forget()

    def rescale(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient."""
        for chunk in self._trained:
            if chunk.gradient is not None:
                chunk.gradient.mul_(factor)

    def attach(self) -> None:
        """Point every shard's `.grad` at its gradient, for the optimizer."""
        for chunk in self._trained:
            for slot in chunk.slots:
                self.shards[slot.name].grad = chunk.gradient_of(slot)

    def publish(self, frozen: bool = False) -> None:
        """Masters to working copies after an optimizer step; those of frozen parameters too after a load."""
        for chunk in self.chunks if frozen else self._trained:
            chunk.publish()

    def forget(self) -> None:
        """zero_grad: the next backward stores instead of adding."""
        for chunk in self._trained:
            chunk.forget()
        self.stray, self._pending = None, 0

    def resident_bytes(self) -> int:
        """Bytes of parameters and masters on this rank, from the storages that exist."""
        return sum(chunk.bytes_at_rest for chunk in self.chunks)

    def _receiver(self, chunk: Chunk, slot: Slot) -> Callable[[torch.Tensor], None]:
        def receive(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if not self._open:
                self.stray = slot.name
            elif gradient is not None:
                chunk.put(slot, gradient, self.scale)
                if self._last and chunk.complete and self._trained[self._next] is chunk:
                    self._advance()
                elif self._flying:
                    self._flying[-1].poll()

        return receive

    def _advance(self) -> None:
        while self._next < len(self._trained) and self._trained[self._next].complete:
            self._reduce(self._trained[self._next])

    def _reduce(self, chunk: Chunk) -> None:
        chunk.settle()
        axes = chunk.group
        assert isinstance(axes, tuple)
        if self.world.mesh.size(axes) > 1:
            if self._stream is None:
                flight = self.world.begin_all_reduce(chunk._gradients(), axes, f"chunk {chunk.index}")
                if flight is not None:
                    self._flying.append(flight)
            else:
                self._stream.wait_stream(torch.accelerator.current_stream())
                with self._stream:
                    self.world.all_reduce(chunk._gradients(), axes, f"chunk {chunk.index}")
        chunk.phase = Phase.REDUCED
        self._next += 1

    def _item(self, entry: Entry, mesh: Mesh) -> Item:
        work = getattr(torch, entry.dtype)
        shape = entry.at_rest.local_shape(mesh)
        group = (*self._means(mesh), *entry.sum_over)
        return Item(entry.name, shape, work, self.dtypes(work)[1], block_of(entry.name), group, entry.trained)

    @staticmethod
    def _means(mesh: Mesh) -> tuple[str, ...]:
        return tuple(axis.name for axis in mesh.base if axis.name in MEAN_AXES)


def block_of(name: str) -> str:
    """The unit of a model that a parameter belongs to: up to the first number in its name, or its module."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1])


def _owners(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    return {
        f"{prefix}.{suffix}" if prefix else suffix: (module, suffix)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for suffix, parameter in module._parameters.items()
        if parameter is not None
    }
