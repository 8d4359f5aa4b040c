"""Mesh: the ordered named axes on which ranks stand. A pure value: a plan for 4,096 ranks costs nothing to think about.

A rank number is a sum of coordinate x stride over the axes, the last axis with stride 1:

    Mesh.of(pp=2, dp=2, tp=2)          rank = 4 pp + 2 dp + tp

An axis can also be viewed as a product of sub-axes. `mesh.split("tp", row=2, col=2)` adds the axes `row` and `col`
beside `tp`: a sub-axis is only another (size, stride), so groups over any subset of axes, adjacent or not, come from
one rule, and one axis may be viewed in several ways at once (row x col for weights, held x shared for kv heads).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from lindos.core.errors import InputError, nearest

Axes = str | tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """`coordinate = rank // stride % size`. `parent` is the axis that a sub-axis views, else None."""

    name: str
    size: int
    stride: int
    parent: str | None = None


@dataclass(frozen=True)
class Mesh:
    """Named axes, coordinates, ranks and groups.

    Attributes:
        axes: all axes, base axes major to minor, then sub-axes in the order of their splits.
        rank: this process's rank, where the mesh belongs to one; None in planning.
    """

    axes: tuple[Axis, ...]
    rank: int | None = None

    @staticmethod
    def of(rank: int | None = None, **sizes: int) -> Mesh:
        """A mesh from sizes, major axis first: `Mesh.of(dp=4, tp=2)`."""
        _check_sizes(sizes)
        stride, axes = math.prod(sizes.values()), []
        for name, size in sizes.items():
            stride //= size
            axes.append(Axis(name, size, stride))
        return Mesh(tuple(axes), rank)

    @property
    def base(self) -> tuple[Axis, ...]:
        """The axes that multiply to the world size."""
        return tuple(axis for axis in self.axes if axis.parent is None)

    @property
    def world_size(self) -> int:
        return math.prod(axis.size for axis in self.base)

    def axis(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise InputError(f"the mesh has no axis {name!r}: {nearest(name, [axis.name for axis in self.axes])}.")

    def size(self, axes: Axes) -> int:
        """Number of coordinates of an axis, or of the product of several."""
        return math.prod(self.axis(name).size for name in _names(axes))

    def coordinate(self, axes: Axes, rank: int | None = None) -> int:
        """Coordinate of a rank (default: this one) on an axis, or its index in the product, major first."""
        rank = self._rank(rank)
        index = 0
        for name in _names(axes):
            axis = self.axis(name)
            index = index * axis.size + rank // axis.stride % axis.size
        return index

    def group(self, axes: Axes, rank: int | None = None) -> tuple[int, ...]:
        """Ranks that differ from `rank` at most in these axes, in the order of their index on them."""
        rank = self._rank(rank)
        chosen = [self.axis(name) for name in _names(axes)]
        self._check_disjoint(chosen)
        home = rank - sum(rank // axis.stride % axis.size * axis.stride for axis in chosen)
        steps = [[c * axis.stride for c in range(axis.size)] for axis in chosen]
        return tuple(home + sum(step) for step in itertools.product(*steps))

    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """All groups over these axes; every rank is in exactly one."""
        seen: dict[int, tuple[int, ...]] = {}
        for rank in range(self.world_size):
            if rank not in seen:
                group = self.group(axes, rank)
                seen.update(dict.fromkeys(group, group))
        return tuple(dict.fromkeys(seen.values()))

    def split(self, axis: str, **sizes: int) -> Mesh:
        """The same mesh with sub-axes of `axis`, major first; their sizes multiply to its size.

        A sub-axis that is there already, with the same size and stride, is kept; with others it is an error.
        """
        parent = self.axis(axis)
        _check_sizes(sizes)
        if math.prod(sizes.values()) != parent.size:
            raise InputError(
                f"sub-axes of {axis!r} must multiply to its size {parent.size}; got "
                + " x ".join(f"{name}={size}" for name, size in sizes.items())
                + "."
            )
        stride, axes = parent.size * parent.stride, list(self.axes)
        for name, size in sizes.items():
            stride //= size
            made = Axis(name, size, stride, axis)
            known = next((a for a in axes if a.name == name), None)
            if known is None:
                axes.append(made)
            elif known != made:
                raise InputError(f"the mesh already has an axis {name!r} of another size or place: {known}.")
        return replace(self, axes=tuple(axes))

    def at(self, rank: int) -> Mesh:
        """The same mesh as seen by `rank`."""
        return replace(self, rank=rank)

    def _rank(self, rank: int | None) -> int:
        rank = self.rank if rank is None else rank
        if rank is None:
            raise InputError("this mesh carries no rank: give rank=.")
        if not 0 <= rank < self.world_size:
            raise InputError(f"a rank of this mesh is in 0..{self.world_size - 1}; got {rank}.")
        return rank

    def _check_disjoint(self, axes: list[Axis]) -> None:
        """A product of axes names each rank once if and only if each stride is a multiple of the span below it."""
        low_to_high = sorted((axis for axis in axes if axis.size > 1), key=lambda axis: axis.stride)
        for low, high in itertools.pairwise(low_to_high):
            if high.stride % (low.stride * low.size):
                raise InputError(f"axes {[axis.name for axis in axes]} overlap: {low.name!r} and {high.name!r} share.")

    def __str__(self) -> str:
        return " x ".join(f"{axis.name}={axis.size}" for axis in self.base)


def _check_sizes(sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise InputError(f"the size of axis {name!r} must be an integer of at least 1; got {size!r}.")


def _names(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)
