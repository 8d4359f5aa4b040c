"""World: this process among the others. Collectives by axis name, agreed errors, small exchanges through the store."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lindos.comm import record
from lindos.comm.groups import Group
from lindos.comm.mailbox import Box, Gone, Mailboxes, Mismatch, others_memory, own_memory
from lindos.comm.opaque import opaque
from lindos.comm.verdict import Step, Watch
from lindos.core.errors import InputError, LindosError, RankError
from lindos.core.mesh import Axes, Mesh

TRANSPORTS = ("memory", "gloo", "nccl", "threads", "fake")


@dataclass
class Link:
    """What a process has once: its rank, the store, its mailboxes and process groups, the watch."""

    rank: int
    size: int
    store: Any
    transport: str
    device: torch.device
    limit_seconds: float
    seed: int = 0
    watch: Watch = field(init=False)
    groups: dict[tuple[int, ...], Any] = field(default_factory=dict)
    numbers: dict[tuple[int, ...], int] = field(default_factory=dict)
    rounds: int = 0
    shared: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watch = Watch(self.store, self.rank, self.size, self.limit_seconds)


@dataclass
class Flight:
    """An all_reduce that was begun: numbered, posted, not yet complete."""

    world: World
    group: Mailboxes
    ranks: tuple[int, ...]
    sign: int
    step: Step

    def poll(self) -> None:
        """Go on as far as needs no waiting."""
        self.world._guarded(self.group.poll, self.step, self.ranks)

    def finish(self) -> None:
        """Wait until it, and what was begun before it on this group, is complete."""
        watch = self.world.link.watch
        watch.resume(self.step)
        self.world._guarded(self.group.drain, self.step, self.ranks)
        watch.leave()


class World:
    """A link seen through a mesh. Many worlds may share one link: two models in one process do not meet.

    Attributes:
        mesh: the axes, with this process's rank.
        device: where tensors of this rank live.
        seed: the launch seed.
    """

    def __init__(self, link: Link, mesh: Mesh) -> None:
        self.link, self.mesh = link, mesh.at(link.rank)
        self.rank, self.size, self.device, self.seed = link.rank, link.size, link.device, link.seed
        self._axes: dict[Axes, tuple[tuple[str, ...], tuple[int, ...], Any]] = {}
        self._signatures: dict[tuple, int] = {}

    def on(self, mesh: Mesh) -> World:
        """This process on another mesh of the same size."""
        return World(self.link, mesh)

    # --- collectives: every one is named, counted, timed and recorded ---------------------------------------------

    @opaque
    def all_reduce(self, x: torch.Tensor, axes: Axes, name: str, op: str = "sum", fresh: bool = False) -> torch.Tensor:
        """Sum (or "max") of x over axes, in place where x is contiguous; bit-equal on all ranks of the group.

        Args:
            fresh: leave x as it is and return a new tensor.

        Communicates: all_reduce of x over axes, 2 (n-1)/n of its elements a rank.
        """
        if op not in ("sum", "max"):
            raise InputError(f"all_reduce {name!r} knows 'sum' and 'max'; got op={op!r}.")
        x = x.contiguous()
        if fresh and self.mesh.size(axes) == 1:
            return x.clone()
        out = torch.empty_like(x) if fresh else x
        self._call(
            "all_reduce", x, axes, name, x.numel(), lambda group, s: group.all_reduce(out, x, s, op), op * (op != "sum")
        )
        return out

    @opaque
    def all_gather(self, x: torch.Tensor, axes: Axes, dim: int, name: str) -> torch.Tensor:
        """The parts of all ranks of the group joined along dim, contiguous.

        Communicates: all_gather over axes, (n-1)/n of the joined elements a rank.
        """
        n = self.mesh.size(axes)
        x = x.contiguous()
        if n == 1:
            return x
        dim = dim % x.dim()
        rows = x.new_empty((n, x.numel()))
        self._call("all_gather", x, axes, name, n * x.numel(), lambda g, s: g.all_gather(rows, x.view(-1), s), dim)
        parts = rows.view(n, *x.shape)
        return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)

    def gather_into(self, whole: torch.Tensor, axes: Axes, name: str) -> None:
        """Fill a flat, contiguous tensor, in which this rank's even part lies in its place, with those of the group.

        Communicates: all_gather over axes, (n-1)/n of the elements a rank.
        """
        rows = whole.view(self.mesh.size(axes), -1)
        mine = rows[self.mesh.coordinate(axes)]
        self._call("all_gather", mine, axes, name, whole.numel(), lambda g, s: g.all_gather(rows, mine, s), 0)

    @opaque
    def reduce_scatter(self, x: torch.Tensor, axes: Axes, dim: int, name: str) -> torch.Tensor:
        """This rank's even part along dim of the sum of x over the group, contiguous.

        Communicates: reduce_scatter over axes, (n-1)/n of x's elements a rank.
        """
        n = self.mesh.size(axes)
        if n == 1:
            return x.contiguous()
        dim = dim % x.dim()
        if x.shape[dim] % n:
            raise InputError(f"reduce_scatter {name!r} over {axes}: dim {dim} of {list(x.shape)} must divide by {n}.")
        parts = x.unflatten(dim, (n, -1)).movedim(dim, 0).contiguous()  # along dim 0 this is x itself
        out = torch.empty_like(parts[0])
        rows = parts.view(n, out.numel())
        self._call(
            "reduce_scatter", x, axes, name, x.numel(), lambda g, s: g.reduce_scatter(out.view(-1), rows, s), dim
        )
        return out

    @opaque
    def all_to_all(self, x: torch.Tensor, axes: Axes, name: str) -> torch.Tensor:
        """Row i of the result is what rank i of the group had in its row for this one, contiguous; x [n, ...].

        Communicates: all_to_all over axes, (n-1)/n of x's elements a rank.
        """
        n = self.mesh.size(axes)
        if x.dim() == 0 or x.shape[0] != n:
            raise InputError(f"all_to_all {name!r} over {axes} takes a row for each of {n} ranks; got {list(x.shape)}.")
        x = x.contiguous()
        if n == 1:
            return x
        rows = x.view(n, x.numel() // n)
        out = torch.empty_like(rows)
        self._call("all_to_all", x, axes, name, x.numel(), lambda g, sign: g.all_to_all(out, rows, sign))
        return out.view(x.shape)

    @opaque
    def broadcast(self, x: torch.Tensor, axes: Axes, source: int, name: str) -> torch.Tensor:
        """x of the rank at index `source` of the group, in place where x is contiguous.

        Communicates: broadcast over axes, all elements of x a rank.
        """
        x = x.contiguous()
        self._call("broadcast", x, axes, name, x.numel(), lambda group, s: group.broadcast(x, source, s), source)
        return x

    def prepare(self, groups: Iterable[Axes]) -> None:
        """Make groups that later calls need, on all ranks in this order: process groups are made by all at once."""
        for axes in groups:
            self._group(axes)

    @property
    def all(self) -> tuple[str, ...]:
        """The axes that make up the whole world."""
        return tuple(axis.name for axis in self.mesh.base)

    def _call(
        self, op: str, x: torch.Tensor, axes: Axes, name: str, elements: int, run: Any, detail: str | int = ""
    ) -> None:
        announced = self._announce(op, x, axes, name, elements, detail)
        if announced is None:
            return
        group, ranks, sign, step = announced

        def finish() -> None:
            if isinstance(group, Mailboxes):
                group.drain()
            run(group, sign)

        self.link.watch.enter(step)
        self._guarded(finish, step, ranks)
        self.link.watch.leave()

    def _announce(
        self, op: str, x: torch.Tensor, axes: Axes, name: str, elements: int, detail: str | int = ""
    ) -> tuple[Any, tuple[int, ...], int, Step] | None:
        """Number, sign and record a call; None where the group is this rank alone."""
        names, ranks, group = self._group(axes)
        if len(ranks) == 1:
            return None
        link = self.link
        number = link.numbers[ranks] = link.numbers.get(ranks, 0) + 1
        key = (op, names, name, x.shape, x.dtype, detail)
        sign = self._signatures.get(key)
        if sign is None:
            sign = self._signatures[key] = zlib.crc32(repr(key).encode())
        if record.recording():
            record.note(record.Call(op, names, name, elements, x.dtype, len(ranks)))
        return group, ranks, sign + (number << 32), Step(number, op, names, name, tuple(x.shape), x.dtype, detail)

    def _guarded(self, action: Any, step: Step, ranks: tuple[int, ...]) -> None:
        """Run a part of a collective; what goes wrong in it becomes a verdict."""
        watch = self.link.watch
        try:
            action()
        except Mismatch as error:
            watch.fail(f"{step.text()}: rank {ranks[error.index]} makes a different call")
        except Gone as error:
            watch.fail(f"{step.text()} cannot complete", f"Rank {ranks[error.index]} is dead: its process has ended.")
        except LindosError:
            raise
        except RuntimeError as error:
            watch.fail(f"{step.text()} failed: {error}")

    def begin_all_reduce(self, x: torch.Tensor, axes: Axes, name: str) -> Flight | None:
        """Sum of contiguous x over axes, in place, while this rank computes on; x is whole after `finish()`.

        Through shared memory it advances at every `poll()` that finds the other ranks ready, so that a rank that is
        late for a moment holds up nobody; elsewhere it is done, or ordered on the stream, when this returns.

        Communicates: as all_reduce.
        """
        if not isinstance(self._group(axes)[2], Mailboxes):
            self.all_reduce(x, axes, name)
            return None
        announced = self._announce("all_reduce", x, axes, name, x.numel())
        assert announced is not None
        flight = Flight(self, *announced)
        self.link.watch.note(flight.step)
        self._guarded(lambda: flight.group.begin(x, flight.sign), flight.step, flight.ranks)
        return flight

    def _group(self, axes: Axes) -> tuple[tuple[str, ...], tuple[int, ...], Any]:
        found = self._axes.get(axes)
        if found is None:
            names = (axes,) if isinstance(axes, str) else tuple(axes)
            ranks = self.mesh.group(names)
            found = self._axes[axes] = (names, ranks, self._made(names, ranks))
        return found

    def _made(self, names: tuple[str, ...], ranks: tuple[int, ...]) -> Any:
        """The group's transport; process groups of torch are made by all ranks in the same order, so all at once."""
        groups = self.link.groups
        if len(ranks) == 1:
            return None
        if self.link.transport in ("gloo", "nccl"):
            for other in self.mesh.groups(names):
                if other not in groups:
                    # torch would sort the ranks of a product whose minor axis comes first
                    made = dist.new_group(other, **({} if list(other) == sorted(other) else {"sort_ranks": False}))
                    if self.rank in other:
                        groups[other] = Group(made, other, other.index(self.rank), self.link.watch.check)
                    else:
                        groups[other] = None
        elif ranks not in groups:
            groups[ranks] = _MADE[self.link.transport](self.link, ranks)
        return groups[ranks]

    # --- small exchanges through the store --------------------------------------------------------------------------

    def exchange(self, value: Any, name: str) -> list[Any]:
        """A small JSON value of every rank, in rank order, through the store.

        Raises:
            RankError: a rank did not arrive within the limit.
        """
        if self.size == 1 or self.link.transport == "fake":
            return [value] * (self.size if self.link.transport == "fake" else 1)
        link, watch = self.link, self.link.watch
        link.rounds += 1
        head = f"exchange/{link.rounds}"
        watch.enter(Step(link.rounds, "exchange", ("world",), name, (), "json"))
        link.store.set(f"{head}/{self.rank}", json.dumps([name, value]))
        keys = [f"{head}/{rank}" for rank in range(self.size)]
        started, pause = time.monotonic(), 0.0002
        while not link.store.check(keys):
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            watch.check(started)
        values = [json.loads(link.store.get(key)) for key in keys]
        watch.leave()
        if link.rounds > 1:  # whoever has seen this round knows that all have read the last one
            link.store.delete_key(f"exchange/{link.rounds - 1}/{self.rank}")
        other = next((rank for rank, (theirs, _) in enumerate(values) if theirs != name), None)
        if other is not None:
            watch.fail(f"exchange {name!r}: rank {other} makes a different call, {values[other][0]!r}")
        return [value for _, value in values]

    def agree(self, error: BaseException | None, name: str) -> None:
        """One exchange of verdicts: if any rank brings an error, all raise it, before anything else is begun.

        Raises:
            LindosError: the error of the lowest rank that has one; ranks without one name that rank.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        mine = None if error is None else [type(error).__name__, str(error)]
        verdicts = self.exchange(mine, name)
        failed = [rank for rank, verdict in enumerate(verdicts) if verdict is not None]
        if not failed:
            return
        if error is not None:
            raise error
        kind, text = verdicts[failed[0]]
        classes = {c.__name__: c for c in _subclasses(LindosError)}
        ranks = ", ".join(map(str, failed))
        raise classes.get(kind, RankError)(
            f"[rank {ranks}] {text}" if kind in classes else f"[rank {ranks}] {kind}: {text}"
        )

    def barrier(self, name: str) -> None:
        """All ranks arrive before any goes on."""
        self.exchange(None, name)

    def title(self) -> str:
        """`[rank 5 | pp 1 dp 0 tp 1]`, the head of a message that only this rank prints."""
        places = " ".join(f"{axis.name} {self.mesh.coordinate(axis.name)}" for axis in self.mesh.base)
        return f"[rank {self.rank} | {places}]"

    def close(self) -> None:
        """End the watch; collectives after this are not answered for."""
        self.link.watch.close()


def _subclasses(kind: type) -> list[type]:
    return [kind, *(below for child in kind.__subclasses__() for below in _subclasses(child))]


def _memory(link: Link, ranks: tuple[int, ...]) -> Mailboxes:
    """Mailboxes of a group over shared memory: each rank publishes where its memory can be opened."""
    head = "boxes/" + "-".join(map(str, ranks))
    number, memory = own_memory(f"lindos-{link.rank}")
    link.shared[ranks] = (number, memory)
    link.store.set(f"{head}/{link.rank}", json.dumps([os.getpid(), number]))
    boxes = []
    for rank in ranks:
        key, started = f"{head}/{rank}", time.monotonic()
        while not link.store.check([key]):
            time.sleep(0.001)
            link.watch.check(started)
        pid, theirs = json.loads(link.store.get(key))
        boxes.append(Box(memory if rank == link.rank else others_memory(pid, theirs), pid))
    patient = len(os.sched_getaffinity(0)) >= link.size
    return Mailboxes(boxes, ranks.index(link.rank), link.watch.check, patient)


def _threads(link: Link, ranks: tuple[int, ...]) -> Mailboxes:
    """Mailboxes of a group of threads of one process."""
    from lindos.comm.mailbox import HEAD_BYTES, SLOT_BYTES

    with link.shared["lock"]:
        memory = link.shared.setdefault(ranks, [bytearray(HEAD_BYTES + 2 * SLOT_BYTES) for _ in ranks])
    boxes = [Box(piece) for piece in memory]
    return Mailboxes(boxes, ranks.index(link.rank), link.watch.check, patient=False)


class Fake:
    """A group of which only this rank exists: sizes are right, values are this rank's own."""

    def __init__(self, link: Link, ranks: tuple[int, ...]) -> None:
        self.size = len(ranks)

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor, signature: int, op: str) -> None:
        if out is not x:
            out.copy_(x)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, signature: int) -> None:
        out.copy_(x.clone().expand_as(out))  # x may be one of its rows

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, signature: int) -> None:
        out.copy_(x[0])

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, signature: int) -> None:
        out.copy_(x)

    def broadcast(self, x: torch.Tensor, source: int, signature: int) -> None:
        """Keeps x."""


_MADE = {"memory": _memory, "threads": _threads, "fake": Fake}


def shared_memory_serves(hosts: list[str]) -> bool:
    """Whether mailboxes can connect these ranks: one host, x86 store order, memfd and /proc."""
    one = len(set(hosts)) == 1
    return (
        one
        and platform.machine() in ("x86_64", "AMD64")
        and hasattr(os, "memfd_create")
        and os.path.isdir("/proc/self/fd")
    )


def host_name() -> str:
    return f"{socket.gethostname()}/{os.stat('/proc/self/ns/pid').st_ino if os.path.exists('/proc/self/ns/pid') else 0}"
