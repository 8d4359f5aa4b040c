"""Layouts to draw, and a second way to say what a rank holds: an array of element numbers, sliced cut by cut."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from hypothesis import strategies as st

from lindos.core.layout import Box, Cut, Layout, Pieces, by_units, fused, shared
from lindos.core.mesh import Mesh

PADDING = -1


def numbers_of(layout: Layout) -> np.ndarray:
    return np.arange(math.prod(layout.shape)).reshape(layout.shape)


def expected_local(layout: Layout, mesh: Mesh, rank: int) -> np.ndarray:
    """The element numbers that a rank stores, PADDING where it stores none."""
    local = numbers_of(layout)
    for cut in layout.cuts:
        if cut.dim == "flat":
            local, dim = local.reshape(-1), 0
        else:
            dim = cut.dim
        size, coordinate = local.shape[dim], mesh.coordinate(cut.axis, rank)
        if cut.pieces is None:
            step = math.ceil(size / cut.parts)
            spans: Iterable[tuple[int, int]] = [(coordinate * step, (coordinate + 1) * step)]
        else:
            spans = cut.pieces[coordinate]
        local = np.concatenate([_taken(local, dim, start, stop) for start, stop in spans] or [local[:0]], dim)
    return local


def _taken(local: np.ndarray, dim: int, start: int, stop: int) -> np.ndarray:
    kept = np.take(local, range(min(start, local.shape[dim]), min(stop, local.shape[dim])), dim)
    missing = [(0, stop - start - kept.shape[i] if i == dim else 0) for i in range(local.ndim)]
    return np.pad(kept, missing, constant_values=PADDING)


def slices(spans: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in spans)


def scattered(full: np.ndarray, local_shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """A local tensor filled through boxes. An element written twice becomes neither of its values."""
    local, times = np.full(local_shape, PADDING), np.zeros(local_shape, int)
    for box in boxes:
        local[slices(box.local)] = full[slices(box.full)].reshape(local[slices(box.local)].shape)
        times[slices(box.local)] += 1
    assert times.max(initial=0) <= 1, "local boxes overlap"
    return local


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Up to three base axes, one of them also viewed as a product."""
    names = draw(st.permutations(["dp", "sp", "tp"]))[: draw(st.integers(1, 3))]
    mesh = Mesh.of(**{name: draw(st.integers(1, 4)) for name in names})
    if draw(st.booleans()):
        name, (major, minor) = draw(st.sampled_from(names)), draw(st.sampled_from([(2, 2), (1, 3), (2, 3), (3, 2)]))
        sizes = {axis.name: axis.size for axis in mesh.axes} | {name: major * minor}
        mesh = Mesh.of(**sizes).split(name, row=major, col=minor)
    return mesh


def cut_axes(draw: st.DrawFn, mesh: Mesh) -> list[str | tuple[str, ...]]:
    """Disjoint axes, each to be cut by once, some of them joined in products."""
    names = [axis.name for axis in mesh.base]
    split = next((axis.parent for axis in mesh.axes if axis.parent), None)
    if split and draw(st.booleans()):
        names.remove(split)
        names += ["row", "col"]
    names = draw(st.permutations(names))[: draw(st.integers(0, len(names)))]
    if len(names) > 1 and draw(st.booleans()):
        return [tuple(names[:2]), *names[2:]]
    return list(names)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Mesh, Layout]:
    """A mesh, and a layout with every kind of cut in any order that has a meaning."""
    mesh = draw(meshes())
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 12]), max_size=3)))
    layout, sizes, flat = Layout(shape), list[int | None](shape), False
    for axes in cut_axes(draw, mesh):
        parts = mesh.size(axes)
        flat = flat or not shape or draw(st.integers(0, 2)) == 0
        dim = "flat" if flat else draw(st.integers(0, len(shape) - 1))
        if flat and sizes != [None]:
            sizes = [math.prod(size for size in sizes if size is not None) if None not in sizes else None]
        at = 0 if dim == "flat" else dim
        pieces, sizes[at] = _pieces(draw, sizes[at], parts)
        layout = layout.then(Cut(axes, dim, parts, pieces))
    return mesh, layout


def _pieces(draw: st.DrawFn, size: int | None, parts: int) -> tuple[Pieces | None, int | None]:
    """Some way to cut a dim of `size`, and the size of each part where all are equal."""
    kinds = ["even"]
    if size is not None:
        kinds += ["units", "past"]
        kinds += ["fused"] * (size % parts == 0 and size > parts)
        kinds += [f"shared {heads}" for heads in range(1, parts) if parts % heads == 0 == size % heads and size]
    kind = draw(st.sampled_from(kinds))
    if kind == "even":
        return None, None if size is None else -(-size // parts)
    assert size is not None
    if kind == "fused":
        first = draw(st.integers(1, size // parts)) * parts
        return fused((first, size - first) if first < size else (first,), parts), size // parts
    if kind.startswith("shared"):
        heads = int(kind.split()[1])
        return shared(heads, size // heads, parts), size // heads
    borders = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
    counts = tuple(b - a for a, b in zip([0, *borders], [*borders, size]))
    if kind == "past":
        counts = (*counts[:-1], counts[-1] + draw(st.integers(0, 2)))
    return by_units(counts, 1), None
