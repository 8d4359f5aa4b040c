"""Saving: each rank writes the boxes that it owns, rank 0 the manifest that names them all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lindos.checkpoint.files import Writer, naming, write_text
from lindos.checkpoint.publish import publish
from lindos.comm.world import World
from lindos.core.errors import CheckpointError
from lindos.core.layout import Box, Layout
from lindos.core.units import text_of_bytes

VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Piece:
    """One tensor of a run as this rank holds it.

    Attributes:
        name: parameter or buffer name; states as `parameter/state`.
        kind: parameter, buffer or state.
        layout: which part of the full tensor `local` is.
        local: this rank's part.
    """

    name: str
    kind: str
    layout: Layout
    local: torch.Tensor


def save(path: str | Path, pieces: Sequence[Piece], facts: dict[str, Any], world: World) -> None:
    """Write a checkpoint; complete or absent.

    Args:
        facts: JSON for everything that is no tensor: step, seed, cursor, groups, versions.

    Communicates: four exchanges through the store.

    Raises:
        CheckpointError: the path exists, the disk is full or fails (with path, errno, rank and bytes).
        InputError: `facts` is no JSON.
    """
    path = Path(path)

    def write(folder: Path) -> None:
        parts = [(piece, box) for piece in pieces for box in piece.layout.owned_boxes(world.mesh)]
        _check_room(folder, sum(box.numel * piece.local.dtype.itemsize for piece, box in parts))
        file = f"rank-{world.rank:05d}.safetensors"
        announced = {key_of(piece.name, box): (box.shape, piece.local.dtype) for piece, box in parts}
        writer = Writer(folder / file, announced)
        records: dict[str, list[Any]] = {}
        for piece, box in parts:
            key = key_of(piece.name, box)
            local = piece.local[tuple(slice(a, b) for a, b in box.local)] if box.local else piece.local
            hashed = writer.put(key, local.reshape(box.shape))
            records.setdefault(piece.name, []).append({"file": file, "key": key, "box": box.full, "hash": hashed})
        writer.close()
        write_text(folder / f"rank-{world.rank:05d}.json", json.dumps(records))

    def finish(folder: Path) -> None:
        tensors = {
            piece.name: {
                "kind": piece.kind,
                "shape": piece.layout.shape,
                "dtype": str(piece.local.dtype).removeprefix("torch."),
                "boxes": [],
            }
            for piece in pieces
        }
        for rank in range(world.size):
            index = folder / f"rank-{rank:05d}.json"
            with naming(index):
                records = json.loads(index.read_text())
                os.remove(index)
            for name, boxes in records.items():
                tensors[name]["boxes"] += boxes
        write_text(folder / MANIFEST, json.dumps({"version": VERSION, **facts, "tensors": tensors}, indent=1))

    publish(path, world, write, finish)


def key_of(name: str, box: Box) -> str:
    """Key of a box in its file: the name and where it starts."""
    return f"{name}@{','.join(str(a) for a, _ in box.full)}" if box.full else name


def _check_room(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"{folder.parent} has {text_of_bytes(free_bytes)} free; this rank writes {text_of_bytes(needed_bytes)}. "
            "Nothing was published; earlier checkpoints are as they were."
        )
