"""Whole tensors from parts: one tensor at a time, by the boxes of its layout."""

from __future__ import annotations

import math

import torch

from lindos.comm.world import World
from lindos.core.layout import Box, Layout


def take(full: torch.Tensor, layout: Layout, world: World, out: torch.Tensor) -> None:
    """Copy this rank's part of a full tensor into `out`; padding becomes zeros."""
    boxes = layout.boxes(world.mesh)
    if sum(box.numel for box in boxes) < out.numel():
        out.zero_()
    for box in boxes:
        place(full[tuple(slice(a, b) for a, b in box.full)], box, out)


def place(part: torch.Tensor, box: Box, out: torch.Tensor) -> None:
    """Put the values of a box into the local tensor."""
    target = out[tuple(slice(a, b) for a, b in box.local)] if box.local else out
    target.copy_(part.reshape(target.shape))


def whole(local: torch.Tensor, layout: Layout, world: World, name: str) -> torch.Tensor:
    """The full tensor on every rank of the axes that cut it, in its own memory.

    Communicates: all_gather over the axes of the layout, padded to the largest part.
    """
    if not layout.cuts:
        return local.detach().clone()
    mesh = world.mesh
    ranks = mesh.group(layout.axes)
    sizes = [math.prod(layout.local_shape(mesh, rank)) for rank in ranks]
    flat = local.detach().reshape(-1)
    if flat.numel() < max(sizes):
        flat = torch.cat([flat, flat.new_zeros(max(sizes) - flat.numel())])
    parts = world.all_gather(flat[None], layout.axes, 0, f"whole {name}")
    full = local.new_empty(layout.shape)
    for part, rank, size in zip(parts, ranks, sizes):
        theirs = part[:size].view(layout.local_shape(mesh, rank))
        for box in layout.boxes(mesh, rank):
            target = full[tuple(slice(a, b) for a, b in box.full)]
            source = theirs[tuple(slice(a, b) for a, b in box.local)] if box.local else theirs
            target.copy_(source.reshape(target.shape))
    return full
