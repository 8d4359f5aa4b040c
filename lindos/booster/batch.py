"""A batch on its way into a step: checked, moved, digested, and cut into micro-batches."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from lindos.core.errors import InputError

IGNORED = -100


def rows_of(batch: Mapping[str, Any], micro_batches: int) -> int:
    """Rows of a batch: dim 0 of its tensors.

    Raises:
        InputError: no dict, no tensor, tensors of different rows (named), fewer rows than micro_batches.
    """
    if not isinstance(batch, Mapping):
        raise InputError(f"a batch is a dict of tensors; got {type(batch).__name__}.")
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    sizes = {name: value.shape[0] for name, value in tensors.items() if value.dim()}
    if not tensors:
        raise InputError(f"a batch holds at least one tensor; got {sorted(batch)}.")
    first = next((name for name in ("input_ids", "pixel_values", "inputs_embeds", "labels") if name in sizes), None)
    rows = sizes[first] if first else max(sizes.values(), default=1)
    for name, value in tensors.items():
        if value.dim() == 0 or value.shape[0] not in (1, rows):
            raise InputError(
                f"batch[{name!r}] has shape {list(value.shape)}; dim 0 must be the {rows} rows of the batch, or "
                f"1 for a "
                "tensor that goes whole to each micro-batch."
            )
    if rows < micro_batches:
        raise InputError(
            f"a batch of {rows} rows cannot be cut into micro_batches={micro_batches}. Give at least as many rows."
        )
    return rows


def move(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Tensors on the device."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def cut(batch: Mapping[str, Any], rows: int, micro_batches: int) -> list[dict[str, Any]]:
    """Micro-batches as even as possible; tensors with dim 0 = 1 and other values go whole to each."""
    borders = [rows * i // micro_batches for i in range(micro_batches + 1)]
    return [
        {
            name: value[a:b] if isinstance(value, torch.Tensor) and value.shape[0] == rows and rows > 1 else value
            for name, value in batch.items()
        }
        for a, b in itertools.pairwise(borders)
    ]


def digest(batch: Mapping[str, Any]) -> int:
    """A number of a batch's contents, equal for equal batches."""
    total = 0
    for name in sorted(batch):
        value = batch[name]
        if isinstance(value, torch.Tensor):
            data = value.detach().cpu().contiguous()
            raw = data.view(-1).view(torch.uint8).numpy() if data.numel() else b""
            total = zlib.crc32(f"{name}{tuple(data.shape)}{data.dtype}".encode(), zlib.crc32(raw, total))
        else:
            total = zlib.crc32(
                f"{name}{value!r}".encode() if isinstance(value, str | int | float | bool | None) else name.encode(),
                total,
            )
    return total


def shift(labels: torch.Tensor) -> torch.Tensor:
    """Labels aligned with the positions that predict them: shifted left by one, -100 at the end."""
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)
