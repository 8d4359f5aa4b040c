"""What crosses the border between R and P, as autograd pairs. Each is the adjoint of its partner.

`enter` and `leave` read the table: where R is whole over the inner axes, entering is a copy whose gradients are summed
and leaving is a sum; where R is cut by features they are a gather and a scatter.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from lindos.comm.world import World
from lindos.core.mesh import Axes


class _Copy(torch.autograd.Function):
    """Identity forward, sum backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World, axes: Axes, name: str) -> torch.Tensor:
        ctx.world, ctx.axes, ctx.name = world, axes, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.world.all_reduce(dy, ctx.axes, ctx.name, fresh=True), None, None, None


class _Sum(torch.autograd.Function):
    """Sum forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World, axes: Axes, name: str) -> torch.Tensor:
        return world.all_reduce(x, axes, name, fresh=True)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return dy, None, None, None


class _Gather(torch.autograd.Function):
    """Join along a dim forward; backward the own slice (`same`), or the sum of all ranks' slices."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, world: World, axes: Axes, dim: int, name: str, partial: bool
    ) -> torch.Tensor:
        ctx.world, ctx.axes, ctx.dim, ctx.name, ctx.partial = world, axes, dim, name, partial
        return world.all_gather(x, axes, dim, name)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.partial:
            dx = ctx.world.reduce_scatter(dy, ctx.axes, ctx.dim, ctx.name)
        else:
            n = ctx.world.mesh.size(ctx.axes)
            dx = dy.chunk(n, ctx.dim)[ctx.world.mesh.coordinate(ctx.axes)]
        return dx, None, None, None, None, None


class _Slice(torch.autograd.Function):
    """The own part along a dim forward, joined backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World, axes: Axes, dim: int, name: str) -> torch.Tensor:
        ctx.world, ctx.axes, ctx.dim, ctx.name = world, axes, dim, name
        n = world.mesh.size(axes)
        return x.chunk(n, dim)[world.mesh.coordinate(axes)].contiguous()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.world.all_gather(dy, ctx.axes, ctx.dim, ctx.name), None, None, None, None


def copy(x: torch.Tensor, world: World, axes: Axes, name: str) -> torch.Tensor:
    """x on every rank of the axes; its gradient is the sum of theirs.

    Communicates: all_reduce of x's gradient in backward.
    """
    return _Copy.apply(x, world, axes, name)


def total(x: torch.Tensor, world: World, axes: Axes, name: str) -> torch.Tensor:
    """Sum of the ranks' x; the gradient passes unchanged.

    Communicates: all_reduce of x in forward.
    """
    return _Sum.apply(x, world, axes, name)


def gather(x: torch.Tensor, world: World, axes: Axes, dim: int, name: str, partial: bool = False) -> torch.Tensor:
    """The ranks' parts joined along dim.

    Args:
        partial: whether ranks use the result differently, so that their gradients are parts of a sum. If they all
            compute the same with it (`partial=False`), each takes its own slice of the gradient.

    Communicates: all_gather of the result in forward; reduce_scatter in backward if partial.
    """
    return _Gather.apply(x, world, axes, dim, name, partial)


def split(x: torch.Tensor, world: World, axes: Axes, dim: int, name: str) -> torch.Tensor:
    """The own even part of x along dim, of an x that all ranks hold alike.

    Communicates: all_gather of the gradient in backward.
    """
    return _Slice.apply(x, world, axes, dim, name)


class Shared:
    """One copy for all that read the same input: q, k and v, or gate and up, share one sum of gradients.

    Holds the last input weakly and its copy for as long as the input lives.
    """

    def __init__(self, world: World, axes: Axes) -> None:
        self.world, self.axes = world, axes
        self._key: weakref.ref | None = None
        self._made: tuple[torch.Tensor, int, bool] | None = None

    def enter(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """The input of a column role: x, with its gradients summed over the inner axes once."""
        made = self._made
        if made and self._key is not None and self._key() is x and made[1:] == (x._version, torch.is_grad_enabled()):
            return made[0]
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        y = copy(x, self.world, self.axes, name)
        self._made = (y, x._version, True)
        self._key = weakref.ref(x, self._forget)
        return y

    def _forget(self, key: Any) -> None:
        if self._key is key:
            self._key = self._made = None
