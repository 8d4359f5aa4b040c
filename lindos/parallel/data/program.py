"""The chunk program: gradients into chunks while backward runs, chunks reduced in one fixed order on every rank.

zero_stage 0 (DDP): parameters, gradients and optimizer state rest whole on every dp rank. Stage 1: each rank keeps one
part of every chunk's masters and reduced gradient, and steps only those. Stage 2: every micro-batch is reduced into
that part, and no whole gradient outlives its reduction (Rajbhandari et al., arXiv 1910.02054).

A chunk that is ready early waits its turn; what no micro-batch has used is reduced as zeros at the end; so every rank
makes the same collectives in the same order whatever its data did. The reduction is a mean over dp and sp, and a sum
over the axes that the ledger names in `sum_over`: one all_reduce over their product at stage 0; at stages 1 and 2 a
reduce_scatter over the ranks that share the chunk, then an all_reduce of the part over the rest. Masters come back to
working copies by one all_gather a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lindos.comm.world import Flight, World
from lindos.core.errors import InputError
from lindos.core.layout import Cut, Layout
from lindos.core.ledger import Entry, Ledger
from lindos.core.mesh import Mesh
from lindos.memory.chunk import Chunk, Item, Phase, Slot, places, size_of

MEAN_AXES = ("dp", "sp")
REPLICAS, SHARDS = "replicas", "shards"  # sub-axes of dp under zero_replicas


class Data:
    """The data axis of one model.

    Attributes:
        chunks: in the order of their reduction.
        shards: this rank's part of each trained parameter, as the optimizer sees it, by name.
        stray: a parameter whose gradient came outside `booster.backward`, or None.
    """

    def __init__(
        self,
        dtypes: Callable[[torch.dtype], tuple[torch.dtype, torch.dtype]],
        device: torch.device,
        stage: int = 0,
        replicas: int = 1,
    ) -> None:
        self.dtypes, self.device, self.stage, self.replicas = dtypes, device, stage, replicas
        self.chunks: list[Chunk] = []
        self.shards: dict[str, nn.Parameter] = {}
        self.stray: str | None = None
        self._slots: list[tuple[Slot, ...]] = []
        self._places: dict[str, tuple[Chunk, Slot]] = {}
        self._open = self._last = False
        self._next = 0
        self._pending = 0
        self._flying: list[Flight] = []
        self._stream = torch.Stream(device) if device.type != "cpu" else None

    def contribute(self, ledger: Ledger, mesh: Mesh) -> Mesh:
        """Place parameters in chunks and write how masters and gradients rest.

        Raises:
            InputError: zero_replicas does not divide dp.
        """
        mesh = self._shared_by(mesh)
        for entry in list(ledger.of("parameter")):
            entry.dtype = str(self.dtypes(getattr(torch, entry.dtype))[0]).removeprefix("torch.")
        self._slots = places([self._item(entry, mesh) for entry in list(ledger.of("parameter"))[::-1]])
        kept = {slot.name: self._kept(ledger.parameter(slot.name), slot, slots, mesh)
                for slots in self._slots for slot in slots}  # fmt: skip
        for entry in list(ledger.of("parameter")):
            work, master = self.dtypes(getattr(torch, entry.dtype))
            dtype, layout = str(master).removeprefix("torch."), kept[entry.name]
            if entry.trained:
                resting = layout if self.stage >= 2 else entry.at_rest
                ledger.add(Entry(entry.name, "gradient", entry.role, dtype, resting, entry.in_use, entry.sum_over))
            if master != work or layout != entry.at_rest:
                inside = master == work
                name = f"{entry.name}/master"
                ledger.add(Entry(name, "state", entry.role, dtype, layout, entry.in_use, inside=inside))
        return mesh

    def _shared_by(self, mesh: Mesh) -> Mesh:
        """The mesh with the axis over which ranks share chunks."""
        self.axis, self.parts = "dp", mesh.size("dp") if self.stage else 1
        if self.replicas == 1:
            return mesh
        if mesh.size("dp") % self.replicas:
            fits = [n for n in range(1, mesh.size("dp") + 1) if mesh.size("dp") % n == 0]
            raise InputError(
                f"zero_replicas={self.replicas} must divide dp={mesh.size('dp')}. Use zero_replicas in {fits}."
            )
        self.axis, self.parts = SHARDS, mesh.size("dp") // self.replicas
        return mesh.split("dp", **{REPLICAS: self.replicas, SHARDS: self.parts})

    def _kept(self, entry: Entry, slot: Slot, slots: tuple[Slot, ...], mesh: Mesh) -> Layout:
        """A parameter's part of its chunk's part, for every coordinate."""
        if self.parts == 1 or not entry.trained:
            return entry.at_rest
        step = size_of(slots, self.parts) // self.parts
        ranges = (slot.inside(part * step, (part + 1) * step) for part in range(self.parts))
        return entry.at_rest.then(
            Cut(self.axis, "flat", self.parts, tuple((r,) if r[0] < r[1] else () for r in ranges))
        )

    def apply(self, model: nn.Module, ledger: Ledger, world: World) -> None:
        """Move parameters into chunks: each becomes a view of its chunk, still to be filled by `fill`."""
        self.world = world
        self.scale = 1.0 / world.mesh.size(self._means(world.mesh))
        part = world.mesh.coordinate(self.axis)
        for i, slots in enumerate(self._slots):
            shared = self.parts > 1 and slots[0].item.trained
            self.chunks.append(Chunk(slots, self.device, i, *((self.parts, part) if shared else ())))
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
                    shard = nn.Parameter(chunk.own(chunk.master, slot))
                    self.shards[entry.name] = shard
                    parameter.register_post_accumulate_grad_hook(self._receiver(chunk, slot))

    def groups(self) -> list[tuple[str, ...]]:
        """Products of axes that it reduces and gathers over."""
        found = [(self.axis,)] if self.parts > 1 else []
        for chunk in self.chunks:
            assert isinstance(chunk.group, tuple)
            found.append(self._rest(chunk.group) if chunk.parts > 1 else chunk.group)
        return found

    def _rest(self, group: tuple[str, ...]) -> tuple[str, ...]:
        """What is left of a reduction behind its reduce_scatter."""
        left = [name for name in group if name != "dp"]
        return (REPLICAS, *left) if self.replicas > 1 else tuple(left)

    def fill(self, name: str, value: torch.Tensor) -> None:
        """Give a parameter its local value in use; masters take it exactly, the working copy rounds it."""
        chunk, slot = self._places[name]
        chunk.fill(slot, value)

    def value(self, name: str) -> torch.Tensor:
        """What this rank keeps of a parameter's master, as `Ledger.kept` lays it."""
        chunk, slot = self._places[name]
        return chunk.own(chunk.master, slot)

    def work(self, name: str) -> torch.Tensor:
        """What the model computes with."""
        chunk, slot = self._places[name]
        return chunk.view(chunk.work, slot)

    def gradient(self, name: str) -> torch.Tensor:
        """What this rank keeps of a parameter's reduced gradient."""
        chunk, slot = self._places[name]
        return chunk.gradient_of(slot)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, kept gradient) of every trained parameter, in the order of the chunks."""
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
        if not self._last and self.stage < 2:
            return
        while self._next < len(self._trained):
            self._reduce(self._trained[self._next])
        for flight in self._flying:
            flight.finish()
        self._flying.clear()
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)
        self._pending = 0 if self._last else self._pending

    def _spread(self) -> None:
        """Another backward after the last: what is reduced becomes each rank's equal share of the coming sum."""
        for chunk in self._trained:
            assert isinstance(chunk.group, tuple)
            if chunk.parts == 1:  # a part is summed apart from what the coming backward stores
                chunk.rescale(1.0 / self.world.mesh.size(chunk.group))

    def abandon(self) -> None:
        """A backward failed: forget what it left."""
        self._open = False
        self._flying.clear()
        self.forget()

    def rescale(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient."""
        for chunk in self._trained:
            chunk.rescale(factor)

    def attach(self) -> None:
        """Point every shard's `.grad` at its gradient, for the optimizer."""
        for chunk in self._trained:
            for slot in chunk.slots:
                self.shards[slot.name].grad = chunk.gradient_of(slot)

    def publish(self, frozen: bool = False) -> None:
        """Masters to working copies after an optimizer step; those of frozen parameters too after a load.

        Communicates: all_gather of every shared chunk, in its working dtype, over the ranks that share it.
        """
        for chunk in self.chunks if frozen else self._trained:
            chunk.publish()
            if chunk.parts > 1:
                self.world.gather_into(chunk.work, self.axis, f"chunk {chunk.index}")

    def forget(self) -> None:
        """zero_grad: the next backward stores instead of adding."""
        for chunk in self._trained:
            chunk.forget()
        self.stray, self._pending = None, 0

    def text(self) -> str:
        """For `describe`: what ranks share."""
        if self.parts == 1:
            return ""
        what = "masters and optimizer state" if self.stage == 1 else "gradients, masters and optimizer state"
        return f"zero_stage {self.stage}: {what} in {self.parts} parts over {self.axis}, {len(self._trained)} chunks"

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
                if (self._last or self.stage > 1) and chunk.complete and self._trained[self._next] is chunk:
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
        if chunk.parts > 1:
            self._reduce_into_part(chunk, axes)
        elif self.world.mesh.size(axes) > 1:
            if self._stream is None:
                flight = self.world.begin_all_reduce(chunk.whole_gradient(), axes, f"chunk {chunk.index}")
                if flight is not None:
                    self._flying.append(flight)
            else:
                self._stream.wait_stream(torch.accelerator.current_stream())
                with self._stream:
                    self.world.all_reduce(chunk.whole_gradient(), axes, f"chunk {chunk.index}")
        if self._last:
            chunk.phase = Phase.REDUCED
        self._next += 1

    def _reduce_into_part(self, chunk: Chunk, axes: tuple[str, ...]) -> None:
        whole, rest = chunk.whole_gradient(), self._rest(axes)
        with self._beside(whole):
            part = self.world.reduce_scatter(whole, self.axis, 0, f"chunk {chunk.index}")
            if self.world.mesh.size(rest) > 1:
                self.world.all_reduce(part, rest, f"chunk {chunk.index} part")
            chunk.take(part, keep=self.stage < 2)

    @contextmanager
    def _beside(self, buffer: torch.Tensor) -> Iterator[None]:
        """On the stream of reductions, where the device has streams; the buffer's memory waits for it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            buffer.record_stream(self._stream)
            yield

    def _item(self, entry: Entry, mesh: Mesh) -> Item:
        work = getattr(torch, entry.dtype)
        shape = entry.at_rest.local_shape(mesh)
        group = (*self._means(mesh), *entry.sum_over)
        master = self.dtypes(work)[1]
        largest = 0
        if any(cut.pieces for cut in entry.at_rest.cuts):  # tp may cut unevenly, and dp ranks agree on every place
            ranks = mesh.group(entry.at_rest.axes, mesh.rank or 0)
            largest = max(math.prod(entry.at_rest.local_shape(mesh, rank)) for rank in ranks)
        return Item(entry.name, shape, work, master, block_of(entry.name), group, entry.trained, largest)

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
