"""Jobs that ranks of the pool run; they travel by name, so they stand in a module of their own."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import torch

from lindos.comm.record import record
from lindos.comm.world import World
from lindos.core.errors import LayoutError, LindosError, RankError
from lindos.core.mesh import Mesh

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def drawn(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that every rank can make for every rank."""
    if math.prod(shape) > 10_000:  # cheap, since every rank makes those of all
        return ((torch.arange(math.prod(shape)) * 7919 + 104_729 * rank) % 1009).sub_(504).to(dtype).view(shape)
    source = torch.Generator().manual_seed(1000 + rank)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, shape, generator=source)
    return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)


def near(x: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """x is the sum of parts, up to the rounding of its dtype in any order of summing."""
    wide = torch.float64 if x.is_floating_point() else x.dtype
    exact = torch.stack([part.to(wide) for part in parts]).sum(0)
    if x.is_floating_point():
        room = len(parts) * torch.finfo(x.dtype).eps * torch.stack([p.to(wide).abs() for p in parts]).sum(0)
        assert ((x.to(wide) - exact).abs() <= room).all()
    else:
        assert torch.equal(x, exact)
    assert x.is_contiguous()


def same(x: torch.Tensor, expected: torch.Tensor) -> None:
    assert x.dtype == expected.dtype
    assert x.is_contiguous()
    assert torch.equal(x, expected)


def reductions(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """all_reduce in its ways; returns the bytes of its sum, which must be the same on every rank."""
    n = world.size
    parts = [drawn(rank, shape, dtype) for rank in range(n)]
    mine = parts[world.rank].clone()
    total = world.all_reduce(mine, "dp", "fresh", fresh=True)
    assert total is not mine
    same(mine, parts[world.rank])
    near(total, parts)
    placed = world.all_reduce(mine, "dp", "in place")
    assert placed is mine
    same(mine, total)
    greatest = world.all_reduce(parts[world.rank].clone(), "dp", "greatest", op="max")
    same(greatest, torch.stack(parts).amax(0) if total.numel() else total)
    if len(shape) > 1:
        turned = parts[world.rank].clone().transpose(0, -1)
        near(world.all_reduce(turned, "dp", "turned"), [part.transpose(0, -1) for part in parts])
        same(turned.transpose(0, -1), parts[world.rank])
    return total.view(-1).view(torch.uint8).numpy().tobytes()


def moves(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """all_gather (in place too), reduce_scatter, all_to_all and broadcast along every dim, from any strides."""
    n, rank = world.size, world.rank
    for dim in range(-1, len(shape)):
        parts = [drawn(r, shape, dtype) for r in range(n)]
        same(world.all_gather(parts[rank], "dp", dim, "gather"), torch.cat(parts, dim))
        same(world.all_gather(parts[rank].mT, "dp", dim, "turned"), torch.cat([part.mT for part in parts], dim))
        wide = list(shape)
        wide[dim] *= n
        wholes = [drawn(r, tuple(wide), dtype) for r in range(n)]
        near(world.reduce_scatter(wholes[rank], "dp", dim, "scatter"), [w.chunk(n, dim)[rank] for w in wholes])
        same(wholes[rank], drawn(rank, tuple(wide), dtype))
        turned = [w.mT.contiguous().mT for w in wholes]
        near(world.reduce_scatter(turned[rank], "dp", dim, "turned"), [w.chunk(n, dim)[rank] for w in wholes])
    parts = [drawn(r, shape, dtype).reshape(-1) for r in range(n)]
    whole = torch.cat([part if r == rank else torch.zeros_like(part) for r, part in enumerate(parts)])
    world.gather_into(whole, "dp", "in place")
    same(whole, torch.cat(parts))
    rows = [drawn(r, (n, *shape), dtype) for r in range(n)]
    same(world.all_to_all(rows[rank], "dp", "exchange"), torch.stack([rows[r][rank] for r in range(n)]))
    turned_rows = rows[rank].mT.contiguous().mT
    same(world.all_to_all(turned_rows, "dp", "turned"), torch.stack([rows[r][rank] for r in range(n)]))
    for source in range(n):
        x = drawn(rank, shape, dtype)
        assert world.broadcast(x, "dp", source, "spread") is x
        same(x, drawn(source, shape, dtype))
        turned = drawn(rank, shape, dtype).mT
        same(world.broadcast(turned, "dp", source, "turned"), drawn(source, shape, dtype).mT.contiguous())


def collectives(world: World) -> list[bytes]:
    """Everything at small sizes in every dtype; returns the sums' bytes."""
    sums = []
    for dtype in DTYPES:
        for shape in [(5, 3), (2, 3, 4), (0, 3), (2, 1, 3, 2), (81, 64)][:: 1 if dtype == torch.float32 else 2]:
            sums.append(reductions(world, shape, dtype))
            moves(world, shape, dtype)
        sums += [reductions(world, (7,), dtype), reductions(world, (), dtype)]
    return sums


def large(world: World) -> list[bytes]:
    """Tensors of more than a mailbox's slot, with sizes that end in the middle of a piece."""
    sums = []
    for dtype, count in ((torch.float64, 200_003), (torch.bfloat16, 600_011)):
        sums.append(reductions(world, (count,), dtype))
    moves(world, (149, 997), torch.float64)
    return sums


def groups(world: World, mesh: Mesh, products: list[Any]) -> None:
    """Over any axes a gather gives the ranks of the group in its order, and a sum their sum."""
    world = world.on(mesh)
    for axes in products:
        expected = mesh.group(axes, world.rank)
        mine = torch.tensor([world.rank])
        gathered = world.all_gather(mine, axes, 0, f"gather {axes}")
        assert gathered.tolist() == list(expected), (axes, world.rank)
        assert world.all_reduce(mine, axes, f"sum {axes}", fresh=True).item() == sum(expected)
        first = world.broadcast(mine.clone(), axes, len(expected) - 1, f"spread {axes}")
        assert first.item() == expected[-1]


def recorded(world: World) -> list[tuple[str, float]]:
    """Bytes of one call of each kind, of 1,200 elements of 4 bytes."""
    x = torch.ones(1200, dtype=torch.int32)
    with record() as seen:
        world.all_reduce(x, "dp", "a")
        world.all_gather(x[: 1200 // world.size], "dp", 0, "b")
        world.reduce_scatter(x, "dp", 0, "c")
        world.all_to_all(x.view(world.size, -1), "dp", "d")
        world.broadcast(x, "dp", 0, "e")
    world.all_reduce(x, "dp", "after the record")
    assert [call.name for call in seen.calls] == ["a", "b", "c", "d", "e"]
    assert {(call.axes, call.ranks) for call in seen.calls} == {(("dp",), world.size)}
    assert seen.received_bytes() == seen.received_bytes("dp") == sum(call.received_bytes for call in seen.calls)
    assert seen.received_bytes("tp") == 0
    assert seen.received_bytes(op="broadcast") == 4800
    return [(call.op, call.received_bytes) for call in seen.calls]


def recorded_by_one(world: World) -> int:
    """Only rank 0 records; what the others call is none of its business."""
    x = torch.ones(4)
    if world.rank == 0:
        with record() as seen:
            for i in range(5):
                world.all_reduce(x, "dp", f"sum {i}")
        return len(seen.calls)
    for i in range(5):
        world.all_reduce(x, "dp", f"sum {i}")
    return 0


def agreement(world: World) -> list[str]:
    """Errors that one or two ranks bring are raised by all, with their class, and nothing is broken by it."""
    told = []
    world.agree(None, "no error")
    for bringers, error in [
        ((1,), LayoutError("9 heads")),
        ((1, 2), LayoutError("9 heads")),
        ((2,), ValueError("odd")),
        (range(world.size), RankError("all")),
    ]:
        try:
            world.agree(error if world.rank in bringers else None, "plan")
            told.append("nothing")
        except Exception as raised:
            own = " (its own)" * (raised is error)
            told.append(f"{type(raised).__name__}: {raised}{own}")
    assert world.all_reduce(torch.tensor(1), "dp", "afterwards").item() == world.size
    return told


def exchanged(world: World) -> list[Any]:
    values = world.exchange({"rank": world.rank, "text": "\u00fc" * 3}, "first")
    world.barrier("second")
    for i in range(20):
        assert world.exchange([i, world.rank], "loop") == [[i, rank] for rank in range(world.size)]
    left = sum(world.link.store.check([f"exchange/{i}/{world.rank}"]) for i in range(1, 23))
    assert left == 1, "exchanges of the past stay in the store"
    return values


def another_exchange(world: World) -> str:
    try:
        world.exchange(1, "theirs" if world.rank == 1 else "ours")
    except RankError as error:
        return str(error)
    return "nothing"


def misbehaves(world: World, how: str, seconds: float) -> tuple[str, float]:
    """Rank 1 does something wrong after a first collective; what each rank is told, and after how long."""
    x = torch.ones(6)
    world.all_reduce(x, "dp", "first")
    started = time.monotonic()
    try:
        if world.rank == 1:
            if how == "returns":
                return "returned", 0.0
            if how == "raises":
                raise ValueError("a broken thing")
            if how == "dies":
                os._exit(9)
            if how == "sleeps":
                time.sleep(seconds)
            if how == "shape":
                x = torch.ones(7)
            if how == "operation":
                world.all_reduce(x, "dp", "second", op="max")
        if not (world.rank == 1 and how in ("skips", "operation")):
            world.all_reduce(x, "dp", "second")
        world.all_gather(x, "dp", 0, "third")
    except LindosError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "nothing", time.monotonic() - started


def rank_of(world: World) -> int:
    return int(world.all_reduce(torch.tensor(world.rank), "dp", "ranks").item())


def refuses(world: World, kind: str) -> str:
    x = torch.ones(5, 4)
    try:
        if kind == "reduce_scatter":
            world.reduce_scatter(x, "dp", 0, "uneven")
        else:
            world.all_to_all(x, "dp", "uneven")
    except LindosError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fails(world: World, kind: str) -> Any:
    if kind == "layout" and world.rank == 1:
        raise LayoutError("cannot cut")
    if kind == "value" and world.rank == 1:
        raise ValueError("cannot count")
    if kind == "travel":
        return lambda: 0
    return world.rank


def echo(world: World, value: Any) -> Any:
    return value
