"""Safetensors files written as a stream: the header first, from shapes alone, then one tensor after the other.

Nothing is collected in memory, and a failed write is an OSError with its errno, which the error message carries.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lindos.core.errors import CheckpointError

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64",
}  # fmt: skip


class Writer:
    """One safetensors file. Tensors are put in the order in which they were announced.

    Args:
        path: file to create.
        tensors: (shape, dtype) of every tensor by key, in order.
        metadata: text pairs for the header.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self._keys, self._tensors = path, iter(tensors), dict(tensors)
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for key, (shape, dtype) in tensors.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[key] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.size_bytes = end + len(text) + 8
        with self._named():
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
            self._file.write(len(text).to_bytes(8, "little") + text)

    def put(self, key: str, tensor: torch.Tensor) -> str:
        """Write the next tensor; returns the hash of its bytes."""
        assert (key, *self._tensors[key]) == (next(self._keys), tuple(tensor.shape), tensor.dtype)
        raw = bytes_of(tensor)
        with self._named():
            view = memoryview(raw)
            while view:
                view = view[self._file.write(view) :]
        return hash_of(raw)

    def close(self) -> None:
        """Force the bytes to the disk."""
        assert next(self._keys, None) is None
        with self._named():
            os.fsync(self._file.fileno())
            self._file.close()

    def _named(self) -> _Named:
        return _Named(self.path, f"{self.size_bytes:,} bytes" if hasattr(self, "size_bytes") else "")


class _Named:
    """An OSError inside becomes a CheckpointError that says which file, how much and why."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what = path, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            raise CheckpointError(
                f"cannot write {self.path} ({self.what}): errno {error.errno}, {os.strerror(error.errno or 0)}. "
                "Nothing was published; earlier checkpoints are as they were."
            ) from error


def naming(path: Path, what: str = "") -> _Named:
    """`with naming(path):` for other writes of a checkpoint."""
    return _Named(path, what)


def bytes_of(tensor: torch.Tensor) -> Any:
    """A buffer over the bytes of a tensor."""
    data = tensor.detach().cpu().contiguous()
    return data.view(-1).view(torch.uint8).numpy() if data.numel() else b""


def hash_of(raw: Any) -> str:
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def sync_folder(path: Path) -> None:
    """Make names in a folder durable."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_text(path: Path, text: str) -> None:
    with naming(path), open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
