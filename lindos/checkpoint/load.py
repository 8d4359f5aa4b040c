"""Loading: the boxes that a rank needs, cut out of the boxes that were saved, whatever plan wrote them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lindos.checkpoint.files import bytes_of, hash_of
from lindos.checkpoint.save import MANIFEST, VERSION, Piece
from lindos.comm.world import World
from lindos.core.errors import CheckpointError, LindosError
from lindos.core.layout import Box


def manifest_of(path: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: no checkpoint, an incomplete or truncated one, or one of another version.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}.")
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path} holds no {MANIFEST}: it is no complete checkpoint of lindos.")
    try:
        manifest = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is truncated or damaged: {error}.") from None
    if not isinstance(manifest, dict) or manifest.get("version") != VERSION or "tensors" not in manifest:
        raise CheckpointError(f"{file} is no manifest of version {VERSION}.")
    return manifest


def load(path: str | Path, manifest: dict[str, Any], pieces: Sequence[Piece], world: World) -> None:
    """Fill the pieces' local tensors from a checkpoint. All ranks verify a share of it before any value changes.

    Communicates: two exchanges through the store.

    Raises:
        CheckpointError: a tensor is missing, extra or of another shape (the first is named), a file is truncated, a
            hash differs (file and tensor named).
    """
    error: LindosError | None = None
    try:
        _check_same(Path(path), manifest, pieces)
        _verify(Path(path), manifest, world)
    except LindosError as found:
        error = found
    world.agree(error, "verify checkpoint")
    for piece in pieces:
        _fill(Path(path), manifest["tensors"][piece.name], piece, world)
    world.barrier("checkpoint loaded")


def _check_same(path: Path, manifest: dict[str, Any], pieces: Sequence[Piece]) -> None:
    saved = manifest["tensors"]
    for piece in pieces:
        if piece.name not in saved:
            raise CheckpointError(f"{path} lacks {piece.kind} {piece.name!r}: it is of another model or optimizer.")
        shape = tuple(saved[piece.name]["shape"])
        if shape != piece.layout.shape:
            raise CheckpointError(
                f"{path}: {piece.kind} {piece.name!r} is {list(shape)} in the checkpoint, "
                f"{list(piece.layout.shape)} in the model."
            )
    kinds = {piece.kind for piece in pieces}
    names = {piece.name for piece in pieces}
    extra = next((name for name, facts in saved.items() if facts["kind"] in kinds and name not in names), None)
    if extra:
        raise CheckpointError(
            f"{path} holds {saved[extra]['kind']} {extra!r} that the model lacks: it is of another model."
        )


def _verify(path: Path, manifest: dict[str, Any], world: World) -> None:
    """This rank's share of all boxes, whole, against their hashes."""
    boxes = [(name, box) for name, facts in manifest["tensors"].items() for box in facts["boxes"]]
    for name, box in boxes[world.rank :: world.size]:
        with _opened(path / box["file"]) as file:
            try:
                tensor = file.get_tensor(box["key"])
            except SafetensorError:
                raise CheckpointError(f"{path / box['file']} lacks tensor {box['key']!r}.") from None
        if hash_of(bytes_of(tensor)) != box["hash"]:
            raise CheckpointError(
                f"{path / box['file']}: the bytes of {name!r} are damaged (their hash differs from the manifest)."
            )
    for name, facts in manifest["tensors"].items():
        have = sum(Box(tuple(map(tuple, b["box"])), (), True).numel for b in facts["boxes"])
        if have != torch.Size(facts["shape"]).numel():
            raise CheckpointError(
                f"{path / MANIFEST}: the boxes of {name!r} do not add up to its shape {facts['shape']}."
            )


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is missing, truncated or damaged: {error}.") from None


def _fill(path: Path, facts: dict[str, Any], piece: Piece, world: World) -> None:
    """Every overlap of a wanted box with a saved one."""
    for box in piece.layout.boxes(world.mesh):
        for saved in facts["boxes"]:
            part = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box.full, saved["box"])]
            if any(a >= b for a, b in part):
                continue
            with _opened(path / saved["file"]) as file:
                if not part:
                    piece.local.copy_(file.get_tensor(saved["key"]).reshape(piece.local.shape))
                    continue
                source = file.get_slice(saved["key"])
                values = source[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, saved["box"]))]
            _place(values, part, box, piece.local)


def _place(values: torch.Tensor, part: list[tuple[int, int]], box: Box, local: torch.Tensor) -> None:
    target = local[tuple(slice(a, b) for a, b in box.local)].view(box.shape)
    target[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, box.full))] = values.to(local)
