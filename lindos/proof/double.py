"""Double: fp64 that stays fp64, although the model casts to fp32 by itself.

Models of transformers compute norms, softmaxes, routers and rotary tables in fp32 whatever their own dtype is. In an
fp64 proof each such cast throws away half of the digits: two equal plans that sum in another order then differ by
1e-7, and a real fault of that size hides. Under this mode what is asked for in fp32 is made in fp64 instead, which
brings the noise between two right plans back to about 1e-15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map


class Double(TorchDispatchMode):
    """Runs operators so that none makes a new fp32 tensor: `dtype=torch.float32` becomes fp64, so does the default.

    Enter it around the forward and the backward of a model that is fp64 throughout; tensors that are fp32 already stay
    so in place. Casts arrive here as `aten._to_copy`, whose derivative casts back to the dtype of its input, so the
    backward is fp64 as well.

    The library under proof must not be lifted with the model: `outside` runs its functions as they are, so that an
    accumulation in fp32 that should be fp64 still shows.

    Example:
        >>> with Double():
        ...     torch.ones(2, dtype=torch.float64).float().dtype
        torch.float64
    """

    paused = 0

    def outside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, run as if this mode were not there."""

        @functools.wraps(function)
        def plain(*args: Any, **kwargs: Any) -> Any:
            self.paused += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.paused -= 1

        return plain

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if self.paused:
            return func(*args, **kwargs)
        values = [*args, *kwargs.values()]
        if any(isinstance(value, list | tuple) for value in values):
            values = tree_flatten(values)[0]
        fresh = not any(isinstance(value, torch.Tensor) for value in values)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        elif fresh and any(isinstance(value, float) for value in values) and _takes_dtype(func):
            kwargs.setdefault("dtype", torch.float64)  # torch.full((), 1e300) would overflow before it is cast
        out = func(*args, **kwargs)
        # What no fp32 tensor went into took the default dtype: torch.zeros(3), positions / 2. torch.tensor(0.5) is
        # built elsewhere and only passes through lift_fresh.
        if func is torch.ops.aten.lift_fresh.default or not any(map(_is_single, values)):
            out = tree_map(lambda x: x.double() if _is_single(x) else x, out)
        return out


def _takes_dtype(func: Any) -> bool:
    return any(argument.name == "dtype" for argument in func._schema.arguments)


def _is_single(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype is torch.float32
