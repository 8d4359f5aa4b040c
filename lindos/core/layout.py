"""Layout: which part of a tensor each rank holds. An ordered list of cuts, each acting on what the cut before left.

    Layout((131, 64), (Cut("tp", 0, 4),))                vocabulary of 131 in four even parts of 33, one line of padding
    Layout((96, 64), (Cut("tp", 0, 2, fused((32, 32, 32), 2)),)) three fused blocks of 32, each cut in two
    Layout((16, 64), (Cut("tp", 0, 4, shared(2, 8, 4)),)) two kv heads of 8 held by four ranks, two neighbours each
    Layout((96, 64), (Cut("tp", 0, 2), Cut("dp", "flat", 4)))    what ZeRO does to a tensor-parallel weight

`boxes` gives the same thing as index ranges: all that checkpoints, initialisation and norms need. The first holder of
an element, in rank order along the cut, owns it; of several replicas the one at coordinate 0 does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from lindos.core.errors import LayoutError
from lindos.core.mesh import Axes, Axis, Mesh

Span = tuple[int, int]
Pieces = tuple[tuple[Span, ...], ...]


@dataclass(frozen=True)
class Cut:
    """One cut along one dim by one axis (or an ordered product of axes).

    Attributes:
        axis: axis name, or several, major first.
        dim: dim of the tensor that the cut before left, or "flat" for its row-major elements.
        parts: size of the axis.
        pieces: for each coordinate the intervals that it holds, in order; None is the even cut into
            ceil(n / parts) each, the last ones running past the end as padding.
    """

    axis: Axes
    dim: int | Literal["flat"]
    parts: int
    pieces: Pieces | None = None

    def held(self, size: int, coordinate: int) -> tuple[Span, ...]:
        """Intervals of a dim of `size` that `coordinate` holds, possibly past its end."""
        if self.pieces is not None:
            return self.pieces[coordinate]
        step = -(-size // self.parts)
        return ((coordinate * step, coordinate * step + step),)


@dataclass(frozen=True)
class Box:
    """A rectangle of the full tensor and the rectangle of the local one that holds it, start and stop per dim."""

    full: tuple[Span, ...]
    local: tuple[Span, ...]
    owned: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.full)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class _Run:
    """A stretch of one local dim: where it lies in the full tensor's dim and who owns it."""

    full: int
    local: int
    length: int
    owned: bool


@dataclass(frozen=True)
class Layout:
    """The full shape and the cuts. Without cuts every rank holds the whole tensor."""

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()

    def __post_init__(self) -> None:
        flat, seen, whole = False, set(), set(range(len(self.shape)))
        for cut in self.cuts:
            if cut.dim == "flat":
                flat = True
            elif flat or not 0 <= cut.dim < len(self.shape):
                raise LayoutError(f"cut of dim {cut.dim} does not fit shape {self.shape}{' after a flat cut' * flat}.")
            for name in (cut.axis,) if isinstance(cut.axis, str) else cut.axis:
                if name in seen:
                    raise LayoutError(f"axis {name!r} cuts a tensor of shape {self.shape} twice; it may once.")
                seen.add(name)
            if cut.pieces is not None and len(cut.pieces) != cut.parts:
                raise LayoutError(f"a cut in {cut.parts} parts needs as many pieces; got {len(cut.pieces)}.")
            if cut.pieces is not None and cut.dim != "flat" and cut.dim in whole:
                _check_cover(cut.pieces, self.shape[cut.dim], cut.dim)
            whole.discard(cut.dim)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes that cut this tensor."""
        return tuple(n for c in self.cuts for n in ((c.axis,) if isinstance(c.axis, str) else c.axis))

    def then(self, cut: Cut) -> Layout:
        """This layout with one more cut."""
        return Layout(self.shape, (*self.cuts, cut))

    def local_shape(self, mesh: Mesh, rank: int | None = None) -> tuple[int, ...]:
        """Shape of what a rank stores, padding included; one dim after a flat cut."""
        shape = list(self.shape)
        for cut, coordinate in zip(self.cuts, self._coordinates(mesh, rank)):
            if cut.dim == "flat":
                size = math.prod(shape)
                shape = [sum(b - a for a, b in cut.held(size, coordinate))]
            else:
                shape[cut.dim] = sum(b - a for a, b in cut.held(shape[cut.dim], coordinate))
        return tuple(shape)

    def boxes(self, mesh: Mesh, rank: int | None = None) -> list[Box]:
        """What a rank holds, as rectangles of the full tensor; padding is in none.

        `owned` is set for exactly one holder of each element over all ranks of the mesh.
        """
        rank = mesh._rank(rank)
        return list(_boxes(self, self._coordinates(mesh, rank), not _replica(mesh, rank, self.axes)))

    def owned_boxes(self, mesh: Mesh, rank: int | None = None) -> list[Box]:
        """The boxes that this rank owns: over all ranks they tile the tensor exactly once."""
        return [box for box in self.boxes(mesh, rank) if box.owned]

    def holders(self, mesh: Mesh, rank: int | None = None) -> tuple[int, ...]:
        """Ranks that hold the same elements as `rank`."""
        rank = mesh._rank(rank)
        mine = [box.full for box in self.boxes(mesh, rank)]
        return tuple(r for r in range(mesh.world_size) if [box.full for box in self.boxes(mesh, r)] == mine)

    def _coordinates(self, mesh: Mesh, rank: int | None) -> tuple[int, ...]:
        """The rank's coordinate on each cut, on a mesh that these cuts were made for."""
        _check_mesh(self, mesh.axes)
        return tuple(mesh.coordinate(cut.axis, rank) for cut in self.cuts)

    def text(self, name: str = "W", dims: tuple[str, ...] = ()) -> str:
        """`W[131/tp, 64]`; uneven pieces as `{5,4}`, a flat cut as `@dp`."""
        sizes = [dims[i] if i < len(dims) else str(size) for i, size in enumerate(self.shape)]
        tail = ""
        for cut in self.cuts:
            axis = cut.axis if isinstance(cut.axis, str) else "(" + ",".join(cut.axis) + ")"
            counts = [sum(b - a for a, b in piece) for piece in cut.pieces or ()]
            uneven = "{" + ",".join(map(str, counts)) + "}" if len(set(counts)) > 1 else ""
            if cut.dim == "flat":
                tail += f"@{axis}{uneven}"
            else:
                sizes[cut.dim] += f"/{axis}{uneven}"
        return f"{name}[{', '.join(sizes)}]{tail}"


