"""The norm: each rank adds the squares of what it owns; one all-reduce over the world for all tensors.

Dividing by a replication count is wrong when only part of a tensor is shared; ownership by element never is.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lindos.comm.world import World
from lindos.core.layout import Box, Layout
from lindos.core.mesh import Mesh


def owned_squares(tensors: Iterable[tuple[Layout, torch.Tensor]], mesh: Mesh) -> torch.Tensor:
    """Sum of squares, fp64 scalar, of the elements that this rank owns of local tensors."""
    parts: list[torch.Tensor] = []
    device = None
    for layout, tensor in tensors:
        device = tensor.device
        for box in layout.boxes(mesh):
            if box.owned:
                parts.append(_part(tensor, box))
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(parts)
    return torch.stack([norm.double() for norm in norms]).square().sum()


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    if all(span == (0, size) for span, size in zip(box.local, tensor.shape)):
        return tensor
    return tensor[tuple(slice(a, b) for a, b in box.local)]


def total_norm(tensors: Iterable[tuple[Layout, torch.Tensor]], world: World, name: str = "norm") -> torch.Tensor:
    """Euclidean norm, fp64 scalar, of full tensors that ranks hold in parts; each element counted once.

    Communicates: all_reduce of one number over the world.
    """
    return world.all_reduce(owned_squares(tensors, world.mesh), world.all, name).sqrt()


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients are multiplied by: max_norm / (norm + 1e-6), at most 1, as torch's clip_grad_norm_ does."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
