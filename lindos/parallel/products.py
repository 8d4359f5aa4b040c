"""Products in bf16 where the processor has none: through fp32, with the same rounding.

A bf16 product accumulates in fp32 and rounds once. On a CPU without bf16 units torch emulates it, ten to fifty times
slower than an fp32 product of the same operands (benchmarks/products.py); operands widened to fp32 are exact, so the
fp32 product rounded to bf16 is the same number up to the order of its sums.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

UNITS = ("avx512_bf16", "amx_bf16", "bf16")  # as /proc/cpuinfo names them on x86 and on Arm


@functools.cache
def emulated() -> bool:
    """Whether this CPU computes bf16 products by emulation; False where that cannot be told."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    lines = (line for line in text.splitlines() if line.lower().startswith(("flags", "features")))
    flags = set(next(lines, "bf16").replace(":", " ").split())
    return not flags & set(UNITS)


class _Wide(torch.autograd.Function):
    """y = x W^T in bf16; keeps bf16 operands, widens them for each product."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float()).bfloat16()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        wide = dy.float()
        dx = (wide @ weight.float()).bfloat16() if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = (wide.flatten(0, -2).t() @ x.float().flatten(0, -2)).bfloat16()
        return dx, dw


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`, through fp32 for bf16 operands on a CPU without bf16 units."""
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or x.device.type != "cpu" or not emulated():
        return F.linear(x, weight, bias)
    y = _Wide.apply(x, weight)
    return y if bias is None else y + bias


def linear_forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """nn.Linear's forward by `linear`."""
    return linear(x, module.weight, module.bias)


def install(model: nn.Module) -> None:
    """Give every plain nn.Linear that has no forward of its own the product above."""
    for module in model.modules():
        if type(module).forward is nn.Linear.forward and "forward" not in module.__dict__:
            module.forward = functools.partial(linear_forward, module)  # type: ignore[method-assign]
