"""A norm over features that are cut: its own forward runs, and what it reduces over the last dim is summed over tp.

Works for every class that takes mean, sum, var, layer_norm or rms_norm over the last dim of its input, gated ones too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lindos.comm.world import World
from lindos.core.errors import RefusedError
from lindos.core.mesh import Axes
from lindos.parallel.tensor import ops

SUMS = (torch.sum, torch.Tensor.sum)
MEANS = (torch.mean, torch.Tensor.mean)
OTHERS = (
    torch.amax, torch.Tensor.amax, torch.max, torch.Tensor.max, torch.linalg.norm, torch.linalg.vector_norm, torch.var,
    torch.Tensor.var, torch.std, torch.Tensor.std, torch.var_mean, torch.norm, torch.Tensor.norm, F.normalize,
    F.group_norm,
)  # fmt: skip


class Spread(TorchFunctionMode):
    """While active, reductions over the last dim are over the features of all ranks.

    Attributes:
        features: how many there are in all.
        world, axes, name: of the collective.
    """

    def __init__(self, features: int, world: World, axes: Axes, name: str) -> None:
        super().__init__()
        self.features, self.world, self.axes, self.name = features, world, axes, name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (*MEANS, *SUMS) and not _over_last(*args, **kwargs):
            raise RefusedError(f"{self.name}: a norm that reduces over more than the last dim cannot be cut.")
        if func in MEANS:
            dtype, x = kwargs.get("dtype"), args[0] if args else kwargs["input"]
            x = x if dtype is None else x.to(dtype)
            return self._mean(x, kwargs.get("keepdim", len(args) > 2 and bool(args[2])))
        if func in SUMS:
            return self._both(func(*args, **kwargs))
        if func is F.layer_norm:
            return self._layer_norm(*args, **kwargs)
        if func is F.rms_norm:
            return self._rms_norm(*args, **kwargs)
        if func in OTHERS:
            raise RefusedError(f"{self.name}: a norm by {func.__name__} cannot be taken over features that are cut.")
        return func(*args, **kwargs)

    def _both(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks forward, and of its gradient: each rank reads it for its own features only."""
        return ops.copy(ops.total(x, self.world, self.axes, self.name), self.world, self.axes, self.name)

    def _mean(self, x: torch.Tensor, keepdim: bool = True) -> torch.Tensor:
        return self._both(x.sum(-1, keepdim=keepdim)) / self.features

    def _layer_norm(
        self, input: torch.Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> torch.Tensor:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        centred = wide - self._mean(wide)
        y = (centred * torch.rsqrt(self._mean(centred * centred) + eps)).to(input.dtype)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    def _rms_norm(
        self, input: torch.Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
    ) -> torch.Tensor:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        eps = torch.finfo(input.dtype).eps if eps is None else eps
        y = (wide * torch.rsqrt(self._mean(wide * wide) + eps)).to(input.dtype)
        return y if weight is None else y * weight


def _over_last(input: torch.Tensor, dim: Any = None, *_: Any, **__: Any) -> bool:
    x = input
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    return len(dims) == 1 and isinstance(dims[0], int) and dims[0] % x.dim() == x.dim() - 1


def spread(
    own: Callable[..., torch.Tensor], features: int, world: World, axes: Axes, name: str
) -> Callable[..., torch.Tensor]:
    """A norm's own forward over the features of all ranks.

    Communicates: all_reduce of each statistic over axes, forward and backward.
    """

    def forward(*inputs: Any, **options: Any) -> torch.Tensor:
        with Spread(features, world, axes, name):
            return own(*inputs, **options)

    return forward