def fused(blocks: tuple[int, ...], parts: int) -> Pieces | None:
    """Pieces of a dim made of consecutive blocks, each cut evenly: coordinate c holds part c of every block.

    Raises:
        LayoutError: a block does not divide; padding inside a fused dim would move the blocks that follow.
    """
    if len(blocks) == 1 and blocks[0] % parts == 0:
        return None
    for block in blocks:
        if block % parts:
            raise LayoutError(f"a fused block of {block} must divide by {parts}. Use a size that divides it.")
    starts = [sum(blocks[:i]) for i in range(len(blocks))]
    return tuple(
        tuple(
            (start + c * (block // parts), start + (c + 1) * (block // parts)) for start, block in zip(starts, blocks)
        )
        for c in range(parts)
    )


def by_units(counts: tuple[int, ...], unit: int) -> Pieces:
    """Consecutive pieces of `counts[c]` units of `unit` elements each: an uneven cut on unit borders."""
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(((start * unit, (start + count) * unit),) for start, count in zip(starts, counts))


def shared(heads: int, unit: int, parts: int) -> Pieces:
    """Pieces of `heads` units held by more parts than there are heads: parts/heads neighbours hold one head.

    Raises:
        LayoutError: parts is no multiple of heads.
    """
    if parts % heads:
        raise LayoutError(f"{heads} heads can be shared by a multiple of {heads} ranks; got {parts}.")
    each = parts // heads
    return tuple(((c // each * unit, c // each * unit + unit),) for c in range(parts))


def _check_cover(pieces: Pieces, size: int, dim: int) -> None:
    reached = 0
    for start, stop in sorted(span for piece in pieces for span in piece):
        if start > reached:
            break
        reached = max(reached, stop)
    if reached < size:
        raise LayoutError(f"pieces must cover dim {dim} of size {size}; no rank holds element {reached}.")


@lru_cache(maxsize=4096)
def _check_mesh(layout: Layout, axes: tuple[Axis, ...]) -> None:
    mesh = Mesh(axes)
    for cut in layout.cuts:
        if mesh.size(cut.axis) != cut.parts:
            raise LayoutError(
                f"a cut in {cut.parts} parts over {cut.axis!r} does not fit its size {mesh.size(cut.axis)}."
            )
    mesh._check_disjoint([mesh.axis(name) for name in layout.axes])


def _replica(mesh: Mesh, rank: int, cut_axes: tuple[str, ...]) -> bool:
    """Whether a rank is not the first among those that differ only in axes that do not cut the tensor."""
    rest = rank
    for name in cut_axes:
        axis = mesh.axis(name)
        rest -= rank // axis.stride % axis.size * axis.stride
    return rest != 0


@lru_cache(maxsize=65536)
def _boxes(layout: Layout, coordinates: tuple[int, ...], owner: bool) -> list[Box]:
    runs: list[list[_Run]] = [[_Run(0, 0, size, True)] * (size > 0) for size in layout.shape]
    shape = list(layout.shape)
    flat: list[Box] | None = None
    for cut, coordinate in zip(layout.cuts, coordinates):
        if cut.dim != "flat":
            runs[cut.dim], shape[cut.dim] = _cut_runs(runs[cut.dim], shape[cut.dim], cut, coordinate)
        else:
            size = math.prod(shape)
            if flat is None:
                flat = list(_cut_flat(list(_product(runs, owner)), tuple(shape), size, cut, coordinate))
            else:
                flat = list(_cut_again(flat, size, cut, coordinate))
            shape = [sum(b - a for a, b in cut.held(size, coordinate))]
    return flat if flat is not None else list(_product(runs, owner))


def _cut_runs(runs: list[_Run], size: int, cut: Cut, coordinate: int) -> tuple[list[_Run], int]:
    made, offset = [], 0
    for start, stop, owned in _owned_spans(cut, size, coordinate):
        for run in runs:
            low, high = max(start, run.local), min(stop, run.local + run.length)
            if low < high:
                made.append(_Run(run.full + low - run.local, offset + low - start, high - low, run.owned and owned))
        offset += stop - start
    return made, offset


def _owned_spans(cut: Cut, size: int, coordinate: int) -> Iterator[tuple[int, int, bool]]:
    """The intervals of a coordinate, split where an earlier holder's end: (start, stop, owned)."""
    if cut.pieces is None:
        yield (*cut.held(size, coordinate)[0], True)
        return
    earlier = [span for c in range(coordinate) for span in cut.pieces[c]]
    for start, stop in cut.pieces[coordinate]:
        inner = {x for span in earlier for x in span if start < x < stop}
        borders = sorted({start, stop, *inner})
        for low, high in itertools.pairwise(borders):
            yield low, high, not any(a <= low and high <= b for a, b in earlier)


def _product(runs: list[list[_Run]], owner: bool) -> Iterator[Box]:
    for combination in itertools.product(*runs):
        full = tuple((r.full, r.full + r.length) for r in combination)
        local = tuple((r.local, r.local + r.length) for r in combination)
        yield Box(full, local, owner and all(r.owned for r in combination))


def _cut_flat(boxes: list[Box], shape: tuple[int, ...], size: int, cut: Cut, coordinate: int) -> Iterator[Box]:
    """Boxes of a range of row-major elements; each resulting box is one contiguous run of the local shard."""
    offset = 0
    for start, stop, owned in _owned_spans(cut, size, coordinate):
        for rectangle, position in _rectangles(start, min(stop, size), shape):
            for box in boxes:
                yield from _intersect(box, rectangle, shape, offset + position - start, owned)
        offset += stop - start


def _cut_again(boxes: list[Box], size: int, cut: Cut, coordinate: int) -> Iterator[Box]:
    """Boxes of a range of a shard that is flat already: each is one run of it, so a part of a run is rectangles."""
    offset = 0
    for start, stop, owned in _owned_spans(cut, size, coordinate):
        for box in boxes:
            ((first, last),) = box.local
            low, high = max(start, first), min(stop, last)
            for rectangle, position in _rectangles(low - first, high - first, box.shape):
                full = tuple((a + lo, b + lo) for (a, b), (lo, _) in zip(rectangle, box.full))
                at = offset + first + position - start
                yield Box(full, ((at, at + math.prod(b - a for a, b in full)),), box.owned and owned)
        offset += stop - start


def _rectangles(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[Span, ...], int]]:
    """Row-major range [start, stop) of a shape as rectangles that are contiguous, with their first element."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start, stop),) if shape else (), start
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last or (start // inner == (stop - 1) // inner and (start % inner or stop % inner)):
        row = start // inner
        for rest, position in _rectangles(start - row * inner, stop - row * inner, shape[1:]):
            yield ((row, row + 1), *rest), position + row * inner
        return
    if start % inner:
        yield from _rectangles(start, first * inner, shape)
    if first < last:
        yield ((first, last), *((0, n) for n in shape[1:])), first * inner
    if stop % inner:
        yield from _rectangles(last * inner, stop, shape)


def _intersect(box: Box, rectangle: tuple[Span, ...], shape: tuple[int, ...], at: int, owned: bool) -> Iterator[Box]:
    """The part of a box inside a contiguous rectangle, row by row where it is not contiguous in the rectangle."""
    spans = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box.local, rectangle)]
    if any(a >= b for a, b in spans):
        return
    sides = [d - c for c, d in rectangle]
    strides = [math.prod(sides[i + 1 :]) for i in range(len(sides))]
    lead = 0  # dims before `tail` are walked one index at a time, so that each yield is contiguous in the shard
    for i in range(len(spans) - 1, -1, -1):
        if spans[i] != rectangle[i]:
            lead = i
            break
    for index in itertools.product(*(range(a, b) for a, b in spans[:lead])):
        part = [(i, i + 1) for i in index] + spans[lead:]
        position = at + sum((a - c) * s for (a, _), (c, _), s in zip(part, rectangle, strides))
        full = tuple((a - lo + f, b - lo + f) for (a, b), (lo, _), (f, _) in zip(part, box.local, box.full))
        count = math.prod(b - a for a, b in part)
        yield Box(full, ((position, position + count),), box.owned and owned)
