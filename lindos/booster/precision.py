"""Precision: for each stored dtype, what is computed with and what is stepped and summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lindos.core.errors import InputError, RefusedError, nearest

NAMES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Precision:
    """fp32: compute, masters and reductions in fp32 (fp64 models stay fp64).

    bf16: compute in bf16, the rest in fp32.
    """

    name: str

    @staticmethod
    def of(name: str) -> Precision:
        """
        Raises:
            InputError: no such precision; names the nearest.
            RefusedError: not served yet.
        """
        if name not in NAMES:
            raise InputError(f"precision={name!r}: {nearest(str(name), NAMES)}.")
        if name == "fp16":
            raise RefusedError("precision='fp16' is not served yet. Use 'bf16' or 'fp32'.")
        return Precision(name)

    def dtypes(self, stored: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """(compute, master) of a parameter stored in a dtype; masters take it exactly."""
        if not stored.is_floating_point:
            return stored, stored
        if self.name == "bf16":
            return torch.bfloat16, torch.float32
        wide = torch.float64 if stored == torch.float64 else torch.float32
        return wide, wide

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        """An input of a batch as the model computes with it."""
        if self.name == "bf16" and x.is_floating_point():
            return x.to(torch.bfloat16)
        return x

    def text(self) -> str:
        compute, master = (str(d).removeprefix("torch.") for d in self.dtypes(torch.float32))
        return f"precision {self.name}: computed in {compute}, stored, reduced and stepped in {master}"
